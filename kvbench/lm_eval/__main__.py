"""``python -m kvbench.lm_eval run --model kvbench ...``: lm-eval's own command line, with kvbench's caches."""

from kvbench.lm_eval.command import main
from kvbench.util.door import enter

if __name__ == "__main__":
    raise SystemExit(enter(main))
