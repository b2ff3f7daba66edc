"""LogQuant: full precision for tokens whose distance grows logarithmically, the rest quantized once.

Source: Chen et al., "LogQuant: Log-Distributed 2-Bit Quantization of KV Cache with Superior Accuracy Preservation"
(2025), sec. 3.2-3.4 and Algorithm 1; Concyclics/LogQuantKV, src/LogQuant.py. The released code groups keys per token
(its ``axis_key=0``) where the paper says per channel, quantizes demoted tokens again at every flush and keeps
placeholders for the exact ones; here a token is quantized once, from its full-precision value, and nothing is stored
twice.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING, ClassVar, Literal

from kvbench.errors import ConfigError
from kvbench.methods.base import Method, Reach, Side, affine
from kvbench.methods.byte_parts import KVBytes, Setting
from kvbench.quantizers.spec import FormatSpec
from kvbench.util.lazy import lazy

if TYPE_CHECKING:
    import torch

    from kvbench.cache.layer import KVLayer
    from kvbench.cache.segments.base import Segment
    from kvbench.quantizers.affine import AffineQuantizer
else:
    torch = lazy("torch")


def indices(n: int, W: int) -> list[int]:
    """Return the positions kept in full precision after n tokens (Algorithm 1); they depend only on n and W.

    Whenever 3 W tokens are exact, every second one of the oldest 2 W (beginning with the oldest) is demoted to the
    quantized part, so the density of exact tokens halves with each doubling of the distance. From n = 3 W on, 2 W + n
    mod W tokens are exact.
    """
    return plan(n, W)[1].tolist()


def flushes(n: int, W: int) -> int:
    """Return the number of flushes after n tokens; each flush demotes W of them."""
    return max(0, n // W - 2)


@lru_cache(maxsize=64)
def plan(n: int, W: int, count: int | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the positions demoted, in order of demotion, and those kept exact, oldest first (int64, CPU).

    Args:
        n: tokens so far.
        W: window.
        count: number of flushes so far; None: as many as n tokens cause.
    """
    everything = torch.arange(n)
    demoted, log = [everything[:0]], everything[:0]
    first = 0  # oldest token of the local part
    for _ in range(flushes(n, W) if count is None else count):
        stop = first + 2 * W - len(log)
        block = torch.cat([log, everything[first:stop]])
        first, log = stop, block[0::2]
        demoted.append(block[1::2])
    return torch.cat(demoted), torch.cat([log, everything[first:]])


@lru_cache(maxsize=4)
def placed(n: int, W: int, sinks: int, device: torch.device, skip: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Return :func:`plan` for the tokens after the sinks, as prompt positions on `device`; cached, as layers share it.

    Args:
        n: number of prompt tokens.
        W: the method's window W.
        sinks: number of first tokens that stay exact and are left out.
        device: device of the positions.
        skip: number of tokens to leave out, those demoted first, because a sliding window has passed them.
    """
    with torch.inference_mode(False):
        demoted, exact = plan(n - sinks, W)
        return (demoted[skip:] + sinks).to(device), (exact + sinks).to(device)


@lru_cache(maxsize=16)
def remaining(W: int, length: int, device: torch.device) -> torch.Tensor:
    """Return the slots that a flush leaves of `length` exact tokens: every second of the oldest 2 W, and the rest."""
    with torch.inference_mode(False):
        return torch.tensor([*range(0, 2 * W, 2), *range(2 * W, length)], device=device)


@dataclass(kw_only=True)
class LogQuant(Method):
    """LogQuant over keys after RoPE.

    On a layer with a sliding window the rule counts all tokens of the text. The W tokens of a flush are dropped
    together once all of them are hidden; exact tokens (fewer than 3 W, and the sinks) stay until the rule demotes them.
    If the sliding window shows at most that many tokens, all of them stay exact, as in fp16.

    Args:
        window: W; None: ``reserved // 3``. 64 suits the kernels best (its groups fit tiles); 42 is the paper's.
        reserved: R, the largest number of exact tokens, as the paper counts (its tables: 128).
        key_axis: ``channel`` (the paper, sec. 3.4) or ``token`` (the released code).
        sinks: number of first tokens kept exact in addition to those that the rule keeps (it always keeps token 0).
        evict: drop the tokens that would be quantized (for comparison; the paper's Table 4).
    """

    needs_quantizer: ClassVar[bool] = True

    window: int | None = None
    reserved: int = 128
    key_axis: Literal["channel", "token"] = "channel"
    sinks: int = 0
    evict: bool = False

    @property
    def W(self) -> int:
        """The window W in use."""
        return self.window if self.window is not None else self.reserved // 3

    @property
    def drops_tokens(self) -> bool:
        """True with `evict`: tokens are dropped where they would be quantized."""
        return self.evict

    def check(self, head_dim: int | None = None, max_length: int | None = None) -> None:
        """Raise ConfigError unless the window holds at least one token and `sinks` is not negative."""
        if self.window is not None and self.window < 1:
            raise ConfigError("method.window", self.window, "must be positive", allowed="1 or greater, such as 64")
        if self.W < 1:
            raise ConfigError(
                "method.reserved", self.reserved, "is too small for a window", allowed="3 or greater, such as 128"
            )
        if self.sinks < 0:
            raise ConfigError("method.sinks", self.sinks, "must not be negative", allowed="0 or greater, such as 4")
        super().check(head_dim, max_length)
        if head_dim and self.quantizer:
            replace(self.quantizer, key=self.key_format()).check("quantizer", head_dim)

    def reach(self) -> Reach:
        """Return the largest number of tokens that all stay exact: sinks + 3 W - 1, as the next one causes a flush."""
        key, value = ("reserved", self.reserved) if self.window is None else ("window", self.window)
        return Reach(f"method.{key}", value, self.sinks + 3 * self.W - 1)

    def key_format(self) -> FormatSpec:
        """Return the format of the keys, with `key_axis` applied."""
        assert self.quantizer is not None
        if self.key_axis == "token" and self.quantizer.key.axis == "channel":
            return replace(self.quantizer.value, bits=self.quantizer.key.bits)
        return self.quantizer.key

    def make_quantizer(self, side: Side, channels: int | None = None) -> AffineQuantizer:
        """Return a quantizer: keys in groups within the W tokens that one flush demotes, values per token."""
        from kvbench.quantizers.windowed import WindowedQuantizer

        assert self.quantizer is not None
        spec = self.key_format() if side == "key" else self.quantizer.value
        if spec.axis == "channel":
            return WindowedQuantizer(spec.bits, self.W, int(spec.group_size))
        return affine(spec, channels)

    def segments(self, layer: KVLayer, side: Side) -> list[Segment]:
        """Return segments for sinks (if any), demoted tokens in order of demotion (unless evicted) and exact tokens."""
        segments = [self.full(layer, side, capacity=self.sinks)] if self.sinks else []
        if not self.evict:
            room = flushes(max(layer.expected_length() - self.sinks, 0), self.W) * self.W
            channels = layer.key_dim if side == "key" else layer.value_dim
            segments.append(self.packed(layer, side, self.make_quantizer(side, channels), capacity=room))
        return [*segments, self.full(layer, side, capacity=3 * self.W + 16, slack=16)]

    def place(
        self, layer: KVLayer, rows: slice, keys: torch.Tensor, values: torch.Tensor, scores: torch.Tensor | None
    ) -> None:
        """Store the prompt in the state that decoding it token by token would have left."""
        sinks = min(self.sinks, keys.shape[2])
        if self.whole_window(layer.window):
            for store, x in zip(layer.stores(), (keys, values), strict=True):
                store.tail.append(rows, x)
            return
        skip = self.passed(layer.hidden(rows.indices(layer.batch)[0]))
        demoted, exact = placed(keys.shape[2], self.W, sinks, keys.device, skip)
        for store, x in zip(layer.stores(), (keys, values), strict=True):
            if self.sinks:
                store.segments[0].append(rows, x[:, :, :sinks])
            if not self.evict:
                store.packed.append_chosen(rows, x, demoted)
            store.tail.append_chosen(rows, x, exact)

    def settle(self, layer: KVLayer, rows: slice) -> None:
        """Demote W tokens for as long as 3 W or more are exact."""
        if self.whole_window(layer.window):
            return
        for store in layer.stores():
            if self.sinks:
                store.fill_sinks(rows, self.sinks, layer.real_tokens(rows.indices(layer.batch)[0]))
            tail, W = store.tail, self.W
            while tail.length(rows) >= 3 * W:
                exact = tail.view(rows)
                if not self.evict:
                    store.packed.append(rows, exact[:, :, 1 : 2 * W : 2])
                tail.keep(rows, remaining(W, tail.length(rows), layer.device))

    def whole_window(self, window: int | None) -> bool:
        """Return True if a layer's sliding window is so short that all its tokens stay exact."""
        return window is not None and window - 1 < 3 * self.W + self.sinks

    def passed(self, hidden: int) -> int:
        """Return how many demoted tokens of whole flushes are among the `hidden` oldest (flush f ends at (f + 2) W)."""
        return 0 if self.evict else max((hidden - self.sinks) // self.W - 1, 0) * self.W

    def forgotten(self, layer: KVLayer, hidden: int) -> int:
        """Return `hidden` if the whole window is exact, else 0: :meth:`forget` then drops whole flushes."""
        return hidden if self.whole_window(layer.window) else 0

    def forget(self, layer: KVLayer, rows: slice, hidden: int) -> None:
        """Drop the oldest flushes, once all their tokens are hidden."""
        if self.whole_window(layer.window):
            super().forget(layer, rows, hidden)
        elif not self.evict:
            gone = layer.real_tokens(rows.indices(layer.batch)[0]) - layer.length(rows)
            for store in layer.stores():
                count = self.passed(hidden) - gone
                if count > 0:
                    store.packed.drop_front(rows, count)

    def positions(self, layer: KVLayer, row: int) -> torch.Tensor | None:
        """Return the positions of sinks, demoted and exact tokens, recomputed from the number of flushes."""
        if self.whole_window(layer.window):
            return None
        store = layer.stores()[0]
        one = slice(row, row + 1)
        sinks = store.segments[0].length(one) if self.sinks else 0
        n = layer.real_tokens(row) - sinks
        slots = store.length(one) - sinks
        gone = n - slots  # evicted, or passed by a sliding window
        count = (gone if self.evict else gone + store.packed.length(one)) // self.W
        demoted, exact = plan(n, self.W, count)
        order = [torch.arange(sinks)] + [p + sinks for p in ((exact,) if self.evict else (demoted[gone:], exact))]
        return torch.cat(order) + layer.start(row)

    def layer_bytes(self, at: Setting) -> KVBytes:
        """Return the bytes of exact tokens, and of those demoted W at a time."""
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
        """Return the bytes of `count` tokens of one side that left the window W at a time."""
        return at.packed(count, form, self.W if form.axis == "channel" else None)
