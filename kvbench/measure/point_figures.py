"""The figures of a measured point: times of a generation, bytes of a cache and of the model, what a roofline says."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from torch import Tensor

from kvbench.decoding.autoregressive import Generation
from kvbench.decoding.speculative import Round
from kvbench.decoding.speculative import figures as round_figures
from kvbench.errors import ConfigError
from kvbench.profiling.device import device_name
from kvbench.profiling.gpus import gpu_of
from kvbench.profiling.roofline import Shape, predict
from kvbench.profiling.timing import median, percentile

Figures = dict[str, Any]


def times(
    generation: Generation, prefills: Sequence[float], searches: Sequence[float], batch: int, new_tokens: int
) -> Figures:
    """TTFT (search and prefill apart), TPOT, throughput of one generation; what capturing took stands on its own.

    The first step is no part of TPOT's median and percentiles (it pays for what a method does once after the prompt),
    but of the throughput, which is ``batch * new_tokens / (search + prefill + all steps)``. A round of speculation
    counts as its time over the tokens that a row got of it.

    Args:
        generation: the whole one.
        prefills, searches: seconds of each repetition, the whole generation's last.
    """
    steps = token_times(generation.rounds) if generation.rounds else generation.step_s
    later = steps[1:] or steps
    decode = sum(generation.step_s)
    whole = searches[-1] + prefills[-1] + decode
    rate = decode - generation.step_s[0]
    per_token = rate / (new_tokens - 1 - first_tokens(generation)) if later is not steps else steps[0]
    found: Figures = {
        "search_s": median(searches),
        "prefill_s": median(prefills),
        "ttft_s": median([a + b for a, b in zip(searches, prefills, strict=True)]),
        "repeats": len(prefills),
        "first_step_s": steps[0],
        "tpot_s": {
            "median": per_token if generation.rounds else median(later),
            "mean": per_token,
            **{f"p{q}": percentile(later, q) for q in (10, 90, 99)},
            "n": len(later),
        },
        "decode_s": decode,
        "tokens_per_s": batch * new_tokens / whole,
        "stepping": generation.stepping,
        "capture_s": generation.capture_s,
    }
    if generation.rounds:
        rows = [round_figures(generation.rounds, row) for row in range(batch)]
        found["speculation"] = {key: sum(row[key] for row in rows) for key in rows[0]}
    return rounded(found)


def token_times(rounds: Sequence[Round]) -> list[float]:
    """Seconds a token of each round: over the rows that got any, the mean number of tokens."""
    counts = [[count for count in each.emitted if count] for each in rounds]
    return [each.seconds * len(got) / sum(got) for each, got in zip(rounds, counts, strict=True)]


def first_tokens(generation: Generation) -> float:
    """Tokens of a row that the first step (or round, on the average) gave."""
    if not generation.rounds:
        return 1
    got = generation.rounds[0].emitted
    return sum(got) / len(got)


def memory(model: Any, cache: Any, peaks: dict[str, Any]) -> Figures:
    """Weights, the bill of the whole batch, the peaks, and the peak of decoding to weights and bill.

    ``over_used`` is that ratio with the bytes of the tokens that are held, ``over_reserved`` with the buffers' bytes.
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


def predicted(
    model: Any,
    figures: Figures,
    prompt: int,
    batch: int,
    held: int | None,
    drafted: bool,
    together: int | None = None,
) -> Figures | None:
    """What the roofline says of the same point; None where the rates of the device (a CPU) or the
    kind of the model (one with experts) are not known.

    A step reads what lies between the cache's bytes before the first step and after the last. Rounds of speculation
    have no prediction of their time here.

    Args:
        together: prompt tokens of the largest pass, all sequences together; None: all.
    """
    name = device_name(model.device)
    gpu = gpu_of(name) if name else None
    if gpu is None:
        return None
    try:
        shape = Shape.of(model.config.get_text_config(decoder=True))
    except ConfigError:
        return None
    used = figures["kv_used"]["total"]
    found = predict(
        shape,
        used if held is None else (held + used) / 2,
        sum(p.numel() * p.element_size() for p in model.parameters()),
        batch,
        prompt,
        gpu,
        kv_stored_bytes=used,
        prefill_chunk=None if together is None else -(-together // batch),
        width=model.dtype.itemsize,
    )
    return {
        "gpu": gpu.name,
        "ttft_s": found.ttft_s,
        "tpot_s": None if drafted else found.tpot_s,
        "expected_tpot_s": None if drafted else found.expected_tpot_s,
        "bound": found.bound,
        "peak_prefill": found.prefill_peak_bytes,
        "peak_decode": found.decode_peak_bytes,
    }


def weight_bytes(model: Any) -> int:
    """Bytes of all parameters and buffers on this process, each storage once."""
    held: Iterable[Tensor] = (*model.parameters(), *model.buffers())
    tensors = (getattr(tensor, "_local_tensor", tensor) for tensor in held)
    return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values())


def per_sequence(figures: Figures) -> Figures:
    """The bill of one sequence, as rows of other tasks have it: the batch's by the number of its sequences."""
    batch = figures["batch"]
    kinds = {kind: figures[f"kv_{kind}"] for kind in ("used", "reserved")}
    shares = {kind: {part: count // batch for part, count in parts.items()} for kind, parts in kinds.items()}
    for parts in shares.values():
        parts["total"] = sum(count for part, count in parts.items() if part != "total")
    return {**shares, "fp16_equivalent": figures["kv_fp16"] // batch}


def rounded(figures: Figures) -> Figures:
    """Microseconds are enough."""
    return {
        key: rounded(value) if isinstance(value, dict) else round(value, 6) if isinstance(value, float) else value
        for key, value in figures.items()
    }
