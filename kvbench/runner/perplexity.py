"""Measurement of the likelihood of spans of a text with a method's cache, from which perplexity is computed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kvbench.cache.options import Options
from kvbench.cache.prompts import Prompts
from kvbench.decoding.perplexity import decode_nll, forward_nll, pass_tokens, simulated_nll
from kvbench.errors import ConfigError, NonFiniteError
from kvbench.methods.base import QUERY_TOKENS, Method
from kvbench.models.load import LoadedModel
from kvbench.profiling.memory import PhasePeaks
from kvbench.results.samples import MEASURED, Row
from kvbench.runner.rows import Machine, head, row_bill
from kvbench.runner.scoring import finite, scored
from kvbench.runner.strategy import Report
from kvbench.tasks.base import Sample, Task
from kvbench.tasks.work import ScoreText


@dataclass(frozen=True)
class TextSpans:
    """Strategy that measures the likelihood of texts, for samples whose work is :class:`kvbench.tasks.work.ScoreText`.

    Args:
        method: the configured method. If it is speculative, its cache is used without drafting.
        loaded: the loaded model.
        task: the data set. Its scorer is called with empty predictions, because nothing is generated.
        machine: names of the device and the dtype, which are copied into each row.
        options: kernels and back ends that the caches use.
    """

    method: Method
    loaded: LoadedModel
    task: Task
    machine: Machine
    options: Options

    def rows(self, samples: Sequence[Sample], *, first: bool, report: Report | None) -> list[Row]:
        """Measure the likelihood of each text of a batch, and return one row per text.

        The arguments are those of :meth:`kvbench.runner.strategy.Strategy.rows`.

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
        # spans whose first scored tokens differ (the first of overlapping spans and the next) run one by one
        if len({span.first for span in spans}) > 1:
            return [row for sample in samples for row in self.rows([sample], first=first, report=report)]
        peaks = PhasePeaks(self.loaded.device, census=False)
        with peaks.run():
            sums, cache = self._likelihoods(samples[0].id, spans, report)
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
        width = ids.shape[1]
        if span.mode == "fp16":
            method.detach(model)
            return forward_nll(model, ids, span.first), None
        cache = method.new_cache(model, self._prompts(ids, span), max_length=width)
        cache.options = self.options
        if span.mode == "simulated":
            return simulated_nll(model, cache, ids, span.first), cache

        def progress(tokens: int) -> None:
            if report is not None:
                report(len(spans) * tokens / width, f"{name}: {tokens} of {width} tokens")

        chunk = pass_tokens(span.chunk)
        return decode_nll(model, cache, ids, span.first, prompt=span.prefill, chunk=chunk, report=progress), cache

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
                "chunk": pass_tokens(span.chunk) if span.mode == "decode" else None,
                "bytes": span.bytes,
                "document": span.document,
            },
            "kv_bytes": bill,
        }


def span_of(sample: Sample) -> ScoreText:
    """Return the work of a sample: the span of text whose likelihood is to be measured, and how to measure it."""
    assert isinstance(sample.work, ScoreText)
    return sample.work


def check_mode(method: Method, mode: str, prompt: int) -> None:
    """Raise ConfigError if a method would have no effect on perplexity, or cannot run, in the given mode.

    Args:
        method: the method of the run.
        mode: how perplexity is measured: ``decode``, ``simulated`` or ``fp16`` (explained in
            :meth:`Method.check_windows`).
        prompt: number of tokens at the start of each span of text that are read as a prompt and not scored.
    """
    method.check_windows(mode, prompt)


def _attention(cache: Any) -> dict[str, Any]:
    if cache is None:
        return {"reads_packed": False, "path": "none"}
    return {"reads_packed": bool(cache.reads_packed), "path": str(cache.path)}
