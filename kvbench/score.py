"""``python -m kvbench.score``: scores of other programs' outputs, by the rules of LongBench and GSM8K."""

from kvbench.cli.score import main
from kvbench.util.door import enter

if __name__ == "__main__":
    raise SystemExit(enter(main))
