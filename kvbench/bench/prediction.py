"""Predicted time, bytes and memory of one model, method, context, batch and GPU: a row of ``bench predict``."""

from __future__ import annotations

import argparse
from dataclasses import dataclass, replace
from typing import Any

from kvbench.methods.base import Method
from kvbench.methods.byte_parts import KVBytes, View
from kvbench.methods.bytes import kv_bytes
from kvbench.profiling.intensity import accepted
from kvbench.profiling.roofline import Gpu, Prediction, Shape, max_batch, predict


@dataclass(frozen=True)
class Row:
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
        """Return the bytes of one sequence's keys and values in all layers, at a number of tokens."""
        s = self.shape
        return kv_bytes(
            self.method,
            at,
            layers=s.layers,
            query_heads=s.query_heads,
            heads=s.heads,
            channels=s.channels,
            prompt=self.context,
            view=view,
            windows=s.windows,
        )

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
        """Return the options that split the prefill, as keyword arguments of ``roofline.predict``."""
        return {key: getattr(self.args, key) for key in ("prefill_chunk", "prefill_rows", "mlp_chunk")}

    def row(self, model: str, label: str, fp16_s: float | None) -> Row:
        """Predict times and memory of this case as a row of the table; `fp16_s`: fp16's TPOT, None for its own row."""
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
        return Row(
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
    """Return the size in bytes of the weights that drafting uses, and of those among them that are 4-bit copies.

    Drafting uses the target's own weights, except where 4-bit copies of them are made, which take additional memory.

    `which` weights have a 4-bit copy: none (``same``), those of the feed-forward layers (``int4``), or those of all
    linear layers and lm_head (``int4_all``; a lm_head that shares the weights of the embedding table too, and drafting
    then reads the copy instead of the table). Every group of 128 such weights takes another 4 bytes for its scale and
    zero point (:mod:`kvbench.linear.int4`). `weights` are the bytes of the target's.
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
