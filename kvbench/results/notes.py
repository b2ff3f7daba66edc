"""Notes below a table: the meaning of its figures, reasons for caution, and what a sweep has found.

For a sweep, a sentence per method gives its loss compared with fp16 and the memory that it saves.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from kvbench.results.aggregate import pair_interval
from kvbench.results.code import older_code_remark
from kvbench.results.inter_token import describe_fits
from kvbench.results.labels import labels
from kvbench.results.load import busyness
from kvbench.results.points import each, has_points
from kvbench.util.table import size

Metrics = Mapping[str, Any]

#: note below a table of points
NOTE = (
    "TTFT: time of search and prefill; TPOT: median over the steps except the first (mean if tokens were drafted);"
    " tokens/s: includes search, prefill and decoding; p90, p99: percentiles of the time between two outputs; read:"
    " bytes that a step must read (weights, keys and values), and their rate as a share of the GPU's bandwidth; slope:"
    " increase of TPOT per token of length, and TPOT at length 0; break-even: length beyond which TPOT is below fp16's;"
    " KV: bytes of the whole batch; peak: of decoding, and its ratio to weights + KV; roof: prediction of the roofline"
)
ROUND_NOTE = (
    "round: mean time of a round: drafts + verification + the rest (acceptance, sampling, Python) + packing; "
    "expected TPOT: time of drafts and verification divided by the tokens expected at this acceptance"
)


def notes(runs: Sequence[Metrics]) -> list[str]:
    """Write the notes below a table of runs, one per line: what its figures mean, and which to treat with caution."""
    lines = [
        "±: distance to the farther end of the 95 % interval over samples; Δ: paired difference from fp16 on the same"
        " samples"
    ]
    if any(map(has_points, runs)):
        devices = sorted({run["env"]["device_name"] for run in runs if run["env"].get("device_name")})
        return [*_of_points(runs), *weights(runs), *_dtypes(runs), "device: " + ("; ".join(devices) or "unknown")]
    kinds = {run["peak_bytes"]["kind"] for run in runs} - {None}
    described = {
        "cpu_live_tensors": "live tensors including weights, counted on the longest prompt",
        "cuda_allocator": "CUDA allocator, including weights",
    }
    for kind in sorted(kinds):
        lines.append(
            "KV: bytes used by the cache of one sequence; ratio: bytes of method=fp16 divided by KV; "
            f"peak: {described[kind]}"
        )
    batches = sorted({run["config"].get("batch_size") or 1 for run in runs} - {1})
    if batches:
        sizes = " and ".join(map(str, batches))
        lines.append(
            f"batches of {sizes} prompts: TTFT, TPOT and peak are those of a whole batch, KV is that of one sequence"
        )
    lines += weights(runs)
    modes = sorted({e["perplexity"]["mode"] for run in runs for e in run["scores"].values() if e.get("perplexity")})
    if modes:
        lines.append(f"ppl: perplexity over windows of the model's tokens, mode {', '.join(modes)}; lower is better")
    if any(run.get("speculation") for run in runs):
        lines.append(
            "accepted: share of drafts that were accepted, and tokens per round; speed-up: fp16's TPOT "
            "divided by this run's"
        )
    if any((run.get("speculation") or {}).get("round_times") for run in runs):
        lines.append(ROUND_NOTE)
    lines += [f"{run['label']}: {untouched(run)}" for run in runs if run.get("untouched")]
    if any(entry.get("fidelity") for run in runs for entry in run["scores"].values()):
        lines.append(
            "KL: divergence from fp16's predictions in nats per token, mean and 99.9 % percentile; same top: share of"
            " tokens at which both find the same one most probable"
        )
    if not all(map(timed, runs)):
        lines.append("TTFT, TPOT: '-' where predictions of given tokens are compared, which are not timed")
    if any(timed(run) and run["samples"].get("done") and not run["ttft_s"].get("n", 1) for run in runs):
        lines.append(
            "TTFT, TPOT: '-' means that only the warm-up batch ran, which does not count;"
            " increase dataset.limit or reduce runtime.batch_size"
        )
    lines += _shared_prefill_note(runs)
    lines += _dtypes(runs)
    lines += _doubts(runs)
    truncated = {run["samples"]["truncated"] for run in runs} - {0}
    if truncated:
        lines.append(f"{max(truncated)} prompts exceeded the model's limit and were cut in the middle")
    too_long = {sum(map(len, (run["samples"].get("too_long") or {}).values())) for run in runs} - {0}
    if too_long:
        lines.append(f"{max(too_long)} samples that the model does not hold with their answers were left out")
    devices = sorted({run["env"]["device_name"] for run in runs if run["env"].get("device_name")})
    return [*lines, "device: " + ("; ".join(devices) or "unknown")]


def timed(run: Metrics) -> bool:
    """Return True if a run has times; runs for fidelity or perplexity only read given tokens and have none."""
    entries = run["scores"].values()
    return not entries or not all(entry.get("fidelity") or entry.get("perplexity") for entry in entries)


def weights(runs: Sequence[Metrics]) -> list[str]:
    """Return a note for each kind of 4-bit or dequantized weights that a run's model has.

    For 4-bit weights it states source, groups, head and bytes; for dequantized ones, their former format.
    """
    lines = []
    for run in runs:
        env = run.get("env") or {}
        if env.get("dequantized"):
            rounded = "" if _arithmetic(run) == "float32" else f", then rounded to {_arithmetic(run)}"
            lines.append(
                f"weights of {run['config']['model']}: dequantized from {env['dequantized']} to float32{rounded}"
            )
        form = env.get("weights")
        if form is None:
            continue
        source = (
            "rounded while loaded" if form["source"] == "rounded" else f"of the {form['source'].upper()} checkpoint"
        )
        exact = 32 if _arithmetic(run) == "float32" else 16
        groups, head = " and ".join(map(str, form["groups"])), form["bits"] if form["head"] else exact
        lines.append(
            f"weights of {run['config']['model']}: {form['bits']} bits, {source}, groups of {groups}, output head "
            f"{head} bits, {size(form['bytes'])} in all"
        )
    return list(dict.fromkeys(lines))


def untouched(run: Metrics) -> str:
    """Return a sentence that says that a run packed and dropped nothing, and names the option that is the reason.

    An example is a ``residual`` that is longer than all prompts. ``untouched`` of the run's `metrics.json` must not be
    None.
    """
    reach = run["untouched"]
    return (
        f"nothing was packed or dropped: the longest sample had {reach['longest']} tokens in the cache, and "
        f"{reach['key']}={reach['value']} keeps up to {reach['exact']} in full precision"
    )


def _doubts(runs: Sequence[Metrics]) -> list[str]:
    """Return warnings about the figures, each with the names of the runs that it applies to."""
    doubts: dict[str, list[str]] = {}
    for run, name in zip(runs, labels(runs), strict=True):
        if len(run.get("code") or ()) > 1:
            doubts.setdefault(
                "the samples were made by different versions of the code (use report --show for details)", []
            ).append(name)
        if run.get("older"):
            older = f"{run['older']['samples']} of {run['samples']['done']} samples"
            remark = older_code_remark(run["older"]["parts"])
            doubts.setdefault(f"{older}, {remark}; set runtime.rerun=true to repeat them", []).append(name)
        if run.get("baseline_differs"):
            parts = ", ".join(run["baseline_differs"])
            doubts.setdefault(f"the fp16 run that it is compared with was made by different code: {parts}", []).append(
                name
            )
        busy = busyness(run["env"].get("load"))
        if busy and timed(run) and run["ttft_s"].get("n", 1):
            doubts.setdefault(f"{busy}; set runtime.rerun=times to measure them again", []).append(name)
    return [f"{_some(names)}: {doubt}" for doubt, names in doubts.items()]


def _arithmetic(run: Metrics) -> str | None:
    """Return the dtype in which a run's model computed; in older versions this was the dtype of the cache."""
    env = run.get("env") or {}
    dtype: str | None = env.get("arithmetic") or env.get("dtype")
    return dtype


def _dtypes(runs: Sequence[Metrics]) -> list[str]:
    """Return notes about caches in float32, arithmetic that differs between runs, and arithmetic that is slow."""
    lines, names, dtypes = [], labels(runs), [_arithmetic(run) for run in runs]
    wide = [name for run, name in zip(runs, names, strict=True) if (run.get("env") or {}).get("dtype") == "float32"]
    if wide:
        lines.append(f"{_some(wide)}: stored in float32, so ratios refer to method=fp16 with 4 bytes per element")
    known = list(dict.fromkeys(dtype for dtype in dtypes if dtype is not None))
    if len(known) > 1:
        groups = ((dtype, [name for name, own in zip(names, dtypes, strict=True) if own == dtype]) for dtype in known)
        lines.append("arithmetic: " + "; ".join(f"{dtype} for {_some(own)}" for dtype, own in groups))
    slower: dict[str, list[str]] = {}
    for run, name in zip(runs, names, strict=True):
        if reason := (run.get("env") or {}).get("slower"):
            slower.setdefault(f"arithmetic in {_arithmetic(run)}, slow on this CPU: {reason}", []).append(name)
    return lines + [f"{_some(own)}: {text}" for text, own in slower.items()]


def _shared_prefill_note(runs: Sequence[Metrics]) -> list[str]:
    """Return a note that names the runs with times to the first token that contain a shared prefill."""
    names = [name for run, name in zip(runs, labels(runs), strict=True) if (run.get("ttft_s") or {}).get("shared")]
    if not names:
        return []
    return [
        f"TTFT of {_some(names)}: each prompt was read once for several methods; the time is that of this prefill and"
        " of the method's own placing"
    ]


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def _of_points(runs: Sequence[Metrics]) -> list[str]:
    """Return the notes for a table of points, including the linear fits of inter-token time over length."""
    fits = [f"{name}: {text}" for run, name in zip(runs, labels(runs), strict=True) for text in describe_fits(run)]
    points = [figures for run in runs for _, _, figures in each(run)]
    lines = [NOTE, *fits]
    if any(figures.get("round_times") for figures in points):
        lines.append(ROUND_NOTE)
    if any(figures.get("forced") is not None for figures in points):
        lines.append("forced acceptance: drafts were accepted by chance, so the text is meaningless; only times count")
    beyond = {figures["beyond"] for figures in points if figures.get("beyond")}
    if beyond:
        limits = ", ".join(map(str, sorted(beyond)))
        lines.append(
            f"some sequences exceed model.max_length={limits}, which is possible only because the weights are random"
        )
    return lines


#: a loss that is smaller than this many points is called nothing
NOTHING = 1.0
#: maximum number of sentences; with more runs, none are shown
MOST = 8


def findings(names: Sequence[str], runs: Sequence[Metrics]) -> list[str]:
    """Write one sentence for each finished run that has a difference from fp16, the largest loss first.

    An example is ``kivi int2 loses 14.2 points (95 %: 3.7 to 24.7) at 4.3x less memory for keys and values``. If there
    would be more than :data:`MOST` sentences, none is returned. `names` and `runs` are in the same order.
    """
    losses = []
    for name, run in zip(names, runs, strict=True):
        pair = (run.get("mean") or {}).get("vs_fp16")
        if run["status"] == "ok" and pair and pair["n"]:
            losses.append((pair["diff"], f"{name} {effect(pair, run['mean'].get('score'))}{memory_finding(run)}"))
    return [line for _, line in sorted(losses, key=lambda loss: loss[0])] if len(losses) <= MOST else []


def effect(pair: Mapping[str, Any], mean: float | None = None) -> str:
    """Put a difference from fp16 into words, for example ``loses 2.1 points (95 %: 1.3 to 2.9)``.

    A point is 0.01 of the score. The text states a loss or a gain only if the 95 % interval of the difference excludes
    0. If no sample differs and the interval excludes a loss of :data:`NOTHING` points, it states that nothing is lost;
    else, that there is no clear difference. `mean` is the mean score; None: unknown. If it is 0 in both runs, the text
    says that this shows nothing. `pair` is ``{diff, stderr, n}`` and, if known, ``low`` and ``high``.
    """
    points, n = 100 * pair["diff"], pair["n"]
    samples = "1 sample" if n == 1 else f"{n} samples"
    same = not points and not pair["stderr"]
    if same and mean == 0:
        return f"scores 0 on all {samples}, as does fp16, so the comparison shows nothing"
    interval = pair_interval(mean, pair)
    if interval is None:
        if same:
            return f"shows no difference in {samples}"
        return (
            f"differs from fp16 by {points:+.1f} points (n = {n}, {'too few for' if n < 2 else 'without'} an interval)"
        )
    low, high = (100 * end for end in interval)
    if low > 0 or high < 0:
        near, far = sorted((abs(low), abs(high)))
        return f"{'loses' if points < 0 else 'gains'} {abs(points):.1f} points (95 %: {near:.1f} to {far:.1f})"
    if same:
        if low > -NOTHING:
            return f"loses nothing: less than {NOTHING:g} point on {samples} (95 %: {low:+.1f} to {high:+.1f} points)"
        return f"shows no difference in {samples} (95 %: {low:+.1f} to {high:+.1f} points)"
    return f"shows no clear difference from fp16 ({points:+.1f} points in {samples}; 95 %: {low:+.1f} to {high:+.1f})"


def memory_finding(run: Mapping[str, Any]) -> str:
    """Put the memory saved into words: `` at 4.0x less memory for keys and values``; empty if it is unknown.

    The text begins with a space, to follow :func:`effect`.
    """
    ratio = run["kv_bytes"]["ratio"]
    if ratio is None:
        return ""
    return f" at {ratio:.1f}x less memory for keys and values" if ratio >= 1 else f" at {1 / ratio:.1f}x more memory"
