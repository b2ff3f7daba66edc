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
    """The state that a method keeps for one cache, apart from its stores (:class:`kvbench.methods.state.CacheState`).

    ``new_cache`` assigns it to :attr:`kvbench.cache.progress.Progress.method_state`.
    """

    def select(self, order: Sequence[int]) -> None:
        """Reorder the rows of the batch; rows may also be dropped or repeated.

        Args:
            order: for each row of the new batch, the index of its row in the old batch.
        """
        ...

    def clone(self) -> MethodState:
        """Return a copy for a cloned cache. Calling :meth:`select` on the copy must not change the original."""
        ...


L = TypeVar("L", contravariant=True)


class Policy(Protocol[L]):
    """The interface of a method, which decides how each token is stored and when tokens are packed or dropped.

    ``L`` is the type of layer on which the method works (:class:`kvbench.cache.layer.KVLayer`).
    """

    @property
    def observe_prompt(self) -> int:
        """The kind of attention over the prompt that :meth:`place` receives as `scores`.

        0: none. n > 0: the probabilities of the last n queries. -1: for each token, the sum over all queries.
        """
        ...

    @property
    def observe_steps(self) -> bool:
        """True if :meth:`observe` must be called with the attention of every decode step."""
        ...

    @property
    def needs_prompts(self) -> bool:
        """True if a cache can be created only for prompts that are already known."""
        ...

    @property
    def by_token(self) -> bool:
        """True if the stored form of a token depends only on that token and its position."""
        ...

    @property
    def gives_tail(self) -> bool:
        """True if every token of the full-precision tail can be rolled back, even after older tokens were packed."""
        ...

    @property
    def settles(self) -> bool:
        """True if the method packs or drops tokens as the sequence grows, so that :meth:`settle` must be called."""
        ...

    @property
    def packs_together(self) -> bool:
        """True if the kernel launches of :meth:`settle` may be deferred, so that several layers share one launch."""
        ...

    @property
    def keys_before_rope(self) -> bool:
        """True if the cache holds pre-RoPE keys, and attention applies RoPE when it reads them."""
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
        """Return an empty store for the keys or the values of a layer.

        Args:
            layer: the layer.
            side: ``key`` or ``value``.
        """
        ...

    def place(self, layer: L, rows: slice, keys: Tensor, values: Tensor, scores: Tensor | None) -> None:
        """Put the tokens of a prompt into the stores of a layer.

        Args:
            layer: layer that gets the tokens.
            rows: rows of the batch.
            keys: keys of the tokens, ``[rows, H, n, D]``.
            values: values of the tokens, ``[rows, H, n, Dv]``.
            scores: attention that the method observes, ``[rows, Hq, q or 1, n]`` (:attr:`observe_prompt`); else None.
        """
        ...

    def settle(self, layer: L, rows: slice) -> None:
        """Pack or drop the tokens that no longer have to be in full precision, for some rows.

        Args:
            layer: layer that holds the tokens.
            rows: rows of the batch, all of which have the same number of tokens in each segment.
        """
        ...

    def observe(self, layer: L, rows: slice, probabilities: Tensor) -> None:
        """Receive the attention probabilities of a decode step.

        Args:
            layer: layer in which the attention was computed.
            rows: rows of the batch.
            probabilities: attention probabilities of the step's q tokens, ``[rows, Hq, q, slots]``.
        """
        ...

    def positions(self, layer: L, row: int) -> Tensor | None:
        """Return the position in the sequence of the token in each slot of a row.

        Args:
            layer: layer that holds the slots.
            row: row of the batch.

        Returns:
            ``[n]``, or ``[H, n]`` if heads keep different tokens; None if the positions ascend without a gap up to the
            newest token.
        """
        ...

    def columns(self, layer: L, row: int) -> Tensor | None:
        """Return the column, in the padded batch, of the token in each slot of a row.

        The result equals that of :meth:`positions` unless the method moves keys to other positions.

        Args:
            layer: layer that holds the slots.
            row: row of the batch.

        Returns:
            ``[n]``, or ``[H, n]`` if heads keep different tokens; None if the columns ascend without a gap up to the
            newest token.
        """
        ...

    def forgotten(self, layer: L, hidden: int) -> int:
        """Return how many of a row's oldest tokens the method drops because no later token can see them.

        The number may be less than `hidden`, because packed tokens can leave only in whole groups.

        Args:
            layer: layer with a sliding window.
            hidden: number of a row's oldest tokens that no later token can see.
        """
        ...

    def forget(self, layer: L, rows: slice, hidden: int) -> None:
        """Drop tokens that have left a sliding window.

        Args:
            layer: layer with a sliding window.
            rows: rows of the batch.
            hidden: number of oldest tokens of each row that no later token can see; at most these are dropped.
        """
        ...

    def reading_order(self, layer: L, rows: slice) -> list[tuple[int, int]] | None:
        """Return the order in which attention must read the slots; None to read them from first to last.

        Args:
            layer: layer whose stores are read.
            rows: rows of the batch.

        Returns:
            Pairs (first slot, one past the last slot), or None.
        """
        ...
