"""Cocktail without its module II (Table V): chunks stay where they are in the text.

Each run of consecutive chunks of one width is a segment of its own, and so is each run of full-precision tokens between
them. Packed codes are stored in whole tiles of 128 tokens, so the last tile of every packed run is usually incomplete;
its unused bytes are counted as used. Attention reads the runs one by one.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, groupby
from typing import TYPE_CHECKING

from kvbench.methods.cocktail_plan import ChunkPlan, Run, aligned
from kvbench.methods.leaving import CHUNK, TILE, whole

if TYPE_CHECKING:
    import torch

    from kvbench.cache.layer import KVLayer


def runs(layer: KVLayer, plans: Sequence[ChunkPlan]) -> list[list[Run]]:
    """Return :meth:`ChunkPlan.runs` of each row's prompt, without the tokens that the layer's sliding window hides."""
    return [plan.runs(layer.real_tokens(row), whole(layer.hidden(row), CHUNK)) for row, plan in enumerate(plans)]


def place(layer: KVLayer, rows: slice, keys: torch.Tensor, values: torch.Tensor, plans: Sequence[ChunkPlan]) -> None:
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


def forget(layer: KVLayer, rows: slice, hidden: int, plans: Sequence[ChunkPlan]) -> None:
    """Drop the oldest tokens of each row that a sliding window hides; a packed chunk is dropped only as a whole.

    `hidden` is rounded down to a multiple of 32.
    """
    for row in range(*rows.indices(layer.batch)):
        one = slice(row, row + 1)
        count = plans[row].passed(whole(hidden, CHUNK)) - (layer.real_tokens(row) - layer.length(one))
        for store in layer.stores() if count > 0 else ():
            store.drop_front(one, count)


def reading_order(layer: KVLayer, rows: slice) -> list[tuple[int, int]]:
    """Return the slot range ``(first, end)`` of each segment that holds tokens of `rows`, in the order of the text."""
    lengths = [segment.length(rows) for segment in layer.stores()[0].segments]
    return [(stop - length, stop) for length, stop in zip(lengths, accumulate(lengths), strict=True) if length]


def billed(widths: Sequence[int], bits: int, chunk_size: int, key_group: int) -> list[int]:
    """Return for each run of chunks of `bits` bits the number of tokens that its bytes are counted for.

    Codes are stored in whole tiles of 128 tokens, so this is the length of the run, rounded up to whole tiles, or to
    whole key groups if `key_group` is a multiple of 128.
    """
    unit = key_group if key_group % TILE == 0 else TILE
    counts = [sum(1 for _ in run) * chunk_size for width, run in groupby(widths) if width == bits]
    return [-(-count // unit) * unit for count in counts]
