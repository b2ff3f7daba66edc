"""A guard against torch's silent switch from oneDNN to another library after an out-of-memory error inside oneDNN."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def kept(*, strict: bool) -> Iterator[None]:
    """Turn oneDNN back on after the block if torch turned it off within.

    If a matrix product on a CPU runs out of memory inside oneDNN, torch only warns, and uses another library until the
    process ends; bfloat16 prompts then took ten times as long.

    Args:
        strict: raise an error in this case, as the block's times come from both libraries.

    Raises:
        MemoryError: `strict`, torch turned oneDNN off within the block, and the block raised nothing itself.
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
        raise MemoryError("a matrix product ran out of memory inside oneDNN, and torch fell back to another library")
