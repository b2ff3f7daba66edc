"""Random factors of synthetic layers, and the elements for which codes stand, for formats whose values are products."""

from __future__ import annotations

import torch
from torch import Tensor

from kvbench.attention.work import Format


def factors(
    form: Format, spread: float, words: list[Tensor], shape: tuple[int, ...], rng: torch.Generator
) -> tuple[Tensor, ...]:
    """Generate the parameters of a segment whose values are factors times elements; none if the format has no scale.

    Args:
        words: random codes of all planes. Those of e4m3 are changed such that none is NaN; without a scale, all are
            also less than 2.
        shape: number of rows, KV heads, tokens, and groups of a token.
    """
    device = rng.device
    if (form.kind, form.bits) == ("float", 8):
        words[1] &= 0xEEEE - 2**16  # the lowest bit of each code
        if not form.scale:
            words[0] &= 0xBBBB - 2**16  # the highest bit of the exponent
    if not form.scale:
        return ()
    if form.scale == "e4m3":  # 2^-6 to 2, some subnormal
        bytes_ = torch.randint(8, 64, shape, generator=rng, device=device)
        small = torch.rand(shape, generator=rng, device=device) < 0.1
        return (torch.where(small, bytes_ // 8, bytes_).to(torch.uint8),)
    most = {"float": 448 if form.bits == 8 else 6}.get(form.kind, 2**form.bits - 1)
    step = (torch.rand(shape, generator=rng, device=device) + 0.5) * (4 * spread / most)
    if form.scale == "fp16":
        return ((step * torch.where(torch.rand(shape, generator=rng, device=device) < 0.5, -1, 1)).half(),)
    if form.kind == "folded":
        zero = torch.randint(0, 16, shape, generator=rng, device=device, dtype=torch.int32)
        return ((step.view(torch.int32) & -16 | zero).view(torch.float32),)
    return (step,)


def elements(form: Format, codes: Tensor) -> Tensor:
    """Return the elements for which codes stand, before their factor, in fp32.

    Args:
        form: a format with factors; not ``folded``, whose elements depend on the factor.
    """
    if form.kind == "offset":
        return codes.float() - 2 ** (form.bits - 1)
    if form.bits == 8:
        return codes.to(torch.uint8).view(torch.float8_e4m3fn).float()
    magnitudes = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6], device=codes.device)[codes.long() & 7]
    return torch.where(codes >= 8, -magnitudes, magnitudes)
