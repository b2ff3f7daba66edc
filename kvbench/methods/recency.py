"""Base of methods in which only the number of tokens decides which of them are in full precision."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, replace
from math import lcm
from typing import TYPE_CHECKING, ClassVar

from kvbench.errors import ConfigError
from kvbench.methods.base import ALWAYS, SIDES, Method, Reach, Side, affine
from kvbench.methods.byte_parts import KVBytes, Setting
from kvbench.methods.leaving import CHUNK, demoted_by, untouched, whole_groups
from kvbench.quantizers.spec import FormatSpec
from kvbench.util.lazy import lazy

if TYPE_CHECKING:
    import torch

    from kvbench.cache.layer import KVLayer
    from kvbench.cache.segments.base import Segment
    from kvbench.quantizers.affine import AffineQuantizer
else:
    torch = lazy("torch")

#: :meth:`RecencyMethod.check_rule` tries the rule for all smaller token counts: several windows of any published method
TRIED = 1024
#: token count up to which :meth:`RecencyMethod.reach` searches for the first packed token
LONGEST = 1 << 24


@dataclass(kw_only=True)
class RecencyMethod(Method):
    """Base of methods in which the number of tokens alone decides which tokens are packed.

    The first tokens (:attr:`sinks`) and a window of the newest tokens stay in full precision. Keys and values are each
    stored in up to three segments: sinks, packed tokens, and window. A subclass defines only :meth:`exact`, which
    returns how many of the newest tokens are in full precision. Everything else follows from it: the stores, padding,
    rollback, sliding windows, batched packing, and the count of bytes and its formula.

    The tokens of a decode step are in full precision while that step runs. A token that has left the window is packed
    before the next step, and is not packed again.

    On a layer with a sliding window, :meth:`exact` is called with the number of all tokens of the text, including those
    that the sliding window hides. Hidden tokens are dropped in whole groups.
    """

    needs_quantizer: ClassVar[bool] = True

    #: number of first tokens that stay exact; a method with this hyper-parameter declares it as a field
    sinks = 0
    #: drop what would be packed (the eviction twin); a method with this hyper-parameter declares it as a field
    evict = False

    # -- the rule ---------------------------------------------------------------------------------------------------

    def exact(self, n: int) -> int | tuple[int, int]:
        """Return how many of the newest tokens are in full precision after `n` tokens.

        Neither `n` nor the result counts the sinks. The result is one number, or a pair of numbers for keys and values.
        From n to n + 1 it must not grow by more than one, because packed tokens never return to full precision. For
        formats grouped per channel, whose groups span several tokens, ``n - exact(n)`` must be a multiple of the group
        size.
        """
        raise NotImplementedError(f"{type(self).__name__} must define the method exact(n)")

    def exact_after_prompt(self, n: int) -> int | tuple[int, int]:
        """Return how many of the newest tokens are in full precision after a prompt of `n` tokens, without the sinks.

        The result applies until the first step after the prompt begins, and :meth:`exact` from then on.
        """
        return self.exact(n)

    def formats(self) -> tuple[FormatSpec, FormatSpec]:
        """Return the packed formats of keys and of values."""
        assert self.quantizer is not None
        return self.quantizer.key, self.quantizer.value

    def packs(self, layer: int, window: int | None) -> bool:
        """Return True if the layer packs (or drops) tokens, False if it holds all of them in full precision."""
        return layer >= self.exact_layers

    def counted(self, layer: KVLayer, row: int) -> int:
        """Return the token count to call :meth:`exact` with while decoding, the sinks included."""
        return layer.real_tokens(row)

    # -- storage: overridden by methods with formats or allocations of their own -----------------------------------

    def make_quantizer(self, side: Side, channels: int) -> AffineQuantizer:
        """Return the quantizer of the keys or the values, for heads of `channels` channels."""
        return affine(self.formats()[SIDES.index(side)], channels)

    def packed_segment(self, layer: KVLayer, side: Side) -> Segment:
        """Return an empty segment for the packed tokens."""
        channels = layer.key_dim if side == "key" else layer.value_dim
        room = max(layer.expected_length() - self.sinks, 0)
        return self.packed(layer, side, self.make_quantizer(side, channels), capacity=room)

    def exact_segment(self, layer: KVLayer, side: Side) -> Segment:
        """Return an empty full-precision segment for the newest tokens; its buffer grows when it is full."""
        expected = layer.expected_length()
        return self.full(layer, side, capacity=max(self.windows(expected)) if self._packs(layer) else expected)

    def unit(self, width: int) -> int:
        """Return how many hidden tokens are dropped together on a layer with a sliding window.

        Packed tokens that share groups can be dropped only as whole groups. Without such groups, the number is 32, so
        that the remaining codes are moved only in every 32nd step. With :attr:`evict` nothing is packed, and the number
        is 1. `width` is the number of channels of a token over all heads.
        """
        if self.evict:
            return 1
        groups = [int(form.group_size) if form.axis == "channel" else 1 for form in self.formats()]
        return lcm(*groups) if max(groups) > 1 else CHUNK

    # -- what follows from it ---------------------------------------------------------------------------------------

    @property
    def packs_together(self) -> bool:
        """True if one kernel launch may pack the tokens of all layers; False if a subclass overrides :meth:`settle`."""
        return type(self).settle is RecencyMethod.settle

    @property
    def holds_codes(self) -> bool:
        """False with :attr:`evict`: tokens are dropped instead of being packed."""
        return not self.evict

    @property
    def drops_tokens(self) -> bool:
        """True with :attr:`evict`: tokens are dropped instead of being packed."""
        return self.evict

    def check(self, head_dim: int | None = None, max_length: int | None = None) -> None:
        """Raise ConfigError if `sinks` is negative, a format does not fit the heads, or :meth:`check_rule` fails."""
        super().check(head_dim, max_length)
        if self.sinks < 0:  # where a subclass declares no bounds
            raise ConfigError("method.sinks", self.sinks, "must not be negative", allowed="0 or greater, such as 4")
        if self.quantizer is not None:
            key, value = self.formats()
            if head_dim:
                replace(self.quantizer, key=key, value=value).check("quantizer", head_dim)
            self.check_rule()

    def check_rule(self) -> None:
        """Raise ConfigError if :meth:`exact` returns an impossible number for any token count below :data:`TRIED`."""
        exact = [self._checked_exact(n) for n in range(TRIED)]
        if self.evict:
            return
        groups = [int(form.group_size) if form.axis == "channel" else 1 for form in self.formats()]
        before = (0, 0)
        for n, (keys, values) in enumerate(exact):
            packed = (n - keys, n - values)
            for side, group, now, earlier in zip(SIDES, groups, packed, before, strict=True):
                if now < earlier:
                    raise ConfigError(
                        "method",
                        type(self).__name__,
                        f"exact({n}) leaves {now} {side}s packed, but exact({n - 1}) left {earlier}; packed tokens "
                        "cannot return to full precision",
                        allowed="an exact(n) that grows by at most one from n to n + 1",
                    )
                if now % group:
                    raise ConfigError(
                        f"quantizer.{side}.group_size",
                        group,
                        f"does not divide the {now} {side}s that {type(self).__name__}.exact({n}) leaves packed",
                        hint="make the window a multiple of the group, or use groups per token (quantizer=int4_token)",
                    )
            before = packed

    def _checked_exact(self, n: int) -> tuple[int, int]:
        """Return ``exact(n)`` as a pair; raise ConfigError unless it is one or two whole numbers from 0 to n."""
        exact = self.exact(n)
        counts = exact if isinstance(exact, tuple) else (exact, exact)
        if len(counts) != 2 or not all(type(count) is int and 0 <= count <= n for count in counts):
            raise ConfigError(
                "method",
                type(self).__name__,
                f"exact({n}) returned {exact!r}, which cannot be the number of full-precision tokens among {n}",
                allowed="a whole number (int) from 0 to n, or a pair of them for keys and values",
                hint=(
                    "return, for example, min(n, self.residual), n // 2 instead of n / 2, or max(n - "
                    "8, 0) instead of n - 8"
                ),
            )
        return counts[0], counts[1]

    def reach(self) -> Reach | None:
        """Return the largest number of tokens at which the cache is still in full precision; None if there is none."""
        # the number of packed tokens never falls, so bisection finds the first count with one
        untouched = bisect_left(range(LONGEST), True, key=lambda n: min(self.windows(self.sinks + n + 1)) <= n)
        return Reach("method", type(self).__name__, self.sinks + untouched) if self.sinks + untouched else None

    def windows(self, count: int, *, prompt: bool = False) -> tuple[int, int]:
        """Return how many of the newest keys, and of the newest values, are in full precision, without the sinks.

        Args:
            count: number of tokens so far, the sinks included.
            prompt: True right after a prompt of `count` tokens, before the next step begins; False at any later time.
        """
        n = max(count - self.sinks, 0)
        exact = self.exact_after_prompt(n) if prompt else self.exact(n)
        keys, values = exact if isinstance(exact, tuple) else (exact, exact)
        return min(keys, n), min(values, n)

    def segments(self, layer: KVLayer, side: Side) -> list[Segment]:
        """Return empty segments for sinks (if any), packed tokens (unless evicted) and the newest tokens.

        A layer that packs no tokens has only the last of these segments, which then holds all tokens.
        """
        window = self.exact_segment(layer, side)
        if not self._packs(layer):
            return [window]
        first = [self.full(layer, side, capacity=self.sinks)] if self.sinks else []
        return [*first, window] if self.evict else [*first, self.packed_segment(layer, side), window]

    def place(
        self, layer: KVLayer, rows: slice, keys: torch.Tensor, values: torch.Tensor, scores: torch.Tensor | None
    ) -> None:
        """Store the prompt's tokens: sinks and the newest tokens in full precision, the others packed or dropped.

        :meth:`exact_after_prompt` decides how many of the newest tokens stay in full precision. If prompts attend to
        quantized tokens (:attr:`quantized_prefill`), each chunk of the prompt is stored by a separate call.
        """
        count, packs = layer.real_tokens(rows.indices(layer.batch)[0]), self._packs(layer)
        for store, x, exact in zip(layer.stores(), (keys, values), self.windows(count, prompt=True), strict=True):
            if not packs:
                store.tail.append(rows, x)
                continue
            earlier = count - x.shape[2]  # stored with earlier chunks, or hidden by a sliding window
            sinks = min(max(self.sinks - earlier, 0), x.shape[2])
            border = x.shape[2] - min(exact, x.shape[2] - sinks)
            if self.sinks:
                store.segments[0].append(rows, x[:, :, :sinks])
            if not self.evict:
                store.segments[-2].append(rows, x[:, :, sinks:border])
            store.tail.append(rows, x[:, :, border:])

    def settle(self, layer: KVLayer, rows: slice) -> None:
        """Pack (with :attr:`evict`, drop) the oldest full-precision tokens until :meth:`exact` of them remain."""
        if not self._packs(layer):
            return
        row = rows.indices(layer.batch)[0]
        for store, exact in zip(layer.stores(), self.windows(self.counted(layer, row)), strict=True):
            if self.sinks:
                store.fill_sinks(rows, self.sinks, layer.real_tokens(row))
            excess = store.tail.length(rows) - exact
            if excess > 0:
                if not self.evict:
                    store.segments[-2].append(rows, store.tail.view(rows)[:, :, :excess])
                store.tail.drop_front(rows, excess)

    def settle_each(self, layer: KVLayer) -> bool:
        """Pack equally many tokens of all rows; see :meth:`Policy.settle_each`."""
        from kvbench.cache.segments.base import all_equal
        from kvbench.cache.segments.packed import PackedSegment

        if type(self).settle is not RecencyMethod.settle or self.evict or not self._packs(layer):
            return False
        exact = {self.windows(count) for count in {self.counted(layer, row) for row in range(layer.batch)}}
        # one launch packs a block of all rows: every row must have its window in the same slots, and as large
        tails = [(*store.tail.starts, *store.tail.lengths) for store in layer.stores()]
        if len(exact) > 1 or not all(
            all_equal(tail[: layer.batch]) and all_equal(tail[layer.batch :]) for tail in tails
        ):
            return False
        if self.sinks and any(set(store.segments[0].lengths) != {self.sinks} for store in layer.stores()):
            return False
        due = []
        for store, most in zip(layer.stores(), exact.pop(), strict=True):
            tokens = store.tail.view(slice(None))[:, :, : max(store.tail.lengths[0] - most, 0)]
            segment = store.segments[-2]
            if not isinstance(segment, PackedSegment) or not segment.appends_each(tokens):
                return False
            due.append((store, segment, tokens))
        for store, segment, x in due:
            if x.shape[2]:
                segment.append_each(x)
                store.tail.drop_front(slice(None), x.shape[2])
        return True

    def demotions(self, layer: KVLayer, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return after how many tokens each token leaves the window, for keys and for values."""
        if not self._packs(layer):
            never = untouched(count)
            return never, never
        known, key = layer.progress.plans, ("demotions", id(self), count)
        if key not in known:  # the same for all layers that pack
            windows = [self.windows(n) for n in range(count + 1)]
            packed = ([max(n - self.sinks, 0) - window[side] for n, window in enumerate(windows)] for side in (0, 1))
            keys, values = (demoted_by(counts, count, self.sinks) for counts in packed)
            known[key] = keys, values
        keys, values = known[key]
        return keys, values

    def idle(self, layer: KVLayer, row: int) -> int:
        """Return how many more tokens a row may get before any is packed or dropped; at most :data:`TRIED`."""
        if layer.window or type(self).settle is not RecencyMethod.settle:
            return 0
        if not self._packs(layer):
            return ALWAYS
        count = self.counted(layer, row)
        if count < self.sinks:
            return 0
        exact = [store.tail.lengths[row] for store in layer.stores()]
        for more in range(1, TRIED + 1):
            if any(now + more > size for now, size in zip(exact, self.windows(count + more), strict=True)):
                return more - 1
        return TRIED

    def forgotten(self, layer: KVLayer, hidden: int) -> int:
        """Return how many of the tokens that a sliding window hides can be dropped.

        The sinks are dropped all at once, when the last of them is hidden. The tokens after them are dropped
        :meth:`unit` at a time. A layer that packs no tokens drops every hidden token.
        """
        if not self._packs(layer):
            return hidden
        return whole_groups(hidden, self.unit(layer.heads * max(layer.key_dim, layer.value_dim)), self.sinks)

    def forget(self, layer: KVLayer, rows: slice, hidden: int) -> None:
        """Drop a row's oldest tokens, as many as :meth:`forgotten` counts, if they are still stored."""
        if not self._gaps(layer):
            super().forget(layer, rows, hidden)
            return
        count = layer.hidden_slots(rows.indices(layer.batch)[0], self.forgotten(layer, hidden))
        for store in layer.stores():
            store.drop_front(rows, count)

    def positions(self, layer: KVLayer, row: int) -> torch.Tensor | None:
        """Return the position of the token in each slot of a row, ``[n]``, if tokens have been evicted.

        Without :attr:`evict` the result is None: the slots hold consecutive tokens in the order of the text.
        """
        if not self._gaps(layer):
            return None
        store, one, n = layer.stores()[0], slice(row, row + 1), layer.real_tokens(row)
        sinks = store.segments[0].length(one) if self.sinks else 0
        return torch.cat([torch.arange(sinks), torch.arange(n - store.tail.length(one), n)]) + layer.start(row)

    def packed_bytes(self, at: Setting, count: int, form: FormatSpec) -> KVBytes:
        """Return the bytes of `count` packed tokens in a format, counting only their keys or only their values."""
        return at.packed(count, form)

    def layer_bytes(self, at: Setting) -> KVBytes:
        """Predict the bytes of one layer for one sequence: sinks, packed tokens and window."""
        if not self.packs(at.layer, at.window):
            return at.both(at.tokens - at.hidden)
        here = at.tokens - whole_groups(at.hidden, self.unit(at.heads * at.channels), self.sinks)
        # the sinks are the first tokens that a sliding window drops
        sinks = min(self.sinks, at.tokens) if here == at.tokens else 0
        total = KVBytes()
        for form, window in zip(self.formats(), self.windows(at.tokens), strict=True):
            exact = min(window, here - sinks)
            total += at.exact(sinks + exact)
            if not self.evict:
                total += self.packed_bytes(at, here - sinks - exact, form)
        return total

    def _packs(self, layer: KVLayer) -> bool:
        return self.packs(layer.index, layer.window)

    def _gaps(self, layer: KVLayer) -> bool:
        return self.evict and self._packs(layer)
