"""``python -m kvbench.report``: lists, results and comparisons of stored runs."""

from kvbench.cli.report import main
from kvbench.util.door import enter

if __name__ == "__main__":
    raise SystemExit(enter(main))
