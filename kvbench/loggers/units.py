"""Names and values for charts: sizes in MiB and times in milliseconds, with the unit in the name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

MIB = 2**20

#: parts of a name that stand for a size in bytes, with the name of the same size in MiB
_SIZES = {
    "kv_bytes": "kv_MiB",
    "peak_bytes": "peak_MiB",
    "kv_used": "kv_used_MiB",
    "kv_reserved": "kv_reserved_MiB",
    "kv_fp16": "kv_fp16_MiB",
    "peak": "peak_MiB",
    "peak_prefill": "peak_prefill_MiB",
    "peak_decode": "peak_decode_MiB",
    "read_bytes": "read_MiB",
    "bytes_asked": "asked_MiB",
}
#: last parts of names that are counts, ratios or words, even below a size or a time
_UNITLESS = ("n", "ratio", "kind", "lengths")


def charted(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return numbers and texts under names with units that a chart can show; slashes separate the parts of a name.

    ``kv_bytes/used/total`` becomes ``kv_MiB/used/total``, ``ttft_s/median`` becomes ``ttft_ms/median``. Ratios to fp16
    (below ``vs_fp16``) and rates such as ``tokens_per_s`` stay as they are. Counts and ratios lose the unit of the name
    above them: ``kv/ratio``, ``ttft/n``.
    """
    return dict(_charted(name, value) for name, value in values.items())


def _charted(name: str, value: Any) -> tuple[str, Any]:
    parts = name.split("/")
    if "vs_fp16" in parts:
        return name, value
    for i, part in enumerate(parts):
        time = part.endswith("_s") and not part.endswith(("per_s", "GB_s"))
        if not time and part not in _SIZES:
            continue
        if parts[-1] in _UNITLESS:
            bare = part.removesuffix("_s").removesuffix("_bytes")
            return "/".join([*parts[:i], bare, *parts[i + 1 :]]), value
        unit = f"{part.removesuffix('_s')}_ms" if time else _SIZES[part]
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            value = value * 1000 if time else value / MIB
        return "/".join([*parts[:i], unit, *parts[i + 1 :]]), value
    return name, value
