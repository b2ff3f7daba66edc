"""What holds for all tests: Triton's interpreter where there is no GPU, and a garbage collector that is quick."""

import gc
import os

import pytest

if not os.path.exists("/dev/nvidiactl"):  # must be known before anything imports triton
    os.environ.setdefault("TRITON_INTERPRET", "1")


def pytest_collection_finish(session: pytest.Session) -> None:
    """Take what imports and collection have made out of the garbage collector's sight.

    Torch, transformers and the tests themselves are a million objects that live until the end. Every run collects
    garbage and looks for live tensors, which takes half a second among all of these.
    """
    gc.collect()
    gc.freeze()
