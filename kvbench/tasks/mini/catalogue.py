"""The tasks of `mini` by name: generator, length of the answer, and scorer; and the scorers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from kvbench.metrics.text import contains, exact_match, last_number, marked_number, prefix_share, recall
from kvbench.tasks.mini import copying, reasoning, retrieval
from kvbench.tasks.mini.draft import Draft, Setting

Scorer = Callable[[str, str, Mapping[str, Any]], dict[str, float]]


def exact(prediction: str, answer: str, meta: Mapping[str, Any]) -> dict[str, float]:
    """Score a short answer: ``score`` is 1 if the prediction equals it, ``contained`` is 1 if it contains it."""
    return {"score": exact_match(prediction, [answer]), "contained": contains(prediction, [answer])}


def score_words(prediction: str, answer: str, meta: Mapping[str, Any]) -> dict[str, float]:
    """Score a copied text: ``score`` is 1 if the prediction equals it, else 0.

    ``words`` is the share of the text's words that the prediction copies before its first wrong word.
    """
    return {"score": exact_match(prediction, [answer]), "words": prefix_share(prediction, answer)}


def values(prediction: str, answer: str, meta: Mapping[str, Any]) -> dict[str, float]:
    """Score a list of values.

    ``score`` is RULER's recall, the share of the values in ``meta["parts"]`` that the prediction contains; ``exact`` is
    1 if the prediction equals the whole answer, else 0.
    """
    return {"score": recall(prediction, meta["parts"]), "exact": exact_match(prediction, [answer])}


def score_number(prediction: str, answer: str, meta: Mapping[str, Any]) -> dict[str, float]:
    """Score the solution of a word problem, which should end with ``####`` and the result.

    Of three scores, each 1 if right and 0 if wrong, ``score`` judges the number after ``####``, ``flexible`` the last
    number of the prediction, and ``steps`` whether the whole solution matches exactly.
    """
    wanted = marked_number(answer)
    return {
        "score": float(marked_number(prediction) == wanted),
        "steps": exact_match(prediction, [answer]),
        "flexible": float(last_number(prediction) == wanted),
    }


SCORERS: dict[str, Scorer] = {"exact": exact, "words": score_words, "values": values, "number": score_number}


@dataclass(frozen=True)
class MiniTask:
    """Generator and scores of one task of `mini`.

    Args:
        make: generates the task's part of a sample (a draft): the texts that hold the answers, and the questions.
            Filler is added later, by :func:`kvbench.tasks.mini.compose.compose`.
        max_new_tokens: number of tokens that the longest answer and the line break after it may take, counted with the
            bundled model's tokenizer.
        shortest: shortest sample, in tokens, at which the task still makes sense.
        all_right: True if a sample with several questions scores 1 only where every answer is right, else 0; False if
            it scores the mean of its questions.
    """

    make: Callable[[Setting], Draft]
    max_new_tokens: int
    scorer: str = "exact"
    shortest: int = 256
    all_right: bool = False


#: tasks that separate formats of 4 bits: many answers from one cache, right only if all of them are. The bundled model
#: was not trained on them as such, but on single questions of the same kinds
HARD = ("pairs", "lists", "many", "strings", "copies")

TASKS: dict[str, MiniTask] = {
    "passkey": MiniTask(retrieval.passkey, 12),
    "needle": MiniTask(retrieval.needle, 16),
    "needle_words": MiniTask(retrieval.needle_words, 16),
    "key_value": MiniTask(retrieval.key_value, 16),
    "key_value_hex": MiniTask(retrieval.key_value_hex, 24),
    "multi_value": MiniTask(retrieval.multi_value, 48, "values"),
    "variable_tracking": MiniTask(reasoning.variable_tracking, 40),
    "two_hop": MiniTask(reasoning.two_hop, 40),
    "facts": MiniTask(retrieval.facts, 24),
    "few_shot": MiniTask(reasoning.few_shot, 16),
    "copy": MiniTask(copying.copy, 56, "words"),
    "copy_long": MiniTask(copying.copy_long, 144, "words", shortest=512),
    "repeat": MiniTask(copying.repeat, 80, "words"),
    "passage": MiniTask(retrieval.passage, 12),
    "arithmetic": MiniTask(reasoning.arithmetic, 64, "number"),
    "code_line": MiniTask(copying.code_line, 48),
    "several": MiniTask(retrieval.several, 24),
    "pairs": MiniTask(retrieval.pairs, 16, all_right=True),
    "lists": MiniTask(retrieval.lists, 48, "values", all_right=True),
    "many": MiniTask(retrieval.many, 24, all_right=True),
    "strings": MiniTask(copying.strings, 100, "words", all_right=True),
    "copies": MiniTask(copying.copies, 144, "words", shortest=512, all_right=True),
}
