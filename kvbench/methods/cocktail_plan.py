"""Cocktail's plans: the chunks of a prompt, the width of each, and where their tokens are stored.

In place (``reorder=False``), each run of consecutive chunks of one width is a segment of its own, and so is each run of
full-precision tokens between them. Packed codes are stored in whole tiles of 128 tokens, so the last tile of every
packed run is usually incomplete; its unused bytes are counted as used. Attention reads the runs one by one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate, groupby
from typing import TYPE_CHECKING, NamedTuple

from kvbench.cache.policy import CacheState
from kvbench.methods.leaving import CHUNK, TILE, whole_groups
from kvbench.util.lazy import lazy

if TYPE_CHECKING:
    import torch

    from kvbench.cache.layer import KVLayer
    from kvbench.retrieval.chunks import Chunked, Widths
else:
    torch = lazy("torch")


class Run(NamedTuple):
    """Consecutive tokens ``first`` to ``stop - 1`` that are stored with the same bits: 2, 4, or 16 (full precision)."""

    bits: int
    first: int
    stop: int


@dataclass(frozen=True, eq=False)
class ChunkPlan:
    """Chunks of one prompt and the bit width of each. Two plans are equal only if they are the same object.

    Args:
        last_layer: index of the model's last layer. Once it has stored the prompt, the plan frees its cached index
            tensors, which no layer needs any more. None: the plan keeps them.
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
        """Return the token indices of a prompt in three lists: INT2 chunks, INT4 chunks, and all other tokens.

        A sliding window hides the `hidden` oldest tokens. Full-precision tokens among these are left out, and so are
        packed chunks whose tokens are all hidden.
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
        """Return the three lists of :meth:`order` as int32 tensors on `device`, which are made once for all layers."""
        key = (length, hidden, device)
        if key not in self._indices:
            with torch.inference_mode(False):
                self._indices[key] = [
                    torch.tensor(part, dtype=torch.int32, device=device) for part in self.order(length, hidden)
                ]
        return self._indices[key]

    def placed(self, layer: int) -> None:
        """Free the cached index tensors if `layer`, which has just stored its prompt, is the last layer."""
        if layer == self.last_layer:
            self._indices.clear()

    def passed(self, hidden: int) -> int:
        """Return how many of the `hidden` oldest tokens can be dropped without splitting a packed chunk."""
        for (first, stop), bits in zip(self.chunks.spans, self.widths.bits, strict=True):
            if first < hidden < stop and bits < 16:
                return first
        return hidden

    def runs(self, length: int, hidden: int = 0) -> list[Run]:
        """Divide a prompt into runs of consecutive tokens with one bit width, in the order of the text.

        The last run is always one in full precision; it may be empty.

        The `hidden` oldest tokens are left out, except that a packed chunk of which a token is visible is kept whole
        (:meth:`passed`).
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
    """Assign the runs of all rows to segments, which the rows of a batch share.

    A segment takes at most one run of each row, and only runs of its own bit width. A row without a fitting run has no
    tokens in that segment. The last run of each row is not assigned: it belongs in the layer's last segment, which also
    takes generated tokens.

    Returns:
        For each segment, its bits and the largest number of tokens that a row stores in it; and for each row, the
        segment index of each of its runs but the last.
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
        # the width that most rows want next: a greedy choice, for few segments
        bits = Counter(run.bits for _, run in coming).most_common(1)[0][0]
        chosen = [(row, run) for row, run in coming if run.bits == bits]
        for row, _ in chosen:
            numbers[row].append(len(segments))
        segments.append((bits, max(run.stop - run.first for _, run in chosen)))


@dataclass
class Plans(CacheState):
    """Cocktail's per-cache state: the plan of each row of the batch."""

    rows: list[ChunkPlan]

    def select(self, order: Sequence[int]) -> None:
        """See :meth:`CacheState.select`."""
        self.rows = [self.rows[row] for row in order]

    def clone(self) -> Plans:
        """Return a copy whose list of plans can change independently; the plans themselves are shared."""
        return Plans(list(self.rows))


def runs(layer: KVLayer, plans: Sequence[ChunkPlan]) -> list[list[Run]]:
    """Return :meth:`ChunkPlan.runs` of each row's prompt, without the tokens that the layer's sliding window hides."""
    return [plan.runs(layer.real_tokens(row), whole_groups(layer.hidden(row), CHUNK)) for row, plan in enumerate(plans)]


def place_chunks(
    layer: KVLayer, rows: slice, keys: torch.Tensor, values: torch.Tensor, plans: Sequence[ChunkPlan]
) -> None:
    """Store the tokens of prompts in the order of the text, each run of one bit width in a segment of its own.

    `plans` are those of the whole batch, not only of `rows`.
    """
    of_rows = runs(layer, plans)
    _, numbers = aligned(of_rows)
    chosen = range(*rows.indices(layer.batch))
    for row in chosen:
        one = slice(row - chosen.start, row - chosen.start + 1)
        for store, x in zip(layer.stores(), (keys, values), strict=True):
            for number, run in zip([*numbers[row], -1], of_rows[row], strict=True):
                store.segments[number].append(slice(row, row + 1), x[one, :, run.first : run.stop])


def forget_chunks(layer: KVLayer, rows: slice, hidden: int, plans: Sequence[ChunkPlan]) -> None:
    """Drop the oldest tokens of each row that a sliding window hides; a packed chunk is dropped only as a whole.

    `hidden` is rounded down to a multiple of 32.
    """
    for row in range(*rows.indices(layer.batch)):
        one = slice(row, row + 1)
        count = plans[row].passed(whole_groups(hidden, CHUNK)) - (layer.real_tokens(row) - layer.length(one))
        for store in layer.stores() if count > 0 else ():
            store.drop_front(one, count)


def reading_order(layer: KVLayer, rows: slice) -> list[tuple[int, int]]:
    """Return the slot range ``(first, end)`` of each segment that holds tokens of `rows`, in the order of the text."""
    lengths = [segment.length(rows) for segment in layer.stores()[0].segments]
    return [(stop - length, stop) for length, stop in zip(lengths, accumulate(lengths), strict=True) if length]


def billed(widths: Sequence[int], bits: int, chunk_size: int, key_group: int) -> list[int]:
    """Return, for each run of chunks with `bits` bits, the number of tokens for which bytes are counted.

    Codes are stored in whole tiles of 128 tokens, so the number is the length of the run, rounded up to whole tiles, or
    to whole key groups if `key_group` is a multiple of 128.
    """
    unit = key_group if key_group % TILE == 0 else TILE
    counts = [sum(1 for _ in run) * chunk_size for width, run in groupby(widths) if width == bits]
    return [-(-count // unit) * unit for count in counts]
