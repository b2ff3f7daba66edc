"""A stored run as the page takes it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kvbench.results.store import RunStore


@dataclass(frozen=True)
class Entry:
    """One run of the report.

    Args:
        metrics: content of its `metrics.json`, with ``status`` and ``older`` for the present code. For a run without a
            valid one: the same keys with what is known so far, and the status ``unfinished``.
        config: content of its `config.yaml`; empty if it cannot be read.
        command: the command that starts the run again; empty if its configuration cannot be read.
        changes: the settings in which the run differs from its presets, by dotted key.
    """

    store: RunStore
    metrics: Mapping[str, Any]
    config: Mapping[str, Any]
    command: str
    changes: Mapping[str, Any]
