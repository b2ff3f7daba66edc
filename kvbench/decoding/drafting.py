"""Drafters of speculative decoding: the target model itself with a cheaper cache, cheaper weights, or both.

A drafter reads the target's cache, in full or at lower precision, or a second cache with the same tokens. Its weights
are those of the target, unchanged or in 4 bits.
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


def prepare_draft(model: PreTrainedModel, speculation: Speculation | None) -> int4.Switch | None:
    """Give the model the 4-bit weights that the draft uses, and return the switch between the sets of weights.

    The 4-bit weights stay attached to the model, so they are computed only once. The result is None without
    speculation, or if the draft uses the target's weights.
    """
    if speculation is None or speculation.weights == "same":
        return None
    return int4.attach(model, "ffn" if speculation.weights == "int4" else "all")


class Drafter:
    """Runner of draft and target in speculative decoding: drafts tokens, and computes the target's logits for them.

    All forward passes are eager. Accepting drafts and removing rejected ones is up to the caller.

    Attributes:
        target: the target's cache, which already contains the prompts.
        cache: the cache that the draft reads: the target's cache, or a second cache with the same tokens.
        own: True if the draft reads a second cache.
        switch: switches the model to the draft's 4-bit weights; None if the draft uses the target's.

    Raises:
        CacheError: the draft needs a cache of its own, but none is attached to the target's cache
            (:meth:`kvbench.cache.KVCache.lead`).
    """

    def __init__(self, model: PreTrainedModel, cache: KVCache, speculation: Speculation) -> None:
        self.model, self.target, self.speculation = model, cache, speculation
        self.switch = prepare_draft(model, speculation)
        self.own = speculation.draft not in OWN_VIEWS
        if self.own and cache.follower is None:
            raise CacheError(
                f"method.draft={speculation.draft} needs its own cache, which is not attached to this "
                "one: make the cache with "
                f"load_method('quantspec', draft='{speculation.draft}').new_cache(model, ...), or call "
                "cache.lead(load_method(...).new_cache(model, ...)) before the prompt"
            )
        self.cache = cache.follower if self.own and cache.follower is not None else cache

    def settle(self) -> None:
        """Let the draft's method pack or drop tokens, if the draft has its own cache; call this between rounds."""
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
        """Draft the tokens of one round, and return them with the distributions from which they were drawn.

        The number n of drafts is the highest of `limits`, and the same for all rows. The drafts are removed from
        the cache before the function returns.

        Args:
            pending: last confirmed token of each row, not cached yet, ``[B]``.
            mask: attention mask of the padded batch, ``[B, columns + n + 1]``; None: no padding.
            lengths: number of cached tokens of each row, ``[B]``.
            limits: maximum number of drafts to accept in each row. Drafts beyond it are chosen greedily, without using
                the row's generator.

        Returns:
            Drafts ``[B, n]``, and their distributions ``[B, n, V]``; the latter are None for greedy decoding, or if n
            is 0.
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
                    token = draw_tokens(chances[-1], generators, [step < limit for limit in limits])
                drafts.append(token)
            self.cache.crop(-steps)
        if not drafts:
            return pending[:, None][:, :0], None
        return torch.stack(drafts, 1), torch.stack(chances, 1) if chances else None

    def verify(self, tokens: Tensor, lengths: Tensor, mask: Tensor | None) -> Tensor:
        """Run the target on the drafts, and return its logits after each token, ``[B, n + 1, V]``.

        `tokens` are the last confirmed token and n drafts of each row, ``[B, n + 1]``; for `lengths` and `mask` see
        :meth:`propose`.
        """
        positions = lengths[:, None] + torch.arange(tokens.shape[1], device=tokens.device)
        return forward(self.model, self.target, tokens, mask, positions, all_logits=True)

    def confirm(self, counts: Sequence[int]) -> None:
        """Copy the newest `counts` confirmed tokens of each row from the target's cache to the draft's own, if any.

        The copied keys and values were computed with the target's weights, as in the code of QuantSpec's authors, and
        not with the draft's.
        """
        if self.own:
            self.cache.follow(self.target, counts)

    @contextmanager
    def drafting(self) -> Iterator[None]:
        """Make the model act as the draft inside a ``with`` block: with the draft's weights and view of the cache.

        Inside the block, no tokens are packed or dropped, because drafts may be rejected.
        """
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


def draw_tokens(probs: Tensor, generators: Sequence[torch.Generator], wanted: Sequence[bool]) -> Tensor:
    """Draw one token per row from the distributions ``[B, V]``, and return the tokens, ``[B]``.

    A row for which `wanted` is False gets its most probable token, and its generator is not used.
    """
    uniform = draw_uniforms(generators, wanted).to(probs.device)
    return torch.where(
        torch.tensor(wanted, device=probs.device), sampling.pick_tokens(probs, uniform), probs.argmax(-1)
    )


def draw_uniforms(generators: Sequence[torch.Generator], wanted: Sequence[bool]) -> Tensor:
    """Draw a random number in [0, 1) per wanted row, ``[B]``; other rows get 0, and their generators are not used."""
    none = torch.zeros(1)
    return torch.cat([torch.rand(1, generator=g) if w else none for g, w in zip(generators, wanted, strict=True)])
