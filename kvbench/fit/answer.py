"""Formats by what they give on a card: longest context, largest batch, time per token, measured loss; and the choice.

Memory follows vLLM's rule: a share of what the driver reports holds the weights, the peak of a profiled pass, what the
runtime itself takes, and the cache. Times are a line fitted to kvbench's captured steps on an H200
(:class:`StepTimes`, ``python -m experiments.fit``), with the bandwidth of the card that is asked for.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, Literal

from kvbench.errors import KvbenchError
from kvbench.fit.engines import CacheFormat, refusal
from kvbench.fit.model import FitModel
from kvbench.profiling.roofline import KERNELS, Gpu, live_elements

#: bytes that a runtime takes beside torch's allocator, on one GPU and on each of several that share layers (NCCL's
#: buffers; llama.cpp's, which have whole layers, do without): vLLM 0.19's logs of llm-d-incubation/llm-d-planner
#: (accuracy/results/v0.19.0)
RUNTIME, RUNTIME_SEVERAL = 0.25 * 2**30, 2.1 * 2**30
#: tokens of vLLM's profiled pass: on cards with this memory and on smaller ones (its defaults for a server)
BATCHED, BATCHED_SMALL, LARGE = 8192, 2048, 70 * 2**30
#: bytes per sequence and entry of the vocabulary for which vLLM's sampler is profiled, fitted to the same logs
SAMPLER = 14
#: KL divergence from fp16 in nats up to which a format counts as close, and the share of time that a change must save
CLOSE, WORTH = 0.01, 0.05
#: longest context and largest batch that are looked for
MOST_CONTEXT, MOST_BATCH = 1 << 24, 1 << 14
#: most GPUs that a hint names
MOST_GPUS = 64
Basis = Literal["measured on this card", "measured on an H200, scaled", "roofline only"]


@cache
def measured() -> Mapping[str, Any]:
    """Return what was measured: coefficients and errors of step times, KL divergences and flips by line."""
    return json.loads(Path(__file__).with_name("measured.json").read_text(encoding="utf-8"))  # type: ignore[no-any-return]


@dataclass(frozen=True)
class StepTimes:
    """The line for the seconds of a decode step.

    A step takes the time to read its weights, the fixed time of its kernels, `cache` times the time to read its cache,
    and `layer` microseconds a layer, with `batch` more for several sequences; the last three by least squares.

    Args:
        cache: factor of the time to read the cache, for exact and for packed formats.
        layer: microseconds per layer, likewise.
    """

    cache: Mapping[str, float]
    layer: Mapping[str, float]
    batch: float

    def seconds(self, gpu: Gpu, layers: int, weights: float, cached: float, packed: bool, batch: int) -> float:
        """Return the seconds of a step that reads `weights` and `cached` bytes."""
        kind = "packed" if packed else "exact"
        fixed = KERNELS * gpu.kernel_s + 1e-6 * (self.layer[kind] + self.batch * (batch > 1))
        return (weights + self.cache[kind] * cached) / gpu.read + layers * fixed


@dataclass(frozen=True)
class Wish:
    """The question: a model, a card, and the sequences that it is to serve.

    Args:
        gpus: how many GPUs share each layer, or the layers.
        utilization: share of the card's memory that may be used.
        whole_layers: each GPU has whole layers, as llama.cpp places them, and they work one after the other.
    """

    model: FitModel
    gpu: Gpu
    context: int
    batch: int = 1
    gpus: int = 1
    utilization: float = 0.92
    whole_layers: bool = False

    @property
    def part(self) -> float:
        """Share of the weights on each GPU; of whole layers, on the one with the most."""
        return -(-self.model.layers // self.gpus) / self.model.layers if self.whole_layers else 1 / self.gpus

    def placed(self, form: CacheFormat) -> Wish:
        """Return the question for a format: one that llama.cpp alone has is placed as it does."""
        return replace(self, whole_layers=True) if form.flags.keys() == {"llama.cpp"} else self

    @property
    def weights(self) -> float:
        """Bytes of weights on each GPU."""
        return self.model.weight_bytes * self.part

    def cached(self, form: CacheFormat, context: int, batch: int) -> int:
        """Return the bytes that the caches of `batch` sequences of `context` tokens take on each GPU."""
        if self.whole_layers:
            return math.ceil(batch * self.model.cache_bytes(form.method, context) * self.part)
        return batch * self.model.cache_bytes(form.method, context, self.gpus)

    @property
    def budget(self) -> float:
        """Bytes that may be used on each GPU."""
        return self.utilization * self.gpu.usable

    def profiled(self, tokens: int, sequences: int) -> float:
        """Return the peak of vLLM's profiled pass in bytes: of the layers, or of the sampler beside three hiddens."""
        shape = self.model.shape()
        sampling = SAMPLER * sequences * shape.vocabulary + 6 * tokens * shape.hidden
        return max(2.0 * live_elements(shape, tokens), float(sampling))

    def activations(self, context: int, batch: int) -> float:
        """Return the peak of the pass that vLLM profiles for sequences of this length and number."""
        return self.profiled(min(context * batch, BATCHED if self.gpu.memory >= LARGE else BATCHED_SMALL), batch)

    def left(self, activations: float) -> float:
        """Return the bytes beside weights, activations and runtime on each GPU; negative if those are too large."""
        runtime = RUNTIME if self.gpus == 1 or self.whole_layers else RUNTIME_SEVERAL
        return self.budget - self.weights - activations - runtime

    def room(self, context: int, batch: int) -> float:
        """Return the bytes that are left for the cache on each GPU."""
        return self.left(self.activations(context, batch))

    def fits_placed(self, forms: Sequence[CacheFormat]) -> bool:
        """Return True if the question's sequences fit in one of these formats, each placed as its engines do."""
        return any(self.placed(form).fits(form, self.context, self.batch) for form in forms)

    def enough_gpus(self, forms: Sequence[CacheFormat]) -> int | None:
        """Return the smallest larger number of GPUs that can share the model and suffice; None if there is none."""
        counts = range(1, self.model.layers + 1) if self.whole_layers else self.model.gpu_counts()
        more = (count for count in counts if self.gpus < count <= MOST_GPUS)
        return next((count for count in more if replace(self, gpus=count).fits_placed(forms)), None)

    def fits(self, form: CacheFormat, context: int, batch: int) -> bool:
        """Return True if `batch` sequences of `context` tokens fit."""
        return self.cached(form, context, batch) <= self.room(context, batch)


@dataclass(frozen=True)
class FitRow:
    """A format on a card.

    Args:
        longest_context: most tokens of each of the batch's sequences; 0 if none fits.
        largest_batch: most sequences of the asked context.
        cache_bytes: bytes of the cache at the asked context and batch, on each GPU.
        tpot_s: expected seconds of a step at that point; `tpot_low_s` and `tpot_high_s` are its interval, and None
            where nothing like it was measured, so that only `tpot_low_s`, the bound of the data sheet, is known.
        basis: what the time rests on.
        kl, kl_low, kl_high: KL divergence from fp16 in nats, measured on another model; None if not measured.
        flips: share of tokens at which another one is the most probable.
        flags: by engine, what chooses the format, for the engines that serve it on this card.
        refused: by engine that has the format and does not serve it on this card, why.
        commands: by engine, the command; None for an engine without flags.
    """

    format: str
    fits: bool
    longest_context: int
    largest_batch: int
    cache_bytes: int
    tpot_s: float
    tpot_low_s: float
    tpot_high_s: float | None
    basis: Basis
    kl: float | None
    kl_low: float | None
    kl_high: float | None
    flips: float | None
    flags: Mapping[str, str]
    refused: Mapping[str, str]
    commands: Mapping[str, str | None]


def greatest(fits: Callable[[int], bool], most: int) -> int:
    """Return the greatest number from 1 to `most` that fits, where each smaller one does too; 0 if none does."""
    low, high = 0, most
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return low


def step_time(wish: Wish, form: CacheFormat) -> tuple[float, float, float | None, Basis]:
    """Return the seconds of a step, their interval, and what they rest on."""
    model, known = wish.model, measured()["tpot"]
    shared = replace(wish, gpus=1) if wish.whole_layers else wish  # one GPU reads at a time
    weights, cached = model.read_bytes(wish.batch) * shared.part, shared.cached(form, wish.context, wish.batch)
    line = StepTimes(known["cache"], known["layer_us"], known["batch_us"])
    expected = line.seconds(wish.gpu, model.layers, weights, cached, not form.exact, wish.batch)
    floor = (weights + cached) / (wish.gpu.measured_read or wish.gpu.bandwidth)
    if wish.gpus > 1 or not (form.timed and model.plain) or wish.gpu.name == "cpu":
        return expected, floor, None, "roofline only"
    here = wish.gpu.name == known["gpu"]
    low, high = (known if here else measured()["elsewhere"])["error"]
    basis: Basis = "measured on this card" if here else "measured on an H200, scaled"
    return expected, max(floor, expected / (1 + high)), expected / (1 + low), basis


def fit_row(wish: Wish, form: CacheFormat, commands: Mapping[str, str | None]) -> FitRow:
    """Return what a format gives."""
    limit = wish.model.longest or MOST_CONTEXT
    # what a format costs keys and values says nothing of a latent vector
    line = {} if wish.model.latent else measured()["fidelity"]["lines"].get(form.line or "", {})
    if form.exact and line:  # the reference itself; what was measured of it is how references are rounded
        line = dict.fromkeys(("kl", "kl_low", "kl_high", "flips"), 0.0)
    refused = {engine: why for engine in form.flags if (why := refusal(engine, form, wish.gpu))}
    expected, low, high, basis = step_time(wish, form)
    return FitRow(
        format=form.name,
        fits=wish.fits(form, wish.context, wish.batch),
        longest_context=greatest(lambda tokens: wish.fits(form, tokens, wish.batch), limit),
        largest_batch=greatest(lambda batch: wish.fits(form, wish.context, batch), MOST_BATCH),
        cache_bytes=wish.cached(form, wish.context, wish.batch),
        tpot_s=expected,
        tpot_low_s=low,
        tpot_high_s=high,
        basis=basis,
        kl=line.get("kl"),
        kl_low=line.get("kl_low"),
        kl_high=line.get("kl_high"),
        flips=line.get("flips"),
        flags={engine: flag for engine, flag in form.flags.items() if engine not in refused},
        refused=refused,
        commands={engine: None if engine in refused else command for engine, command in commands.items()},
    )


def chosen(rows: Sequence[FitRow], engine: str | None = None) -> FitRow | None:
    """Return the format to use: the one nearest to fp16 among those that are close and nearly the fastest of these.

    Nearly: the fastest saves less than :data:`WORTH` of the time. Where none that fits is close (:data:`CLOSE`), it is
    the one with the least KL divergence, and of formats that were not measured the one with the most bits. None if
    nothing fits. `engine` leaves only the formats that it has.
    """
    rows = [row for row in rows if row.fits and (engine in row.flags if engine else row.flags)]
    near = [row for row in rows if row.kl is not None and row.kl <= CLOSE]
    if near:
        fastest = min(row.tpot_s for row in near)
        return min((row for row in near if fastest > (1 - WORTH) * row.tpot_s), key=lambda row: row.kl or 0.0)
    known = [row for row in rows if row.kl is not None]
    return min(known, key=lambda row: row.kl or 0.0) if known else rows[0] if rows else None


def check_room(wish: Wish, forms: Sequence[CacheFormat]) -> None:
    """Raise KvbenchError if the weights leave no room for any cache; `forms` are those that more GPUs would be for."""
    if any(placed.room(1, 1) > 0 for placed in (wish, *map(wish.placed, forms))):
        return
    need, have = (wish.budget - wish.room(1, 1)) / 2**30, wish.budget / 2**30
    ways = [] if wish.model.size is not None or wish.model.precision.bits < 5 else ["--weights int4"]
    if count := wish.enough_gpus(forms):
        ways.append(f"more GPUs (--gpus {count})")
    raise KvbenchError(
        f"{wish.model.name} on {wish.gpu.name}: weights ({wish.weights / 2**30:.1f} GiB in "
        f"{wish.model.precision.name}) and what a step needs take {need:.1f} GiB of {have:.1f} usable.\n"
        f"  hint: use {', '.join(ways)}{' or ' if ways else ''}a card with more memory"
    )
