"""``python -m kvbench.submit``: rows of the leaderboard."""

from kvbench.submit.command import main
from kvbench.util.door import enter

if __name__ == "__main__":
    raise SystemExit(enter(main))
