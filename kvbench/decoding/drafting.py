"""Drafters of speculative decoding.

A draft reads the target's cache, in full or at lower precision, or a second cache that follows it; its weights are the
target's, in their own precision or in 4 bits.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor
from transformers import PreTrainedModel

from kvbench.cache import KVCache
from kvbench.decoding import sampling
from kvbench.decoding.passes import forward
from kvbench.decoding.sampling import Sampling, probabilities
from kvbench.errors import CacheError
from kvbench.methods.speculation import OWN_VIEWS, Speculation
from kvbench.models import int4


def prepare(model: PreTrainedModel, speculation: Speculation | None) -> int4.Switch | None:
    """Quantize the model's weights to 4 bits if the draft uses such weights, and return the switch that selects them.

    They are computed once per model. None is returned if the draft uses the target's weights, or without speculation.
    """
    if speculation is None or speculation.weights == "same":
        return None
    return int4.attach(model, "ffn" if speculation.weights == "int4" else "all")


class Drafter:
    """A drafter: proposes tokens, and runs the target to verify them.

    Args:
        model: model of both draft and target.
        cache: the target's cache, after the prompt.
        speculation: settings of the draft.

    Attributes:
        target: the target's cache.
        cache: the cache that the draft reads: the target's, or the one that follows it.
        own: whether that is a cache of its own.
        switch: selects the draft's 4-bit weights; None if it uses the target's weights.

    Raises:
        CacheError: the draft needs a cache of its own, but the target's cache does not lead one.
    """

    def __init__(self, model: PreTrainedModel, cache: KVCache, speculation: Speculation) -> None:
        self.model, self.target, self.speculation = model, cache, speculation
        self.switch = prepare(model, speculation)
        self.own = speculation.draft not in OWN_VIEWS
        if self.own and cache.follower is None:
            raise CacheError(
                f"method.draft={speculation.draft} needs its own cache, which is not attached to this "
                "one: make the cache with "
                f"load_method('quantspec', draft='{speculation.draft}').new_cache(model, ...), or call "
                "cache.lead(load_method(...).new_cache(model, ...)) before the prompt"
            )
        self.cache = cache.follower if self.own and cache.follower is not None else cache

    @property
    def seconds(self) -> float:
        """Seconds spent on recording passes so far, which are not part of any round's time."""
        return 0.0

    def settle(self) -> None:
        """Let the method of the draft's own cache, if it has one, demote confirmed tokens."""
        if self.own:
            self.cache.settle()

    def propose(
        self,
        pending: Tensor,
        mask: Tensor | None,
        lengths: Tensor,
        limits: Sequence[int],
        how: Sampling,
        generators: Sequence[torch.Generator],
    ) -> tuple[Tensor, Tensor | None]:
        """Draft as many tokens as the row with the highest limit may accept, and remove them from the cache again.

        Args:
            pending: last confirmed token of each row, not cached yet, ``[B]``.
            mask: attention mask of the padded batch, ``[B, columns + n + 1]``; None: no padding.
            lengths: number of cached tokens of each row, ``[B]``.
            limits: number of drafts that each row may accept; beyond it, its generator is not used.
            how: settings of the sampling.
            generators: source of random numbers of each row.

        Returns:
            Drafts ``[B, n]``, and the distributions from which they were drawn, ``[B, n, V]``; None if greedy or if
            there are no drafts.
        """
        steps, width, token = max(limits), self.cache.get_seq_length(), pending
        drafts, chances = [], []
        with self.drafting():
            for step in range(steps):
                seen = None if mask is None else mask[:, : width + step + 1]
                logits = forward(self.model, self.cache, token[:, None], seen, (lengths + step)[:, None])[:, -1]
                if how.temperature == 0.0:
                    token = logits.argmax(-1)
                else:
                    chances.append(probabilities(logits, how))
                    token = draw(chances[-1], generators, [step < limit for limit in limits])
                drafts.append(token)
            self.cache.crop(-steps)
        if not drafts:
            return pending[:, None][:, :0], None
        return torch.stack(drafts, 1), torch.stack(chances, 1) if chances else None

    def drafts(self, limits: Sequence[int]) -> int:
        """Return how many tokens to draft in a round in which row r may accept ``limits[r]`` drafts."""
        return max(limits)

    def verify(self, tokens: Tensor, lengths: Tensor, mask: Tensor | None) -> Tensor:
        """Return the target's logits after the pending token and after each draft, ``[B, n + 1, V]``.

        Args:
            tokens: the pending token and the drafts of each row, ``[B, n + 1]``.
            lengths: number of cached tokens of each row, ``[B]``.
            mask: as for :meth:`propose`.
        """
        positions = lengths[:, None] + torch.arange(tokens.shape[1], device=tokens.device)
        return forward(self.model, self.target, tokens, mask, positions, all_logits=True)

    def confirm(self, counts: Sequence[int]) -> None:
        """Confirm the newest ``counts[row]`` tokens of the target; a draft's own cache copies their keys and values.

        These were computed with the target's weights, not with the draft's, as in the code of QuantSpec's authors.
        """
        if self.own:
            self.cache.follow(self.target, counts)

    @contextmanager
    def drafting(self) -> Iterator[None]:
        """Switch to the draft's weights and view of the cache inside the context; nothing is demoted in it."""
        progress, on = self.cache.progress, self.switch.on if self.switch else False
        before = progress.frozen, progress.upper
        progress.frozen, progress.upper = True, self.speculation.draft == "upper"
        if self.switch:
            self.switch.on = True
        try:
            yield
        finally:
            progress.frozen, progress.upper = before
            if self.switch:
                self.switch.on = on


def draw(probs: Tensor, generators: Sequence[torch.Generator], wanted: Sequence[bool]) -> Tensor:
    """Draw a token for each row ``[B]`` from ``probs`` ``[B, V]``; rows that are not `wanted` get the likeliest."""
    uniform = uniforms(generators, wanted).to(probs.device)
    return torch.where(torch.tensor(wanted, device=probs.device), sampling.draw(probs, uniform), probs.argmax(-1))


def uniforms(generators: Sequence[torch.Generator], wanted: Sequence[bool]) -> Tensor:
    """Draw a uniform number from each row's generator, ``[B]``; rows that are not `wanted` get 0 and do not draw."""
    none = torch.zeros(1)
    return torch.cat([torch.rand(1, generator=g) if w else none for g, w in zip(generators, wanted, strict=True)])
