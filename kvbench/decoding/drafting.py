"""Drafters: a view of the target's own cache, or a second cache that follows it; with the same weights or others."""

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
    """Make the draft's 4-bit weights if it has any (once a model), and return their switch."""
    if speculation is None or speculation.weights == "same":
        return None
    return int4.attach(model, "ffn" if speculation.weights == "int4" else "all")


class Drafter:
    """A drafter: proposes tokens, and verifies them with the target.

    Args:
        model: of draft and target.
        cache: the target's, after the prompt.
        speculation: what drafts.

    Raises:
        CacheError: the draft has a cache of its own but the target's does not lead one.
    """

    def __init__(self, model: PreTrainedModel, cache: KVCache, speculation: Speculation) -> None:
        self.model, self.target, self.speculation = model, cache, speculation
        self.switch = prepare(model, speculation)
        self.own = speculation.draft not in OWN_VIEWS
        if self.own and cache.follower is None:
            raise CacheError(
                f"method.draft={speculation.draft} has a cache of its own, but this cache leads none: make it with "
                f"load_method('quantspec', draft='{speculation.draft}').new_cache(model, ...), or call "
                "cache.lead(load_method(...).new_cache(model, ...)) before the prompt"
            )
        self.cache = cache.follower if self.own and cache.follower is not None else cache

    @property
    def seconds(self) -> float:
        """Spent on recording passes so far; in no round's time."""
        return 0.0

    def settle(self) -> None:
        """Bring the draft's own cache into its state for the confirmed tokens."""
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
        """Draft as many tokens as the row with the highest limit may accept, and forget their keys and values again.

        Args:
            pending: last confirmed token of each row, not cached yet, ``[B]``.
            mask: ``[B, columns + gamma + 1]`` of the padded batch, or None.
            lengths: tokens of each row in the cache, ``[B]``.
            limits: drafts that each row may accept; only so many are drawn from its generator.
            how: settings of the sampling.

        Returns:
            Drafts ``[B, n]`` and, unless greedy, what they were drawn from, ``[B, n, V]``.
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
        """Return the tokens to draft in a round whose rows may accept `limits`."""
        return max(limits)

    def verify(self, tokens: Tensor, lengths: Tensor, mask: Tensor | None) -> Tensor:
        """Return the target's logits ``[B, n + 1, V]`` after the pending token and each draft, ``[B, n + 1]``."""
        positions = lengths[:, None] + torch.arange(tokens.shape[1], device=tokens.device)
        return forward(self.model, self.target, tokens, mask, positions, all_logits=True)

    def confirm(self, counts: Sequence[int]) -> None:
        """Confirm the target's newest ``counts[row]`` tokens; a cache of the draft's own takes them over.

        They are the target's keys and values, computed with its weights, not the draft's (as in the authors' code).
        """
        if self.own:
            self.cache.follow(self.target, counts)

    @contextmanager
    def drafting(self) -> Iterator[None]:
        """Use the draft's view of its cache and its weights inside, and demote nothing."""
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
    """Draw a token of each row ``[B]`` from ``probs`` ``[B, V]``; unwanted rows get the likeliest, without a draw."""
    uniform = uniforms(generators, wanted).to(probs.device)
    return torch.where(torch.tensor(wanted, device=probs.device), sampling.draw(probs, uniform), probs.argmax(-1))


def uniforms(generators: Sequence[torch.Generator], wanted: Sequence[bool]) -> Tensor:
    """Draw a uniform number from each row's generator ``[B]``; 0, without a draw, for rows that want none."""
    none = torch.zeros(1)
    return torch.cat([torch.rand(1, generator=g) if w else none for g, w in zip(generators, wanted, strict=True)])
