"""The grid of points, and prompts of an exact number of tokens."""

import pytest

from kvbench.config.run_options import RuntimeConfig
from kvbench.errors import ConfigError, DataError
from kvbench.models.load import byte_tokenizer
from kvbench.tasks.efficiency import Efficiency, doubling, point_id
from kvbench.tasks.filled import filled_prompts
from kvbench.tasks.load import load

TARGET = "kvbench.tasks.efficiency.Efficiency"


def bundled():
    from transformers import AutoTokenizer

    from kvbench.models.spec import local_folder

    return AutoTokenizer.from_pretrained(local_folder("kvbench:tiny"))


def grown(task: Efficiency, room: int) -> dict[int, str]:
    """Batches in the order in which they are measured, where `room` sequences fit."""
    rows: dict = {}
    order: dict[int, str] = {}
    while left := [sample for sample in task.next_samples(rows) if sample.id not in rows]:
        batch = left[0].work.batch
        order[batch] = "ok" if batch <= room else "oom"
        rows[left[0].id] = {"status": order[batch]}
    return order


@pytest.mark.parametrize("count", [16, 60, 97, 128, 700])
@pytest.mark.parametrize("tokenizer", [byte_tokenizer, bundled])
def test_prompts_have_exactly_as_many_tokens(tokenizer, count):
    made = filled_prompts(tokenizer := tokenizer(), count, 3)
    assert [len(ids) for ids in made.ids] == [count] * 3
    assert len({tuple(ids) for ids in made.ids}) == 3
    for ids, (first, last), query in zip(made.ids, made.contexts, made.queries, strict=True):
        assert 0 <= first < last <= count
        words = tokenizer.decode(ids[first:last])
        assert " " in words.strip() or count < 20
        assert query.startswith("what is said about the word '")
    if count == 700:
        context = tokenizer.decode(made.ids[0][made.contexts[0][0] : made.contexts[0][1]])
        assert made.queries[0].split("'")[1] in context
        assert tokenizer.decode(made.ids[0]).endswith("'?\nAnswer:")


def test_a_row_does_not_depend_on_the_batch_and_another_seed_is_another_text():
    tokenizer = byte_tokenizer()
    assert filled_prompts(tokenizer, 200, 4).ids[:2] == filled_prompts(tokenizer, 200, 2).ids
    assert filled_prompts(tokenizer, 200, 1, seed=1).ids != filled_prompts(tokenizer, 200, 1).ids


def test_a_tokenizer_without_tokens_is_refused():
    def none(texts, **_):
        return {"input_ids": [[] for _ in texts] if isinstance(texts, list) else []}

    with pytest.raises(DataError, match="returns no tokens"):
        filled_prompts(none, 64, 1)


def test_a_listed_grid_ends_each_length_where_memory_does():
    task = Efficiency(prompts=(64, 32), batches=(4, 1, 2, 2))
    assert [sample.id for sample in task.samples()] == [point_id(p, b) for p in (64, 32) for b in (1, 2, 4)]
    rows = {point_id(64, 1): {"status": "ok"}, point_id(64, 2): {"status": "oom"}}
    assert [sample.id for sample in task.next_samples(rows)] == [
        *(point_id(64, b) for b in (1, 2)),
        *(point_id(32, b) for b in (1, 2, 4)),
    ]
    ended = {point_id(64, 33): {"status": "oom"}}
    assert [sample.work.batch for sample in Efficiency(prompts=(64,), batches=(33, 1)).next_samples(ended)] == [1, 33]
    assert {sample.score_key for sample in task.samples()} == {"efficiency@64", "efficiency@32"}


def test_a_batch_grows_until_memory_ends():
    assert grown(Efficiency(prompts=(64,), batches="grow"), 11) == {1: "ok", 2: "ok", 4: "ok", 8: "ok", 16: "oom"}
    assert grown(Efficiency(prompts=(64,), batches="grow", max_batch=6), 11) == {1: "ok", 2: "ok", 4: "ok", 6: "ok"}
    assert list(grown(Efficiency(prompts=(64,), batches="grow"), 0)) == [1]
    assert list(doubling(1)) == [1]


@pytest.mark.parametrize(
    ("bisect", "room", "after"), [(2, 11, [12, 10]), (9, 11, [12, 10, 11]), (1, 0, []), (3, 1, [])]
)
def test_bisection_goes_between_the_last_that_fitted_and_the_first_that_did_not(bisect, room, after):
    order = list(grown(Efficiency(prompts=(64,), batches="grow", bisect=bisect), room))
    assert order[order.index(max(order)) + 1 :] == after


def test_a_larger_grid_is_the_same_run_and_other_tokens_are_another():
    task = Efficiency()
    assert task.identity() == Efficiency(prompts=(64,), batches="grow", bisect=3).identity()
    assert task.identity() != Efficiency(new_tokens=33).identity()


def test_points_belong_to_the_options_that_change_them_and_not_to_those_of_stored_rows():
    task, here = Efficiency(), lambda: "a GPU"
    usual = task.machine_identity(RuntimeConfig(), here)
    same = RuntimeConfig(rerun="times", mix_code=True, arithmetic="float32", retry="oom")
    assert task.machine_identity(same, here) == usual
    assert task.machine_identity(RuntimeConfig(graphs="off"), here) != usual


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"prompts": []}, "does not contain a prompt length"),
        ({"prompts": [0]}, "must be at least 16"),
        ({"batches": []}, "does not contain a batch size"),
        ({"batches": [1, 0]}, "must be at least 1"),
        ({"batches": "all"}, "grow"),
        ({"new_tokens": 1}, "must be at least 2"),
        ({"repeats": 0}, "must be at least 1"),
        ({"batch": [1]}, "did you mean 'batches'"),
    ],
)
def test_a_wrong_grid_is_refused(settings, said):
    with pytest.raises(ConfigError, match=said):
        load({"_target_": TARGET, **settings})
