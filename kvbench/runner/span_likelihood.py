"""The likelihood of spans of a text with a method's cache, for perplexity, and how many spans run at once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, Literal

import torch
from torch import Tensor

from kvbench.cache.progress import Options
from kvbench.cache.prompts import Prompts
from kvbench.decoding.perplexity import (
    SCORED,
    decode_nll,
    exact_chunk,
    foreseen,
    forward_nll,
    pass_tokens,
    simulated_nll,
)
from kvbench.decoding.recordable import Graphs
from kvbench.errors import ConfigError, NonFiniteError
from kvbench.methods.base import QUERY_TOKENS, Method
from kvbench.methods.bytes import kv_bytes
from kvbench.models.load import LoadedModel, Shape
from kvbench.profiling.memory import PhasePeaks, release
from kvbench.results.samples import MEASURED, Row
from kvbench.runner.rows import Machine, Report, head, row_bill
from kvbench.runner.scoring import finite, scored
from kvbench.tasks.base import Sample, Task
from kvbench.tasks.work import ScoreText
from kvbench.util.failures import is_out_of_memory

#: tokens of a pass over all rows: with more, a GPU is hardly faster
TOGETHER = 8192
#: rows of a batch whose tokens go one by one: a step reads the weights once for all rows
STEPPED = 64
#: part of the free memory that is used; the rest is for what the prediction leaves out
SHARE = 0.8


def rows_at_once(method: Method, loaded: LoadedModel, span: ScoreText, limit_gb: float | None = None) -> int:
    """Return the number of spans of a batch for ``runtime.span_rows=auto`` on a GPU.

    The method must not be speculative; this applies to the whole module. `limit_gb` is as in :func:`free_bytes`.
    """
    width, device = len(span.ids), loaded.device
    size = pass_tokens(span.chunk, device) if span.mode == "decode" else width
    stepped = span.mode == "decode" and goes_by_steps(method, loaded, size)
    most = STEPPED if stepped else max(1, -(-TOGETHER // min(size, width)))
    shape, element = loaded.architecture, loaded.dtype.itemsize
    fixed = min(SCORED, most * width) * shape.vocab_size * 3 * 4  # scores in fp32, and what cross_entropy makes of them
    config = loaded.model.config.get_text_config(decoder=True)
    inner = getattr(config, "intermediate_size", None) or 4 * shape.hidden_size
    per_row = cache_bytes(method, shape, span, loaded.storage.itemsize)
    per_row += pass_bytes(shape, inner, width, 1 if stepped else size, element)
    room = SHARE * free_bytes(device, limit_gb) - fixed
    return max(1, min(most, int(room // per_row)))


def even(count: int, most: int) -> int:
    """Return the size of equal batches of `count` samples, the fewest possible with at most `most` samples each."""
    batches = -(-count // most)
    return -(-count // batches) if batches else most


def goes_by_steps(method: Method, loaded: LoadedModel, size: int) -> bool:
    """Return True if tokens must go through attention one by one, so that captured steps suit the method best.

    `size` is the number of tokens per row and forward pass.
    """
    if size == 1:
        return True
    return exact_chunk(method, size) == 1 and not foreseen(method.new_cache(loaded.model))


def cache_bytes(method: Method, shape: Shape, span: ScoreText, element: int) -> int:
    """Return the predicted bytes of one span's cache; those of full precision if the method has no formula.

    Sliding windows, which would make it smaller, are ignored. `element` is bytes per element in full precision.
    """
    width = len(span.ids)
    if span.mode == "fp16":
        return 0
    try:
        predicted = kv_bytes(
            method,
            width,
            prompt=width if span.mode == "simulated" else max(1, span.prefill),
            layers=shape.layers,
            query_heads=shape.heads,
            heads=shape.kv_heads,
            channels=shape.head_dim,
            width=element,
        )
    except ConfigError:
        return 2 * shape.layers * width * shape.kv_heads * shape.head_dim * element
    return predicted.total


def pass_bytes(shape: Shape, intermediate: int, width: int, size: int, element: int) -> int:
    """Return the predicted bytes that one row of a pass takes besides its cache, in the layer that takes most.

    They are: two copies of all keys and values of a layer in full precision (the second for a selection of tokens),
    the codes and fp32 values of half of them while they are dequantized, activations, and the logits.

    Args:
        intermediate: channels inside a feed-forward layer.
        width: tokens of the span.
        size: tokens of the pass.
        element: bytes per element in full precision.
    """
    stored = shape.kv_heads * shape.head_dim
    # a token that is packed during the pass takes part in up to three forms
    forms = 0 if size == 1 else 2 * 2 * (width + 3 * size) * stored * element + width * stored * (2 + 2 * 4)
    mask = 0 if size == 1 else size * (width + 3 * size) * (element + 1)
    activations = size * (3 * intermediate + 8 * shape.hidden_size) * element
    return forms + mask + activations + size * shape.vocab_size * element


def free_bytes(device: torch.device, limit_gb: float | None) -> float:
    """Return the bytes that this process can still allocate on a GPU.

    `limit_gb` is the memory in GiB that it may use there; None for no limit.
    """
    allocated = torch.cuda.memory_allocated(device)
    free = torch.cuda.mem_get_info(device)[0] + torch.cuda.memory_reserved(device) - allocated
    return free if limit_gb is None else min(free, limit_gb * 2**30 - allocated)


@dataclass(frozen=True)
class TextSpans:
    """Strategy that measures the likelihood of texts, for samples whose work is :class:`kvbench.tasks.work.ScoreText`.

    The cache of a speculative method is used without drafting. The task's scorer is called with empty predictions,
    because nothing is generated.

    Args:
        rows_at_once: number of spans per batch; ``auto``: on a GPU as many as fit
            (:mod:`kvbench.runner.span_likelihood`), elsewhere `batch_size`.
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
        """Return the largest number of spans per batch; with ``auto`` on a GPU, batches are of even size."""
        if self.rows_at_once != "auto":
            return self.rows_at_once
        if self.loaded.device.type != "cuda" or not self._alone:
            return self.batch_size
        longest = max((span_of(sample) for sample in samples), key=lambda span: len(span.ids))
        most = rows_at_once(self.method.alone(), self.loaded, longest, self.limit_gb)
        return even(len(samples), most)

    @property
    def _alone(self) -> bool:
        """True if no other process runs the same batches, so that this one may choose their size."""
        return self.loaded.layout != "tensor_parallel"

    def rows(self, samples: Sequence[Sample], *, first: bool, report: Report | None) -> list[Row]:
        """Measure the likelihood of each text of a batch. See :meth:`kvbench.runner.rows.Strategy.rows`.

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
        groups = [list(group) for _, group in groupby(samples, key=_span_kind)]
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
            | {MEASURED: self.machine.measured(len(samples), peaks.row(), _attention_entry(cache), decoded=0)}
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


def _span_kind(sample: Sample) -> tuple[object, ...]:
    """Return the properties in which all spans of a batch must agree."""
    span = span_of(sample)
    return len(span.ids), span.prefill, span.mode, span.chunk


def check_mode(method: Method, mode: str, prompt: int) -> None:
    """Raise ConfigError if a method would have no effect on perplexity, or cannot run, in the given mode.

    See :meth:`Method.check_windows`.
    """
    method.check_windows(mode, prompt)


def _attention_entry(cache: Any) -> dict[str, Any]:
    if cache is None:
        return {"reads_packed": False, "path": "none"}
    return {"reads_packed": bool(cache.reads_packed), "path": str(cache.path)}
