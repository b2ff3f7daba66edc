"""Cases to measure: shapes of models, formats of layers, and the bytes that a step must read. Needs no device."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise

from kvbench.attention.phases import Format, pairs_of_row
from kvbench.bench.choices import short_count
from kvbench.bench.choices import token_count as tokens
from kvbench.cache.segments.layout import TILE
from kvbench.quantizers.engine.formats import FORMATS as ENGINE_FORMATS
from kvbench.quantizers.engine.formats import OCTAVE_BLOCK

FULL = Format("full", 16)


@dataclass(frozen=True)
class Model:
    """Dimensions of a model's attention: numbers of query heads and KV heads, and channels per head."""

    query_heads: int
    heads: int
    channels: int


MODELS = {
    "7b": Model(32, 32, 128),
    "8b": Model(32, 8, 128),
    "tiny": Model(6, 2, 64),
    # heads of other sizes, as in Phi-2, Phi-3 mini and Gemma
    "phi2": Model(32, 32, 80),
    "phi3": Model(32, 32, 96),
    "gemma": Model(16, 16, 256),
}


@dataclass(frozen=True)
class Tier:
    """A run of tokens in a layer whose keys all have one format and whose values all have one format.

    `share` is the fraction of the layer's tokens, apart from the full-precision window, that are in this tier.
    """

    key: Format
    value: Format
    share: float = 1.0


@dataclass(frozen=True)
class Layer:
    """Layout of a layer's tokens: runs of tokens in one format each, then the newest in full precision.

    The newest `key_window` keys and `value_window` values are in full precision, and at least those of the step itself.
    """

    tiers: tuple[Tier, ...]
    key_window: int = 0
    value_window: int = 0

    @property
    def single(self) -> bool:
        """True if the layer has only one tier and no window."""
        return len(self.tiers) == 1 and not self.key_window and not self.value_window


def affine_tier(bits: int, key: int, value: int | None, share: float = 1.0) -> Tier:
    """Return a run of tokens (tier) whose keys are quantized per channel and whose values are quantized per token.

    A group of keys has `key` tokens, and a group of values has `value` channels (None: all channels of a head).
    """
    return Tier(Format("affine", bits, "channel", key), Format("affine", bits, "token", value or 0), share)


def _token(kind: str, bits: int) -> Tier:
    return Tier(Format(kind, bits, "token", 0), Format(kind, bits, "token", 0))


def _both(kind: str, bits: int, group: int, scale: str) -> Tier:
    form = Format(kind, bits, "token", group, 0, scale)
    return Tier(form, form)


def _crossed(key: int, value: int) -> Tier:
    return Tier(Format("cross", key, "channel", TILE), Format("cross", value, "token", 0))


def _levels(key: int, value: int) -> Tier:
    return Tier(Format("levels_read", key, "token", 0), Format("affine", value, "token", 0))


def _octave(key: int, value: int, block: int, padded: bool) -> Tier:
    """Return octave with RoPE on all channels; if `padded`, :func:`resolved` finds the padding of a head."""
    return Tier(Format("octave", key, "token", block), Format("octave", value, "token", 0, padding=int(padded)))


_HIERARCHICAL = Tier(Format("hierarchical", 8, "channel", 128), Format("hierarchical", 8, "token", 0))
#: layers by name; a group of 0 channels means the whole head
FORMATS: dict[str, Layer] = {
    "int4_g128": Layer((affine_tier(4, 128, None),)),
    "int4_g64": Layer((affine_tier(4, 64, None),)),
    "int4_g32": Layer((affine_tier(4, 32, 32),)),
    "int8": Layer((_HIERARCHICAL,)),
    "int4_g16": Layer((affine_tier(4, 16, 16),)),
    "int3_g128": Layer((affine_tier(3, 128, None),)),
    "int3_g32": Layer((affine_tier(3, 32, 32),)),
    "int2_g128": Layer((affine_tier(2, 128, None),)),
    "int2_g32": Layer((affine_tier(2, 32, 32),)),
    "atom4": Layer((_token("atom", 4),)),
    "token4": Layer((_token("affine", 4),)),
    # 60% INT2, 30% INT4, 10% exact, in the order in which Cocktail stores its chunks
    "mix": Layer((affine_tier(2, 128, None, 0.6), affine_tier(4, 128, None, 0.3), Tier(FULL, FULL, 0.1))),
    "cocktail": Layer((affine_tier(2, 32, 64, 0.6), affine_tier(4, 32, 64, 0.3), Tier(FULL, FULL, 0.1))),
    # R = 128: keys halfway between two flushes, and the newest 128 values exact
    "kivi2": Layer((affine_tier(2, 32, 32),), key_window=64, value_window=128),
    "kivi4": Layer((affine_tier(4, 32, 32),), key_window=64, value_window=128),
    # W = 64: between 2 W and 3 W tokens are exact
    "logquant2": Layer((affine_tier(2, 64, 32),), key_window=160, value_window=160),
    "quantspec": Layer((_HIERARCHICAL,), key_window=192, value_window=192),
    # inference engines: both sides in the same format
    "int8_per_token_head": Layer((_both("offset", 8, 0, "fp32"),)),
    "fp8": Layer((_both("float", 8, 0, ""),)),
    "fp8_per_token_head": Layer((_both("float", 8, 0, "fp32"),)),
    "int4_per_token_head": Layer((_both("folded", 4, 0, "fp32"),)),
    "q8_0": Layer((_both("offset", 8, 32, "fp16"),)),
    "q4_0": Layer((_both("offset", 4, 32, "fp16"),)),
    "nvfp4": Layer((_both("float", 4, 16, "e4m3"),)),
    "iq4_nl": Layer((_both("iq4_nl", 4, 32, "fp16"),)),
    "octave_k3v4": Layer((_octave(4, 4, OCTAVE_BLOCK, True),)),
    "octave_k3v3": Layer((_octave(4, 3, OCTAVE_BLOCK, True),)),
    "octave_k3v3_compact": Layer((_octave(3, 3, 0, False),)),
    # KVarN, TurboQuant, OSCAR: tokens and queries are rotated outside of the kernel
    "kvarn_k4v4": Layer((_crossed(4, 4),)),
    "kvarn_k4v2": Layer((_crossed(4, 2),)),
    "turboquant_4bit": Layer((_levels(4, 4),)),
    "turboquant_3bit": Layer((_levels(3, 3),)),
    "oscar_int2": Layer((_token("affine", 2),)),
}
#: the formats of inference engines and of methods of 2026, and int4 in groups of 128, with which they are compared
PRODUCTION = (
    "int4_g128", "int4_g32", "int8_per_token_head", "fp8", "fp8_per_token_head", "q8_0", "int4_per_token_head", "q4_0",
    "nvfp4", "iq4_nl", "octave_k3v4", "octave_k3v3", "octave_k3v3_compact", "kvarn_k4v4", "kvarn_k4v2",
    "turboquant_4bit", "turboquant_3bit", "oscar_int2",
)  # fmt: skip
#: formats measured by default
DEFAULT = ("int4_g128", "int4_g64", "int4_g32", "int8", "int2_g128", "int2_g32", "atom4", "mix", "kivi2", "logquant2")


@dataclass(frozen=True)
class Point:
    """Size of a decode step to measure: model, batch, cached tokens and new tokens.

    `model` is a key of :data:`MODELS`. `context` tokens are outside the full-precision window.
    """

    model: str
    batch: int
    context: int
    q_len: int = 1

    def __str__(self) -> str:
        return f"{self.model} B{self.batch} {short_count(self.context)} q{self.q_len}"


def parse_point(text: str) -> Point:
    """Parse a point MODEL:B:N[:Q], such as ``"7b:1:32k"`` or ``"8b:16:32k:5"``.

    Raises:
        ValueError: `text` is not a point.
    """
    parts = text.split(":")
    counts = parts[1:2] + parts[3:]
    if len(parts) not in (3, 4) or parts[0] not in MODELS or not all(n.isdecimal() and int(n) for n in counts):
        raise ValueError(
            f"{text!r} is not a point of the form MODEL:B:N[:Q], such as 7b:1:32k; the models are {', '.join(MODELS)}"
        )
    return Point(parts[0], int(parts[1]), tokens(parts[2]), int(parts[3]) if len(parts) == 4 else 1)


def resolved(form: Format, channels: int) -> Format:
    """Return a format with the group size that it has in heads of `channels` channels.

    In a format that is quantized per token, a group has at most all channels of a head, and a size of 0 stands for all
    of them. Values of octave are padded as the format says for such heads. Other formats are returned unchanged.
    """
    if form.axis != "token":
        return form
    padding = form.padding
    if padding:
        padding = ENGINE_FORMATS[f"octave_k3v{form.bits}"].layouts(channels, channels)[1].padding // 2
    return replace(form, group=min(form.group or channels, channels), padding=padding)


def segment_lengths(layer: Layer, context: int, q_len: int) -> tuple[list[int], list[int]]:
    """Return how many tokens each segment of a layer holds: one list for the keys and one for the values.

    A list has an entry for each tier of the layer, and a last one for the full-precision window.

    `context` keys are outside the full-precision window; both windows have at least `q_len` tokens.
    """
    exact_k, exact_v = max(layer.key_window, q_len), max(layer.value_window, q_len)
    total, summed = context + exact_k, 0.0
    cuts = [0]
    for tier in layer.tiers[:-1]:
        summed += tier.share
        cuts.append(round(context * summed / 128) * 128)
    keys = [b - a for a, b in pairwise([*cuts, context])]
    # key and value windows differ in length, so a token's value may be packed while its key is exact, and vice versa
    values = [*keys[:-1], max(total - exact_v - cuts[-1], 0)]
    return [*keys, exact_k], [*values, total - sum(values)]


def side_bytes(form: Format, count: int, channels: int, width: int = 2) -> int:
    """Return how many bytes the keys, or the values, of `count` tokens take in one KV head: codes and parameters.

    Parameters of an incomplete group are not counted.
    """
    form = resolved(form, channels)
    if form.kind == "full":
        return count * channels * width
    groups = count // form.group * channels if form.axis == "channel" else count * (channels // form.group)
    size = -(-count * channels * form.bits // 8) + form.group_bytes * groups + 2 * form.padding * count
    if form.kind == "cross":  # one more fp16 number a token of keys, or a tile and channel of values
        size += 2 * (count if form.axis == "channel" else count // TILE * channels)
    return size


def step_bytes(layer: Layer, at: Point) -> dict[str, int]:
    """Return the bytes of keys and values that a decode step of the whole batch must read in a layer.

    The result is by format, such as ``int2`` and ``fp16``.
    """
    model, sizes = MODELS[at.model], dict[str, int]()
    for side, counts in zip(("key", "value"), segment_lengths(layer, at.context, at.q_len), strict=True):
        forms = [getattr(tier, side) for tier in layer.tiers] + [FULL]
        for form, count in zip(forms, counts, strict=True):
            name = f"{'fp' if form.kind in ('full', 'float') else 'int'}{form.bits}"
            size = side_bytes(form, count, model.channels) * model.heads * at.batch
            sizes[name] = sizes.get(name, 0) + size
    return sizes


def phase_count(layer: Layer, at: Point) -> int:
    """Return the number of phases in which attention reads a layer.

    A phase is a run of slots in which all keys have one format and all values have one format. As the windows of keys
    and values differ in length, there may be more phases than tiers.
    """
    return len(pairs_of_row(*segment_lengths(layer, at.context, at.q_len)))
