"""``python -m kvbench``: runs of a model with a KV-cache method on a data set."""

import os
import sys

from kvbench.util.door import enter


def main() -> int:
    """Run ``python -m kvbench``, or the script ``kvbench``, with the arguments in ``sys.argv``; return the status."""
    return enter(_command)


def _command() -> int:
    # Threads that wait by spinning make a busy machine five times slower; torch reads this when it is first imported.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    # imported here, so that a spawned worker that re-imports this module starts nothing
    from kvbench.cli.main import main as command_line

    return command_line(sys.argv[1:])


if __name__ == "__main__":
    sys.exit(main())
