"""Numbers as documents write them: found in a text, and written with the same signs and digits."""

from __future__ import annotations

import re

#: a number: a sign without a blank behind it, thousands in groups of three, decimals, an exponent
NUMBER = re.compile(r"(?<![\w.])[+−-]?(?:\d{1,3}(?:,\d{3})+|\d+)?(?:\.\d+)?(?:e[+-]?\d+)?(?<=\d)")
_PARTS = re.compile(r"(?P<sign>[+−-]?)(?P<whole>[\d,]*)(?:\.(?P<decimals>\d+))?(?:e(?P<exponent>[+-]?\d+))?$")


def value_of(text: str) -> float:
    """Return the value of a number as a document writes it (``−.142``, ``1,319``, ``3e-5``)."""
    return float(text.replace(",", "").replace("−", "-"))


def like(shown: str, value: float) -> str:
    """Return `value` written as `shown` is: its decimals, minus sign, plus, commas, and no zero before a point."""
    parts = _PARTS.match(shown)
    assert parts is not None, f"not a number: {shown!r}"
    decimals, minus = len(parts["decimals"] or ""), "−" if "−" in shown else "-"
    if parts["exponent"] is not None:
        mantissa, power = f"{abs(value):.{decimals}e}".split("e")
        short = parts["exponent"].lstrip("+-").lstrip("0") == parts["exponent"].lstrip("+-")
        digits = f"{mantissa}e{int(power)}" if short else f"{mantissa}e{power}"
    else:
        digits = f"{abs(value):,.{decimals}f}" if "," in shown else f"{abs(value):.{decimals}f}"
    if not parts["whole"] and digits.startswith("0."):
        digits = digits[1:]
    if value < 0 and value_of(digits) != 0:
        return minus + digits
    return "+" + digits if parts["sign"] else digits  # a number with a sign is a difference


def agrees(shown: str, value: float) -> bool:
    """Return True if `shown` is `value`, rounded to its digits; a tie may go either way."""
    parts = _PARTS.match(shown)
    assert parts is not None, f"not a number: {shown!r}"
    unit = 10.0 ** -len(parts["decimals"] or "") * 10.0 ** int(parts["exponent"] or 0)
    return abs(value_of(shown) - value) <= unit / 2 * (1 + 1e-6) + 1e-12
