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
    from kvbench.rotation import Transform

#: in :meth:`Policy.demotions`: the token stays in full precision
NEVER = 1 << 62


class MethodState(Protocol):
    """Interface of what a method remembers about one cache, besides the stored keys and values.

    ``new_cache`` assigns it to :attr:`kvbench.cache.progress.Progress.method_state`.
    """

    def select(self, order: Sequence[int]) -> None:
        """Reorder the rows of the batch; rows may also be dropped or repeated.

        `order` gives the old row of each row of the new batch.
        """
        ...

    def clone(self) -> MethodState:
        """Return a copy for a cloned cache; a later :meth:`select` on the copy must not change the original."""
        ...


L = TypeVar("L", contravariant=True)


class Policy(Protocol[L]):
    """Interface of a method, which decides how each token is stored and when tokens are packed or dropped.

    The type variable ``L`` is the type of layer on which the method works (:class:`kvbench.cache.layer.KVLayer`). All
    `rows` of one call have the same number of tokens in each segment.
    """

    @property
    def observe_prompt(self) -> int:
        """Attention probabilities over the prompt that the method needs; :meth:`place` receives them as `scores`.

        0: none. n > 0: those of the prompt's last n tokens as queries. -1: for each prompt token, the sum of the
        probabilities that all queries give it.
        """
        ...

    @property
    def observe_steps(self) -> bool:
        """True if the method needs the attention probabilities of every decode step (:meth:`observe`)."""
        ...

    @property
    def observe_group(self) -> str | None:
        """Combination of a KV head's query heads that a kernel may compute for :meth:`observe`; None: it may not.

        ``mean``, ``sum`` or ``apart`` (not at all).
        """
        ...

    @property
    def needs_prompts(self) -> bool:
        """True if the method must know the prompts when its cache is created (``new_cache(model, prompts)``)."""
        ...

    @property
    def by_token(self) -> bool:
        """True if a token's stored form depends only on that token and its position, so that any can be rolled back."""
        ...

    @property
    def gives_tail(self) -> bool:
        """True if all tokens at the end of a store that are still in full precision can be rolled back.

        Otherwise, only those that arrived since the method last packed or dropped tokens can be, unless
        :attr:`by_token` is True.
        """
        ...

    @property
    def settles(self) -> bool:
        """True if the method packs or drops tokens while the sequence grows, which it does in :meth:`settle`."""
        ...

    @property
    def drops_tokens(self) -> bool:
        """True if the method evicts tokens, apart from those that a model's sliding window hides."""
        ...

    @property
    def packs_together(self) -> bool:
        """True if :meth:`settle` may run for all layers together, with one kernel launch for layers that do the same.

        See :func:`kvbench.cache.together.settle`. If False, each layer launches its own kernels.
        """
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
        """True if a decode step stores its new tokens in their final (packed) format before it attends to them.

        If False, the new tokens of a step attend to each other in full precision. (The name has nothing to do with
        eager execution as opposed to CUDA graphs.)
        """
        ...

    @property
    def speculation(self) -> Any:
        """The method's speculative decoding (:class:`kvbench.methods.speculation.Speculation`), or None."""
        ...

    def transform(self, layer: L, side: Side) -> Transform | None:
        """Return the basis in which a layer stores its keys or its values; None for that of the model.

        The layer's sizes and device are known.
        """
        ...

    def make_store(self, layer: L, side: Side) -> Store:
        """Return an empty store for the keys or the values of a layer."""
        ...

    def place(self, layer: L, rows: slice, keys: Tensor, values: Tensor, scores: Tensor | None) -> None:
        """Put the tokens of a prompt into the stores of a layer.

        Args:
            keys: keys of the tokens, ``[rows, H, n, D]``.
            values: values of the tokens, ``[rows, H, n, Dv]``.
            scores: attention that each of the n tokens received from the prompt's queries, ``[rows, Hq, q, n]``: one
                entry per observed query or, if :attr:`observe_prompt` is -1, their sum (q = 1). None if it is 0.
        """
        ...

    def settle(self, layer: L, rows: slice) -> None:
        """Bring the stores of some rows up to date: pack or drop the tokens that are due by the method's rule."""
        ...

    def settle_each(self, layer: L) -> bool:
        """Bring the stores of all rows up to date, rows that hold different numbers of tokens among them.

        This is for batches of prompts of different lengths, which :meth:`settle` processes row by row. Return False if
        nothing was done, because the rows need different things.
        """
        ...

    def demotions(self, layer: L, count: int) -> tuple[Tensor, Tensor] | None:
        """Return when the method packs or drops each token of a text, as far as that is known in advance.

        With this, many known tokens (perplexity) are processed in one pass (:mod:`kvbench.attention.foreseen`). `count`
        is the number of tokens of the text, without padding.

        Returns:
            For the keys and for the values, int64 ``[count]`` on the CPU: the smallest number of tokens after which
            :meth:`settle` packs or drops the token; :data:`NEVER` if it stays in full precision. None if that depends
            on more than the number of tokens, or if packed tokens change later.
        """
        ...

    def idle(self, layer: L, row: int) -> int:
        """Return how many more tokens a row may get before :meth:`settle` or :meth:`forget` changes the layer.

        Both must just have been called for the layer.
        """
        ...

    def observe(self, layer: L, rows: slice, probabilities: Tensor) -> None:
        """Let the method use the attention probabilities of a decode step, for example to score the cached tokens.

        They are those from each of the step's q new tokens to every slot, ``[rows, Hq, q, slots]``.
        """
        ...

    def positions(self, layer: L, row: int) -> Tensor | None:
        """Return the column of the padded batch at which attention sees the token of each slot.

        Causal and sliding-window masks go by these columns. They differ from :meth:`columns` only if the method rotates
        keys to other positions (StreamingLLM).

        Returns:
            ``[n]`` for n slots, or ``[H, n]`` if heads keep different tokens. None if slot after slot holds the next
            column, up to that of the newest token.
        """
        ...

    def columns(self, layer: L, row: int) -> Tensor | None:
        """Return the column of the padded batch in which the token of each slot stands in the text.

        It equals :meth:`positions`, whose form it has, unless the method rotates keys to other positions
        (StreamingLLM's sinks).
        """
        ...

    def forgotten(self, layer: L, hidden: int) -> int:
        """Return how many of a row's oldest tokens may be dropped because they have left the layer's sliding window.

        This may be less than `hidden`, the number of those that are outside the window of every future query, because
        packed tokens can only be dropped in whole groups.
        """
        ...

    def forget(self, layer: L, rows: slice, hidden: int) -> None:
        """Drop the tokens that have left the layer's sliding window, as far as :meth:`forgotten` allows."""
        ...

    def reading_order(self, layer: L, rows: slice) -> list[tuple[int, int]] | None:
        """Return the slot ranges in the order in which attention must process them; None for the usual order of slots.

        Cocktail uses this for segments that are not stored in the order of the text. A range is a pair (first slot, one
        past the last slot).
        """
        ...
