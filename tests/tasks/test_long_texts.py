"""Prompts of a fixed number of tokens: texts to go on with, documents to summarize; OpenBookQA; what only warms up."""

from __future__ import annotations

import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from kvbench import tasks
from kvbench.errors import ConfigError, DataError
from kvbench.metrics.rouge import rouge
from kvbench.runner.prompting import encode_prompt
from kvbench.runner.run import answer_run
from kvbench.tasks.summaries import summary_templates
from kvbench.util.confdir import conf_dir
from tests.data_support import data_dir, read_lines
from tests.run_support import config


class Words(SimpleNamespace):
    """A tokenizer of a token a word, which comes with the blanks before it, after a beginning-of-sequence token."""

    bos_token_id = 1

    def __call__(self, text: str, add_special_tokens: bool = True, **kwargs: Any) -> dict[str, Any]:
        spans = [found.span() for found in re.finditer(r"\s*\S+", text)]
        ids = [2 + sum(map(ord, text[a:b])) % 997 for a, b in spans]
        if add_special_tokens:
            ids, spans = [1, *ids], [(0, 0), *spans]
        return {"input_ids": ids, "offset_mapping": spans}


def load(name: str, **overrides: Any) -> Any:
    """The task of a data set's YAML, bound to :class:`Words`."""
    loaded: Any = tasks.load({**yaml.safe_load((conf_dir() / "dataset" / f"{name}.yaml").read_text()), **overrides})
    if hasattr(loaded, "bind"):
        loaded.bind(Words())
    return loaded


def words(first: int, count: int) -> str:
    return " ".join(f"w{n}" for n in range(first, first + count))


# -- continuation ----------------------------------------------------------------------------------------------------


def test_prompts_skip_the_beginning_and_have_the_length_asked_for(tmp_path: Path) -> None:
    for book, size in (("a", 260), ("b", 139), ("c", 500)):
        (tmp_path / f"{book}.txt").write_text(words(0, size))
    task = load("pg19", path=str(tmp_path), lengths=[40], skip=80, max_new_tokens=10, limit=None, warm_up=1)
    samples = list(task.samples())
    assert [s.id for s in samples] == ["pg19@40/0.0", "pg19@40/1.0", "pg19@40/2.0"]
    assert [s.warm_up for s in samples] == [True, False, False]
    ids = Words()((tmp_path / "c.txt").read_text())["input_ids"]
    assert samples[2].rules.ids == (1, *ids[81:120])  # the first is the beginning-of-sequence token
    assert samples[2].answer_ids == tuple(ids[120:130])
    assert samples[2].answers == (f" {words(119, 10)}",)
    assert samples[2].prompt == f" {words(79, 40)}"
    prompt = encode_prompt(
        samples[2], None, chat="template", limit=100, room=100
    )  # no wrapper: the tokens are the prompt
    assert prompt.ids == tuple(samples[2].rules.ids)
    with pytest.raises(DataError, match=r"40 tokens, but only 39 fit .*\n.*dataset.lengths=\[39\]"):
        encode_prompt(samples[2], None, limit=39)
    # the authors' code takes all of a book, piece after piece: 139 + 1 tokens are one prompt and too little for another
    whole = load("pg19", path=str(tmp_path), lengths=[40], skip=80, max_new_tokens=10, per_document=None, limit=6)
    assert [s.id.split("/")[1] for s in whole.samples()] == [
        *(f"0.{i}" for i in range(4)),
        "1.0",
        "2.0",
        "2.1",
        "2.2",
        "2.3",
    ]
    assert task.identity()["sha256"] == whole.identity()["sha256"] and task.identity() != whole.identity()


def test_texts_that_are_too_short_are_said_with_the_remedy(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text(words(0, 50))

    def said(name: str = "text", **overrides: Any) -> str:
        with pytest.raises(DataError) as caught:
            list(load(name, path=str(tmp_path), max_new_tokens=5, **overrides).samples())
        return str(caught.value)

    computed = said(lengths=[40], skip=20)
    assert "none of 1 documents is long enough for a prompt of 40 tokens. The longest has 51 tokens;" in computed
    assert "65 are needed for dataset.skip=20, " in computed
    assert computed.endswith("hint: set dataset.lengths to at most [26], or reduce dataset.skip")
    list(load("text", path=str(tmp_path), max_new_tokens=5, lengths=[26], skip=20, warm_up=0).samples())  # it is so
    assert said("pg19", lengths=[40]).endswith("hint: provide longer texts, or reduce dataset.skip")
    assert said(lengths=[47]).endswith("hint: set dataset.lengths to at most [46]")
    computed = said(lengths=[16])  # two pieces, three of which were to warm up
    assert "only 2 prompts of 16 tokens, and the first 3 are used for warm-up, so none is left to measure" in computed
    assert "set dataset.warm_up to at most 1, or reduce dataset.lengths, or set dataset.per_document=null" in computed
    for name in ("text", "perplexity/text"):
        with pytest.raises(ConfigError, match=r"dataset\.path: no text is given.\n.*dataset.path=FILE_OR_FOLDER"):
            load(name)
    with pytest.raises(ConfigError, match=r"dataset\.lengths"):
        load("pg19", lengths=[])


def test_real_books_give_ten_prompts_and_three_to_warm_up() -> None:
    task = load("pg19", path=str(data_dir("pg19")), lengths=[4096, 8192])
    samples = list(task.samples())
    counted = [s for s in samples if not s.warm_up]
    assert len(samples) == 26 and [s.length for s in counted] == [4096] * 10 + [8192] * 10
    assert all(len(s.rules.ids) == s.length and len(s.answer_ids) == 90 for s in samples)
    assert len({s.id.split("/")[1].split(".")[0] for s in counted[:10]}) == 10  # of ten books


# -- summaries -------------------------------------------------------------------------------------------------------


def test_documents_lose_their_end_and_short_ones_are_left_out(tmp_path: Path) -> None:
    records = [{"document": words(0, n), "summary": f"about {n}"} for n in (500, 20, 300)] + [
        {"document": words(0, 900), "summary": None}
    ]
    (tmp_path / "test.jsonl").write_text("\n".join(map(json.dumps, records)))
    task = load("multi_lexsum", path=str(tmp_path), lengths=[128], limit=None, warm_up=1)
    samples = list(task.samples())
    assert [s.id for s in samples] == ["multi_lexsum@128/0", "multi_lexsum@128/2"]
    template = summary_templates()["multi_lexsum"]
    tail = Words()(template["after"], add_special_tokens=False)["input_ids"]
    ids = Words()(template["before"] + words(0, 500))["input_ids"]
    for sample in samples:
        assert len(sample.rules.ids) == 128 and list(sample.rules.ids[-len(tail) :]) == tail
        assert list(sample.rules.ids[: 128 - len(tail)]) == ids[: 128 - len(tail)]
        first, last = sample.rules.ids_context
        assert sample.prompt.endswith(template["after"]) and last == 128 - len(tail)
        assert list(sample.rules.ids[first:last]) == ids[first:last] and ids[first - 1] != ids[first]
    assert task.score(samples[0], "about 500") == dict.fromkeys(
        ("score", "rouge1", "rouge2", "rougeL", "rougeLsum"), 1.0
    )


class Letters(Words):
    """A token a character."""

    def __call__(self, text: str, add_special_tokens: bool = True, **kwargs: Any) -> dict[str, Any]:
        return {"input_ids": [ord(c) for c in text], "offset_mapping": [(i, i + 1) for i in range(len(text))]}


def test_records_that_are_too_short_are_said_with_the_remedy(tmp_path: Path) -> None:
    records = [{"document": words(0, n), "summary": "s"} for n in (100, 300)]
    (tmp_path / "test.jsonl").write_text("\n".join(map(json.dumps, records)))

    def samples(length: int, tokenizer: Any = None, **overrides: Any) -> list[Any]:
        task = load("multi_lexsum", path=str(tmp_path), lengths=[length], **overrides)
        task.bind(tokenizer or Words())
        return list(task.samples())

    template = summary_templates()["multi_lexsum"]
    longest = len(Words()(template["before"] + words(0, 300) + template["after"])["input_ids"])
    with pytest.raises(
        DataError, match=rf"none of 2 records fills .* {longest + 1} tokens; .* has {longest}\."
    ) as caught:
        samples(longest + 1)
    assert str(caught.value).endswith(f"hint: set dataset.lengths to at most [{longest}]")
    assert len(samples(longest, warm_up=0)) == 1
    with pytest.raises(
        DataError, match=r"only 1 prompt of .* tokens, and the first 3 are .*\n  hint: set dataset.warm_up to at most 0"
    ):
        samples(longest)
    with pytest.raises(
        DataError, match=rf"prompts of 32 tokens .* takes {len(template['after'])} tokens\.\n  hint: increase"
    ):
        samples(32, Letters())
    (tmp_path / "test.jsonl").write_text(json.dumps({"document": "d", "summary": None}))
    with pytest.raises(DataError, match="no record has both a text and a summary"):
        samples(128)


def test_forms_of_records(tmp_path: Path) -> None:
    """A release of Multi-LexSum with documents in a second file, the hub's joined form, InfiniteBench, and others."""
    release = {"case_id": "1", "case_documents": ["d2", "d1"], "summary/short": "s", "summary/long": "l"}
    (tmp_path / "test.json").write_text(json.dumps(release) + "\n" + json.dumps({**release, "summary/short": None}))
    (tmp_path / "sources.json").write_text(json.dumps({"d1": {"doc_text": "one"}, "d2": {"doc_text": "two"}}, indent=1))
    expected = [("two\n\none", ("s",))]
    assert load("multi_lexsum", path=str(tmp_path)).records == expected
    assert load("multi_lexsum", path=str(tmp_path / "test.json")).records == expected
    (tmp_path / "sources.json").write_text(json.dumps({"d1": {"doc_text": "one"}}))
    with pytest.raises(DataError, match=r"'d2' is not in sources\.json"):
        list(load("multi_lexsum", path=str(tmp_path)).samples())
    (tmp_path / "joined.jsonl").write_text(json.dumps({"id": "1", "sources": ["two", "one"], "summary/short": "s"}))
    assert load("multi_lexsum", path=str(tmp_path / "joined.jsonl")).records == expected
    book = {"id": 0, "context": "once", "input": "", "answer": ["a", "b"], "options": []}
    (tmp_path / "longbook_sum_eng.jsonl").write_text(json.dumps(book))
    assert load("infinitebench_sum", path=str(tmp_path)).records == [("once", ("a", "b"))]
    (tmp_path / "odd.jsonl").write_text(json.dumps({"text": "x"}))
    with pytest.raises(
        DataError, match=r"a record needs one of these pairs of fields: 'context' and 'answer'.*this record has text"
    ):
        load("multi_lexsum", path=str(tmp_path / "odd.jsonl")).records  # noqa: B018


def test_rouge_is_the_packages_stemmed_and_the_best_reference_counts() -> None:
    computed = rouge("The cats sat.", ["Dogs ran.", "The cat sat on a mat."])
    assert computed["rouge1"] == pytest.approx(2 * 3 / (3 + 6))  # cats is cat
    assert (
        computed["rougeLsum"] == computed["rougeL"] == computed["rouge1"]
        and 0 < computed["rouge2"] < computed["rouge1"]
    )
    assert rouge("", ["x"]) == dict.fromkeys(("rouge1", "rouge2", "rougeL", "rougeLsum"), 0.0)


def test_real_cases_are_read_and_cut() -> None:
    task = load("multi_lexsum", path=str(data_dir("multi_lexsum")), lengths=[512])
    samples = list(task.samples())
    assert len(task.records) > 500 and len(samples) == 13 and all(len(s.rules.ids) == 512 for s in samples)
    assert 0.2 < task.score(samples[5], samples[5].answers[0][:300])["score"] < 1.0


# -- OpenBookQA ------------------------------------------------------------------------------------------------------


def test_openbookqa_in_both_forms(tmp_path: Path) -> None:
    texts = ["a moon", "a bed", "a fish", "a sun"]
    choices = [{"text": text, "label": label} for text, label in zip(texts, "ABCD", strict=True)]
    theirs = {"id": "7", "question": {"stem": "What shines?", "choices": choices}, "answerKey": "D"}
    hub = {
        "id": "7",
        "question_stem": "What shines?",
        "choices": {"text": texts, "label": list("ABCD")},
        "answerKey": "D",
    }
    for folder, record in (("theirs", theirs), ("hub", hub)):
        (tmp_path / folder).mkdir()
        for split in ("train", "test"):
            (tmp_path / folder / f"{split}.jsonl").write_text(json.dumps(record))
    one, other = (load("openbookqa", path=str(tmp_path / folder), shots=1) for folder in ("theirs", "hub"))
    (sample,) = one.samples()
    assert [sample] == list(other.samples()) and one.identity() == other.identity()
    question = "Question: What shines?\nA. a moon\nB. a bed\nC. a fish\nD. a sun\nAnswer:"
    assert sample.prompt == f"{question} D\n\n{question}"
    scores = {" D": 1.0, "D. a sun": 1.0, "The answer is D": 1.0, " A": 0.0, "Dd": 0.0, "": 0.0}
    assert {text: one.score(sample, text)["score"] for text in scores} == scores
    (tmp_path / "hub" / "test.jsonl").write_text(json.dumps({"question": "?"}))
    with pytest.raises(DataError, match=r"line 1: the record has no field 'question.choices\|choices'"):
        list(load("openbookqa", path=str(tmp_path / "hub")).samples())


def test_real_questions_are_read() -> None:
    task = load("openbookqa", path=str(data_dir("openbookqa")))
    samples = list(task.samples())
    assert len(samples) == 500 and samples[0].prompt.count("Answer:") == 6
    assert samples[0].answers[0] == read_lines(data_dir("openbookqa", "test.jsonl.gz"))[0]["answerKey"]


# -- a run -----------------------------------------------------------------------------------------------------------


def test_warm_up_samples_come_first_and_count_for_memory_alone(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text(words(0, 900))
    dataset = {
        **yaml.safe_load((conf_dir() / "dataset/text.yaml").read_text()),
        "path": str(tmp_path / "a.txt"),
        "lengths": [64],
        "limit": 2,
        "warm_up": 2,
        "max_new_tokens": 4,
    }
    settings = config(tmp_path / "runs", "fp16", runtime={"batch_size": 4})
    metrics = answer_run({**settings, "dataset": dataset})
    rows = [json.loads(line) for line in Path(metrics["run_dir"], "samples.jsonl").read_text().splitlines()]
    assert [row.get("warm_up", False) for row in rows] == [True, True, False, False]
    assert {row["prompt_tokens"] for row in rows} == {64}
    assert metrics["samples"]["requested"] == metrics["samples"]["done"] == 2
    (entry,) = metrics["scores"].values()
    assert entry["n"] == 0 and entry["nll"]["n"] == 2  # no score, but the likelihood of the text's own next tokens
    assert rows[2]["nll"]["n"] == 4
    assert metrics["ttft_s"]["n"] == 2  # the first counted batch is not the session's first
    assert metrics["peak_bytes"]["prefill"] > 0
    again = answer_run({**settings, "dataset": dataset})
    assert again["samples"]["done"] == 2 and len(Path(again["run_dir"], "samples.jsonl").read_text().splitlines()) == 4


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"answerKey": "E"}, "field 'answerKey' is 'E'; expected one of A, B, C, D"),
        ({"answerKey": "AB"}, "field 'answerKey' is 'AB'"),
        ({"answerKey": ""}, "field 'answerKey' is an empty string"),
        ({"answerKey": 1}, "field 'answerKey' is a number"),
        ({"question_stem": None}, "field 'stem' is null"),
        ({"choices": {"text": ["a", "b", "c", 4], "label": list("ABCD")}}, "field 'choices' is a number"),
        (
            {"choices": {"text": list("abc"), "label": list("ABC")}},
            "field 'choices' has the labels A, B, C;",
        ),
    ],
)
def test_questions_that_have_no_right_answer_are_refused(tmp_path: Path, change: dict, said: str) -> None:
    good = {"question_stem": "?", "choices": {"text": list("abcd"), "label": list("ABCD")}, "answerKey": " D\n"}
    for split, rows in (("train", [good] * 5), ("test", [good, {**good, **change}])):
        (tmp_path / f"{split}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    with pytest.raises(DataError, match=rf"test.jsonl line 2: {said}"):
        load("openbookqa", path=str(tmp_path)).identity()
    (tmp_path / "test.jsonl").write_text(json.dumps(good))
    task = load("openbookqa", path=str(tmp_path))
    (sample,) = task.samples()
    assert sample.answers == ("D",) and task.score(sample, "D")["score"] == 1.0  # the key had blanks about it
    assert sample.prompt.count("Answer: D\n") == 5
    with pytest.raises(ConfigError, match=r"dataset\.shots=6: exceeds the number of records"):
        load("openbookqa", path=str(tmp_path), shots=6).identity()


@pytest.mark.parametrize(
    ("record", "said"),
    [
        ({"context": ["a"], "answer": "b"}, "field 'context' is a list"),
        ({"context": "a", "answer": {"b": 1}}, "field 'answer' is an object"),
        ({"context": "a", "answer": ["b", 1]}, "field 'answer' is a list"),
        ({"sources": "abc", "summary/short": "s"}, "field 'sources' is a string"),
        ({"sources": ["abc"], "summary/short": ["s"]}, "field 'summary/short' is a list"),
        ({"case_documents": ["one", "two"], "summary/short": "s"}, "document 'two' is not in sources.json"),
        ({"case_documents": "one", "summary/short": "s"}, "field 'case_documents' is a string"),
        ({"case_documents": ["bad"], "summary/short": "s"}, "document 'bad' of sources.json has no field 'doc_text'"),
        ({"document": 5, "summary": "s"}, "field 'document' is a number"),
        ({"document": "d", "summary": 5}, "field 'summary' is a number"),
        ({"other": 1}, "a record needs one of these pairs of fields: 'context' and 'answer'"),
    ],
)
def test_documents_and_summaries_of_another_kind_are_refused(tmp_path: Path, record: dict, said: str) -> None:
    good = {"document": words(0, 50), "summary": "s"}
    (tmp_path / "test.jsonl").write_text(f"{json.dumps(good)}\n{json.dumps(record)}")
    (tmp_path / "sources.json").write_text(json.dumps({"one": {"doc_text": "d"}, "bad": "d"}))
    with pytest.raises(DataError, match=rf"test.jsonl line 2: {said}"):
        load("multi_lexsum", path=str(tmp_path)).identity()


def test_case_documents_are_joined_in_their_order(tmp_path: Path) -> None:
    rows = [{"case_documents": ["two", "one"], "summary/short": "s"}, {"sources": ["a", "b"], "summary/short": "t"}]
    (tmp_path / "test.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (tmp_path / "sources.json").write_text(json.dumps({"one": {"doc_text": "first"}, "two": {"doc_text": "second"}}))
    assert load("multi_lexsum", path=str(tmp_path)).records == [("second\n\nfirst", ("s",)), ("a\n\nb", ("t",))]
    blank = [
        {"sources": [" "], "summary/short": "s"},
        {"document": "d", "summary": " \n"},
        {"context": "c", "answer": ["", " "]},
    ]
    (tmp_path / "test.jsonl").write_text("\n".join(map(json.dumps, [*rows, *blank])))
    assert len(load("multi_lexsum", path=str(tmp_path)).records) == 2
    (tmp_path / "sources.json").write_text("[" * 100_000)
    with pytest.raises(DataError, match=r"sources.json: the JSON is nested too deeply"):
        load("multi_lexsum", path=str(tmp_path)).identity()
