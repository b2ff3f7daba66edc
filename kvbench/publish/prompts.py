"""Excerpts of the prompts and reference answers, which are not stored with a run: its data set is read again."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from kvbench.errors import KvbenchError
from kvbench.results.samples import Row


def with_excerpts(config: Mapping[str, Any], rows: Iterable[Row], say: Callable[[str], None]) -> list[Row]:
    """Return rows with both ends of their prompts and a reference answer, as loggers get them while a run goes on.

    If the data set cannot be read, the rows are returned as they are, and the reason is reported.

    Args:
        config: content of the run's `config.yaml`.
        rows: rows of the run.
        say: function that shows a line to the user.
    """
    from kvbench.config.run_config import checked_config
    from kvbench.models.load import load_tokenizer
    from kvbench.runner.remarks import shown

    stored = list(rows)
    try:
        checked = checked_config(config)
        if checked.task.needs_tokenizer:
            checked.task.bind(load_tokenizer(checked.model))
        excerpts = {
            sample.id: shown(sample) for sample in checked.task.next_samples({row["id"]: row for row in stored})
        }
    except KvbenchError as error:
        say(f"note: sent without prompts, because the data set cannot be read: {str(error).splitlines()[0]}")
        return stored
    return [{**row, **excerpts.get(row["id"], {})} for row in stored]
