"""GSM8K's prompts: the harness's draw and joins, LogQuant's turn."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path

import pytest

from kvbench.errors import ConfigError, DataError, KvbenchError
from kvbench.tasks.gsm8k import GSM8K
from kvbench.tasks.load import load
from tests.data_support import data_dir

TRAIN = [{"question": f"How many is {n}?", "answer": f"It is {n}.\nSo {n}.\n#### {n}"} for n in range(120)]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "train.jsonl").write_text("\n".join(map(json.dumps, TRAIN)), encoding="utf-8")
    (tmp_path / "test.jsonl").write_text("\n".join(map(json.dumps, TRAIN[:7])), encoding="utf-8")
    return tmp_path


def test_shots_are_drawn_as_the_harness_draws_them(folder: Path) -> None:
    samples = list(GSM8K(path=str(folder)).samples())
    draw = random.Random(1234)
    for record, sample in zip(TRAIN, samples, strict=False):
        shots = draw.sample(TRAIN, 5)
        expected = "\n\n".join(f"Question: {s['question']}\nAnswer: {s['answer']}" for s in shots)
        assert sample.prompt == f"{expected}\n\nQuestion: {record['question']}\nAnswer:"
    assert len(samples) == 7
    fewer = list(GSM8K(path=str(folder), limit=3).samples())
    assert fewer == samples[:3]
    assert samples[0].stop == ("Question:", "</s>", "<|im_end|>")


def test_scores_stand_side_by_side(folder: Path) -> None:
    task = GSM8K(path=str(folder))
    sample = next(iter(task.samples()))
    assert task.score(sample, "It is 0") == {"score": 0.0, "strict": 0.0, "flexible": 1.0}
    own = replace(task, style="logquant")
    assert own.score(sample, "#### 0")["score"] == 1.0
    assert own.identity() != task.identity()
    assert next(iter(own.samples())).rules.system


def test_logquants_turn(folder: Path) -> None:
    prompt = next(iter(GSM8K(path=str(folder), style="logquant").samples())).prompt
    assert prompt.startswith("Please answer the following question by the format, mark the final answer by ####.\n")
    assert "\n        example 3: \n        question: How many is 4?\n        answer: It is 4. So 4. #### 4\n" in prompt
    assert prompt.endswith("        Question for you: \n        question: How many is 0?\n")


def test_settings_without_effect_are_refused() -> None:
    with pytest.raises(ConfigError, match="five fixed examples"):
        load({"_target_": "kvbench.tasks.gsm8k.GSM8K", "path": ".", "style": "logquant", "shots": 3})


class Words:
    """A tokenizer of words with one special token."""

    def __call__(self, text: str, verbose: bool = True) -> dict[str, list[int]]:
        return {"input_ids": [0, *range(len(text.split()))]}


@pytest.mark.parametrize("style", ["harness", "logquant"])
def test_prompts_of_other_lengths_are_left_out(folder: Path, style: str) -> None:
    longer = {"question": "How many is this and that, and those there too?", "answer": "#### 3"}
    (folder / "test.jsonl").write_text("\n".join(map(json.dumps, [*TRAIN[:3], longer, *TRAIN[3:7]])))
    whole = GSM8K(path=str(folder), style=style)  # type: ignore[arg-type]
    samples = {sample.id: sample for sample in whole.samples()}
    counts = {name: 1 + len(sample.prompt.split()) for name, sample in samples.items()}
    usual, long = counts["gsm8k/0"], counts["gsm8k/3"]
    assert long > usual
    for smallest, largest, ids in (
        (usual, long, list(counts)),
        (usual, long - 1, [name for name in counts if name != "gsm8k/3"]),
        (usual + 1, long, ["gsm8k/3"]),
    ):
        task = replace(whole, prompt_tokens=(smallest, largest))
        assert task.needs_tokenizer and not whole.needs_tokenizer
        with pytest.raises(KvbenchError, match=r"bind\(tokenizer\)"):
            list(task.samples())
        task.bind(Words())
        chosen = list(task.samples())
        assert [sample.id for sample in chosen] == ids
        assert chosen == [samples[name] for name in ids], "examples depend on the filter"
    assert task.identity() == {**whole.identity(), "prompt_tokens": [usual + 1, long]}


def test_a_filter_of_no_length_is_refused() -> None:
    with pytest.raises(ConfigError, match="must be the smallest and the largest number of tokens"):
        load({"_target_": "kvbench.tasks.gsm8k.GSM8K", "path": ".", "prompt_tokens": [1700, 600]})


def test_real_splits() -> None:
    task = GSM8K(path=str(data_dir("gsm8k")))
    assert len(list(task.samples())) == 1319
    prompt = next(iter(replace(task, style="logquant").samples())).prompt
    assert "Natalia sold 48/2 = <<48/2=24>>24 clips in May. Natalia sold 48+24 = " in prompt


def few(folder: Path, count: int) -> None:
    (folder / "train.jsonl").write_text("\n".join(map(json.dumps, TRAIN[:count])))


def test_fewer_examples_than_shots_are_refused(folder: Path) -> None:
    few(folder, 4)
    for order in ("sampled", "first"):
        with pytest.raises(
            ConfigError, match=r"dataset\.shots=5: exceeds the number of records in .*train\.jsonl, 4"
        ) as caught:
            GSM8K(path=str(folder), order=order).identity()
        assert "set dataset.shots to at most 4" in str(caught.value)
        assert len(list(GSM8K(path=str(folder), order=order, shots=4).samples())) == 7
    few(folder, 94)
    with pytest.raises(
        DataError, match=r"has only 94 records, but dataset\.style=logquant shows the records .*, 94, counted from 0"
    ):
        GSM8K(path=str(folder), style="logquant").identity()
    few(folder, 95)
    assert list(GSM8K(path=str(folder), style="logquant").samples())


@pytest.mark.parametrize(
    ("split", "change", "said"),
    [
        ("test", {"question": None}, "field 'question' is null"),
        ("test", {"question": ""}, "field 'question' is an empty string"),
        ("test", {"answer": 7}, r"field 'answer' is a number \(7\)"),
        ("test", {"answer": "It is seven."}, "field 'answer' does not end with '#### NUMBER'"),
        ("test", {"answer": "7 ####"}, "field 'answer' does not end with '#### NUMBER'"),
        ("train", {"answer": "so #### many"}, "field 'answer' does not end with '#### NUMBER'"),
        ("train", {"question": ["x"]}, "field 'question' is a list"),
    ],
)
def test_records_that_cannot_be_scored_are_refused(folder: Path, split: str, change: dict, said: str) -> None:
    rows = [*TRAIN[:100]]
    rows[2] = {**rows[2], **change}
    (folder / f"{split}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    with pytest.raises(DataError, match=rf"{split}.jsonl line 3: {said}"):
        GSM8K(path=str(folder)).identity()


def test_an_empty_test_split_is_refused(folder: Path) -> None:
    (folder / "test.jsonl").write_text("\n \n")
    with pytest.raises(DataError, match=r"test\.jsonl contains no records"):
        GSM8K(path=str(folder)).identity()
