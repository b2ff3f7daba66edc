"""Scores of long answers: the authors' own results where their code was run, else their stated rules."""

from __future__ import annotations

import io
import os
import random
import sys

import pytest

from kvbench.metrics import math_check
from kvbench.metrics.answers import score_answers
from kvbench.metrics.mrcr import BINS, area_weights, areas, score_mrcr
from kvbench.metrics.reasoning import (
    cut_in_thinking,
    integer,
    last_boxed,
    predicted_output,
    score_aime,
    score_gpqa,
    score_livecodebench,
    score_longbench_v2,
    score_reasoning,
    wanted_reference,
    without_thinking,
)
from kvbench.metrics.text import loops
from tests.data_support import golden

#: code that the authors evaluate; a literal is wanted here
EVALUATED = "assert f() == 10**9 + 7"


def test_livecodebench_scores_as_its_authors_do_but_for_code() -> None:
    cases = golden("livecodebench_output.json")["cases"]
    assert len(cases) > 40 and {case["right"] for case in cases} == {True, False}
    for case in cases:
        assert predicted_output(case["answer"]) == case["extracted"], case
        right = case["right"] and case["answer"] != EVALUATED
        assert score_livecodebench(case["answer"], case["expected"]) == {"score": float(right)}, case


@pytest.mark.parametrize(
    "deep", ["assert f() == " + "[" * 5000 + "]" * 5000, "assert f() == __import__('os')", "assert"]
)
def test_answers_of_livecodebench_are_never_run(deep: str) -> None:
    assert score_livecodebench(deep, "1") == {"score": 0.0}


@pytest.mark.parametrize(
    ("text", "rest"),
    [
        ("a", "a"),
        ("<think>a</think>\n\nb", "b"),
        ("a</think>b</think>c", "c"),
        (" <think>a", ""),
        ("so: <think>Answer: A", ""),
        ("<think>a</think>b<think>c", ""),
        ("<think><think>a</think>b", "b"),
        ("a</think>", ""),
        ("", ""),
    ],
)
def test_thinking_is_removed_and_nothing_is_left_of_one_that_never_ends(text: str, rest: str) -> None:
    assert without_thinking(text) == rest
    assert cut_in_thinking(text) == (not rest and text not in ("", "a</think>"))


@pytest.mark.parametrize(
    ("metric", "right", "gold"),
    [
        ("aime", r"\boxed{7}", "7"),
        ("gpqa", "Answer: B", "B"),
        ("longbench_v2", "The correct answer is (B)", "B"),
        ("livecodebench", "assert f() == 1", "1"),
        ("math", r"\boxed{7}", "7"),
    ],
)
def test_no_rule_scores_what_stands_in_thinking(metric: str, right: str, gold: str) -> None:
    if metric == "math":
        pytest.importorskip("math_verify")
    for text, score in ((right, 1.0), (f"<think>{right}\n", 0.0), (f"<think>hm</think>\n{right}", 1.0)):
        scores = score_reasoning(metric, text, [gold])
        assert scores is not None and scores["score"] == score, text


@pytest.mark.parametrize(
    ("text", "boxed"),
    [
        (r"\boxed{5}, no: \boxed{6}", "6"),
        (r"\boxed{\frac{1}{2}}.", r"\frac{1}{2}"),
        (r"\boxed {7}", "7"),
        (r"\boxed{5} and \boxed{6", "5"),
        (r"\boxed 5", None),
        (r"boxed{5}", None),
        ("", None),
    ],
)
def test_the_last_balanced_box_counts(text: str, boxed: str | None) -> None:
    assert last_boxed(text) == boxed


def test_boxes_without_end_take_no_time() -> None:
    assert last_boxed(r"\boxed{1}" + r"\boxed{" * 100_000) == "1"
    assert last_boxed(r"\boxed{" * 50_000 + "2" + "}" * 50_000) == "2"


@pytest.mark.parametrize(
    ("metric", "gold", "wanted"),
    [
        ("aime", "1/2", "an integer"),
        ("longbench_v2", "b", "a letter A to D"),
        ("livecodebench", "{1}", "a JSON value"),
        ("aime", "073", None),
        ("gpqa", "D", None),
        ("livecodebench", "[1]", None),
        ("f1", "", None),
    ],
)
def test_references_that_no_answer_could_equal_are_named(metric: str, gold: str, wanted: str | None) -> None:
    assert wanted_reference(metric, gold) == wanted


@pytest.mark.parametrize(
    ("text", "value"),
    [("073", 73), (" 1,000 ", 1000), (r"1{,}000", 1000), (r"1\,000", 1000), ("$12$", 12), ("-3", -3), ("7.0", None)]
    + [("", None), ("x = 3", None), ("三", None), ("9" * 5000, None)],
)
def test_integers(text: str, value: int | None) -> None:
    assert integer(text) == value


def test_aime_compares_integers() -> None:
    assert score_aime(r"so \boxed{073}", "73") == {"score": 1.0}
    assert score_aime(r"\boxed{73}, or \boxed{74}", "73") == {"score": 0.0}
    assert score_aime("73", "73") == score_aime(r"\boxed{x}", "73") == {"score": 0.0}


@pytest.mark.parametrize(
    ("answer", "gold", "score"),
    [
        ("Answer: B", "B", 1.0),
        ("answer:  $b$", "B", 1.0),
        ("Answer: A\nAnswer: B", "B", 0.0),  # the first one
        ("Answer:\nB", "B", 0.0),  # a letter on the next line is missed
        ("**Answer: B**", "B", 1.0),
        ("The answer is B", "B", 0.0),
    ],
)
def test_gpqa_reads_the_first_answer_line(answer: str, gold: str, score: float) -> None:
    assert score_gpqa(answer, gold) == {"score": score}


@pytest.mark.parametrize(
    ("answer", "scores"),
    [
        ("The correct answer is (B).", (1.0, 1.0)),
        ("**The correct answer is** B", (1.0, 1.0)),
        ("The correct answer is C. The correct answer is (B)", (1.0, 1.0)),  # brackets come first
        ("The correct answer is (A)", (0.0, 0.0)),
        ("the correct answer is (B)", (0.0, 0.25)),
        ("B", (0.0, 0.25)),
    ],
)
def test_longbench_v2_wants_the_whole_sentence(answer: str, scores: tuple[float, float]) -> None:
    assert tuple(score_longbench_v2(answer, "B").values()) == scores


def test_mrcr_is_a_similarity_after_the_prefix() -> None:
    assert score_mrcr("xYz1A poem", "xYz1A poem", "xYz1") == {"score": 1.0}
    assert (
        score_mrcr("\nxYz1A poem", "xYz1A poem", "xYz1") == score_mrcr("A poem", "xYz1A poem", "xYz1") == {"score": 0}
    )
    assert score_mrcr("xYz1abcd", "xYz1bcde", "xYz1") == {"score": 0.75}  # 2 * 3 / 8


#: cells of Context Arena: means of the bins, area up to 128k and up to 1M tokens
CELLS = {
    (98.7, 94.3, 89.0, 88.9, 84.1, 81.1, 72.7, 60.1): (88.5, 73.7),
    (87.6, 68.0, 70.4, 57.5, 55.5, 57.1, 55.6, 42.1): (61.6, 53.2),
}


def binned(means: tuple[float, ...], **more: object) -> dict[str, dict[str, object]]:
    entries = [{"score": mean / 100, "stderr": 0.02, **more} for mean in means]
    return {f"mrcr_8needle@{edge}": entry for edge, entry in zip(BINS, entries, strict=False)}


@pytest.mark.parametrize(("means", "published"), CELLS.items())
def test_areas_of_mrcr_are_the_published_ones(means: tuple[float, ...], published: tuple[float, float]) -> None:
    ((task, both),) = areas(binned(means))
    assert task == "mrcr_8needle" and [area.edge for area in both] == [131072, 1048576]
    assert tuple(round(100 * area.area, 1) for area in both) == published


def test_areas_stop_at_the_last_bin_without_a_gap_and_have_errors() -> None:
    scores = binned((90.0, 80.0, 60.0), vs_fp16={"diff": -0.1, "stderr": 0.01})
    ((_, (area,)),) = areas({**scores, "mrcr_8needle@65536": {"score": None}, "mrcr_8needle@131072": {"score": 0.1}})
    weights = area_weights(BINS[:3])
    assert sum(weights) == pytest.approx(1) and weights == pytest.approx([1 / 6, 1 / 2, 1 / 3])
    assert (area.edge, area.area) == (32768, pytest.approx(0.75))
    assert area.stderr == pytest.approx(0.02 * sum(w * w for w in weights) ** 0.5)
    assert area.difference == pytest.approx((-0.1, area.stderr / 2))
    assert area.text() == "up to 32768 tokens: 0.750 ± 0.012, -0.100 ± 0.006 compared with fp16"
    assert list(areas(binned((90.0,)))) == [("mrcr_8needle", [])] and list(areas({"ruler@8192": {"score": 1}})) == []
    del scores["mrcr_8needle@8192"]
    assert list(areas(scores)) == [("mrcr_8needle", [])]


def test_rules_by_name_take_an_answer_without_its_thinking() -> None:
    assert score_reasoning("gpqa", "<think>Answer: A</think>Answer: B", ["B"]) == {"score": 1.0}
    assert score_reasoning("f1", "a", ["a"]) is None


MANY = 100_000
ODD = (
    *("", " \n\t\r", "\x00", "\ud800", "A\u0301" * 1000, r"\boxed{７}", r"\boxed{²}", r"\boxed{7"),
    *(r"\boxed{" * (MANY // 7), "}" * MANY, "{" * MANY + "}" * MANY, r"\boxed{" + "9" * MANY + "}", "9" * MANY),
    *("Answer" + " " * MANY + ":", "Answer: " * (MANY // 8), "The correct answer is (" * (MANY // 23), "*" * MANY),
    *("```\n" * (MANY // 4), "```python\n" * (MANY // 10), "assert \n" * (MANY // 8), "assert f() == " + "9" * MANY),
    *("assert f() == " + "-" * MANY + "1", "assert f() == " + "(" * MANY, "assert " + "not " * (MANY // 4) + "1 == 1"),
    *("assert f() == {[]: 1}", "assert f() == '\x00'", "assert f() == '\ud800'", "assert f() == 1e999", "assert f()"),
    *("<think>" * (MANY // 7), "</think>" * (MANY // 8), "#### " + "1" * MANY, "$" * MANY, r"\boxed" + " " * MANY),
    *(r"\boxed{-" + " " * MANY + "7}" + "x", "\u2028assert f() == 2", "x9" * MANY, "#### " * (MANY // 5)),
)


@pytest.mark.parametrize("metric", ["aime", "gpqa", "longbench_v2", "livecodebench", "gsm8k", "mrcr"])
def test_odd_answers_are_wrong_and_break_nothing(metric: str) -> None:
    """Each takes milliseconds; a pattern that backtracks would take this test's timeout or a day."""
    gold = {"gpqa": "B", "longbench_v2": "B", "gsm8k": "#### 7"}.get(metric, "7")
    for text in ODD:
        if metric == "mrcr":
            scores = score_mrcr(text, "x9Round and quiet.", "x9")
        else:
            scores = score_answers(metric, text, [gold])  # type: ignore[arg-type]
        assert all(type(score) is float and 0 <= score <= 1 for score in scores.values())
        assert scores["score"] == 0 or metric == "mrcr", text[:40]


def test_loops() -> None:
    draw = random.Random(0)
    text = "".join(chr(97 + draw.randrange(26)) for _ in range(3000))
    assert not loops(text) and not loops("") and not loops("wait, " * 85)
    assert loops(text + "wait, " * 86) and loops("wait, " * 200 + "wa")
    assert not loops(text + "wait, " * 200 + "but no.")
    assert loops(text + 4 * text[:256]) and not loops(text + 4 * text[:257]) and not loops(text + 3 * text[:200])


@pytest.mark.parametrize(
    ("gold", "answer", "right"),
    [
        (r"\frac{1}{2}", r"\boxed{0.5}", "right"),
        (r"2\sqrt{113}", r"ANSWER: $2\sqrt{113}$", "right"),
        (r"2\sqrt{113}", r"\boxed{2}", "wrong"),
        ("1{,}000", r"\boxed{1000}", "right"),
        ("6", r"\boxed{5}, wait \boxed{6}", "wrong"),  # as published: both boxes are one set
        (r"10\%", r"\boxed{0.1}", "wrong"),  # with antlr 4.9; right with 4.13
        ("p - q", r"$\boxed{p-q}$", "right"),
        ("", r"\boxed{5}", "failed"),
    ],
)
def test_mathematical_answers(gold: str, answer: str, right: str) -> None:
    pytest.importorskip("math_verify")
    assert math_check.math_verdict(gold, answer, 60.0) == right


def test_an_answer_that_takes_too_long_is_wrong_and_named(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("math_verify")
    assert math_check.math_verdict("5", r"\boxed{5}", 60.0) == "right"
    process = math_check._running
    assert os.getsid(process._process.pid) != os.getsid(0)  # Ctrl-C ends the run, not the comparison of its last answer
    monkeypatch.setattr(math_check, "math_verdict", lambda *texts: process.compare(*texts, 0.05))
    assert score_reasoning("math", "$10^{10^{10^{10}}}$", ["5"]) == {"score": 0.0, "unchecked": 1.0}
    assert process.ended and process.compare("5", "5", 1.0) == "failed"


def test_a_process_whose_run_was_killed_ends_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    timers: list[float] = []
    monkeypatch.setattr(math_check.signal, "setitimer", lambda _, seconds: timers.append(seconds))
    monkeypatch.setattr(math_check, "_compare", lambda gold, prediction: gold == prediction)
    replies = io.StringIO()
    pytest.importorskip("math_verify")
    monkeypatch.setitem(sys.modules, "resource", None)  # no limits for this process
    math_check._answer_requests(io.StringIO('["5", "5", 2.0]\n'), replies)
    assert replies.getvalue() == "ready\nright\n" and timers == [2.0 + math_check.ORPHANED_S, 0]
