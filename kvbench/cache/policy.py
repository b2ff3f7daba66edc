"""Protocol of a method, as the cache and attention use it; :class:`kvbench.methods.base.Method` implements it.

It is declared in this package so that the cache does not import the methods, which import the cache.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

if TYPE_CHECKING:
    from torch import Tensor

    from kvbench.cache.segments.base import Side
    from kvbench.cache.store import Store


class MethodState(Protocol):
    """State that a method keeps for one cache, apart from its stores (:class:`kvbench.methods.state.CacheState`).

    ``new_cache`` assigns it to :attr:`kvbench.cache.progress.Progress.method_state`.
    """

    def select(self, order: Sequence[int]) -> None:
        """Replace the batch by its rows `order`; a row may occur more than once."""
        ...

    def clone(self) -> MethodState:
        """Return a copy on which :meth:`select` does not affect this one."""
        ...


L = TypeVar("L", contravariant=True)


class Policy(Protocol[L]):
    """The rule that decides in which format each token is held, and when it is demoted or dropped.

    ``L`` is the type of the layers that the rule works on (:class:`kvbench.cache.layer.KVLayer`).
    """

    @property
    def observe_prompt(self) -> int:
        """The attention that :meth:`place` gets: 0: none; n: that of the last n queries; -1: sums over all."""
        ...

    @property
    def observe_steps(self) -> bool:
        """True if :meth:`observe` must be called with the attention of every decode step."""
        ...

    @property
    def needs_prompts(self) -> bool:
        """True if a cache can only be made for prompts that are known beforehand."""
        ...

    @property
    def by_token(self) -> bool:
        """True if the stored form of a token depends only on that token and its position."""
        ...

    @property
    def gives_tail(self) -> bool:
        """True if all tokens of the full-precision tail may be rolled back, even if older tokens were packed since."""
        ...

    @property
    def settles(self) -> bool:
        """True if tokens are demoted or dropped as the sequence grows, so that :meth:`settle` must be called."""
        ...

    @property
    def packs_together(self) -> bool:
        """True if :meth:`settle` may be deferred and batched across layers."""
        ...

    @property
    def keys_before_rope(self) -> bool:
        """True if keys are stored before RoPE, and attention applies RoPE when it reads them."""
        ...

    @property
    def quantized_prefill(self) -> bool:
        """True if prompt tokens attend to the stored (quantized) keys and values, not to full-precision ones."""
        ...

    @property
    def eager(self) -> bool:
        """True if the new tokens of a step are stored in their final format before the step attends to them."""
        ...

    @property
    def speculation(self) -> Any:
        """The method's speculative decoding (:class:`kvbench.methods.speculation.Speculation`), or None."""
        ...

    def make_store(self, layer: L, side: Side) -> Store:
        """Return an empty store for the keys or the values of `layer`."""
        ...

    def place(self, layer: L, rows: slice, keys: Tensor, values: Tensor, scores: Tensor | None) -> None:
        """Put the prompt's tokens ``[rows, H, n, D]`` into the stores; `scores` as :attr:`observe_prompt` asks."""
        ...

    def settle(self, layer: L, rows: slice) -> None:
        """Demote tokens that have grown too old."""
        ...

    def observe(self, layer: L, rows: slice, probabilities: Tensor) -> None:
        """Receive the attention probabilities of a decode step over the slots, ``[rows, Hq, q, slots]``."""
        ...

    def positions(self, layer: L, row: int) -> Tensor | None:
        """Return the positions of a row's slots; None if they ascend without a gap up to the newest token."""
        ...

    def columns(self, layer: L, row: int) -> Tensor | None:
        """Return which token each slot of a row holds, by its column; None as for :meth:`positions`."""
        ...

    def forgotten(self, layer: L, hidden: int) -> int:
        """Return how many of a row's `hidden` oldest tokens, which no later token can see, are dropped."""
        ...

    def forget(self, layer: L, rows: slice, hidden: int) -> None:
        """Drop tokens that a sliding window has passed: at most the oldest `hidden` of each of `rows`."""
        ...

    def reading_order(self, layer: L, rows: slice) -> list[tuple[int, int]] | None:
        """Return the slot ranges in the order in which attention reads them; None for all slots, block by block."""
        ...
