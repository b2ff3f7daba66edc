"""``--dry-run``: the runs of items with their commands, the time and memory to expect on a GPU, and the downloads.

Times are a roofline's (:mod:`kvbench.profiling.roofline`: prefill at the GPU's matmul rate, decode steps at its read
bandwidth and with the fixed times of kernels), for as many samples as the data set has; loading, scoring and Cocktail's
search are not in them. Prompts are as long as the benchmark's mean, and no longer than the model takes.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from experiments import published
from experiments.data import POINTS, Plan
from experiments.item import Item
from experiments.runs import Run, composed
from experiments.session import item_runs
from kvbench.errors import KvbenchError

#: the GPU of the expected times and of the memory that has to suffice
GPU = "h200"
#: tokens of a word of English, about
TOKENS_PER_WORD = 1.35
#: what kvbench.bench predict assumes unless it is told otherwise
ASSUMED = {"weight_bits": 16, "weight_group": 128, "head_bits": None, "acceptance": 0.9, "overhead_us": 0.0}
ASSUMED |= {"prefill_chunk": None, "prefill_rows": "auto", "mlp_chunk": "auto"}


@dataclass(frozen=True)
class Work:
    """Work that a run asks of the model.

    Args:
        samples: number of prompts.
        prompt: tokens of a prompt, on average.
        new: tokens of an answer, at most.
        batch: prompts at a time.
    """

    samples: int
    prompt: int
    new: int
    batch: int = 1


def prediction_report(items: Sequence[Item], plan: Plan, gpu: str = GPU) -> str:
    """Return the report: by item its runs, each once, with expected time and memory; then totals and downloads."""
    lines: list[str] = []
    seen: set[Run] = set()
    seconds, peak, unknown = 0.0, 0.0, 0
    for item in items:
        runs = item_runs(item, plan)
        fresh = [run for run in runs if run not in seen]
        seen |= set(fresh)
        lines.append(f"{item.id}: {len(runs)} runs, {len(runs) - len(fresh)} of which are shared with items above")
        for run in fresh:
            expected = expect_run(run, gpu)
            if expected is None:
                unknown += 1
                lines.append(f"  {run.command}")
                continue
            seconds, peak = seconds + expected[0], max(peak, expected[1])
            lines.append(f"  {run.command}   # {duration(expected[0])}, {expected[1] / 2**30:.1f} GiB")
    if not seen:
        return "\n".join([*lines, "Nothing to run."])
    lines += ["", f"{len(seen)} runs, expected on one {gpu} (roofline): {seconds / 3600:.1f} GPU hours, peak of"]
    lines[-1] += f" {peak / 2**30:.1f} GiB" + (f"; {unknown} runs without an estimate" if unknown else "")
    lines.append("--gpu NAME predicts for another GPU than this one, whatever this machine has.")
    return "\n".join([*lines, *downloads(sorted(seen, key=lambda run: run.overrides))])


def expect_run(run: Run, name: str = GPU) -> tuple[float, float] | None:
    """Return the seconds and the peak bytes that a run is expected to take; None if its data or model are unknown."""
    try:
        from kvbench.bench.choices import shape_of
        from kvbench.bench.prediction import Case
        from kvbench.profiling.roofline import gpu_named

        setting = _setting(run)
        shape, method, gpu = shape_of(run.model), setting.load(), gpu_named(name)
        seconds, peak = 0.0, 0.0
        limit = 2**30 * (composed(run.overrides)["runtime"].get("memory_limit_gb") or gpu.memory_gib)
        for work in works(run):
            args = Namespace(**ASSUMED, new_tokens=max(1, work.new))
            row = Case(shape, method, work.batch, work.prompt, gpu, args).row(run.model, run.model, None)
            if max(row.decode_peak_bytes, row.prefill_peak_bytes) > limit:
                continue  # a point that does not fit: it ends a moment after it has begun
            batches = -(-work.samples // work.batch)
            seconds += batches * (row.ttft_s + max(0, work.new - 1) * row.expected_tpot_s)
            peak = max(peak, row.decode_peak_bytes, row.prefill_peak_bytes)
    except (KvbenchError, KeyError, TypeError, NotImplementedError):  # counted and printed as "without an estimate"
        return None
    return (seconds, peak) if seconds else None


def works(run: Run) -> Iterator[Work]:
    """Yield the work of a run: one entry, or one per point of time and memory. Raises KeyError for unknown data."""
    config = composed(run.overrides)
    data, limit = config["dataset"], config["dataset"].get("limit")
    new = config["decoding"]["max_new_tokens"] or data.get("max_new_tokens")
    room = int(config["model"]["max_length"])
    if run.data == POINTS:
        for prompt in data["prompts"]:
            yield from (Work(batch, prompt, data["new_tokens"], batch) for batch in data["batches"])
    elif "window" in data:
        windows = {"perplexity/wikitext2": 341_469, "perplexity/c4": 256 * 2048}.get(run.data)
        count = limit or (None if windows is None else windows // data["window"])
        yield Work(_known_count(count), data["window"], 1)
    elif "lengths" in data:
        tasks = data.get("tasks") or [None]
        names = 17 if tasks == "all" else len(tasks)
        for length in data["lengths"]:
            yield Work(names * (_known_count(limit) + data.get("warm_up", 0)), length, new or 32)
    else:
        for task in data.get("tasks") or [run.data.partition("_")[0]]:
            words, records = benchmark()[task]
            prompt = min(int(TOKENS_PER_WORD * words), room - (new or 128))
            yield Work(min(limit or records, records), max(16, prompt), new or _answer(task))


@cache
def benchmark() -> Mapping[str, tuple[int, int]]:
    """Return the mean words and the number of records of the benchmarks' tasks, as LogQuant's Table 5 prints them."""
    return {
        line["dataset"]: (int(line["avg_len"]), int(line["records"]))
        for line in published.published_lines("logquant_table5")
    }


def _answer(task: str) -> int:
    """Return the longest answer of a task of LongBench; GSM8K's 1024 elsewhere."""
    from kvbench.tasks.longbench import longbench_templates

    return int(longbench_templates()[task]["max_new_tokens"]) if task in longbench_templates() else 1024


def _known_count(count: int | None) -> int:
    if count is None:
        raise KeyError("the number of samples is not known before the data is read")
    return count


def _setting(run: Run) -> Any:
    """Return the setting of a run's overrides (:class:`kvbench.config.setting.Setting`)."""
    from kvbench.config.setting import parse_setting

    given = run.given
    parts = [given["method"], *([given["quantizer"]] if "quantizer" in given else [])]
    parts += [f"{key.removeprefix('method.')}={value}" for key, value in given.items() if key.startswith("method.")]
    parts += [f"{key}={value}" for key, value in given.items() if key.startswith("quantizer.")]
    if given["method"] == "cocktail" and "method.split" not in given:
        parts.append("split=[10,30,60]")  # the search's own shares are known only when it has searched
    return parse_setting(":".join(parts))


def downloads(runs: Sequence[Run]) -> list[str]:
    """Return a line per model, and per file of a data set, that is not on this machine, with its size."""
    from kvbench import tasks
    from kvbench.config.downloads import data_downloads, model_download
    from kvbench.models import by_name
    from kvbench.models.spec import ModelConfig
    from kvbench.util.schema import build

    names = sorted({run.model for run in runs if not any("model.weights=random" in text for text in run.overrides)})
    entries = [model_download(build(ModelConfig, by_name.group(name), "model")) for name in names]
    for run in {run.data: run for run in runs}.values():
        group = composed(run.overrides)["dataset"]
        entries += data_downloads(tasks.load(group), group)
    missing = dict.fromkeys(entry for entry in entries if entry is not None and entry.bytes != 0)
    return [f"download: {entry}" for entry in missing] or ["Nothing to download."]


def duration(seconds: float) -> str:
    """Return a time for people: ``12 s``, ``3.5 min``, ``2.1 h``."""
    if seconds < 90:
        return f"{seconds:.3g} s"
    return f"{seconds / 60:.1f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
