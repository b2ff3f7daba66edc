"""Packed form of a row's figures by position: an answer of 8,000 tokens has 40,000 of them, 0.6 MB as JSON numbers.

A list of ``fidelity`` that float32 holds exactly is stored as ``{"float32": TEXT}``: the numbers' first bytes in
little-endian order, then all second bytes and so on (neighbouring exponents are alike, so this compresses well), packed
by zlib, in base64. All other lists stay JSON numbers; reading gives the same numbers either way.
"""

from __future__ import annotations

import base64
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

#: shortest list that is packed
SHORTEST = 1024
#: low bits of a float32's mantissa that :func:`short_floats` sets to 0
_DROPPED = 12

_KEY = "float32"


def short_floats(numbers: Sequence[float]) -> list[float]:
    """Return numbers rounded to the nearest float32 whose last 12 bits are 0: an error of at most 1.3e-4."""
    import numpy as np

    bits = np.asarray(numbers, dtype=np.float32).view(np.uint32)
    half = np.uint32(1 << (_DROPPED - 1))
    rounded: list[float] = ((bits + half) & ~np.uint32((1 << _DROPPED) - 1)).view(np.float32).tolist()
    return rounded


def packed_row(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return a row with the long lists of its key ``fidelity`` packed, where that loses nothing."""
    part = row.get("fidelity")
    if not isinstance(part, Mapping):
        return dict(row)
    return {**row, "fidelity": {key: _packed(value) for key, value in part.items()}}


def unpacked_row(row: dict[str, Any]) -> dict[str, Any]:
    """Return the row that :func:`packed_row` packed.

    Raises:
        ValueError: a packed list is damaged.
    """
    part = row.get("fidelity")
    if not isinstance(part, Mapping):
        return row
    return {**row, "fidelity": {key: _unpacked(value) for key, value in part.items()}}


def _packed(value: Any) -> Any:
    if not isinstance(value, list) or len(value) < SHORTEST or not all(type(x) is float for x in value):
        return value
    import numpy as np

    planes = np.asarray(value, dtype="<f4").view(np.uint8).reshape(-1, 4).T
    packed = {_KEY: base64.b64encode(zlib.compress(planes.tobytes(), 9)).decode()}
    return packed if _unpacked(packed) == value else value


def _unpacked(value: Any) -> Any:
    if not isinstance(value, dict) or value.keys() != {_KEY}:
        return value
    import numpy as np

    try:
        planes = np.frombuffer(zlib.decompress(base64.b64decode(value[_KEY], validate=True)), dtype=np.uint8)
        return np.ascontiguousarray(planes.reshape(4, -1).T).view("<f4")[:, 0].tolist()
    except (ValueError, TypeError, zlib.error) as error:
        raise ValueError("its packed numbers are damaged") from error
