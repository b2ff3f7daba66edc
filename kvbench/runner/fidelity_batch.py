"""Batches of ``dataset=fidelity``: prompts, the tokens decoded after them, and the passes of a model over both."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from kvbench.cache.progress import Options
from kvbench.cache.prompts import Prompts
from kvbench.config.run_config import RunConfig, RuntimeConfig
from kvbench.decoding.fidelity import follow, simulate
from kvbench.decoding.head import Head
from kvbench.decoding.probe import layer_errors
from kvbench.errors import ConfigError
from kvbench.methods.base import QUERY_TOKENS, Method
from kvbench.methods.fp16 import FP16
from kvbench.models.load import LoadedModel
from kvbench.runner.prompting import answer_ids, encode_batch
from kvbench.runner.references import token_digest
from kvbench.runner.rows import Report
from kvbench.tasks.base import Sample
from kvbench.tasks.work import CompareTokens


@dataclass(frozen=True)
class FidelityBatch:
    """Prompts of a batch, and the tokens that are decoded after them.

    Args:
        input_ids: prompts ``[B, T]``, padded on the left.
        mask: attention mask ``[B, T]``; None: no padding.
        prompts: facts about the prompts that methods may need; None for a text without a prompt.
        tokens: for each row, the given tokens after the prompt; None: fp16's own greedy answer.
        new_tokens: largest number of tokens after a prompt.
    """

    input_ids: Tensor
    mask: Tensor | None
    prompts: Prompts | None
    tokens: list[list[int]] | None
    new_tokens: int

    def name(self, index: int) -> str:
        """Return the digest of a row's prompt, and of the tokens after it if these are given."""
        given = self.tokens[index] if self.tokens is not None else []
        return token_digest(self.input_ids[index, self._padding(index) :].tolist(), given)

    def alone(self, index: int, new_tokens: int) -> FidelityBatch:
        """Return one row as a batch of its own, without padding and without tokens after the prompt."""
        ids = self.input_ids[index : index + 1, self._padding(index) :]
        return FidelityBatch(ids, None, _one_prompt(self.prompts, index, ids), None, new_tokens)

    def length(self, index: int) -> int:
        """Return the number of tokens of a row's prompt, without padding."""
        return int(self.input_ids.shape[1]) - self._padding(index)

    def _padding(self, index: int) -> int:
        return 0 if self.mask is None else int((self.mask[index] == 0).sum())


def batch_of(samples: Sequence[Sample], config: RunConfig, loaded: LoadedModel) -> FidelityBatch:
    """Return the batch of samples of one kind: windows of a text, or prompts.

    Raises:
        ConfigError: a window of text is longer than the model's limit.
    """
    return _prompts(samples, config, loaded) if work_of(samples[0]).ids is None else _windows(samples, loaded)


def _windows(samples: Sequence[Sample], loaded: LoadedModel) -> FidelityBatch:
    works = [work_of(sample) for sample in samples]
    ids = torch.tensor([work.ids for work in works], device=loaded.device)
    width, longest = ids.shape[1], loaded.max_length
    if width > longest:
        raise ConfigError("dataset.window", width, f"exceeds the model's limit (model.max_length={longest})")
    prompt, count, decode = works[0].prefill, len(samples), loaded.tokenizer.decode
    # the text after the prompt takes the place of the question
    queries = [decode(row[prompt : prompt + QUERY_TOKENS].tolist()) for row in ids]
    prompts = Prompts([0] * count, [prompt] * count, [(0, prompt)] * count, queries, ids[:, :prompt], decode)
    if works[0].mode == "simulated":
        return FidelityBatch(ids, None, None, ids[:, prompt + 1 :].tolist(), width - prompt)
    return FidelityBatch(ids[:, :prompt], None, prompts, ids[:, prompt:].tolist(), width - prompt)


def _prompts(samples: Sequence[Sample], config: RunConfig, loaded: LoadedModel) -> FidelityBatch:
    new_tokens = config.decoding.max_new_tokens or samples[0].max_new_tokens
    _, input_ids, mask, prompts = encode_batch(samples, config.model, loaded, new_tokens)
    tokens = None
    if work_of(samples[0]).answers == "task":
        tokens = [answer_ids(sample, loaded.tokenizer)[:new_tokens] for sample in samples]
    return FidelityBatch(input_ids, mask, prompts, tokens, new_tokens)


def _one_prompt(prompts: Prompts | None, index: int, ids: Tensor) -> Prompts | None:
    """Return the facts about one prompt, whose `ids` ``[1, T]`` have no padding; None if the batch has no prompts."""
    if prompts is None:
        return None

    def part(values: Any) -> Any:
        return None if values is None else [values[index]]

    return Prompts(
        [0],
        [prompts.lengths[index]],
        part(prompts.context_spans),
        part(prompts.queries),
        ids,
        prompts.decode,
        part(prompts.query_sources),
    )


def work_of(sample: Sample) -> CompareTokens:
    """Return the work of a sample: the tokens to decode, and how to compare the predictions."""
    assert isinstance(sample.work, CompareTokens)
    return sample.work


@dataclass
class Passes:
    """Passes of a model over a batch, with the cache of any method."""

    runtime: RuntimeConfig
    loaded: LoadedModel
    options: Options
    _checked: bool = field(default=False, init=False)

    @cached_property
    def head(self) -> Head:
        """The model's output head in fp32."""
        return Head(self.loaded.model)

    def states(
        self,
        method: Method,
        batch: FidelityBatch,
        tokens: Sequence[Sequence[int]],
        work: CompareTokens,
        report: Report | None,
        name: str,
    ) -> tuple[Tensor, Any]:
        """Return the final hidden states at all positions of a batch, ``[B, n, d]``, and the method's cache.

        Args:
            tokens: for each row, the tokens after the prompt; the last one is predicted, not decoded.
            work: how the batch is decoded: token by token, or in one simulated pass.
            report: function that shows the progress, or None.
            name: what is decoded, for the progress.
        """
        model, runtime = self.loaded.model, self.runtime
        if work.mode == "simulated":
            cache = self.new_cache(method, batch, 0)
            states, logits = simulate(model, cache, batch.input_ids)
            self._check(states[:, 0], logits)
            return states[:, work.prefill : -1], cache
        fed = max(0, max(map(len, tokens)) - 1)
        cache = self.new_cache(method, batch, fed)
        rows = [[*own[:fed], *[0] * (fed - len(own[:fed]))] for own in tokens]
        given = torch.tensor(rows, dtype=torch.long, device=self.loaded.device).view(len(rows), fed)

        def progress(done: int) -> None:
            if report is not None:
                report(len(rows) * done / max(1, fed), f"{name}: {done} of {fed} tokens")

        states, logits = follow(
            model,
            cache,
            batch.input_ids,
            batch.mask,
            given,
            prefill_chunk=runtime.prefill_chunk,
            prefill_rows=runtime.prefill_rows,
            graphs=runtime.graphs,
            compile=runtime.compile,
            report=progress,
        )
        self._check(states[:, 0], logits)
        return states, cache

    def layer_errors(self, method: Method, batch: FidelityBatch, tokens: Sequence[int]) -> dict[str, list[float]]:
        """Return the fields of :class:`kvbench.decoding.probe.LayerErrors` for a batch of one row without padding.

        The last of the tokens after the prompt is not decoded. The lists are empty if no token is decoded.
        """
        given = torch.tensor([list(tokens[:-1])], dtype=torch.long, device=batch.input_ids.device)
        if not given.shape[1]:
            return {"own": [], "total": []}
        errors = layer_errors(
            self.loaded.model,
            lambda: self.new_cache(FP16(), batch, given.shape[1]),
            lambda: self.new_cache(method, batch, given.shape[1]),
            batch.input_ids,
            given,
        )
        return {"own": list(errors.own), "total": list(errors.total)}

    def new_cache(self, method: Method, batch: FidelityBatch, new_tokens: int) -> Any:
        """Return an empty cache for a batch with room for `new_tokens` tokens after the prompts."""
        length = batch.input_ids.shape[1] + new_tokens
        cache = method.new_cache(self.loaded.model, batch.prompts, max_length=length)
        cache.options = self.options
        return cache

    def _check(self, states: Tensor, logits: Tensor) -> None:
        """Check, once per object, that the output head maps `states` to the model's own `logits`."""
        if not self._checked:
            self.head.check(states, logits)
            self._checked = True
