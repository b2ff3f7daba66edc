"""``python -m kvbench.score``: scores of outputs that somebody else made."""

from kvbench.cli.score import main

if __name__ == "__main__":
    raise SystemExit(main())
