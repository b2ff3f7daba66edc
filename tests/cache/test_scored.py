"""Tokens with the attention that they have received (H2O): scores go wherever their tokens go."""

from __future__ import annotations

import torch

from kvbench.cache.segments.scored import ScoredSegment
from tests import zoo

ALL, ONE = slice(None), slice(0, 1)


def segment(tokens: int = 6, scores: int = 1) -> tuple[ScoredSegment, torch.Tensor, torch.Tensor]:
    """A segment of two rows, its tokens and their scores ``[B, H, n, scores]``."""
    segment = ScoredSegment(2, 2, 32, torch.float16, "cpu", capacity=10)
    x = zoo.random_kv(tokens, 2)[0].half()
    segment.append(ALL, x)
    assert not segment.commit(ALL).any()  # new tokens have received nothing
    start = torch.rand(2, 2, tokens, scores, generator=torch.Generator().manual_seed(1))
    segment.begin(ALL, start)
    return segment, x, start


def test_scores_are_kept_in_fp32_one_or_several_per_token():
    for scores in (1, 3):
        made, _, start = segment(scores=scores)
        assert made.commit(ALL).dtype == torch.float32 and torch.equal(made.commit(ALL), start)
        made.append(ALL, zoo.random_kv(1, 2, seed=1)[0].half())
        assert torch.equal(made.commit(ALL), torch.nn.functional.pad(start, (0, 0, 0, 1)))
        assert made.used(0) == {"window": 7 * 2 * 32 * 2, "index": 7 * 2 * (scores + 1) * 4}
        names, buffers = zip(*made.buffers(), strict=True)
        assert names == ("window", "index", "index")
        for buffer, known in zip(buffers, (made, made.scores, made.places), strict=True):
            assert buffer is known.buffer


def test_rows_begin_one_by_one():
    made, _, start = segment(scores=3)
    made.begin(ONE, 2 * start[:1])
    assert torch.equal(made.commit(ALL), torch.cat([2 * start[:1], start[1:]]))


def test_attention_counts_once_it_is_committed():
    made, _, start = segment(scores=3)
    first, second = torch.rand(2, 2, 3, 1, 6), torch.rand(2, 2, 3, 2, 6)
    made.observe(ALL, first)
    made.observe(slice(1, 2), second[1:])
    assert torch.equal(made.scores.view(ALL), start)
    wanted = start + first.sum(3).transpose(2, 3)
    wanted[1] += second[1].sum(2).transpose(1, 2)
    assert torch.equal(made.commit(ALL), wanted)
    assert torch.equal(made.commit(ALL), wanted)  # once


def test_attention_of_a_step_is_added_to_the_slots_that_it_saw():
    made, _, start = segment()
    received = torch.rand(2, 2, 1, 1, 6)
    made.observe(ALL, received)
    made.append(ALL, zoo.random_kv(2, 2, seed=1)[0].half())
    wanted = torch.nn.functional.pad(start + received.sum(3).transpose(2, 3), (0, 0, 0, 2))
    assert torch.equal(made.commit(ALL), wanted)


def test_tokens_that_leave_at_the_front_take_their_scores_and_pending_attention_along():
    made, x, start = segment()
    received = torch.rand(2, 2, 1, 1, 6)
    made.observe(ALL, received)
    made.drop_front(ALL, 2)
    assert torch.equal(made.view(ALL), x[:, :, 2:])
    assert torch.equal(made.commit(ALL), (start + received.sum(3).transpose(2, 3))[:, :, 2:])


def test_tokens_that_stay_keep_their_scores():
    made, x, start = segment(scores=3)
    received = torch.rand(2, 2, 3, 1, 6)
    made.observe(ALL, received)
    index = torch.tensor([[4, 0, 5], [1, 2, 3]])
    made.keep(ALL, index)
    wanted = start + received.sum(3).transpose(2, 3)
    for head in range(2):
        assert torch.equal(made.view(ALL)[:, head], x[:, head, index[head]])
        assert torch.equal(made.commit(ALL)[:, head], wanted[:, head, index[head]])
    made.keep(ONE, torch.tensor([[[2], [0]]]))  # of one row, another for each head
    assert made.lengths == made.scores.lengths == [1, 3]
    assert torch.equal(made.commit(ONE)[0, 0, 0], wanted[0, 0, 5])
    assert torch.equal(made.commit(ONE)[0, 1, 0], wanted[0, 1, 1])


def test_a_whole_step_that_is_taken_back_leaves_no_attention():
    made, _, start = segment()
    for count in (2, 1):
        made.append(ALL, zoo.random_kv(count, 2, seed=count)[0].half())
        made.observe(ALL, torch.rand(2, 2, 1, count, made.length(ALL)))
    for row in (0, 1):
        made.drop_back(row, 3)
    assert made.lengths == made.scores.lengths == [6, 6] and made.pending == [[], []]
    assert torch.equal(made.commit(ALL), start)


def test_copies_and_chosen_rows_have_scores_and_pending_attention_of_their_own():
    made, _, start = segment()
    received = torch.rand(2, 2, 1, 1, 6)
    made.observe(ALL, received)
    twin = made.clone()
    twin.observe(ALL, received)
    twin.commit(ALL)
    assert torch.equal(made.scores.view(ALL), start) and [len(steps) for steps in made.pending] == [1, 1]
    made.select(torch.tensor([1, 1, 0]))
    wanted = (start + received.sum(3).transpose(2, 3))[[1, 1, 0]]
    made.observe(ONE, received[1:])
    assert [len(steps) for steps in made.pending] == [2, 1, 1]  # rows share no list
    wanted[0] += received[1].sum(2).transpose(1, 2)
    assert torch.equal(made.commit(ALL), wanted) and made.lengths == made.scores.lengths == [6, 6, 6]


def test_a_captured_step_reserves_room_for_scores_and_holds_what_its_buffer_gets():
    made, _, start = segment()
    assert made.advance(2) == [6, 6] and made.lengths == made.scores.lengths == made.places.lengths == [8, 8]
    assert made.seen == [8, 8]
    room = made.room(2)
    assert room.shape == (2, 2, 1, 2, 10) and room.dtype == torch.float32 and made.room(2) is room
    assert made.room(1) is not room and made.room(2, fresh=True) is not room
    room[:] = torch.arange(10.0)
    assert [[held.shape for held in pending] for pending in made.pending] == [[(2, 1, 2, 8)]] * 2
    made.append(ALL, zoo.random_kv(1, 2, seed=1)[0].half())
    wanted = torch.nn.functional.pad(start, (0, 0, 0, 2)) + 2 * torch.arange(8.0)[:, None]
    assert torch.equal(made.commit(ALL), torch.nn.functional.pad(wanted, (0, 0, 0, 1)))
    made.advance(40)
    assert made.room(2).shape[-1] == made.capacity > 40 and made.room(2) is not room
