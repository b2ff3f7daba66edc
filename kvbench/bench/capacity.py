"""``python -m kvbench.bench capacity``: how many sequences of one length a memory holds, by formula and by allocation.

The formula is ``floor((memory - weights - workspace) / bytes of a sequence)``. The workspace is the memory that storing
a prompt needs for a moment in addition to the cache: one layer's new keys and values and what packing them takes. It
does not include a prefill's activations, which depend on the chunk in which a prompt is read.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch

from kvbench.bench.choices import add_model_options, point_file, positive_number, several, short_count, tokens
from kvbench.bench.points import described_model, loaded_model
from kvbench.bench.report import Recording
from kvbench.config.setting import parse_setting
from kvbench.errors import ConfigError
from kvbench.measure.how import How
from kvbench.measure.meter import Meter
from kvbench.measure.point_figures import weight_bytes
from kvbench.measure.random_fill import fill_at_random
from kvbench.models.load import resolve_device
from kvbench.profiling.device import limited
from kvbench.profiling.machine import machine_state
from kvbench.profiling.memory import PhasePeaks, release
from kvbench.util.failures import bytes_asked, is_out_of_memory
from kvbench.util.table import render_table

Figures = dict[str, Any]
SCHEMA = 1
HEAD = (
    *("setting", "prompt", "memory GiB", "weights", "workspace", "MiB a sequence"),
    *("by formula", "allocated", "ended by"),
)


def add_capacity_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``capacity``."""
    add = parser.add_argument
    add("--contexts", nargs="+", type=tokens, default=[4096], metavar="N", help="prompt lengths in tokens")
    add("--new-tokens", type=several, default=128, help="tokens for which each cache has room after the prompt")
    about = "largest number to allocate (default: 1024)"
    add("--max-sequences", type=positive_number, default=1024, metavar="N", help=about)
    add_model_options(parser)


def measure_capacity(args: argparse.Namespace) -> int:
    """Run the command and return the exit status, 0.

    Raises:
        KvbenchError: a setting or the model is wrong or unavailable, or there is no limit of memory.
    """
    device, limit_gb = resolve_device(args.device), args.memory_limit_gb
    if limit_gb is None and device.type != "cuda":
        raise ConfigError(
            "--memory-limit-gb",
            None,
            f"is required on a {device.type} device, whose memory is the machine's",
            hint="--memory-limit-gb 4",
        )
    settings = [(setting, setting.load()) for setting in map(parse_setting, args.settings)]
    what = "python -m kvbench.bench capacity: sequences that fit, by formula and by allocation"
    file = Recording(args, point_file(args), what, schema=SCHEMA, machine={"before": machine_state(device)})
    loaded = loaded_model(args)
    file.about |= described_model(args, loaded)
    how = How(new_tokens=args.new_tokens, seed=args.seed, fill="random")
    with limited(device, limit_gb) as holds:
        if limit_gb is not None and not holds:
            raise ConfigError("--memory-limit-gb", limit_gb, f"the memory of {device} cannot be limited here")
        memory = usable_bytes(device, limit_gb, weight_bytes(loaded.model))
        for setting, method in settings:
            meter = Meter(loaded.model, loaded.tokenizer, method, how)
            for prompt in args.contexts:
                row = {"setting": setting.text, **sequences_that_fit(meter, prompt, memory, args.max_sequences)}
                file.rows.append(row)
                file.say(capacity_cells(row))
                file.write()
            method.detach(loaded.model)
        release(device)
    print("\n" + render_table(HEAD, [capacity_cells(row) for row in file.rows], 2))
    file.end()
    return 0


def usable_bytes(device: torch.device, limit_gb: float | None, weights: int) -> int:
    """Return the bytes that weights and caches may take.

    On a CPU, the limit counts only memory that is allocated later than the weights, so their bytes are added.
    """
    if limit_gb is not None:
        return int(limit_gb * 2**30) + (0 if device.type == "cuda" else weights)
    free, _ = torch.cuda.mem_get_info(device)
    return int(free + torch.cuda.memory_reserved(device))


def capacity_cells(row: Figures) -> list[Any]:
    """Return the table cells of a row; None for figures that are missing because not even one sequence fits."""
    sizes = [row.get(key) for key in ("memory", "weights", "workspace")]
    sequence = row.get("per_sequence")
    return [
        row["setting"],
        short_count(row["prompt"]),
        *(None if count is None else round(count / 2**30, 3) for count in sizes),
        None if sequence is None else round(sequence / 2**20, 1),
        row.get("by_formula"),
        row["allocated"],
        row.get("ended", "oom"),
    ]


def fit_by_formula(memory: int, weights: int, workspace: int, per_sequence: int) -> int:
    """Return how many sequences fit into memory; 0 if not even the weights and the workspace do. All in bytes."""
    return max(0, memory - weights - workspace) // per_sequence


def sequences_that_fit(meter: Meter, prompt: int, memory: int, most: int) -> Figures:
    """Allocate and fill caches of single sequences until memory runs out, and compare their number with the formula.

    Args:
        meter: model, method and settings; ``how.new_tokens`` tokens fit into each cache after the prompt.
        prompt: number of prompt tokens of each sequence, which are random keys and values.
        memory: bytes that the process may use.
        most: largest number of sequences to allocate.

    Returns:
        ``by_formula`` and ``allocated``: numbers of sequences, the second at most `most`. ``ended``: ``memory`` or
        ``bound``, whichever came first. ``memory``, ``weights``, ``workspace``, ``per_sequence``: terms of the formula
        in bytes. ``status`` is ``ok``, or ``oom`` if a single sequence does not fit, which leaves the formula without
        its last two terms.
    """
    weights = weight_bytes(meter.model)
    figures: Figures = {"prompt": prompt, "new_tokens": meter.how.new_tokens, "memory": memory, "weights": weights}
    release(meter.device)
    try:
        workspace, per_sequence = _terms(meter, prompt)
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        return {"status": "oom", **figures, "allocated": 0, "bytes_asked": bytes_asked(error)}
    finally:
        release(meter.device)
    figures |= {"workspace": workspace, "per_sequence": per_sequence}
    figures["by_formula"] = fit_by_formula(memory, weights, workspace, per_sequence)
    figures["allocated"] = _allocated(meter, prompt, most)
    release(meter.device)
    return {"status": "ok", **figures, "ended": "bound" if figures["allocated"] == most else "memory"}


def _terms(meter: Meter, prompt: int) -> tuple[int, int]:
    """Store one sequence; return the bytes needed only while it is stored, and the bytes of the cache's buffers."""
    peaks = PhasePeaks(meter.device, census=True)
    with peaks.run():
        peaks.phase("prefill")
        on_gpu = meter.device.type == "cuda"
        others = torch.cuda.memory_allocated(meter.device) if on_gpu else weight_bytes(meter.model)
        cache = stored_sequence(meter, prompt)
        reserved = cache.bill().reserved.total
        peaks.phase("end")
    peak = peaks.row()["prefill"]
    return max(0, peak - others - reserved), reserved


def _allocated(meter: Meter, prompt: int, most: int) -> int:
    """Store sequences until memory runs out or there are `most` of them; return how many were stored."""
    caches: list[Any] = []
    while len(caches) < most:
        try:
            caches.append(stored_sequence(meter, prompt))
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            break
    return len(caches)


@torch.inference_mode()
def stored_sequence(meter: Meter, prompt: int) -> Any:
    """Return a new cache with one sequence of random keys and values, and room for the tokens to come."""
    prompts = meter.batch(prompt, 1)[1]
    cache = meter.method.new_cache(meter.model, prompts, max_length=prompt + meter.how.new_tokens)
    cache.options = meter.how.options
    fill_at_random(meter.model, cache, 1, prompt, meter.how.seed)
    return cache
