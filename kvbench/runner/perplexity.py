"""Measurement of the likelihood of spans of a text with a method's cache, from which perplexity is computed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, Literal

import torch
from torch import Tensor

from kvbench.cache.options import Options
from kvbench.cache.prompts import Prompts
from kvbench.decoding.perplexity import decode_nll, forward_nll, pass_tokens, simulated_nll
from kvbench.decoding.recordable import Graphs
from kvbench.errors import ConfigError, NonFiniteError
from kvbench.methods.base import QUERY_TOKENS, Method
from kvbench.models.load import LoadedModel
from kvbench.profiling.memory import PhasePeaks, release
from kvbench.results.samples import MEASURED, Row
from kvbench.runner import span_rows
from kvbench.runner.rows import Machine, head, row_bill
from kvbench.runner.scoring import finite, scored
from kvbench.runner.strategy import Report
from kvbench.tasks.base import Sample, Task
from kvbench.tasks.work import ScoreText
from kvbench.util.failures import is_out_of_memory


@dataclass(frozen=True)
class TextSpans:
    """Strategy that measures the likelihood of texts, for samples whose work is :class:`kvbench.tasks.work.ScoreText`.

    The cache of a speculative method is used without drafting. The task's scorer is called with empty predictions,
    because nothing is generated.

    Args:
        rows_at_once: number of spans per batch; ``auto``: on a GPU as many as fit (:mod:`kvbench.runner.span_rows`),
            elsewhere `batch_size`.
        batch_size: number of spans per batch where `rows_at_once` does not determine it.
        limit_gb: memory in GiB that the process may use on a GPU; None for no limit.
        graphs: whether steps may be captured as CUDA graphs, for methods whose tokens must go one by one.
        compile: True: compile everything except attention in captured steps.
    """

    method: Method
    loaded: LoadedModel
    task: Task
    machine: Machine
    options: Options
    rows_at_once: int | Literal["auto"] = "auto"
    batch_size: int = 1
    limit_gb: float | None = None
    graphs: Graphs = "never"
    compile: bool = False

    def size(self, samples: Sequence[Sample]) -> int:
        """Return the largest number of spans per batch, which divides the samples evenly if it is chosen here."""
        if self.rows_at_once != "auto":
            return self.rows_at_once
        if self.loaded.device.type != "cuda" or not self._alone:
            return self.batch_size
        longest = max((span_of(sample) for sample in samples), key=lambda span: len(span.ids))
        most = span_rows.rows_at_once(self.method.alone(), self.loaded, longest, self.limit_gb)
        return span_rows.even(len(samples), most)

    @property
    def _alone(self) -> bool:
        """True if no other process runs the same batches, so that this one may choose their size."""
        return self.loaded.layout != "tensor_parallel"

    def rows(self, samples: Sequence[Sample], *, first: bool, report: Report | None) -> list[Row]:
        """Measure the likelihood of each text of a batch. See :meth:`kvbench.runner.strategy.Strategy.rows`.

        Raises:
            ConfigError: the method would have no effect in this mode or cannot run in it, or a text is longer than the
                model's limit.
            NonFiniteError: the model's logits contain NaN or Inf.
        """
        spans = [span_of(sample) for sample in samples]
        longest = self.loaded.max_length
        check_mode(self.method.alone(), spans[0].mode, spans[0].prefill)
        if len(spans[0].ids) > longest:
            raise ConfigError(
                "dataset.window", len(spans[0].ids), f"exceeds the model's limit (model.max_length={longest})"
            )
        groups = [list(group) for _, group in groupby(samples, key=_kind)]
        if len(groups) > 1:  # spans of different lengths have different caches
            return [row for group in groups for row in self.rows(group, first=first, report=report)]
        peaks = PhasePeaks(self.loaded.device, census=False)
        try:
            with peaks.run():
                sums, cache = self._likelihoods(samples[0].id, spans, report)
        except Exception as error:
            if len(samples) == 1 or self.rows_at_once != "auto" or not self._alone or not is_out_of_memory(error):
                raise
            sums = None
        if sums is None:  # outside the handler, whose traceback holds the memory
            release(self.loaded.device)
            middle = len(samples) // 2
            parts = samples[:middle], samples[middle:]
            return [row for part in parts for row in self.rows(part, first=first, report=report)]
        if not bool(torch.isfinite(sums).all()):
            raise NonFiniteError(
                f"{samples[0].id}: the likelihood of the text is not a number, because the model's "
                "logits contain NaN or Inf.\n"
                "  hint: set model.dtype=float32; if the error remains, the weights are"
                " damaged"
            )
        return [
            self._row(sample, nats, row_bill(cache, index, len(samples)) if cache is not None else None)
            | {MEASURED: self.machine.measured(len(samples), peaks.row(), _attention(cache), decoded=0)}
            for index, (sample, nats) in enumerate(zip(samples, sums.tolist(), strict=True))
        ]

    def _likelihoods(self, name: str, spans: Sequence[ScoreText], report: Report | None) -> tuple[Tensor, Any]:
        """Return the negative log-likelihood of each span in nats, and the cache (None in mode ``fp16``)."""
        span, model, method = spans[0], self.loaded.model, self.method.alone()
        ids = torch.tensor([span.ids for span in spans], device=self.loaded.device)
        width, firsts = ids.shape[1], [span.first for span in spans]
        if span.mode == "fp16":
            method.detach(model)
            return forward_nll(model, ids, firsts), None
        cache = method.new_cache(model, self._prompts(ids, span), max_length=width)
        cache.options = self.options
        if span.mode == "simulated":
            return simulated_nll(model, cache, ids, firsts), cache

        def progress(tokens: int) -> None:
            if report is not None:
                report(len(spans) * tokens / width, f"{name}: {tokens} of {width} tokens")

        sums = decode_nll(
            model,
            cache,
            ids,
            firsts,
            prompt=span.prefill,
            chunk=pass_tokens(span.chunk, self.loaded.device),
            report=progress,
            graphs=self.graphs,
            compile=self.compile,
        )
        return sums, cache

    def _prompts(self, ids: Tensor, span: ScoreText) -> Prompts | None:
        """Return the prompts for the cache, or None if the spans have none.

        The whole prompt is the context; the text of the tokens after it takes the place of the question.
        """
        prompt = span.prefill
        if span.mode != "decode" or not prompt:
            return None
        rows, decode = ids.shape[0], self.loaded.tokenizer.decode
        queries = [decode(row[prompt : prompt + QUERY_TOKENS].tolist()) for row in ids]
        return Prompts([0] * rows, [prompt] * rows, [(0, prompt)] * rows, queries, ids[:, :prompt], decode)

    def _row(self, sample: Sample, nats: float, bill: dict[str, Any] | None) -> Row:
        span = span_of(sample)
        return {
            **head(sample, len(span.ids), "window"),
            **scored(self.task, sample, ""),
            "nll": {"sum": finite(nats), "n": len(span.ids) - span.first},
            "window": {
                "mode": span.mode,
                "prefill": span.prefill,
                "chunk": pass_tokens(span.chunk, self.loaded.device) if span.mode == "decode" else None,
                "bytes": span.bytes,
                "document": span.document,
            },
            "kv_bytes": bill,
        }


def span_of(sample: Sample) -> ScoreText:
    """Return the work of a sample: the span of text whose likelihood is to be measured, and how to measure it."""
    assert isinstance(sample.work, ScoreText)
    return sample.work


def _kind(sample: Sample) -> tuple[object, ...]:
    """Return what the spans of a batch have in common."""
    span = span_of(sample)
    return len(span.ids), span.prefill, span.mode, span.chunk


def check_mode(method: Method, mode: str, prompt: int) -> None:
    """Raise ConfigError if a method would have no effect on perplexity, or cannot run, in the given mode.

    See :meth:`Method.check_windows`.
    """
    method.check_windows(mode, prompt)


def _attention(cache: Any) -> dict[str, Any]:
    if cache is None:
        return {"reads_packed": False, "path": "none"}
    return {"reads_packed": bool(cache.reads_packed), "path": str(cache.path)}
