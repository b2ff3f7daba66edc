"""``python -m kvbench.calibrate``: what method=kvquant needs to know of a model."""

from kvbench.cli.calibrate import main

if __name__ == "__main__":
    raise SystemExit(main())
