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
    """Consecutive tokens that are stored with the same number of bits.

    Args:
        bits: bits per element: 2, 4, or 16 for full precision.
        first: index of the first token.
        stop: one past the index of the last token.
    """

    bits: int
    first: int
    stop: int


@dataclass(frozen=True, eq=False)
class ChunkPlan:
    """Chunks of one prompt and the bit width of each. Two plans are equal only if they are the same object.

    Args:
        chunks: the chunks of the context: their spans, texts and query.
        widths: bits of each chunk, and the score thresholds from which they follow.
        last_layer: index of the layer that stores the prompt last. The plan then frees the token indices that it caches
            for all layers. None: it never frees them.
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
        """Return the indices of the tokens of all chunks with `bits` bits, in the order of the text."""
        spans = zip(self.chunks.spans, self.widths.bits, strict=True)
        return [token for (first, last), width in spans if width == bits for token in range(first, last)]

    def order(self, length: int, hidden: int = 0) -> tuple[list[int], list[int], list[int]]:
        """Return the indices of a prompt's tokens in three lists: INT2 chunks, INT4 chunks, and all other tokens.

        Args:
            length: number of tokens of the prompt.
            hidden: number of oldest tokens that a sliding window hides. Hidden tokens in full precision are left out,
                and so are packed chunks whose tokens are all hidden.
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
        """Return the three lists of :meth:`order` as int32 tensors on `device`; cached, because all layers use them."""
        key = (length, hidden, device)
        if key not in self._indices:
            with torch.inference_mode(False):
                self._indices[key] = [
                    torch.tensor(part, dtype=torch.int32, device=device) for part in self.order(length, hidden)
                ]
        return self._indices[key]

    def placed(self, layer: int) -> None:
        """Free the cached indices if the layer that has just stored its prompt, `layer`, is the last one."""
        if layer == self.last_layer:
            self._indices.clear()

    def passed(self, hidden: int) -> int:
        """Return how many of the oldest tokens can be dropped without splitting a packed chunk.

        Args:
            hidden: number of oldest tokens that a sliding window hides; the result is at most this number.
        """
        for (first, stop), bits in zip(self.chunks.spans, self.widths.bits, strict=True):
            if first < hidden < stop and bits < 16:
                return first
        return hidden

    def runs(self, length: int, hidden: int = 0) -> list[Run]:
        """Return a prompt's tokens as runs of one width, in text order; the last has full precision and may be empty.

        Args:
            length: number of tokens of the prompt.
            hidden: number of oldest tokens that a sliding window hides. They are left out, apart from those in a packed
                chunk that is still partly visible (:meth:`passed`).
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
    """Assign the runs of several rows to a common list of segments, in the order of each row's text.

    A row has no tokens in a segment that only other rows use. The last run of each row is not assigned, because it is
    stored in the last segment of the layer.

    Returns:
        For each segment its bits and the largest number of tokens that a row stores in it; and for each row a list with
        the index of the segment of each run.
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
    """Cocktail's state for one cache: the plan of each row of the batch."""

    rows: list[ChunkPlan]

    def select(self, order: Sequence[int]) -> None:
        """Reorder the rows of the batch; rows may also be dropped or repeated.

        Args:
            order: for each row of the new batch, the index of its row in the old batch.
        """
        self.rows = [self.rows[row] for row in order]

    def clone(self) -> Plans:
        """Return a copy whose list of plans can change independently; the plans themselves are shared."""
        return Plans(list(self.rows))
