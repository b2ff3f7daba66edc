"""SnapKV: keep the prompt's last tokens, and the earlier tokens to which they attend most, with their neighbours.

Source: Li et al., "SnapKV: LLM Knows What You are Looking for Before Generation" (NeurIPS 2024), sec. 4, listing 1;
FasterDecoding/SnapKV, snapkv_utils.py. The authors' code repeats keys and values for every query head and chooses
tokens per query head; with grouped-query attention that multiplies the size of the cache. Here the query heads of a KV
head choose together: their votes are reduced by mean, maximum or sum, before the pooling (as KVCache-Factory's option
does) or after it (kvpress, MagicDec). Votes are summed in fp32; the authors round each probability to the model's dtype
first.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from kvbench.errors import ConfigError
from kvbench.methods.base import Reach
from kvbench.methods.eviction import Reduce, check_budget, reduce
from kvbench.methods.scored import ScoredMethod
from kvbench.util.lazy import lazy
from kvbench.util.schema import bounded

if TYPE_CHECKING:
    import torch
else:
    torch = lazy("torch")


@dataclass(kw_only=True)
class SnapKV(ScoredMethod):
    """SnapKV: keeps the prompt tokens to which the last queries of the prompt attend most, and their neighbours.

    Each KV head chooses its own tokens.

    Args:
        budget: prompt tokens to keep, the window included, as a number (int) or as a share of the prompt (float).
        window: number of last prompt tokens, which are always kept. Their attention probabilities (their votes) decide
            which earlier tokens are kept.
        kernel: number of neighbouring tokens over which votes are pooled; odd.
        pooling: how votes are pooled: ``max`` or ``avg``.
        group: reduction of the votes of the query heads that share a KV head: ``mean``, ``max`` or ``sum``.
        group_after_pooling: True: pool the votes of each query head, then combine them; False: combine, then pool. The
            result differs only if `pooling` or `group` is ``max``.
    """

    budget: int | float = 2048
    window: int = bounded(32, minimum=1)
    kernel: int = bounded(7, minimum=1)
    pooling: Literal["max", "avg"] = "max"
    group: Reduce = "mean"
    group_after_pooling: bool = False

    @property
    def observe_prompt(self) -> int:  # type: ignore[override]
        """Number of last queries of the prompt whose attention the method needs: `window`."""
        return self.window

    @property
    def newest(self) -> int:  # type: ignore[override]
        """Number of newest prompt tokens that are always kept: `window`."""
        return self.window

    def score(self, keys: torch.Tensor, values: torch.Tensor, attention: torch.Tensor | None) -> torch.Tensor:
        """Return the pooled votes for the tokens before the window, ``[B, H, n - window]``.

        `attention` is that of the last `window` queries, ``[B, Hq, window, n]``.
        """
        assert attention is not None
        heads = keys.shape[1]
        votes = attention[..., : attention.shape[-1] - self.window].sum(2)
        if self.group_after_pooling:
            return reduce(self.pooled(votes).unflatten(1, (heads, -1)), self.group, 2)
        return self.pooled(reduce(votes.unflatten(1, (heads, -1)), self.group, 2))

    def pooled(self, votes: torch.Tensor) -> torch.Tensor:
        """Return votes ``[B, H, n]`` pooled over neighbours; at the ends, an average counts missing neighbours as 0."""
        pool = torch.nn.functional.max_pool1d if self.pooling == "max" else torch.nn.functional.avg_pool1d
        return pool(votes, self.kernel, stride=1, padding=self.kernel // 2)

    def check(self, head_dim: int | None = None, max_length: int | None = None) -> None:
        """Raise ConfigError for a `window` or `kernel` below 1, an even `kernel`, or a budget within the window."""
        if self.kernel % 2 == 0:
            raise ConfigError("method.kernel", self.kernel, "must be odd", allowed="an odd number, such as 7")
        check_budget(self.budget, self.least, f"the window (method.window={self.window}) and one token before it")
        super().check(head_dim, max_length)

    def reach(self) -> Reach:
        """Return the length of the longest prompt that is kept whole: the budget, or the window if that is a share."""
        if isinstance(self.budget, int):
            return Reach("method.budget", self.budget, self.budget, of_prompt=True)
        return Reach("method.window", self.window, self.window, of_prompt=True)

    def check_reach(self, max_length: int) -> None:
        """Raise ConfigError if `window` or `kernel` exceeds the longest prompt, or if no token would be dropped."""
        for key in ("window", "kernel"):
            if getattr(self, key) >= max_length:
                raise ConfigError(
                    f"method.{key}",
                    getattr(self, key),
                    f"is larger than any prompt, because model.max_length={max_length}",
                    allowed=f"at most {max_length - 1}",
                )
        super().check_reach(max_length)
