"""Small parts of data sets: options of questions, templates, shards, splits, drawn spans, generated samples."""

from __future__ import annotations

import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvbench.errors import ConfigError, DataError
from kvbench.hub.repository import HubError
from kvbench.tasks import hub_files, texts
from kvbench.tasks.filled import filled_prompts
from kvbench.tasks.hub_files import HubSource, whole_split
from kvbench.tasks.mini.compose import DraftQuestion, Setting
from kvbench.tasks.mini.retrieval import locate_value
from kvbench.tasks.mini.rng import Rng
from kvbench.tasks.mini.task import SCORERS
from kvbench.tasks.perplexity import Perplexity
from kvbench.tasks.template import Entry, Template, choice_options, correct, lettered_options, lookup


def test_options_and_the_right_one() -> None:
    offered = choice_options({"label": ["1", "2", "3"], "text": ["x", "y", "x"]}, "o", "here")
    assert offered == [("1", "x"), ("2", "y"), ("3", "x")]
    assert lettered_options(offered) == "A. x\nB. y\nC. x"
    assert [correct(value, offered, "a", "here") for value in ("3", " 2 ", "y", 0, 2)] == ["C", "B", "B", "A", "C"]
    for wrong in ("x", "A", 3, -1, True, None, ""):  # "x" names two options
        with pytest.raises(DataError, match=r"here: field 'a' is .*; expected one of 1, 2, 3, the text of one option"):
            correct(wrong, offered, "a", "here")
    assert correct(" B ", (), "a", "here") == "B"
    for wrong in ("b", "AB", "", 1):
        with pytest.raises(DataError, match=r"expected a letter A to Z"):
            correct(wrong, (), "a", "here")
    with pytest.raises(DataError, match="has 2 labels for 1 texts"):
        choice_options({"label": ["A", "B"], "text": ["x"]}, "o", "here")
    assert len(choice_options(["x"] * 26, "o", "here")) == 26
    with pytest.raises(DataError, match="has 27 options; expected 2 to 26"):
        choice_options(["x"] * 27, "o", "here")


def test_templates() -> None:
    template = Template.of("a.b|c", "k")
    assert template.fields == ["a.b|c"]
    assert [template.render(record, "here", {})[0] for record in ({"a": {"b": 1}}, {"c": "x", "a": 3})] == ["1", "x"]
    whole = Template.parse("{{{x}}} {y}!{x}", "k")
    assert whole.render({"x": "12", "y": 3.5}, "here", {"y": "own"}) == ("{12} own!12", {"x": (9, 11), "y": (5, 8)})
    with pytest.raises(DataError, match=r"here: the record has no field 'a\|b'; its fields are c, d"):
        lookup({"c": 1, "d": 2}, "a|b", "here")
    assert lookup({"a": {"b": None}, "c": 2}, "a.b | c", "here") is None
    with pytest.raises(ConfigError, match=r"\{a\|\} is not the name of a field"):
        Template.parse("{a|}", "k")
    entry = Entry("Q:", None, "", ("x", "y"), {})
    assert entry.target == " x" and Entry("Q:\n", None, "", ("x",), {}).target == "x"


def test_shards_of_a_split() -> None:
    shards = [f"a/test-{n:05}-of-00003.parquet" for n in (2, 0, 1)]
    assert whole_split(shards, "w", "what", "place") == sorted(shards)
    assert whole_split(["x.jsonl"], "w", "what", "place") == ["x.jsonl"]
    digests = ["t-00000-of-00002-0a1b.parquet", "t-00001-of-00002-9f.parquet"]
    assert whole_split(digests, "w", "what", "place") == digests
    for files, missing in ((shards[1:], "test-00002-of-00003"), (["t-00001-of-00002.parquet"], "t-00000-of-00002")):
        with pytest.raises(DataError, match=rf"what: 'w' lacks {missing}\.parquet, one of its . shards in place"):
            whole_split(files, "w", "what", "place")
    twice = ["t-00000-of-00001.parquet", "t-00000-of-00001-ab.parquet"]
    with pytest.raises(DataError, match="lacks t-00000-of-00001"):
        whole_split(twice, "w", "what", "place")
    for files in (["a-00000-of-00001.parquet", "b-00000-of-00001.parquet"], ["a.parquet", "t-00000-of-00001.parquet"]):
        with pytest.raises(DataError, match=r"matches 2 files of place .* that are not the shards of one split"):
            whole_split(files, "w", "what", "place")


def test_files_of_a_split_are_those_that_datasets_would_load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert hub_files.is_split("@/test") and not hub_files.is_split("test.jsonl")
    names = ["data/test-00000-of-00001.parquet", "data/train-00000-of-00001.parquet", "../x.parquet", "/y.parquet"]
    assert hub_files.split_files("@/test", names, None) == names[:1]
    with pytest.raises(HubError, match=r"the repository has no split 'dev' \(it has: train, test\)"):
        hub_files.split_files("@/dev", names, None)
    readme = tmp_path / "README.md"
    readme.write_text(
        "---\nconfigs:\n- config_name: own\n  data_files:\n  - split: test\n    path: more/b.jsonl\n---\n"
    )
    assert hub_files.split_files("@own/test", ["more/a.jsonl", "more/b.jsonl", "README.md"], readme) == ["more/b.jsonl"]
    with pytest.raises(HubError, match=r"does not find the split's files: .*; it has a script \(x\.py\)"):
        hub_files.split_files("@other/test", ["x.py"], None)
    monkeypatch.setattr(hub_files, "_MOST", 2)
    with pytest.raises(HubError, match="the repository has 3 files, too many"):
        hub_files.split_files("@/test", ["a", "b", "c", "../d"], None)


def test_a_file_that_the_hub_does_not_give_is_named() -> None:
    source = HubSource(hub_id="a/b")
    absent = HubError("the hub does not answer", "connect", absent=True)
    text = str(hub_files.unavailable_error(source, "x.jsonl", "dataset toy", absent, "set a path"))
    assert text == (
        "dataset toy: a/b/x.jsonl is not on this machine, and the hub does not answer.\n  hint: connect; set a path"
    )
    other = str(hub_files.unavailable_error(source, "x.jsonl", "dataset toy", HubError("it is full"), "set a path"))
    assert other == "dataset toy: it is full."
    assert hub_files.sizes(HubSource(), "x", "w", "") == (0, 0) and hub_files.cached(HubSource(), "x", "w") is None
    with pytest.raises(DataError, match=r"w: no file is given\.\n  hint: set dataset\.path=FILE_OR_FOLDER"):
        hub_files.download(HubSource(), "x", "w", "")


def test_sizes_of_files_that_are_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("a", "b"):
        (tmp_path / name).write_bytes(b"123")
    monkeypatch.setattr(hub_files, "cached", lambda *given: [tmp_path / "a", tmp_path / "b"])
    assert hub_files.sizes(HubSource(hub_id="a/b"), "x", "w", "") == (6, 0)
    monkeypatch.setattr(hub_files, "cached", lambda *given: None)
    monkeypatch.setattr(hub_files, "demand", lambda repository, name: SimpleNamespace(size=9))
    assert hub_files.sizes(HubSource(hub_id="a/b"), "x", "w", "") == (9, 9)
    monkeypatch.setattr(hub_files, "demand", lambda repository, name: SimpleNamespace(size=None))
    assert hub_files.sizes(HubSource(hub_id="a/b"), "x", "w", "") == (0, None)
    monkeypatch.setattr(hub_files, "plan", lambda *given: SimpleNamespace(total=10, missing_bytes=4))
    assert hub_files.sizes(HubSource(hub_id="a/b"), "x-*", "w", "") == (10, 4)


class Letters(SimpleNamespace):
    """A tokenizer of one token a character."""

    bos_token_id = 1

    def __call__(self, text: Any, **kwargs: Any) -> dict[str, Any]:
        if isinstance(text, list):
            return {"input_ids": [[ord(c) for c in one] for one in text]}
        return {"input_ids": [ord(c) for c in text], "offset_mapping": [(i, i + 1) for i in range(len(text))]}


def spans(text: str, documents: list[str], **options: Any) -> list[Any]:
    task = Perplexity(text=text, window=8, **options)  # type: ignore[arg-type]
    task.documents = documents
    task.bind(Letters())
    return list(task.samples())


def test_spans_of_documents_by_hand() -> None:
    documents = ["abcdefghijklmnopqrst", "short", "ABCDEFGHIJé\ud800"]
    computed = spans("pg19", documents, prefill=3)
    assert [(s.id, s.work.document, chr(s.work.ids[0]), s.work.first) for s in computed] == [
        ("pg19@8/0", 0, "a", 3), ("pg19@8/1", 0, "i", 3), ("pg19@8/2", 2, "A", 3)
    ]  # fmt: skip
    assert [s.work.bytes for s in computed] == [5, 5, 5] and computed[0].work.prefill == 3
    assert [chr(s.work.ids[0]) for s in spans("pg19", documents, per_document=1, skip=1)] == ["b", "B"]
    assert [chr(s.work.ids[0]) for s in spans("pg19", documents, limit=2)] == ["a", "i"]
    last = spans("pg19", documents, skip=4)[-1]
    assert chr(last.work.ids[0]) == "E" and last.work.bytes == 5 + 2 + 3  # FGHIJ, é, half a character
    with pytest.raises(DataError, match="no document has at least 8 tokens"):
        spans("pg19", ["short"])
    assert len(spans("c4_new", ["x" * 8 * 300])) == 256 and len(spans("c4_new", ["x" * 8 * 300], limit=300)) == 300
    assert len(spans("pg19", ["x" * 8 * 300])) == 300


def test_spans_of_c4_are_drawn_as_gptq_draws_them() -> None:
    documents = ["tooshort", "abcdefghi", "x" * 30]
    draw, expected = random.Random(0), []
    while len(expected) < 256:
        number = draw.randint(0, 2)
        if len(documents[number]) > 8:
            expected.append((number, draw.randint(0, len(documents[number]) - 9)))
    computed = spans("c4", documents)
    assert [sample.work.document for sample in computed] == [number for number, _ in expected]
    firsts = [documents[number][start] for number, start in expected]
    assert [chr(sample.work.ids[0]) for sample in computed] == firsts
    assert len(spans("c4", documents, limit=5)) == 5
    with pytest.raises(DataError, match="at least 8 tokens"):
        spans("c4", ["tooshort"])


def test_c4_joined_is_its_first_1100_documents(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(texts, "c4", lambda source, path: [f"d{n}" for n in range(1200)])
    assert texts.c4_joined(HubSource(), None) == [" ".join(f"d{n}" for n in range(1100))]


def test_the_identity_of_spans() -> None:
    task = Perplexity(text="pg19", window=8, stride=4, skip=1, prefill=2, bos=True, per_document=3, mode="fp16")
    task.documents = ["ab", "c"]
    identity = task.identity()
    assert len(identity.pop("sha256")) == 16
    assert identity == {
        "target": "perplexity", "version": 1, "documents": 2, "per_document": 3, "text": "pg19", "mode": "fp16",
        "window": 8, "stride": 4, "skip": 1, "prefill": 2, "bos": True,
    }  # fmt: skip
    assert task.notes() == {"mode": "fp16", "characters": 3}


def test_filled_prompts_begin_with_their_own_sentence() -> None:
    prompts = filled_prompts(Letters(bos_token_id=None), 400, 3)
    beginnings = ["".join(map(chr, ids[:12])) for ids in prompts.ids]
    assert len(set(beginnings)) == 3 and all(text.startswith(" ") for text in beginnings)
    for ids, query in zip(prompts.ids, prompts.queries, strict=True):
        word = query.split("'")[1]
        text = "".join(map(chr, ids))
        assert word in text.split(".")[0] and text.endswith(f"'{word}'?\nAnswer:")
    short = filled_prompts(Letters(bos_token_id=None), 80, 1)  # the question would fill more than half
    assert short.contexts == [(0, 60)] and "Answer" not in "".join(map(chr, short.ids[0]))


def test_numbers_of_records_and_their_sizes() -> None:
    def setting(**more: Any) -> Setting:
        return Setting(Rng("x"), None, 1200, **more)  # type: ignore[arg-type]

    assert setting().count(16, 100) == 12 and setting().count(5, 100) == 5
    assert setting().count(16, 5000) == 1 and setting().count(16, 5000, least=3) == 3
    assert setting().size(20, 6, 30) == 20
    vary = setting(vary=True)
    assert {vary.count(16, 100) for _ in range(300)} == set(range(4, 13))
    assert {vary.count(16, 100, least=9) for _ in range(300)} == set(range(9, 13))
    assert {vary.size(20, 6, 9) for _ in range(200)} == {6, 7, 8, 9}
    assert len(setting(questions=3).pick(10)) == 3 and sorted(setting(questions=9).pick(4)) == [0, 1, 2, 3]
    assert locate_value("a 12 and 12", 4, "12") == (4, 9, 11)
    question = DraftQuestion("p", "q", "a", ())
    assert question.continuation == " a" and DraftQuestion("p", "q", "a", (), glued=True).continuation == "a"


def test_scorers_of_the_bundled_tasks() -> None:
    assert SCORERS["exact"]("it is ann lee", "Ann Lee", {}) == {"score": 0.0, "contained": 1.0}
    assert SCORERS["words"]("a b x", "a b c d", {}) == {"score": 0.0, "words": 0.5}
    assert SCORERS["values"]("1, 3", "1, 2", {"parts": ["1", "2"]}) == {"score": 0.5, "exact": 0.0}
    solution = "1 + 2 = 3. #### 3"
    assert SCORERS["number"]("so #### 3", solution, {}) == {"score": 1.0, "steps": 0.0, "flexible": 1.0}
    assert SCORERS["number"]("#### 4, no, 3", solution, {}) == {"score": 0.0, "steps": 0.0, "flexible": 1.0}
    assert SCORERS["number"](solution, solution, {}) == {"score": 1.0, "steps": 1.0, "flexible": 1.0}
