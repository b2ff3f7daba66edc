"""``python -m kvbench.fetch``: what a run will need, for a machine without network."""

from kvbench.cli.fetch import main

if __name__ == "__main__":
    raise SystemExit(main())
