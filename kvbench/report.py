"""``python -m kvbench.report``: the runs that are there, and what they gave."""

from kvbench.cli.report import main

if __name__ == "__main__":
    raise SystemExit(main())
