"""Comparison of a cache's predictions with those of the full-precision cache, for samples of ``dataset=fidelity``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kvbench.cache.progress import Options
from kvbench.config.run_config import RunConfig
from kvbench.decoding.head import Comparison
from kvbench.errors import NonFiniteError
from kvbench.models.load import LoadedModel
from kvbench.profiling.memory import PhasePeaks
from kvbench.results.packed import short_floats
from kvbench.results.samples import MEASURED, Row
from kvbench.runner.fidelity_batch import Passes, batch_of, work_of
from kvbench.runner.full_precision import FullPrecision
from kvbench.runner.rows import Machine, Report, head, row_bill
from kvbench.runner.scoring import scored
from kvbench.tasks.base import Sample, Task
from kvbench.tasks.work import CompareTokens

#: windows of a text that are decoded together, and the tokens that they may have together
WINDOWS, TOGETHER = 8, 16384
#: significant digits of the figures of a position in a row
DIGITS = 9
#: number of positions from which a row's figures have 12 bits of mantissa (an error of 1e-4), which pack well
LONG = 1024


@dataclass
class Comparisons:
    """Strategy that compares predictions, for samples whose work is :class:`kvbench.tasks.work.CompareTokens`.

    fp16's predictions are read from a file if they have been stored before; otherwise fp16 decodes the batch first. The
    cache of a speculative method is used without drafting. The task's scorer is called with empty predictions.
    """

    config: RunConfig
    loaded: LoadedModel
    task: Task
    machine: Machine
    options: Options

    def size(self, samples: Sequence[Sample]) -> int:
        """Return the number of samples per batch.

        Prompts run ``runtime.batch_size`` at a time. Windows of a text all have the same length. More of them run
        together, because a step then takes hardly longer: ``runtime.span_rows``, or :data:`WINDOWS` for ``auto``.
        """
        runtime = self.config.runtime
        works = [sample.work for sample in samples if isinstance(sample.work, CompareTokens)]
        longest = max((len(work.ids) for work in works if work.ids is not None), default=0)
        if not longest:
            return runtime.batch_size
        if runtime.span_rows != "auto":
            return runtime.span_rows
        return max(runtime.batch_size, min(WINDOWS, TOGETHER // longest))

    def rows(self, samples: Sequence[Sample], *, first: bool, report: Report | None) -> list[Row]:
        """Compare the predictions for a batch. See :meth:`kvbench.runner.rows.Strategy.rows`.

        Raises:
            ConfigError: a window of text is longer than the model's limit.
            ModelError: the model's final hidden states, or its output head, cannot be used.
            NonFiniteError: a final hidden state contains NaN or Inf.
        """
        groups = [list(group) for _, group in groupby(samples, key=_prompt_kind)]
        if len(groups) > 1:
            return [row for group in groups for row in self.rows(group, first=first, report=report)]
        work = work_of(samples[0])
        batch = batch_of(samples, self.config, self.loaded)
        references = self.full_precision.references(samples, batch, report)
        tokens = [[int(token) for token in reference[0]] for reference in references]
        peaks = PhasePeaks(self.loaded.device, census=False)
        with peaks.run():
            method = self.config.method.alone()
            states, cache = self.passes.states(method, batch, tokens, work, report, samples[0].id)
        rows = []
        for index, sample in enumerate(samples):
            target, base, reference = references[index]
            count = len(target)
            _check_finite(sample.id, states[index][:count], base)
            compared = self.passes.head.compare(
                base.to(self.loaded.device),
                states[index][:count],
                torch.as_tensor(target, device=self.loaded.device),
                work.statistics,
            )
            length = batch.length(index)
            row = {
                **head(sample, length, "window"),
                **scored(self.task, sample, ""),
                "nll": None,
                "fidelity": fidelity_figures(compared, work, length) | {"reference": reference},
                "kv_bytes": row_bill(cache, index, len(samples)),
                MEASURED: self.machine.measured(
                    len(samples),
                    peaks.row(),
                    {"reads_packed": bool(cache.reads_packed), "path": str(cache.path)},
                    decoded=0,
                ),
            }
            if cache.notes:
                row["method"] = cache.notes[index]
            rows.append(row)
        del cache, states
        for index, (sample, row) in enumerate(zip(samples, rows, strict=True)):
            if work_of(sample).probe:
                errors = self.passes.layer_errors(self.config.method.alone(), batch.alone(index, 0), tokens[index])
                row["fidelity"]["layers"] = {
                    name: [_rounded_figure(x) for x in errors[name]] for name in ("own", "total")
                }
        return rows

    @cached_property
    def passes(self) -> Passes:
        """Passes of the model, with the output head."""
        return Passes(self.config.runtime, self.loaded, self.options)

    @cached_property
    def full_precision(self) -> FullPrecision:
        """fp16's predictions."""
        return FullPrecision(self.config, self.loaded, self.task, self.machine, self.passes)


def fidelity_figures(compared: Comparison, work: CompareTokens, prompt: int) -> dict[str, Any]:
    """Return the content of a row's key ``fidelity``, which :mod:`kvbench.results.fidelity_fold` averages.

    `prompt` is the number of tokens of the exact prefill.
    """
    positions, decoded = compared.positions, work.mode == "decode"
    begin = 1 if decoded else 0  # position 0 was predicted by the prefill
    row: dict[str, Any] = {
        "mode": work.mode,
        "statistics": work.statistics,
        "prefill": prompt if decoded else work.prefill,
        "answers": None if work.ids is not None else work.answers,
        "first": None,
        "left": None,
        "other_top": [int(k) for k in np.flatnonzero(~positions.same_top) if k >= begin],
    }
    for name in ("kld", "change", "nll_base", "nll", "top_mass"):
        figures = getattr(positions, name)[begin:]
        row[name] = short_floats(figures) if len(figures) >= LONG else [_rounded_figure(x) for x in figures]
    if decoded and len(positions.kld):
        row["first"] = {
            "kld": _rounded_figure(positions.kld[0]),
            "change": _rounded_figure(positions.change[0]),
            "same_top": bool(positions.same_top[0]),
        }
    if work.ids is None and work.answers == "fp16":
        changed = np.flatnonzero(~positions.same_top)
        at = int(changed[0]) if len(changed) else None
        row["left"] = {
            "at": at,
            "compared": len(positions.kld),
            "gap": None if at is None else _rounded_figure(compared.gap[at]),
        }
    return row


def _prompt_kind(sample: Sample) -> tuple[object, ...]:
    """Return the properties in which all samples of a batch must agree."""
    work = work_of(sample)
    return None if work.ids is None else len(work.ids), work.prefill, work.mode


def _check_finite(name: str, *states: Tensor) -> None:
    """Raise NonFiniteError if a final hidden state contains NaN or Inf, which would make the divergence NaN."""
    if not all(bool(torch.isfinite(part).all()) for part in states):
        raise NonFiniteError(
            f"{name}: a final hidden state of the model contains NaN or Inf.\n"
            "  hint: set model.dtype=float32; if the error remains, the weights are damaged"
        )


def _rounded_figure(number: Any) -> float:
    return float(f"{float(number):.{DIGITS}g}")
