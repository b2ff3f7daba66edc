"""``python -m kvbench.fetch``: downloads of models and data in advance, for machines without network access."""

from kvbench.cli.fetch import main
from kvbench.util.door import enter

if __name__ == "__main__":
    raise SystemExit(enter(main))
