"""``python -m kvbench.bench capacity``: how many sequences fit into a memory, by formula and by allocation."""

from __future__ import annotations

import argparse
import sys
import time
from typing import Any

from kvbench.bench import report
from kvbench.bench.choices import short_count
from kvbench.bench.models import check_lengths, model_config
from kvbench.config.run_config import RuntimeConfig
from kvbench.config.setting import parse_setting
from kvbench.errors import ConfigError, KvbenchError
from kvbench.measure import capacity
from kvbench.measure.how import How
from kvbench.measure.meter import Meter
from kvbench.models.load import load_model, resolve_device
from kvbench.profiling.device import limited
from kvbench.profiling.machine import machine_state
from kvbench.profiling.memory import release
from kvbench.util.table import render_table

SCHEMA = 1
_HEAD = (
    "setting",
    "prompt",
    "memory GiB",
    "weights",
    "workspace",
    "MiB a sequence",
    "by formula",
    "allocated",
    "ended by",
)


def run_capacity(args: argparse.Namespace) -> int:
    """Run ``capacity`` and return the exit status: 0, or that of the error that ended the run."""
    try:
        return _print_capacity(args)
    except KvbenchError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code


def _print_capacity(args: argparse.Namespace) -> int:
    import torch

    device = resolve_device(args.device)
    if args.memory_limit_gb is None and device.type != "cuda":
        raise ConfigError(
            "--memory-limit-gb",
            None,
            f"is required on a {device.type} device, whose memory is the machine's",
            hint="--memory-limit-gb 4",
        )
    settings = [(setting, setting.load()) for setting in map(parse_setting, args.settings)]
    loaded = load_model(
        model_config(args.model, weights=args.weights, dtype=args.dtype),
        RuntimeConfig(device=args.device, seed=args.seed),
    )
    check_lengths(loaded, max(args.contexts), args)
    path = report.result_folder(args.out) / f"{args.name or f'capacity_{args.model}'}.json"
    began, rows, before = time.perf_counter(), list[dict[str, Any]](), machine_state(device)
    how = How(new_tokens=args.new_tokens, seed=args.seed, fill="random")
    with limited(device, args.memory_limit_gb) as holds:
        if args.memory_limit_gb is not None and not holds:
            raise ConfigError(
                "--memory-limit-gb", args.memory_limit_gb, f"the memory of {device} cannot be limited here"
            )
        memory = _memory_budget(torch, device, args.memory_limit_gb, capacity.weight_bytes(loaded.model))
        for setting, method in settings:
            meter = Meter(loaded.model, loaded.tokenizer, method, how)
            for prompt in args.contexts:
                row = {"setting": setting.text, **capacity.measure_capacity(meter, prompt, memory, args.max_sequences)}
                rows.append(row)
                print("  ".join(map(str, _capacity_cells(row))), flush=True)
                content = {
                    "schema": SCHEMA,
                    "what": "python -m kvbench.bench capacity: sequences that fit, by formula and by allocation",
                    **report.machine(),
                    "model": args.model,
                    "weights": args.weights,
                    **loaded.dtypes.names(),
                    "memory_limit_gb": args.memory_limit_gb,
                    "command": " ".join(args.argv),
                    "machine": {"before": before},
                    "rows": rows,
                }
                report.write_json(path, content)
            method.detach(loaded.model)
        release(device)
    print("\n" + render_table(_HEAD, [_capacity_cells(row) for row in rows], 2))
    print(f"{path} ({time.perf_counter() - began:.0f} s)")
    return 0


def _memory_budget(torch: Any, device: Any, limit_gb: float | None, weights: int) -> int:
    """Return the bytes that weights and caches may take.

    A limit on a CPU does not count what was allocated before, the weights among it, so they are added.
    """
    if limit_gb is not None:
        return int(limit_gb * 2**30) + (0 if device.type == "cuda" else weights)
    free, _ = torch.cuda.mem_get_info(device)
    return int(free + torch.cuda.memory_reserved(device))


def _capacity_cells(row: dict[str, Any]) -> list[Any]:
    """Return a row's cells; those that a row without memory for one sequence lacks are None."""
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
