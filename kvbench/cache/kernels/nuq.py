"""Quantizing one new token per row to non-uniform levels (KVQuant), entirely on the device.

An eager step quantizes by torch (:class:`kvbench.cache.segments.codebook.NuqSegment`), which waits for the number of
outliers. A captured step calls :func:`pack_nuq_tokens`, which stores the same bits by a CUDA kernel (``nuq.cu``).
"""

from __future__ import annotations

import struct
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kvbench.cache.kernels.reads import HALVES, LOOKED_UP, format_refusal
from kvbench.quantizers.nuq import tail
from kvbench.util import nvrtc

if TYPE_CHECKING:
    from kvbench.cache.segments.codebook import NuqSegment

#: CTAs among which the codes of a token are divided: the most with which all CTAs of a launch run at once
PARTS = (8, 4, 2)
#: threads of a CTA at most
THREADS = 1024


@dataclass(frozen=True)
class TokenBuild:
    """Compile-time configuration of the kernel, as values for the macros that ``nuq.cu`` explains.

    Args:
        channels: number of channels of a head (macro ``D``).
        heads: number of KV heads (``HEADS``).
        bits: bits of a code (``BITS``).
        tables: number of codebooks of a row (``TABLES``): 1, or 2 if other levels are used for decoding.
        bf16: True if tokens are bf16, False if they are fp16.
        outliers: True if there are outliers (``OUTLIERS``).
        watched: True if NaN and Inf are recorded (``WATCHED``).
        block: number of tokens of a block of outliers (``BLOCK``).
        parts: number of CTAs among which the codes of a token are divided (``PARTS``).
    """

    channels: int
    heads: int
    bits: int
    tables: int
    bf16: bool
    outliers: bool
    watched: bool
    block: int
    parts: int = PARTS[0]

    @property
    def elements(self) -> int:
        """Number of neighbouring elements of a thread (``PER``): a head is divided among lanes of one warp."""
        count = max(4, self.channels // 32)
        while self.heads * self.channels > THREADS * count:
            count *= 2
        return count

    @property
    def warps(self) -> int:
        """Number of warps of a CTA (``WARPS``)."""
        return -(-self.heads * self.channels // (32 * self.elements))

    def macros(self) -> str:
        """Return the macro definitions that must precede the kernel's source."""
        values = {name.upper(): int(value) for name, value in asdict(self).items() if name != "channels"}
        values |= {"D": self.channels, "PER": self.elements, "WARPS": self.warps}
        return "".join(f"#define {name} {value}\n" for name, value in values.items())


def kernel_source() -> str:
    """Return the CUDA source of the kernel, without the macro definitions that configure it."""
    return (Path(__file__).parent / "nuq.cu").read_text(encoding="utf-8")


@lru_cache(maxsize=64)
def token_kernel(build: TokenBuild, device: int) -> nvrtc.Function:
    """Return the kernel for a configuration, compiled and loaded on a GPU; equal calls share one kernel.

    Raises:
        RuntimeError: nvrtc or the driver reported an error, which the message contains.
    """
    overlapped = torch.cuda.get_device_capability(device) >= (9, 0)
    return nvrtc.Function(build.macros() + kernel_source(), "quantize_token", device, build.warps * 32, 0, overlapped)


def nuq_refusal(keys: NuqSegment, values: NuqSegment) -> str | None:
    """Return why the kernel cannot quantize tokens for two segments, or None if it can."""
    for segment in (keys, values):
        if segment.gather is not None:
            return "the heads of a token are divided between processes"
        if segment.most is not None:
            return "the number of outliers of a token is limited"
        if segment.dtype not in HALVES:
            return f"tokens are {str(segment.dtype).removeprefix('torch.')}"
        axis = "token" if segment.thresholds is None else "channel"
        reason = format_refusal(LOOKED_UP, "codebook", segment.bits, axis, 0, segment.channels)
        if reason is None and segment.device.type == "cuda":
            reason = nvrtc.missing()
        if reason:
            return reason
    if keys.channels != values.channels:
        return f"heads of {keys.channels} and {values.channels} channels"
    if bool(keys.share) != bool(values.share) or keys.bits != values.bits:
        return "keys and values of different formats"
    return None


def rank(share: float, width: int, *, high: bool) -> tuple[int, float]:
    """Return the rank at which ``torch.quantile`` reads a threshold of outliers, and the weight of the next rank.

    `share` is the share of a token's `width` elements that are outliers; `high` is True for the largest, False for the
    smallest elements.
    """
    quantile = torch.tensor(tail(share) if high else 1 - tail(share), dtype=torch.float32)
    # in fp32, as torch.quantile does: in fp64 the rank may be another one
    position = quantile * (width - 1)
    return int(position.floor()), float(position - position.floor())


def pack_nuq_tokens(keys: NuqSegment, values: NuqSegment, key: Tensor, value: Tensor, places: Tensor) -> None:
    """See :func:`kvbench.cache.kernels.at_once.pack_new_tokens`."""
    key, value = (x if in_pairs_of_words(x) else x.contiguous() for x in (key, value))
    build = TokenBuild(
        channels=keys.channels,
        heads=keys.heads,
        bits=keys.bits,
        tables=keys.codebook.shape[1],
        bf16=keys.dtype == torch.bfloat16,
        outliers=bool(keys.share),
        watched=values.watch is not None,
        block=keys.exact.block if keys.exact else 1,
    )
    launch(build, token_arguments(keys, values, key, value, places), places)


def in_pairs_of_words(x: Tensor) -> bool:
    """Return True if each head's channels are contiguous, and begin at a multiple of 8 bytes."""
    return x.stride(-1) == 1 and x.data_ptr() % 8 == 0 and all(stride % 4 == 0 for stride in x.stride()[:2])


def launch(build: TokenBuild, arguments: bytes, places: Tensor) -> None:
    """Launch the kernel for the rows of `places` on the current stream of their device."""
    with torch.cuda.device_of(places):
        device = places.device.index or 0
        parts = parts_of(len(places), token_kernel(build, device).resident)
        compiled = token_kernel(replace(build, parts=parts), device)
        stream = torch.cuda.current_stream(places.device).cuda_stream
        compiled.launch((len(places), 2, 1 + parts), arguments, stream)


def parts_of(rows: int, resident: int) -> int:
    """Return among how many CTAs to divide the codes of a token, of `rows` that are stored at once.

    Each CTA works out the token's range and outliers for itself, so that CTAs that must wait for others cost more than
    they save. `resident` is the number that the GPU can run at once.
    """
    return next((parts for parts in PARTS if 2 * rows * (1 + parts) <= resident), PARTS[-1])


def token_arguments(keys: NuqSegment, values: NuqSegment, key: Tensor, value: Tensor, places: Tensor) -> bytes:
    """Serialize the kernel's only argument, the C struct ``Args`` of ``nuq.cu``."""
    _, scale, offset, _ = keys.lookup()
    assert keys.thresholds is not None
    low, low_weight = rank(values.share, values.width, high=False)
    high, high_weight = rank(values.share, values.width, high=True)
    # places stand for a record that is not used
    record = values.watch[0].record if values.watch is not None else places
    tensors = places, scale, offset, keys.thresholds, *values.params, record
    return (
        side_arguments(keys, key)
        + side_arguments(values, value)
        + struct.pack("7P", *(tensor.data_ptr() for tensor in tensors))
        + struct.pack("4i2f", low, high, (values.width - 1) // 2, 0, low_weight, high_weight)
    )


def side_arguments(segment: NuqSegment, x: Tensor) -> bytes:
    """Serialize a segment and the new tokens for it as the C struct ``Side``."""
    sparse = segment.exact
    entries = (sparse.values, sparse.indices, sparse.table) if sparse is not None else ()
    second = segment.words[1].data_ptr() if len(segment.words) > 1 else 0
    return struct.pack(
        "P2q2PqP3P3q",
        *(x.data_ptr(), *x.stride()[:2]),
        *(segment.words[0].data_ptr(), second, segment.tiles),
        segment.codebook.data_ptr(),
        *([tensor.data_ptr() for tensor in entries] or (0, 0, 0)),
        *((0, 0) if sparse is None else (sparse.values.shape[1], sparse.table.shape[1])),
        segment.watch[1] if segment.watch is not None else 0,
    )
