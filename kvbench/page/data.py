"""The data of the report page: all runs, how they differ, the papers' items that they belong to, pairs, sweeps.

A sweep is shown with all its jobs and their states, whether or not they have a run yet.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

from kvbench.page import papers, runs, settings, shared
from kvbench.page.numbers import short_number, shorten_middle, trimmed, whole_or_empty
from kvbench.page.runs import Entry
from kvbench.page.settings import names
from kvbench.results.board import FOLDER
from kvbench.results.compare import compare_runs, difference_reach
from kvbench.results.samples import Row
from kvbench.results.store import RunStore
from kvbench.results.sweeps import Progress, Sweep

#: maximum length of the sweep's command, of a job's, and of its message, in characters; a longer command is left out
LONGEST_SWEEP, LONGEST_COMMAND, LONGEST_MESSAGE = 20_000, 1200, 200


_PROGRAM = ("python", "-m", "kvbench")


class FollowedSweep:
    """A sweep whose files are read again only after they have changed."""

    def __init__(self, sweep: Sweep) -> None:
        self.sweep = sweep
        self._known: tuple[Any, list[Progress]] | None = None

    def signature(self) -> Any:
        """Return a value that changes when a file of the sweep changes or the process that starts its jobs ends."""
        stamps = []
        with os.scandir(self.sweep.folder) as entries:
            for entry in entries:
                try:
                    status = entry.stat()
                except OSError:  # removed meanwhile
                    continue
                stamps.append((entry.name, status.st_mtime_ns, status.st_size))
        return sorted(stamps), self.sweep.driven()

    def progress(self) -> Sequence[Progress]:
        """Return the state of each job."""
        signature = self.signature()
        if self._known is None or self._known[0] != signature:
            self._known = signature, self.sweep.progress()
        return self._known[1]

    def run_ids(self) -> set[str]:
        """Return the ids of the runs of all jobs, as far as they are known."""
        return {entry.run_id for entry in self.progress() if entry.run_id is not None}

    def data(self) -> dict[str, Any]:
        """Return the data of the sweep for the page.

        ``driven`` says whether the process that starts its jobs still runs. ``jobs`` has for each job ``[number from 1,
        label, state, run id, status, command, message]`` without the unknown values at the end. Further keys are
        ``id``, ``command``, ``created`` and ``launcher``.
        """
        manifest = self.sweep.manifest
        return {
            "id": shorten_middle(manifest.id, 120),
            "command": whole_or_empty(shlex.join([*_PROGRAM, *manifest.command]), LONGEST_SWEEP),
            "created": shorten_middle(manifest.created, 40),
            "launcher": shorten_middle(manifest.launcher, 40),
            "driven": self.sweep.driven(),
            "jobs": [
                trimmed(
                    [
                        entry.job.number + 1,
                        shorten_middle(entry.job.label, 160),
                        entry.state,
                        entry.run_id,
                        entry.status,
                        whole_or_empty(shlex.join([*_PROGRAM, *entry.job.overrides]), LONGEST_COMMAND) or None,
                        shorten_middle((entry.message.splitlines() or [""])[0], LONGEST_MESSAGE) or None,
                    ]
                )
                for entry in self.progress()
            ],
        }


#: version of the data, which the page's script checks
VERSION = 4
#: maximum number of damaged runs that the page names
MOST_SKIPPED = 20
#: files whose change makes a run worth reading again
_FILES = ("config.yaml", "metrics.json", "samples.jsonl")

Read = Callable[[RunStore], Entry | None]


@dataclass(frozen=True)
class _Known:
    """Data read from the files of one run.

    Args:
        signature: signature of the files when they were read (:func:`_signature`).
        entry: the run; None if it cannot be shown.
        figures, answers: its figures, and which answers are right (:func:`kvbench.page.runs.page_summary`).
        settings: its settings by dotted key.
    """

    signature: Any
    entry: Entry | None
    figures: Mapping[str, Any] = field(default_factory=dict)
    answers: Mapping[str, bool] = field(default_factory=dict)
    settings: Mapping[str, Any] = field(default_factory=dict)


@dataclass
class Report:
    """The data of a report; data read from a run's files are cached until the files change.

    Args:
        find: function that returns the stores of the runs to show.
        read: function that reads a run; None if the run cannot be shown.
        folder: folder of the runs, shown in the page's heading.
        papers: folder of the papers' items (:func:`kvbench.page.papers.items`).
        pairs: ids of the pairs of runs whose samples are compared.
        sweep: the sweep whose jobs are shown; None for all runs.
        leaderboard: folder of the leaderboard's rows, which may not exist.
        added: files of recipes and answers to show (:func:`kvbench.page.shared.added_files`).
    """

    find: Callable[[], Sequence[RunStore]]
    read: Read
    folder: Path
    papers: Path
    pairs: Sequence[tuple[str, str]] = ()
    say: Callable[[str], None] = lambda line: None
    sweep: FollowedSweep | None = None
    leaderboard: Path = FOLDER
    added: Sequence[Path] = ()
    _known: dict[str, _Known] = field(default_factory=dict)
    _said: set[str] = field(default_factory=set)

    def data(self) -> dict[str, Any]:
        """Return the data of the page, which :func:`kvbench.page.numbers.encoded` turns into text."""
        stores = self.find()
        shown = [known for store in stores if (known := self._of(store)).entry is not None]
        entries = [known.entry for known in shown if known.entry is not None]
        summaries = [dict(known.figures) for known in shown]
        flat = [known.settings for known in shown]
        answers = {entry.store.run_id: known.answers for entry, known in zip(entries, shown, strict=True)}
        for figures, entry in zip(summaries, entries, strict=True):
            base = answers.get(entry.metrics.get("baseline") or "")
            if base and (counts := runs.flips(answers[entry.store.run_id], base)):
                figures["flips"] = counts
        for figures in summaries:
            if "problem" in figures:
                self._tell(figures["problem"])
        for figures, name in zip(summaries, names(entries), strict=True):
            figures["name"] = name
        tasks: dict[str, int] = {}
        for figures in summaries:  # each task is named once, and numbered in the runs
            if "tasks" in figures:
                figures["tasks"] = [[tasks.setdefault(key, len(tasks)), *values] for key, *values in figures["tasks"]]
        machines = [figures.pop("env", {}) for figures in summaries]
        keys = settings.varying(flat, [settings.choices(entry) for entry in entries])
        items, notes = papers.items(self.papers, {figures["id"] for figures in summaries})
        rows, unread = shared.shared_rows(self.leaderboard)
        added, unknown = shared.added_files(self.papers, self.added)
        for note in (*notes, *unread, *unknown):
            self._tell(note)
        return {
            "version": VERSION,
            "made": datetime.now().astimezone().isoformat(timespec="seconds"),
            "folder": shorten_middle(self.folder, 200),
            "tasks": list(tasks),
            "runs": summaries,
            "settings": settings.setting_columns(flat, keys),
            "env": settings.setting_columns(machines, list(dict.fromkeys(key for facts in machines for key in facts))),
            "groups": _group_titles(entries),
            "papers": items,
            "board": papers.board(self.papers),
            "rows": rows,
            "recipes": added["recipe"],
            "fits": added["fit"],
            "sweep": self.sweep.data() if self.sweep is not None else None,
            "skipped": [
                shorten_middle(store.problem() or store.run_id) for store in stores if self._of(store).entry is None
            ][:MOST_SKIPPED],
            "pairs": self._compared({entry.store.run_id: entry for entry in entries}),
        }

    def signature(self) -> Any:
        """Return a value that changes when a file of a run or of the sweep changes."""
        runs = tuple((store.run_id, _signature(store)) for store in self.find())
        return runs if self.sweep is None else (self.sweep.signature(), runs)

    def _compared(self, entries: Mapping[str, Entry]) -> list[dict[str, Any]]:
        return [differing_samples(entries[a], entries[b]) for a, b in self.pairs if a in entries and b in entries]

    def _of(self, store: RunStore) -> _Known:
        """Return the data of a run; read them again if its files have changed."""
        signature = _signature(store)
        known = self._known.get(store.run_id)
        if known is None or known.signature != signature:
            entry = self.read(store)
            known = _Known(signature, None)
            if entry is not None:
                known = _Known(signature, entry, *runs.page_summary(entry), settings.flat(entry))
            self._known[store.run_id] = known
        return known

    def _tell(self, line: str) -> None:
        """Show a line to the user, once."""
        if line not in self._said:
            self._said.add(line)
            self.say(line)


def _signature(store: RunStore) -> tuple[Any, ...]:
    """Return a value that changes when a file of the run changes."""
    stamps: list[Any] = []
    for name in _FILES:
        try:
            status = (store.path / name).stat()
        except OSError:
            stamps.append(None)
        else:
            stamps.append((status.st_mtime_ns, status.st_size, status.st_ino))
    return tuple(stamps)


def _group_titles(entries: Sequence[Entry]) -> dict[str, str]:
    """Return a title per group of comparable runs, by the first half of their ids.

    Runs of one group have the same model, data, decoding options and seed.
    """
    titles: dict[str, str] = {}
    for entry in entries:
        group = entry.store.run_id.partition("-")[0]
        metrics = entry.metrics
        if group not in titles or not titles[group].endswith(")"):
            titles[group] = _title(metrics)
    repeated = {title for title in titles.values() if list(titles.values()).count(title) > 1}
    return {group: f"{title} [{group[:6]}]" if title in repeated else title for group, title in titles.items()}


def _title(metrics: Mapping[str, Any]) -> str:
    """Return a title for runs with the model and data of `metrics`, such as ``tiny, mini (5 tasks at 2048)``."""
    config = metrics["config"]
    keys = list(metrics["scores"])
    title = f"{config.get('model') or '?'}, {config.get('dataset') or '?'}"
    if not keys:
        return shorten_middle(title, 120)
    tasks = list(dict.fromkeys(key.partition("@")[0] for key in keys))
    lengths = list(dict.fromkeys(key.partition("@")[2] for key in keys if "@" in key))
    what = tasks[0] if len(tasks) == 1 else f"{len(tasks)} tasks"
    return shorten_middle(f"{title} ({what}{' at ' + ', '.join(lengths[:4]) if lengths else ''})", 120)


#: maximum number of samples per pair, and of characters per prediction
MOST, LONGEST = 200, 4000


def differing_samples(a: Entry, b: Entry) -> dict[str, Any]:
    """Return the samples on which two runs differ, those with different scores first.

    Returns:
        ``runs``, the ids of both; ``tasks``, the paired differences B - A by task; ``samples``, at most :data:`MOST`
        entries ``[id, score of A, score of B, prediction of A, prediction of B]``; ``left_out``, the number of further
        samples; ``equal``, the number of samples with the same prediction; and ``notes``, reasons why the comparison
        may mislead.

    Raises:
        KvbenchError: the samples of a run cannot be read.
    """
    comparison = compare_runs(a.store, b.store)
    rows_a, rows_b = a.store.samples().rows, b.store.samples().rows
    common = [name for name in rows_a if name in rows_b]
    differing = [name for name in common if _output(rows_a[name]) != _output(rows_b[name])]
    differing.sort(key=lambda name: (-_distance(rows_a[name], rows_b[name]), name))
    samples = [
        [
            shorten_middle(name, 200),
            *(short_number(rows[name]["scores"].get("score")) for rows in (rows_a, rows_b)),
            *(shorten_middle(rows[name]["prediction"], LONGEST) for rows in (rows_a, rows_b)),
        ]
        for name in differing[:MOST]
    ]
    return {
        "runs": [a.store.run_id, b.store.run_id],
        "tasks": [
            [
                key,
                *map(
                    short_number,
                    (entry["a"], entry["b"], entry["diff"], difference_reach(entry["b"], entry), entry["n"]),
                ),
            ]
            for key, entry in comparison.keys.items()
        ],
        "samples": samples,
        "left_out": len(differing) - len(samples),
        "equal": len(common) - len(differing),
        "notes": [shorten_middle(note, 300) for note in comparison.notes],
    }


def _output(row: Row) -> tuple[Any, Any]:
    return row["prediction"], row["scores"].get("score")


def _distance(a: Mapping[str, Any], b: Mapping[str, Any]) -> float:
    scores = [short_number(row["scores"].get("score")) or 0.0 for row in (a, b)]
    return abs(scores[1] - scores[0])
