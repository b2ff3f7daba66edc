"""The configurations that :mod:`kvbench.attention.check_kernels` checks and times."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from kvbench.attention.phases import Format, Work
from kvbench.attention.synthetic import FULL, Piece, layer

#: query heads, KV heads, channels
SHAPES = {"7b": (32, 32, 128), "8b": (32, 8, 128), "tiny": (6, 2, 64)}

DEVICE = "cuda"

Tier = tuple[Format, Format, float]


@dataclass(frozen=True)
class Case:
    """One configuration of a decode step, for checking or timing a kernel.

    Args:
        shape: key of :data:`SHAPES`, which gives the numbers of heads and channels.
        tiers: the packed segments of the layer, one triple each: the format of the keys, the format of the values, and
            the fraction of the tokens outside the window that the segment holds. All other tokens are in full
            precision.
        context: number of cached tokens in each row of the batch; its length is the batch size.
        window: two numbers: how many of the newest keys, and how many of the newest values, are in full precision.
        timed: True to measure the time as well. Only two KV heads are then checked for correctness.
    """

    name: str
    shape: str
    tiers: tuple[Tier, ...]
    context: tuple[int, ...]
    window: tuple[int, int] = (9, 9)
    queries: int = 1
    dtype: torch.dtype = torch.float16
    timed: bool = False

    def shortened(self) -> Case:
        """Return a copy of the case with at most two rows of at most 1501 tokens, to compile its kernel quickly."""
        return replace(self, context=tuple(min(n, 1500 + i) for i, n in enumerate(self.context[:2])))

    def lengths(self, tokens: int) -> tuple[list[int], list[int]]:
        """Return how many tokens of a row each segment holds.

        Returns:
            Two lists, for the segments of the keys and for those of the values: the number of tokens in each packed
            segment, in the order of `tiers`, then the number in full precision. Each list adds up to `tokens`.
        """
        exact_k, exact_v = self.window
        keys = [int((tokens - exact_k) * share) // 128 * 128 for _, _, share in self.tiers]
        if keys and sum(share for _, _, share in self.tiers) > 0.999:
            keys[-1] = tokens - exact_k - sum(keys[:-1])
        values = list(keys)
        if values:
            values[-1] -= exact_v - exact_k
        return [*keys, tokens - sum(keys)], [*values, tokens - sum(values)]

    def work(self, seed: int) -> Work:
        """Create a layer of this configuration with random contents on the GPU, as the argument `work` of a kernel."""
        _, heads, channels = SHAPES[self.shape]
        rows = [self.lengths(tokens) for tokens in self.context]
        keys = [Piece(key, [row[0][i] for row in rows]) for i, (key, _, _) in enumerate(self.tiers)]
        values = [
            Piece(value, [row[1][i] for row in rows], tile=key.group) for i, (key, value, _) in enumerate(self.tiers)
        ]
        return layer(
            [*keys, Piece(FULL, [row[0][-1] for row in rows])],
            [*values, Piece(FULL, [row[1][-1] for row in rows])],
            heads=heads,
            key_dim=channels,
            value_dim=channels,
            dtype=self.dtype,
            device=DEVICE,
            seed=seed,
        )

    def query(self) -> Tensor:
        """Return random queries ``[B, Hq, q, D]``, scaled such that the scores have a standard deviation of 1 to 2."""
        query_heads, _, channels = SHAPES[self.shape]
        shape = (len(self.context), query_heads, self.queries, channels)
        rng = torch.Generator(DEVICE).manual_seed(1)
        return (torch.randn(shape, generator=rng, device=DEVICE) * 1.5).to(self.dtype)


def channel(bits: int, group: int, kind: str = "affine") -> Format:
    """Return a per-channel format: `group` consecutive tokens of one channel share a scale and a minimum."""
    return Format(kind, bits, "channel", group)


def token(bits: int, group: int, kind: str = "affine") -> Format:
    """Return a per-token format: `group` consecutive channels of one token share a scale and a minimum (or zero)."""
    return Format(kind, bits, "token", group)


def factored(kind: str, bits: int, group: int, scale: str = "fp16") -> Format:
    """Return a per-token format: each value is the factor of its group of channels times the element of its code.

    Args:
        kind: ``offset``, ``folded``, ``float``, ``iq4_nl`` or ``octave`` (:class:`kvbench.attention.phases.Format`).
        scale: type of the factors: ``fp16``, ``fp32``, ``e4m3``, or empty if there are none.
    """
    return Format(kind, bits, "token", group, 0, scale)


def windows(bits: int, window: int) -> Format:
    """Return a per-channel format as LogQuant uses it, which packs `window` tokens at a time.

    These tokens are divided into as few groups as possible with at most 64 tokens each. A group may therefore lie
    across the boundary of two tiles.
    """
    return Format("affine", bits, "channel", -(-window // -(-window // 64)), window)


def one_packed_segment(key: Format, value: Format) -> tuple[Tier, ...]:
    """Return the :attr:`Case.tiers` of a layer with one packed segment, which holds all tokens outside the window."""
    return ((key, value, 1.0),)


def kvarn(key: int, value: int, tile: int = 128, channels: int = 128) -> tuple[Tier, ...]:
    """Return the :attr:`Case.tiers` of a layer in KVarN's format, whose keys and values have cross factors."""
    return one_packed_segment(channel(key, tile, "cross"), token(value, channels, "cross"))


INT4, INT2 = one_packed_segment(channel(4, 128), token(4, 128)), one_packed_segment(channel(2, 128), token(2, 128))
INT8 = one_packed_segment(channel(8, 128, "hierarchical"), token(8, 128, "hierarchical"))
INT4_G32, INT2_G32 = one_packed_segment(channel(4, 32), token(4, 32)), one_packed_segment(channel(2, 32), token(2, 32))
MIX = ((channel(2, 128), token(2, 128), 0.6), (channel(4, 128), token(4, 128), 0.3))
LOGQUANT = one_packed_segment(channel(2, 64), token(2, 128))
LOGQUANT_W42 = one_packed_segment(windows(2, 42), token(2, 64))
#: formats of inference engines, by name; those with one factor a token are for heads of 128 channels
ENGINES = {
    "int8_per_token_head": factored("offset", 8, 128, "fp32"),
    "fp8": factored("float", 8, 128, ""),
    "fp8_per_token_head": factored("float", 8, 128, "fp32"),
    "int4_per_token_head": factored("folded", 4, 128, "fp32"),
    "q8_0": factored("offset", 8, 32),
    "q4_0": factored("offset", 4, 32),
    "nvfp4": factored("float", 4, 16, "e4m3"),
    "iq4_nl": factored("iq4_nl", 4, 32),
    "octave 4": factored("octave", 4, 64),
    "octave 3": factored("octave", 3, 128),
}


def correctness() -> list[Case]:
    """Return the cases that check correctness.

    Together they cover every format, several numbers of heads and several step sizes. Each has a context of a few
    tiles, and windows that do not end at a tile boundary.
    """
    cases = []
    for bits in (2, 4, 8):
        for group in (32, 64, 128):
            tiers = one_packed_segment(channel(bits, group), token(bits, group))
            cases.append(Case(f"right int{bits} G{group}", "7b", tiers, (1491, 1024), (37, 128)))
    odd = {
        "hierarchical": INT8,
        "int4 per token G32": one_packed_segment(token(4, 32), token(4, 32)),
        "int4 per token G128": one_packed_segment(token(4, 128), token(4, 128)),
        "int2 per token G64": one_packed_segment(token(2, 64), token(2, 64)),
        "atom 4": one_packed_segment(token(4, 128, "atom"), token(4, 128, "atom")),
        "atom 2": one_packed_segment(token(2, 128, "atom"), token(2, 128, "atom")),
        "int4 keys int2 values": one_packed_segment(channel(4, 64), token(2, 64)),
        "int8 keys int4 values": one_packed_segment(channel(8, 128), token(4, 64)),
        "mix": MIX,
        "exact": (),
        "int2 W42": LOGQUANT_W42,
        "int4 W85": one_packed_segment(windows(4, 85), token(4, 64)),
        "int8 W96": one_packed_segment(windows(8, 96), token(8, 128)),
        "int4 W42, int2 values": one_packed_segment(windows(4, 42), token(2, 64)),
    }
    odd |= {name: one_packed_segment(form, form) for name, form in ENGINES.items()}
    odd["fp8 keys, nvfp4 values"] = one_packed_segment(ENGINES["fp8"], ENGINES["nvfp4"])
    cases += [Case(f"right {name}", "7b", tiers, (1491, 1024), (37, 90)) for name, tiers in odd.items()]
    cases += [
        Case(f"right {name} q5", "8b", one_packed_segment(form, form), (1491, 700), (37, 128), 5, torch.bfloat16)
        for name, form in ENGINES.items()
    ]
    int4, int2, half = (
        one_packed_segment(channel(4, 128), token(4, 128)),
        INT2_G32,
        one_packed_segment(channel(4, 128), token(4, 64)),
    )
    steps = [("7b", 9, int4), ("8b", 1, int4), ("8b", 5, int2), ("8b", 9, int4), ("tiny", 1, half), ("tiny", 5, int2)]
    for shape, queries, tiers in steps:
        name = f"right {shape} q{queries} int{tiers[0][0].bits}"
        cases.append(Case(name, shape, tiers, (1491, 700), (37, 128), queries))
    cases += [
        Case("right 8b q5 hierarchical", "8b", INT8, (1491, 700), (37, 128), 5),
        Case("right bf16 kivi", "8b", INT4, (1491, 700), (37, 128), 5, torch.bfloat16),
        Case("right bf16 mix", "7b", MIX, (1491, 1024), (37, 90), 1, torch.bfloat16),
    ]
    for key, value, tile in ((4, 4, 128), (4, 2, 128), (4, 2, 64), (2, 2, 128), (2, 4, 64), (3, 3, 128), (8, 8, 64)):
        name = f"right kvarn k{key}v{value} G{tile}"
        cases.append(Case(name, "7b", kvarn(key, value, tile), (1491, 1024), (37, 37)))
    cases += [
        Case("right kvarn k4v4 G64 tiny", "tiny", kvarn(4, 4, 64, 64), (1491, 700), (37, 37)),
        Case("right kvarn k4v2 8b q5", "8b", kvarn(4, 2), (1491, 700), (37, 37), 5),
        Case("right kvarn k4v4 G64 8b q5 bf16", "8b", kvarn(4, 4, 64), (1491, 700), (37, 37), 5, torch.bfloat16),
        Case("right kvarn k8v4 8b q9", "8b", kvarn(8, 4), (1491, 700), (37, 37), 9),
        Case(
            "right kvarn keys only",
            "8b",
            one_packed_segment(channel(4, 128, "cross"), token(4, 128)),
            (1491, 700),
            (37, 90),
        ),
    ]
    return cases


def timed() -> list[Case]:
    """Return the cases whose time is measured."""

    def case(name: str, shape: str, tiers: tuple[Tier, ...], batch: int, thousands: int, **more: object) -> Case:
        context = (thousands * 1024 + 9,) * batch
        label = f"{name} {shape} B{batch} {thousands}k" + (f" q{more['queries']}" if "queries" in more else "")
        return Case(label, shape, tiers, context, timed=True, **more)  # type: ignore[arg-type]

    cases = [case("int4", "7b", INT4, 1, n) for n in (4, 32, 128)]
    cases += [case("int4", "7b", INT4, 8, 32), case("int4", "8b", INT4, 1, 128), case("int4", "8b", INT4, 16, 32)]
    cases += [case("int4 G32", "7b", INT4_G32, 1, 128), case("int2 G32", "7b", INT2_G32, 1, 128)]
    cases += [case("int8", "7b", INT8, 1, n, queries=q) for n in (32, 128) for q in (1, 5)]
    cases += [case("int8", "8b", INT8, 1, 128, queries=5), case("int4", "8b", INT4, 1, 128, queries=5)]
    cases += [case("int2", "7b", INT2, 1, 128), case("int2", "7b", INT2, 8, 32)]
    cases += [case("atom", "7b", one_packed_segment(token(4, 128, "atom"), token(4, 128, "atom")), 1, 32)]
    cases += [case("exact", "7b", (), 1, 32)]
    cases += [case(name, "7b", one_packed_segment(form, form), 1, 128) for name, form in ENGINES.items()]
    cases += [case("kvarn k4v4", shape, kvarn(4, 4), 1, n) for shape in ("7b", "8b") for n in (32, 128)]
    cases += [case("kvarn k4v2", shape, kvarn(4, 2), 1, n) for shape in ("7b", "8b") for n in (32, 128)]
    for n in (4, 128):
        cases.append(case("mix 10/30/60", "7b", MIX, 1, n))
        cases.append(case("kivi window", "7b", INT4, 1, n, window=(37, 128)))
        cases.append(case("logquant W64", "7b", LOGQUANT, 1, n, window=(150, 150)))
    cases.append(case("logquant W42", "7b", LOGQUANT_W42, 1, 32, window=(100, 100)))
    return cases


def cases() -> list[Case]:
    """Return all cases: first those that check correctness, then the timed ones."""
    return [*correctness(), *timed()]
