"""``python -m kvbench.publish``: sends finished runs and sweeps to Weights & Biases after the fact."""

from kvbench.publish.command import main
from kvbench.util.door import enter

if __name__ == "__main__":
    raise SystemExit(enter(main))
