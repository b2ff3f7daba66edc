"""``python -m kvbench.analysis``: comparison of the attention of methods with exact attention; largest channels."""

import sys

from kvbench.analysis.command import main
from kvbench.util.door import enter

if __name__ == "__main__":
    sys.exit(enter(main))
