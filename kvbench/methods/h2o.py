"""H2O: keep the heavy hitters, the tokens that have received the most attention so far, and the newest tokens.

Source: Zhang et al., "H2O: Heavy-Hitter Oracle for Efficient Generative Inference of Large Language Models" (NeurIPS
2023), sec. 4, Algorithm 1; FMInference/H2O, h2o_hf/utils_real_drop/modify_llama.py (sums the attention over all queries
of the prompt; then every step adds its own attention and drops the token with the smallest sum). The variant that
chooses once, after the prompt, is from KVCache-Factory; dividing by the number of queries is from kvpress
(ObservedAttention).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

from kvbench.errors import ConfigError
from kvbench.methods.base import Reach, Side
from kvbench.methods.byte_parts import KVBytes, Setting
from kvbench.methods.eviction import Reduce, check_budget, highest, reduce, with_recent
from kvbench.methods.scored import ScoredMethod
from kvbench.util.lazy import lazy

if TYPE_CHECKING:
    import torch

    from kvbench.cache.kernels import evict
    from kvbench.cache.layer import KVLayer
    from kvbench.cache.segments import scored as scored_segments
    from kvbench.cache.segments.base import Segment
else:
    torch, scored_segments = lazy("torch"), lazy("kvbench.cache.segments.scored")
    evict = lazy("kvbench.cache.kernels.evict")


@dataclass(kw_only=True)
class H2O(ScoredMethod):
    """H2O: each KV head keeps its heavy hitters, the tokens that have received most attention, and the newest tokens.

    Keys keep the RoPE of their original positions.

    On a layer with a sliding window, hidden tokens are dropped first, however much attention they have received. A
    budget given as a share is then a share of the tokens that are not hidden.

    Args:
        budget: tokens to keep, as a number (int) or as a share (float) of the tokens seen so far (paper: 0.2 of the
            prompt).
        recent: part of the budget that is kept for the newest tokens, as a number (int) or as a share (float) of the
            budget (paper: half).
        evict: ``steps``: every step adds its attention to the sums and drops the token with the lowest sum (H2O).
            ``prefill``: tokens are dropped only once, at the end of the prompt, by the attention that they received
            during the prompt; the cache then grows with each token. Evaluation harnesses call this H2O too, but it is a
            different method.
        group: how the scores of the query heads that share a KV head are combined: ``mean``, ``max`` or ``sum``.
        per_query: True: divide the attention that a token has received by the number of queries that could see it.
            Without this, early tokens have an advantage, because more queries see them.
    """

    budget: int | float = 0.2
    recent: int | float = 0.5
    evict: Literal["steps", "prefill"] = "steps"
    group: Reduce = "mean"
    per_query: bool = False

    observe_prompt: ClassVar[int] = -1

    @property
    def observe_steps(self) -> bool:  # type: ignore[override]
        """True for ``evict=steps``: the method needs the attention of every step."""
        return self.evict == "steps"

    @property
    def observe_group(self) -> Literal["mean", "sum", "apart"]:  # type: ignore[override]
        """Reduction of a step's attention over a KV head's query heads; ``max`` is taken of sums, so ``apart``."""
        return "apart" if self.group == "max" else self.group

    @property
    def prompt_only(self) -> bool:  # type: ignore[override]
        """True for ``evict=prefill``: only tokens of the prompt are dropped."""
        return self.evict == "prefill"

    # -- the choice -------------------------------------------------------------------------------------------------

    def score(self, keys: torch.Tensor, values: torch.Tensor, attention: torch.Tensor | None) -> torch.Tensor:
        """Return the attention that each prompt token has received, per KV head, ``[B, H, n]``.

        `attention` is the sum over all queries of the prompt, ``[B, Hq, 1, n]``.
        """
        assert attention is not None
        queries = torch.arange(keys.shape[2], 0, -1, device=attention.device)
        return self.totals(self.received(attention, keys.shape[1]), queries)

    def received(self, attention: torch.Tensor, heads: int) -> torch.Tensor:
        """Return the attention that each token has received, with query heads combined if that is possible at once.

        A mean or sum over the query heads of a KV head can be taken at once. A maximum must wait for the total, so for
        ``group=max`` the query heads stay separate.

        Args:
            attention: attention summed over queries, ``[B, Hq, 1, n]``.

        Returns:
            ``[B, H, n, 1]``; for ``group=max``, ``[B, H, n, Hq / H]``.
        """
        sums = attention[:, :, 0].unflatten(1, (heads, -1)).transpose(-1, -2)
        return sums if self.group == "max" else reduce(sums, self.group, -1)[..., None]  # linear: may be reduced now

    def totals(self, received: torch.Tensor, queries: torch.Tensor | None) -> torch.Tensor:
        """Return the score of each token, ``[B, H, n]``.

        Args:
            received: what :meth:`received` returns, summed over the prompt and all steps so far.
            queries: number of queries that could see each token, ``[n]`` or ``[B, H, n]``; read only with `per_query`.
        """
        scores = received[..., 0] if received.shape[-1] == 1 else reduce(received, self.group, -1)
        if self.per_query:
            assert queries is not None
            scores = scores / queries
        return scores

    def split(self, n: int) -> tuple[int, int]:
        """Return how many of `n` tokens are kept as heavy hitters, and how many as the newest tokens."""
        resident = sum(super().split(n))
        recent = self.recent if isinstance(self.recent, int) else int(self.recent * resident + 1e-9)
        recent = min(recent, resident)
        return resident - recent, recent

    @property
    def least(self) -> int:
        """Smallest allowed budget, in tokens: the newest tokens (1 if `recent` is a share) and one heavy hitter."""
        return (self.recent if isinstance(self.recent, int) else 1) + 1

    # -- every step -------------------------------------------------------------------------------------------------

    def segments(self, layer: KVLayer, side: Side) -> list[Segment]:
        """Return one empty full-precision segment; with ``evict=steps``, the one of keys has sums and positions too."""
        if self.evict == "prefill":
            return super().segments(layer, side)
        room = sum(self.split(layer.expected_length())) + 64
        if side == "value":
            return [self.full(layer, side, capacity=room)]
        shape = (layer.batch, layer.heads, layer.key_dim)
        return [scored_segments.ScoredSegment(*shape, layer.dtype, layer.device, capacity=room)]

    def placed(self, layer: KVLayer, rows: slice, attention: torch.Tensor | None, index: torch.Tensor | None) -> None:
        """Set the kept tokens' sums to the attention received during the prompt (``evict=steps`` only)."""
        if self.evict == "steps":
            assert attention is not None
            received = self.received(attention, layer.heads)
            row = rows.indices(layer.batch)[0]
            places = None
            if index is not None:
                received = received.gather(2, index[..., None].expand(-1, -1, -1, received.shape[-1]))
                places = index + layer.hidden(row)  # tokens that the window hides are not among those to choose from
            self.scored(layer).begin(rows, received, places, layer.real_tokens(row))
            layer.order[rows] = [None] * len(layer.order[rows])  # the segment has the places

    def observe(self, layer: KVLayer, rows: slice, probabilities: torch.Tensor) -> None:
        """Record the attention of a decode step; :meth:`settle` adds it to the sums.

        It is not added at once, because the tokens of the step may still be rolled back (rejected drafts).
        """
        received = probabilities.unflatten(1, (layer.heads, -1))
        if self.group != "max":
            received = reduce(received, self.group, 2)[:, :, None]
        self.scored(layer).observe(rows, received)

    def settle(self, layer: KVLayer, rows: slice) -> None:
        """Add the recorded attention to the sums, then drop the tokens with the lowest scores beyond the budget."""
        if self.evict == "prefill":
            return
        tail, row = self.scored(layer), rows.indices(layer.batch)[0]
        n, hidden, slots = layer.real_tokens(row), layer.hidden(row), tail.length(rows)
        heavy, recent = self.split(n - hidden)
        surplus = slots - heavy - recent
        values = layer.stores()[1].tail
        if not hidden and surplus <= 1 and evict.can_drop_lowest(tail, values, rows):
            evict.drop_lowest(tail, values, rows, slots - recent if surplus > 0 else 0, per_query=self.per_query)
            return
        received = tail.commit(rows)
        if surplus <= 0:
            return
        places = tail.places.view(rows)[..., 0]
        scores = self.totals(received, n - places)
        if hidden:
            scores = scores.masked_fill(places < hidden, -1.0)  # attention is not negative
        scores, places = scores[..., : slots - recent], places[..., : slots - recent]
        if surplus == 1 and not hidden:  # a decode step: one token takes the dropped one's slot, without a sort
            # of equal scores that of the newest token is the lowest, as in `highest`
            lowest = scores.amin(-1, keepdim=True)
            index = places.masked_fill(scores > lowest, -1).argmax(-1)
            for store in layer.stores():
                store.tail.replace(rows, index)
            return
        order = places.argsort(-1)  # tokens lie in any order since the first was dropped
        chosen = order.gather(-1, highest(scores.gather(-1, order), heavy))
        chosen = with_recent(chosen, slots, recent)
        for store in layer.stores():
            store.tail.keep(rows, chosen)

    def positions(self, layer: KVLayer, row: int) -> torch.Tensor | None:
        """Return the position of the token in each slot of a row, ``[H, n]`` on the CPU; None if no token was dropped.

        The newest tokens are in the last slots. The others are in any order: when a step drops a token, the token of
        the first slot takes its place.
        """
        if self.evict == "prefill":
            return super().positions(layer, row)
        tail = self.scored(layer)
        if tail.lengths[row] == layer.real_tokens(row):
            return None
        return tail.places_of(row).cpu() + layer.start(row)

    def forget(self, layer: KVLayer, rows: slice, hidden: int) -> None:
        """Drop slots whose tokens a sliding window hides in every head (``evict=prefill`` only).

        With ``evict=steps``, :meth:`settle` has already dropped the hidden tokens.
        """
        if self.evict == "prefill":
            super().forget(layer, rows, hidden)

    def scored(self, layer: KVLayer) -> scored_segments.ScoredSegment:
        """Return the segment of the keys, which also stores the attention sums (``evict=steps`` only)."""
        tail = layer.stores()[0].tail
        assert isinstance(tail, scored_segments.ScoredSegment)
        return tail

    def layer_bytes(self, at: Setting) -> KVBytes:
        """Predict the bytes of the kept tokens and, with ``evict=steps``, of their attention sums and positions."""
        if self.evict == "prefill":
            return super().layer_bytes(at)
        resident = sum(self.split(at.tokens - at.hidden))
        per_token = at.query_heads // at.heads if self.group == "max" else 1
        return at.both(resident) + KVBytes(index=4 * resident * at.heads * (per_token + 1))

    # -- checks -----------------------------------------------------------------------------------------------------

    def check(self, head_dim: int | None = None, max_length: int | None = None) -> None:
        """Raise ConfigError if a share is out of range, or if the budget leaves no room for a heavy hitter."""
        if isinstance(self.recent, float) and not 0.0 <= self.recent <= 1.0:
            raise ConfigError("method.recent", self.recent, "is not a share of the budget", allowed="0.0 to 1.0")
        if isinstance(self.recent, int) and self.recent < 0:
            raise ConfigError("method.recent", self.recent, "must not be negative", allowed="0 or greater")
        check_budget(self.budget, self.least, f"the recent tokens (method.recent={self.recent}) and one heavy hitter")
        super().check(head_dim, max_length)

    def reach(self) -> Reach | None:
        """Return the largest number of tokens that are all kept: the budget.

        If the budget is a share, the number is :attr:`least`, because at least this many tokens are kept.
        """
        key, tokens = ("budget", self.budget) if isinstance(self.budget, int) else ("recent", self.least)
        return Reach(f"method.{key}", getattr(self, key), tokens, of_prompt=self.evict == "prefill")
