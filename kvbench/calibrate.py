"""``python -m kvbench.calibrate``: computation of the calibration file that method=kvquant needs for a model."""

from kvbench.cli.calibrate import main

if __name__ == "__main__":
    raise SystemExit(main())
