"""The members of a method that the cache and attention call; :class:`kvbench.methods.base.Method` answers all of it.

Declared here, below the methods, so that imports run one way: the cache knows a rule by these members alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

if TYPE_CHECKING:
    from torch import Tensor

    from kvbench.cache.segments.base import Side
    from kvbench.cache.store import Store


class MethodState(Protocol):
    """The state of a method for one cache besides its stores (:class:`kvbench.methods.state.CacheState`).

    It fills the slot :attr:`kvbench.cache.progress.Progress.method_state`; ``new_cache`` puts it there.
    """

    def select(self, order: Sequence[int]) -> None:
        """Make the rows `order` the batch, repeats allowed."""
        ...

    def clone(self) -> MethodState:
        """Return a copy whose rows may be selected independently."""
        ...


L = TypeVar("L", contravariant=True)


class Policy(Protocol[L]):
    """The rule that decides in which format each token is held, and when it moves.

    ``L`` is the layer that a rule works on (:class:`kvbench.cache.layer.KVLayer`).
    """

    @property
    def observe_prompt(self) -> int:
        """Prompt attention handed to :meth:`place`: 0 none, n of the last n queries, -1 column sums over all."""
        ...

    @property
    def observe_steps(self) -> bool:
        """True if :meth:`observe` takes the attention of every decode step."""
        ...

    @property
    def needs_prompts(self) -> bool:
        """True if a cache can be made for known prompts only."""
        ...

    @property
    def by_token(self) -> bool:
        """True if a token's stored form depends on that token and its position alone."""
        ...

    @property
    def gives_tail(self) -> bool:
        """True if the whole exact tail may be rolled back."""
        ...

    @property
    def settles(self) -> bool:
        """True if anything moves as the sequence grows."""
        ...

    @property
    def packs_together(self) -> bool:
        """True if :meth:`settle` may be deferred and batched across layers."""
        ...

    @property
    def keys_before_rope(self) -> bool:
        """True if keys are stored before RoPE, which attention applies as it reads them."""
        ...

    @property
    def quantized_prefill(self) -> bool:
        """True if prompt tokens attend to what is stored of them."""
        ...

    @property
    def eager(self) -> bool:
        """True if a step's own tokens are stored before it attends to them."""
        ...

    @property
    def speculation(self) -> Any:
        """The method's speculative decoding (:class:`kvbench.methods.speculation.Speculation`), or None."""
        ...

    def make_store(self, layer: L, side: Side) -> Store:
        """Return the empty store of one side of `layer`."""
        ...

    def place(self, layer: L, rows: slice, keys: Tensor, values: Tensor, scores: Tensor | None) -> None:
        """Put the prompt's tokens, ``[rows, H, n, D]``, into the stores."""
        ...

    def settle(self, layer: L, rows: slice) -> None:
        """Demote what has grown too old."""
        ...

    def observe(self, layer: L, rows: slice, probabilities: Tensor) -> None:
        """Take the attention of a decode step over the slots, ``[rows, Hq, q, slots]``."""
        ...

    def positions(self, layer: L, row: int) -> Tensor | None:
        """Return the positions of a row's slots; None: they are in order without a gap."""
        ...

    def forgotten(self, layer: L, hidden: int) -> int:
        """Return how many of the oldest `hidden` tokens of a sliding-window layer are dropped."""
        ...

    def forget(self, layer: L, rows: slice, hidden: int) -> None:
        """Drop what a sliding window has passed."""
        ...

    def reading_order(self, layer: L, rows: slice) -> list[tuple[int, int]] | None:
        """Return slot ranges in the order in which attention visits them; None: all, block by block."""
        ...
