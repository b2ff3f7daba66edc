"""The tasks of `mini` by name: generator, length of the answer, and scorer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from kvbench.tasks.mini import copying, reasoning, retrieval
from kvbench.tasks.mini.draft import Draft, Setting


@dataclass(frozen=True)
class Entry:
    """Generator and scores of one task of `mini`.

    Args:
        make: function that generates the task's part of a sample (a draft): the texts that hold the answers, and the
            questions. Filler is added later, by :func:`kvbench.tasks.mini.compose.compose`.
        max_new_tokens: number of tokens that the longest answer and the line break after it may take, counted with the
            bundled model's tokenizer.
        scorer: name of the scorer in :data:`kvbench.tasks.mini.scoring.SCORERS`.
        shortest: shortest sample, in tokens, at which the task still makes sense.
    """

    make: Callable[[Setting], Draft]
    max_new_tokens: int
    scorer: str = "exact"
    shortest: int = 256


TASKS: dict[str, Entry] = {
    "passkey": Entry(retrieval.passkey, 12),
    "needle": Entry(retrieval.needle, 16),
    "needle_words": Entry(retrieval.needle_words, 16),
    "key_value": Entry(retrieval.key_value, 16),
    "key_value_hex": Entry(retrieval.key_value_hex, 24),
    "multi_value": Entry(retrieval.multi_value, 48, "values"),
    "variable_tracking": Entry(reasoning.variable_tracking, 40),
    "two_hop": Entry(reasoning.two_hop, 40),
    "facts": Entry(retrieval.facts, 24),
    "few_shot": Entry(reasoning.few_shot, 16),
    "copy": Entry(copying.copy, 56, "words"),
    "copy_long": Entry(copying.copy_long, 144, "words", shortest=512),
    "repeat": Entry(copying.repeat, 80, "words"),
    "passage": Entry(retrieval.passage, 12),
    "arithmetic": Entry(reasoning.arithmetic, 64, "number"),
    "code_line": Entry(copying.code_line, 48),
    "several": Entry(retrieval.several, 24),
}
