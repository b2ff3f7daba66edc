"""``python -m kvbench.analysis``: the attention of methods compared with exact attention, without labels."""

import sys

from kvbench.analysis.command import main

if __name__ == "__main__":
    sys.exit(main())
