"""Cocktail's plans: the chunks of a prompt, the width of each, and where their tokens are stored."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from kvbench.methods.state import CacheState
from kvbench.util.lazy import lazy

if TYPE_CHECKING:
    import torch

    from kvbench.retrieval.chunks import Chunked
    from kvbench.retrieval.search import Widths
else:
    torch = lazy("torch")


class Run(NamedTuple):
    """Consecutive tokens of one width: `bits` (16: exact), the first token, and the one after the last."""

    bits: int
    first: int
    stop: int


@dataclass(frozen=True, eq=False)
class ChunkPlan:
    """Chunks of one prompt and the bit width of each; two plans are equal only if they are the same object.

    Args:
        chunks: spans of the context.
        widths: bits of each chunk.
        last_layer: number of the layer whose prompt is placed last; cached indices are freed then. None: they are never
            freed.
    """

    chunks: Chunked
    widths: Widths
    last_layer: int | None = None
    _orders: dict[tuple[int, int], tuple[list[int], list[int], list[int]]] = field(
        default_factory=dict, init=False, repr=False
    )
    _indices: dict[tuple[int, int, torch.device], list[torch.Tensor]] = field(
        default_factory=dict, init=False, repr=False
    )

    def tokens(self, bits: int) -> list[int]:
        """Return the tokens of all chunks of one width, in their order."""
        spans = zip(self.chunks.spans, self.widths.bits, strict=True)
        return [token for (first, last), width in spans if width == bits for token in range(first, last)]

    def order(self, length: int, hidden: int = 0) -> tuple[list[int], list[int], list[int]]:
        """Return a prompt's tokens by segment: INT2 chunks, INT4 chunks, and everything that stays exact.

        Args:
            length: tokens of the prompt.
            hidden: number of oldest tokens that a sliding window has passed; chunks and exact tokens among them are
                left out.
        """
        if (length, hidden) not in self._orders:  # cached: the same for every layer
            two, four = self.tokens(2), self.tokens(4)
            packed = {*two, *four}
            exact = [token for token in range(hidden, length) if token not in packed]
            last = {token: stop for start, stop in self.chunks.spans for token in range(start, stop)}
            two, four = ([token for token in part if last[token] > hidden] for part in (two, four))
            self._orders[length, hidden] = two, four, exact
        return self._orders[length, hidden]

    def indices(self, length: int, device: torch.device, hidden: int = 0) -> list[torch.Tensor]:
        """Return :meth:`order` as indices (int32) on `device`, cached for all layers."""
        key = (length, hidden, device)
        if key not in self._indices:
            with torch.inference_mode(False):
                self._indices[key] = [
                    torch.tensor(part, dtype=torch.int32, device=device) for part in self.order(length, hidden)
                ]
        return self._indices[key]

    def placed(self, layer: int) -> None:
        """Free the indices if `layer`, which has been placed, is the last one."""
        if layer == self.last_layer:
            self._indices.clear()

    def passed(self, hidden: int) -> int:
        """Return how many of the `hidden` oldest tokens can be dropped without splitting a packed chunk."""
        for (first, stop), bits in zip(self.chunks.spans, self.widths.bits, strict=True):
            if first < hidden < stop and bits < 16:
                return first
        return hidden

    def runs(self, length: int, hidden: int = 0) -> list[Run]:
        """Return a prompt's tokens as runs of one width, in text order; the last run is exact and may be empty.

        Args:
            length: tokens of the prompt.
            hidden: number of oldest tokens that a sliding window has passed (:meth:`passed` leaves them out).
        """
        end = self.passed(hidden)
        runs: list[Run] = []
        for (first, stop), bits in zip(self.chunks.spans, self.widths.bits, strict=True):
            if bits == 16 or first < end:
                continue
            if first > end:
                runs.append(Run(16, end, first))
            elif runs and runs[-1].bits == bits:
                first = runs.pop().first
            runs.append(Run(bits, first, stop))
            end = stop
        return [*runs, Run(16, end, length)]


def aligned(rows: Sequence[Sequence[Run]]) -> tuple[list[tuple[int, int]], list[list[int]]]:
    """Assign the runs of several rows to segments that all rows share, in the order of each row's text.

    A row has no tokens in the segments that only other rows need. Each row's last run is left out, as it is stored in
    the tail.

    Returns:
        Bits and tokens (of the longest row) of each segment; and for each row the number of each run's segment.
    """
    numbers: list[list[int]] = [[] for _ in rows]
    segments: list[tuple[int, int]] = []
    while True:
        coming = [
            (row, runs[len(taken)])
            for row, (runs, taken) in enumerate(zip(rows, numbers, strict=True))
            if len(taken) < len(runs) - 1
        ]
        if not coming:
            return segments, numbers
        bits = Counter(run.bits for _, run in coming).most_common(1)[0][0]
        chosen = [(row, run) for row, run in coming if run.bits == bits]
        for row, _ in chosen:
            numbers[row].append(len(segments))
        segments.append((bits, max(run.stop - run.first for _, run in chosen)))


@dataclass
class Plans(CacheState):
    """The plans of a batch, row by row."""

    rows: list[ChunkPlan]

    def select(self, order: Sequence[int]) -> None:
        """Replace the batch by its rows `order`."""
        self.rows = [self.rows[row] for row in order]

    def clone(self) -> Plans:
        """Return a copy with a list of its own."""
        return Plans(list(self.rows))
