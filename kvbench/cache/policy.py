"""The base of all methods, as the cache and attention know them: where each token is stored, and when it moves.

It lies in this package so that the cache need not import the methods, which import the cache. Importing this module
does not import torch, so that a configuration can be checked without it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Generic, Literal, Protocol, Self, TypeVar

from kvbench.quantizers.spec import Side

if TYPE_CHECKING:
    from torch import Tensor

    from kvbench.cache.segments.interface import Segment
    from kvbench.cache.store import Store
    from kvbench.quantizers.engine.arithmetic import Arithmetic
    from kvbench.rotation import Transform

#: the two sides of a layer, in the order of ``layer.stores()``
SIDES: tuple[Side, Side] = ("key", "value")
#: in :meth:`Policy.demotions`: the token stays in full precision
NEVER = 1 << 62
#: number of tokens that no sequence reaches: the result of :meth:`Policy.idle` for a layer that never changes
ALWAYS = 1 << 30


@dataclass
class CacheState:
    """Base class for data that a method needs during the life of one cache, in addition to keys and values.

    The method's ``new_cache`` stores an instance in ``cache.progress.method_state``. A subclass whose data differ from
    row to row of the batch overrides :meth:`select` and :meth:`clone`; others need not override anything.
    """

    def select(self, order: Sequence[int]) -> None:
        """Update the data after the rows of the batch were reordered (beam search): new row i was row ``order[i]``.

        Rows may be dropped or repeated.
        """

    def clone(self) -> Self:
        """Return the state for a copy of the cache. Changes to the rows of one must not affect the other."""
        return self


class _Held(Protocol):
    """Part of :class:`kvbench.cache.layer.KVLayer` that :class:`Policy` needs; its import would be circular."""

    @property
    def batch(self) -> int: ...
    @property
    def window(self) -> int | None: ...
    def real_tokens(self, row: int) -> int: ...
    def length(self, rows: slice) -> int: ...
    def stores(self) -> tuple[Store, Store]: ...
    def ordered(self, row: int) -> Tensor | None: ...


L = TypeVar("L", bound=_Held)


class Policy(Generic[L]):
    """The rules of a method, which decide how each token is stored and when tokens are packed or dropped.

    A method must define :meth:`segments` and :meth:`place`, and :meth:`settle` if it packs or drops tokens while the
    sequence grows. The defaults pack and drop nothing. Properties are overridden by a class attribute or a property.
    Where a call names `rows`, all of them have the same number of tokens in each segment.
    The type variable ``L`` is the type of layer on which the method works (:class:`kvbench.cache.layer.KVLayer`).
    """

    #: a cache can only be made for known prompts (``new_cache(model, prompts)`` with their ids and text)
    needs_prompts: ClassVar[bool] = False
    #: the method packs or drops tokens of the prompt only, so a text that is fed token by token stays exact
    prompt_only: ClassVar[bool] = False
    #: the prompt attention that ``place`` receives: 0: none; n: of the last n queries; -1: column sums over all queries
    observe_prompt: ClassVar[int] = 0
    #: ``observe`` is called with the attention of every decode step
    observe_steps: ClassVar[bool] = False
    #: what ``observe`` needs of the query heads that share a KV head, so that kernels can sum up for it: their
    #: ``mean``, their ``sum``, or each ``apart``; None: all probabilities, which no kernel returns. The last segment of
    #: the keys must then be a :class:`kvbench.cache.segments.scored.ScoredSegment`
    observe_group: Literal["mean", "sum", "apart"] | None = None
    #: a token's stored form depends only on that token and its position, so any number of tokens can be rolled back
    by_token: ClassVar[bool] = False
    #: the exact tails hold the newest tokens without a gap, and all of these can be rolled back, even those of the
    #: prompt (transformers' assisted generation verifies its first drafts together with the prompt). The keys must then
    #: be as if those tokens had never come. This fails if their arrival made older keys leave, so it must be False for
    #: a method whose window slides over the keys, or that evicts tokens. Values may differ: some of them may be packed
    #: that would be exact without those tokens
    gives_tail: ClassVar[bool] = False

    @property
    def settles(self) -> bool:
        """True if the method packs or drops tokens as the sequence grows, that is, if it overrides :meth:`settle`."""
        return type(self).settle is not Policy.settle

    @property
    def packs_together(self) -> bool:
        """True if the packing in ``settle`` may be deferred, so that one kernel launch packs the tokens of all layers.

        The deferred launch reads the tokens from the last, full-precision segments when ``settle`` has run for every
        layer. Such a ``settle`` may therefore drop tokens at the front of these segments, but must not move those that
        stay, unless :meth:`kvbench.cache.segments.packed.PackedSegment.thin` does it, which is deferred too.
        Base classes return True only if a subclass does not override their ``settle``.
        ``tests/contract/test_deferred.py`` finds out, on a CPU, if a method wrongly returns True.
        """
        return False

    @property
    def holds_codes(self) -> bool:
        """True if tokens may be stored as codes; False if all are in full precision, so that no kernel is built."""
        return True

    @property
    def drops_tokens(self) -> bool:
        """True if the method evicts tokens, apart from those that a model's sliding window hides."""
        return False

    @property
    def keys_before_rope(self) -> bool:
        """True if the cache holds pre-RoPE keys; attention then applies RoPE whenever it reads them."""
        return False

    @property
    def quantized_prefill(self) -> bool:
        """True if prompt tokens attend to the stored (quantized) keys and values, not to full-precision ones."""
        return False

    @property
    def eager(self) -> bool:
        """True if the new tokens of a decode step are stored, and packed, before any token attends to them.

        Usually a step attends to its new tokens in full precision, and they are packed later. True requires
        :attr:`by_token`. (The name has nothing to do with eager execution as opposed to CUDA graphs.)
        """
        return False

    @property
    def speculation(self) -> Any:
        """Speculative decoding (:class:`kvbench.methods.speculation.Speculation`); None: one token per step."""
        return None

    def transform(self, layer: L, side: Side) -> Transform | None:
        """Return the basis in which a layer stores its keys or its values; None for that of the model.

        Keys and queries are brought into the basis after RoPE. Values are, too, and the output of attention is brought
        back from it. Of `layer` only index, sizes (``heads``, ``key_dim``, ``value_dim``) and device are known yet.
        """
        return None

    def arithmetic(self, layer: L, count: int) -> Arithmetic | None:
        """Return how attention of `count` queries over the stores rounds, as an engine does; None: not at all."""
        return None

    def make_store(self, layer: L, side: Side) -> Store:
        """Return an empty store for the keys or the values of `layer`."""
        from kvbench.cache.store import Store

        return Store(self.segments(layer, side))

    def segments(self, layer: L, side: Side) -> list[Segment]:
        """Return empty segments for the keys or the values of `layer`, in slot order.

        The last one must be a FullSegment, because new tokens are appended to it.
        """
        raise NotImplementedError(f"{type(self).__name__} must define the method segments(layer, side)")

    def place(self, layer: L, rows: slice, keys: Tensor, values: Tensor, scores: Tensor | None) -> None:
        """Put the prompt's tokens into the stores of `layer`.

        The cache calls this once, when the prompt is complete; with :attr:`quantized_prefill`, once per chunk of the
        prompt.

        Args:
            layer: layer whose stores are empty for `rows`, or hold only the earlier chunks.
            rows: rows of the batch to store; their prompts are equally long.
            keys: keys ``[rows, H, n, D]`` in full precision, without padding. The first tokens are missing if
                :meth:`forgotten` drops them; n is then less than ``layer.real_tokens(row)``.
            values: values ``[rows, H, n, Dv]`` of the same tokens.
            scores: attention probabilities of the prompt, ``[rows, Hq, q, n]``, if the method requests them with
                :attr:`observe_prompt`: those of the last q queries, or one sum over all queries (q = 1). Otherwise
                None.
        """
        raise NotImplementedError(
            f"{type(self).__name__} must define the method place(layer, rows, keys, values, scores)"
        )

    def settle(self, layer: L, rows: slice) -> None:
        """Pack or drop the tokens that have become due for it since the last call.

        The cache calls this again and again while decoding. A second call without new tokens must change nothing. All
        of `rows` have the same number of tokens in each segment.
        """

    def settle_each(self, layer: L) -> bool:
        """Settle all rows in one call, even if they hold different numbers of tokens (see :meth:`settle`).

        Returns:
            False if nothing was done, so that :meth:`settle` must be called for the rows of each length.
        """
        return False

    def demotions(self, layer: L, count: int) -> tuple[Tensor, Tensor] | None:
        """Return after how many tokens :meth:`settle` packs or drops each token, for keys and for values.

        Define this for a rule that depends only on numbers of tokens: perplexity is then measured with many tokens per
        pass instead of token by token (:mod:`kvbench.attention.foreseen`). It must be defined together with
        :meth:`settle`: a class that overrides only :meth:`settle` gets this implementation, which then returns None.

        Returns:
            For keys and for values, int64 ``[count]`` on the CPU, without padding; :data:`NEVER` for tokens that stay
            in full precision. None if the times are not known in advance, or if packed tokens change later.
        """
        if self.settles:
            return None
        import torch

        never = torch.full((count,), NEVER)
        return never, never

    def __init_subclass__(cls, **options: Any) -> None:
        """Reset :meth:`demotions` to that of Policy in a class that overrides :meth:`settle` alone."""
        super().__init_subclass__(**options)
        if "settle" in vars(cls) and "demotions" not in vars(cls):
            cls.demotions = Policy.demotions  # type: ignore[method-assign]

    def idle(self, layer: L, row: int) -> int:
        """Return how many more tokens a row may get before :meth:`settle` or :meth:`forget` changes the layer.

        The cache calls this just after both. Speculative decoding runs that many tokens ahead of the bookkeeping on the
        host. The result may be too small; 0 is always correct.
        """
        return 0 if self.settles or layer.window else ALWAYS

    def observe(self, layer: L, rows: slice, probabilities: Tensor) -> None:
        """Receive a step's attention probabilities, ``[rows, Hq, q, slots]``, if :attr:`observe_steps` is True."""

    def positions(self, layer: L, row: int) -> Tensor | None:
        """Return the position of the token in each slot of a row, ``[n]`` or ``[H, n]`` on the CPU.

        Causal and sliding-window masks go by these. The shape is ``[H, n]`` if KV heads hold different tokens. None
        means that the slots hold the positions in ascending order without a gap. A method that permutes or evicts
        tokens stores the positions in ``layer.order``, or overrides this method to compute them.
        """
        return layer.ordered(row)

    def columns(self, layer: L, row: int) -> Tensor | None:
        """Return the column, in the padded batch, of the token that each slot of a row holds, ``[n]`` or ``[H, n]``.

        It differs from :meth:`positions` only if the method rotates keys to positions other than their own
        (StreamingLLM): that method returns the positions that attention uses. None means that the slots hold all tokens
        in ascending order without a gap.
        """
        return self.positions(layer, row)

    def reading_order(self, layer: L, rows: slice) -> list[tuple[int, int]] | None:
        """Return the slot ranges ``(first, end)`` in the order in which attention reads them.

        None means that attention reads all slots in slot order. Rows may differ in their order, so if a method returns
        ranges, the cache asks for one row at a time.
        """
        return None

    def forgotten(self, layer: L, hidden: int) -> int:
        """Return how many of a row's oldest tokens to drop, at most the `hidden` ones that no later token can see.

        The result may be smaller than `hidden`, because packed tokens can be dropped only in whole groups. Hidden
        tokens that stay are masked by attention.
        """
        return 0

    def forget(self, layer: L, rows: slice, hidden: int) -> None:
        """Drop the tokens that :meth:`forgotten` counts and that are still stored.

        The cache calls this after :meth:`settle`, with `rows` and `hidden` as for :meth:`settle` and :meth:`forgotten`.
        A second call without new tokens changes nothing. This implementation requires that the slots are in the order
        of positions.
        """
        dropped = layer.real_tokens(rows.indices(layer.batch)[0]) - layer.length(rows)  # by earlier calls
        count = self.forgotten(layer, hidden) - dropped
        if count > 0:
            for store in layer.stores():
                store.drop_front(rows, count)
