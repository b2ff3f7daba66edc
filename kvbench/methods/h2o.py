"""H2O: the tokens that have received most attention so far, heavy hitters, and the newest ones.

Source: Zhang et al., "H2O: Heavy-Hitter Oracle for Efficient Generative Inference of Large Language Models" (NeurIPS
2023), sec. 4, Algorithm 1; FMInference/H2O, h2o_hf/utils_real_drop/modify_llama.py (attention of the whole prompt is
summed, then every step adds its own and drops what is least). The variant that chooses once, after the prompt, is that
of KVCache-Factory; dividing by the number of queries is kvpress's (ObservedAttention).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

from kvbench.errors import CacheError, ConfigError
from kvbench.methods.base import Method, Reach, Side
from kvbench.methods.eviction import Reduce, check_budget, forget, highest, keep, put, reduce, tokens, with_recent

if TYPE_CHECKING:
    import torch

    from kvbench.cache.layer import KVLayer
    from kvbench.cache.segments.base import Segment
    from kvbench.cache.segments.scored import ScoredSegment


@dataclass(kw_only=True)
class H2O(Method):
    """Heavy hitters by accumulated attention, per KV head, and a recent window; keys keep their positions.

    On a layer with a sliding window the choice, and a budget that is a share, are of the tokens that are still seen: a
    token that is hidden goes first, whatever attention it has received.

    Args:
        budget: tokens held: a number, or a share of the tokens seen so far (paper: 0.2, of the prompt).
        recent: of these the newest: a number, or a share of the budget (paper: half).
        evict: ``steps``: attention is accumulated and the least token dropped at every step (H2O); ``prefill``: once,
            after the prompt, by the column sums of its attention, and the cache grows from then on (the harnesses'
            H2O, which is another method).
        group: how the scores of the query heads of a KV head become one.
        per_query: divide a token's sum by the queries that could see it: without it early tokens gather more.
    """

    budget: int | float = 0.2
    recent: int | float = 0.5
    evict: Literal["steps", "prefill"] = "steps"
    group: Reduce = "mean"
    per_query: bool = False

    observe_prompt: ClassVar[int] = -1

    @property
    def observe_steps(self) -> bool:  # type: ignore[override]
        """Every step's attention is added up, unless the choice is made once."""
        return self.evict == "steps"

    @property
    def prompt_only(self) -> bool:  # type: ignore[override]
        """Whether nothing happens after the prompt."""
        return self.evict == "prefill"

    def check(self, head_dim: int | None = None, max_length: int | None = None) -> None:
        """Shares that are shares, recent tokens within the budget."""
        super().check(head_dim, max_length)
        if isinstance(self.recent, float) and not 0.0 <= self.recent <= 1.0:
            raise ConfigError("method.recent", self.recent, "is no share of the budget", allowed="0.0 to 1.0")
        if isinstance(self.recent, int) and self.recent < 0:
            raise ConfigError("method.recent", self.recent, "must not be negative", allowed="0, 1, ..., 32, ...")
        check_budget(self.budget, self.least, f"the recent tokens (method.recent={self.recent}) and a heavy one")

    def reach(self) -> Reach | None:
        """A budget that is a number holds so many tokens, and then drops."""
        held = self.budget if isinstance(self.budget, int) else self.least
        key = "budget" if isinstance(self.budget, int) else "recent"
        return Reach(f"method.{key}", getattr(self, key), held, of_prompt=self.evict == "prefill")

    @property
    def least(self) -> int:
        """Smallest budget: the recent tokens, where they are a number, and one more."""
        return (self.recent if isinstance(self.recent, int) else 1) + 1

    def split(self, n: int) -> tuple[int, int]:
        """Heavy and recent tokens that are held after n."""
        held = tokens(self.budget, n, self.least)
        recent = self.recent if isinstance(self.recent, int) else int(self.recent * held + 1e-9)
        recent = min(recent, held)
        return held - recent, recent

    def segments(self, layer: KVLayer, side: Side) -> list[Segment]:
        """One segment in full precision; that of the keys carries the scores where they go on to grow."""
        expected = layer.expected_length()
        if self.evict == "prefill":
            room = sum(self.split(layer.seen)) + layer.coming()
            return [self.full(layer, side, capacity=min(room, expected))]
        room = sum(self.split(expected)) + 64
        if side == "value":
            return [self.full(layer, side, capacity=room)]
        from kvbench.cache.segments.scored import ScoredSegment

        shape = (layer.batch, layer.heads, layer.key_dim)
        return [ScoredSegment(*shape, layer.dtype, layer.device, capacity=room)]

    def place(
        self, layer: KVLayer, rows: slice, keys: torch.Tensor, values: torch.Tensor, scores: torch.Tensor | None
    ) -> None:
        """The newest tokens, and of the others those with the highest column sums."""
        if scores is None:
            raise CacheError("h2o chooses by the attention of the prompt, and none was observed")
        heads, n = keys.shape[1:3]
        sums = scores[:, :, 0].unflatten(1, (heads, -1)).transpose(-1, -2)  # [rows, H, n, group]
        if self.group != "max":  # mean and sum of sums may be taken at once
            sums = reduce(sums, self.group, -1)[..., None]
        import torch

        total = layer.real_tokens(rows.indices(layer.batch)[0])  # n: those of them that a sliding window still shows
        index = self.kept(sums, torch.arange(total - n, total, device=sums.device), total, total - n)
        put(layer, rows, keys, values, index)
        if self.evict == "steps":
            tail = self.scored(layer)
            tail.begin(
                rows, sums if index is None else sums.gather(2, index[..., None].expand(-1, -1, -1, sums.shape[-1]))
            )

    def forgotten(self, layer: KVLayer, hidden: int) -> int:
        """All that are hidden."""
        return hidden

    def forget(self, layer: KVLayer, rows: slice, hidden: int) -> None:
        """Where the choice is made once, slots that are hidden in all heads; :meth:`settle` has seen to the rest."""
        if self.evict == "prefill" and layer.order[rows.indices(layer.batch)[0]] is None:
            super().forget(layer, rows, hidden)
        elif self.evict == "prefill":
            forget(layer, rows, hidden)

    def observe(self, layer: KVLayer, rows: slice, probabilities: torch.Tensor) -> None:
        """Attention of a step ``[rows, Hq, q, slots]``; counts once its tokens are confirmed."""
        received = probabilities.unflatten(1, (layer.heads, -1))
        if self.group != "max":
            received = reduce(received, self.group, 2)[:, :, None]
        self.scored(layer).observe(rows, received)

    def settle(self, layer: KVLayer, rows: slice) -> None:
        """Add the confirmed steps' attention and drop what has received least."""
        if self.evict == "prefill":
            return
        tail, row = self.scored(layer), rows.indices(layer.batch)[0]
        scores, n = tail.commit(rows), layer.real_tokens(row)
        if scores.shape[2] > sum(self.split(layer.visible_tokens(row))):
            import torch

            places = None
            if self.per_query or layer.window:
                places = torch.stack(
                    [layer.positions(r).expand(layer.heads, -1) for r in range(*rows.indices(layer.batch))]
                )
                places = places.to(scores.device) - layer.start(row)
            index = self.kept(scores, places, n, layer.hidden(row))
            assert index is not None
            keep(layer, rows, index)

    def kept(self, sums: torch.Tensor, places: torch.Tensor | None, n: int, hidden: int = 0) -> torch.Tensor | None:
        """Slots that stay, ascending, ``[B, H, budget]``; None: all of them.

        Args:
            sums: attention received by each slot, ``[B, H, slots, 1]``, or one for each query head of the group.
            places: positions of the slots, ``[slots]`` or ``[B, H, slots]`` (needed for `per_query`).
            n: tokens so far.
            hidden: the oldest of them, which a sliding window has passed (needs `places`).
        """
        heavy, recent = self.split(n - hidden)
        slots = sums.shape[2]
        if slots <= heavy + recent:
            return None
        scores = sums[..., 0] if sums.shape[-1] == 1 else reduce(sums, self.group, -1)
        if self.per_query:
            assert places is not None
            scores = scores / (n - places)
        if hidden:
            assert places is not None
            scores = scores.masked_fill(places < hidden, -1.0)  # attention is not negative
        return with_recent(highest(scores[..., : slots - recent], heavy), slots, recent)

    def scored(self, layer: KVLayer) -> ScoredSegment:
        """The segment of the keys, which carries the scores."""
        from kvbench.cache.segments.scored import ScoredSegment

        tail = layer.stores()[0].tail
        assert isinstance(tail, ScoredSegment)
        return tail
