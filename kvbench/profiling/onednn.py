"""A guard against torch's silent switch from oneDNN to another library after an out-of-memory error inside oneDNN."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def kept(*, strict: bool) -> Iterator[None]:
    """Turn oneDNN back on at the end of a ``with`` block if torch turned it off inside the block.

    If a matrix product on a CPU runs out of memory inside oneDNN, torch only issues a warning. It then uses another
    library until the process ends; prompts in bfloat16 took ten times as long with it.

    Args:
        strict: True to raise an error in this case, because times measured inside the block come from both libraries.

    Raises:
        MemoryError: `strict` is True, and torch turned oneDNN off. If the code inside the block raises an error of
            its own, that error is passed on instead.
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
