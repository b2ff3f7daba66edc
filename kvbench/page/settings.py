"""The settings in which the runs of a report differ, and the names that they give to runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from kvbench.page.numbers import json_value, shorten_middle
from kvbench.page.runs import Entry
from kvbench.results.labels import run_label

#: keys of each group that are shown; () for all of them
_SHOWN: dict[str, tuple[str, ...]] = {
    "model": ("weights", "dtype", "max_length", "prompt_limit", "chat", "revision"),
    "method": (),
    "quantizer": (),
    "dataset": (),
    "decoding": (),
    "runtime": ("seed", "batch_size", "prefill_chunk", "memory_limit_gb", "kernels", "graphs", "compile", "device_map"),
}
#: keys that name a class or repeat another column
_HIDDEN = ("_target_", "takes", "preset", "name")
#: groups whose settings are compared among runs with the same choice only: another method has other keys anyway
_WITHIN = ("method", "quantizer", "dataset")
#: maximum number of columns
MOST = 40


def flat(entry: Entry) -> dict[str, Any]:
    """Return the settings of a run by dotted key, with values that fit into JSON."""
    settings: dict[str, Any] = {}
    for group, keys in _SHOWN.items():
        values = entry.config.get(group)
        if not isinstance(values, Mapping):
            continue
        for key, value in values.items():
            if key in _HIDDEN or (keys and key not in keys):
                continue
            if isinstance(value, Mapping) and (group == "quantizer" or key == "rotation"):
                settings |= {f"{group}.{key}.{name}": json_value(part) for name, part in value.items()}
            else:
                settings[f"{group}.{key}"] = json_value(value)
    return settings


def choices(entry: Entry) -> dict[str, str]:
    """Return the names of a run's model, method, quantizer and data set, by configuration group."""
    config = entry.metrics["config"]
    label = str(entry.metrics["label"])
    return {
        "model": str(config.get("model") or "?"),
        "method": label.split(" ")[0],
        "quantizer": str(config.get("quantizer") or "none"),
        "dataset": str(config.get("dataset") or "?"),
    }


def varying(settings: Sequence[Mapping[str, Any]], chosen: Sequence[Mapping[str, str]]) -> list[str]:
    """Return the keys whose values differ between runs, sorted by the number of runs that have the key, largest first.

    Keys of a method, quantizer or data set are compared only among runs that chose the same method, quantizer or data
    set. Each run has settings (:func:`flat`) and choices (:func:`choices`).
    """
    first: dict[tuple[str, str], Any] = {}
    counts: dict[str, int] = {}
    differing: set[str] = set()
    for values, names in zip(settings, chosen, strict=True):
        for key, value in values.items():
            group = key.partition(".")[0]
            place = (key, names[group] if group in _WITHIN else "")
            counts[key] = counts.get(key, 0) + 1
            if first.setdefault(place, value) != value:
                differing.add(key)
    ordered = sorted(differing, key=lambda key: (-counts[key], key))
    return ordered[:MOST]


def setting_columns(settings: Sequence[Mapping[str, Any]], keys: Sequence[str]) -> list[dict[str, Any]]:
    """Return a dict per key: ``key``, its distinct ``values``, and ``of``, the index of each run's value in these.

    The index is -1 for a run without the key.
    """
    table = []
    for key in keys:
        values: dict[tuple[type, Any], int] = {}
        places = []
        for run in settings:
            value = run.get(key)
            places.append(values.setdefault((type(value), value), len(values)) if key in run else -1)
        table.append({"key": key, "values": [value for _, value in values], "of": places})
    return table


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
        alike.setdefault((run_label(entry.metrics), config.get("model"), config.get("dataset")), []).append(i)
        changed = {key: json_value(value) for key, value in entry.changes.items() if key.startswith(_NAMED)}
        changes.append({key: value for key, value in changed.items() if key != "method.layers"})  # labels show it
    texts = [run_label(entry.metrics) for entry in entries]
    for places in alike.values():
        absent = object()
        keys = sorted({key for i in places for key in changes[i]})
        for key in keys:
            if any(changes[i].get(key, absent) != changes[places[0]].get(key, absent) for i in places):
                for i in places:
                    if key in changes[i]:
                        shown = key.partition(".")[2] if ".rotation." in key else key.rpartition(".")[2]
                        texts[i] += f" {shown}={_typed_setting(changes[i][key])}"
    return [shorten_middle(text, 200) for text in texts]


def _typed_setting(value: Any) -> str:
    """Return a value as it is typed on the command line."""
    words = {None: "null", True: "true", False: "false"}
    return words[value] if value is None or isinstance(value, bool) else str(value)
