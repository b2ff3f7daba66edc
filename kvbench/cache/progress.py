"""State that all layers of one cache share: the prompt, its padding, attention's settings, the method's own state."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from kvbench.cache.kernels.deferred import Deferred
from kvbench.cache.kernels.pack_together import Job
from kvbench.cache.kernels.roll_together import Roll
from kvbench.cache.options import Options
from kvbench.cache.policy import MethodState
from kvbench.cache.prompts import Prompts
from kvbench.cache.rope_positions import RopePositions
from kvbench.cache.watch import Watches
from kvbench.errors import CacheError


@dataclass
class Padding:
    """The left padding of a batch, either known from the prompts or inferred from the attention mask.

    Args:
        starts: for each of the B rows, the column of its first real token; None until the first tokens arrive.
        started: for each row, True once a real token has arrived; None until the padding is inferred from a mask.
    """

    starts: list[int] | None = None
    started: list[bool] | None = None

    def infer(self, mask: Tensor | None, batch: int, count: int) -> None:
        """Infer the padding of new prompt tokens from their attention mask.

        A token is real if it may attend to itself. So the diagonal of the mask over the new columns shows the padding,
        even if the model has a sliding window.

        Args:
            mask: attention mask ``[B or 1, heads or 1, q, kv]``, bool (True = attend) or additive; or a padding mask,
                bool ``[B or 1, q]`` (True = real token); or None if no token is padding.
            batch: number of rows.
            count: number of new tokens, q.

        Raises:
            CacheError: a token after a row's first real token is masked.
        """
        if self.starts is None or self.started is None:
            self.starts, self.started = [0] * batch, [False] * batch
        if mask is None:
            self.started = [True] * batch
            return
        for row, real in enumerate(self_visible(mask, batch, count).tolist()):
            padding = 0 if self.started[row] else next((i for i, r in enumerate(real) if r), count)
            if not all(real[padding:]):
                raise CacheError(
                    f"row {row} has masked tokens after its first real token, but kvbench supports only left padding "
                    "(tokenizer.padding_side='left'; a later turn must not be padded)"
                )
            self.starts[row] += padding
            self.started[row] = self.started[row] or padding < count

    def select(self, order: Sequence[int]) -> None:
        """Reorder the rows of the batch; rows may also be dropped or repeated.

        Args:
            order: for each row of the new batch, the index of its row in the old batch.
        """
        if self.starts is not None:
            self.starts = [self.starts[i] for i in order]
        if self.started is not None:
            self.started = [self.started[i] for i in order]

    def clone(self) -> Padding:
        """Return an independent copy of the padding."""
        return Padding(
            None if self.starts is None else list(self.starts), None if self.started is None else list(self.started)
        )


@dataclass
class Prefill:
    """The state of a cache's prefill.

    Args:
        prompts: the caller's description of the prompts; None if the padding is inferred from the attention mask.
        open: True if the prompt arrives in chunks, until ``cache.finalize()`` is called.
        group: the rows being prefilled now, and the number of rows in the whole batch; None if all rows are prefilled
            together.
        path: name of the implementation that computed attention over the prompt
            (:func:`kvbench.attention.prefill.attend`). ``stored`` if attention read the tokens as the method stores
            them; empty before the first prompt token.
    """

    prompts: Prompts | None = None
    open: bool = False
    group: tuple[slice, int] | None = None
    path: str = ""

    @property
    def width(self) -> int | None:
        """Number of columns of the padded prompt; None if it is not known beforehand."""
        return self.prompts.width if self.prompts is not None else None

    def is_last(self, seen: int) -> bool:
        """Return True if the prompt is complete.

        Args:
            seen: number of columns that have arrived.

        Raises:
            CacheError: more tokens have arrived than the prompt has.
        """
        if self.width is None:
            return not self.open
        if seen > self.width:
            raise CacheError(
                f"{seen} prompt tokens arrived, but the cache was made for a prompt of {self.width} tokens: "
                "create a new cache for each prompt with method.new_cache"
            )
        return seen == self.width


@dataclass
class Progress:
    """State that all layers of a cache share.

    Args:
        prefill: state of the prefill.
        max_length: number of tokens (prompt and answer) to allocate for; None if unknown.
        options: kernels and back ends that serve the cache.
        padding: left padding of the rows.
        positions: rotary positions of the columns; used only if the cache holds pre-RoPE keys.
        method_state: the method's own state for this cache, apart from its stores (Cocktail's plans, KVQuant's
            calibration file, ...); None if it has none.
        frozen: True while nothing is packed or dropped, because the newest tokens may still be taken back (speculative
            decoding).
        upper: True while attention reads only the upper nibbles of hierarchical 8-bit codes (QuantSpec's draft).
        span: number of new tokens that attention processes at a time. Before each such part, the method packs or drops
            the tokens that are due, so that one forward pass over several known tokens gives the same results as single
            steps. None to process all new tokens of a step at once; they then see each other in full precision.

    Attributes:
        watches: records of NaN and Inf that kernels have noticed.
        packs, rolls: queues of deferred packing and rolling jobs, with which several layers share a kernel launch.
        tables: tables in device memory that tell kernels where the tokens of each format are; layers whose stores agree
            share a table (:mod:`kvbench.attention.phases`).
        plain_mask: the mask that :func:`kvbench.attention.fused.plain` last compared with a plain causal mask: a key
            that identifies it, the result, and the mask itself.
    """

    prefill: Prefill = field(default_factory=Prefill)
    max_length: int | None = None
    options: Options = field(default_factory=Options)
    padding: Padding = field(default_factory=Padding)
    positions: RopePositions = field(default_factory=RopePositions)
    method_state: MethodState | None = None
    frozen: bool = False
    upper: bool = False
    span: int | None = None
    watches: Watches = field(init=False, default_factory=Watches)
    packs: Deferred[Job] = field(init=False, default_factory=Deferred)
    rolls: Deferred[Roll] = field(init=False, default_factory=Deferred)
    tables: dict[Any, Tensor] = field(init=False, default_factory=dict)
    plain_mask: tuple[Any, bool, Tensor] | None = field(init=False, default=None)

    def see(self, mask: Tensor | None, batch: int, count: int) -> None:
        """Record the left padding of new prompt tokens, from the prompts if given, else from the attention mask.

        Args:
            mask: attention mask ``[B or 1, heads or 1, q, kv]``, bool (True = attend) or additive; or a padding mask,
                bool ``[B or 1, q]`` (True = real token); or None if no token is padding.
            batch: number of rows.
            count: number of new tokens, q.

        Raises:
            CacheError: the batch size is not a multiple of the number of prompts, or the padding is not on the left.
        """
        prompts = self.prefill.prompts
        if prompts is None:
            self.padding.infer(mask, batch, count)
            return
        if self.padding.starts is not None:
            return
        times, rest = divmod(batch, len(prompts.starts))
        if rest or not times:
            raise CacheError(
                f"the cache was made for {len(prompts.starts)} prompts, but the batch has {batch} rows.\n"
                "  hint: create the cache with the prompts of this batch: method.new_cache(model, prompts)"
            )
        if times > 1:
            prompts = self.prefill.prompts = prompts.repeat(times)
            if self.method_state is not None:
                self.method_state.select([row // times for row in range(batch)])
        self.padding.starts = list(prompts.starts)

    def check_step(self, mask: Tensor | None, batch: int, count: int) -> None:
        """Raise CacheError if a new token after the prompt is padding.

        Args:
            mask: attention mask of the step, as for :meth:`see`.
            batch: number of rows.
            count: number of new tokens, q.
        """
        if mask is not None and (count > 1 or batch > 1) and not bool(self_visible(mask, batch, count).all()):
            raise CacheError("there are masked tokens after the prompt: pad the whole conversation once, on the left")

    def reset(self) -> None:
        """Prepare for the same prompts again: forget padding and rotary positions, and expect no more chunks."""
        self.padding, self.positions = Padding(), RopePositions()
        self.prefill.open = False

    def select(self, index: Tensor) -> None:
        """Reorder the rows of the batch; rows may also be dropped or repeated.

        Args:
            index: for each row of the new batch, the index of its row in the old batch, ``[new batch]``.
        """
        order = index.tolist()
        self.padding.select(order)
        self.positions.select(order)
        if self.method_state is not None:
            self.method_state.select(order)

    def clone(self) -> Progress:
        """Return an independent copy. Its records of NaN and Inf, deferred jobs and tables are empty."""
        return replace(
            self,
            prefill=replace(self.prefill),
            padding=self.padding.clone(),
            positions=self.positions.clone(),
            method_state=None if self.method_state is None else self.method_state.clone(),
        )


def self_visible(mask: Tensor, batch: int, count: int) -> Tensor:
    """Return for each new token whether it may attend to itself: True for real tokens, False for padding.

    Args:
        mask: attention mask ``[B or 1, heads or 1, q, kv]``, bool (True = attend) or additive; or a padding mask, bool
            ``[B or 1, q]`` (True = real token).
        batch: number of rows.
        count: number of new tokens, q.

    Returns:
        bool ``[B, q]``.
    """
    if mask.ndim == 2:
        return mask[:, -count:].expand(batch, count)
    diagonal = mask[:, 0, :, -count:].diagonal(dim1=-2, dim2=-1)
    if diagonal.dtype != torch.bool:
        diagonal = diagonal > torch.finfo(diagonal.dtype).min / 2
    return diagonal.expand(batch, count)
