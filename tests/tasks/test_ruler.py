"""RULER: prompts equal to those of the authors' scripts, texts from elsewhere, scores."""

from __future__ import annotations

import hashlib
import json
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from kvbench.errors import ConfigError, DataError
from kvbench.metrics import ruler as metric
from kvbench.tasks.load import load
from kvbench.tasks.ruler import Ruler, outside_texts
from kvbench.tasks.ruler.frame import KINDS, NOISE
from kvbench.tasks.ruler.outside_texts import Pairs
from kvbench.tasks.ruler.stream import RulerPrompt, Stream, fitting, largest
from kvbench.tasks.ruler.task import GROUPS, prompts_checksum

GOLDEN = json.loads((Path(__file__).parents[1] / "golden" / "ruler.json").read_text(encoding="utf-8"))


class Tiny:
    """The bundled model's tokenizer."""

    def __init__(self) -> None:
        self.tokenizer = Tokenizer.from_file(str(files("kvbench") / "models" / "tiny" / "tokenizer.json"))

    def tokenize(self, text: str) -> list[str]:
        tokens: list[str] = self.tokenizer.encode(text, add_special_tokens=False).tokens
        return tokens


@pytest.fixture(scope="module")
def tiny_tokenizer() -> Tiny:
    return Tiny()


class Words:
    """A tokenizer whose tokens are the words of a text."""

    def tokenize(self, text: str) -> list[str]:
        return text.split()


def ruler(tokenizer: Any, **options: Any) -> Ruler:
    task = Ruler(**options)
    task.check()
    task.bind(tokenizer)
    return task


@pytest.mark.parametrize("case", GOLDEN, ids=lambda case: f"{case['task']}@{case['length']}")
def test_prompts_are_those_of_the_authors_scripts(case: dict[str, Any], tiny_tokenizer: Any) -> None:
    task = ruler(tiny_tokenizer, tasks=(case["task"],), lengths=(case["length"],), limit=case["samples"])
    samples = list(task.samples())
    assert [sample.meta["tokens"] for sample in samples] == case["tokens"]
    assert prompts_checksum([sample.prompt for sample in samples]) == case["sha256"]
    assert task.notes()["prompts_sha256"] == {f"{case['task']}@{case['length']}": case["sha256"]}
    if "outputs" in case:
        assert [list(sample.answers) for sample in samples] == case["outputs"]
    for sample in samples:
        assert sample.max_new_tokens == KINDS[case["task"]].budget and sample.rules.chat is False
        start, end = sample.context_span or (0, 0)
        context = sample.prompt[start:end]
        assert sample.query in sample.prompt[end:]
        assert all(answer in context for answer in sample.answers)


def test_pairs_of_words_are_sorted_and_there_once() -> None:
    adjectives = ["well", "well-known", "wellborn", "a", "well", "well-k", "z-", "zoo"]
    nouns = ["x", "known", "known-x", "b", "x", "-y", "k-x"]
    made = Pairs(adjectives, nouns)
    assert list(made) == sorted({f"{adjective}-{noun}" for adjective in adjectives for noun in nouns})
    assert made[-1] == list(made)[-1] and made[3:5] == list(made)[3:5] and len(Pairs([], nouns)) == 0
    with pytest.raises(IndexError):
        made[len(made)]


def test_fewer_samples_are_the_first_of_more(tiny_tokenizer: Any) -> None:
    few = list(ruler(tiny_tokenizer, tasks=("vt",), lengths=(1024,), limit=2).samples())
    more = ruler(tiny_tokenizer, tasks=("vt",), lengths=(1024,), limit=5)
    assert list(more.samples())[:2] == few
    assert more.sample("vt", 1024, 1) == few[1]  # samples may be asked for again, in any order
    assert more.identity() == ruler(tiny_tokenizer, tasks=("vt",), lengths=(1024,), limit=2).identity()
    other = ruler(tiny_tokenizer, tasks=("vt",), lengths=(1024,), limit=2, seed=7)
    assert next(other.samples()).prompt != few[0].prompt and other.identity() != more.identity()


@pytest.mark.parametrize(
    ("template", "begin", "between"),
    [
        ("llama2", "[INST] Memorize", " above. [/INST] Answer:"),
        (
            "llama3",
            "<|begin_of_text|><|start_header_id|>user<|end_header_id|>\n\nMemorize",
            "assistant<|end_header_id|>",
        ),
        ("phi3", "<|user|>\nMemorize", "<|end|>\n<|assistant|>\n Answer:"),
    ],
)
def test_a_chat_format_is_around_the_task_and_before_the_answer_prefix(
    template: Any, begin: str, between: str, tiny_tokenizer: Any
) -> None:
    sample = next(ruler(tiny_tokenizer, tasks=("vt",), lengths=(1024,), limit=1, template=template).samples())
    assert sample.prompt.startswith(begin) and sample.prompt.count(begin[:-8]) == 1
    end = sample.prompt.rindex(" Answer: According")
    assert between in sample.prompt[end - 30 :]
    assert sample.meta["tokens"] <= 1024


def test_a_probe_that_fits_counts_and_one_that_does_not_shortens() -> None:
    stream = Stream(lambda text: len(text.split()), 20)
    asked: list[int] = []

    def make(units: int) -> RulerPrompt:
        asked.append(units)
        return RulerPrompt("w " * (units + 3), "", (), "")

    assert largest(make, stream, 2, 5) == 12  # 12 + 3 words and a budget of 5 are 20
    assert asked[0] == 2 and asked[1] == (2 + 24) // 2  # 5 words for 2 units: 20 / 2.5 * 3 = 24
    assert largest(make, stream, 2, 5, extra=1) == 11
    assert fitting(make, stream, 14, 2, 5) == (RulerPrompt("w " * 15, "", (), ""), 20)
    with pytest.raises(DataError, match="20 tokens are too few for the smallest prompt"):
        fitting(make, stream, 16, 16, 5)


def test_needles_lie_between_the_sentences_of_a_text(tmp_path: Path) -> None:
    text = " ".join(f"Sentence number {i} has six words." for i in range(400))
    (tmp_path / "book.txt").write_text(text, encoding="utf-8")
    options: dict[str, Any] = {"lengths": (2048,), "limit": 3, "haystack": str(tmp_path / "book.txt")}
    task = ruler(Words(), tasks=("niah_multiquery", "niah_multivalue"), **options)
    for sample in task.samples():
        start, end = sample.context_span or (0, 0)
        parts = outside_texts.splitter("simple")(sample.prompt[start:end])
        needles = [part for part in parts if part.startswith("One of the special magic numbers for ")]
        assert len(needles) == len(set(needles)) == 4 and len(sample.answers) == 4
        assert all(any(answer in needle for needle in needles) for answer in sample.answers)
        assert sample.prompt.count("What are all the special magic numbers for") == 1
        assert all(part.endswith(".") for part in parts[1:-1])
        assert 1500 < sample.meta["tokens"] <= 2048
    single = next(ruler(Words(), tasks=("niah_single_3",), **options).samples())
    assert single.prompt.startswith("A special magic uuid is hidden within the following text.")
    assert " What is the special magic uuid for " in single.prompt.replace("\n", " ")
    assert task.notes()["texts_sha256"] == {"haystack": hashlib.sha256(text.encode()).hexdigest()}
    (tmp_path / "book.txt").write_text(text + " More.", encoding="utf-8")
    assert ruler(Words(), tasks=("niah_single_3",), **options).identity()["sha256"] != task.identity()["sha256"]


def test_a_text_shorter_than_the_haystack_is_repeated(tmp_path: Path) -> None:
    (tmp_path / "essays.json").write_text(json.dumps({"text": "Three short words.\n Then   two."}), encoding="utf-8")
    haystack = str(tmp_path / "essays.json")
    task = ruler(Words(), tasks=("niah_single_2",), lengths=(2048,), limit=1, haystack=haystack)
    assert "words. Then two. Three short" in next(task.samples()).prompt


def squad_file(folder: Path, articles: int = 6, paragraphs: int = 4) -> Path:
    def question(name: str, known: bool) -> dict[str, Any]:
        answers = [{"text": f"answer {name}"}, {"text": f"answer {name}"}]
        return {"question": f"What is {name}?", "is_impossible": not known, "answers": answers if known else []}

    content = [
        {
            "title": f"T{a}",
            "paragraphs": [
                {
                    "context": f"Article {a} paragraph {p} says answer {a}{p} and {'filler ' * 60}",
                    "qas": [question(f"{a}{p}", True), question(f"not {a}{p}", False)],
                }
                for p in range(paragraphs)
            ],
        }
        for a in range(articles)
    ]
    file = folder / "dev-v2.0.json"
    file.write_text(json.dumps({"version": "v2.0", "data": content}), encoding="utf-8")
    return file


def test_questions_of_squad_have_their_paragraph_and_first_those_of_its_article(tmp_path: Path) -> None:
    task = ruler(Words(), tasks=("qa_1",), lengths=(1024,), limit=5, squad=str(squad_file(tmp_path)))
    samples = list(task.samples())
    for i, sample in enumerate(samples):
        a, p = divmod(i, 4)
        assert sample.query == f"What is {a}{p}?" and sample.answers == (f"answer {a}{p}", f"answer {a}{p}")
        documents = sample.prompt.split("Document ")[1:]
        assert [document.split(":")[0] for document in documents] == [str(i + 1) for i in range(len(documents))]
        assert sum(f"Article {a} paragraph" in document for document in documents) == 4
        assert len(documents) == 13  # of 68 words each: 14 would not fit beside the question and the answer
    ten = outside_texts.squad(str(tmp_path / "dev-v2.0.json"), outside_texts.HubSource())
    assert len(ten[0]) == 24 and len(ten[1]) == 24 and ten[0] == sorted(ten[0])
    more = ruler(Words(), tasks=("qa_1",), lengths=(1024,), limit=30, squad=str(tmp_path / "dev-v2.0.json"))
    with pytest.raises(DataError, match=r"questions end after 24"):
        list(more.samples())


def test_hubs_and_authors_files_of_questions_give_the_same(tmp_path: Path) -> None:
    authors = outside_texts.squad(str(squad_file(tmp_path)), outside_texts.HubSource())
    rows = [
        {
            "title": article["title"],
            "context": paragraph["context"],
            "question": question["question"],
            "answers": {"text": [answer["text"] for answer in question["answers"]]},
        }
        for article in json.loads((tmp_path / "dev-v2.0.json").read_text())["data"]
        for paragraph in article["paragraphs"]
        for question in paragraph["qas"]
    ]
    (tmp_path / "validation.jsonl").write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    assert outside_texts.squad(str(tmp_path / "validation.jsonl"), outside_texts.HubSource()) == authors

    pairs = [[[f"Title {i}{j}", ["One. ", "Two."]] for j in range(10)] for i in range(3)]
    plain = [{"question": f"q{i}", "answer": f"a{i}", "context": context} for i, context in enumerate(pairs)]
    hub = [
        {
            **row,
            "context": {"title": [title for title, _ in row["context"]], "sentences": [s for _, s in row["context"]]},
        }
        for row in plain
    ]
    (tmp_path / "hotpot.json").write_text(json.dumps(plain), encoding="utf-8")
    (tmp_path / "hub.jsonl").write_text("\n".join(map(json.dumps, hub)), encoding="utf-8")
    documents, questions = outside_texts.hotpotqa(str(tmp_path / "hotpot.json"), outside_texts.HubSource())
    assert (documents, questions) == outside_texts.hotpotqa(str(tmp_path / "hub.jsonl"), outside_texts.HubSource())
    assert documents[0] == "Title 00\nOne. Two." and questions[2].own == tuple(range(20, 30))
    assert questions[2].answers == ("a2",) and questions[2].more == ()


#: five answers for each kind of score: references, answer, score
ANSWERS: list[tuple[str, tuple[str, ...], str, float]] = [
    ("niah_single_1", ("7374122",), " 7374122.", 1.0),
    ("niah_single_1", ("7374122",), "737412 2", 0.0),
    ("niah_single_2", ("7374122",), "", 0.0),
    ("niah_single_3", ("AB-cd",), "it is ab-CD", 1.0),
    ("niah_multikey_3", ("ab-cd",), "ab\x00-cd", 0.0),
    ("niah_multivalue", ("11", "22", "33", "44"), "22, 44 and 55", 0.5),
    ("niah_multivalue", ("11", "22", "33", "44"), "11223344", 1.0),
    ("niah_multiquery", ("11", "22", "33", "44"), "11", 0.25),
    ("niah_multikey_1", ("11",), "The magic number is 9911.", 1.0),
    ("niah_multikey_2", ("1234567",), "\x0b1234567\n", 1.0),
    ("vt", ("ABCDE", "FGHIJ", "KLMNO", "PQRST", "UVWXY"), "abcde fghij KLMNO", 0.6),
    ("vt", ("ABCDE", "FGHIJ", "KLMNO", "PQRST", "UVWXY"), "VAR ABCDE=FGHIJ", 0.4),
    ("cwe", ("sky", "oval"), "1. Skyline 2. ovals", 1.0),
    ("cwe", ("sky", "oval"), "s k y", 0.0),
    ("fwe", ("lprmlf", "xpsnvo", "gsayns"), "lprmlf, xpsnvo", 2 / 3),
    ("qa_1", ("Normans", "the Normans"), "they were normans", 1.0),
    ("qa_1", ("in 1066", "1066", "the year"), "1066", 1.0),
    ("qa_1", ("in 1066",), "1067", 0.0),
    ("qa_2", ("yes",), "Yes, both.", 1.0),
    ("qa_2", ("no", "never"), "yes", 0.0),
]


@pytest.mark.parametrize(("name", "references", "answer", "score"), ANSWERS)
def test_scores(name: str, references: tuple[str, ...], answer: str, score: float) -> None:
    match = metric.match_part if name.startswith("qa") else metric.match_all
    assert match(answer, references) == pytest.approx(score)


def test_a_task_scores_by_its_own_rule(tiny_tokenizer: Any, tmp_path: Path) -> None:
    task = ruler(tiny_tokenizer, tasks=("vt",), lengths=(1024,), limit=1)
    sample = next(task.samples())
    assert task.score(sample, " ".join(sample.answers[:3])) == {"score": 0.6}
    question = next(
        ruler(Words(), tasks=("qa_1",), lengths=(1024,), limit=1, squad=str(squad_file(tmp_path))).samples()
    )
    assert task.score(question, "ANSWER 00") == {"score": 1.0}


def test_effective_length_and_weighted_means() -> None:
    means = {4096: 0.9, 8192: 0.856, 16384: 0.6}
    assert metric.effective_length(means) == 8192
    assert metric.effective_length({4096: 0.8}) is None
    assert metric.effective_length({4096: 0.8, 8192: 0.9}) == 8192
    assert metric.weighted(means, increasing=True) == pytest.approx((0.9 + 2 * 0.856 + 3 * 0.6) / 6)
    assert metric.weighted(means, increasing=False) == pytest.approx((3 * 0.9 + 2 * 0.856 + 0.6) / 6)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tasks": ()}, "dataset.tasks"),
        ({"tasks": ("niah",)}, "is not a task of RULER"),
        ({"tasks": ("vt", "offline")}, "dataset.tasks=offline: stands for several tasks"),
        ({"tasks": ("vt", "vt")}, "lists a value twice"),
        ({"lengths": (256,)}, "the minimum is 512 tokens"),
        ({"lengths": ()}, "dataset.lengths"),
    ],
)
def test_wrong_options_are_named(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Ruler(**options).check()


def test_what_is_missing_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tiny_tokenizer: Any) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    with pytest.raises(DataError, match=r"dataset\.haystack="):
        list(ruler(tiny_tokenizer, tasks=("niah_single_2",), lengths=(1024,)).samples())
    (tmp_path / "empty.txt").write_text(" \n", encoding="utf-8")
    with pytest.raises(DataError, match="holds no text"):
        list(ruler(tiny_tokenizer, tasks=("niah_single_2",), haystack=str(tmp_path / "empty.txt")).samples())
    with pytest.raises(DataError, match=r"is a folder"):
        list(ruler(tiny_tokenizer, tasks=("qa_1",), squad=str(tmp_path)).samples())
    (tmp_path / "bad.json").write_text("{", encoding="utf-8")
    with pytest.raises(DataError, match=r"bad\.json"):
        list(ruler(tiny_tokenizer, tasks=("qa_1",), squad=str(tmp_path / "bad.json")).samples())
    with pytest.raises(DataError, match=r"english_words"):  # a word a token: 32k tokens need more words than there are
        list(ruler(Words(), tasks=("cwe",), lengths=(131072,), limit=1).samples())


def test_sizes_follow_from_the_configuration() -> None:
    assert len(KINDS) == 13 and GROUPS["offline"] == (
        "niah_single_1", "niah_multikey_2", "niah_multikey_3", "vt", "cwe", "fwe",
    )  # fmt: skip
    task = load({"_target_": "kvbench.tasks.ruler.Ruler", "tasks": "all", "squad": "x", "lengths": [4096]})
    assert [name for _, name in task.files()] == ["train", "validation"]
    assert [package.module for package in task.packages()] == ["wonderwords"]
    assert not load({"_target_": "kvbench.tasks.ruler.Ruler", "tasks": "vt"}).packages()
    assert NOISE.count(".") == 5
