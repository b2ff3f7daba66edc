"""torch leaves oneDNN for good when memory ends inside it: what is measured afterwards would be of another library."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def kept(*, strict: bool) -> Iterator[None]:
    """Restore oneDNN after the block if it was in use before.

    Where a product on a CPU finds no memory inside oneDNN, torch warns, takes another library, and stays with it until
    the process ends: bfloat16 prompts then took ten times as long.

    Args:
        strict: memory that ended there is an error, as it is anywhere else: the block's times are of both libraries.

    Raises:
        MemoryError: it ended there, and nothing else was raised.
    """
    before = torch.backends.mkldnn.enabled
    left = False
    try:
        yield
    finally:
        left = bool(before) and not torch.backends.mkldnn.enabled
        if left:
            torch.backends.mkldnn.enabled = True  # type: ignore[assignment]
    if left and strict:
        raise MemoryError("a product found no memory inside oneDNN; torch went on with another library")
