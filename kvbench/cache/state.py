"""The tokens that one layer of a cache holds, with their positions and counts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Self

import torch
from torch import Tensor

from kvbench.cache import sliding
from kvbench.cache.order import extended
from kvbench.cache.policy import Policy
from kvbench.cache.progress import Progress
from kvbench.cache.segments.base import FullSegment, Segment, Side, same, uniform_rows
from kvbench.cache.segments.rolling import RollingSegment
from kvbench.cache.store import Store
from kvbench.errors import CacheError, ConfigError
from kvbench.rotation import Transform


class LayerState:
    """State of one layer of a cache: its stores, the positions of their tokens, and counts.

    :class:`kvbench.cache.layer.KVLayer` adds prefill, decoding and rollback.

    Args:
        method: the method, which decides in which format each token is stored (:class:`kvbench.methods.base.Method`).
        index: index of the layer.
        progress: state that all layers of a cache share (padding, positions, options, ...).
        window: the layer's sliding window: how many tokens a query sees, including its own. None if it sees all.

    Attributes:
        batch, heads, key_dim, value_dim, dtype, device: sizes, dtype and device of the stored keys and values; set when
            the first tokens arrive. Queries may have a wider dtype.
        sealed: True once the whole prompt is in the stores.
        seen: number of columns seen: tokens of a row, including padding and tokens dropped since.
        prompt: while a prompt arrives in chunks, its keys and its values so far, in full precision; else None.
        keys_store, values_store: stores of the keys and of the values; None until the first prompt tokens are stored.
        order: for each row, the column of the token in each slot, ``[n]`` or ``[H, n]``, on the CPU; None if the slots
            are in the order of columns. A method that permutes or evicts tokens sets it. Slots that were filled since
            may be missing at the end (:meth:`ordered` adds them).
        firm: for each row, the number of its first columns that can no longer be taken back, because the cache has
            packed or dropped tokens since they arrived.
        paths: names of the implementations (kernels or torch code) that have computed attention in this layer.
        pairs: which segments attention kernels have had to read side by side, as pairs (index of the key segment, index
            of the value segment) (:mod:`kvbench.attention.phases`).
        observed: the prompt's attention, if the method asks for it (``Method.observe_prompt``), until the prompt is
            stored; else None.
        follower: the same layer in the cache of a draft model, which gets the same prompt; else None.
        rope: function that applies the model's RoPE (:meth:`kvbench.attention.rope.rotary.Rotary.rotate`), if keys are
            stored before RoPE; else None.
        layers: number of layers of the cache; None for a layer by itself.
    """

    batch: int
    heads: int
    key_dim: int
    value_dim: int
    dtype: torch.dtype
    device: torch.device

    def __init__(self, method: Policy[Any], index: int, progress: Progress, window: int | None = None) -> None:
        self.method, self.index, self.progress, self.window = method, index, progress, window
        self.follower: Self | None = None
        self.rope: Callable[..., Tensor] | None = None
        self.layers: int | None = None
        self.reset()

    def reset(self) -> None:
        """Drop all tokens and return to the state before the first token."""
        self.is_initialized = False
        self.sealed = False
        self.seen = 0
        self.prompt: tuple[FullSegment, FullSegment] | None = None
        self.keys_store: Store | None = None
        self.values_store: Store | None = None
        self.order: list[Tensor | None] = []
        self.firm: list[int] = []
        self.paths: set[str] = set()
        self.pairs: set[tuple[int, int]] = set()
        self.observed: Tensor | None = None

    # -- stores -----------------------------------------------------------------------------------------------------

    def stores(self) -> tuple[Store, Store]:
        """Return the store of the keys and the store of the values.

        Raises:
            CacheError: there are no stores yet, because the prompt is not complete.
        """
        if self.keys_store is None or self.values_store is None:
            raise CacheError(
                f"layer {self.index} has no stores yet, because its prompt is not complete: call cache.finalize() first"
            )
        return self.keys_store, self.values_store

    def segments(self) -> list[Segment]:
        """Return the segments of both stores, keys first.

        Before the prompt is stored, return the two segments that collect its chunks, or none if there are no chunks.
        """
        if self.keys_store is not None and self.values_store is not None:
            return [*self.keys_store.segments, *self.values_store.segments]
        return list(self.prompt or ())

    def rolling(self) -> list[RollingSegment]:
        """Return the segments of both stores if all are rolling windows, as with StreamingLLM; else an empty list."""
        if self.keys_store is None:
            return []
        segments = self.segments()
        windows = [segment for segment in segments if isinstance(segment, RollingSegment)]
        return windows if len(windows) == len(segments) else []

    def length(self, rows: slice) -> int:
        """Return the number of slots of each row, which must be the same for all of `rows`."""
        return self.stores()[0].length(rows)

    def row_groups(self) -> list[slice]:
        """Divide the batch into runs of adjacent rows that one call can process together.

        The rows of a run have equal padding and, in every segment, equal numbers of tokens that begin at the same place
        in the buffer. After speculation, rows of equal length may begin at different places, because their windows were
        last moved at different steps.
        """
        segments = self.segments()
        counts = [self.progress.padding.starts or [0] * self.batch, *(segment.lengths for segment in segments)]
        counts += [segment.starts for segment in segments if isinstance(segment, FullSegment)]
        if all(same(count) for count in counts):
            return [slice(0, self.batch)]
        return list(uniform_rows(list(zip(*counts, strict=True))))

    # -- basis ------------------------------------------------------------------------------------------------------

    def transform(self, side: Side) -> Transform | None:
        """Return the basis in which the layer stores its keys or its values (``Method.transform``); None: the model's.

        Under tensor parallelism, a process gets the matrices of its own KV heads.

        Raises:
            ConfigError: the basis has a matrix per KV head, for another number of heads.
        """
        basis, (rank, ranks) = self.method.transform(self, side), self.progress.rank
        if basis is None or basis.heads in (None, 1):
            return basis
        if basis.heads != ranks * self.heads:
            raise ConfigError(
                f"method.rotation.{side}",
                None,
                f"the file has matrices for {basis.heads} KV heads, but layer {self.index} has {ranks * self.heads}",
                hint="calibrate for this model",
            )
        return basis if ranks == 1 else basis.of_heads(rank * self.heads, self.heads)

    def transforms(self) -> tuple[Transform | None, Transform | None]:
        """Return the bases of the keys and of the values (:meth:`transform`)."""
        return self.transform("key"), self.transform("value")

    def rotated(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Return new keys ``[B, H, n, D]`` and values ``[B, H, n, Dv]`` in the basis in which the layer stores them."""
        key, value = self.transforms()
        return keys if key is None else key.keys(keys), values if value is None else value.values(values)

    def unrotated(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Return stored keys ``[B, H, n, D]`` and values in the basis of the model; undoes :meth:`rotated`."""
        key, value = self.transforms()
        return keys if key is None else key.back(keys), values if value is None else value.back(values)

    def rotated_queries(self, query: Tensor) -> Tensor:
        """Return queries ``[B, Hq, q, D]`` in the basis in which the layer stores its keys."""
        transform = self.transform("key")
        return query if transform is None else transform.queries(query)

    def restored(self, output: Tensor) -> Tensor:
        """Return the output of attention over stored values, ``[B, q, Hq, Dv]``, in the basis of the model."""
        transform = self.transform("value")
        return output if transform is None else transform.back(output.transpose(1, 2)).transpose(1, 2)

    # -- positions --------------------------------------------------------------------------------------------------

    def ordered(self, row: int) -> Tensor | None:
        """Return the column of the token in each slot of a row, after adding the newest slots to its :attr:`order`.

        Returns:
            ``[n]``, or ``[H, n]`` if heads keep different tokens; None if the slots are in the order of columns.
        """
        order = self.order[row]
        if order is None:
            return None
        missing = sum(self.stores()[0].signature(row)) - order.shape[-1]
        if missing > 0:
            new = torch.arange(self.seen - missing, self.seen).expand(*order.shape[:-1], missing)
            order = self.order[row] = extended(order, new)
        return order

    def positions(self, row: int) -> Tensor:
        """Return the column at which attention sees the token in each slot of a row, even if the slots are in order.

        ``Method.positions`` returns the same, but may return None.

        Returns:
            ``[n]``, or ``[H, n]`` if heads keep different tokens, on the CPU.
        """
        order = self.method.positions(self, row)
        if order is not None:
            return order
        return torch.arange(self.first(row), self.seen)

    def hidden_slots(self, row: int, hidden: int) -> int:
        """Return how many slots at the front of a row hold only tokens outside the sliding window, in every head.

        `hidden` is the number of the row's oldest tokens that count as outside (:meth:`hidden`, or fewer).
        """
        positions = self.positions(row)
        if positions.ndim > 1:
            positions = positions.amax(0)
        return int((positions < self.start(row) + hidden).to(torch.uint8).cumprod(0).sum())

    def start(self, row: int) -> int:
        """Return the column of a row's first real token, which is also the number of its padding tokens."""
        starts = self.progress.padding.starts
        return starts[row] if starts else 0

    def first(self, row: int) -> int:
        """Return the column of the token in a row's first slot, for slots in the order of columns without a gap.

        It is greater than :meth:`start` if tokens that left a sliding window have been dropped.
        """
        return self.seen - sum(self.stores()[0].signature(row))

    # -- counts -----------------------------------------------------------------------------------------------------

    def real_tokens(self, row: int) -> int:
        """Return how many tokens a row has seen so far, not counting padding."""
        return self.seen - self.start(row)

    def hidden(self, row: int) -> int:
        """Return how many of a row's oldest tokens are outside the sliding window of every future query.

        This is 0 without a sliding window.
        """
        return 0 if self.window is None else max(self.real_tokens(row) - (self.window - 1), 0)

    def visible_tokens(self, row: int) -> int:
        """Return how many tokens of a row the next one will see, as many as transformers' cache would keep."""
        return self.real_tokens(row) - self.hidden(row)

    def expected_length(self) -> int:
        """Return the number of tokens per row to allocate buffers for.

        This is ``max_length``, or :attr:`seen` if that is more. With a sliding window, it is at most
        :func:`kvbench.cache.sliding.room`.
        """
        expected = max(self.progress.max_length or 0, self.seen)
        return expected if self.window is None else min(expected, sliding.room(self.window))

    def coming(self) -> int:
        """Return how many more tokens a row may get before it has ``max_length``; 0 if ``max_length`` is unknown."""
        return max((self.progress.max_length or 0) - self.seen, 0)

    def new_empty(self) -> Tensor:
        """Return a tensor of size 0 that carries the layer's dtype and device."""
        return torch.empty(0, dtype=self.dtype, device=self.device)

    def chain(self) -> list[Self]:
        """Return the layers that get this prompt: this one and its :attr:`follower`, if it has one."""
        return [self] if self.follower is None else [self, self.follower]
