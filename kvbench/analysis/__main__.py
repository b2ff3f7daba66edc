"""``python -m kvbench.analysis``: attention of methods compared with exact attention; largest channels of K and V."""

import sys

from kvbench.analysis.command import main
from kvbench.util.door import enter

if __name__ == "__main__":
    sys.exit(enter(main))
