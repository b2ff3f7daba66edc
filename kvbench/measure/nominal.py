"""Nominal bits of a cache: those of its formats, without metadata and without the window of the newest tokens."""

from __future__ import annotations

from typing import Any

from kvbench.cache.segments.base import Segment
from kvbench.cache.segments.foreign import Fp8Segment, HFSegment


def nominal_bits(cache: Any) -> dict[str, float]:
    """Return the bits per element of a cache's formats after the last step, per token that it has seen.

    Scales, zero points and other metadata do not count; neither does the window of the newest tokens, which takes ever
    less of a growing cache. Tokens that a method has dropped count as 0 bits. A cache that holds all its tokens in
    the window has the bits of the window.

    Returns:
        The mean over layers and rows for ``key`` and for ``value``.
    """
    windowed = cache.method.reach() is not None  # Cocktail's exact tokens are a share of the prompt, not a window
    sums = {"key": [0.0, 0.0], "value": [0.0, 0.0]}
    for layer in cache.kv_layers:
        for side, store in zip(sums, layer.stores(), strict=True):
            for row in range(layer.batch):
                counts = [segment.lengths[row] for segment in store.segments]
                seen = layer.real_tokens(row)  # without padding
                # the window is left out only where tokens lie outside it, and none has been dropped
                whole = windowed and sum(counts) == seen and sum(counts) > counts[-1]
                tokens = seen - counts[-1] if whole else seen
                segments = store.segments[:-1] if whole else store.segments
                sums[side][0] += sum(code_bits(segment, row) for segment in segments)
                sums[side][1] += tokens
    return {side: bits / tokens for side, (bits, tokens) in sums.items()}


def code_bits(segment: Segment, row: int) -> float:
    """Return the bits of the codes that a segment holds for one row, divided by heads and channels.

    Tokens in full precision count with the bits of the model's dtype.
    """
    if isinstance(segment, Fp8Segment):
        return 8.0 * segment.lengths[row]
    if isinstance(segment, HFSegment):
        return float(segment.backend.nbits) * segment.lengths[row]
    if not segment.packed:
        return 8.0 * segment.dtype.itemsize * segment.lengths[row]
    return 8 * segment.used(row)["codes"] / (segment.heads * segment.channels)
