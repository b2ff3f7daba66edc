"""Observation of a model that decodes with exact keys and values, which the caches of methods receive as well.

The model runs on an fp16 cache, so its hidden states, queries, keys and values are exact in every layer. The error
measured in a layer therefore arises in this layer, and is not passed on from earlier ones. In each layer, the cache of
every method receives the exact keys and values, and packs and drops tokens by the method's rule. At each decode step,
attention over this cache is compared with exact attention for the same query. Because all methods see the same queries,
their differences are paired.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel

from kvbench.analysis.bins import Bins
from kvbench.analysis.blocks import BLOCK, Exact, Queries
from kvbench.analysis.compare import Errors, compare_attention, exact_outputs
from kvbench.analysis.exact import SPIKE, Profile, profile
from kvbench.attention import observe, reference
from kvbench.attention.logits import logits_of
from kvbench.attention.over_stores import step
from kvbench.attention.register import mask, prompt, see_padding
from kvbench.attention.rope import rotary
from kvbench.cache import KVCache
from kvbench.cache.layer import Handle, KVLayer
from kvbench.errors import CacheError

NAME = "kvbench_analysis"

#: default number of a prompt's queries that are processed at a time
QUERIES = 64


@dataclass(frozen=True, kw_only=True)
class Options:
    """Options of an analysis.

    Args:
        steps: largest number of decode steps; there are fewer if the model ends its answer.
        prompt_queries: number of tokens at the end of the prompt whose exact attention is recorded; None for all.
        positions: True to record the highest and the mean exact probability of every position at every decode step.
        spike: a token counts as a spike if its probability is more than this many times the mean.
        block: number of keys that are processed at a time.
        queries: number of the prompt's queries that are processed at a time.
    """

    steps: int = 16
    prompt_queries: int | None = 0
    positions: bool = False
    spike: float = SPIKE
    bins: Bins = field(default_factory=Bins)
    block: int = BLOCK
    queries: int = QUERIES


class Observation:
    """Recorder of exact attention on one prompt, and of the errors of several methods' caches on that prompt.

    Args:
        candidates: the caches to compare with exact attention, by setting; each is empty and has one row.

    Attributes:
        steps: exact attention, ``steps[i][j]`` for decode step i and layer j.
        highest: highest probability of each position over all layers and heads: one array ``[n]`` per decode step;
            empty unless requested.
        mean: mean probability of each position, in the same form.
        errors: for each setting the errors of its cache, ``errors[setting][i][j]`` for decode step i and layer j.
        prompt: exact attention of the prompt's last tokens, summed over these tokens: for each layer a tuple of the
            probabilities and the numbers of spikes in each bin, stacked to ``[2, Hq, K]``; the numbers of visible
            tokens in each bin, ``[K]``; and the number of queries in the sums. Empty unless requested.
    """

    def __init__(self, candidates: dict[str, KVCache], options: Options) -> None:
        self.candidates, self.options = candidates, options
        self.steps: list[list[Profile]] = []
        self.highest: list[Tensor] = []
        self.mean: list[Tensor] = []
        self.errors: dict[str, list[list[Errors]]] = {name: [] for name in candidates}
        self.prompt: list[tuple[Tensor, Tensor, int]] = []

    def attach(self, model: PreTrainedModel) -> None:
        """Install this recorder as the model's attention, so that every layer calls :meth:`attention`.

        The model must already use kvbench's attention.
        """
        AttentionInterface.register(NAME, self.attention)
        AttentionMaskInterface.register(NAME, mask)
        model.set_attn_implementation(NAME)

    def attention(
        self,
        module: torch.nn.Module,
        query: Tensor,
        key: Any,
        value: Any,
        attention_mask: Tensor | None,
        scaling: float | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, None]:
        """Compute exact attention for one layer; at decode steps, record it and each candidate's errors.

        The model calls this in place of :func:`kvbench.attention.register.model_attention`, with queries ``[1, Hq, q,
        D]`` after RoPE; `key` and `value` are the :class:`kvbench.cache.layer.Handle` that the exact cache returned
        from ``update``. A scaling of None is 1/sqrt(D). During the prompt, exact attention is recorded only for the
        queries that :attr:`Options.prompt_queries` selects.

        Returns:
            The attention outputs ``[1, q, Hq, Dv]``, and None in place of the attention weights.

        Raises:
            CacheError: the batch has several rows or padding, or several tokens arrive in one decode step.
        """
        assert isinstance(key, Handle)
        before, layer = rotary.take(module), key.layer
        keys, values = key.claim()
        if layer.batch != 1:
            raise CacheError(
                f"attention is analysed one text at a time, but the batch has {layer.batch} rows.\n"
                "  hint: pass one row at a time to the model"
            )
        scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
        logits = logits_of(module, query, kwargs)
        first = layer.seen - query.shape[2]
        queries = Queries.of(query, layer.heads, scaling, first, layer.window, logits)
        call = _Call(module, query, keys, values, before, attention_mask, scaling, kwargs)
        if not layer.sealed:
            see_padding(layer, attention_mask, query.shape[2])
            if layer.start(0):
                raise CacheError(
                    f"attention is analysed without padding, but the prompt begins with {layer.start(0)} padding tokens"
                )
            out = prompt(module, layer, query, keys, keys, values, attention_mask, scaling, kwargs)
            for cache in self.candidates.values():
                call.place(cache.kv_layers[layer.index])
            self._profile_prompt(queries, Exact(keys[0], values[0]))
            return out, None
        if query.shape[2] != 1:
            raise CacheError(
                f"attention is analysed token by token, but a step after the prompt has {query.shape[2]} tokens"
            )
        out = step(module, layer, query, keys, values, attention_mask, scaling, logits)
        self._observe_step(layer, queries, call)
        return out, None

    def _profile_prompt(self, queries: Queries, exact: Exact) -> None:
        """Add up the exact attention of the prompt's last queries, one block of queries at a time."""
        options, count = self.options, len(queries.columns)
        wanted = count if options.prompt_queries is None else min(options.prompt_queries, count)
        if not wanted:
            return
        sums: Any = 0.0
        visible: Any = 0.0
        for start in range(count - wanted, count, options.queries):
            part = queries[start : min(start + options.queries, count)]
            # later tokens are masked for all of these queries; without their keys they cost no time
            seen = Exact(exact.keys[:, : int(part.columns[-1]) + 1], exact.values)
            shown = profile(part, seen, options.bins, block=options.block, spike=options.spike)
            sums = sums + torch.stack([shown.mass.sum(1), shown.spikes.sum(1)])
            visible = visible + shown.visible.sum(0)
        self.prompt.append((sums, visible, wanted))

    def _observe_step(self, layer: KVLayer, queries: Queries, call: _Call) -> None:
        options, exact = self.options, Exact.of(layer)
        positions = layer.seen if options.positions else 0
        shown = profile(queries, exact, options.bins, positions=positions, block=options.block, spike=options.spike)
        self._keep(layer.index, shown)
        reference_outputs = exact_outputs(queries, exact, shown.log_total, options.bins, options.block)
        for name, cache in self.candidates.items():
            candidate = cache.kv_layers[layer.index]
            call.append(candidate)
            errors = compare_attention(
                queries,
                exact,
                candidate,
                options.bins,
                log_total=shown.log_total,
                mass=shown.mass,
                reference=reference_outputs,
                block=options.block,
            )
            if layer.index == 0:
                self.errors[name].append([])
            self.errors[name][-1].append(errors)

    def _keep(self, layer: int, shown: Profile) -> None:
        """Add a layer's exact attention to the current step; layer 0 begins a new one."""
        nothing = shown.highest[:0]
        profile = replace(shown, highest=nothing, mean=nothing, log_total=nothing)
        if layer == 0:
            self.steps.append([profile])
            if self.options.positions:
                self.highest.append(shown.highest)
                self.mean.append(shown.mean)
            return
        self.steps[-1].append(profile)
        if self.options.positions:
            device = self.highest[-1].device  # layers may be on several
            self.highest[-1] = torch.maximum(self.highest[-1], shown.highest.to(device))
            # mean over the layers so far
            self.mean[-1] += (shown.mean.to(device) - self.mean[-1]) / (layer + 1)


@dataclass(frozen=True)
class _Call:
    """Arguments of one call of a model's attention, with which every candidate's layer is then updated too."""

    module: torch.nn.Module
    query: Tensor
    keys: Tensor
    values: Tensor
    before: Tensor | None
    mask: Tensor | None
    scaling: float
    kwargs: dict[str, Any]

    def place(self, layer: KVLayer) -> None:
        """Pass the keys and values of the prompt to a layer, which stores them by its method's rule."""
        keys = self._update(layer)
        see_padding(layer, self.mask, self.query.shape[2])
        if layer.method.quantized_prefill:
            layer.place_chunk(keys, self.values)
            return
        prompt_keys, values = layer.extend_prompt(keys, self.values)
        if layer.method.observe_prompt:
            logits = logits_of(self.module, self.query, self.kwargs)
            layer.observed = observe.extend(layer, self.query, self.keys, self.mask, self.scaling, logits)
        layer.end_chunk(prompt_keys, values)

    def append(self, layer: KVLayer) -> None:
        """Pass the key and value of a new token to a layer, as in a decode step."""
        layer.append(self._update(layer), self.values)
        if layer.method.eager:
            layer.settle(forget=False)
        if layer.method.observe_steps:  # its own attention, which decides what it drops next
            logits = logits_of(self.module, self.query, self.kwargs)
            reference.attend_reference(
                self.module, layer, layer.rotated_queries(self.query), self.mask, self.scaling, logits
            )

    def _update(self, layer: KVLayer) -> Tensor:
        """Call a layer's ``update`` with the new tokens, and return their keys in the form that the layer stores."""
        handle, _ = layer.update(self.keys, self.values)
        handle.claim()
        return rotary.stored(layer, self.keys, self.before, self.module, self.kwargs.get("position_ids"))
