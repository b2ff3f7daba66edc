"""Figures of a measured point: times of a generation, bytes of cache and model, and the roofline's prediction."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor

from kvbench.cache.segments.base import Segment
from kvbench.cache.segments.foreign import Fp8Segment, HFSegment
from kvbench.decoding.autoregressive import Generation
from kvbench.decoding.round_times import Round, row_totals, totals
from kvbench.errors import ConfigError
from kvbench.models.int4 import own_bytes, own_head
from kvbench.models.projections import head_dim, kv_heads
from kvbench.profiling.device import device_name
from kvbench.profiling.roofline import Gpu, Shape, gpu_of, predict
from kvbench.profiling.timing import median, percentile
from kvbench.results.speculation import round_times
from kvbench.util.attachment import storage_of

Figures = dict[str, Any]


def point_times(
    generation: Generation, prefills: Sequence[float], searches: Sequence[float], batch: int, new_tokens: int
) -> Figures:
    """Return the times of one generation: TTFT, TPOT, inter-token times, and throughput.

    ``ttft_s`` is the median, over the timed prefills, of the time of Cocktail's search plus that of the prefill;
    ``search_s`` and ``prefill_s`` are the medians of the two parts. ``tpot_s`` leaves out the first step, which
    includes work that a method does once after the prompt. The throughput ``tokens_per_s`` includes that step: ``batch
    * new_tokens / (search + prefill + all steps)``. ``itl_s`` are the inter-token times as serving benchmarks define
    them: intervals between outputs, one per step or round of speculation. The time to capture a CUDA graph is
    ``capture_s``, and no other figure contains it.

    With speculation, ``median`` and ``mean`` of ``tpot_s`` are both the time of all rounds but the first, divided by
    the number of tokens per sequence that they produced. The percentiles are those of the rounds (:func:`token_times`).

    Args:
        prefills: seconds of each timed prefill; the prefill of `generation` is the last.
        searches: seconds of each timed search for chunks (Cocktail); the search of `generation` is the last.
    """
    steps = token_times(generation.rounds) if generation.rounds else generation.step_s
    later = steps[1:] or steps
    decode = sum(generation.step_s)
    whole = searches[-1] + prefills[-1] + decode
    rate = decode - generation.step_s[0]
    per_token = rate / (new_tokens - 1 - first_tokens(generation)) if later is not steps else steps[0]
    figures: Figures = {
        "search_s": median(searches),
        "prefill_s": median(prefills),
        "ttft_s": median([a + b for a, b in zip(searches, prefills, strict=True)]),
        "repeats": len(prefills),
        "first_step_s": steps[0],
        "tpot_s": step_times(later, per_token, per_token if generation.rounds else None),
        "itl_s": step_percentiles(generation.step_s, 50, 90, 99),
        "decode_s": decode,
        "tokens_per_s": batch * new_tokens / whole,
        "stepping": generation.stepping,
        "capture_s": generation.capture_s,
    }
    if generation.rounds:
        rows = [row_totals(generation.rounds, row) for row in range(batch)]
        figures["speculation"] = {key: sum(row[key] for row in rows) for key in rows[0]}
        if timed := round_times(totals(generation.rounds, range(batch))):
            figures["round_times"] = timed
    return rounded_figures(figures)


def step_percentiles(values: Sequence[float], *wanted: int) -> dict[str, float]:
    """Return percentiles of some values, by names such as ``p90``."""
    return {f"p{q}": percentile(values, q) for q in wanted}


def step_times(steps: Sequence[float], mean: float, middle: float | None = None) -> Figures:
    """Return the ``tpot_s`` of a point: mean, median and percentiles of its steps, in seconds.

    `middle` is the median; None: that of `steps`.
    """
    middle = median(steps) if middle is None else middle
    return {"median": middle, "mean": mean, **step_percentiles(steps, 10, 90, 99), "n": len(steps)}


def token_times(rounds: Sequence[Round]) -> list[float]:
    """Return the seconds per token of each round of speculation.

    This is the duration of the round divided by the number of tokens that it added to a sequence, averaged over the
    sequences that gained any.
    """
    counts = [[count for count in turn.emitted if count] for turn in rounds]
    return [turn.seconds * len(emitted) / sum(emitted) for turn, emitted in zip(rounds, counts, strict=True)]


def first_tokens(generation: Generation) -> float:
    """Return how many tokens the first decode step or round adds to a sequence, as the mean over the sequences."""
    if not generation.rounds:
        return 1
    emitted = generation.rounds[0].emitted
    return sum(emitted) / len(emitted)


def point_memory(model: Any, cache: Any, peaks: dict[str, Any]) -> Figures:
    """Return the bytes of weights and cache, the peak memory by phase, and the ratios between them.

    ``over_used`` is the peak memory while decoding divided by the least that decoding needs: the weights and the keys
    and values in use. ``over_reserved`` divides the same peak by the weights and all buffers of the cache, their unused
    room included. Both are None if the peak is unknown. The peaks are those of
    :meth:`kvbench.profiling.memory.PhasePeaks.row`, the cache is as after the last step.
    """
    bill, weights = cache.bill().as_dict(), weight_bytes(model)
    used, reserved = bill["used"]["total"], bill["reserved"]["total"]
    decode = peaks["decode"]
    return {
        "weights": weights,
        "kv_used": bill["used"],
        "kv_reserved": bill["reserved"],
        "kv_fp16": bill["fp16_equivalent"],
        "peak": peaks,
        "over_used": decode / (weights + used) if decode else None,
        "over_reserved": decode / (weights + reserved) if decode else None,
    }


def predicted_point(
    model: Any,
    figures: Figures,
    prompt: int,
    batch: int,
    before: int | None,
    drafted: bool,
    together: int | None = None,
) -> Figures | None:
    """Return the TTFT, TPOT and peak memory that the roofline model predicts for a point.

    The prediction assumes that a step reads the mean of the cache's sizes before the first and after the last step.

    Args:
        figures: the point's figures so far, with ``kv_used``.
        before: bytes in use in the cache before the first step; None: assume as many as after the last step.
        drafted: True if the generation used speculative decoding. Its TPOT is not predicted (None).
        together: number of prompt tokens, over all sequences, in the largest forward pass of the prefill; None if a
            single pass processes the whole batch.

    Returns:
        A dict, or None for an unknown device or a model that the roofline does not cover.
    """
    gpu, shape = known_gpu(model), roofline_shape(model)
    if gpu is None or shape is None:
        return None
    used = figures["kv_used"]["total"]
    prediction = predict(
        shape,
        used if before is None else (before + used) / 2,
        own_bytes(model),
        batch,
        prompt,
        gpu,
        kv_stored_bytes=used,
        prefill_chunk=None if together is None else -(-together // batch),
        width=model.dtype.itemsize,
    )
    return {
        "gpu": gpu.name,
        "ttft_s": prediction.ttft_s,
        "tpot_s": None if drafted else prediction.tpot_s,
        "expected_tpot_s": None if drafted else prediction.expected_tpot_s,
        "bound": prediction.bound,
        "peak_prefill": prediction.prefill_peak_bytes,
        "peak_decode": prediction.decode_peak_bytes,
    }


def step_traffic(model: Any, figures: Figures, read_rate: float | None = None) -> Figures:
    """Return the bytes that a decode step must read, and which share of the device's memory bandwidth it achieves.

    Args:
        figures: the point's figures, with ``kv_used``, ``tpot_s`` and ``predicted``.
        read_rate: read bandwidth that was measured on this device, in GB/s. None: use the known bandwidth of the GPU
            model.

    Returns:
        A dict. ``read_bytes`` is the size of the weights (without the embedding table, if the output layer has a matrix
        of its own) and of the keys and values in use. ``GB_s`` is ``read_bytes`` divided by the median TPOT.
        ``ceiling`` is the bandwidth of the device: its value ``GB_s``, and whether it is ``measured`` or ``known``
        (``kind``); None on an unknown device. ``read_share`` is the achieved ``GB_s`` divided by that of ``ceiling``.
        ``over_roof`` is TPOT divided by the roofline's prediction. With speculation there is only ``read_bytes``. For
        models without a roofline (mixtures of experts), the dict is empty.
    """
    shape, gpu = roofline_shape(model), known_gpu(model)
    if shape is None:
        return {}
    parameters = own_bytes(model)
    read_bytes = round(shape.bytes_read(parameters, model.dtype.itemsize) + figures["kv_used"]["total"])
    if figures.get("speculation"):
        return {"read_bytes": read_bytes}
    ceiling = None
    if read_rate is not None:
        ceiling = {"GB_s": read_rate, "kind": "measured"}
    elif gpu is not None:
        ceiling = {"GB_s": gpu.read / 1e9, "kind": "known"}
    tpot_s = figures["tpot_s"]["median"]
    rate = read_bytes / tpot_s / 1e9
    roof = (figures.get("predicted") or {}).get("tpot_s")
    return {
        "read_bytes": read_bytes,
        "GB_s": rate,
        "ceiling": ceiling,
        "read_share": rate / ceiling["GB_s"] if ceiling else None,
        "over_roof": tpot_s / roof if roof else None,
    }


def known_gpu(model: Any) -> Gpu | None:
    """Return the figures of the GPU that a model is on; None for an unknown GPU, and on a CPU."""
    name = device_name(model.device)
    return gpu_of(name) if name else None


def roofline_shape(model: Any) -> Shape | None:
    """Return the dimensions of a model for the roofline; None if the roofline does not cover the model.

    An output head in 4 bits never shares the weights of the embedding table, whatever the model's configuration says.
    """
    try:
        shape = Shape.of(model.config.get_text_config(decoder=True))
    except ConfigError:
        return None
    return replace(shape, tied=False) if own_head(model) else shape


def weight_bytes(model: Any) -> int:
    """Return the bytes of all parameters and buffers that this process holds; tied weights count once.

    Under tensor parallelism, this is the share of one process.
    """
    stored: Iterable[Tensor] = (*model.parameters(), *model.buffers())
    tensors = (getattr(tensor, "_local_tensor", tensor) for tensor in stored)
    return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values())


def layer_bytes(model: Any, prompt: int, batch: int) -> int:
    """Return the bytes of one layer's keys and values in full precision, for `batch` prompts of `prompt` tokens.

    A prefill holds this much in addition to the cache, until the tokens of the layer are packed.
    """
    return int(2 * batch * kv_heads(model) * head_dim(model) * prompt * storage_of(model).itemsize)


def per_sequence(figures: Figures) -> Figures:
    """Return a point's cache size divided by its number of sequences.

    Rows of all tasks record cache sizes in this form: ``used`` and ``reserved``, each in bytes by part of the cache
    (codes, scales, window, index, state, total), and ``fp16_equivalent``, in bytes.
    """
    batch = figures["batch"]
    kinds = {kind: figures[f"kv_{kind}"] for kind in ("used", "reserved")}
    shares = {kind: {part: count // batch for part, count in parts.items()} for kind, parts in kinds.items()}
    for parts in shares.values():
        parts["total"] = sum(count for part, count in parts.items() if part != "total")
    return {**shares, "fp16_equivalent": figures["kv_fp16"] // batch}


def rounded_figures(figures: Figures) -> Figures:
    """Return a copy of the figures with all floats, also in nested dicts, rounded to six decimals (microseconds)."""
    rounded = {key: round(value, 6) if isinstance(value, float) else value for key, value in figures.items()}
    return {key: rounded_figures(value) if isinstance(value, dict) else value for key, value in rounded.items()}


def nominal_bits(cache: Any) -> dict[str, float]:
    """Return the bits per element of a cache's formats after the last step, per token that it has seen.

    Scales, zero points and other metadata do not count; neither does the window of the newest tokens, whose share of a
    growing cache becomes ever smaller. Tokens that a method has dropped count as 0 bits. A cache that holds all its
    tokens in the window has the bits of the window.

    Returns:
        The mean over layers and rows for ``key`` and for ``value``.
    """
    windowed = cache.method.reach() is not None  # Cocktail's exact tokens are a share of the prompt, not a window
    sums = {"key": [0.0, 0.0], "value": [0.0, 0.0]}
    for layer in cache.kv_layers:
        for side, store in zip(sums, layer.stores(), strict=True):
            for row in range(layer.batch):
                counts = [segment.lengths[row] for segment in store.segments]
                seen = layer.real_tokens(row)  # without padding
                # the window is left out only where tokens lie outside it, and none has been dropped
                whole = windowed and sum(counts) == seen and sum(counts) > counts[-1]
                tokens = seen - counts[-1] if whole else seen
                segments = store.segments[:-1] if whole else store.segments
                sums[side][0] += sum(code_bits(segment, row) for segment in segments)
                sums[side][1] += tokens
    return {side: bits / tokens for side, (bits, tokens) in sums.items()}


def code_bits(segment: Segment, row: int) -> float:
    """Return the bits of the codes that a segment holds for one row, divided by heads and channels.

    Tokens in full precision count with the bits of the model's dtype.
    """
    if isinstance(segment, Fp8Segment):
        return 8.0 * segment.lengths[row]
    if isinstance(segment, HFSegment):
        return float(segment.backend.nbits) * segment.lengths[row]
    if not segment.packed:
        return 8.0 * segment.dtype.itemsize * segment.lengths[row]
    return 8 * segment.used(row)["codes"] / (segment.heads * segment.channels)
