"""StreamingLLM: attention sinks (the first tokens) and a rolling window of the newest; the rest is dropped.

Source: Xiao et al., "Efficient Streaming Language Models with Attention Sinks" (ICLR 2024), sec. 3.2 and fig. 4;
mit-han-lab/streaming-llm, kv_cache.py (what is kept) and pos_shift/ (positions inside the cache). The variant that
drops tokens once, after the prompt, is that of KVCache-Factory and kvpress.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from kvbench.cache.policy import CacheState
from kvbench.errors import CacheError
from kvbench.methods.base import Method, Reach, Side
from kvbench.methods.byte_parts import KVBytes, Setting
from kvbench.methods.eviction import check_budget, tokens
from kvbench.methods.leaving import hidden
from kvbench.util.lazy import lazy
from kvbench.util.schema import bounded

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

    from kvbench.cache import KVCache, Prompts
    from kvbench.cache.layer import KVLayer
    from kvbench.cache.segments.base import Segment
    from kvbench.cache.segments.rolling import RollingSegment, Turn
    from kvbench.rotation import Transform
else:
    torch = lazy("torch")


@dataclass
class Turning(CacheState):
    """StreamingLLM's per-cache state: the model's rotary embedding, which rotates sinks to new positions at every step.

    Args:
        turn: function ``turn(keys, by)`` that rotates keys, as the model's RoPE does, by `by` positions.
    """

    turn: Turn


@dataclass(frozen=True)
class TurningWithin:
    """Function that rotates keys to other positions, for keys stored in the basis `basis` instead of the model's."""

    basis: Transform
    turn: Turn

    def __call__(self, keys: torch.Tensor, by: int | Sequence[int]) -> torch.Tensor:
        """Return stored keys ``[B, H, n, D]``, rotated by `by` positions; computed in fp32."""
        return self.basis.keys(self.turn(self.basis.back(keys.float()), by)).to(keys.dtype)


@dataclass(kw_only=True)
class StreamingLLM(Method):
    """StreamingLLM: keeps the first tokens (sinks) and a rolling window of the newest tokens, and drops the others.

    Together, sinks and window fill the budget. The tokens of a step also attend to each other. The tokens of the prompt
    attend to each other in full, before any are dropped.

    On a layer with a sliding window, the budget is at most the number of tokens that this window shows, and a budget
    given as a share is a share of that number. With ``position=cache`` the sinks move along with the newest tokens,
    stay within the sliding window and count towards the budget. With ``position=original`` the sliding window hides the
    sinks after a while. They are then kept in addition to the budget.

    Args:
        sinks: number of first tokens that are never dropped (paper: 4).
        budget: tokens to keep, sinks included, as a number (int) or as a share of the tokens seen so far (float).
        position: ``cache``: positions are consecutive within the cache (the paper). Distances within the window do not
            change, so only the keys of the sinks are rotated: every step rotates them from their original positions to
            those right before the window. ``original``: all keys keep their original positions, so the distance to the
            sinks grows.
        evict: ``steps``: tokens are dropped at every step (the paper); ``prefill``: only once, after the prompt. The
            cache then grows with each token, as in the evaluation harnesses that offer StreamingLLM.
    """

    sinks: int = bounded(4, minimum=0)
    budget: int | float = 2048
    position: Literal["cache", "original"] = "cache"
    evict: Literal["steps", "prefill"] = "steps"

    @property
    def packs_together(self) -> bool:
        """True if one kernel launch may move all layers' windows; False if a subclass overrides :meth:`settle`."""
        return type(self).settle is StreamingLLM.settle

    @property
    def holds_codes(self) -> bool:
        """False: tokens are dropped, and those that stay are in full precision."""
        return False

    @property
    def drops_tokens(self) -> bool:
        """True: tokens between the sinks and the window are dropped."""
        return True

    @property
    def prompt_only(self) -> bool:  # type: ignore[override]
        """True for ``evict=prefill``: the budget is applied only once, when the prompt is stored."""
        return self.evict == "prefill"

    def check(self, head_dim: int | None = None, max_length: int | None = None) -> None:
        """Raise ConfigError if `sinks` is negative or the budget has no room for a newest token."""
        super().check(head_dim, max_length)
        check_budget(self.budget, self.sinks + 1, f"the sinks (method.sinks={self.sinks}) and one new token")

    def reach(self) -> Reach:
        """Return the largest number of tokens that are all kept: the budget, or `sinks` + 1 if the budget is a share.

        With ``evict=prefill``, the number counts only the tokens of the prompt.
        """
        prompt = self.evict == "prefill"
        if isinstance(self.budget, int):
            return Reach("method.budget", self.budget, self.budget, of_prompt=prompt)
        return Reach("method.sinks", self.sinks, self.sinks + 1, of_prompt=prompt)

    def new_cache(
        self, model: PreTrainedModel, prompts: Prompts | None = None, max_length: int | None = None
    ) -> KVCache:
        """Return an empty cache, with the model's rotary embedding if ``position=cache``; see :meth:`Method.new_cache`.

        Raises:
            ModelError: the model has no rotary embedding that can rotate keys to other positions.
        """
        cache = super().new_cache(model, prompts, max_length)
        if self.position == "cache" and self.sinks:
            from kvbench.attention.rope.rotary import rotary

            cache.progress.method_state = Turning(rotary(model).turn)
        return cache

    def held(self, n: int, window: int | None = None) -> int:
        """Return how many tokens, sinks included, a layer with sliding window `window` holds after `n` tokens."""
        passed = hidden(n, window)  # with position=original the sinks outlive the sliding window
        beside = min(passed, self.sinks) if self.position == "original" else 0
        return tokens(self.budget, n - passed, self.sinks + 1) + beside

    def most(self, n: int, window: int | None) -> int:
        """Return how many tokens a layer would hold after `n` tokens if only its sliding window dropped any."""
        passed = hidden(n, window)
        return n - passed + (min(passed, self.sinks) if self.position == "original" else 0)

    def segments(self, layer: KVLayer, side: Side) -> list[Segment]:
        """Return one empty segment that holds the sinks and, after them, the rolling window."""
        from kvbench.cache.segments.rolling import RollingSegment

        state, basis = layer.progress.method_state, layer.transform("key")
        turn = state.turn if isinstance(state, Turning) else None
        if turn is not None and basis is not None:
            turn = TurningWithin(basis, turn)
        if side == "value" or self.position == "original" or not self.sinks:
            turn = None
        elif turn is None:
            raise CacheError(
                "position=cache needs the model's rotary embedding; create the cache with "
                "method.new_cache(model), which provides it"
            )
        resident = self.held(max(layer.progress.max_length or 0, layer.seen), layer.window)
        if self.evict == "prefill":
            resident = min(self.held(layer.seen, layer.window) + layer.coming(), layer.expected_length())
        channels = layer.key_dim if side == "key" else layer.value_dim
        shape = (layer.batch, layer.heads, channels)
        # behind the window there is room: its live part is moved back only once in so many steps
        room = resident + max(64, resident // 8)
        return [RollingSegment(*shape, layer.dtype, layer.device, capacity=room, sinks=self.sinks, turn=turn)]

    def place(
        self, layer: KVLayer, rows: slice, keys: torch.Tensor, values: torch.Tensor, scores: torch.Tensor | None
    ) -> None:
        """Store the sinks and the newest tokens of the prompt, as many as fill the budget."""
        n = keys.shape[2]
        resident = self.held(n, layer.window)
        for (tail, _), x in zip(self.tails(layer), (keys, values), strict=True):
            sinks = min(self.sinks, resident)
            tail.append(rows, x[:, :, :sinks])
            tail.append(rows, x[:, :, n - (resident - sinks) :])
            tail.roll(rows, 0, n - resident)

    def settle(self, layer: KVLayer, rows: slice) -> None:
        """Drop the oldest tokens after the sinks until the layer holds no more than :meth:`held` allows.

        With ``evict=prefill`` only tokens that the layer's sliding window hides are dropped.
        """
        if self.evict == "prefill" and layer.window is None:
            return
        n = layer.real_tokens(rows.indices(layer.batch)[0])
        resident = self.held(n, layer.window) if self.evict == "steps" else self.most(n, layer.window)
        for tail, count in self.tails(layer, rows):
            if count > resident:
                tail.roll(rows, count - resident, n - resident)

    def tails(self, layer: KVLayer, rows: slice = slice(0, 1)) -> list[tuple[RollingSegment, int]]:
        """Return the rolling segments of keys and of values, each with the number of tokens that it holds in `rows`."""
        from kvbench.cache.segments.rolling import RollingSegment

        tails = []
        for store in layer.stores():
            tail = store.tail
            assert isinstance(tail, RollingSegment)
            tails.append((tail, tail.length(rows)))
        return tails

    def positions(self, layer: KVLayer, row: int) -> torch.Tensor | None:
        """Return the position of each slot of a row as attention sees it, ``[n]``; None if no token has been dropped.

        With ``position=cache``, the sinks have the positions right before the window.
        """
        return self._placed(layer, row, moved=self.position == "cache")

    def columns(self, layer: KVLayer, row: int) -> torch.Tensor | None:
        """Return the column, in the padded batch, of the token in each slot of a row, ``[n]``.

        Unlike :meth:`positions`, the result says where sinks are in the text, not where their keys have been rotated
        to. None if no token has been dropped.
        """
        return self._placed(layer, row, moved=False)

    def _placed(self, layer: KVLayer, row: int, *, moved: bool) -> torch.Tensor | None:
        """Return the columns of sinks and window; with `moved`, the sinks have the columns right before the window."""
        n, slots = layer.real_tokens(row), layer.stores()[0].length(slice(row, row + 1))
        if n == slots:
            return None
        sinks = min(self.sinks, slots)
        first = torch.arange(sinks) + (n - slots if moved else 0)
        return torch.cat([first, torch.arange(n - (slots - sinks), n)]) + layer.start(row)

    def layer_bytes(self, at: Setting) -> KVBytes:
        """Predict the bytes of sinks and window."""
        if self.evict == "steps":
            return at.both(self.held(at.tokens, at.window))
        grown = self.held(at.prompt, at.window) + at.generated
        return at.both(min(grown, self.most(at.tokens, at.window)))
