"""The tasks of `mini` by name: generator, length of the answer, and scorer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from kvbench.tasks.mini import copying, reasoning, retrieval
from kvbench.tasks.mini.draft import Draft, Setting


@dataclass(frozen=True)
class Entry:
    """One task of `mini`.

    Args:
        make: function that generates the records and questions of a sample.
        max_new_tokens: maximum length of the answer and the line break after it, in tokens of the bundled model.
        scorer: name of the scorer in :data:`kvbench.tasks.mini.scoring.SCORERS`.
        shortest: smallest sensible length of a sample, in tokens.
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
