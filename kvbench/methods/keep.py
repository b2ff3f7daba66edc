"""Eviction, then packing: prompt tokens with low scores are dropped, and those that remain are quantized.

Source: after Zhang et al., "More Tokens, Lower Precision: Towards the Optimal Token-Precision Trade-off in KV Cache
Compression" (arXiv 2412.12706), who simulate the quantization. Here the remaining tokens are really packed. The scores
by key norm are those of Devoto et al., "A Simple and Effective L2 Norm-Based Strategy for KV Cache Compression" (EMNLP
2024).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

from kvbench.methods.base import Method, Reach, Side
from kvbench.methods.byte_parts import KVBytes, Setting
from kvbench.methods.eviction import Scorer, check_budget, highest, tokens, with_recent
from kvbench.methods.kivi import Kivi
from kvbench.methods.leaving import whole_groups
from kvbench.util.lazy import lazy
from kvbench.util.schema import bounded

if TYPE_CHECKING:
    import torch

    from kvbench.cache.layer import KVLayer
    from kvbench.cache.segments.base import Segment
else:
    torch = lazy("torch")


@dataclass(kw_only=True)
class KeepMethod(Scorer, Kivi):
    """Base of methods that drop prompt tokens by a score and pack the others, in the format of any quantizer.

    A subclass defines only :meth:`score`. Each KV head keeps its own prompt tokens, all heads equally many. They are
    sorted by their positions, and then treated as if they were the whole prompt of :class:`~kvbench.methods.kivi.Kivi`:
    the first ones (`sinks`) and the newest ones (`residual`, `window`) stay in full precision, the others are packed.
    Generated tokens are all kept, and packed when they leave the window. Without a quantizer, everything stays in full
    precision. With ``keep=1`` nothing is dropped, and the method is Kivi.

    On a layer with a sliding window, prompt tokens that have left the window at the end of the prefill are dropped
    first, in whole groups. A `keep` given as a share is then a share of the remaining prompt tokens. While decoding,
    slots are dropped, in whole groups, once the tokens of all heads have left the window.

    Args:
        keep: prompt tokens to keep, as a number (int) or as a share of the prompt (float); 1 keeps all of them. The
            sinks and the newest tokens are part of it.
        newest: number of newest prompt tokens that are kept whatever their scores.
        sinks: number of first prompt tokens that are kept whatever their scores, and stay in full precision.
    """

    keep: int | float = 0.5
    newest: int = bounded(32, minimum=0)

    evict: ClassVar[bool] = False  # type: ignore[misc]
    needs_quantizer: ClassVar[bool] = False
    gives_tail: ClassVar[bool] = False

    @property
    def drops_tokens(self) -> bool:
        """True unless ``keep=1``: prompt tokens are dropped."""
        return self.keep != 1

    @property
    def holds_codes(self) -> bool:
        """False without a quantizer: prompt tokens are dropped, and those that stay are in full precision."""
        return self.quantizer is not None

    @property
    def prompt_only(self) -> bool:  # type: ignore[override]
        """True without a quantizer: only prompt tokens are dropped, and none are packed."""
        return self.quantizer is None

    @property
    def least(self) -> int:
        """Smallest allowed `keep`, in tokens: the sinks, the newest tokens and one more."""
        return self.sinks + self.newest + 1

    def packs(self, layer: int, window: int | None) -> bool:
        """Return True if there is a quantizer; see :meth:`RecencyMethod.packs`."""
        return self.quantizer is not None and super().packs(layer, window)

    def exact(self, n: int) -> int | tuple[int, int]:
        """Return how many of the newest keys and values are in full precision: Kivi's, or all without a quantizer."""
        return super().exact(n) if self.quantizer is not None else n

    # -- the choice of tokens ---------------------------------------------------------------------------------------

    def kept(self, n: int) -> int:
        """Return how many of `n` prompt tokens are kept."""
        return tokens(self.keep, n, self.least) if self.drops_tokens else n

    def choose(self, keys: torch.Tensor, values: torch.Tensor, attention: torch.Tensor | None) -> torch.Tensor | None:
        """Return the indices of the prompt tokens to keep, ascending, ``[B, H, m]``; None: all. See :meth:`score`."""
        n = keys.shape[2]
        count = self.kept(n)
        if count == n:
            return None
        scores = self.checked_scores(keys, values, attention, n - self.newest)[..., : n - self.newest]
        first = torch.arange(self.sinks, device=scores.device).expand(*scores.shape[:2], self.sinks)
        scored = highest(scores[..., self.sinks :], count - self.sinks - self.newest) + self.sinks
        return with_recent(torch.cat([first, scored], -1), n, self.newest)

    def place(
        self, layer: KVLayer, rows: slice, keys: torch.Tensor, values: torch.Tensor, scores: torch.Tensor | None
    ) -> None:
        """Store the prompt tokens that :meth:`choose` returns, and record their positions.

        Raises:
            CacheError, NonFiniteError: see :meth:`Scorer.chosen`.
        """
        index = self.chosen(layer, keys, values, scores)
        if index is None:
            super().place(layer, rows, keys, values, scores)
            return
        places = index.cpu() + layer.seen - keys.shape[2]
        for number, row in enumerate(range(*rows.indices(layer.batch))):
            layer.order[row] = places[number]
        packs = self._packs(layer)
        # from here the kept tokens are treated as Kivi treats a whole prompt
        for store, x, exact in zip(layer.stores(), (keys, values), self.windows(index.shape[2]), strict=True):
            x = x.gather(2, index[..., None].expand(*index.shape, x.shape[-1]))
            if not packs:
                store.tail.append(rows, x)
                continue
            border = x.shape[2] - exact
            if self.sinks:
                store.segments[0].append(rows, x[:, :, : self.sinks])
            store.segments[-2].append(rows, x[:, :, self.sinks : border])
            store.tail.append(rows, x[:, :, border:])

    # -- storage ----------------------------------------------------------------------------------------------------

    def counted(self, layer: KVLayer, row: int) -> int:
        """Return the token count to call :meth:`exact` with: the stored tokens, and all sinks, even dropped ones."""
        if layer.order[row] is None:
            return super().counted(layer, row)
        stored = layer.stores()[0].signature(row)
        return sum(stored[1:]) + self.sinks if self.sinks and self._packs(layer) else sum(stored)

    def packed_segment(self, layer: KVLayer, side: Side) -> Segment:
        """Return an empty segment for the packed tokens, with room for kept prompt tokens and generated ones."""
        channels = layer.key_dim if side == "key" else layer.value_dim
        room = min(self.kept(layer.seen) + layer.coming(), layer.expected_length())
        return self.packed(layer, side, self.make_quantizer(side, channels), capacity=max(room - self.sinks, 0))

    def exact_segment(self, layer: KVLayer, side: Side) -> Segment:
        """Return an empty full-precision segment for the window, or for all tokens without a quantizer."""
        if self._packs(layer):
            return super().exact_segment(layer, side)
        return self.full(layer, side, capacity=min(self.kept(layer.seen) + layer.coming(), layer.expected_length()))

    def unit(self, width: int) -> int:
        """Return how many hidden tokens are dropped together; 1 without a quantizer."""
        return super().unit(width) if self.quantizer is not None else 1

    def forget(self, layer: KVLayer, rows: slice, hidden: int) -> None:
        """Drop slots, in whole groups, whose tokens a sliding window hides in every head."""
        unit = self.unit(layer.heads * max(layer.key_dim, layer.value_dim)) if self._packs(layer) else 1
        for row in range(*rows.indices(layer.batch)):
            one = slice(row, row + 1)
            if layer.order[row] is None:
                super().forget(layer, one, hidden)
                continue
            stores = layer.stores()
            sinks = stores[0].segments[0].length(one) if self.sinks and self._packs(layer) else 0
            count = whole_groups(layer.hidden_slots(row, hidden), unit, sinks)
            if count:
                layer.order[row] = layer.positions(row)[..., count:].clone()
                for store in stores:
                    store.drop_front(one, count)

    def positions(self, layer: KVLayer, row: int) -> torch.Tensor | None:
        """Return the positions of the tokens in the slots, ``[H, n]``; None if no token has been dropped."""
        return layer.ordered(row)

    def demotions(  # type: ignore[override]
        self, layer: KVLayer, count: int
    ) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Return when tokens are packed or dropped; None unless ``keep=1``, because scores are not known in advance."""
        if self.drops_tokens:
            return None
        return super().demotions(layer, count) if self.quantizer is not None else Method.demotions(self, layer, count)

    def layer_bytes(self, at: Setting) -> KVBytes:
        """Predict the bytes of kept and generated tokens, assuming that a sliding window hides no kept token."""
        packs = self.packs(at.layer, at.window)
        gone = at.prompt - at.shown
        prompt = at.prompt - (whole_groups(gone, self.unit(at.heads * at.channels), self.sinks) if packs else gone)
        stored = self.kept(prompt)
        if stored == prompt:
            return super().layer_bytes(at)
        stored += at.generated
        if not packs:
            return at.both(stored)
        total = KVBytes()
        for form, exact in zip(self.formats(), self.windows(stored), strict=True):
            packed = stored - self.sinks - exact
            total += at.exact(self.sinks + exact) + self.packed_bytes(at, packed, form)
        return total

    # -- checks -----------------------------------------------------------------------------------------------------

    def reach(self) -> Reach:
        """Return the largest number of tokens that are all kept in full precision.

        A prompt of up to `keep` tokens loses none; if `keep` is a share, one of up to :attr:`least` tokens. With a
        quantizer, the result is at most :meth:`Kivi.reach`.
        """
        if not self.drops_tokens:
            return super().reach()
        most = self.keep if isinstance(self.keep, int) else self.least
        dropped = Reach("method.keep" if isinstance(self.keep, int) else "method.newest", most, most, of_prompt=True)
        if self.quantizer is None:
            return dropped
        packed = super().reach()
        return packed if packed.tokens < dropped.tokens else dropped

    def check(self, head_dim: int | None = None, max_length: int | None = None) -> None:
        """Raise ConfigError if `newest` is negative, `keep` leaves no room, or :meth:`Kivi.check` fails."""
        if self.drops_tokens:
            what = f"the sinks ({self.sinks}), the newest tokens ({self.newest}) and one between them"
            check_budget(self.keep, self.least, what, "method.keep")
        super().check(head_dim, max_length)


@dataclass(kw_only=True)
class Keep(KeepMethod):
    """Method that keeps the prompt tokens with the highest scores, and packs them in the format of any quantizer.

    Args:
        by: the score. ``attention``: the mean attention that the last 32 prompt tokens give to a token (SnapKV's votes,
            without pooling); ``key_norm``: tokens whose keys have the smallest norms are kept.
    """

    by: Literal["attention", "key_norm"] = "attention"

    #: number of last prompt tokens whose attention is the score
    LAST: ClassVar[int] = 32

    @property
    def observe_prompt(self) -> int:  # type: ignore[override]
        """Number of last queries of the prompt whose attention the method needs."""
        return self.LAST if self.by == "attention" and self.drops_tokens else 0

    def score(self, keys: torch.Tensor, values: torch.Tensor, attention: torch.Tensor | None) -> torch.Tensor:
        """Return the scores of the prompt tokens, ``[B, H, n]``."""
        if self.by == "key_norm":
            return -keys.float().norm(dim=-1)
        assert attention is not None
        return attention.mean(2).unflatten(1, (keys.shape[1], -1)).mean(2)
