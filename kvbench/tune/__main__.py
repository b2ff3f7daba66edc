"""``python -m kvbench.tune``: a format per layer, keys and values apart, under a budget."""

from kvbench.tune.command import main
from kvbench.util.door import enter

if __name__ == "__main__":
    raise SystemExit(enter(main))
