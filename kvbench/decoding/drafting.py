"""Who drafts: a view of the target's own cache, or a second cache that follows it; with the same weights or others."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor
from transformers import PreTrainedModel

from kvbench.cache import KVCache
from kvbench.decoding.passes import forward
from kvbench.decoding.sampling import Sampling, probabilities
from kvbench.errors import CacheError
from kvbench.methods.speculation import OWN_VIEWS, Speculation
from kvbench.models import int4


def prepare(model: PreTrainedModel, speculation: Speculation | None) -> int4.Switch | None:
    """Make the draft's 4-bit weights where it has any (once a model); their switch."""
    if speculation is None or speculation.weights == "same":
        return None
    return int4.attach(model, "ffn" if speculation.weights == "int4" else "all")


class Drafter:
    """Proposes tokens.

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
        sampling: Sampling,
        generators: Sequence[torch.Generator],
    ) -> tuple[Tensor, Tensor | None]:
        """Draft as many tokens as the row with the highest limit may accept, and forget their keys and values again.

        Args:
            pending: last confirmed token of each row, not cached yet, ``[B]``.
            mask: ``[B, columns + gamma + 1]`` of the padded batch, or None.
            lengths: tokens of each row in the cache, ``[B]``.
            limits: drafts that each row may accept; only so many are drawn from its generator.

        Returns:
            Drafts ``[B, n]`` and, unless greedy, what they were drawn from, ``[B, n, V]``.
        """
        steps, width, token = max(limits), self.cache.get_seq_length(), pending
        drafts, chances = [], []
        with self._drafting():
            for step in range(steps):
                seen = None if mask is None else mask[:, : width + step + 1]
                logits = forward(self.model, self.cache, token[:, None], seen, (lengths + step)[:, None])[:, -1]
                if sampling.temperature == 0.0:
                    token = logits.argmax(-1)
                else:
                    chances.append(probabilities(logits, sampling))
                    token = draw(chances[-1], generators, [step < limit for limit in limits])
                drafts.append(token)
            self.cache.crop(-steps)
        if not drafts:
            return pending[:, None][:, :0], None
        return torch.stack(drafts, 1), torch.stack(chances, 1) if chances else None

    def confirm(self, counts: Sequence[int]) -> None:
        """The newest ``counts[row]`` tokens of the target are confirmed: a cache of the draft's own takes them over.

        They are the target's keys and values, computed with its weights, not the draft's (as in the authors' code).
        """
        if self.own:
            self.cache.follow(self.target, counts)

    @contextmanager
    def _drafting(self) -> Iterator[None]:
        progress, on = self.cache.progress, self.switch.on if self.switch else False
        before = progress.held, progress.upper
        progress.held, progress.upper = True, self.speculation.draft == "upper"
        if self.switch:
            self.switch.on = True
        try:
            yield
        finally:
            progress.held, progress.upper = before
            if self.switch:
                self.switch.on = on


def draw(probs: Tensor, generators: Sequence[torch.Generator], wanted: Sequence[bool]) -> Tensor:
    """A token of each row ``[B]`` from ``probs`` ``[B, V]``; rows that want none get the likeliest, without a draw."""
    tokens, host = probs.argmax(-1), probs.cpu()
    drawn = {
        row: int(torch.multinomial(host[row], 1, generator=generators[row])) for row, want in enumerate(wanted) if want
    }
    for row, token in drawn.items():
        tokens[row] = token
    return tokens
