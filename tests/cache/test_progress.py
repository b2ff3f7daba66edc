"""State that the layers of a cache share: padding as masks or prompts show it, and the progress of the prefill."""

from __future__ import annotations

import pytest
import torch

from kvbench.cache import Prompts
from kvbench.cache.progress import Options, Padding, Prefill, Progress, self_visible
from kvbench.errors import CacheError

LEAST = torch.finfo(torch.float32).min


class Rows:
    """State of a method that records which rows it was asked to keep."""

    def __init__(self, rows: list[int]) -> None:
        self.rows = rows

    def select(self, order) -> None:
        self.rows = [self.rows[i] for i in order]

    def clone(self) -> Rows:
        return Rows(list(self.rows))


@pytest.mark.parametrize("chunks", [(12,), (4, 4, 4), (2, 3, 7), (1,) * 12])
@pytest.mark.parametrize("square", [False, True])
def test_padding_is_learnt_over_all_chunks_of_a_prompt(chunks, square):
    padding, progress, seen = [0, 5, 8, 4], Progress(Prefill(open=True)), 0
    real = torch.arange(12) >= torch.tensor(padding)[:, None]
    for count in chunks:
        mask = real[:, : seen + count]
        if square:
            mask = mask[:, None, None] & torch.ones(count, seen + count).tril(seen).bool()
        progress.see(mask, 4, count)
        seen += count
        assert progress.padding.starts == [min(each, seen) for each in padding]


def test_without_a_mask_no_token_is_padding_now_or_later():
    padding = Padding()
    padding.infer(None, 2, 3)
    assert (padding.starts, padding.started) == ([0, 0], [True, True])
    with pytest.raises(CacheError, match=r"row 1 has masked tokens after its first real token, .*only left padding"):
        padding.infer(torch.tensor([[1, 1], [0, 1]]).bool(), 2, 2)


def test_padding_behind_a_real_token_is_refused():
    for mask in ([[1, 1, 1], [0, 1, 0]], [[1, 1, 1], [1, 0, 1]]):
        with pytest.raises(CacheError, match=r"row 1 has masked tokens .*a later turn must not be padded"):
            Padding().infer(torch.tensor(mask).bool(), 2, 3)
    for padding in (Padding(), Padding([9, 9])):  # the first mask decides
        padding.infer(torch.tensor([[0, 0, 0], [0, 1, 1]]).bool(), 2, 3)
        assert (padding.starts, padding.started) == ([3, 1], [False, True])


def test_padding_of_rows_is_chosen_and_copied():
    padding = Padding([0, 5, 2], [True, False, True])
    twin = padding.clone()
    padding.select([2, 2, 1])
    assert (padding.starts, padding.started) == ([2, 2, 5], [True, True, False])
    assert (twin.starts, twin.started) == ([0, 5, 2], [True, False, True])
    empty = Padding()
    empty.select([0, 0])
    assert (empty.starts, empty.started) == (None, None) == (empty.clone().starts, empty.clone().started)


def test_a_token_is_real_if_it_may_attend_to_itself():
    additive = torch.full((1, 1, 5, 7), LEAST)
    additive[0, 0, torch.arange(5), torch.arange(2, 7)] = torch.tensor([0.0, -100.0, LEAST, -torch.inf, 0.9 * LEAST])
    assert self_visible(additive, 3, 5).tolist() == [[True, True, False, False, False]] * 3
    assert self_visible(additive.half().clamp(min=-65504.0), 1, 5).tolist() == [[True, True, False, False, False]]
    square = torch.zeros(2, 1, 3, 5).bool()
    square[1, 0, 1, 3] = True
    assert self_visible(square, 2, 3).tolist() == [[False] * 3, [False, True, False]]
    assert self_visible(torch.tensor([[0, 0, 1, 1]]).bool(), 2, 3).tolist() == [[False, True, True]] * 2


def test_a_prompt_is_complete_at_its_width_or_when_its_end_is_announced():
    assert (
        Prefill().path == "" and Prefill().is_last(5) and not Prefill(open=True).is_last(5) and Prefill().width is None
    )
    prefill = Prefill(Prompts([0, 2], [6, 4]), open=True)
    assert prefill.width == 6
    assert [prefill.is_last(seen) for seen in (5, 6)] == [False, True]
    with pytest.raises(CacheError, match=r"7 prompt tokens arrived, .*a prompt of 6 tokens.*method\.new_cache"):
        prefill.is_last(7)


def test_prompts_give_the_padding_and_are_repeated_for_an_expanded_batch():
    prompts, state = Prompts([2, 0], [4, 6], queries=["a", "b"]), Rows([10, 11])
    progress = Progress(Prefill(prompts), method_state=state)
    progress.see(torch.zeros(2, 6).bool(), 2, 6)  # the mask is not asked
    assert progress.padding.starts == [2, 0] and progress.prefill.prompts is prompts and state.rows == [10, 11]
    assert progress.padding.starts is not prompts.starts
    progress.padding.starts = [3, 1]
    progress.see(None, 2, 6)  # known already: tokens may have been taken back since
    assert progress.padding.starts == [3, 1]
    progress = Progress(Prefill(prompts), method_state=state)
    progress.see(None, 6, 6)
    assert progress.padding.starts == [2, 2, 2, 0, 0, 0] and state.rows == [10, 10, 10, 11, 11, 11]
    assert progress.prefill.prompts is not None and progress.prefill.prompts.queries == ["a"] * 3 + ["b"] * 3
    Progress(Prefill(prompts)).see(None, 4, 6)  # a method without a state
    for batch in (1, 3):
        with pytest.raises(CacheError, match=f"made for 2 prompts, but the batch has {batch} rows"):
            Progress(Prefill(prompts)).see(None, batch, 6)


def test_new_tokens_after_the_prompt_must_not_be_padding():
    progress = Progress()
    for mask, batch, count in (
        (torch.tensor([[1, 1, 0]]), 1, 2),
        (torch.tensor([[1, 1, 1], [1, 1, 0]]), 2, 1),
        (torch.tensor([[1, 0, 1], [1, 1, 1]]), 2, 2),
    ):
        with pytest.raises(CacheError, match="masked tokens after the prompt: pad the whole conversation once"):
            progress.check_step(mask.bool(), batch, count)
    progress.check_step(None, 2, 3)
    progress.check_step(torch.tensor([[0, 1, 1], [1, 1, 1]]).bool(), 2, 2)
    progress.check_step(torch.tensor([[1, 0]]).bool(), 1, 1)  # a single token of a single row is never padding


def test_a_reset_forgets_the_text_and_keeps_the_settings():
    prompts, state = Prompts([0], [4]), Rows([3])
    progress = Progress(Prefill(prompts, open=True), 50, Options(kernels="triton"), method_state=state)
    progress.padding.infer(None, 1, 4)
    progress.positions.see(torch.arange(4)[None], 0, [0])
    progress.reset()
    assert progress.padding == Padding() and progress.positions.runs == [] and not progress.prefill.open
    assert progress.prefill.prompts is prompts and progress.max_length == 50 and progress.method_state is state
    assert progress.options.kernels == "triton"


def test_rows_are_chosen_in_everything_that_is_kept_by_row():
    progress = Progress(padding=Padding([0, 3]), method_state=Rows([7, 8]))
    progress.positions.see(torch.tensor([[0, 1, 2, 3, 4], [9, 9, 9, 5, 6]]), 0, [0, 3])
    progress.select(torch.tensor([1, 1, 0]))
    assert progress.padding.starts == [3, 3, 0] and progress.method_state.rows == [8, 8, 7]
    assert [progress.positions.at(row, torch.tensor([4])).item() for row in range(3)] == [6, 6, 4]


def test_a_copy_has_its_own_state_and_empty_queues():
    progress = Progress(Prefill(open=True, path="sdpa"), 50, padding=Padding([0, 3]), method_state=Rows([7, 8]))
    progress.positions.see(torch.arange(5)[None], 0, [0, 3])
    progress.frozen, progress.upper, progress.span = True, True, 4
    progress.tables["layer"] = torch.zeros(1)
    progress.plans["layer"], progress.plain_masks[None] = object(), ("key", True, torch.zeros(1))
    progress.watches.of(torch.device("cpu")).record[0] = 1
    twin = progress.clone()
    assert (twin.frozen, twin.upper, twin.span, twin.max_length, twin.prefill.path) == (True, True, 4, 50, "sdpa")
    assert twin.watches is not progress.watches and twin.watches.of(torch.device("cpu")).record[0] == 0
    assert twin.packs is not progress.packs and twin.rolls is not progress.rolls
    assert twin.tables == {} and twin.plans == {} and twin.plain_masks == {}
    twin.reset()
    twin.padding.infer(None, 1, 2)
    twin.method_state.select([1])
    twin.positions.see(torch.arange(8)[None], 0, [0])
    assert progress.prefill.open and progress.padding.starts == [0, 3] and progress.method_state.rows == [7, 8]
    assert progress.positions.runs == [[(0, 0)], [(3, 3)]]
    bare = Progress().clone()
    assert (bare.method_state, bare.max_length, bare.frozen, bare.upper, bare.span) == (None, None, False, False, None)
    other = progress.clone()
    other.select(torch.tensor([1]))
    assert progress.padding.starts == [0, 3] and progress.method_state.rows == [7, 8]
    assert len(progress.positions.runs) == 2


def test_a_cache_begins_with_nothing_seen_and_one_process():
    fresh, other = Progress(), Progress()
    assert (fresh.rope_from, fresh.storage, fresh.rank, fresh.span) == (0, None, (0, 1), None)
    assert (fresh.prefill.prompts, fresh.prefill.open, fresh.prefill.group) == (None, False, None)
    assert fresh.options == Options() and (Options().kernels, Options().prefill, Options().mlp_chunk) == ("auto",) * 3
    assert fresh.tables is not other.tables and fresh.prefill is not other.prefill
