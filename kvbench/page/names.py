"""Names of the runs of a report: method, quantizer, and the settings in which runs on the same data differ."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvbench.page.entry import Entry
from kvbench.page.numbers import cut, plain
from kvbench.results.labels import named

#: groups whose settings are part of a name; model, data and machine have columns of their own
_NAMED = ("method.", "decoding.", "runtime.seed")


def names(entries: Sequence[Entry]) -> list[str]:
    """Return a name per run: its label, and the settings that differ from the method's preset and between runs.

    Runs of one label are compared if they have the same model and data set.
    """
    alike: dict[tuple[Any, ...], list[int]] = {}
    changes = []
    for i, entry in enumerate(entries):
        config = entry.metrics["config"]
        alike.setdefault((named(entry.metrics), config.get("model"), config.get("dataset")), []).append(i)
        changed = {key: plain(value) for key, value in entry.changes.items() if key.startswith(_NAMED)}
        changes.append({key: value for key, value in changed.items() if key != "method.layers"})  # labels show it
    texts = [named(entry.metrics) for entry in entries]
    for places in alike.values():
        absent = object()
        keys = sorted({key for i in places for key in changes[i]})
        for key in keys:
            if any(changes[i].get(key, absent) != changes[places[0]].get(key, absent) for i in places):
                for i in places:
                    if key in changes[i]:
                        shown = key.partition(".")[2] if ".rotation." in key else key.rpartition(".")[2]
                        texts[i] += f" {shown}={_typed(changes[i][key])}"
    return [cut(text, 200) for text in texts]


def _typed(value: Any) -> str:
    """Return a value as it is typed on the command line."""
    words = {None: "null", True: "true", False: "false"}
    return words[value] if value is None or isinstance(value, bool) else str(value)
