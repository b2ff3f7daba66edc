"""GSM8K's extraction against lm-evaluation-harness's own, and against the flags of published solutions."""

from __future__ import annotations

from kvbench.metrics import gsm8k
from tests.data_support import data_dir, golden, read_lines


def test_every_golden_extraction_is_equal() -> None:
    for case in golden("gsm8k_extraction.json"):
        response, answer = case["response"], case["answer"]
        assert gsm8k.strict(response) == case["strict"], response
        assert gsm8k.flexible(response) == case["flexible"], response
        scores = gsm8k.score_gsm8k(response, answer)
        assert (scores["strict"], scores["flexible"]) == (case["strict_match"], case["flexible_match"]), response
        assert scores["score"] == scores["strict"], response


def test_numbers_are_compared_as_strings() -> None:
    assert gsm8k.strict("#### 7 #### 8") == "7" and gsm8k.flexible("a 3, b 4.") == "4."
    assert gsm8k.strict("7") == gsm8k.flexible("seven") == "[invalid]"
    for same in ("18", "$18", "1,8", "18.", "y #### 18", "#### 7 #### 18"):
        assert gsm8k.matches(same, "x = 7 #### 18"), same
    for other in ("18.0", "-18", "018", "7"):
        assert not gsm8k.matches(other, "x = 7 #### 18"), other
    assert gsm8k.matches("7A", "7a")
    assert gsm8k.score_gsm8k("it is 18", "#### 18") == {"score": 0.0, "strict": 0.0, "flexible": 1.0}
    assert gsm8k.digits("18") == "None"


def test_logquants_digits_keep_their_faults() -> None:
    assert gsm8k.score_digits("so #### 18", "x #### 18") == 1.0
    assert gsm8k.score_digits("so 18", "x #### 18") == 0.0
    assert gsm8k.score_digits("#### -5", "x #### -5") == 0.0
    assert gsm8k.score_digits("#### 1,000", "x #### 1,000") == 0.0
    assert gsm8k.digits("#### 18 in 2 days") == "182"
    assert gsm8k.digits("#### 7 eggs, so #### 18") == "18"
    assert gsm8k.score_digits("#### 7, so #### 18", "x #### 9\ny #### 18") == 1.0


def test_flexible_agrees_with_all_flags_of_published_solutions() -> None:
    solutions = read_lines(data_dir("gsm8k", "example_model_solutions.jsonl.gz"))
    tests = {row["question"]: row["answer"] for row in read_lines(data_dir("gsm8k", "test.jsonl.gz"))}
    flags = agreed = 0
    for row in solutions:
        for value in row.values():
            if isinstance(value, dict):
                flags += 1
                right = gsm8k.score_gsm8k(value["solution"], tests[row["question"]])["flexible"] == 1.0
                agreed += right == value["is_correct"]
    assert flags == 5276
    assert agreed == flags


def test_the_number_of_a_reference() -> None:
    numbers = {"x #### 7": "7", "####-1,234": "-1,234", "#### 1\n#### 2.5.": "2.5", "#### $5": "$5", "a\nb #### 0": "0"}
    assert {answer: gsm8k.gold(answer) for answer in numbers} == numbers
    assert [gsm8k.gold(answer) for answer in ("7", "### 7", "#### seven", "#### ", "")] == [None] * 5
