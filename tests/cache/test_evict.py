"""The kernel that adds attention and drops tokens, run by Triton's interpreter, against the segment's operations."""

import pytest
import torch

from tests.attention import interpreter

interpreter.require()

from kvbench.cache.kernels import evict  # noqa: E402
from kvbench.cache.segments.base import FullSegment  # noqa: E402
from kvbench.cache.segments.scored import ScoredSegment  # noqa: E402

TOKENS, BATCH, HEADS = 70, 3, 2


def segments(scores: int = 1, queries: int = 1, ties: bool = False) -> tuple[ScoredSegment, FullSegment]:
    """Keys and values of a step's end: the first tokens have gone, `queries` are new, their attention is pending."""
    rng = torch.Generator().manual_seed(scores + queries)
    keys = ScoredSegment(BATCH, HEADS, 48, torch.float16, "cpu", capacity=90)
    values = FullSegment(BATCH, HEADS, 80, torch.float16, "cpu", capacity=90)
    rows = slice(0, BATCH)
    for segment in (keys, values):
        segment.append(rows, torch.randn(BATCH, HEADS, TOKENS, segment.channels, generator=rng).half())
    start = torch.rand(BATCH, HEADS, TOKENS, scores, generator=rng)
    places = torch.stack([torch.randperm(500, generator=rng)[:TOKENS] for _ in range(BATCH * HEADS)])
    keys.begin(rows, start, places.view(BATCH, HEADS, TOKENS).int(), 500)
    for segment in (keys, values):
        segment.drop_front(rows, 3)
        segment.append(rows, torch.randn(BATCH, HEADS, queries, segment.channels, generator=rng).half())
    room = keys.room(queries)
    room.copy_(torch.rand(room.shape, generator=rng))
    if ties:  # scores that are sums of few halves
        keys.scores.buffer.copy_((keys.scores.buffer * 2).floor() / 2)
        room.copy_((room * 2).floor() / 2)
    keys.hold(room)
    return keys, values


def plainly(keys: ScoredSegment, values: FullSegment, rows: slice, candidates: int, per_query: bool) -> None:
    """Do the same by the segment's operations."""
    newest = keys.seen[rows][0]
    worth = keys.commit(rows).amax(-1)
    if not candidates:
        return
    places = keys.places.view(rows)[..., 0]
    worth = worth / (newest - places) if per_query else worth
    worth, places = worth[..., :candidates], places[..., :candidates]
    lowest = places.masked_fill(worth > worth.amin(-1, keepdim=True), -1).argmax(-1)
    keys.replace(rows, lowest)
    values.replace(rows, lowest)


@pytest.mark.parametrize("rows", [slice(0, 3), slice(1, 2)], ids=["all rows", "one row"])
@pytest.mark.parametrize(
    ("scores", "queries", "candidates", "per_query", "ties"),
    [
        (1, 1, 50, False, False),
        (1, 1, 67, True, False),
        (3, 1, 1, False, False),
        (3, 2, 40, True, False),
        (1, 1, 60, False, True),
        (2, 1, 0, False, False),
    ],
)
def test_what_the_kernel_leaves_is_what_torch_leaves(monkeypatch, scores, queries, candidates, per_query, ties, rows):
    monkeypatch.setattr(evict, "BLOCK", 32)  # several iterations
    mine, theirs = segments(scores, queries, ties), segments(scores, queries, ties)
    evict.drop_lowest(*mine, rows, candidates, per_query=per_query)
    plainly(*theirs, rows, candidates, per_query)
    assert mine[0].lengths == theirs[0].lengths and mine[0].starts == theirs[0].starts
    for found, wanted in zip(mine, theirs, strict=True):
        assert torch.equal(found.view(rows), wanted.view(rows))
    assert torch.equal(mine[0].places.view(rows), theirs[0].places.view(rows))
    torch.testing.assert_close(mine[0].scores.view(rows), theirs[0].scores.view(rows))
    assert mine[0].commit(rows) is not None and mine[0].pending[rows.start] == []


def test_of_equal_scores_the_newest_token_goes():
    keys, values = segments()
    rows = slice(0, BATCH)
    keys.scores.buffer.zero_()
    keys.rooms[1].zero_()
    oldest = keys.places_of(0)[:, :50].amax(-1)
    evict.drop_lowest(keys, values, rows, 50)
    for head in range(HEADS):
        assert oldest[head] not in keys.places_of(0)[head]


def test_only_buffers_of_a_gpu_with_one_pending_step_are_served():
    keys, values = segments()
    assert not evict.can_drop_lowest(keys, values, slice(0, BATCH))
