"""Packing of tokens in the formats of inference engines (host code; Triton kernels: ``engine_kernel``).

The kernels serve fp16 and bf16 tokens in the formats that the fused decode kernel reads, TurboQuant's among them;
tokens in the other formats are packed with torch operations. The result is the same.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kvbench.cache.kernels.jobs import Form, Job, Packed, address_table, alone, plan
from kvbench.cache.kernels.reads import ENGINES, HALVES, format_refusal
from kvbench.quantizers.affine import AffineQuantizer
from kvbench.quantizers.engine.amd import Octave
from kvbench.quantizers.engine.llamacpp import IQ4NL, Q8_0, Signed
from kvbench.quantizers.engine.vllm import NVFP4, Fp8, Fp8PerTokenHead, Int4PerTokenHead, Int8PerTokenHead
from kvbench.quantizers.turboquant import LevelQuantizer, TruncatingQuantizer, levels, midpoints

#: rules of the kernels, by name (:attr:`Form.kind`)
KINDS = tuple(row.kind for row in ENGINES)
#: word rows of a tile that a program processes, and its warps
ROWS, WARPS = 8, 4


def rule(quantizer: AffineQuantizer) -> str | None:
    """Return the name under which the kernel has a quantizer's arithmetic (its rule); None if it does not have it."""
    if isinstance(quantizer, Q8_0):
        return "q8_0_cpu" if quantizer.even else "q8_0"
    if isinstance(quantizer, Signed):
        return "q4_0"
    if isinstance(quantizer, Octave):
        return "octave" if quantizer.wide is None else None
    if isinstance(quantizer, NVFP4):
        return "4over6" if quantizer.four else "nvfp4"
    if isinstance(quantizer, LevelQuantizer):
        return "levels_write" if quantizer.correction == "write" else "levels"
    rules: dict[type, str] = {
        TruncatingQuantizer: "grid",
        Int8PerTokenHead: "int8",
        Fp8PerTokenHead: "fp8_head",
        Fp8: "fp8",
        Int4PerTokenHead: "int4",
        IQ4NL: "iq4_nl",
    }
    return rules.get(type(quantizer))


def kernel_form(quantizer: AffineQuantizer, channels: int) -> Form | str | None:
    """Choose the compile-time parameters of the kernel that packs tokens as a quantizer does.

    Returns:
        The parameters; the reason as text if the kernel has the quantizer's :func:`rule`, but not for this format; None
        if it does not have the rule.
    """
    kind = rule(quantizer)
    if kind is None:
        return None
    if isinstance(quantizer, Fp8) and isinstance(quantizer.scale, Tensor):
        return "fp8 with a scale per KV head"
    reason = format_refusal(ENGINES, kind, quantizer.bits, "token", quantizer.group_size or channels, channels)
    if reason:
        return reason
    wide = max(16, 1 << (channels - 1).bit_length())
    group = quantizer.group_size or wide
    rows, parts = (2, 8) if quantizer.bits == 3 else (ROWS, 32 // ROWS)
    table: tuple[float, ...] = ()
    if isinstance(quantizer, LevelQuantizer):
        ascending = levels(channels, quantizer.bits)
        table = (*midpoints(ascending).tolist(), *ascending.tolist())
    padding = quantizer.padding if isinstance(quantizer, Octave) else 0
    return Form(
        kind,
        quantizer.bits,
        False,
        group,
        rows,
        wide,
        parts,
        WARPS,
        scale=scale(quantizer),
        padding=padding,
        table=table,
    )


def scale(quantizer: AffineQuantizer) -> float:
    """Return the single scale that a quantizer applies to all tokens; 1 if it has none."""
    return getattr(quantizer, "factor", 1.0)


def launch_pack(
    segment: Packed, how: Form, first_row: int, x: Tensor, start: int, count: int, index: Tensor | None
) -> None:
    """Quantize tokens and write them into a segment; the arguments are those of ``kvbench.cache.kernels.pack.pack``."""
    from kvbench.cache.kernels.engine_kernel import pack_engine_row_tokens

    watch, tag = segment.watch or alone(x.device)
    how, grid, places = plan(segment, how, first_row, x, start, count)
    with torch.cuda.device_of(x):
        pack_engine_row_tokens[grid](
            x,
            x if index is None else index,
            segment.words[0],
            segment.words[-1],
            params(segment),
            params(segment, -1),
            watch.record,
            how.scale,
            *places,
            tag,
            *engine_constants(how, x.shape[-1], segment.side == "value"),
            index is not None,
            num_warps=how.warps,
            enable_fp_fusion=False,
        )


def pack_group(group: list[Job]) -> None:
    """Pack the tokens of several jobs with equal signatures in one launch."""
    from kvbench.cache.kernels.engine_kernel import pack_engine_layers

    job = group[0]
    how, grid, places = job.plan()
    with torch.cuda.device_of(job.x):
        pack_engine_layers[(*grid, len(group))](
            address_table(group),
            job.x,
            params(job.segment),
            job.record(),
            job.x.storage_offset(),
            how.scale,
            *places,
            *engine_constants(how, job.x.shape[-1], job.segment.side == "value"),
            num_warps=how.warps,
            enable_fp_fusion=False,
        )


def params(segment: Any, number: int = 0) -> Tensor:
    """Return parameter buffer `number` of a segment; without parameters, a buffer of words, which kernels ignore."""
    tensor: Tensor = segment.params[number] if segment.params else segment.words[0]
    return tensor


def engine_constants(how: Form, channels: int, value: bool) -> tuple[Any, ...]:
    """Return the values of a kernel's compile-time arguments from ``RULE`` to ``PADDING``, in their order."""
    return how.kind, how.bits, how.group, channels, value, how.rows, how.channels, how.table, how.padding


def engine_refusal(keys: Packed, values: Packed) -> str | None:
    """Return why the kernel cannot pack the new token of a captured step, or None if it can."""
    for segment in (keys, values):
        how = kernel_form(segment.quantizer, segment.channels)
        if not isinstance(how, Form):
            return f"no kernel packs {segment.quantizer} on the device" + (f": {how}" if how else "")
        if segment.dtype not in HALVES:
            return f"tokens are {str(segment.dtype).removeprefix('torch.')}"
    return None


def pack_engine_tokens(keys: Packed, values: Packed, key: Tensor, value: Tensor, places: Tensor) -> None:
    """See :func:`kvbench.cache.kernels.at_once.pack_new_tokens`."""
    from kvbench.cache.kernels.engine_kernel import pack_step

    key = key if key.stride(-1) == 1 else key.contiguous()
    value = value if value.stride(-1) == 1 else value.contiguous()
    forms = [kernel_form(segment.quantizer, segment.channels) for segment in (keys, values)]
    assert isinstance(forms[0], Form) and isinstance(forms[1], Form)
    watch = keys.watch if keys.watch is not None else (None, 0)
    with torch.cuda.device_of(key):
        pack_step[(len(places) * keys.heads, 2)](
            key,
            value,
            places,
            keys.words[0],
            keys.words[-1],
            params(keys),
            values.words[0],
            values.words[-1],
            params(values),
            params(values, -1),
            places if watch[0] is None else watch[0].record,
            watch[1],
            values.watch[1] if values.watch is not None else 0,
            forms[0].scale,
            forms[1].scale,
            *key.stride()[:2],
            *value.stride()[:2],
            keys.heads,
            keys.tiles,
            values.tiles,
            forms[0].kind,
            forms[0].bits,
            forms[0].group,
            keys.channels,
            forms[0].channels,
            forms[0].table,
            forms[1].kind,
            forms[1].bits,
            forms[1].group,
            values.channels,
            forms[1].channels,
            forms[1].padding,
            watch[0] is not None,
            num_warps=1,
            enable_fp_fusion=False,
        )
