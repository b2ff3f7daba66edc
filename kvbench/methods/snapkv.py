"""SnapKV: of the prompt, the tokens that its last queries attend to, with their neighbours, and those last tokens.

Source: Li et al., "SnapKV: LLM Knows What You are Looking for Before Generation" (NeurIPS 2024), sec. 4, listing 1;
FasterDecoding/SnapKV, snapkv_utils.py. The authors' code repeats keys and values for every query head and chooses for
each of these; with grouped-query attention that multiplies the cache. Here the query heads of a group choose together:
by mean, maximum or sum before the pooling (as KVCache-Factory's option does), or after it (kvpress, MagicDec).
Votes are summed in fp32; the authors round each probability to the model's dtype first.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

from kvbench.errors import CacheError, ConfigError
from kvbench.methods.base import Method, Reach, Side
from kvbench.methods.eviction import Reduce, check_budget, forget, highest, put, reduce, tokens, with_recent

if TYPE_CHECKING:
    import torch

    from kvbench.cache.layer import KVLayer
    from kvbench.cache.segments.base import Segment


@dataclass(kw_only=True)
class SnapKV(Method):
    """A share of the prompt, chosen per KV head when the prompt is complete; generated tokens all stay.

    On a layer with a sliding window the choice, and a budget that is a share, are of the prompt's tokens that are still
    seen; later a slot is dropped when it is hidden in all heads (32 positions at a time), generated tokens too.

    Args:
        budget: prompt tokens kept, the window included: a number, or a share of the prompt.
        window: last queries, which vote, and whose tokens stay.
        kernel: width of the pooling over neighbours; odd.
        pooling: ``max`` or ``avg``.
        group: how the votes of the query heads of a KV head become one.
        group_after_pooling: pool each query head's votes first (matters with ``max`` only).
    """

    budget: int | float = 2048
    window: int = 32
    kernel: int = 7
    pooling: Literal["max", "avg"] = "max"
    group: Reduce = "mean"
    group_after_pooling: bool = False

    prompt_only: ClassVar[bool] = True

    @property
    def observe_prompt(self) -> int:  # type: ignore[override]
        """The last `window` queries."""
        return self.window

    def reach(self) -> Reach:
        """A prompt within the budget, or within the window, stays whole."""
        if isinstance(self.budget, int):
            return Reach("method.budget", self.budget, self.budget, of_prompt=True)
        return Reach("method.window", self.window, self.window, of_prompt=True)

    def check_reach(self, max_length: int) -> None:
        """Refuse also a window or a pooling that is wider than any prompt."""
        for key in ("window", "kernel"):
            if getattr(self, key) >= max_length:
                raise ConfigError(
                    f"method.{key}",
                    getattr(self, key),
                    f"is wider than any prompt: model.max_length={max_length}",
                    allowed=f"at most {max_length - 1}",
                )
        super().check_reach(max_length)

    def check(self, head_dim: int | None = None, max_length: int | None = None) -> None:
        """A window, an odd kernel, a budget beyond the window."""
        super().check(head_dim, max_length)
        if self.window < 1:
            raise ConfigError("method.window", self.window, "must be positive", allowed="8, 16, 32, 64, ...")
        if self.kernel < 1 or self.kernel % 2 == 0:
            raise ConfigError("method.kernel", self.kernel, "must be odd and positive", allowed="1, 3, 5, 7, ...")
        check_budget(self.budget, self.window + 1, f"the window (method.window={self.window}) and a token before it")

    def segments(self, layer: KVLayer, side: Side) -> list[Segment]:
        """One segment in full precision."""
        room = tokens(self.budget, layer.seen, self.window + 1) + layer.coming()
        return [self.full(layer, side, capacity=min(room, layer.expected_length()))]

    def place(
        self, layer: KVLayer, rows: slice, keys: torch.Tensor, values: torch.Tensor, scores: torch.Tensor | None
    ) -> None:
        """What :meth:`kept` chooses."""
        if scores is None:
            raise CacheError("snapkv chooses by the attention of the prompt, and none was observed")
        put(layer, rows, keys, values, self.kept(scores, keys.shape[1]))

    def forgotten(self, layer: KVLayer, hidden: int) -> int:
        """All that are hidden."""
        return hidden

    def forget(self, layer: KVLayer, rows: slice, hidden: int) -> None:
        """In order, while no head has chosen; else slots that are hidden in all heads."""
        if layer.order[rows.indices(layer.batch)[0]] is None:
            super().forget(layer, rows, hidden)
        else:
            forget(layer, rows, hidden)

    def kept(self, attention: torch.Tensor, heads: int) -> torch.Tensor | None:
        """Places of the tokens that stay, ascending, ``[B, H, budget]``; None: all of them.

        Args:
            attention: of the window's queries, ``[B, Hq, window, n]``.
            heads: KV heads, H.
        """
        n = attention.shape[-1]
        held = tokens(self.budget, n, self.window + 1)
        if held == n:
            return None
        votes = self.votes(attention, heads)
        return with_recent(highest(votes, held - self.window), n, self.window)

    def votes(self, attention: torch.Tensor, heads: int) -> torch.Tensor:
        """Pooled votes for the tokens before the window, ``[B, H, n - window]``."""
        votes = attention[..., : attention.shape[-1] - self.window].sum(2)
        if self.group_after_pooling:
            return reduce(self.pooled(votes).unflatten(1, (heads, -1)), self.group, 2)
        return self.pooled(reduce(votes.unflatten(1, (heads, -1)), self.group, 2))

    def pooled(self, votes: torch.Tensor) -> torch.Tensor:
        """Each vote together with its neighbours', ``[B, H, n]``; averages count the border as zeros."""
        from torch.nn.functional import avg_pool1d, max_pool1d

        if self.pooling == "max":
            return max_pool1d(votes, self.kernel, stride=1, padding=self.kernel // 2)
        return avg_pool1d(votes, self.kernel, stride=1, padding=self.kernel // 2)
