"""LogQuant: tokens at logarithmically growing distances stay in full precision; the others are quantized once.

Source: Chen et al., "LogQuant: Log-Distributed 2-Bit Quantization of KV Cache with Superior Accuracy Preservation"
(2025), sec. 3.2-3.4 and Algorithm 1; Concyclics/LogQuantKV, src/LogQuant.py. The released code differs from the paper:
it groups keys per token (its ``axis_key=0``), not per channel; it quantizes all quantized tokens again at every flush;
and it stores placeholders for tokens in full precision. Here keys are grouped per channel, a token is quantized once,
from its full-precision value, and nothing is stored twice.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING, ClassVar, Literal

from kvbench.errors import ConfigError
from kvbench.methods.base import Method, Reach, Side, affine
from kvbench.methods.byte_parts import KVBytes, Setting
from kvbench.methods.leaving import untouched
from kvbench.quantizers.spec import FormatSpec
from kvbench.util.lazy import lazy
from kvbench.util.schema import bounded

if TYPE_CHECKING:
    import torch

    from kvbench.cache.layer import KVLayer
    from kvbench.cache.segments.base import Segment
    from kvbench.quantizers.affine import AffineQuantizer
else:
    torch = lazy("torch")


def indices(n: int, W: int) -> list[int]:
    """Return the positions of the tokens that are in full precision after `n` tokens, in ascending order (Algorithm 1).

    W is the window in tokens. Whenever 3 W tokens are in full precision, a flush quantizes every other one of the
    oldest 2 W: the second, the fourth and so on. The density of full-precision tokens thus halves each time the
    distance from the newest token doubles. Their number is 2 W + n mod W if n >= 3 W, and n otherwise.
    """
    return plan(n, W)[1].tolist()


def flushes(n: int, W: int) -> int:
    """Return how often tokens have been flushed (quantized) after `n` tokens; each flush quantizes `W` of them."""
    return max(0, n // W - 2)


@lru_cache(maxsize=64)
def plan(n: int, W: int, count: int | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the positions of quantized tokens, and those of tokens in full precision, int64 on the CPU.

    The former are in the order in which they were quantized, the latter in ascending order. `count` is the number of
    flushes that have been carried out; None: all that are due after `n` tokens.
    """
    everything = torch.arange(n)
    # in full precision: `log`, tokens left by earlier flushes, and the local part, all tokens from `first` on
    demoted, log = [everything[:0]], everything[:0]
    first = 0
    for _ in range(flushes(n, W) if count is None else count):
        stop = first + 2 * W - len(log)
        block = torch.cat([log, everything[first:stop]])  # the oldest 2 W
        first, log = stop, block[0::2]  # thinned again at the next flush
        demoted.append(block[1::2])
    return torch.cat(demoted), torch.cat([log, everything[first:]])


@lru_cache(maxsize=4)
def placed(n: int, W: int, sinks: int, device: torch.device, skip: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Return which prompt tokens are quantized at the end of the prompt, and which stay in full precision.

    The result does not contain the sinks. It is cached, because it is the same for all layers.

    Args:
        n: number of prompt tokens, the sinks included.
        skip: number of quantized tokens to leave out, from the first of the list, because a sliding window hides them.

    Returns:
        Indices in the prompt, in the orders of :func:`plan`.
    """
    with torch.inference_mode(False):
        demoted, exact = plan(n - sinks, W)
        return (demoted[skip:] + sinks).to(device), (exact + sinks).to(device)


@lru_cache(maxsize=16)
def remaining(W: int, length: int, device: torch.device) -> torch.Tensor:
    """Return which of `length` full-precision tokens, by index, a flush leaves in full precision.

    These are every other one of the oldest 2 W tokens, beginning with the first, and all tokens after them.
    """
    with torch.inference_mode(False):
        return torch.tensor([*range(0, 2 * W, 2), *range(2 * W, length)], device=device)


@dataclass(kw_only=True)
class LogQuant(Method):
    """LogQuant: the older the tokens, the fewer of them stay in full precision; all others are quantized.

    Whenever 3 W tokens are in full precision, where W is the window, a flush quantizes every other one of the oldest 2
    W (:func:`indices`). Keys are stored after RoPE.

    On a layer with a sliding window, flushes count all tokens of the text, hidden ones included. The W tokens that a
    flush quantized are dropped together once all of them are hidden. Sinks and tokens in full precision are not
    dropped, even if they are hidden. A sliding window that shows at most ``3 W + sinks`` tokens is too short for this:
    the layer quantizes nothing and keeps the visible tokens in full precision.

    Args:
        window: W, in tokens; None: ``reserved // 3``. The paper's tables use 42. The kernels are fastest with 64,
            because the groups then fit into their tiles.
        reserved: R, the largest number of tokens in full precision as the paper counts them (128 in its tables); used
            only if `window` is None.
        key_axis: elements of a group of keys. ``channel``: consecutive tokens of one channel (the paper, sec. 3.4);
            ``token``: consecutive channels of one token (the released code).
        sinks: number of first tokens that stay in full precision in addition to those that the rule keeps (it always
            keeps token 0).
        evict: True: drop the tokens that would be quantized (for comparison; the paper's Table 4).
    """

    needs_quantizer: ClassVar[bool] = True

    window: int | None = bounded(None, minimum=1)
    reserved: int = 128
    key_axis: Literal["channel", "token"] = "channel"
    sinks: int = bounded(0, minimum=0)
    evict: bool = False

    @property
    def W(self) -> int:
        """The window W in tokens: `window`, or a third of `reserved` if `window` is None."""
        return self.window if self.window is not None else self.reserved // 3

    @property
    def packs_together(self) -> bool:
        """True if one kernel launch may pack the tokens of all layers; False if a subclass overrides :meth:`settle`.

        This launch reads the tokens before a flush moves those that stay in full precision.
        """
        return type(self).settle is LogQuant.settle

    @property
    def drops_tokens(self) -> bool:
        """True with `evict`: tokens are dropped instead of being quantized."""
        return self.evict

    def check(self, head_dim: int | None = None, max_length: int | None = None) -> None:
        """Raise ConfigError if W is below 1, `sinks` is negative, or a format does not fit the model's heads."""
        super().check(head_dim, max_length)
        if self.W < 1:
            raise ConfigError(
                "method.reserved", self.reserved, "is too small for a window", allowed="3 or greater, such as 128"
            )
        if head_dim and self.quantizer:
            replace(self.quantizer, key=self.key_format()).check("quantizer", head_dim)

    def reach(self) -> Reach:
        """Return the largest number of tokens that all stay in full precision: sinks + 3 W - 1."""
        key, value = ("reserved", self.reserved) if self.window is None else ("window", self.window)
        return Reach(f"method.{key}", value, self.sinks + 3 * self.W - 1)

    def key_format(self) -> FormatSpec:
        """Return the packed format of the keys, grouped along `key_axis`."""
        assert self.quantizer is not None
        if self.key_axis == "token" and self.quantizer.key.axis == "channel":
            return replace(self.quantizer.value, bits=self.quantizer.key.bits)
        return self.quantizer.key

    def make_quantizer(self, side: Side, channels: int | None = None) -> AffineQuantizer:
        """Return the quantizer of the keys or the values; if `channels` is None, group sizes are not fitted to it.

        Tokens are quantized W at a time. Each such block is divided into groups separately, so no group contains tokens
        of two blocks.
        """
        from kvbench.quantizers.windowed import WindowedQuantizer

        assert self.quantizer is not None
        spec = self.key_format() if side == "key" else self.quantizer.value
        if spec.axis == "channel":
            return WindowedQuantizer(spec.bits, self.W, int(spec.group_size))
        return affine(spec, channels)

    def segments(self, layer: KVLayer, side: Side) -> list[Segment]:
        """Return empty segments for sinks (if any), quantized tokens (unless `evict` is set), and all other tokens."""
        segments = [self.full(layer, side, capacity=self.sinks)] if self.sinks else []
        if not self.evict:
            room = flushes(max(layer.expected_length() - self.sinks, 0), self.W) * self.W
            channels = layer.key_dim if side == "key" else layer.value_dim
            segments.append(self.packed(layer, side, self.make_quantizer(side, channels), capacity=room))
        return [*segments, self.full(layer, side, capacity=3 * self.W + 16, slack=16)]

    def place(
        self, layer: KVLayer, rows: slice, keys: torch.Tensor, values: torch.Tensor, scores: torch.Tensor | None
    ) -> None:
        """Store the prompt, and quantize the tokens that decoding it token by token would have quantized."""
        sinks = min(self.sinks, keys.shape[2])
        if self.whole_window(layer.window):
            for store, x in zip(layer.stores(), (keys, values), strict=True):
                store.tail.append(rows, x)
            return
        skip = self.passed(layer.hidden(rows.indices(layer.batch)[0]))
        demoted, exact = placed(keys.shape[2], self.W, sinks, keys.device, skip)
        order, borders = torch.cat([demoted, exact]), self.packed_counts(len(demoted), keys.shape[2] - sinks, skip)
        for store, x, border in zip(layer.stores(), (keys, values), borders, strict=True):
            if self.sinks:
                store.segments[0].append(rows, x[:, :, :sinks])
            if not self.evict:
                store.packed.append_chosen(rows, x, order[:border])
            store.tail.append_chosen(rows, x, order[border:])

    def packed_counts(self, demoted: int, n: int, skip: int) -> tuple[int, int]:
        """Return how many keys and how many values of a prompt are quantized (or dropped).

        Args:
            demoted: number of tokens that flushes have taken.
            n: tokens of the prompt without the sinks, the first `skip` of which the layer does not store.
        """
        return demoted, demoted

    def settle(self, layer: KVLayer, rows: slice) -> None:
        """Carry out the flushes that are due: quantize (or drop) W tokens at a time.

        Afterwards fewer than 3 W tokens, not counting the sinks, are in full precision.
        """
        if self.whole_window(layer.window):
            return
        for store in layer.stores():
            if self.sinks:
                store.fill_sinks(rows, self.sinks, layer.real_tokens(rows.indices(layer.batch)[0]))
            tail, W = store.tail, self.W
            while tail.length(rows) >= 3 * W:  # a flush: of the oldest 2 W, the odd ones go, the even ones close up
                exact = tail.view(rows)
                if self.evict:
                    tail.keep(rows, remaining(W, tail.length(rows), layer.device))
                else:
                    store.packed.append(rows, exact[:, :, 1 : 2 * W : 2])
                    store.packed.thin(tail, rows, W)

    def demotions(self, layer: KVLayer, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return after how many tokens each token is quantized or dropped.

        Of n tokens without the sinks, the k-th flush (k = 0, 1, ...) is due at n = (k + 3) W.
        """
        times = untouched(count)
        if count > self.sinks and not self.whole_window(layer.window):
            demoted, _ = plan(count - self.sinks, self.W)
            flush = torch.arange(len(demoted)) // self.W
            times[demoted + self.sinks] = self.sinks + (flush + 3) * self.W
        return times, times

    def whole_window(self, window: int | None) -> bool:
        """Return True if a layer's sliding window, in tokens, is so short that the layer quantizes nothing."""
        return window is not None and window - 1 < 3 * self.W + self.sinks

    def passed(self, hidden: int) -> int:
        """Return how many quantized tokens can be dropped: the tokens of each flush that is hidden as a whole."""
        # the k-th flush (k = 0, 1, ...) takes only tokens before (k + 2) W
        return 0 if self.evict else max((hidden - self.sinks) // self.W - 1, 0) * self.W

    def forgotten(self, layer: KVLayer, hidden: int) -> int:
        """Return `hidden` if the layer quantizes nothing; otherwise 0: :meth:`forget` itself decides what to drop."""
        return hidden if self.whole_window(layer.window) else 0

    def forget(self, layer: KVLayer, rows: slice, hidden: int) -> None:
        """Drop the tokens of each flush that is hidden as a whole; all hidden tokens if the layer quantizes nothing."""
        if self.whole_window(layer.window):
            super().forget(layer, rows, hidden)
        elif not self.evict:
            gone = layer.real_tokens(rows.indices(layer.batch)[0]) - layer.length(rows)
            for store in layer.stores():
                count = self.passed(hidden) - gone  # those not dropped before
                if count > 0:
                    store.packed.drop_front(rows, count)

    def positions(self, layer: KVLayer, row: int) -> torch.Tensor | None:
        """Return the positions of a row's tokens in slot order: sinks, quantized tokens, tokens in full precision.

        None if the layer quantizes nothing: the slots are then in the order of positions.
        """
        if self.whole_window(layer.window):
            return None
        store = layer.stores()[0]
        one = slice(row, row + 1)
        sinks = store.segments[0].length(one) if self.sinks else 0
        n = layer.real_tokens(row) - sinks
        slots = store.length(one) - sinks
        gone = n - slots  # evicted, or passed by a sliding window
        # of W tokens per flush, so many flushes have been carried out
        count = (gone if self.evict else gone + store.packed.length(one)) // self.W
        demoted, exact = plan(n, self.W, count)
        order = [torch.arange(sinks)] + [p + sinks for p in ((exact,) if self.evict else (demoted[gone:], exact))]
        return torch.cat(order) + layer.start(row)

    def layer_bytes(self, at: Setting) -> KVBytes:
        """Predict the bytes of the tokens in full precision, the sinks included, and of the quantized tokens."""
        if self.whole_window(at.window):
            return at.both(at.tokens - at.hidden)
        demoted = flushes(at.tokens - min(self.sinks, at.tokens), self.W) * self.W
        total = at.both(at.tokens - demoted)
        if self.evict:
            return total
        assert self.quantizer is not None
        demoted -= self.passed(at.hidden)
        forms = (self.key_format(), self.quantizer.value)
        return total + self.demoted_bytes(forms[0], demoted, at) + self.demoted_bytes(forms[1], demoted, at)

    def demoted_bytes(self, form: FormatSpec, count: int, at: Setting) -> KVBytes:
        """Return the bytes of `count` quantized tokens (a multiple of W), counting only keys or only values."""
        return at.packed(count, form, self.W if form.axis == "channel" else None)
