"""Outliers on purpose: channels of keys or values that are larger than the rest, in a model that computes the same.

Large models have key channels far above the others, which decide what a format can store; small ones do not. Multiplying
the rows of W_K that make a pair of RoPE channels by a factor, and dividing those rows of W_Q by it for each query head
of the group, changes no product of a query with a key: RoPE turns the two channels of a pair into each other, so both
need the same factor. The same is true of rows of W_V and columns of W_O. With a power of two the logits are the same
to the bit. Biases of queries, keys and values are scaled with their rows.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from kvbench.errors import ConfigError, ModelError

if TYPE_CHECKING:
    from torch import Tensor, nn
    from transformers import PreTrainedModel

NONE = "none"
#: before the outliers in the name of a model
MARK = " outliers="
#: architectures whose RoPE pairs channel i with channel i + D/2 and that use keys as they are projected
SERVED = (
    "llama",
    "mistral",
    "mixtral",
    "qwen2",
    "qwen2_moe",
    "phi3",
    "gemma",
    "gemma2",
    "granite",
    "starcoder2",
    "smollm3",
)
#: largest factor, and most pairs of channels per head
MOST_FACTOR, MOST_PAIRS = 65536.0, 64
#: Hydra reads no equals signs in a value
SYNTAX = "NAME:KEY:VALUE..., such as first_last:factor:16; layers: all, ends or 0+29; pairs: 2; factor: 64; side: keys, values"


@dataclass(frozen=True)
class Outliers:
    """Which channels are made larger, and how much.

    Args:
        side: ``keys`` or ``values``.
        layers: ``all``, ``ends`` (the first and the last), or indices joined by plus signs; -1 is the last.
        pairs: pairs of RoPE channels per KV head, spread evenly over its pairs. Of values, as many pairs of channels.
        factor: how many times larger they become.
    """

    side: str
    layers: str
    pairs: int
    factor: float

    def chosen(self, count: int) -> list[int]:
        """Return the indices of the layers among `count`; raise ConfigError if there is no such layer."""
        if self.layers in ("all", "ends"):
            return list(range(count)) if self.layers == "all" else sorted({0, count - 1})
        places = [int(text) for text in self.layers.split("+")]
        beyond = [place for place in places if not -count <= place < count]
        if beyond:
            raise ConfigError("model.outliers", self.layers, f"names a layer that the model lacks: it has {count}")
        return sorted({place % count for place in places})

    def channels(self, rotary: int, count: int) -> list[int]:
        """Return the channels of one head that become larger.

        Args:
            rotary: channels that RoPE turns; the first of a pair lies in the first half of them.
            count: all channels of a head, which values choose from.
        """
        half = (rotary if self.side == "keys" else count) // 2
        if self.pairs > half:
            raise ConfigError("model.outliers", self.pairs, f"is more than the {half} pairs of channels of a head")
        firsts = [(2 * pair + 1) * half // (2 * self.pairs) for pair in range(self.pairs)]
        return sorted([*firsts, *(first + half for first in firsts)])


#: by name. The options that a text gives replace these
PRESETS = {
    "keys": Outliers("keys", "all", 2, 64.0),
    "values": Outliers("values", "all", 2, 64.0),
    "first_last": Outliers("keys", "ends", 2, 64.0),
}


def outliers(text: str) -> Outliers | None:
    """Read a value of ``model.outliers``, such as ``first_last`` or ``keys:layers:0+29:factor:16``; None for ``none``.

    Raises:
        ConfigError: it names no preset, or an option is wrong.
    """
    name, *options = text.split(":")
    pairs = list(zip(options[::2], options[1::2], strict=False))
    if text == NONE:
        return None
    if name not in PRESETS:
        raise ConfigError("model.outliers", text, "is no preset of outliers", allowed=(NONE, *PRESETS), hint=SYNTAX)
    known = PRESETS[name]
    for key, value in pairs:
        try:
            known = replace(known, **{key: _option(key, value)})
        except ValueError:
            raise ConfigError("model.outliers", text, f"has a wrong option: {key}:{value}", hint=SYNTAX) from None
    if len(options) % 2:
        raise ConfigError("model.outliers", text, f"has an option without a value: {options[-1]}", hint=SYNTAX)
    return known


def _option(key: str, value: str) -> str | int | float:
    """Return an option as its type; raise ValueError if it is unknown or out of bounds."""
    if key == "side" and value in ("keys", "values"):
        return value
    if key == "layers" and (value in ("all", "ends") or all(-4096 <= int(part) < 4096 for part in value.split("+"))):
        return value
    if key == "pairs" and 1 <= int(value) <= MOST_PAIRS:
        return int(value)
    if key == "factor" and 0 < float(value) <= MOST_FACTOR:
        return float(value)
    raise ValueError(key)


def written(chosen: Outliers) -> str:
    """Return the shortest text that means these outliers: the same for every way of typing them."""

    def options(preset: Outliers) -> list[str]:
        pairs = [(key, value) for key, value in vars(chosen).items() if value != vars(preset)[key]]
        return [f"{key}:{value:g}" if isinstance(value, float) else f"{key}:{value}" for key, value in pairs]

    name = min(PRESETS, key=lambda name: len(options(PRESETS[name])))
    return ":".join([name, *options(PRESETS[name])])


def named(model: Mapping[str, Any]) -> dict[str, Any]:
    """Return the configuration group `model` with its outliers in its name, so that no row lacks them.

    Raises:
        ConfigError: ``model.outliers`` is wrong.
    """
    chosen = outliers(str(model.get("outliers", NONE)))
    if chosen is None:
        return dict(model)
    text = written(chosen)
    return {**model, "outliers": text, "name": f"{base_name(str(model.get('name')))}{MARK}{text}"}


def base_name(name: str) -> str:
    """Return the name of a model without its outliers."""
    return name.partition(MARK)[0]


def make_outliers(name: str, model: PreTrainedModel, chosen: Outliers) -> None:
    """Scale the weights of a model in place; `name` is the model's, for messages.

    Raises:
        ModelError: the model's keys are normed after their projection, its RoPE pairs other channels, or its weights
            are quantized.
        ConfigError: the model lacks a layer or has fewer channels.
    """
    import torch

    from kvbench.models.layers import attending
    from kvbench.models.projections import attentions, head_dim, kv_heads

    text = model.config.get_text_config(decoder=True)
    kind = type(model).__name__
    normed = sorted({part for module in attentions(model) for part in ("k_norm", "q_norm") if hasattr(module, part)})
    if normed:
        raise _refused(name, f"{kind} norms its keys after their projection ({', '.join(normed)}), which undoes them")
    if text.model_type not in SERVED:
        raise _refused(name, f"{kind} is none of the architectures whose channels are known: {', '.join(SERVED)}")
    size, groups = head_dim(model), kv_heads(model)
    rope = getattr(text, "rope_parameters", None) or {}
    rotary = int(size * (rope.get("partial_rotary_factor") or getattr(text, "partial_rotary_factor", None) or 1))
    channels = chosen.channels(rotary, size)
    places = set(chosen.chosen(len(attending(model.config))))
    with torch.no_grad():
        for place, module in enumerate(attentions(model)):
            if place not in places:
                continue
            parts = _parts(name, module, text.num_attention_heads * size, groups * size)
            larger, smaller = ("k", "q") if chosen.side == "keys" else ("v", "o")
            _scale(parts[larger], channels, size, chosen.factor)
            _scale(parts[smaller], channels, size, 1 / chosen.factor)


def _parts(name: str, module: nn.Module, queries: int, keys: int) -> dict[str, list[Tensor]]:
    """Return the weights and biases of an attention layer whose first dimension are channels, by ``q``, ``k``, ``v``.

    Those of ``o`` are its weight's columns. Views of them: scaling a view scales the weights. `queries` and `keys` are
    the numbers of channels of all query heads and of all KV heads.
    """
    fused = getattr(module, "qkv_proj", None)
    linears = {letter: getattr(module, f"{letter}_proj", None) for letter in "qkvo"} if fused is None else {}
    every = [fused, module.o_proj] if fused is not None else [*linears.values()]
    for linear in every:
        if type(linear).__name__ != "Linear" or not linear.weight.is_floating_point():  # type: ignore[union-attr]
            raise _refused(name, f"its weights are not plain ones ({type(linear).__name__})")
    if fused is None:
        parts = {letter: _rows(linears[letter]) for letter in "qkv"}
    else:
        borders = {"q": (0, queries), "k": (queries, queries + keys), "v": (queries + keys, None)}
        parts = {letter: [rows[start:stop] for rows in _rows(fused)] for letter, (start, stop) in borders.items()}
    return {**parts, "o": [module.o_proj.weight.T]}  # type: ignore[union-attr]


def _rows(linear: Any) -> list[Tensor]:
    return [linear.weight, *([] if linear.bias is None else [linear.bias])]


def _scale(rows: list[Tensor], channels: list[int], size: int, factor: float) -> None:
    """Multiply some channels of each head by a factor, in tensors whose first dimension are the channels of all heads."""
    for tensor in rows:
        tensor.unflatten(0, (-1, size))[:, channels] *= factor


def _refused(name: str, reason: str) -> ModelError:
    return ModelError(
        f"model {name}: model.outliers cannot be made: {reason}.\n"
        "  hint: choose a model such as Llama, Mistral or Qwen2 with its own weights, or model.outliers=none"
    )
