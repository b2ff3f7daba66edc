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
from kvbench.methods.eviction import Reduce, check_budget, highest, keep, reduce, with_recent
from kvbench.methods.scored import ScoredMethod
from kvbench.util.lazy import lazy

if TYPE_CHECKING:
    import torch

    from kvbench.cache.layer import KVLayer
    from kvbench.cache.segments import scored as scored_segments
    from kvbench.cache.segments.base import Segment
else:
    torch, scored_segments = lazy("torch"), lazy("kvbench.cache.segments.scored")


@dataclass(kw_only=True)
class H2O(ScoredMethod):
    """H2O: keeps, per KV head, the tokens with the most accumulated attention (heavy hitters) and the newest tokens.

    Keys keep their original positions.

    On a layer with a sliding window, only tokens that later tokens can see are candidates, and a budget given as a
    share is a share of these: hidden tokens are dropped first, however much attention they have received.

    Args:
        budget: tokens to keep, as a number (int) or as a share (float) of the tokens seen so far (paper: 0.2 of the
            prompt).
        recent: how many of these are the newest tokens, as a number (int) or as a share (float) of the budget (paper:
            half).
        evict: ``steps``: every step adds its attention to the sums and drops the token with the lowest sum (H2O);
            ``prefill``: tokens are dropped only once, after the prompt, by the attention that they received during the
            prompt. The cache then grows with each token. Evaluation harnesses call this H2O too, but it is a different
            method.
        group: reduction of the scores of the query heads that share a KV head: ``mean``, ``max`` or ``sum``.
        per_query: True: divide the sum of each token by the number of queries that could see the token. Otherwise early
            tokens have an advantage, because more queries see them.
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
    def prompt_only(self) -> bool:  # type: ignore[override]
        """True for ``evict=prefill``: only tokens of the prompt are dropped."""
        return self.evict == "prefill"

    # -- the choice -------------------------------------------------------------------------------------------------

    def score(self, keys: torch.Tensor, values: torch.Tensor, attention: torch.Tensor | None) -> torch.Tensor:
        """Return the attention that each prompt token has received, per KV head, ``[B, H, n]``.

        Args:
            keys: keys of the prompt, ``[B, H, n, D]``.
            values: values of the prompt, ``[B, H, n, Dv]``.
            attention: attention summed over all queries of the prompt, ``[B, Hq, 1, n]``.
        """
        assert attention is not None
        queries = torch.arange(keys.shape[2], 0, -1, device=attention.device)
        return self.totals(self.received(attention, keys.shape[1]), queries)

    def received(self, attention: torch.Tensor, heads: int) -> torch.Tensor:
        """Return the attention that each token has received, combined per KV head, ``[B, H, n, 1]``.

        For ``group=max`` the result has one number per query head, ``[B, H, n, group]``, because the maximum can only
        be taken once all steps have been added.

        Args:
            attention: attention summed over queries, ``[B, Hq, 1, n]``.
            heads: number of KV heads, H.
        """
        sums = attention[:, :, 0].unflatten(1, (heads, -1)).transpose(-1, -2)
        return sums if self.group == "max" else reduce(sums, self.group, -1)[..., None]  # linear: may be reduced now

    def totals(self, received: torch.Tensor, queries: torch.Tensor | None) -> torch.Tensor:
        """Return the scores of tokens, ``[B, H, n]``; those with the highest scores are kept.

        Args:
            received: sums of attention as :meth:`received` returns them, ``[B, H, n, group or 1]``.
            queries: number of queries that could see each token, ``[n]`` or ``[B, H, n]``; used and required only if
                `per_query` is True.
        """
        scores = received[..., 0] if received.shape[-1] == 1 else reduce(received, self.group, -1)
        if self.per_query:
            assert queries is not None
            scores = scores / queries
        return scores

    def split(self, n: int) -> tuple[int, int]:
        """Return how many of `n` tokens are kept as heavy hitters, and how many because they are the newest."""
        resident = sum(super().split(n))
        recent = self.recent if isinstance(self.recent, int) else int(self.recent * resident + 1e-9)
        recent = min(recent, resident)
        return resident - recent, recent

    @property
    def least(self) -> int:
        """Smallest allowed budget, in tokens: one heavy hitter and the recent tokens (one if `recent` is a share)."""
        return (self.recent if isinstance(self.recent, int) else 1) + 1

    # -- every step -------------------------------------------------------------------------------------------------

    def segments(self, layer: KVLayer, side: Side) -> list[Segment]:
        """Return one full-precision segment; with ``evict=steps`` the segment of the keys also stores the scores."""
        if self.evict == "prefill":
            return super().segments(layer, side)
        room = sum(self.split(layer.expected_length())) + 64
        if side == "value":
            return [self.full(layer, side, capacity=room)]
        shape = (layer.batch, layer.heads, layer.key_dim)
        return [scored_segments.ScoredSegment(*shape, layer.dtype, layer.device, capacity=room)]

    def placed(self, layer: KVLayer, rows: slice, attention: torch.Tensor | None, index: torch.Tensor | None) -> None:
        """Initialise the sums with the attention that the kept tokens received during the prompt (``evict=steps``).

        Args:
            layer: layer whose prompt has been stored.
            rows: rows of the batch.
            attention: attention summed over all queries of the prompt, ``[rows, Hq, 1, n]``.
            index: indices of the kept tokens for each KV head, ``[rows, H, m]``; None: all tokens.
        """
        if self.evict == "steps":
            assert attention is not None
            received = self.received(attention, layer.heads)
            if index is not None:
                received = received.gather(2, index[..., None].expand(-1, -1, -1, received.shape[-1]))
            self.scored(layer).begin(rows, received)

    def observe(self, layer: KVLayer, rows: slice, probabilities: torch.Tensor) -> None:
        """Record the attention of a step. It is added to the sums once the tokens of the step are confirmed.

        Args:
            layer: layer in which the attention was computed.
            rows: rows of the batch.
            probabilities: attention probabilities of the step's q tokens, ``[rows, Hq, q, slots]``.
        """
        received = probabilities.unflatten(1, (layer.heads, -1))
        if self.group != "max":
            received = reduce(received, self.group, 2)[:, :, None]
        self.scored(layer).observe(rows, received)

    def settle(self, layer: KVLayer, rows: slice) -> None:
        """Add the attention of the confirmed steps to the scores, then drop the tokens with the lowest scores.

        Afterwards as many tokens remain as the budget allows.
        """
        if self.evict == "prefill":
            return
        tail, row = self.scored(layer), rows.indices(layer.batch)[0]
        received, n, hidden = tail.commit(rows), layer.real_tokens(row), layer.hidden(row)
        heavy, recent = self.split(n - hidden)
        slots = received.shape[2]
        if slots <= heavy + recent:
            return
        places = None
        if self.per_query or layer.window:
            each = [layer.positions(r).expand(layer.heads, -1) for r in range(*rows.indices(layer.batch))]
            places = torch.stack(each).to(received.device) - layer.start(row)
        scores = self.totals(received, None if places is None else n - places)
        if hidden:
            assert places is not None
            scores = scores.masked_fill(places < hidden, -1.0)  # attention is not negative
        keep(layer, rows, with_recent(highest(scores[..., : slots - recent], heavy), slots, recent))

    def forget(self, layer: KVLayer, rows: slice, hidden: int) -> None:
        """Drop slots whose tokens a sliding window hides in every head.

        With ``evict=steps`` this does nothing, because :meth:`settle` has dropped them already.
        """
        if self.evict == "prefill":
            super().forget(layer, rows, hidden)

    def scored(self, layer: KVLayer) -> scored_segments.ScoredSegment:
        """Return the segment that stores the keys and the sums of attention (``evict=steps`` only)."""
        tail = layer.stores()[0].tail
        assert isinstance(tail, scored_segments.ScoredSegment)
        return tail

    def layer_bytes(self, at: Setting) -> KVBytes:
        """Predict the bytes of the kept tokens; with ``evict=steps`` this includes their sums of attention."""
        if self.evict == "prefill":
            return super().layer_bytes(at)
        resident = sum(self.split(at.tokens - at.hidden))
        per_token = at.query_heads // at.heads if self.group == "max" else 1
        return at.both(resident) + KVBytes(index=4 * resident * at.heads * per_token)

    # -- checks -----------------------------------------------------------------------------------------------------

    def check(self, head_dim: int | None = None, max_length: int | None = None) -> None:
        """Raise ConfigError if a share is out of range, or if the budget has room for the recent tokens only."""
        if isinstance(self.recent, float) and not 0.0 <= self.recent <= 1.0:
            raise ConfigError("method.recent", self.recent, "is not a share of the budget", allowed="0.0 to 1.0")
        if isinstance(self.recent, int) and self.recent < 0:
            raise ConfigError("method.recent", self.recent, "must not be negative", allowed="0 or greater")
        check_budget(self.budget, self.least, f"the recent tokens (method.recent={self.recent}) and one heavy hitter")
        super().check(head_dim, max_length)

    def reach(self) -> Reach | None:
        """Return the number of tokens up to which none is dropped: the budget.

        If the budget is a share, the result is :attr:`least`.
        """
        key, tokens = ("budget", self.budget) if isinstance(self.budget, int) else ("recent", self.least)
        return Reach(f"method.{key}", getattr(self, key), tokens, of_prompt=self.evict == "prefill")
