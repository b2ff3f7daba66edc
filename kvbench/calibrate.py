"""``python -m kvbench.calibrate``: computation of the calibration file that kvquant or oscar needs for a model."""

from kvbench.cli.calibrate import main
from kvbench.util.door import enter

if __name__ == "__main__":
    raise SystemExit(enter(main))
