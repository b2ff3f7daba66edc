"""Data sets that are described by data: prompts, spans, scores, damaged records, and whole runs without Python."""

from __future__ import annotations

import csv
import gzip
import hashlib
import json
import math
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from kvbench.cli.main import main
from kvbench.errors import ConfigError, DataError
from kvbench.runner.prompting import encode_prompt
from kvbench.runner.run import answer_run
from kvbench.tasks import load
from kvbench.tasks.template import Template
from kvbench.util.confdir import conf_dir
from tests.run_files import store_of
from tests.run_support import config

TARGET = "kvbench.tasks.from_records.Records"
RECORDS = [
    {"question": "Who?", "passage": "Ann came. Bob went.", "answer": "Ann", "n": 1},
    {"question": "Which {one}?", "passage": "Two {a} and b.", "answer": ["a", "b"], "n": 2.5},
]
READING = {
    "template": "Read: {passage}\nQ{n}: {question}\nA:",
    "context": "passage",
    "query": "question",
}


def write(folder: Path, records: list[Any], name: str = "my.jsonl") -> str:
    folder.mkdir(parents=True, exist_ok=True)
    lines = (record if isinstance(record, str) else json.dumps(record) for record in records)
    (folder / name).write_text("\n".join(lines), encoding="utf-8")
    return str(folder / name)


def task(path: str, **options: Any) -> Any:
    return load({"_target_": TARGET, "path": path, "template": "{question}", **options})


def test_a_template_makes_the_prompt_and_keeps_context_and_query_apart(tmp_path: Path) -> None:
    first, second = task(write(tmp_path, RECORDS), **READING, name="mine").samples()
    assert first.prompt == "Read: Ann came. Bob went.\nQ1: Who?\nA:"
    assert first.prompt[slice(*first.context_span)] == "Ann came. Bob went."
    assert (first.id, first.task, first.query) == ("mine/0", "mine", "Who?")
    assert (first.answers, first.target) == (("Ann",), " Ann")
    assert second.prompt == "Read: Two {a} and b.\nQ2.5: Which {one}?\nA:" and second.answers == ("a", "b")
    assert first.stop == ("\n",) and first.rules.chat


def test_a_context_and_a_query_may_be_templates(tmp_path: Path) -> None:
    options = {"template": "{context}\n\n{query}", "context": "[{n}] {passage}", "query": "{question} ({{1}})"}
    sample = next(task(write(tmp_path, RECORDS), **options).samples())
    assert sample.prompt == "[1] Ann came. Bob went.\n\nWho? ({1})" and sample.query == "Who? ({1})"
    assert sample.prompt[slice(*sample.context_span)] == "[1] Ann came. Bob went."


def test_nested_fields_and_alternatives(tmp_path: Path) -> None:
    records = [{"q": {"stem": "One"}, "a": 1}, {"stem": "Two", "a": "2"}, {"q.stem": "Three", "a": 3.5}]
    samples = list(task(write(tmp_path, records), template="{q.stem|stem}?", answer="a").samples())
    pairs = [(sample.prompt, sample.answers[0]) for sample in samples]
    assert pairs == [("One?", "1"), ("Two?", "2"), ("Three?", "3.5")]


def test_examples_stand_before_the_question_and_the_context_stays_where_it_is(tmp_path: Path) -> None:
    for split in ("train", "test"):
        write(tmp_path, RECORDS, f"{split}.jsonl")
    shown = task(str(tmp_path), **READING, shots=2, separator="\n--\n")
    sample = next(shown.samples())
    assert sample.prompt.startswith("Read: Ann came. Bob went.\nQ1: Who?\nA: Ann\n--\nRead: Two {a}")
    assert sample.prompt.count("\n--\n") == 2 and sample.context_span[0] > 60
    assert sample.prompt[slice(*sample.context_span)] == "Ann came. Bob went."
    with pytest.raises(ConfigError, match=r"dataset\.shots=3: exceeds the number of records"):
        list(task(str(tmp_path), shots=3).samples())
    with pytest.raises(DataError, match=r"dataset\.shots=1 takes examples from the split 'train'.* is a single file"):
        list(task(str(tmp_path / "test.jsonl"), shots=1).samples())


def test_the_same_records_in_any_format_are_the_same_run(tmp_path: Path) -> None:
    records = [{"question": 'Say "a,\nb"', "answer": "é"}, {"question": "Who?", "answer": "Ann"}]
    paths = [write(tmp_path, records), write(tmp_path, [json.dumps(records)], "my.json")]
    with open(tmp_path / "my.csv", "w", newline="", encoding="utf-8") as handle:
        writer = csv.DictWriter(handle, ("answer", "question"))
        writer.writeheader()
        writer.writerows(records)
    paths.append(str(tmp_path / "my.csv"))
    (tmp_path / "my.csv.gz").write_bytes(gzip.compress((tmp_path / "my.csv").read_bytes()))
    paths.append(str(tmp_path / "my.csv.gz"))
    identities = [json.dumps(task(path).identity()) for path in paths]
    assert len(set(identities)) == 1
    assert task(paths[0], limit=1).identity() == task(paths[0]).identity()
    for change in ({"template": "{question} "}, {"stop": []}, {"chat": False}, {"metric": "f1"}, {"name": "b"}):
        assert json.dumps(task(paths[0], **change).identity()) not in identities


@pytest.mark.parametrize(
    ("metric", "answer", "scores"),
    [
        ({"metric": "exact_match"}, "Ann Lee", {" ann  lee.": 1.0, "Ann": 0.0, "": 0.0}),
        ({"metric": "f1"}, ["Ann Lee", "nobody"], {"the Ann": 2 / 3, "Nobody!": 1.0, "x": 0.0}),
        ({"metric": "regex", "pattern": r"= (-?\d+)"}, "x = 7", {"so y = 7, = 8": 1.0, "= 8": 0.0, "7": 0.0}),
        ({"metric": "regex", "pattern": r"= (-?\d+)"}, 7, {"= 7": 1.0}),
        ({"metric": "choice"}, "C", {" C.": 1.0, "I say C": 1.0, "B or C": 0.0, "Cd": 0.0, "": 0.0}),
        ({"metric": "gsm8k"}, "So\n#### 7", {"#### 7": 1.0, "it is 7": 0.0}),
    ],
)
def test_metrics(tmp_path: Path, metric: dict[str, Any], answer: Any, scores: dict[str, float]) -> None:
    records = task(write(tmp_path, [{"question": "?", "answer": answer}]), **metric)
    sample = next(records.samples())
    assert {text: records.score(sample, text)["score"] for text in scores} == pytest.approx(scores)


def test_rouge_of_summaries(tmp_path: Path) -> None:
    pytest.importorskip("rouge_score")
    records = task(write(tmp_path, [{"question": "?", "answer": "a cat sat"}]), metric="rouge")
    assert records.packages()[0].module == "rouge_score" and not task("x", metric="f1").packages()
    assert task("x", metric="math").packages()[0].module == "math_verify"
    assert records.score(next(records.samples()), "cats sat")["score"] == pytest.approx(0.8)


@pytest.mark.parametrize(
    ("choices", "answer", "letter"),
    [
        (["x", "y", "z"], "y", "B"),
        (["x", "y", "z"], 2, "C"),
        (["B", "A"], "A", "A"),  # a label goes before a text
        ({"label": ["1", "2"], "text": ["x", "y"]}, "2", "B"),
        ([{"label": "A", "text": "x"}, {"label": "B", "text": "y"}], " B", "B"),
    ],
)
def test_choices(tmp_path: Path, choices: Any, answer: Any, letter: str) -> None:
    records = [{"question": "Which?", "options": choices, "answer": answer}]
    made = task(write(tmp_path, records), template="{question}\n{choices}\nAnswer:", choices="options", metric="choice")
    sample = next(made.samples())
    assert sample.prompt.startswith("Which?\nA. ") and sample.prompt.endswith("\nAnswer:")
    assert sample.answers == (letter,) and made.score(sample, f" {letter}")["score"] == 1.0
    assert made.score(sample, " Z")["score"] == 0.0


@pytest.mark.parametrize(
    ("record", "options", "message"),
    [
        ({"answer": "a"}, {}, r"the record has no field 'question'; its fields are answer"),
        ({"question": "q"}, {}, "no field 'answer'"),
        ({"question": None, "answer": "a"}, {}, "field 'question' is null; expected a string or a number"),
        ({"question": ["q"], "answer": "a"}, {}, r"field 'question' is a list \(\['q'\]\)"),
        ({"question": True, "answer": "a"}, {}, "field 'question' is a boolean"),
        ({"question": "q", "answer": []}, {}, "field 'answer' is an empty list"),
        ({"question": "q", "answer": ["a", None]}, {}, "field 'answer' is null"),
        ({"question": "q", "answer": " "}, {}, "field 'answer' is an empty string"),
        ({"question": "q", "answer": "a"}, {"metric": "gsm8k"}, "field 'answer' does not end with '#### NUMBER'"),
        ({"question": "", "answer": "a"}, {"context": "question"}, "field 'question' is an empty string"),
        ({"question": "q", "answer": "12"}, {"metric": "choice"}, "field 'answer' is '12'; expected a letter A to Z"),
        ({"question": "q", "answer": 4, "o": ["x", "y"]}, {"metric": "choice", "choices": "o"}, "its index from 0"),
        ({"question": "q", "answer": 0, "o": ["x"]}, {"metric": "choice", "choices": "o"}, "has 1 options"),
        ({"question": "q", "answer": 0, "o": "xy"}, {"metric": "choice", "choices": "o"}, "is not a list of options"),
        ({"question": "q", "answer": 0, "o": ["x", ""]}, {"metric": "choice", "choices": "o"}, "is an empty string"),
        ({"question": "q", "answer": math.nan}, {}, "field 'answer' is NaN, which is no value of JSON"),
        ({"question": "q", "answer": ["a", -math.inf]}, {}, r"field 'answer\.1' is -Infinity"),
        ({"question": "q", "answer": "a", "more": {"x": math.inf}}, {}, r"field 'more\.x' is Infinity"),
        ('{"question": 1e999, "answer": "a"}', {}, "field 'question' is inf; expected a string or a finite number"),
        ("{", {}, "is not valid JSON"),
        ("[1]", {}, "expected a JSON object"),
    ],
)
def test_a_damaged_record_is_named_with_its_file_and_line(
    tmp_path: Path, record: Any, options: dict[str, Any], message: str
) -> None:
    good = {"question": "q", "answer": "#### 1", "o": ["#### 1", "y"]}
    good = good | ({"answer": "A"} if options.get("metric") == "choice" else {})
    path = write(tmp_path, [good, "", record])
    with pytest.raises(DataError, match=rf"my.jsonl line 3: .*{message}"):
        list(task(path, **options).samples())


def test_repeated_records_are_samples_of_their_own_and_said(tmp_path: Path, capsys: Any) -> None:
    records = [{"question": text, "answer": answer} for text, answer in zip("xyxxy", "ababb", strict=True)]
    made = task(write(tmp_path, records))
    assert [sample.id for sample in made.samples()] == [f"{made.name}/{number}" for number in range(5)]
    said = capsys.readouterr().err
    assert "2 of 5 records of 'test' repeat an earlier one (record 2 is record 0, counted from 0)" in said
    assert made.notes() == {"records": {"test": 5}, "repeated": 2}
    assert "repeated" not in task(write(tmp_path, records[:2])).notes() and not capsys.readouterr().err


@pytest.mark.parametrize("split", ["", " ", "../../etc", "/etc/passwd", "a/../b", "..", "a*", "a//b", "{task}", "a!b"])
@pytest.mark.parametrize("key", ["split", "examples"])
def test_a_split_is_a_name_also_where_it_is_not_read(tmp_path: Path, key: str, split: str) -> None:
    with pytest.raises(ConfigError, match=rf"dataset\.{key}=.*is not the name of a split(?s:.*)dataset\.{key}=test"):
        task(write(tmp_path, RECORDS), **{key: split}).check()
    task(write(tmp_path, RECORDS), **{key: "en/validation.v2-a"}).check()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("question,answer\nq,a\nq\n", "line 3: the row has 1 values for 2 columns"),
        ("question,question\nq,a\n", "line 1: a column name occurs twice"),
        ('question,answer\n"q"x,a\n', "line 2: is not valid CSV"),
        ("question,answer\n", "contains no records"),
        ("", "line 1: a column name occurs twice|contains no records"),
    ],
)
def test_damaged_csv(tmp_path: Path, content: str, message: str) -> None:
    (tmp_path / "my.csv").write_text(content)
    with pytest.raises(DataError, match=message):
        list(task(str(tmp_path / "my.csv")).samples())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"template": " "}, r"dataset\.template"),
        ({"template": "Q:"}, "contains no field"),
        ({"template": "{question"}, "is not a template: expected '}'"),
        ({"template": "{}"}, "is not the name of a field"),
        ({"template": "{question!r}"}, r"\{question!r\} is not the name of a field"),
        ({"template": "{question:>9}"}, "is not the name of a field"),
        (
            {"context": "passage"},
            r"dataset\.context=passage: must occur exactly once in dataset\.template, as \{context\}",
        ),
        ({"context": "question", "template": "{question} {question}"}, r"as \{question\}"),
        ({"metric": "regex"}, r"dataset\.pattern"),
        ({"pattern": "(a)"}, "must be set if and only if dataset.metric=regex"),
        ({"metric": "regex", "pattern": "(a"}, "is not a valid regular expression"),
        ({"metric": "regex", "pattern": "a"}, "has 0 capturing groups"),
        ({"choices": "o"}, "has no effect with dataset.metric=exact_match"),
        ({"metric": "exact"}, "exact_match"),
        ({"stop": [""]}, "contains an empty string"),
        ({"answer": ""}, r"dataset\.answer"),
        ({"path": None}, r"dataset\.path"),
        ({"shot": 1}, "did you mean 'shots'"),
    ],
)
def test_wrong_settings_are_refused_before_anything_is_read(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        task(**{"path": "nowhere.jsonl", **options})


def test_a_whole_run_with_spans_for_cocktail(tmp_path: Path) -> None:
    from kvbench.models.load import load_tokenizer
    from kvbench.models.spec import ModelConfig
    from kvbench.util.schema import build

    words = " ".join(f"word{index % 40}" for index in range(60))
    fields = {"question": "Where is word1?", "answer": "here"}
    records = [{**fields, "passage": f"{words} {n}", "n": n} for n in range(3)]
    dataset = {"_target_": TARGET, "path": write(tmp_path, records), **READING, "max_new_tokens": 3, "name": "mine"}
    method = {"_target_": "kvbench.methods.cocktail.Cocktail", "takes": ["none"], "encoder": "bm25"}
    made = config(tmp_path / "runs") | {"dataset": dataset, "method": method, "quantizer": {"name": "none"}}
    metrics = answer_run(made)
    assert metrics["status"] == "ok" and list(metrics["scores"]) == ["mine"] and metrics["scores"]["mine"]["n"] == 3
    assert metrics["kv_bytes"]["used"]["codes"] > 0  # chunks of the context were packed
    rows = store_of(metrics).samples().rows
    sample = next(load(dataset).samples())
    prompt = encode_prompt(sample, load_tokenizer(build(ModelConfig, made["model"], "model")))
    start, end = sample.context_span
    assert prompt.context_span == (start + 1, end + 1)  # a token a byte, after the first
    assert rows["mine/0"]["prompt_tokens"] == len(prompt.ids)


def test_a_data_set_of_five_lines_of_yaml(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The command line finds it in a user's own folder, without a line of Python."""
    path = write(tmp_path, [{"q": "one two three four", "a": "five"}] * 2)
    lines = [f"_target_: {TARGET}", "name: mine", f"path: {path}", 'template: "{q}"', "answer: a"]
    write(tmp_path / "conf/dataset", ["# counting", *lines], "mine.yaml")
    command = ["--config-dir", str(tmp_path / "conf"), "method=fp16", "dataset=mine", "decoding.max_new_tokens=2"]
    command += [f"runtime.results_dir={tmp_path / 'runs'}", "runtime.device=cpu", "logger=none"]
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))  # --config-dir adds to both
    monkeypatch.setenv("PYTHONPATH", "")
    assert main(command) == 0
    (metrics,) = (tmp_path / "runs").glob("*/metrics.json")
    assert json.loads(metrics.read_text())["scores"]["mine"]["n"] == 2


# -- data sets that were classes of their own: digests of what they gave at commit 6357e8a ---------------------------

EARLIER = {
    "gsm8k": ({}, "c46a872cf65fdecd", "f4f170ec501121d2", 7),
    "gsm8k first": ({"order": "first", "shots": 3, "max_new_tokens": 99}, "9fc8095acab2da6d", "8fcb56354edc5c0d", 7),
    "gsm8k none": ({"shots": 0, "limit": 2}, "fe5010fd0f95250f", "0cc78919a8ed7839", 2),
    "gsm8k_logquant": ({}, "c187e2b07188bca4", "37703bb4f2a7f4b1", 7),
    "openbookqa": ({}, "e023528356bda501", "b40806e9e69ecc90", 9),
    "openbookqa two": ({"shots": 2, "limit": 3}, "eecb88c5070eff27", "22378767c0bd93ea", 3),
}


def earlier_files(folder: Path, name: str) -> str:
    if name.startswith("gsm8k"):
        records = [{"question": f"How many is {n}?", "answer": f"It is {n}.\nSo {n}.\n#### {n}"} for n in range(120)]
        count = 7
    else:
        things, count = ("moons", "beds", "fish", "suns"), 9
        records = [
            {
                "question": {
                    "stem": f"What is {n}?",
                    "choices": [
                        {"text": f"{n} {thing}", "label": label} for thing, label in zip(things, "ABCD", strict=True)
                    ],
                },
                "answerKey": "ABCD"[n % 4],
            }
            for n in range(20)
        ]
    write(folder, records, "train.jsonl")
    write(folder, records[:count], "test.jsonl")
    return str(folder)


@pytest.mark.parametrize("case", EARLIER)
def test_prompts_ids_and_scores_are_those_of_the_earlier_classes(tmp_path: Path, case: str) -> None:
    options, samples_digest, identity_digest, count = EARLIER[case]
    preset = yaml.safe_load((conf_dir() / f"dataset/{case.split()[0]}.yaml").read_text())
    loaded = load({**preset, "path": earlier_files(tmp_path, case), **options})
    texts = (" B", "It is 3", "#### 3", "C. no", "A or D", "#### 1,5")
    rows = [
        [s.id, s.task, s.prompt, list(s.answers), s.max_new_tokens, list(s.stop), s.truncation, s.target]
        + [s.rules.system, [loaded.score(s, text) for text in texts]]
        for s in loaded.samples()
    ]
    assert len(rows) == count
    assert _digest(rows) == samples_digest
    assert _digest(loaded.identity()) == identity_digest, "stored runs keep their ids"


def _digest(content: Any) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:16]


def test_a_line_break_may_be_typed_as_backslash_n() -> None:
    """A shell hands `dataset.template="Q: {q}\\nA:"` on with its backslash."""
    typed, written = (Template.parse(text, "dataset.template") for text in (r"Q: {q}\n\tA:", "Q: {q}\n\tA:"))
    assert typed == written
    assert typed.render({"q": "x"}, "here", {})[0] == "Q: x\n\tA:"
