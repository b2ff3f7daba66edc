"""The samples of dataset=fidelity: windows of texts, prompts of other data sets, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
import yaml

from kvbench.errors import ConfigError, DataError
from kvbench.tasks.fidelity import Fidelity
from kvbench.tasks.load import load
from kvbench.tasks.work import CompareTokens
from kvbench.util.confdir import group_options


class Characters:
    """A tokenizer of characters."""

    bos_token_id = 1

    def __call__(self, text: str, **_: Any) -> dict[str, Any]:
        return {"input_ids": [ord(c) for c in text], "offset_mapping": [(k, k + 1) for k in range(len(text))]}


def bound(**fields: Any) -> Fidelity:
    task = load({"_target_": "kvbench.tasks.fidelity.Fidelity", **fields})
    assert isinstance(task, Fidelity)
    task.bind(Characters())
    return task


def works(task: Fidelity) -> list[CompareTokens]:
    computed = [sample.work for sample in task.samples()]
    assert all(isinstance(work, CompareTokens) for work in computed)
    return computed  # type: ignore[return-value]


def test_windows_of_a_text_have_an_exact_prefix(tmp_path) -> None:
    path = tmp_path / "text.txt"
    path.write_text("abcdefghij" * 5, encoding="utf-8")
    task = bound(text=str(path), window=20, prefill=8, limit=2, probe=1, bos=False)
    assert [sample.id for sample in task.samples()] == ["text@20/0", "text@20/1"]
    first, second = works(task)
    assert bytes(first.ids or ()).decode() == "abcdefghij" * 2 and first.prefill == 8
    assert (first.probe, second.probe) == (True, False)
    assert bound(text=str(path), window=20, prefill=8, limit=1).samples
    assert works(bound(text=str(path), window=20, prefill=8, limit=1))[0].ids[0] == 1  # type: ignore[index]


def test_prompts_of_another_data_set_keep_their_ids_tasks_and_ends() -> None:
    task = bound(over="mini/key_value", options={"lengths": [1024], "limit": 2})
    inner = list(
        load(
            {**yaml.safe_load(group_options("dataset")["mini/key_value"].read_text()), "lengths": [1024], "limit": 2}
        ).samples()
    )
    assert [sample.id for sample in task.samples()] == [sample.id for sample in inner]
    assert all(work.ids is None and work.answers == "fp16" for work in works(task))
    assert next(task.samples()).stop == inner[0].stop and task.score(inner[0], "x") == {}
    assert len(works(bound(over="mini/key_value", options={"lengths": [1024]}, limit=3))) == 3


def test_the_identity_of_references_leaves_out_what_fp16_does_not_depend_on() -> None:
    plain, other = bound(limit=1), bound(limit=2, statistics="llamacpp", reference="live", probe=1)
    assert plain.reference_identity() == other.reference_identity()
    assert plain.identity() != other.identity()
    assert bound(window=512, prefill=64).reference_identity() != plain.reference_identity()
    assert bound(over="perplexity/mini_text").reference_identity() == plain.reference_identity()


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"over": "mini/nothing"}, "no such data set"),
        ({"over": "efficiency"}, "neither texts nor prompts"),
        ({"over": "fidelity"}, "neither texts nor prompts"),
        ({"over": "mini", "mode": "simulated"}, "answers can only be decoded"),
        ({"mode": "simulated", "probe": 1}, "needs dataset.mode=decode"),
        ({"text": "wikitext2"}, "dataset.over=perplexity/wikitext2"),
        ({"window": 64, "prefill": 64}, "leaves no tokens to score"),
        ({"over": "mini", "options": {"lenghts": [512]}}, "lengths"),
    ],
)
def test_what_cannot_be_compared_is_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        bound(**fields)


def test_several_questions_on_one_text_are_refused() -> None:
    with pytest.raises(DataError, match=r"several@1024/0 of mini/several is not a prompt with one answer"):
        works(bound(over="mini/several", options={"lengths": [1024], "limit": 1}))
