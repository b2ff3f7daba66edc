"""What the layers of one cache share about the prompt: its padding and whether it is complete."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kvbench.cache.options import Options
from kvbench.cache.prompts import Prompts
from kvbench.cache.rope import RopePositions
from kvbench.errors import CacheError


@dataclass
class Progress:
    """State of the prompt.

    Args:
        prompts: what the caller told about the prompts; None where they are inferred from the mask.
        max_length: tokens of prompt and answer to allocate for, where known.
        open: the prompt comes in chunks and ends at ``cache.finalize()``.
        starts: left padding of each row; None until the first tokens are seen (then a list of B).
        plans: what the method decided for each row before the prefill (chunk widths), or None.
        started: for each row, whether a real token was seen already (while the padding is being inferred).
        held: nothing is demoted for now: the newest tokens may still be taken back (speculative decoding).
        turn: moves keys of the model on by some positions (`Rotary.turn`), for methods that
            re-assign positions; or None.
        upper: attention reads the upper nibble alone of codes that have one (QuantSpec's draft).
        calibration: file of the method's thresholds and codebooks (KVQuant), or None.
        positions: rotary positions of the columns, where keys are stored before RoPE.
        group: the rows whose prompts are under way, and how many rows there are in all; None: all rows at once.
        team: the processes that hold the other heads (:class:`kvbench.parallel.team.Team`), or None: all are here.
        span: new tokens of a step that attention takes at a time, each part as if it were a step of its own, settled
            before it: what one pass of the model over several known tokens needs to give what single steps give; None:
            all of a step's tokens see each other exact.
        prefill: what served the prompt's attention (:func:`kvbench.attention.prefill.attend`); ``stored`` where it read
            what the method stores; empty before.
        options: kernels and back ends that serve the cache.
    """

    prompts: Prompts | None = None
    max_length: int | None = None
    open: bool = False
    starts: list[int] | None = None
    started: list[bool] | None = None
    plans: list[Any] | None = None
    held: bool = False
    turn: Any = None
    upper: bool = False
    calibration: Path | None = None
    positions: RopePositions = field(default_factory=RopePositions)
    group: tuple[slice, int] | None = None
    team: Any = None
    span: int | None = None
    prefill: str = ""
    options: Options = field(default_factory=Options)

    @property
    def prompt_width(self) -> int | None:
        """Columns of the prompt, where known beforehand."""
        return self.prompts.width if self.prompts is not None else None

    def is_last(self, seen: int) -> bool:
        """Whether the prompt is complete once `seen` columns have arrived."""
        if self.prompt_width is None:
            return not self.open
        if seen > self.prompt_width:
            raise CacheError(
                f"{seen} prompt tokens arrived but the cache was made for a prompt of {self.prompt_width}: "
                "make a new cache for each prompt (method.new_cache)"
            )
        return seen == self.prompt_width

    def see(self, mask: Tensor | None, batch: int, count: int) -> None:
        """Learn the padding from the mask of new prompt tokens.

        A token is real when it may attend to itself, so the mask's diagonal over the new columns tells the padding,
        whatever window the model has.

        Args:
            mask: ``[B or 1, heads or 1, q, kv]``, bool (True = attend) or additive; the padding itself, bool
                ``[B or 1, q]``; or None (nothing is padding).
            batch: rows.
            count: new tokens, q.
        """
        if self.prompts is not None:
            if self.starts is None:
                times, rest = divmod(batch, len(self.prompts.starts))
                if rest or not times:
                    raise CacheError(
                        f"the cache was made for {len(self.prompts.starts)} prompts but the batch has {batch} rows"
                    )
                if times > 1:
                    self.prompts = self.prompts.repeat(times)
                    self.plans = self.plans and [plan for plan in self.plans for _ in range(times)]
                self.starts = list(self.prompts.starts)
            return
        if self.starts is None or self.started is None:
            self.starts, self.started = [0] * batch, [False] * batch
        if mask is None:
            self.started = [True] * batch
            return
        for row, real in enumerate(self_visible(mask, batch, count).tolist()):
            padding = 0 if self.started[row] else next((i for i, r in enumerate(real) if r), count)
            if not all(real[padding:]):
                raise CacheError(
                    f"row {row} has masked tokens after its first real one: kvbench takes left padding only "
                    "(tokenizer.padding_side='left'; a later turn must not be padded)"
                )
            self.starts[row] += padding
            self.started[row] = self.started[row] or padding < count

    def check_step(self, mask: Tensor | None, batch: int, count: int) -> None:
        """Raise CacheError when new tokens after the prompt are padding."""
        if mask is not None and (count > 1 or batch > 1) and not bool(self_visible(mask, batch, count).all()):
            raise CacheError("masked tokens after the prompt: pad the whole conversation on the left, once")

    def select(self, index: Tensor) -> None:
        """Rows `index` become the batch."""
        order = index.tolist()
        if self.starts is not None:
            self.starts = [self.starts[i] for i in order]
        if self.started is not None:
            self.started = [self.started[i] for i in order]
        if self.plans is not None:
            self.plans = [self.plans[i] for i in order]
        self.positions.select(order)

    def clone(self) -> Progress:
        """An independent copy."""
        return replace(
            self,
            starts=None if self.starts is None else list(self.starts),
            started=None if self.started is None else list(self.started),
            positions=self.positions.clone(),
        )


def self_visible(mask: Tensor, batch: int, count: int) -> Tensor:
    """For each new token whether it may attend to itself, bool ``[B, q]``; `mask` as in :meth:`Progress.see`."""
    if mask.ndim == 2:
        return mask[:, -count:].expand(batch, count)
    diagonal = mask[:, 0, :, -count:].diagonal(dim1=-2, dim2=-1)
    if diagonal.dtype != torch.bool:
        diagonal = diagonal > torch.finfo(diagonal.dtype).min / 2
    return diagonal.expand(batch, count)
