"""KL divergence of recipes on texts that were prefilled once: exact keys and values are kept, and placed again.

Of each window, the tokens after the prefill are fed in one pass of many tokens, through the cache that the recipe has
made of the exact prefill. Formats pack each token by itself, and a token of a step is stored before it attends; so one
pass stores and sees the same as one step per token, up to the order of sums. The last token is predicted, not fed, and
the first prediction, which the exact prefill makes, is not scored (:mod:`kvbench.tasks.fidelity`).
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from kvbench.cache import KVCache
from kvbench.cache.progress import Options
from kvbench.config.run_config import RunConfig
from kvbench.decoding.fidelity import FinalStates
from kvbench.decoding.head import Head
from kvbench.decoding.passes import check_cache, forward
from kvbench.decoding.shared_prefill import ReadPrompt, read_prompts
from kvbench.errors import NonFiniteError
from kvbench.methods.base import Method
from kvbench.methods.fp16 import FP16
from kvbench.methods.layer_map import EXACT
from kvbench.models.load import LoadedModel
from kvbench.runner.fidelity_batch import FidelityBatch, batch_of
from kvbench.runner.fidelity_samples import Comparisons
from kvbench.runner.rows import Machine
from kvbench.tasks.base import Sample
from kvbench.tune.space import Recipe, layer_map

#: significant digits of a KL divergence, so that one read from a file equals one just measured
DIGITS = 7


class AllStates(FinalStates):
    """Recorder of the final states of all new tokens, of which the output head gets the last alone."""

    def _take(self, module: torch.nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:  # type: ignore[override]
        self.taken.append(inputs[0])
        return inputs[0][:, -1:], *inputs[1:]

    def everything(self) -> Tensor:
        """Return the states of all passes so far, ``[B, n, d]``."""
        return torch.cat(self.taken, 1)


@dataclass
class Windows:
    """Windows of a batch, prefilled.

    Args:
        prompt: exact keys and values.
        given: tokens that are fed after the prefill, ``[B, n]``.
        targets: for each row, the tokens that follow the fed ones.
        base: final hidden states with the exact cache, ``[B, n, d]``.
    """

    batch: FidelityBatch
    prompt: ReadPrompt
    given: Tensor
    targets: list[Tensor]
    base: Tensor

    @property
    def scored(self) -> int:
        """Number of predictions that are compared."""
        return sum(len(target) for target in self.targets)


@dataclass(frozen=True)
class ChunkScore:
    """KL divergence of a recipe on the windows of a batch, in nats.

    Args:
        kl: mean over each window's predictions.
        top: the largest divergences of single predictions, in falling order: enough for the 99 % of all windows.
        count: number of predictions.
    """

    kl: tuple[float, ...]
    top: tuple[float, ...]
    count: int


class Evaluator:
    """A loaded model with prefilled windows, which scores recipes.

    Args:
        samples: samples of ``dataset=fidelity``; `size` of them are a batch, which is scored at once.

    Raises:
        ConfigError: a window is longer than the model's limit, or the method cannot share a prefill.
        ModelError: kvbench does not serve the model.
    """

    def __init__(self, config: RunConfig, loaded: LoadedModel, samples: Sequence[Sample], size: int) -> None:
        self.config, self.loaded = config, loaded
        self.options = Options(kernels=config.runtime.kernels, mlp_chunk=config.runtime.mlp_chunk)
        self.head = Head(loaded.model)
        self.chunks = [self._windows(samples[first : first + size]) for first in range(0, len(samples), size)]
        # a share of all predictions, all of which may lie in one batch
        self.kept = sum(windows.scored for windows in self.chunks) // 100 + 2

    @property
    def heads(self) -> tuple[int, ...]:
        """KV heads of each layer."""
        return self.chunks[0].prompt.heads

    @property
    def channels(self) -> int:
        """Channels of a head."""
        return self.chunks[0].prompt.channels

    def _windows(self, samples: Sequence[Sample]) -> Windows:
        loaded, device = self.loaded, self.loaded.device
        batch = batch_of(samples, self.config, loaded)
        tokens = batch.tokens
        if tokens is None:  # fp16's own greedy answers
            comparisons = Comparisons(
                self.config, loaded, self.config.task, Machine(str(device), **loaded.dtypes.names()), self.options
            )
            references = comparisons.full_precision.references(samples, batch, None)
            tokens = [[int(token) for token in reference[0]] for reference in references]
        fed = max(1, max(map(len, tokens)) - 1)
        rows = [[*own[:fed], *[0] * (fed - len(own[:fed]))] for own in tokens]
        given = torch.tensor(rows, dtype=torch.long, device=device)
        targets = [torch.tensor(own[1:], dtype=torch.long, device=device) for own in tokens]
        assert batch.prompts is not None  # only simulated passes have none
        exact = self._cache(FP16(), batch, fed)
        prompt = read_prompts(
            loaded.model, [exact], batch.prompts, batch.input_ids, batch.mask,
            chunk=self.config.runtime.prefill_chunk, rows=self.config.runtime.prefill_rows,
        )  # fmt: skip
        prompt.fill(exact)
        base = scored_states(loaded.model, exact, batch, given)
        prompt.forget(exact)
        return Windows(batch, prompt, given, targets, base)

    def _cache(self, method: Method, batch: FidelityBatch, fed: int) -> KVCache:
        cache = method.new_cache(self.loaded.model, batch.prompts, max_length=batch.input_ids.shape[1] + fed)
        cache.options = self.options
        return cache

    def cache(self, recipe: Recipe, windows: Windows) -> KVCache:
        """Return a cache that holds the prefill of some windows in a recipe of single layers."""
        cache = self._cache(method_of(self.config, recipe), windows.batch, windows.given.shape[1])
        windows.prompt.admit(cache)
        windows.prompt.fill(cache)
        windows.prompt.forget(cache)
        return cache

    @torch.inference_mode()
    def score(self, recipe: Recipe, number: int) -> ChunkScore:
        """Return the KL divergence of a recipe of single layers on the windows of batch `number`.

        Raises:
            NonFiniteError: a prediction is NaN or Inf.
        """
        windows = self.chunks[number]
        states = scored_states(self.loaded.model, self.cache(recipe, windows), windows.batch, windows.given)
        # a state that is NaN would not show in every comparison
        if not (torch.isfinite(states).all() and torch.isfinite(windows.base).all()):
            raise NonFiniteError(
                f"the recipe {layer_map(recipe)} gives a KL divergence that is NaN: a final state is NaN or Inf.\n"
                "  hint: set model.dtype=float32; if the error remains, leave its formats out of --formats"
            )
        compared = [
            self.head.compare(base[: len(target)], own[: len(target)], target).positions.kld
            for base, own, target in zip(windows.base, states, windows.targets, strict=True)
        ]
        all_kl = np.concatenate(compared)
        top = np.sort(all_kl)[::-1][: self.kept]
        return ChunkScore(tuple(_rounded(x.mean()) for x in compared), tuple(map(_rounded, top)), len(all_kl))


def method_of(config: RunConfig, recipe: Recipe) -> Method:
    """Return the method that stores the layers as a recipe says."""
    method: Any = copy(config.method)
    method.layers = layer_map(recipe)
    method.format = next((form for form in recipe if form != EXACT), method.format)
    return method  # type: ignore[no-any-return]


@torch.inference_mode()
def scored_states(model: PreTrainedModel, cache: KVCache, batch: FidelityBatch, given: Tensor) -> Tensor:
    """Feed tokens ``[B, n]`` after the prompts in one pass, and return their final hidden states, ``[B, n, d]``."""
    width, count = batch.input_ids.shape[1], given.shape[1]
    mask = batch.mask
    first = torch.full((len(given), 1), width, device=given.device) if mask is None else mask.sum(-1, keepdim=True)
    if mask is not None:
        mask = torch.nn.functional.pad(mask, (0, count), value=1)
    positions = first + torch.arange(count, device=given.device)
    final = AllStates(model)
    with final:
        forward(model, cache, given, mask, positions, all_logits=True)
        check_cache(cache, width + count)
        return final.everything()


def _rounded(number: Any) -> float:
    return float(f"{float(number):.{DIGITS}g}")
