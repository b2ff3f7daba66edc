"""``python -m kvbench.fetch``: download of the files that runs on a machine without network will need."""

from kvbench.cli.fetch import main

if __name__ == "__main__":
    raise SystemExit(main())
