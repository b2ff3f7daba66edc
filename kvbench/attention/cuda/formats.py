"""The pairs of formats that the CUDA decode kernel cannot read, though it reads each of them, with the reason."""

from __future__ import annotations

from kvbench.attention.cuda.storage import groups_met
from kvbench.attention.work import FACTORED, Format

#: largest number of groups in a token's value: the product that sums their minima has a row for each of so many
VALUE_GROUPS = 8


def unreadable(key: Format, value: Format, channels: int) -> str | None:
    """Return why the kernel cannot read keys and values in two formats of its list, or None if it can."""
    if value.kind == "cross" and key.kind != "cross":
        return "cross factors of values, but not of keys"
    minima = value.kind != "full" and value.kind not in FACTORED
    if minima and channels // min(value.group, channels) > VALUE_GROUPS:
        return f"values in {channels // value.group} groups a token, more than {VALUE_GROUPS}"
    if key.window and groups_met(key) > 8:
        return f"windows of {key.window} tokens in groups of {key.group}: over 8 groups in a tile"
    return None
