"""``python -m kvbench.analysis``: comparison of the attention of methods with exact attention."""

import sys

from kvbench.analysis.command import main

if __name__ == "__main__":
    sys.exit(main())
