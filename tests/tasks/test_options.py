"""Options of data sets: what they refuse, what they pass on to samples, and what identifies a run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kvbench.errors import ConfigError, DataError
from kvbench.tasks import longbench, summaries
from kvbench.tasks.from_records import Records
from kvbench.tasks.longbench import LongBench
from kvbench.tasks.ruler.needles import DEPTHS
from kvbench.tasks.summaries import Summaries
from tests.tasks.test_long_texts import Words


def write(path: Path, *rows: Any) -> str:
    path.write_text("\n".join(map(json.dumps, rows)))
    return str(path)


def records(**options: Any) -> Records:
    return Records(**{"path": "a.jsonl", "template": "Q: {question}", "answer": "a", "metric": "f1", **options})


@pytest.mark.parametrize(
    ("options", "key"),
    [
        ({"path": None}, "dataset.path"),
        ({"template": " \n"}, "dataset.template"),
        ({"template": "no field"}, "dataset.template"),
        ({"context": "text"}, "dataset.context"),
        ({"context": "question", "template": "{question} {question}"}, "dataset.context"),
        ({"stop": ("x", "")}, "dataset.stop"),
        ({"answer": " "}, "dataset.answer"),
        ({"split": "../x"}, "dataset.split"),
        ({"examples": "a b"}, "dataset.examples"),
        ({"metric": "regex"}, "dataset.pattern"),
        ({"pattern": "(a)"}, "dataset.pattern"),
        ({"metric": "regex", "pattern": "("}, "dataset.pattern"),
        ({"metric": "regex", "pattern": "a"}, "dataset.pattern"),
        ({"metric": "regex", "pattern": "(a)(b)"}, "dataset.pattern"),
        ({"choices": "c"}, "dataset.choices"),
    ],
)
def test_options_of_records_that_cannot_be_meant(options: dict[str, Any], key: str) -> None:
    records().check()
    with pytest.raises(ConfigError) as caught:
        records(**options).check()
    assert caught.value.key == key


@pytest.mark.parametrize(
    "options",
    [
        {"metric": "regex", "pattern": "(a)(?:b)"},
        {"metric": "choice", "choices": "c"},
        {"context": "question"},
        {"stop": ("x",)},
        {"split": "a/b-c.d_e"},
    ],
)
def test_options_of_records_that_are_meant(options: dict[str, Any]) -> None:
    records(**options).check()


def test_rouge_needs_its_package() -> None:
    (package,) = records(metric="rouge").packages()
    assert (package.module, package.key, package.value) == ("rouge_score", "dataset.metric", "rouge")
    assert records().packages() == ()


def test_samples_of_records_have_what_the_options_say(tmp_path: Path) -> None:
    """The context moves behind the examples, which end with the separator."""
    row = {"question": "why", "text": "some words", "a": "b"}
    for name in ("train", "test"):
        write(tmp_path / f"{name}.jsonl", *[{**row, "question": f"{name} {n}"} for n in range(3)])
    task = records(
        name="mine", path=str(tmp_path), template="{text}|{question}|", context="text", query="question",
        shots=2, examples="train", separator="##", limit=2, max_new_tokens=7, stop=("x",), chat=False, system="s",
        truncation="refuse",
    )  # fmt: skip
    first, second = task.samples()
    assert [sample.id for sample in (first, second)] == ["mine/0", "mine/1"]
    shown = "".join(f"some words|train {n}|{example.target}##" for n, example in enumerate(task.entries["train"][:2]))
    assert first.prompt == f"{shown}some words|test 0|"
    start, end = first.context_span or (0, 0)
    assert (start, first.prompt[start:end]) == (len(shown), "some words")
    assert (first.query, first.answers, first.task, first.meta) == ("test 0", ("b",), "mine", {})
    assert (first.max_new_tokens, first.stop, first.truncation) == (7, ("x",), "refuse")
    assert (first.rules.chat, first.rules.system) == (False, "s")
    identity = task.identity()
    sums = identity.pop("sha256")
    assert set(sums) == {"train", "test"} and all(len(one) == 16 for one in sums.values())
    assert identity == {
        "target": "records", "version": task.version, "stop": ["x"], "name": "mine", "metric": "f1", "pattern": None,
        "shots": 2, "max_new_tokens": 7, "chat": False, "system": "s", "truncation": "refuse", "examples": "train",
        "order": task.order, "shots_seed": task.shots_seed, "separator": "##",
    }  # fmt: skip
    plain = records(path=str(tmp_path)).identity()
    assert "separator" not in plain and set(plain["sha256"]) == {"test"}
    assert task.notes() == {"records": {"train": 3, "test": 3}}
    with pytest.raises(ConfigError, match=r"dataset\.shots"):
        _ = records(path=str(tmp_path), shots=4, examples="train").entries
    with pytest.raises(DataError, match="is a single file"):
        _ = records(path=str(tmp_path / "test.jsonl"), shots=1).entries


def test_repeated_records_are_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [{"question": name, "a": "b"} for name in "xyxx"] + [{"question": "x", "a": "c"}]
    task = records(name="mine", path=write(tmp_path / "a.jsonl", *rows))
    assert task.notes() == {"records": {"test": 5}, "repeated": 2}
    said = capsys.readouterr().err
    assert "2 of 5 records of 'test' repeat an earlier one (record 2 is record 0, counted from 0)" in said


def test_a_single_file_is_of_one_task_of_longbench(tmp_path: Path) -> None:
    row = {"input": "q", "context": "c", "answers": ["a"], "length": 1, "all_classes": None}
    file = write(tmp_path / "mine.jsonl", row)
    assert list(LongBench(tasks=("qasper",), path=file).records) == ["qasper"]
    with pytest.raises(DataError, match=r"mine\.jsonl"):
        _ = LongBench(tasks=("qasper", "hotpotqa"), path=file).records


@pytest.mark.parametrize(
    ("prompt", "answers", "target"),
    [
        ("Answer:", ["a", "b"], " a"),
        ("Answer: ", ["a"], "a"),
        ("Answer:\n", ["a"], "a"),
        ("答案：", ["a"], "a"),
        ("Answer:", [], ""),
        ("Answer:", [""], ""),
    ],
)
def test_an_answer_follows_its_prompt_after_one_space(prompt: str, answers: list[str], target: str) -> None:
    assert longbench._target(prompt, answers) == target


def test_forty_depths_of_needles_go_from_the_beginning_to_the_end() -> None:
    assert len(DEPTHS) == 40 and (DEPTHS[0], DEPTHS[-1]) == (0, 100)
    assert list(DEPTHS) == [round(100 * n / 39) for n in range(40)]


def test_a_summarys_prompt_is_the_beginning_of_its_documents(tmp_path: Path) -> None:
    text = " ".join(f"w{n}" for n in range(300))
    path = write(tmp_path / "test.jsonl", *[{"document": text, "summary": [" ", "s", "t"][n]} for n in range(3)])
    task = Summaries(path=path, lengths=(150, 160), warm_up=1, limit=1, max_new_tokens=5)
    task.bind(Words())
    samples = list(task.samples())
    assert [(s.id, s.warm_up) for s in samples] == [
        (f"multi_lexsum@{length}/{n}", n == 0) for length in (150, 160) for n in (0, 1)
    ]
    template = summaries.summary_templates()["multi_lexsum"]
    for sample in samples:
        assert (sample.task, sample.max_new_tokens, sample.truncation) == ("multi_lexsum", 5, "refuse")
        assert sample.prompt.startswith(template["before"]) and sample.prompt.endswith(template["after"])
        assert len(sample.rules.ids or ()) == sample.length == len(Words()(sample.prompt)["input_ids"])
        assert sample.target == f" {sample.answers[0]}" in (" s", " t")
        first, last = sample.rules.ids_context or (0, 0)
        words = len(template["before"].split())
        assert first == 1 + words + 1, "the first word's token has blanks of the text before it"
        assert last == sample.length - len(template["after"].split())


def test_records_without_a_text_or_a_summary_are_left_out(tmp_path: Path) -> None:
    rows = [{"document": d, "summary": s} for d, s in (("a", "x"), (" ", "x"), (None, "x"), ("b", None), ("c", " "))]
    assert Summaries(path=write(tmp_path / "a.jsonl", *rows)).records == [("a", ("x",))]
    with pytest.raises(DataError, match="no record has both a text and a summary"):
        task = Summaries(path=write(tmp_path / "b.jsonl", rows[1]), lengths=(64,))
        task.bind(Words())
        list(task.samples())
    with pytest.raises(DataError, match="one of these pairs of fields"):
        _ = Summaries(path=write(tmp_path / "c.jsonl", {"document": "a"})).records
