"""Measurement of time and memory with a whole model, for every setting of a command.

The model is loaded once. The JSON file is rewritten after every row; a row is the point's record, as a run of
``dataset=efficiency`` stores it, plus the setting and whether its decode steps ran as CUDA graphs and were compiled.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from kvbench.bench import report
from kvbench.bench.columns import NOTES, point_cells, table_of
from kvbench.bench.models import check_lengths, model_config
from kvbench.cache.progress import Options
from kvbench.config.run_config import RuntimeConfig
from kvbench.config.setting import parse_setting
from kvbench.errors import ConfigError, KvbenchError, ModelError
from kvbench.measure.meter import How, Meter
from kvbench.measure.stock import SHOWN
from kvbench.methods.base import Method
from kvbench.models.load import load_model, resolve_device
from kvbench.profiling.device import limited
from kvbench.profiling.machine import Counter, idle_power, machine_state
from kvbench.profiling.memory import release
from kvbench.tasks.efficiency import Efficiency
from kvbench.tasks.work import MeasurePoint
from kvbench.util.failures import bytes_asked, is_out_of_memory
from kvbench.util.requirements import check_writable

__all__ = ["PointsBench", "measure_points", "model_config"]

#: version of the JSON file's format; since 2 rows are records of points
SCHEMA = 2


class PointsBench:
    """One run of ``tpot``, ``prefill`` or ``memory``: the loaded model, the settings to measure, the results so far.

    A result is a row: the figures of one setting at one point (prompt length and batch size).

    Raises:
        KvbenchError: a setting is wrong, or the model or a method's text encoder is unavailable.
    """

    def __init__(self, args: argparse.Namespace) -> None:
        self.args, self.began = args, time.perf_counter()
        self.path = report.result_folder(args.out) / f"{args.name or f'{args.command}_{Path(args.model).name}'}.json"
        check_writable(str(self.path.parent), "--out")
        if args.shuffle is not None and (args.grow or not args.batches):
            raise ConfigError("--shuffle", args.shuffle, "needs fixed batch sizes", hint="give them with --batches 1 8")
        self.methods = [(setting, setting.load()) for setting in map(parse_setting, args.settings)]
        self.grid = Efficiency(
            prompts=tuple(args.contexts),
            batches="grow" if args.grow or not args.batches else tuple(args.batches),
            max_batch=args.max_batch,
            bisect=args.bisect,
            new_tokens=args.new_tokens,
        )
        config = model_config(args.model, weights=args.weights, dtype=args.dtype)
        for _, method in self.methods:
            method.ready()  # fail early if an encoder is unavailable
        idle_w = idle_power(Counter.of(resolve_device(args.device)), args.idle) if args.idle else None
        try:
            self.loaded: Any = load_model(config, RuntimeConfig(device=args.device, seed=args.seed))
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            limit = "" if args.memory_limit_gb is None else f" within --memory-limit-gb {args.memory_limit_gb:g}"
            raise ModelError(
                f"{args.model} does not fit on {args.device}{limit}: {error}\n"
                "  hint: choose a smaller --model, or a device with more memory"
            ) from None
        self.model, self.device = self.loaded.model, self.loaded.device
        for _, method in self.methods:
            method.check(head_dim=self.loaded.architecture.head_dim)
        self.rows: list[Row] = []
        self.extra: dict[str, Any] = {
            "shuffle": args.shuffle,
            "machine": {"before": machine_state(self.device), "idle_W": idle_w},
        }
        check_lengths(self.loaded, max(args.contexts), args)
        self.read_rate = self._ceiling() if args.ceiling and self.device.type == "cuda" else None

    def _ceiling(self) -> float:
        """Measure plain reads, record them for the JSON file, and return their bandwidth in GB/s."""
        from kvbench.bench import ceiling

        reads = ceiling.measure_ceiling()
        self.extra["ceiling"] = reads.as_dict()
        release(self.device)
        return reads.rate

    def meter(self, method: Method, graphs: str = "never") -> Meter:
        """Create the meter that measures time and memory of one method at any point.

        The first cache that the meter creates switches the model to kvbench's attention. `graphs` is ``always`` to run
        decode steps as CUDA graphs, ``never`` to run them eagerly.
        """
        names = (
            "new_tokens",
            "repeats",
            "untimed",
            "seed",
            "compile",
            "prefill_chunk",
            "prefill_rows",
            "fill",
            "compare",
        )
        how = How(
            **{name: getattr(self.args, name) for name in names},
            graphs=graphs,
            census=self.args.command != "tpot",
            read_rate=self.read_rate,
            options=Options(kernels=self.args.kernels),
        )
        return Meter(self.model, self.loaded.tokenizer, method, how)

    def measure(self) -> None:
        """Measure all points with the caches of stock transformers (``--baselines``), then with every setting.

        With ``--eager``, every setting is measured twice: with decode steps as CUDA graphs, then with eager steps.
        """
        for name in self.args.baselines:
            self._grid({"setting": name}, partial(self.meter(self.methods[0][1]).stock_point, name))
        if self.args.shuffle is not None:
            self._shuffled()
            return
        for start, measure, method in self._ways():
            self._grid(start, measure)
            method.detach(self.model)

    def _ways(self) -> Iterator[tuple[Row, Measure, Method]]:
        """Yield, for each setting and kind of steps, the first entries of its rows, its measurement and its method."""
        both = self.args.eager and self.args.graphs == "always"
        for setting, method in self.methods:
            for graphs in ["always", "never"] if both else [self.args.graphs]:
                start = {"setting": setting.text, "graphs": graphs, "compile": self.args.compile}
                yield start, partial(self._point, self.meter(method, graphs)), method

    def _shuffled(self) -> None:
        """Measure the points of all settings in a random order, which ``--shuffle`` seeds."""
        order = [(way, sample.work) for way in list(self._ways()) for sample in self.grid.samples()]
        random.Random(self.args.shuffle).shuffle(order)
        for (start, measure, method), point in order:
            assert isinstance(point, MeasurePoint)
            self.add({**start, **self._attempt(measure, point.prompt, point.batch)})
            method.detach(self.model)

    def _grid(self, start: Row, measure: Measure) -> None:
        """Measure the points of one setting one by one, as a result may decide which point is next (``--grow``).

        `start` are the first entries of every row; `measure` gets prompt length and batch.
        """
        stored: dict[str, Row] = {}
        for prompt, batch, sample_id in self._points(stored):
            stored[sample_id] = {**start, **self._attempt(measure, prompt, batch)}
            self.add(stored[sample_id])

    def _points(self, stored: dict[str, Row]) -> Iterator[tuple[int, int, str]]:
        """Yield prompt length, batch and id of the next point until the grid has none left.

        The caller adds each point's row to `stored`, by id, before it asks for the next.
        """
        while True:
            samples = [sample for sample in self.grid.next_samples(stored) if sample.id not in stored]
            if not samples:
                return
            point = samples[0].work
            assert isinstance(point, MeasurePoint)
            yield point.prompt, point.batch, samples[0].id

    def _point(self, meter: Meter, prompt: int, batch: int) -> Row:
        """Measure one point of a method; return its record with the first tokens and, on request, a profile."""
        figures = meter.point(prompt, batch)
        figures.pop("note", None)
        if figures["status"] != "ok":
            return figures
        figures["tokens"] = meter.tokens[0][:SHOWN]
        if self.args.profile and figures["stepping"].startswith("graph") and not meter.method.speculation:
            from kvbench.bench.profile import profile

            prompts = meter.batch(prompt, batch)[1]
            figures["profile"] = profile(
                self.model, meter.method, prompt, batch, prompts=prompts, compile=self.args.compile, seed=self.args.seed
            )
        return figures

    def _attempt(self, measure: Measure, prompt: int, batch: int) -> Row:
        """Return a point's record; for an exception its kind and message, after the memory has been released.

        Raises:
            KvbenchError: the user made a mistake; it is not recorded as a failed point.
        """
        try:
            return measure(prompt, batch)
        except KvbenchError:
            raise
        except Exception as error:
            failure = {
                "status": "oom" if is_out_of_memory(error) else "failed",
                "message": f"{type(error).__name__}: {' '.join(str(error).split())[:300]}",
                "bytes_asked": bytes_asked(error),
            }
        release(self.device)
        return {"prompt": prompt, "batch": batch, "new_tokens": self.args.new_tokens, **failure}

    def add(self, row: Row) -> None:
        """Add the figures of a measured point to the results, rewrite the JSON file and print them as a line."""
        self.rows.append(row)
        self.write()
        cells = [cell for cell in point_cells(row, self.args.command, self.rows) if cell is not None]
        print("  ".join(f"{cell:.4g}" if isinstance(cell, float) else str(cell) for cell in cells), flush=True)

    def write(self) -> None:
        """Write the JSON file with all rows so far; KvbenchError if it cannot be written."""
        content = {
            "schema": SCHEMA,
            "what": f"python -m kvbench.bench {self.args.command}: points of time and memory",
            **report.machine(),
            "model": self.args.model,
            "weights": self.args.weights,
            **self.loaded.dtypes.names(),
            "memory_limit_gb": self.args.memory_limit_gb,
            "command": " ".join(self.args.argv),
            **self.extra,
            "rows": self.rows,
        }
        try:
            report.write_json(self.path, content)
        except OSError as error:
            raise KvbenchError(
                f"{self.path} cannot be written: {error}\n  hint: name another folder with --out FOLDER"
            ) from error

    def finish(self) -> int:
        """Write the JSON file, print the table and return the exit status.

        The status is 1 if the measurement of a point failed for a reason other than lack of memory, else 0.
        """
        self.extra["machine"]["after"] = machine_state(self.device)
        self.write()
        print("\n" + table_of(self.rows, self.args.command))
        print(NOTES[self.args.command])
        print(f"{self.path} ({time.perf_counter() - self.began:.0f} s)")
        return int(any(row["status"] == "failed" for row in self.rows))


def measure_points(args: argparse.Namespace) -> int:
    """Run ``tpot``, ``prefill`` or ``memory`` within the limit of ``--memory-limit-gb``, and return the exit status.

    The status is 0 on success, 1 if the measurement of a point failed for a reason other than lack of memory, or the
    exit code of the :class:`KvbenchError` that ended the run.
    """
    try:
        device = resolve_device(args.device)
        with limited(device, args.memory_limit_gb) as holds:
            if args.memory_limit_gb is not None and not holds:
                print(
                    f"--memory-limit-gb {args.memory_limit_gb}: the memory of {device} cannot be "
                    "limited on this platform",
                    flush=True,
                )
            try:
                bench = PointsBench(args)
                bench.measure()
                return bench.finish()
            finally:
                release(device)
    except KvbenchError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code


Row = dict[str, Any]
#: function of prompt length and batch size that measures a point and returns its record
Measure = Callable[[int, int], Row]
