"""``python -m kvbench.fetch``: downloads of models and data in advance, for machines without network access."""

from kvbench.cli.fetch import main

if __name__ == "__main__":
    raise SystemExit(main())
