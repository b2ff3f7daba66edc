"""Random layers in any mix of formats, and attention to them in fp32: inputs and reference for testing kernels.

No method or quantizer is involved: buffers are filled with random codes and parameters directly, so a layer of 256k
tokens takes milliseconds. The unused parts of full-precision buffers are NaN, which exposes a kernel that reads them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvbench.attention.phases import Part, Work, pairs_of_row
from kvbench.attention.work import FACTORED, TABLES, Format
from kvbench.cache.segments.layout import TILE, TileLayout
from kvbench.quantizers.packing import PLANES, join_planes
from kvbench.quantizers.turboquant import LevelQuantizer

FULL = Format("full", 16)


@dataclass
class Piece:
    """Description of one segment of keys or values, from which :func:`random_part` generates random contents.

    Args:
        lengths: number of tokens in each row of the batch.
        scale: standard deviation of elements in full precision. In packed formats, quantization steps are drawn
            uniformly from 0.5 to 1.5 times ``4 * scale / levels``, which gives dequantized elements a similar spread;
            ``levels`` is the largest code.
        room: number of tokens for which the buffers have room beyond the longest row.
        tile: number of tokens that share the cross factors of their values (kind ``cross``).
    """

    format: Format
    lengths: Sequence[int]
    scale: float = 1.0
    room: int = 0
    tile: int = TILE


def random_part(piece: Piece, side: str, heads: int, channels: int, dtype: torch.dtype, rng: torch.Generator) -> Part:
    """Generate a segment with random contents, in the form in which kernels read it.

    In a full-precision segment, the tokens of row r begin at index r of that row's buffer, not at index 0. The offset
    is deliberate: a kernel that ignores it reads NaN.

    Args:
        rng: random generator; the buffers are created on its device.
    """
    form, batch, device = piece.format, len(piece.lengths), rng.device
    longest = max(piece.lengths) + piece.room
    if form.kind == "full":
        buffer = torch.full((batch, heads, longest + batch + 3, channels), float("nan"), dtype=dtype, device=device)
        for row, count in enumerate(piece.lengths):
            live = torch.randn(heads, count, channels, generator=rng, device=device) * piece.scale
            buffer[row, :, row : row + count] = live.to(dtype)
        return Part(form, buffer=buffer)
    tiles = max(-(-longest // TILE), 1)
    words = []
    for plane in PLANES[form.bits]:
        shape = (batch, heads, *TileLayout(plane, "key" if side == "key" else "value").shape(tiles, channels))
        words.append(torch.randint(-(2**15), 2**15, shape, generator=rng, device=device, dtype=torch.int16))
    tokens = tiles * TILE
    if form.kind in FACTORED:
        params = random_factors(form, piece.scale, words, (batch, heads, tokens, channels // form.group), rng)
        if form.padding:  # NaN, which a kernel must not read
            params = tuple(torch.nn.functional.pad(param, (0, form.padding), value=float("nan")) for param in params)
        return Part(form, words, params, factor=0.75 if form.kind in ("float", "octave") else 1.0)
    if form.window:
        grid = (2 + int(groups_of(form, torch.arange(tokens))[-1]), channels)
    else:
        grid = (tokens // form.group, channels) if form.axis == "channel" else (tokens, channels // form.group)
    levels = 15 if form.kind == "hierarchical" else 2**form.bits - 1
    step = (torch.rand(batch, heads, *grid, generator=rng, device=device) + 0.5) * (4 * piece.scale / levels)
    if form.kind.startswith("levels"):
        return Part(form, words, ((step * channels**0.5).half(),))
    shift = torch.rand(step.shape, generator=rng, device=device)
    if form.kind == "atom":
        second = (shift * levels).round()
    else:
        second = -step * levels * (0.4 + 0.2 * shift)
    if form.kind != "cross":
        return Part(form, words, (step.half(), second.half()))
    grid = (tokens, 1) if form.axis == "channel" else (tokens // piece.tile, channels)
    cross = (torch.rand(batch, heads, *grid, generator=rng, device=device) - 0.5).exp()
    return Part(form, words, (step.half(), second.half(), cross.half()))


def groups_of(form: Format, tokens: Tensor) -> Tensor:
    """Return the index of each token's quantization group within the segment, ``[n]``."""
    if not form.window:
        return tokens // form.group
    cuts = -(-form.window // form.group)
    sizes = [form.window // cuts + (i < form.window % cuts) for i in range(cuts)]
    inside = torch.arange(cuts, device=tokens.device).repeat_interleave(torch.tensor(sizes, device=tokens.device))
    return tokens // form.window * cuts + inside[tokens % form.window]


def read_tokens(part: Part, side: str, row: int, heads: slice, first: int, count: int, channels: int) -> Tensor:
    """Return consecutive tokens of one row of a segment, dequantized, fp32 ``[heads, count, channels]``.

    Args:
        first: index of the first token in the segment's buffer.
    """
    form = part.format
    if part.buffer is not None:
        return part.buffer[row, heads, first : first + count].float()
    planes = [
        TileLayout(width, "key" if side == "key" else "value").read(words[row, heads], first, first + count)
        for width, words in zip(PLANES[form.bits], part.words, strict=True)
    ]
    joined = join_planes(planes, form.bits)
    if form.kind.startswith("levels"):
        quantizer = LevelQuantizer(form.bits, "read" if form.kind == "levels_read" else "none")
        return quantizer.decode(joined, (part.params[0][row, heads, first : first + count],), torch.float32)
    if form.kind in FACTORED and not form.scale:
        return elements(form, joined) * part.factor
    if form.kind in FACTORED:
        factor = part.params[0][row, heads, first : first + count, : channels // form.group]
        factor = factor.view(torch.float8_e4m3fn) if form.scale == "e4m3" else factor
        factor = factor.float().repeat_interleave(form.group, -1)
        if form.kind == "folded":
            bits = factor.view(torch.int32)
            return (joined.float() - (bits & 15)) * (bits & -16).view(torch.float32)
        return elements(form, joined) * factor * part.factor
    codes = joined.float()
    if form.axis == "channel":
        groups = groups_of(form, torch.arange(first, first + count, device=codes.device))
        step, second = (param[row, heads].index_select(1, groups).float() for param in part.params[:2])
    else:
        step, second = (
            param[row, heads, first : first + count].float().repeat_interleave(form.group, -1)[..., :channels]
            for param in part.params[:2]
        )
    if form.kind == "cross":
        return (codes * step + second) * cross_factors(part, row, heads, first, count)
    if form.kind == "atom":
        return (codes - second) * step
    if form.kind == "hierarchical":
        return (codes - 8) * (step / 16) + second
    return codes * step + second


def cross_factors(part: Part, row: int, heads: slice, first: int, count: int) -> Tensor:
    """Return the cross factors of consecutive tokens, fp32 ``[heads, count, 1]`` or, for values, ``[..., D]``."""
    cross = part.params[2][row, heads].float()
    tile = part.words[0].shape[2] * TILE // cross.shape[1]  # 1 for keys
    return cross.index_select(1, torch.arange(first, first + count, device=cross.device) // tile)


def layer(
    keys: Sequence[Piece],
    values: Sequence[Piece],
    *,
    heads: int,
    key_dim: int,
    value_dim: int,
    dtype: torch.dtype = torch.float16,
    device: torch.device | str = "cpu",
    seed: int = 0,
    sliding: int | None = None,
) -> Work:
    """Generate a layer with random contents, as the argument `work` of a kernel.

    Args:
        keys: segments of keys; the last one must be in full precision.
        values: segments of values; the last one must be in full precision.
        sliding: sliding window: number of tokens that the newest query sees, its own included. None: all.
    """
    rng = torch.Generator(device).manual_seed(seed)
    parts_k = [random_part(piece, "key", heads, key_dim, dtype, rng) for piece in keys]
    parts_v = [random_part(piece, "value", heads, value_dim, dtype, rng) for piece in values]
    rows = []
    for row in range(len(keys[0].lengths)):
        pairs = pairs_of_row([p.lengths[row] for p in keys], [p.lengths[row] for p in values], sliding)
        for (k, v), (first_k, first_v, count) in pairs.items():
            first_k += row if keys[k].format.kind == "full" else 0
            first_v += row if values[v].format.kind == "full" else 0
            pairs[k, v] = (first_k, first_v, count)
        rows.append(pairs)
    order = sorted({(len(keys) - 1, len(values) - 1)}.union(*rows))
    counts = [[pairs.get(pair, (0, 0, 0)) for pair in order] for pairs in rows]
    table = torch.tensor(counts, dtype=torch.int32, device=device)
    return Work([(parts_k[k], parts_v[v]) for k, v in order], table, counts, heads, key_dim, value_dim)


def dequantized_attention(query: Tensor, work: Work, scaling: float, heads: slice | None = None) -> Tensor:
    """Compute attention over the dequantized tokens in fp32, as the reference for a kernel's output.

    Args:
        heads: KV heads to compute; the output then contains only their query heads. None for all.
    """
    batch, query_heads, count, _ = query.shape
    group = query_heads // work.heads
    chosen = range(*(heads or slice(None)).indices(work.heads))
    out = torch.zeros(batch, count, len(chosen) * group, work.value_dim, device=query.device)
    for row in range(batch):
        total = sum(line[2] for line in work.counts[row])
        ages = torch.arange(total, device=query.device) - (total - count)
        hidden = ages[None, :] > torch.arange(count, device=query.device)[:, None]
        for n, head in enumerate(chosen):
            one = slice(head, head + 1)
            lines = list(zip(work.phases, work.counts[row], strict=True))
            k = torch.cat([read_tokens(p, "key", row, one, a, c, work.key_dim) for (p, _), (a, _, c) in lines if c], 1)
            v = torch.cat(
                [read_tokens(p, "value", row, one, b, c, work.value_dim) for (_, p), (_, b, c) in lines if c], 1
            )
            mine = query[row, head * group : (head + 1) * group].float() * scaling
            scores = work.logits.capped(mine @ k.transpose(-1, -2)).masked_fill(hidden, float("-inf"))
            if work.logits.sinks is not None:
                sink = work.logits.sinks[head * group : (head + 1) * group].float()
                scores = torch.cat([scores, sink[:, None, None].expand(-1, count, 1)], -1)
            weights = scores.softmax(-1)[..., :total]
            out[row, :, n * group : (n + 1) * group] = (weights @ v).transpose(0, 1)
    return out


def relative_error(output: Tensor, wanted: Tensor) -> float:
    """Return the relative error of a result: the norm of the difference divided by the norm of the expected result.

    It is infinite if any element of the result is not finite.
    """
    if not bool(torch.isfinite(output).all()):
        return float("inf")
    return float((output.float() - wanted).norm() / wanted.norm().clamp(min=1e-30))


def random_factors(
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
    if (form.kind, form.bits) in TABLES:
        most = 2 * max(TABLES[form.kind, form.bits])
    step = (torch.rand(shape, generator=rng, device=device) + 0.5) * (4 * spread / most)
    if form.scale == "fp16":
        return ((step * torch.where(torch.rand(shape, generator=rng, device=device) < 0.5, -1, 1)).half(),)
    if form.kind == "folded":
        zero = torch.randint(0, 16, shape, generator=rng, device=device, dtype=torch.int32)
        return ((step.view(torch.int32) & -16 | zero).view(torch.float32),)
    return (step,)


def elements(form: Format, codes: Tensor) -> Tensor:
    """Return the elements for which codes stand, before multiplication by their factor, in fp32.

    Args:
        form: a format with factors; not ``folded``, whose elements depend on the factor.
    """
    if (form.kind, form.bits) in TABLES:
        return torch.tensor(TABLES[form.kind, form.bits], dtype=torch.float32, device=codes.device)[codes.long()]
    if form.kind == "offset":
        return codes.float() - 2 ** (form.bits - 1)
    if form.bits == 8:
        return codes.to(torch.uint8).view(torch.float8_e4m3fn).float()
    magnitudes = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6], device=codes.device)[codes.long() & 7]
    return torch.where(codes >= 8, -magnitudes, magnitudes)
