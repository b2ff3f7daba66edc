"""The driver of measured tables: one command line, the runs of a grid, and the files that are folded from them.

A measured table is a :class:`Table`: its settings, the data of the runs that each of them has, and a fold of the stored
rows into files. Every run is one of kvbench, so an interrupted command goes on where it stopped, and ``--fold-only``
makes the files of what is there. Settings that a model cannot take are named with the reason and left out.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import zip_longest
from pathlib import Path
from typing import Any

from experiments.place import (
    Choice,
    add_options,
    choice,
    drawable,
    measurement_counts,
    place_result,
    positive,
    stored_counts,
)
from experiments.runs import Run, composed, execute, identify
from experiments.stored import as_json
from kvbench.config.prerequisites import check_here
from kvbench.config.run_config import checked_config
from kvbench.config.setting import parse_setting
from kvbench.models.locate import locate
from kvbench.results.samples import Row
from kvbench.results.store import RunStore
from kvbench.util import atomic

#: the bundled model, whose results have folders of their own names
TINY = "tiny"
#: default of ``--out`` in words, where it depends on the model
BY_MODEL = "below results/, by model"
#: data that fit into the context of any model
SHORTEST = ("dataset=perplexity/mini_text", "dataset.window=16")
Rows = Mapping[str, Row]


@dataclass(frozen=True)
class Setting:
    """One setting of a table.

    Args:
        name: its label in the table.
        family: colour in the plot.
        setting: method, quantizer and their options (:mod:`kvbench.config.setting`).
    """

    name: str
    family: str
    setting: str

    @property
    def key(self) -> str:
        """The key of the setting, unlike those of all others in its table."""
        return self.name

    @property
    def overrides(self) -> list[str]:
        """The setting as it would be typed after ``python -m kvbench``, part by part."""
        return parse_setting(self.setting).overrides()

    @property
    def slug(self) -> str:
        """The key as a file name."""
        return re.sub(r"[^a-z0-9]+", "-", self.key.lower()).strip("-")


@dataclass(frozen=True)
class Stored:
    """Outcome of the runs of a setting.

    Args:
        rows: for each of its runs the rows by sample id; none for a run that has not begun, or cannot be made.
        env: the machine of the last of them; empty where none has begun.
    """

    rows: Mapping[str, Rows]
    env: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Folded:
    """The files of a table.

    Args:
        text: the table in Markdown, or why there is none; it is printed, and written as ``table.md``.
        files: content of the other files by name; without any, nothing is written.
        counts: samples that each part of the table rests on, by name.
        draw: function that draws the pictures into a folder, with matplotlib's pyplot.
    """

    text: str
    files: Mapping[str, str] = field(default_factory=dict)
    counts: Mapping[str, int] = field(default_factory=dict)
    draw: Callable[[Any, Path], object] | None = None

    def write(self, folder: Path) -> None:
        """Write all files; without matplotlib no picture, as its numbers are in the table."""
        folder.mkdir(parents=True, exist_ok=True)
        for name, content in (*self.files.items(), ("table.md", self.text)):
            atomic.replace_file(folder / name, content.encode())
        if self.draw is not None and drawable():
            import matplotlib

            matplotlib.use("Agg")
            from matplotlib import pyplot

            self.draw(pyplot, folder)


def by_id(folder: Path, run: Run) -> tuple[Rows, Mapping[str, Any]]:
    """Return the rows of the run with this id, of each task's first samples up to its limit, and its machine."""
    store = RunStore(folder, identify(run)[0])
    data = composed(run.overrides)["dataset"]
    limit = data["limit"] or data["options"]["limit"]  # of the data set, or of the one whose answers are decoded
    rows = {key: row for key, row in store.samples().rows.items() if int(key.rpartition("/")[2]) < limit}
    return rows, store.environment() or {}


@dataclass(frozen=True)
class Table:
    """A table that is folded from runs.

    Args:
        command: module of its command.
        data: for a setting the data of each of its runs by name: overrides, of which the first is ``dataset=CHOICE``.
        fold: function from what the settings have done, by key, to the table.
        before: function from a folder to the samples that the table there rests on; None without a table.
        find: function from the folder of the runs and a run to its rows and its machine.
    """

    command: str
    data: Callable[[Setting], Mapping[str, Sequence[str]]]
    fold: Callable[[Mapping[str, Stored]], Folded]
    before: Callable[[Path], Mapping[str, int] | None]
    find: Callable[[Path, Run], tuple[Rows, Mapping[str, Any]]] = by_id


def command_line(
    command: str, about: str | None, out: str | None, model: str = "", device: str = ""
) -> argparse.ArgumentParser:
    """Return a parser with the options that all measurements have: the place, and model and device unless empty.

    The default of the place is `out`, by model if that is empty; None: it must be given.
    """
    form = argparse.RawDescriptionHelpFormatter
    top = argparse.ArgumentParser(prog=f"python -m {command}", description=about, formatter_class=form)
    add, default = top.add_argument, " (default: %(default)s)"
    if model:
        add("--model", default=model, help="preset, OWNER/NAME of the hub or ./FOLDER" + default)
    if device:
        add("--device", default=device, help="device: auto, cpu, cuda or cuda:N" + default)
    place = "" if out is None else f" (default: {out or BY_MODEL})"
    add(
        "--out", type=Path, required=out is None, default=Path(out) if out else None, help="where it is written" + place
    )
    add_options(top)
    return top


def table_parser(command: str, about: str | None, runs: str, batch: int, limit: int | None) -> argparse.ArgumentParser:
    """Return a parser with the options that all tables have, and these defaults; None: a `limit` by the command."""
    top = command_line(command, about, "", TINY, "auto")
    add, default = top.add_argument, " (default: %(default)s)"
    add("--limit", type=positive, default=limit, help="samples per task" + (default if limit else ""))
    add("--only", nargs="*", default=[], metavar="NAME", help="settings to run and to fold (default: all)")
    add("--batch", type=positive, default=batch, help="prompts per batch" + default)
    add("--jobs", type=positive, default=1, help="settings side by side, each in a process of its own" + default)
    add("--runs", type=Path, default=Path(runs), help="folder of the runs" + default)
    add("--fold-only", action="store_true", help="write the tables from existing runs, without running anything")
    add("--run-only", action="store_true", help="write no tables")
    return top


def set_chosen(
    top: argparse.ArgumentParser, arguments: argparse.Namespace, settings: Iterable[Setting], out: str
) -> argparse.Namespace:
    """Set ``chosen`` to the settings of ``--only``, in the table's order, and ``out`` to its default (:func:`home`)."""
    by_key = {setting.key: setting for setting in settings}
    check_names(top, arguments.only, by_key)
    arguments.chosen = [by_key[key] for key in by_key if not arguments.only or key in arguments.only]
    arguments.out = arguments.out or home(out, arguments.model)
    return arguments


def check_names(top: argparse.ArgumentParser, names: Iterable[str], known_names: Iterable[str]) -> None:
    """End the command at a name that is not among the known ones."""
    for name in names:
        if name not in known_names:
            top.error(f"no setting {name!r}: {', '.join(known_names)}")


def home(out: str, model: str) -> Path:
    """Return the folder of a model's tables: `out` for the bundled one, the same below ``results/MODEL`` for others."""
    if model == TINY:
        return Path(out)
    return Path("results", slug_of(model), *(part for part in Path(out).parts if part not in ("results", TINY)))


def slug_of(model: str) -> str:
    """Return a model as a file name."""
    return model.strip("./").replace("/", "_")


def runs_of(table: Table, setting: Setting, arguments: argparse.Namespace) -> dict[str, Run]:
    """Return the runs of a setting by name, each as it would be typed."""
    where = [f"runtime.device={arguments.device}", f"runtime.batch_size={arguments.batch}"]
    where.append(f"runtime.results_dir={arguments.runs}")
    return {
        name: Run(
            (*setting.overrides, f"model={arguments.model}", *data, *where), arguments.model, data[0].partition("=")[2]
        )
        for name, data in table.data(setting).items()
    }


def refused(runs: Mapping[str, Run]) -> str:
    """Return why one of the runs of a setting cannot be made, such as a missing calibration; empty if all can."""
    return next((reason for run in runs.values() if (reason := identify(run)[1])), "")


def stored(table: Table, setting: Setting, arguments: argparse.Namespace) -> Stored:
    """Return what the runs of a setting have done: nothing if the model cannot take it."""
    runs = runs_of(table, setting, arguments)
    if refused(runs):
        return Stored({name: {} for name in runs})
    found = {name: table.find(arguments.runs, run) for name, run in runs.items()}
    machines = [env for _, env in found.values() if env]
    return Stored({name: done for name, (done, _) in found.items()}, machines[-1] if machines else {})


def run_here(table: Table, setting: Setting, arguments: argparse.Namespace) -> bool:
    """Do what is missing of a setting in this process; False if a run failed."""
    good = True
    for name, run in runs_of(table, setting, arguments).items():
        outcome = execute(run)
        print(": ".join(filter(None, (f"{setting.key}, {name}", outcome.status, outcome.reason))), flush=True)
        good &= outcome.status == "ok"
    return good


def run_apart(table: Table, setting: Setting, arguments: argparse.Namespace, given: Sequence[str]) -> bool:
    """Do what is missing of a setting in a process of its own, with its output in a log; False if a run failed."""
    log = arguments.runs / "logs" / f"{slug_of(arguments.model)}-{setting.slug}.txt"
    log.parent.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", table.command, *given, "--jobs", "1", "--run-only", "--only", setting.key]
    with log.open("w", encoding="utf-8") as out:
        good = subprocess.run(command, stdout=out, stderr=subprocess.STDOUT).returncode == 0
    print(f"{setting.key}: {'done' if good else f'failed, see {log}'}", flush=True)
    return good


def check_chosen_machine(arguments: argparse.Namespace) -> None:
    """Raise KvbenchError for a model or a device that no setting can have, and for weights that are not here.

    Weights and device need not be here to fold what has been run.
    """
    place = (f"model={arguments.model}", f"runtime.device={arguments.device}")
    checked = checked_config(composed(("method=fp16", *place, *SHORTEST)))
    if not arguments.fold_only:
        check_here(checked)
        locate(checked.model)


def make_table(table: Table, arguments: argparse.Namespace, given: Sequence[str]) -> int:
    """Run what is missing, print and write the table, and return the exit status: 1 if a run or the table failed.

    The first setting is run before the others, which may compare with what its run stores.

    Raises:
        KvbenchError: no setting can be run with the model or on the device (:func:`check_chosen_machine`).
    """
    check_chosen_machine(arguments)
    able, failed = [], 0
    for setting in arguments.chosen:
        reason = refused(runs_of(table, setting, arguments))
        if reason:
            print(f"{setting.key}: skipped: {reason}", file=sys.stderr, flush=True)
        else:
            able.append(setting)
    if not arguments.fold_only:
        alone = able if arguments.jobs == 1 else able[:1]
        failed = sum(not run_here(table, setting, arguments) for setting in alone)
        with ThreadPoolExecutor(arguments.jobs) as pool:
            good = pool.map(lambda setting: run_apart(table, setting, arguments, given), able[len(alone) :])
            failed += sum(not one for one in good)
    if arguments.run_only:
        return int(failed > 0)
    done = {setting.key: stored(table, setting, arguments) for setting in arguments.chosen}
    status = keep_measured_table(table.fold(done), arguments.out, choice(arguments), table.before, arguments.model)
    return status or int(failed > 0)


def keep_measured_table(
    folded: Folded,
    wanted: Path,
    said: Choice,
    before: Callable[[Path], Mapping[str, int] | None],
    model: str = TINY,
) -> int:
    """Print a table, write its files, and return the exit status: 1 if there is none, or a better one was kept.

    A table of another model than the bundled one names it. `before` is that of :class:`Table`.
    """
    if not folded.files:
        print(folded.text)
        return 1
    if model != TINY:
        folded = Folded(f"Model: {model}\n\n{folded.text}", folded.files, folded.counts, folded.draw)
    where = place_result(wanted, said, folded.counts, before(wanted), sorted(wanted.glob("*.png")))
    try:
        folded.write(where.path)
    except OSError as error:
        print(
            f"error: {wanted} cannot be written: {error}\n  hint: name another folder with --out FOLDER",
            file=sys.stderr,
        )
        return 2
    print(folded.text)
    return where.say()


def keep_file(
    text: str, wanted: Path, said: Choice, counts: Mapping[str, int], before: Mapping[str, int] | None
) -> int:
    """Write a file that rests on these samples, and return the exit status: 1 if one of more samples was kept."""
    where = place_result(wanted, said, counts, before)
    where.path.parent.mkdir(parents=True, exist_ok=True)
    atomic.replace_file(where.path, text.encode())
    return where.say()


def keep_json(
    content: Mapping[str, Any],
    arguments: argparse.Namespace,
    counts: Callable[[Any], Mapping[str, int]] = measurement_counts,
) -> int:
    """Write a JSON file to ``--out`` (:func:`keep_file`); `counts` returns the samples that its content rests on."""
    old = stored_counts(arguments.out, counts)
    return keep_file(as_json(content), arguments.out, choice(arguments), counts(content), old)


def parted(left: Sequence[int], right: Sequence[int]) -> int | None:
    """Return the first position at which two continuations differ, in tokens or in length; None for equal ones."""
    return next((i for i, (a, b) in enumerate(zip_longest(left, right)) if a != b), None)
