"""LongBench's scores against those of its own scorer, and against published scores of published outputs."""

from __future__ import annotations

import gzip
import json
import sys

import pytest

from kvbench.errors import KvbenchError
from kvbench.metrics import longbench
from kvbench.metrics.rouge import rouge_l
from tests.data_support import data_dir, golden, read_lines

CASES = golden("longbench_metrics.json")


CHINESE = ("multifieldqa_zh", "dureader", "vcsum")


@pytest.mark.parametrize("chinese", [False, True])
def test_every_golden_score_is_equal(chinese: bool) -> None:
    if chinese:
        pytest.importorskip("jieba")
    cases = [case for case in CASES if (case["dataset"] in CHINESE) is chinese]
    wrong = []
    for case in cases:
        computed = longbench.longbench_mean(
            [longbench.score_longbench(case["dataset"], case["prediction"], case["answers"], case["all_classes"])]
        )
        if computed != case["score"]:
            wrong.append((case, computed))
    if chinese:
        assert longbench.limited_rouge("vcsum", "中国", ["x", "中国"]) == pytest.approx(1.0)
    assert len(cases) >= (10 if chinese else 80)
    assert not wrong


@pytest.mark.parametrize("chinese", [False, True])
def test_aggregates_and_buckets(chinese: bool) -> None:
    if chinese:
        pytest.importorskip("jieba")
    for case in golden("longbench_aggregate.json"):
        if (case["dataset"] in CHINESE) is not chinese:
            continue
        scores = [
            longbench.score_longbench(case["dataset"], prediction, answers, case["all_classes"])
            for prediction, answers in zip(case["predictions"], case["answers"], strict=True)
        ]
        assert longbench.longbench_mean(scores) == case["score"], case["dataset"]
        for name, expected in case["score_e"].items():
            inside = [s for s, n in zip(scores, case["lengths"], strict=True) if longbench.bucket(n) == name]
            computed = longbench.longbench_mean(inside)
            assert computed == expected or (computed != computed and expected != expected), (case["dataset"], name)


def test_edge_cases_as_documented() -> None:
    """ROUGE has no recursion limit here; the second value is that with it. Code similarity is difflib's."""
    for case in golden("longbench_edge.json"):
        args = (case["dataset"], case["prediction"], case["answers"])
        true = longbench.longbench_mean([longbench.score_longbench(*args)])
        if case["dataset"] == "lcc":
            assert true == case["score"] == 1.0
            continue
        assert true == 50.0
        limited = longbench.limited_rouge(*args)
        assert limited is not None
        assert longbench.longbench_mean([limited]) == case["score"]


def test_without_jieba_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "jieba", None)
    longbench._jieba.cache_clear()
    with pytest.raises(KvbenchError, match=r"kvbench\[longbench\]"):
        longbench.score_longbench("vcsum", "a", ["b"])
    longbench._jieba.cache_clear()


@pytest.mark.parametrize("seed", range(8))
def test_rouge_equals_the_package(seed: int) -> None:
    """Random texts of few words, with repeats, blanks, full stops in odd places."""
    import random

    package = pytest.importorskip("rouge").Rouge(metrics=["rouge-l"])
    rng = random.Random(seed)
    for _ in range(60):
        texts = []
        for _ in range(2):
            words = [rng.choice("a b c d e f g The the x. . .. \n 1.5 é".split(" ")) for _ in range(rng.randint(1, 60))]
            texts.append(" ".join(words))
        try:
            expected = package.get_scores([texts[0]], [texts[1]], avg=True)["rouge-l"]
        except ValueError:
            expected = {"f": 0.0, "p": 0.0, "r": 0.0}
        computed = rouge_l(*texts)
        assert (computed.f, computed.precision, computed.recall) == (expected["f"], expected["p"], expected["r"]), texts


def test_recursion_steps_are_the_packages() -> None:
    """The walk's length is counted as the package makes calls: it fails exactly beyond its limit."""
    package = pytest.importorskip("rouge").Rouge(metrics=["rouge-l"])
    depth = 0
    frame = sys._getframe()
    while frame is not None:
        depth, frame = depth + 1, frame.f_back  # type: ignore[assignment]
    for words in (120, 260):
        texts = (" ".join(f"u{2 * i}" for i in range(words)), " ".join(f"u{i}" for i in range(words)))
        for pair in (texts, texts[::-1]):
            steps = rouge_l(*pair).steps
            for spare, fails in ((40, False), (-40, True)):
                limit = sys.getrecursionlimit()
                sys.setrecursionlimit(depth + steps + spare)
                try:
                    package.get_scores([pair[0]], [pair[1]], avg=True)
                    failed = False
                except RecursionError:
                    failed = True
                finally:
                    sys.setrecursionlimit(limit)
                assert failed is fails, (words, spare)


def test_steps_of_short_walks() -> None:
    """Calls of the package: one per move, and one for the end that it reaches."""
    pairs = {("b b a", "a"): 2, ("a b b", "a"): 4, ("a b", "a b"): 3, ("x", "a"): 2, ("a b c", "c b a"): 4}
    assert {pair: rouge_l(*pair).steps for pair in pairs} == pairs


def test_the_recursion_limit_is_990_steps() -> None:
    """A walk of so many calls still has its score; one more is the package's error, which LongBench scores 0."""
    for words, limited in ((900, True), (989, True), (990, False), (1200, False)):
        computed = rouge_l("a" + " b" * (words - 1), "a")
        assert computed.steps == words + 1 and computed.f > 0
        assert computed.limited == (computed.f if limited else 0.0)


def test_buckets_means_and_names() -> None:
    assert [longbench.bucket(n) for n in (0, 3999, 4000, 7999, 8000)] == ["0-4k", "0-4k", "4-8k", "4-8k", "8k+"]
    assert longbench.longbench_mean([1 / 3, 0.0]) == 16.67 and longbench.longbench_mean([]) != longbench.longbench_mean(
        []
    )
    assert longbench.SIMILARITY == "difflib"
    without = {"narrativeqa", "musique", "qmsum", "dureader", "vcsum", "lsht"}
    without |= {"multifieldqa_zh", "passage_retrieval_zh"}
    assert set(longbench.EXTENDED) == {f"{name}_e" for name in longbench.METRICS if name not in without}
    assert longbench.base_name("lcc_e") == "lcc" and longbench.base_name("vcsum_e") == "vcsum_e"
    for name in ("trec", "triviaqa", "samsum", "lsht", "trec_e", "samsum_e"):
        assert longbench.first_line(name, "\n\n a\nb") == " a"
    assert longbench.first_line("qasper", "\na\nb") == "\na\nb"


def test_the_best_answer_counts_and_none_is_0() -> None:
    assert longbench.score_longbench("qasper", "cat", ["dog", "cat", "bird"]) == 1.0
    assert longbench.score_longbench("qasper", "cat", []) == 0.0
    assert longbench.limited_rouge("gov_report", "a b", ["c", "a b", "d"]) == pytest.approx(1.0)
    assert longbench.limited_rouge("samsum_e", "\na b\nc", ["a b"]) == pytest.approx(1.0)
    assert longbench.limited_rouge("gov_report", "a", []) == 0.0
    assert longbench.limited_rouge("qasper", "a", ["a"]) is None
    assert longbench.score_longbench("passage_count", "7, 7 or 8", ["7"]) == pytest.approx(2 / 3)
    assert longbench.score_longbench("passage_count", "seven", ["7"]) == 0.0
    assert longbench.score_longbench("passage_retrieval_en", "Paragraph 3, 4", ["Paragraph 3"]) == 0.5
    assert longbench.score_longbench("passage_retrieval_zh", "段落3", ["段落3"]) == 1.0
    for name, answers, reason in (("trec", ["a"], "all_classes"), ("passage_retrieval_en", ["7"], "name a paragraph")):
        with pytest.raises(ValueError, match=reason):
            longbench.score_longbench(name, "a", answers)


def test_code_is_the_first_line_without_comment_marks() -> None:
    assert longbench.score_longbench("lcc", "\n# a\n// b\n`c`\nreturn 1\nreturn 2", ["return 1"]) == 1.0
    assert longbench.score_longbench("repobench-p_e", "# return 1", ["return 1"]) == 0.0
    assert longbench.score_longbench("lcc", "\n\nabcd", ["abxy"]) == 0.5


def test_tasks_without_an_e_form_have_none() -> None:
    assert (
        longbench.score_longbench("qasper_e", "cat", ["cat"])
        == longbench.score_longbench("qasper", "cat", ["cat"])
        == 1.0
    )
    for name in ("narrativeqa_e", "vcsum_e", "_e", "qasper_e_e"):
        with pytest.raises(KeyError):
            longbench.score_longbench(name, "a", ["a"])


@pytest.mark.parametrize(
    ("dataset", "answers", "classes", "said"),
    [
        ("qasper", ["a"], None, None),
        ("qasper", [], None, "ield 'answers' is an empty list"),
        ("trec", ["a"], ["a", "b"], None),
        ("trec", ["c", "b"], ["a", "b"], None),
        ("trec_e", ["c"], ["a", "b"], "none of the answers ['c'] is in 'all_classes'"),
        ("lsht", ["a"], [], "lsht is scored by class, but 'all_classes' is empty"),
        ("lsht", ["a"], None, "lsht is scored by class, but 'all_classes' is empty"),
        ("passage_count", ["7"], None, None),
        ("passage_count_e", ["x"], None, "scored by number, but none of the answers ['x'] is a number"),
        ("passage_retrieval_en", ["Paragraph 7"], None, None),
        ("passage_retrieval_en", ["Paragraph 7", "段落7"], None, "the answer '段落7' does not name a paragraph"),
        ("passage_retrieval_zh", ["段落7"], None, None),
        ("passage_retrieval_zh", ["Paragraph 7"], None, "the answer 'Paragraph 7' does not name a paragraph"),
    ],
)
def test_answers_that_no_prediction_can_match_are_said(dataset: str, answers: list, classes: list, said: str) -> None:
    computed = longbench.unanswerable(dataset, answers, classes)
    assert computed is None if said is None else said in str(computed)


def test_published_outputs_give_the_published_scores() -> None:
    """17 tasks of Llama-2-7B-chat: all outputs, rescored."""
    pytest.importorskip("jieba")
    folder = data_dir("longbench_preds", "llama2-7b-chat")
    published = json.loads(gzip.decompress((folder / "result.json.gz").read_bytes()))
    files = sorted(set(folder.glob("*.jsonl.gz")))
    assert len(files) == 17
    for file in files:
        name = file.name.removesuffix(".jsonl.gz")
        rows = read_lines(file)
        computed = longbench.longbench_mean(
            [longbench.score_longbench(name, r["pred"], r["answers"], r["all_classes"]) for r in rows]
        )
        assert abs(computed - published[name]) <= 0.01 + 1e-9, (name, computed, published[name])
