"""``python -m kvbench.bench tpot | prefill | memory``: points of ``dataset=efficiency`` for every setting of a command.

The points are those of the data set, its presets are the commands' defaults, and a point is measured as in a run. A row
of the JSON file is the record that a run would store for the point, plus the setting and whether decode steps ran as
CUDA graphs and were compiled. The model is loaded once; the file is rewritten after every row.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from kvbench.bench.choices import fixed_batches, model_config, point_file
from kvbench.bench.point_table import NOTES, point_cells, point_table
from kvbench.bench.recorded_times import measure_in_processes
from kvbench.bench.report import Recording, Row, failed_row
from kvbench.cache.progress import Options
from kvbench.config.run_config import RuntimeConfig
from kvbench.config.setting import parse_setting
from kvbench.decoding.compiled import load_joined
from kvbench.errors import ConfigError, ModelError
from kvbench.measure.meter import How, Meter
from kvbench.measure.stock import SHOWN
from kvbench.methods.base import Method
from kvbench.models import shared
from kvbench.models.load import LoadedModel, resolve_device
from kvbench.profiling.device import limited
from kvbench.profiling.machine import Counter, idle_power, machine_state
from kvbench.profiling.memory import release
from kvbench.tasks.efficiency import Efficiency
from kvbench.tasks.work import MeasurePoint
from kvbench.util.failures import bytes_asked, is_out_of_memory

#: version of the JSON file's format; since 2 rows are records of points
SCHEMA = 2
#: options that the meter takes as they are
MEASURING = ("new_tokens", "repeats", "untimed", "seed", "compile", "prefill_chunk", "prefill_rows", "fill", "compare")
#: function of prompt length and batch size that measures a point and returns its record
Measure = Callable[[int, int], Row]


def measure_points(args: argparse.Namespace) -> int:
    """Run ``tpot``, ``prefill`` or ``memory`` within the limit of ``--memory-limit-gb``, and return the exit status.

    The status is 1 if the measurement of a point failed for a reason other than lack of memory, else 0.

    Raises:
        KvbenchError: a setting is wrong, or the model or a method's text encoder is unavailable.
    """
    if args.processes > 1:
        return measure_in_processes(args)
    args.new_tokens = args.new_tokens if args.steps is None else args.steps + 1
    device = resolve_device(args.device)
    with limited(device, args.memory_limit_gb) as holds:
        if args.memory_limit_gb is not None and not holds:
            limit = f"--memory-limit-gb {args.memory_limit_gb}"
            print(f"{limit}: the memory of {device} cannot be limited on this platform", flush=True)
        bench: PointBench | None = None
        try:
            bench = PointBench(args)
            bench.measure_all()
            return bench.finish()
        finally:
            if bench is not None:
                shared.give_back(bench.loaded)
            release(device)


def loaded_model(args: argparse.Namespace) -> LoadedModel:
    """Load the model of ``--model``, or take the one that several calls of a process share (:mod:`~.models.shared`).

    The caller gives it back (:func:`kvbench.models.shared.give_back`) if it is to be shared.

    Raises:
        ConfigError: the model does not exist, or a requested sequence exceeds the pretrained model's maximum length.
        ModelError: the model is unavailable, or does not fit into the memory.
    """
    config = model_config(args.model, weights=args.weights, dtype=args.dtype)
    runtime = RuntimeConfig(device=args.device, seed=args.seed, compile=getattr(args, "compile", False))
    try:
        loaded = shared.take(config, runtime, load_joined)
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        limit = "" if args.memory_limit_gb is None else f" within --memory-limit-gb {args.memory_limit_gb:g}"
        raise ModelError(
            f"{args.model} does not fit on {args.device}{limit}: {error}\n"
            "  hint: choose a smaller --model, or a device with more memory"
        ) from None
    longest = max(args.contexts)
    if not loaded.random_weights and longest + args.new_tokens > loaded.max_length:
        raise ConfigError(
            "--contexts",
            longest,
            f"and {args.new_tokens} new tokens together exceed the limit of {args.model} ({loaded.max_length})",
            hint="use shorter --contexts, or --weights random, which has no limit on positions",
        )
    return loaded


def described_model(args: argparse.Namespace, loaded: LoadedModel) -> dict[str, Any]:
    """Return the entries of a JSON file that describe the model of ``--model``."""
    described = {"model": args.model, "weights": args.weights, **loaded.dtypes.names()}
    return {**described, "memory_limit_gb": args.memory_limit_gb}


class PointBench:
    """One run of ``tpot``, ``prefill`` or ``memory``: the loaded model, the settings to measure, the results so far.

    A result is a row: the figures of one setting at one point (prompt length and batch size).

    Raises:
        KvbenchError: a setting is wrong, or the model or a method's text encoder is unavailable.
    """

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        what = f"python -m kvbench.bench {args.command}: points of time and memory"
        self.file = Recording(args, point_file(args), what, schema=SCHEMA, shuffle=args.shuffle)
        if args.shuffle is not None:
            fixed_batches(args, "--shuffle")
        self.methods = [(setting.text, setting.load()) for setting in map(parse_setting, args.settings)]
        self.grid = Efficiency(
            prompts=tuple(args.contexts),
            batches="grow" if args.grow or not args.batches else tuple(args.batches),
            **{name: getattr(args, name) for name in ("max_batch", "bisect", "new_tokens")},
        )
        model_config(args.model, weights=args.weights, dtype=args.dtype)  # fail early if there is no such model,
        for _, method in self.methods:
            method.ready()  # or no such encoder
        idle_w = idle_power(Counter.of(resolve_device(args.device)), args.idle) if args.idle else None
        self.loaded = loaded_model(args)
        self.model, self.device = self.loaded.model, self.loaded.device
        for _, method in self.methods:
            method.check(head_dim=self.loaded.architecture.head_dim)
        self.file.about |= described_model(args, self.loaded)
        self.file.about["machine"] = {"before": machine_state(self.device), "idle_W": idle_w}
        self.read_rate: float | None = None
        if args.ceiling and self.device.type == "cuda":
            from kvbench.bench.clock import measure_ceiling

            reads = measure_ceiling()
            self.file.about["ceiling"], self.read_rate = reads.as_dict(), reads.rate
            release(self.device)

    def meter(self, method: Method, graphs: str = "never") -> Meter:
        """Create the meter that measures time and memory of one method at any point.

        The first cache that the meter creates switches the model to kvbench's attention. `graphs` is ``always`` to run
        decode steps as CUDA graphs, ``never`` to run them eagerly.
        """
        how = How(
            **{name: getattr(self.args, name) for name in MEASURING},
            graphs=graphs,
            census=self.args.command != "tpot",
            read_rate=self.read_rate,
            options=Options(kernels=self.args.kernels),
        )
        return Meter(self.model, self.loaded.tokenizer, method, how)

    def measure_all(self) -> None:
        """Measure all points with the caches of stock transformers (``--baselines``), then with every setting.

        With ``--eager``, every setting is measured twice: with decode steps as CUDA graphs, then with eager steps. With
        ``--shuffle``, the points of all settings come in a random order.
        """
        for name in self.args.baselines:
            self._grid({"setting": name}, partial(self.meter(self.methods[0][1]).stock_point, name))
        if self.args.shuffle is None:
            for start, measure, method in self._ways():
                self._grid(start, measure)
                method.detach(self.model)
            return
        order = [(way, sample.work) for way in list(self._ways()) for sample in self.grid.samples()]
        random.Random(self.args.shuffle).shuffle(order)
        for (start, measure, method), point in order:
            self.add(start, measure, point)
            method.detach(self.model)

    def _ways(self) -> Iterator[tuple[Row, Measure, Method]]:
        """Yield each setting with graphs or eager steps, as (first entries of its rows, measuring function, method)."""
        both = self.args.eager and self.args.graphs == "always"
        for setting, method in self.methods:
            for graphs in ["always", "never"] if both else [self.args.graphs]:
                start = {"setting": setting, "graphs": graphs, "compile": self.args.compile}
                yield start, partial(self._point, self.meter(method, graphs)), method

    def _grid(self, start: Row, measure: Measure) -> None:
        """Measure the points of one setting in turn; with ``--grow``, each result decides which point is the next."""
        stored: dict[str, Row] = {}
        while sample := next((one for one in self.grid.next_samples(stored) if one.id not in stored), None):
            stored[sample.id] = self.add(start, measure, sample.work)

    def _point(self, meter: Meter, prompt: int, batch: int) -> Row:
        """Measure one point of a method; return its record with the first generated tokens and, if asked, a profile."""
        figures = meter.point(prompt, batch)
        figures.pop("note", None)
        if figures["status"] != "ok":
            return figures
        figures["tokens"] = meter.tokens[0][:SHOWN]
        if self.args.profile and figures["stepping"].startswith("graph") and not meter.method.speculation:
            from kvbench.bench.profile import profile_step

            prompts, options = meter.batch(prompt, batch)[1], {"compile": self.args.compile, "seed": self.args.seed}
            figures["profile"] = profile_step(self.model, meter.method, prompt, batch, prompts=prompts, **options)
        return figures

    def attempt(self, measure: Measure, prompt: int, batch: int) -> Row:
        """Measure a point and return its record; if that fails, release the memory and return the reason as a record.

        Raises:
            KvbenchError: the user made a mistake; it is not recorded as a failed point.
        """
        try:
            return measure(prompt, batch)
        except Exception as error:
            failed = {**failed_row(error), "bytes_asked": bytes_asked(error)}
        release(self.device)
        return {"prompt": prompt, "batch": batch, "new_tokens": self.args.new_tokens, **failed}

    def add(self, start: Row, measure: Measure, point: Any) -> Row:
        """Measure a point, write its row (`start`, then the record) to the file, print it as a line and return it."""
        assert isinstance(point, MeasurePoint)
        row = {**start, **self.attempt(measure, point.prompt, point.batch)}
        self.file.rows.append(row)
        self.file.write()
        self.file.say(point_cells(row, self.args.command, self.file.rows))
        return row

    def finish(self) -> int:
        """Write the JSON file, print the table and return the exit status."""
        self.file.about["machine"]["after"] = machine_state(self.device)
        self.file.write()
        print("\n" + point_table(self.file.rows, self.args.command))
        print(NOTES[self.args.command])
        self.file.end()
        return int(any(row["status"] == "failed" for row in self.file.rows))
