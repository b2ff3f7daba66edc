"""``python -m kvbench.fit``: the cache formats that fit a model and a card."""

from kvbench.fit.command import main
from kvbench.util.door import enter

if __name__ == "__main__":
    raise SystemExit(enter(main))
