"""``python -m kvbench.publish``: sends finished runs and sweeps to Weights & Biases after the fact."""

from kvbench.publish.command import main

if __name__ == "__main__":
    raise SystemExit(main())
