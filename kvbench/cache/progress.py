"""State that all layers of one cache share: the prompt, its padding, options and settings, the method's own state.

The options say which kernels serve the cache and how its prompt is computed.

Layers that hold pre-RoPE keys need the rotary position of each column of the cache. The position ids that a model is
given need not equal the columns minus the padding: a caller may omit them, or reuse a cache. So the ids of each step
are recorded, on the host, as runs of consecutive positions.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from torch import Tensor

from kvbench.cache.kernels.jobs import Deferred
from kvbench.cache.kernels.pack_together import Job, Thin
from kvbench.cache.kernels.roll_together import Roll
from kvbench.cache.policy import CacheState
from kvbench.cache.prompts import Prompts
from kvbench.cache.segments.packed import HostPacker
from kvbench.cache.watch import Watches
from kvbench.errors import CacheError

Kernels = Literal["auto", "cuda", "triton", "cpu", "reference"]
Backend = Literal["auto", "stock"]


@dataclass(frozen=True)
class Options:
    """Choice of kernels and of the prefill of a cache; ``cache.options = Options(...)`` sets it.

    Args:
        kernels: kernel that computes attention in decode steps. ``auto``: in a layer with packed tokens, and in all
            layers of a step that is recorded as a CUDA graph, the fastest that can serve the step; in other layers,
            torch's SDPA. ``cuda``, ``triton`` or ``cpu``: this kernel in all layers, or attention in plain torch where
            it cannot serve the step. ``reference``: always attention in plain torch.
        prefill: back end of torch's SDPA for the prompt. ``auto``: the fastest. ``stock``: the one that torch chooses.
        mlp_chunk: number of prompt tokens that feed-forward layers and RoPE process at a time, to save memory
            (:mod:`kvbench.decoding.passes`). ``auto``: 8192 for prompts of more than 16384 tokens, else all at once.
            None: always all at once.
    """

    kernels: Kernels = "auto"
    prefill: Backend = "auto"
    mlp_chunk: int | Literal["auto"] | None = "auto"


@dataclass
class RopePositions:
    """The RoPE position of each column of a batch, row by row.

    Args:
        runs: for each row, ascending pairs (column, position). Each begins a run of columns in which the position grows
            by one per column; the run ends where the next one begins.
    """

    runs: list[list[tuple[int, int]]] = field(default_factory=list)

    def see(self, ids: Tensor, first: int, starts: Sequence[int]) -> None:
        """Record the position ids that the model used for new tokens, ``[B or 1, q]``.

        Whatever was recorded for these and later columns is replaced.

        Args:
            first: column of the first new token.
            starts: for each row, the column of its first real token; positions of padding are not recorded.
        """
        if len(self.runs) != len(starts):
            self.runs = [[] for _ in starts]
        ids = ids.expand(len(starts), -1).cpu()
        for row, start in enumerate(starts):
            runs = self.runs[row]
            del runs[bisect_left(runs, (first, -1)) :]
            begin = max(start - first, 0)
            row_ids = ids[row, begin:]
            if not len(row_ids):
                continue
            breaks = [0, *((row_ids.diff() != 1).nonzero().flatten() + 1).tolist()]
            for place in breaks:
                column, position = first + begin + place, int(row_ids[place])
                # a step that goes on where the last one ended needs no run of its own
                if not runs or position - column != runs[-1][1] - runs[-1][0]:
                    runs.append((column, position))

    def at(self, row: int, columns: Tensor) -> Tensor:
        """Return the RoPE positions of some columns of a row, both int64 ``[n]`` on the CPU; 0 for padding."""
        runs = self.runs[row]
        if len(runs) == 1:
            return (columns + (runs[0][1] - runs[0][0])).clamp_(min=0)
        begins = torch.tensor([column for column, _ in runs])
        offsets = torch.tensor([0, *(position - column for column, position in runs)])
        which = torch.searchsorted(begins, columns, right=True)
        return torch.where(which > 0, columns + offsets[which], 0)

    def shift(self, by: Sequence[int]) -> None:
        """Shift the tokens of each row right by a number of columns, behind new padding; position ids do not change.

        Needed after a rollback in which rows lose different numbers of tokens: rows that lose more get more padding on
        the left.
        """
        self.runs = [[(c + n, p) for c, p in runs] for runs, n in zip(self.runs, by, strict=True)]

    def select(self, order: Sequence[int]) -> None:
        """Reorder the rows of the batch; `order` gives the old row of each new one."""
        if self.runs:
            self.runs = [list(self.runs[i]) for i in order]

    def clone(self) -> RopePositions:
        """Return an independent copy of the positions."""
        return RopePositions([list(runs) for runs in self.runs])


@dataclass
class Padding:
    """The left padding of each row of a batch, taken from the prompts or inferred from the attention mask.

    Args:
        starts: for each of the B rows, the column of its first real token; None until the first tokens arrive.
        started: for each row, True once its first real token has arrived, so that no later token may be padding. Used
            only for inference from the mask; None before that.
    """

    starts: list[int] | None = None
    started: list[bool] | None = None

    def infer(self, mask: Tensor | None, batch: int, count: int) -> None:
        """Find the left padding of a prompt, or of its next chunk of `count` tokens, from the attention mask.

        A token is real if the mask (as for :func:`self_visible`) lets it attend to itself. The diagonal of the new
        columns shows this even if the model has a sliding window. A mask of None means that no token is padding.

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
        """Reorder the rows of the batch; `order` gives the old row of each new one."""
        if self.starts is not None:
            self.starts = [self.starts[i] for i in order]
        if self.started is not None:
            self.started = [self.started[i] for i in order]

    def clone(self) -> Padding:
        """Return a copy that shares no list with the original."""
        return Padding(
            None if self.starts is None else list(self.starts), None if self.started is None else list(self.started)
        )


@dataclass
class Prefill:
    """Progress of a cache's prefill, with the known facts about its prompts.

    Args:
        prompts: the prompts for which the caller made the cache; None if only the attention mask shows their padding.
        open: True while more chunks of the prompt may follow, that is, from ``cache.open_prefill()`` to
            ``cache.finalize()``.
        group: if the batch is prefilled a few rows at a time, the rows that are being prefilled now and the number of
            rows in the whole batch; else None.
        path: name of the implementation that computed the prompt's attention, for reports: a name that
            :func:`kvbench.attention.prefill.attend_prompt` returned, or ``stored`` if the prompt attended to quantized
            keys and values (``Method.quantized_prefill``). Empty before the first prompt token.
    """

    prompts: Prompts | None = None
    open: bool = False
    group: tuple[slice, int] | None = None
    path: str = ""

    @property
    def width(self) -> int | None:
        """Number of columns of the padded prompt; None if the cache was made without prompts."""
        return self.prompts.width if self.prompts is not None else None

    def is_last(self, seen: int) -> bool:
        """Return True if no more prompt tokens will follow after the first `seen` columns.

        If the cache was made without prompts, this is assumed unless the prefill is :attr:`open`.

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
    """State of a cache that does not belong to a single layer; all its layers hold the same object.

    Args:
        max_length: number of tokens (prompt and answer) to allocate for; None if unknown.
        positions: RoPE position of each column; recorded only if the cache holds pre-RoPE keys.
        rope_from: index of the first layer that holds pre-RoPE keys, if any does.
        storage: dtype of what is stored in full precision, to which new keys and values are rounded before anything
            reads them; None: the dtype in which they arrive.
        method_state: what the method itself remembers about this cache (Cocktail's plans, KVQuant's calibration file,
            ...); None if nothing.
        frozen: True while nothing may be packed or dropped, because the newest tokens may still be taken back
            (speculative decoding).
        upper: True while attention decodes only the upper 4 bits of each 8-bit code, as QuantSpec's draft does.
        packer: packs tokens on a CPU (:attr:`kvbench.cache.segments.packed.PackedSegment.packer`); None: torch does.
        rank: under tensor parallelism, the number of this process and the number of processes among which the KV heads
            are divided; ``(0, 1)`` for a process that has all heads.
        span: number of tokens after which a forward pass over known tokens (perplexity) stops to let the method pack or
            drop tokens, so that it gives the same results as decoding token by token. None: no stops, so the new tokens
            of a step see each other in full precision.

    Attributes:
        watches: where kernels record NaN and Inf.
        packs, rolls: queues that collect the packing of tokens and the moves of rolling windows from several layers,
            for one kernel launch.
        tables: tables in device memory that tell attention kernels how many tokens of each format a row has, and where.
            Layers with equal tables share one (:func:`kvbench.attention.phases.shared_table`).
        placed: the phases of layers, by the numbers of tokens in their segments
            (:func:`kvbench.attention.phases.shared_phases`).
        plans: what the queries of the current pass over known tokens see, for layers that hold the same tokens in the
            same formats (:mod:`kvbench.attention.foreseen`).
        plain_masks: for each sliding window (None: no window) the last answer of
            :func:`kvbench.attention.fused.plain_mask`, which the other layers of a step reuse: a key for the mask and
            the step, True if the mask is plainly causal, and the mask.
    """

    prefill: Prefill = field(default_factory=Prefill)
    max_length: int | None = None
    options: Options = field(default_factory=Options)
    padding: Padding = field(default_factory=Padding)
    positions: RopePositions = field(default_factory=RopePositions)
    rope_from: int = 0
    storage: torch.dtype | None = None
    method_state: CacheState | None = None
    frozen: bool = False
    upper: bool = False
    packer: HostPacker | None = None
    rank: tuple[int, int] = (0, 1)
    span: int | None = None
    watches: Watches = field(init=False, default_factory=Watches)
    packs: Deferred[Job | Thin] = field(init=False, default_factory=Deferred)
    rolls: Deferred[Roll] = field(init=False, default_factory=Deferred)
    tables: dict[Any, Tensor] = field(init=False, default_factory=dict)
    placed: dict[Any, Any] = field(init=False, default_factory=dict)
    plans: dict[Any, Any] = field(init=False, default_factory=dict)
    plain_masks: dict[int | None, tuple[Any, bool, Tensor]] = field(init=False, default_factory=dict)

    def see(self, mask: Tensor | None, batch: int, count: int) -> None:
        """Record the left padding of `count` new prompt tokens.

        If the cache was made for given prompts (``prefill.prompts``), the padding is taken from them; otherwise it is
        inferred from the mask (:meth:`Padding.infer`). If the batch has several rows for each given prompt (beam
        search), the prompts and the method's state are repeated to match.

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
        """Check that none of the `count` new tokens of a step after the prompt is padding (mask: :func:`self_visible`).

        Raises:
            CacheError: a new token is masked.
        """
        if mask is not None and (count > 1 or batch > 1) and not bool(self_visible(mask, batch, count).all()):
            raise CacheError("there are masked tokens after the prompt: pad the whole conversation once, on the left")

    def reset(self) -> None:
        """Forget padding and RoPE positions, and end chunked prefill, so that the cache can read its prompts again."""
        self.padding, self.positions = Padding(), RopePositions()
        self.prefill.open = False

    def select(self, index: Tensor) -> None:
        """Reorder the rows of the batch; see :meth:`kvbench.cache.KVCache.batch_select_indices`."""
        order = index.tolist()
        self.padding.select(order)
        self.positions.select(order)
        if self.method_state is not None:
            self.method_state.select(order)

    def clone(self) -> Progress:
        """Return a copy for a clone of the cache; changes to the rows of either cache do not affect the other.

        Records of NaN and Inf, deferred jobs, tables in device memory and the last mask are not copied.
        """
        return replace(
            self,
            prefill=replace(self.prefill),
            padding=self.padding.clone(),
            positions=self.positions.clone(),
            method_state=None if self.method_state is None else self.method_state.clone(),
        )


def self_visible(mask: Tensor, batch: int, count: int) -> Tensor:
    """Return which of the newest tokens may attend to themselves: the real ones, as opposed to padding.

    Args:
        mask: attention mask ``[B or 1, heads or 1, q, kv]``, bool (True = attend) or additive; or a padding mask, bool
            ``[B or 1, q]`` (True = real token).
        count: number of new tokens, q.

    Returns:
        bool ``[B, q]``, True for real tokens.
    """
    if mask.ndim == 2:
        return mask[:, -count:].expand(batch, count)
    diagonal = mask[:, 0, :, -count:].diagonal(dim1=-2, dim2=-1)
    if diagonal.dtype != torch.bool:
        diagonal = diagonal > torch.finfo(diagonal.dtype).min / 2
    return diagonal.expand(batch, count)
