"""Where there is no GPU, Triton's kernels run in its interpreter: that must be known before anything imports triton."""

import os

if not os.path.exists("/dev/nvidiactl"):
    os.environ.setdefault("TRITON_INTERPRET", "1")
