r"""Scores of long answers and of long-context data sets, by the rules of the data sets' authors.

The rules are those of lighteval 3fd15266 and of vLLM's studies (AIME), lighteval with math-verify 0.9.0 (MATH-500),
openai/simple-evals ee3b031 (GPQA), THUDM/LongBench 2e00731 (LongBench v2) and LiveCodeBench 9af8fc86 (output
prediction); MRCR's are in :mod:`kvbench.metrics.mrcr`. Where a rule would run code of the model (`eval` in
LiveCodeBench), only literals are read here.

A reasoning model's thinking is removed first (:func:`without_thinking`).
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Callable, Sequence

from kvbench.metrics import math_check

#: tags around a reasoning model's thinking
OPENED, CLOSED = "<think>", "</think>"
_ANSWER_LINE = re.compile(r"(?i)Answer[ \t]*:[ \t]*\$?([A-D])\$?")
_BRACES = re.compile(r"\\boxed\s*\{|[{}]")
_CORRECT_ANSWER = (re.compile(r"The correct answer is \(([A-D])\)"), re.compile(r"The correct answer is ([A-D])"))


def without_thinking(text: str) -> str:
    """Return an answer without the thinking before it: the text after the last ``</think>`` and its line feeds.

    It is empty if the thinking never ends (:func:`cut_in_thinking`). A text without these tags is unchanged.
    """
    if cut_in_thinking(text):
        return ""
    _, tag, rest = text.rpartition(CLOSED)
    return rest.lstrip("\n") if tag else text


def cut_in_thinking(text: str) -> bool:
    """Return True if an answer never ends its thinking: its last ``<think>`` comes after its last ``</think>``.

    Where the prompt itself ends with ``<think>``, `text` must begin with it.
    """
    return text.rfind(OPENED) > text.rfind(CLOSED)


def last_boxed(text: str) -> str | None:
    r"""Return the content of the last ``\boxed{...}`` whose braces are balanced; None if there is none."""
    opened: list[int | None] = []  # beginnings of boxes that are open, None for other braces; one pass, for long loops
    last = None
    for mark in _BRACES.finditer(text):
        if mark[0] != "}":
            opened.append(None if mark[0] == "{" else mark.end())
        elif opened and (start := opened.pop()) is not None and (last is None or start > last[0]):
            last = (start, mark.start())
    return None if last is None else text[slice(*last)]


def integer(text: str) -> int | None:
    r"""Return the integer that a text consists of, without LaTeX's spaces and separators; None for anything else."""
    plain = re.sub(r"\\[,;:! ]|[\s$,]|\{,\}", "", text)
    return int(plain) if re.fullmatch(r"[+-]?[0-9]{1,100}", plain) else None


def score_aime(prediction: str, gold: str) -> dict[str, float]:
    r"""Score an answer by the integer in its last ``\boxed{}``; leading zeros do not count."""
    boxed = last_boxed(prediction)
    given = None if boxed is None else integer(boxed)
    return {"score": float(given is not None and given == integer(gold))}


def score_math(prediction: str, gold: str) -> dict[str, float]:
    """Score a mathematical answer by math-verify; ``unchecked`` is 1 for one that it did not decide, which is wrong."""
    verdict = math_check.math_verdict(gold, prediction)
    return {"score": float(verdict == "right"), "unchecked": float(verdict not in ("right", "wrong"))}


def score_gpqa(prediction: str, gold: str) -> dict[str, float]:
    """Score an answer by the letter in its first ``Answer: X``, as in simple-evals."""
    match = _ANSWER_LINE.search(prediction)
    return {"score": float(match is not None and match[1].upper() == gold)}


def score_longbench_v2(prediction: str, gold: str) -> dict[str, float]:
    """Score an answer by the letter after "The correct answer is", as in LongBench v2.

    ``compensated`` counts an answer without a letter as the guess that it replaces, .25.
    """
    text = prediction.replace("*", "")
    match = next((found for pattern in _CORRECT_ANSWER if (found := pattern.search(text))), None)
    score = float(match is not None and match[1] == gold)
    return {"score": score, "compensated": 0.25 if match is None else score}


def predicted_output(prediction: str) -> str:
    """Return the test case in an answer, as LiveCodeBench extracts it: the last line that begins with ``assert``.

    Without such a line it is the content of the first code block, of Python if there is one; empty if there is none.
    """
    lines = prediction.split("\n")
    asserting = [line for line in lines if line.startswith("assert")]
    if asserting:
        return asserting[-1]
    fences = [number for number, line in enumerate(lines) if "```" in line]
    python = [number for number in fences if "```python" in lines[number] or "```Python" in lines[number]]
    fences = [number for number in fences if not python or number >= python[0]]
    return "\n".join(lines[fences[0] + 1 : fences[1]]) if len(fences) > 1 else ""


def score_livecodebench(prediction: str, gold: str) -> dict[str, float]:
    """Score the predicted output of a function call: right if its literal equals the expected JSON value.

    The authors evaluate the text as code. Here only literals are read, so ``2 * 3`` or ``float("inf")`` are wrong.
    """
    case = predicted_output(prediction)
    if len(case.splitlines()) > 1:
        case = next((row for row in case.splitlines() if "assert" in row and not row.startswith("#")), case)
    case = case.strip()
    try:
        value = _asserted(case) if "assert" in case else ast.literal_eval(case)
        return {"score": float(value == json.loads(gold))}
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        return {"score": 0.0}


def _asserted(case: str) -> object:
    """Return the literal on the right of the first ``==`` of an assertion. Raises ValueError if there is none."""
    body = ast.parse(case).body
    test = body[0].test if body and isinstance(body[0], ast.Assert) else None
    if not isinstance(test, ast.Compare) or not isinstance(test.ops[0], ast.Eq):
        raise ValueError("not an assertion of equality")
    return ast.literal_eval(test.comparators[0])


#: scorers of answers without their thinking, by the name of the metric
RULES: dict[str, Callable[[str, str], dict[str, float]]] = {
    "aime": score_aime,
    "math": score_math,
    "gpqa": score_gpqa,
    "longbench_v2": score_longbench_v2,
    "livecodebench": score_livecodebench,
}


def wanted_reference(metric: str, gold: str) -> str | None:
    """Return what a rule wants as a reference answer, if `gold` is not that, so that no answer could be right."""
    if metric == "aime" and integer(gold) is None:
        return "an integer"
    if metric in ("gpqa", "longbench_v2") and gold not in tuple("ABCD"):
        return "a letter A to D"
    if metric == "livecodebench":
        try:
            json.loads(gold)
        except (ValueError, RecursionError):
            return "a JSON value"
    return None


def score_reasoning(metric: str, prediction: str, answers: Sequence[str]) -> dict[str, float] | None:
    """Score an answer, without its thinking, by the rule `metric`; None if there is no rule of that name here."""
    scorer = RULES.get(metric)
    return None if scorer is None else scorer(without_thinking(prediction), answers[0])
