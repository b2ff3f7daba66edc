"""Bytes of keys, values and states for models that the roofline does not describe: mixtures of experts and hybrids.

The bytes are those that a cache really holds: keys and values by each method's formula
(:mod:`kvbench.methods.bytes`), states of fixed size by the model's configuration (:mod:`kvbench.models.layer_types`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvbench.errors import ConfigError
from kvbench.methods.base import Method
from kvbench.methods.byte_parts import KVBytes
from kvbench.methods.bytes import kv_bytes
from kvbench.methods.load import load_method
from kvbench.models.layer_types import ATTENDING, layer_types, state_bytes, unserved
from kvbench.profiling.shape import OTHERS, sliding_windows
from kvbench.util.table import render_table, size

#: bytes per element of keys and values in full precision
WIDTH = 2


@dataclass(frozen=True)
class BytesRow:
    """A row of the table: the bytes of one method's cache for one model, batch size and prompt length.

    Args:
        context: number of prompt tokens per sequence.
        new_tokens: number of tokens generated per sequence.
        kv_bytes: bytes of keys and values of the whole batch at the end of the generation.
        state_bytes: bytes of the states of fixed size of the whole batch.
        of_fp16: the sum of both, divided by the same sum for fp16.
    """

    model: str
    method: str
    batch: int
    context: int
    new_tokens: int
    kv_bytes: int
    state_bytes: int
    of_fp16: float


@dataclass(frozen=True)
class CacheShape:
    """Dimensions on which the bytes of a model's cache depend.

    Args:
        layers: number of layers that keep keys and values.
        channels: channels per head.
        windows: for each of these layers, its sliding window in tokens, or None if it has none.
        state: bytes of the states of fixed size of one sequence.
    """

    layers: int
    query_heads: int
    heads: int
    channels: int
    windows: tuple[int | None, ...]
    state: int

    @classmethod
    def of(cls, numbers: Mapping[str, Any], width: int = WIDTH) -> CacheShape:
        """Return the dimensions of a model from its ``config.json``, or other numbers under transformers' names.

        `width` is the bytes per element of the model's dtype.

        Raises:
            ConfigError: kvbench does not support the model, or a dimension is missing.
        """
        numbers = flat(numbers)
        reason = unserved(numbers)
        if reason:
            raise ConfigError("--model", numbers.get("model_type"), reason)
        for name in ("num_attention_heads", "hidden_size"):
            if not isinstance(numbers.get(name), int):
                raise ConfigError(f"model.{name}", numbers.get(name), "must be a whole number, 1 or greater")
        kinds, heads = layer_types(numbers), numbers["num_attention_heads"]
        count = len(kinds) if kinds is not None else numbers.get("num_hidden_layers")
        if not isinstance(count, int):
            raise ConfigError("model.num_hidden_layers", count, "must be a whole number, 1 or greater")
        sliding = sliding_windows({**numbers, "num_hidden_layers": count}.get) or (None,) * count
        attending = [kinds is None or kind in ATTENDING for kind in kinds or (None,) * count]
        windows = tuple(window for window, attends in zip(sliding, attending, strict=True) if attends)
        return cls(
            layers=len(windows),
            query_heads=heads,
            heads=numbers.get("num_key_value_heads") or heads,
            channels=numbers.get("head_dim") or numbers.get("attention_head_dim") or numbers["hidden_size"] // heads,
            windows=windows,
            state=state_bytes(numbers, width),
        )

    def bytes(self, method: Method, tokens: int, prompt: int, width: int = WIDTH) -> KVBytes:
        """Return the predicted bytes of a sequence of `tokens` tokens, prompt included, with states of fixed size."""
        stored = kv_bytes(
            method,
            tokens,
            layers=self.layers,
            query_heads=self.query_heads,
            heads=self.heads,
            channels=self.channels,
            prompt=prompt,
            width=width,
            windows=self.windows,
        )
        return stored + KVBytes(state=self.state)


def flat(numbers: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the numbers of a configuration with those of its text model, which come first, on one level."""
    text = numbers.get("text_config")
    return {**numbers, **text} if isinstance(text, Mapping) else numbers


def outside_the_roofline(numbers: Mapping[str, Any]) -> bool:
    """Return True if the roofline's formulas for weights and times do not hold for a model."""
    text = numbers.get("text_config")
    return any(numbers.get(name) or (isinstance(text, Mapping) and text.get(name)) for name in OTHERS)


def predict_byte_rows(
    model: str,
    numbers: Mapping[str, Any],
    methods: Mapping[str, Method],
    contexts: Sequence[int],
    batches: Sequence[int],
    new_tokens: int,
) -> list[BytesRow]:
    """Predict the bytes of each combination of context, batch and method for one model.

    Raises:
        ConfigError: kvbench does not support the model, or a method cannot run with it.
    """
    shape, exact, lines = CacheShape.of(numbers), load_method("fp16"), []
    for method in methods.values():
        method.suit(flat(numbers))
        method.check(shape.channels)
        if method.speculation is not None and shape.state:
            raise ConfigError(
                "--methods",
                type(method).__name__.lower(),
                f"speculates, and the states of {model} cannot go back over rejected drafts",
                hint="choose a method without speculation, such as kivi",
            )
    for context in contexts:
        tokens = context + new_tokens - 1
        whole = shape.bytes(exact, tokens, context).total
        for batch in batches:
            for text, method in methods.items():
                stored = shape.bytes(method, tokens, context)
                keys_values, of_fp16 = batch * (stored.total - stored.state), stored.total / whole
                lines.append(
                    BytesRow(model, text, batch, context, new_tokens, keys_values, batch * stored.state, of_fp16)
                )
    return lines


def bytes_table(lines: Sequence[BytesRow]) -> str:
    """Format predictions as a table, followed by a note on what is missing and why."""
    head = ["model", "method", "B", "prompt", "keys and values", "state", "of fp16, %"]
    body = [
        (row.model, row.method, row.batch, row.context, size(row.kv_bytes), size(row.state_bytes), 100 * row.of_fp16)
        for row in lines
    ]
    note = (
        "Bytes only: the roofline's formulas for weights and times do not hold for mixtures of experts and hybrids.\n"
        "state: linear attention, Mamba and convolutions, which no method packs; the share of fp16 includes it."
    )
    return "\n".join([render_table(head, body, head.index("B")), "", note])
