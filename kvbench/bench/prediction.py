"""Predicted time, bytes and memory of one model, method, context, batch and GPU: rows of ``bench predict``.

Models that the roofline does not describe, mixtures of experts and hybrids, have rows of bytes alone. The bytes are
those that a cache really holds: keys and values by each method's formula (:mod:`kvbench.methods.bytes`), states of
fixed size by the model's configuration (:mod:`kvbench.models.layer_types`).
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from kvbench.errors import ConfigError
from kvbench.methods.base import Method
from kvbench.methods.byte_parts import KVBytes, View
from kvbench.methods.bytes import kv_bytes
from kvbench.methods.load import load_method
from kvbench.models.layer_types import ATTENDING, layer_types, state_bytes, unserved
from kvbench.profiling.intensity import accepted
from kvbench.profiling.roofline import Gpu, Prediction, Shape, max_batch, predict
from kvbench.profiling.shape import OTHERS, sliding_windows

#: bytes per element of keys and values in full precision
WIDTH = 2


@dataclass(frozen=True)
class PredictedRow:
    """A row of the table: the roofline's prediction for one model, method, batch size, prompt length and GPU.

    Args:
        context: number of prompt tokens per sequence.
        new_tokens: number of tokens generated per sequence.
        ttft_s: lower bound on the seconds of the prefill of the whole batch.
        tpot_s: lower bound on the seconds of a decode step of the whole batch. With speculation, the seconds of a round
            divided by the mean number of tokens that it yields.
        expected_tpot_s: `tpot_s` plus the time that kernels take in addition to reading their bytes.
        over_fp16: speedup of decoding over fp16: the TPOT of fp16 divided by `tpot_s`.
        tokens_per_s: tokens per second of all sequences together, prefill included if `new_tokens` is more than 1.
        bound: ``memory`` or ``compute``, whichever limits the slower part of a decode step (linear layers, attention).
        prefill_bound: the same for the prefill.
        kv_share: fraction of a decode step's time that attention takes.
        weight_bytes: bytes of the weights, including the 4-bit copies for a draft.
        kv_bytes: bytes of keys and values of the whole batch at the end of the generation.
        kv_bytes_per_step: bytes of keys and values that the first decode step reads.
        kv_of_fp16: `kv_bytes` divided by the bytes that the keys and values would take in fp16.
        decode_peak_bytes: peak memory of decoding.
        prefill_peak_bytes: peak memory of the prefill.
        draft_s: seconds of one drafted token; None without speculation.
        verify_s: seconds of the pass that verifies a round's drafts; None without speculation.
    """

    model: str
    gpu: str
    method: str
    batch: int
    context: int
    new_tokens: int
    ttft_s: float
    tpot_s: float
    expected_tpot_s: float
    over_fp16: float
    tokens_per_s: float
    bound: str
    prefill_bound: str
    kv_share: float
    weight_bytes: int
    kv_bytes: int
    kv_bytes_per_step: int
    kv_of_fp16: float
    decode_peak_bytes: int
    prefill_peak_bytes: int
    fits: bool
    max_batch: int
    draft_s: float | None = None
    verify_s: float | None = None


@dataclass(frozen=True)
class Case:
    """One model, method, batch size, prompt length and GPU, whose times and memory are to be predicted."""

    shape: Shape
    method: Method
    batch: int
    context: int
    gpu: Gpu
    args: argparse.Namespace

    def kv(self, view: View, at: int) -> KVBytes:
        """Return the bytes of the part `view` of one sequence's keys and values in all layers, after `at` tokens."""
        return sequence_bytes(self.shape, self.method, at, prompt=self.context, view=view)

    @property
    def last(self) -> int:
        """Number of cached tokens per sequence at the end of the generation."""
        return self.context + self.args.new_tokens - 1

    def step(self, view: View, weights: int, q_len: int = 1) -> Prediction:
        """Predict the time and the memory of a decode step.

        The time is predicted for the length of the cache halfway through the generation, and the memory for its length
        at the end of the generation. The step reads the part `view` of the cache, and `weights` bytes of weights.
        """
        middle = self.context + (self.args.new_tokens - 1) // 2
        read = self.kv(view, middle)
        # a cache with nothing packed may have evicted tokens; any other holds all that a layer's window shows
        seen = (2 * self.shape.kv_bytes(middle, 1) if read.codes else read.window) / self.shape.kv_bytes(1)
        return predict(
            self.shape,
            self.batch * read.total,
            weights,
            self.batch,
            self.context,
            self.gpu,
            kv_stored_bytes=self.batch * self.kv("all", self.last).total,
            attended=seen,
            q_len=q_len,
            overhead_s_per_layer=self.args.overhead_us * 1e-6,
            **self.parts(),
        )

    def parts(self) -> dict[str, Any]:
        """Return the options that split the prefill into chunks, as keyword arguments of ``roofline.predict``."""
        return {key: getattr(self.args, key) for key in ("prefill_chunk", "prefill_rows", "mlp_chunk")}

    def row(self, model: str, label: str, fp16_s: float | None) -> PredictedRow:
        """Predict times and memory of this case as a row of the table.

        `fp16_s` is the TPOT of fp16, for the speedup over it; None if this case is fp16 itself.
        """
        args, shape = self.args, self.shape
        group = args.weight_group if args.weight_bits < 16 else None
        weights = shape.weight_bytes(args.weight_bits, group, args.head_bits)
        plan, extra, draft_s, verify_s = self.method.speculation, 0, None, None
        if plan is None:
            plain = self.step("all", weights)
            tpot, expected = plain.tpot_s, plain.expected_tpot_s
        else:
            light, extra = draft_weights(shape, weights, plan.weights)
            draft, rounds = self.step("draft", light), []
            for gamma in plan.choices:  # auto: the fastest of them
                checked, yields = self.step("target", weights, gamma + 1), accepted(args.acceptance, gamma)
                rounds.append(((gamma * draft.tpot_s + checked.tpot_s) / yields, gamma, checked, yields))
            tpot, gamma, plain, yields = min(rounds, key=lambda round_: round_[:2])
            verify_s, draft_s = plain.tpot_s, draft.tpot_s
            expected = (gamma * draft.expected_tpot_s + plain.expected_tpot_s) / yields
        stored = self.kv("all", self.last).total
        most = max_batch(shape, stored, weights + extra, self.context, self.gpu, **self.parts())
        whole = replace(plain, tpot_s=tpot)
        return PredictedRow(
            model=model,
            gpu=self.gpu.name,
            method=label,
            batch=self.batch,
            context=self.context,
            new_tokens=args.new_tokens,
            ttft_s=plain.ttft_s,
            tpot_s=tpot,
            expected_tpot_s=expected,
            over_fp16=1.0 if fp16_s is None else fp16_s / tpot,
            tokens_per_s=whole.throughput(self.batch, args.new_tokens) if args.new_tokens > 1 else self.batch / tpot,
            bound=plain.bound,
            prefill_bound=plain.prefill_bound,
            kv_share=plain.kv_share,
            weight_bytes=weights + extra,
            kv_bytes=self.batch * stored,
            kv_bytes_per_step=self.batch * self.kv("all" if plan is None else "target", self.context).total,
            kv_of_fp16=stored / shape.kv_bytes(self.last),
            decode_peak_bytes=plain.decode_peak_bytes + extra,
            prefill_peak_bytes=plain.prefill_peak_bytes + extra,
            fits=self.batch <= most,
            max_batch=most,
            draft_s=draft_s,
            verify_s=verify_s,
        )


def draft_weights(shape: Shape, weights: int, which: str) -> tuple[int, int]:
    """Return the bytes of all weights that drafting reads, and the bytes of the 4-bit copies among them.

    Drafting uses the target's own weights, except where 4-bit copies of them are made, which take additional memory.

    `which` says what has a 4-bit copy: nothing (``same``), the feed-forward layers (``int4``), or all linear layers and
    lm_head (``int4_all``), even if lm_head shares the weights of the embedding table: drafting then reads the copy
    instead of the table. Every group of 128 such weights takes another 4 bytes for its scale and zero point
    (:mod:`kvbench.linear.int4`). `weights` is the size of the target's weights in bytes.
    """
    if which == "same":
        return weights, 0
    exact = weights - 2 * (shape.other_elements + shape.head_elements)  # of all linear layers
    if which == "int4_all":
        light = _packed(shape.linear_elements + shape.head_elements)
        return weights - exact - (2 * shape.head_elements if shape.tied else 0) + light, light
    part = 3 * shape.hidden * shape.intermediate * shape.layers
    linear = shape.linear_elements + (0 if shape.tied else shape.head_elements)
    light = _packed(part)
    return weights - round(exact * part / linear) + light, light


def _packed(elements: int) -> int:
    """Return the bytes of weights in 4 bits in groups of 128."""
    return elements // 2 + 4 * elements // 128


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
        numbers = flat_numbers(numbers)
        reason = unserved(numbers)
        if reason:
            raise ConfigError("--model", numbers.get("model_type"), reason)
        for name in ("num_attention_heads", "hidden_size"):
            if not isinstance(numbers.get(name), int) or numbers[name] < 1:
                problem = "must be a whole number, 1 or greater"
                raise ConfigError(f"model.{name}", numbers.get(name), problem, hint="complete its config.json")
        kinds, heads = layer_types(numbers), numbers["num_attention_heads"]
        count = len(kinds) if kinds is not None else numbers.get("num_hidden_layers")
        if not isinstance(count, int):
            problem = "must be a whole number, 1 or greater"
            raise ConfigError("model.num_hidden_layers", count, problem, hint="complete its config.json")
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
        return sequence_bytes(self, method, tokens, prompt=prompt, width=width) + KVBytes(state=self.state)


def sequence_bytes(shape: Shape | CacheShape, method: Method, tokens: int, **more: Any) -> KVBytes:
    """Return the bytes of one sequence's keys and values in all layers; `more` as for :func:`kv_bytes`."""
    sizes = {name: getattr(shape, name) for name in ("layers", "query_heads", "heads", "channels", "windows")}
    return kv_bytes(method, tokens, **sizes, **more)


def flat_numbers(numbers: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a configuration in which the entries of ``text_config``, if it has one, replace those at the top level."""
    text = numbers.get("text_config")
    return {**numbers, **text} if isinstance(text, Mapping) else numbers


def outside_the_roofline(numbers: Mapping[str, Any]) -> bool:
    """Return True if the roofline's formulas for weights and times do not hold for a model."""
    text = numbers.get("text_config")
    parts = (numbers, text) if isinstance(text, Mapping) else (numbers,)
    return any(part.get(name) for part in parts for name in OTHERS)


def predicted_bytes(
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
        method.suit(flat_numbers(numbers))
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
                sizes = batch * (stored.total - stored.state), batch * stored.state
                lines.append(BytesRow(model, text, batch, context, new_tokens, *sizes, stored.total / whole))
    return lines
