"""Passes of a model over a batch of ``dataset=fidelity``, with the cache of any method."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from kvbench.cache.options import Options
from kvbench.config.run_config import RuntimeConfig
from kvbench.decoding.fidelity import follow, simulate
from kvbench.decoding.head import Head
from kvbench.decoding.probe import layer_errors
from kvbench.methods.base import Method
from kvbench.methods.fp16 import FP16
from kvbench.models.load import LoadedModel
from kvbench.runner.fidelity_batch import Batch
from kvbench.runner.strategy import Report
from kvbench.tasks.work import CompareTokens


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
        batch: Batch,
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

    def layer_errors(self, method: Method, batch: Batch, tokens: Sequence[int]) -> dict[str, list[float]]:
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

    def new_cache(self, method: Method, batch: Batch, new_tokens: int) -> Any:
        """Return an empty cache for a batch, after whose prompts `new_tokens` tokens are decoded."""
        length = batch.input_ids.shape[1] + new_tokens
        cache = method.new_cache(self.loaded.model, batch.prompts, max_length=length)
        cache.options = self.options
        return cache

    def _check(self, states: Tensor, logits: Tensor) -> None:
        """Check once that the head gives the logits that the model gave."""
        if not self._checked:
            self.head.check(states, logits)
            self._checked = True
