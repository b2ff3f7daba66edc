"""What each data set needs from elsewhere, what identifies it, and how it asks others: files, packages, facts."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvbench.errors import ConfigError, DataError
from kvbench.tasks import file_parsers, records, texts
from kvbench.tasks.continuation import Continuation
from kvbench.tasks.fidelity import Fidelity
from kvbench.tasks.files import Found
from kvbench.tasks.gsm8k import GSM8K
from kvbench.tasks.hub_files import HubSource
from kvbench.tasks.longbench import LongBench
from kvbench.tasks.perplexity import Perplexity
from kvbench.tasks.ruler.outside_texts import english_words, hotpotqa, splitter, squad
from kvbench.tasks.ruler.task import Ruler
from kvbench.tasks.summaries import Summaries
from kvbench.tasks.work import Question
from tests.tasks.test_fits import setup
from tests.tasks.test_long_texts import Words

HUB = HubSource(hub_id="o/n", file="{task}.jsonl")


@pytest.mark.parametrize(
    ("task", "wanted"),
    [
        (Perplexity(source=HUB), [(HUB, "test")]),
        (Perplexity(), []),
        (Continuation(source=HUB), [(HUB, "test")]),
        (Continuation(), []),
        (Summaries(source=HUB), [(HUB, "test"), (HUB, "sources")]),
        (Summaries(source=HUB, kind="infinitebench_sum", split="longbook"), [(HUB, "longbook")]),
        (GSM8K(source=HUB), [(HUB, "train"), (HUB, "test")]),
        (Ruler(tasks=("niah_single_1",), essays=HUB), []),
        (Ruler(tasks=("niah_single_2",), essays=HUB), [(HUB, "train")]),
        (Ruler(tasks=("niah_single_2",), essays=HUB, haystack="a.txt"), []),
        (Ruler(tasks=("qa_1",), squad_source=HUB), [(HUB, "validation")]),
        (Ruler(tasks=("qa_1",), squad_source=HUB, squad="a.json"), []),
        (Ruler(tasks=("qa_2",), hotpotqa_source=HUB), [(HUB, "validation")]),
        (Ruler(tasks=("qa_2",), hotpotqa_source=HUB, hotpotqa="a.json"), []),
        (Ruler(tasks=("vt",), essays=HUB, squad_source=HUB), []),
        (Fidelity(), []),
        (Fidelity(over="perplexity/wikitext2", options={"source": {"hub_id": "o/n"}}), [(HUB, "test")]),
    ],
)
def test_the_files_that_are_fetched(task: Any, wanted: list[tuple[HubSource, str]]) -> None:
    assert list(task.files()) == wanted


@pytest.mark.parametrize(
    ("tasks", "needed"),
    [
        (("niah_single_1",), True),
        (("niah_multikey_3",), False),
        (("niah_multikey_3", "cwe"), True),
        (("cwe",), True),
        (("vt", "fwe", "qa_1"), False),
    ],
)
def test_words_are_needed_for_keys_and_lists_of_words(tasks: tuple[str, ...], needed: bool) -> None:
    packages = Ruler(tasks=tasks).packages()
    assert [package.module for package in packages] == ["wonderwords"] * needed


def test_a_package_is_named_with_its_option() -> None:
    (package,) = Summaries(name="mine").packages()
    assert (package.module, package.key, package.value) == ("rouge_score", "dataset", "mine")
    assert "pip install rouge-score" in package.hint
    (package,) = LongBench(tasks=("qasper", "dureader")).packages()
    assert (package.module, package.key, package.value) == ("jieba", "dataset.tasks", "dureader")
    assert LongBench(tasks=("qasper",)).packages() == () == Fidelity().packages()
    over = Fidelity(over="longbench", options={"tasks": ["dureader"]})
    assert [package.module for package in over.packages()] == ["jieba"]


def test_lengths_of_ruler_fit_the_model() -> None:
    task = Ruler(tasks=("vt",), lengths=(512, 1000))
    task.fits(setup())
    for lengths, hint in (((512, 1001, 900), "dataset.lengths=[512,900]"), ((2000, 1001), "dataset.lengths=[1000]")):
        with pytest.raises(ConfigError) as caught:
            Ruler(tasks=("vt",), lengths=lengths).fits(setup())
        assert (caught.value.key, caught.value.value, caught.value.hint) == ("dataset.lengths", max(lengths), hint)


def test_prompts_of_summaries_and_continuations_fit_the_model() -> None:
    for kind in (Summaries, Continuation):
        kind(lengths=(910,), max_new_tokens=90).fits(setup())
        with pytest.raises(ConfigError, match=r"dataset\.lengths"):
            kind(lengths=(911,), max_new_tokens=90).fits(setup())


@pytest.mark.parametrize("tasks", [(), ("qasper", "qasper"), ("nothing",)])
def test_lists_of_tasks_of_longbench_are_checked(tasks: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError) as caught:
        LongBench(tasks=tasks).check()
    assert caught.value.key == "dataset.tasks"


def test_fidelity_compares_greedy_decoding_in_one_process() -> None:
    task = Fidelity(window=1000)
    config = setup(decoding_temperature=0.0, runtime_tensor_parallel=None)
    task.fits(config)
    assert config.checked == [("decode", 512)], "the windows' own data set is asked"
    for key, change in (
        ("decoding.temperature", {"decoding_temperature": 0.5}),
        ("runtime.tensor_parallel", {"runtime_tensor_parallel": 2}),
        ("dataset.window", {"model_max_length": 999}),
    ):
        with pytest.raises(ConfigError) as caught:
            task.fits(setup(**{"decoding_temperature": 0.0, "runtime_tensor_parallel": None, **change}))
        assert caught.value.key == key and caught.value.hint


def plain(task: str = "toy/0", **fields: Any) -> Any:
    from kvbench.tasks.base import Sample

    return Sample(id=task, task="toy", prompt="p", answers=fields.pop("answers", ()), max_new_tokens=3, **fields)


def compared(samples: list[Any], **fields: Any) -> list[Any]:
    task = Fidelity(**fields)
    inner = SimpleNamespace(samples=lambda: iter(samples), notes=lambda: {"a": 1}, identity=lambda: {"b": 2}, version=7)
    task.__dict__["inner"] = inner
    assert task.notes() == {"a": 1}
    identity = task.reference_identity()
    assert identity == {
        "target": "fidelity", "version": 1, "over": {"b": 2}, "over_version": 7, "mode": task.mode,
        "answers": task.answers,
    }  # fmt: skip
    assert task.identity() == identity | {
        "statistics": task.statistics, "reference": task.reference, "probe": task.probe
    }  # fmt: skip
    return list(task.samples())


def test_samples_that_warm_up_are_not_compared_and_the_first_ones_are_probed() -> None:
    samples = [plain("w", warm_up=True), *(plain(str(n)) for n in range(3))]
    found = compared(samples, probe=2, statistics="llamacpp", reference="live")
    assert [(sample.id, sample.work.probe) for sample in found] == [("0", True), ("1", True), ("2", False)]
    work = found[0].work
    assert (work.ids, work.prefill, work.mode, work.answers) == (None, 0, "decode", "fp16")
    assert (work.statistics, work.reference) == ("llamacpp", "live")


def test_reference_answers_must_be_there_if_they_are_compared() -> None:
    assert compared([plain(answers=("x",)), plain(answer_ids=(3,))], answers="task")[1].work.answers == "task"
    with pytest.raises(DataError, match=r"toy/0 of mine has no reference answer\.\n  hint: dataset\.answers=fp16"):
        compared([plain(answers=("",))], answers="task", over="mine")


def test_identities_of_texts_and_summaries(tmp_path: Path) -> None:
    (tmp_path / "test.jsonl").write_text(json.dumps({"document": "a b", "summary": "c"}))
    task = Summaries(path=str(tmp_path), lengths=(16, 32), warm_up=2, max_new_tokens=7)
    identity = task.identity()
    assert len(identity.pop("sha256")) == 16 and identity == {
        "target": "multi_lexsum", "version": 1, "lengths": [16, 32], "warm_up": 2, "max_new_tokens": 7
    }  # fmt: skip
    assert {key: task.notes()[key] for key in ("records", "warm_up")} == {"records": 1, "warm_up": 2}
    (tmp_path / "a.txt").write_text("some é words")
    text = Perplexity(text="text", path=str(tmp_path), window=8, prefill=2, skip=1, per_document=3)
    assert text.notes() == {"mode": "decode", "characters": 12}
    identity = text.identity()
    assert len(identity.pop("sha256")) == 16 and identity == {
        "target": "perplexity", "version": 1, "documents": 1, "per_document": 3, "text": "text", "mode": "decode",
        "window": 8, "stride": None, "skip": 1, "prefill": 2, "bos": False,
    }  # fmt: skip
    going_on = Continuation(text="text", path=str(tmp_path), lengths=(16,), warm_up=1, skip=2)
    assert going_on.notes() == {"documents": 1, "warm_up": 1} and going_on.score(plain(), "x") == {} == text.score(
        plain(), "x"
    )


def test_court_documents_are_one_object(tmp_path: Path) -> None:
    (tmp_path / "test.json").write_text(json.dumps([{"case_documents": ["d"], "summary/short": "s"}]))
    (tmp_path / "sources.json").write_text("[1]")
    with pytest.raises(DataError, match=r"sources\.json: expected a JSON object from ids to documents, not a list"):
        _ = Summaries(path=str(tmp_path)).records


def test_the_longest_record_is_named_if_none_fills_a_prompt(tmp_path: Path) -> None:
    """A prompt of that length is filled, and one of a token more is not."""
    records_ = [{"document": " ".join(["w"] * n), "summary": "s"} for n in (3, 30)]
    (tmp_path / "test.jsonl").write_text("\n".join(map(json.dumps, records_)))

    def samples(length: int) -> list[Any]:
        task = Summaries(path=str(tmp_path), lengths=(length,), warm_up=0, limit=None)
        task.bind(Words())
        return list(task.samples())

    with pytest.raises(
        DataError, match=r"none of 2 records fills a prompt of 4000 tokens; the longest has (\d+)"
    ) as one:
        samples(4000)
    longest = int(str(one.value).partition("the longest has ")[2].partition(".")[0])
    assert f"set dataset.lengths to at most [{longest}]" in str(one.value)
    assert [len(sample.rules.ids) for sample in samples(longest)] == [longest]
    with pytest.raises(DataError, match=f"longest has {longest}"):
        samples(longest + 1)


def test_gsm8k_needs_a_folder_of_two_files(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text("{}")
    with pytest.raises(DataError, match=r"a\.jsonl is a single file\.\n  hint: name a folder"):
        _ = GSM8K(path=str(tmp_path / "a.jsonl")).entries
    for name, count in (("train", 2), ("test", 1)):
        line = json.dumps({"question": "1 + 1?", "answer": "It is 2.\n#### 2"})
        (tmp_path / f"{name}.jsonl").write_text("\n".join([line] * count))
    notes = GSM8K(path=str(tmp_path), shots=0).notes()
    assert notes["records"] == {"train": 2, "test": 1} and "Question:" in notes["stop"]


def test_a_question_is_followed_by_its_answer_or_target() -> None:
    assert Question("p", "a").continuation == "a" and Question("p", "a", target=" b").continuation == " b"
    assert Question("p", "a", target="").continuation == ""


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (7, "a number (7)"),
        (0.5, "a number (0.5)"),
        ([1], "a list ([1])"),
        ((1,), "tuple ((1,))"),
        ({"a": 1}, "an object ({'a': 1})"),
        (True, "a boolean (True)"),
        ("x\ud800", "a string with a lone surrogate, which is half a character"),
        ("", "an empty string"),
    ],
)
def test_a_wrong_value_is_shown_with_its_kind(value: Any, shown: str) -> None:
    with pytest.raises(DataError) as caught:
        records.Kind("nothing", lambda value: False).check(value, "f", "here")
    assert str(caught.value) == f"here: field 'f' is {shown}; expected nothing."


def test_files_of_ruler_are_read_in_both_layouts(tmp_path: Path) -> None:
    words = tmp_path / "words.json"
    for content in (["b", "a"], {"0": "b", "1": "a"}):
        words.write_text(json.dumps(content))
        assert english_words(str(words)) == ["b", "a"]
    for wrong in ("text", [1], {"a": 1}):
        words.write_text(json.dumps(wrong))
        with pytest.raises(DataError, match=r"dataset\.english_words=.*is not a JSON list or object of words"):
            english_words(str(words))
    with pytest.raises(DataError, match=r"dataset\.english_words=.* does not exist"):
        english_words(str(tmp_path / "none"))
    with pytest.raises(DataError, match=r"dataset\.english_words=.* is a folder"):
        english_words(str(tmp_path))
    (tmp_path / "hotpot.json").write_text("[]")
    for name, reader in (("dataset.squad", squad), ("dataset.hotpotqa", hotpotqa)):
        with pytest.raises(DataError, match=f"{name}=.* is a folder"):
            reader(str(tmp_path), HubSource())
    assert splitter("simple")("One. Two! Three") == ["One.", "Two!", "Three"]


def test_questions_of_the_hubs_files(tmp_path: Path) -> None:
    rows = [
        {"context": c, "title": t, "question": f"q{i}", "answers": {"text": a}}
        for i, (c, t, a) in enumerate([("b", "t", ["x", "y"]), ("a", "t", []), ("c", "u", ["z"]), ("b", "t", ["w"])])
    ]
    (tmp_path / "s.jsonl").write_text("\n".join(map(json.dumps, rows)))
    documents, questions = squad(str(tmp_path / "s.jsonl"), HubSource())
    assert documents == ["a", "b", "c"]
    assert [(q.text, q.answers, q.own, q.more) for q in questions] == [
        ("q0", ("x", "y"), (1,), (0,)),
        ("q2", ("z",), (2,), ()),
        ("q3", ("w",), (1,), (0,)),
    ]
    context = {"title": ["t", "s"], "sentences": [["One. ", "Two."], ["Three."]]}
    (tmp_path / "h.jsonl").write_text(json.dumps({"question": "q", "answer": "a", "context": context}))
    documents, questions = hotpotqa(str(tmp_path / "h.jsonl"), HubSource())
    assert documents == ["s\nThree.", "t\nOne. Two."]
    assert [(q.text, q.answers, q.own, q.more) for q in questions] == [("q", ("a",), (1, 0), ())]


def test_texts_of_data_sets(tmp_path: Path) -> None:
    lines = [json.dumps({"text": f"d{n}"}) for n in range(1101)]
    file = tmp_path / "c4.jsonl"
    file.write_text("\n".join(lines))
    assert texts.c4(HubSource(), str(file)) == [f"d{n}" for n in range(1101)]
    assert texts.c4_joined(HubSource(), str(file)) == [" ".join(f"d{n}" for n in range(1100))]
    (tmp_path / "test.jsonl").write_text("\n".join(lines[:2]))
    assert texts.wikitext2(HubSource(), str(tmp_path)) == ["d0\n\nd1"]
    with pytest.raises(ConfigError, match=r"dataset\.path"):
        texts.check_text("text", None)
    texts.check_text("text", "a")
    texts.check_text("wikitext2", None)
    with pytest.raises(DataError, match=r"several files that could be the text: test\.raw\.txt, test\.txt") as caught:
        for name in ("test.txt", "test.raw.txt"):
            (tmp_path / name).write_text("x")
        texts.wikitext2(HubSource(), str(tmp_path))
    assert f"dataset.path={tmp_path / 'test.raw.txt'}" in str(caught.value)


def test_records_of_several_files_are_read_one_file_after_the_other(tmp_path: Path) -> None:
    for name in "ab":
        (tmp_path / f"{name}.jsonl").write_text(json.dumps({"n": name}))
    file = Found(tmp_path / "a.jsonl", None, (tmp_path / "b.jsonl",))
    placed = list(file_parsers.placed_records(file))
    assert [record for _, record in placed] == [{"n": "a"}, {"n": "b"}]
    assert [place for place, _ in placed] == [f"{tmp_path}/{name}.jsonl line 1" for name in "ab"]
