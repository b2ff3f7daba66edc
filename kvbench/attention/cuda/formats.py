"""The formats that the CUDA decode kernel cannot read, each with the reason."""

from __future__ import annotations

from kvbench.attention.cuda.storage import LEVELS, groups_met
from kvbench.attention.work import FACTORED, Format

#: largest number of groups in a token's value: the product that sums their minima has a row for each of so many
VALUE_GROUPS = 8


def unreadable(key: Format, value: Format, channels: int) -> str | None:
    """Return why the kernel cannot read keys and values in two formats, or None if it can.

    Args:
        key: format of the keys.
        value: format of the values of the same tokens.
        channels: number of channels of a head.
    """
    if value.axis == "channel":
        return "values grouped per channel"
    if value.kind == "cross" and key.kind != "cross":
        return "cross factors of values, but not of keys"
    if key.kind == "cross" and key.group not in (64, 128):
        return f"cross factors of {key.group} tokens"
    if value.kind == "cross" and value.group != channels:
        return f"cross factors of values in groups of {value.group} channels"
    if value.kind in LEVELS:
        return "values that are levels of a codebook"
    if key.kind in LEVELS and (key.bits not in (3, 4) or key.group != channels):
        return f"levels of {key.bits} bits in groups of {key.group} channels"
    minima = value.kind != "full" and value.kind not in FACTORED
    if minima and channels // min(value.group, channels) > VALUE_GROUPS:
        return f"values in {channels // value.group} groups a token, more than {VALUE_GROUPS}"
    if key.window and groups_met(key) > 8:
        return f"windows of {key.window} tokens in groups of {key.group}: over 8 groups in a tile"
    for form in (key, value):
        if form.axis == "token" and (form.group > channels or channels % form.group):
            return f"groups of {form.group} channels"
        if form.scale == "fp32" and form.group != channels:
            return f"factors in fp32 of {form.group} channels"
        if form.scale == "e4m3" and form.group == channels:
            return f"factors in e4m3 of all {form.group} channels"
        if form.bits == 3 and channels % 32:
            return f"3-bit codes of {channels} channels"
    return None
