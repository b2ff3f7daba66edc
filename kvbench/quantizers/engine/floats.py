"""The small floating-point formats of caches, as the bytes that hold them: e4m3 (8 bits) and e2m1 (4 bits)."""

from __future__ import annotations

from functools import cache
from typing import Literal

import torch
from torch import Tensor

from kvbench.quantizers.packing import look_up

#: largest e4m3 number
E4M3_MAX = 448.0
#: magnitudes of the e2m1 numbers, by their three low bits
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
#: sign bit of an e2m1 code
SIGN = 8


def to_e4m3(x: Tensor) -> Tensor:
    """Round to the nearest e4m3 number (ties to even) and return its byte, uint8; beyond ±448 the result is ±448."""
    # hardware saturates, but torch's cast returns NaN beyond the range
    return x.clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn).view(torch.uint8)


def from_e4m3(codes: Tensor) -> Tensor:
    """Return the e4m3 numbers of given bytes, fp32."""
    return codes.to(torch.uint8).view(torch.float8_e4m3fn).float()


def to_e2m1(x: Tensor, ties: Literal["even", "away"]) -> Tensor:
    """Round to the nearest e2m1 number and return its 4-bit code, uint8; beyond ±6 the result is ±6.

    A negative number that is rounded to 0 keeps its sign bit (code 8).

    Args:
        x: numbers, fp32; NaN has code 0.
        ties: for a number in the middle between two others, ``even`` takes the one with the even code, ``away`` the
            larger magnitude.
    """
    magnitude = x.abs()
    codes = torch.zeros_like(x, dtype=torch.uint8)
    for code in range(1, len(E2M1)):
        middle = (E2M1[code - 1] + E2M1[code]) / 2
        # from the middle between two numbers, `even` goes up only to an even code
        above = magnitude >= middle if ties == "away" or code % 2 == 0 else magnitude > middle
        codes += above
    return torch.where(torch.signbit(x) & ~torch.isnan(x), codes + SIGN, codes)


def from_e2m1(codes: Tensor) -> Tensor:
    """Return the e2m1 numbers of given 4-bit codes, fp32."""
    return look_up(e2m1_table(str(codes.device)), codes)


@cache
def e2m1_table(device: str) -> Tensor:
    """Return the e2m1 number of each 4-bit code, fp32 ``[16]``."""
    with torch.inference_mode(False):  # cached, so it outlives the mode in which it is made
        return torch.tensor([*E2M1, *(-x for x in E2M1)], device=device)
