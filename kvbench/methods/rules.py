"""The rules of a method: in which segment each token is, and when it moves. Imports no torch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

from kvbench.errors import ConfigError
from kvbench.methods.byte_parts import KVBytes, Setting
from kvbench.methods.demotion import untouched
from kvbench.methods.traits import Traits

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch

    from kvbench.cache.layer import KVLayer
    from kvbench.cache.segments.base import Segment

Side = Literal["key", "value"]
#: the two sides of a layer, in the order of ``layer.stores()``
SIDES: tuple[Side, Side] = ("key", "value")

#: number of tokens that no sequence reaches: the result of :meth:`Rules.idle` for a layer that never changes
ALWAYS = 1 << 30
#: perplexity: number of tokens right after a span's prompt that serve as the query for methods that need one
QUERY_TOKENS = 64


class Rules(Traits):
    """The rules of a method, with their defaults, which pack and drop nothing.

    A method must define :meth:`segments` and :meth:`place`, and :meth:`settle` if it packs or drops tokens while the
    sequence grows. A cache calls these methods through the protocol :class:`kvbench.cache.policy.Policy`.
    """

    @property
    def settles(self) -> bool:
        """True if the method packs or drops tokens as the sequence grows, that is, if it overrides :meth:`settle`."""
        return type(self).settle is not Rules.settle

    def suit(self, numbers: Mapping[str, Any]) -> None:
        """Read what the formats depend on from a model's ``config.json``, with its text model on the first level."""

    def segments(self, layer: KVLayer, side: Side) -> list[Segment]:
        """Return empty segments for the keys or the values of `layer`, in slot order.

        The last one must be a FullSegment, because new tokens are appended to it.
        """
        raise NotImplementedError(f"{type(self).__name__} must define the method segments(layer, side)")

    def place(
        self, layer: KVLayer, rows: slice, keys: torch.Tensor, values: torch.Tensor, scores: torch.Tensor | None
    ) -> None:
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

    def settle(self, layer: KVLayer, rows: slice) -> None:
        """Pack or drop the tokens for which this has become due since the last call.

        The cache calls this again and again while decoding. A second call without new tokens must change nothing. All
        of `rows` have the same number of tokens in each segment.
        """

    def settle_each(self, layer: KVLayer) -> bool:
        """Do what :meth:`settle` does for all rows in one call, although they hold different numbers of tokens.

        Returns:
            False if nothing was done, so that :meth:`settle` must be called for the rows of each length.
        """
        return False

    def demotions(self, layer: KVLayer, count: int) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Return after how many tokens :meth:`settle` packs or drops each token, for keys and for values.

        Define this for a rule that depends only on numbers of tokens: perplexity is then measured with many tokens per
        pass instead of token by token. It must be defined together with :meth:`settle`: a class that overrides only
        :meth:`settle` gets this implementation, which then returns None.

        Returns:
            For keys and for values, int64 ``[count]`` on the CPU, without padding;
            :data:`kvbench.cache.policy.NEVER` for tokens that stay in full precision. None if the times are not known
            in advance, or if packed tokens change later.
        """
        if self.settles:
            return None
        never = untouched(count)
        return never, never

    def __init_subclass__(cls, **options: Any) -> None:
        """Forget an inherited :meth:`demotions` in a class with a :meth:`settle` of its own."""
        super().__init_subclass__(**options)
        if "settle" in vars(cls) and "demotions" not in vars(cls):
            cls.demotions = Rules.demotions  # type: ignore[method-assign]

    def idle(self, layer: KVLayer, row: int) -> int:
        """Return how many more tokens a row may get before :meth:`settle` or :meth:`forget` changes the layer.

        Both have just been called. Speculative decoding runs that many tokens ahead of the bookkeeping on the host. The
        result may be too small; 0 is always correct.
        """
        return 0 if self.settles or layer.window else ALWAYS

    def observe(self, layer: KVLayer, rows: slice, probabilities: torch.Tensor) -> None:
        """Receive a step's attention probabilities, ``[rows, Hq, q, slots]``, if :attr:`observe_steps` is True."""

    def positions(self, layer: KVLayer, row: int) -> torch.Tensor | None:
        """Return the position of the token in each slot of a row, ``[n]`` or ``[H, n]`` on the CPU.

        The shape is ``[H, n]`` if KV heads hold different tokens. None means that the slots hold the positions in
        ascending order without a gap. A method that permutes or evicts tokens stores the positions in ``layer.order``,
        or overrides this method to compute them.
        """
        return layer.ordered(row)

    def columns(self, layer: KVLayer, row: int) -> torch.Tensor | None:
        """Return the column, in the padded batch, of the token that each slot of a row holds, ``[n]`` or ``[H, n]``.

        It differs from :meth:`positions` only if the method rotates keys to positions other than their own
        (StreamingLLM): that method returns the positions that attention uses. None means that the slots hold all tokens
        in ascending order without a gap.
        """
        return self.positions(layer, row)

    def reading_order(self, layer: KVLayer, rows: slice) -> list[tuple[int, int]] | None:
        """Return the slot ranges ``(first, end)`` in the order in which attention reads them.

        None means that attention reads all slots in slot order. Rows may differ in their order, so if a method returns
        ranges, the cache asks for one row at a time.
        """
        return None

    def forgotten(self, layer: KVLayer, hidden: int) -> int:
        """Return how many of a row's oldest tokens to drop, at most the `hidden` ones that no later token can see.

        The result may be smaller than `hidden`, because packed tokens can be dropped only in whole groups. Hidden
        tokens that stay are masked by attention.
        """
        return 0

    def forget(self, layer: KVLayer, rows: slice, hidden: int) -> None:
        """Drop the tokens that :meth:`forgotten` counts and that are still stored.

        The cache calls this after :meth:`settle`, with `rows` and `hidden` as for :meth:`settle` and :meth:`forgotten`.
        A second call without new tokens changes nothing. This implementation requires that the slots are in the order
        of positions.
        """
        gone = layer.real_tokens(rows.indices(layer.batch)[0]) - layer.length(rows)
        count = self.forgotten(layer, hidden) - gone
        if count > 0:
            for store in layer.stores():
                store.drop_front(rows, count)

    def stored_as(self, layer: int, layers: int) -> int:
        """Return the index of the first layer that stores its tokens as a layer does, apart from sliding windows."""
        return min(layer, self.exact_layers, layers - 1)

    def layer_bytes(self, at: Setting) -> KVBytes:
        """Predict the bytes of one layer's cache for one sequence from a formula, without making a cache.

        A method may define this or leave it out. The bill of a cache (:meth:`kvbench.cache.KVCache.bill`) counts real
        buffers instead; tests check that both agree to the byte.

        Raises:
            ConfigError: the method defines no formula.
        """
        raise ConfigError(
            "method",
            type(self).__name__,
            "does not define a formula for its bytes (Method.layer_bytes)",
            hint="run the method and read cache.bill(), or define layer_bytes",
        )
