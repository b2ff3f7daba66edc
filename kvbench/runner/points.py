"""Measurement of time and memory for a model and a method at the points of ``dataset=efficiency``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from kvbench.cache.progress import Options
from kvbench.config.run_config import DecodingConfig, RuntimeConfig
from kvbench.measure.meter import How, Meter
from kvbench.measure.point_figures import per_sequence
from kvbench.methods.base import Method
from kvbench.models.load import LoadedModel
from kvbench.profiling.machine import machine_state
from kvbench.results.samples import MEASURED, Row
from kvbench.runner.rows import Machine, Report, head
from kvbench.runner.scoring import scored
from kvbench.tasks.base import Sample, Task
from kvbench.tasks.efficiency import SETTINGS
from kvbench.tasks.work import MeasurePoint


@dataclass
class Points:
    """Strategy that measures time and memory, for samples whose work is :class:`kvbench.tasks.work.MeasurePoint`.

    The task's scorer is called with empty answers, because their content does not matter.
    """

    method: Method
    decoding: DecodingConfig
    runtime: RuntimeConfig
    loaded: LoadedModel
    task: Task
    machine: Machine
    options: Options
    _meter: Meter | None = field(default=None, init=False)

    def rows(self, samples: Sequence[Sample], *, first: bool, report: Report | None) -> list[Row]:
        """Measure the points one by one; arguments as for :meth:`kvbench.runner.rows.Strategy.rows`."""
        return [self._row(sample) for sample in samples]

    def _row(self, sample: Sample) -> Row:
        point = sample.work
        assert isinstance(point, MeasurePoint)
        if self._meter is None:
            self._meter = self._new_meter(sample, point)
        before = machine_state(self.loaded.device)
        figures = self._meter.point(point.prompt, point.batch)
        after = machine_state(self.loaded.device)
        fitted = figures["status"] == "ok"
        if point.prompt + figures["new_tokens"] > self.loaded.max_length:
            figures["beyond"] = self.loaded.max_length  # only with random weights (Efficiency.fits)
        note = figures.pop("note", None)
        row = {
            **head(sample, point.prompt, "length" if fitted else "oom"),
            "status": figures["status"],
            **scored(self.task, sample, ""),
            "nll": None,
            "kv_bytes": per_sequence(figures) if fitted else None,
            MEASURED: self.machine.measured(
                point.batch,
                figures.get("peak"),
                {"reads_packed": figures["reads_packed"], "path": figures["path"]} if fitted else None,
                ttft_s=None,  # a mean over points would be meaningless: each has its own figures
                decoded=0,
            )
            | {"point": figures, "machine": {"before": before, "after": after}},
        }
        return {**row, "method": note} if note else row

    def _new_meter(self, sample: Sample, point: MeasurePoint) -> Meter:
        decoding, runtime = self.decoding, self.runtime
        how = How(
            new_tokens=decoding.max_new_tokens or sample.max_new_tokens,
            **{key: getattr(point, key) for key in SETTINGS},
            # capture however short the answer: the time of it is in no figure but capture_s
            graphs="always" if runtime.graphs == "auto" else runtime.graphs,
            compile=runtime.compile,
            prefill_chunk=runtime.prefill_chunk,
            prefill_rows=runtime.prefill_rows,
            temperature=decoding.temperature,
            top_p=decoding.top_p,
            options=self.options,
        )
        return Meter(self.loaded.model, self.loaded.tokenizer, self.method, how)
