"""A guard against torch's silent switch from oneDNN to another library after an out-of-memory error inside oneDNN."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def kept(*, strict: bool) -> Iterator[None]:
    """Undo, at the end of a ``with`` block, torch's switch away from oneDNN after an out-of-memory error.

    If a matrix product on a CPU runs out of memory inside oneDNN, torch raises no error. It issues a warning and uses a
    different library from then on; prompts in bfloat16 took ten times as long with it. This context manager turns
    oneDNN on again, so that the code after the block is not slow too.

    Args:
        strict: True to raise an error if torch switched inside the block, because times measured there are not
            comparable.

    Raises:
        MemoryError: `strict` is True, and torch switched. An error raised by the block itself takes precedence.
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
