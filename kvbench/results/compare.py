"""Comparison of two runs, sample by sample: paired differences, and the samples whose scores differ."""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rich.console import Group
from rich.text import Text

from kvbench.metrics import intervals
from kvbench.results import aggregate
from kvbench.results.fidelity_fold import answers_left, flips_of, pair_fidelity
from kvbench.results.labels import labels, run_label
from kvbench.results.samples import Row
from kvbench.results.store import RunStore
from kvbench.results.tables import ANSWERS, FIDELITY, answer_lines, fidelity_lines
from kvbench.util.table import Cell, Grid, printable

#: maximum number of changed samples to show
SHOWN = 20


@dataclass(frozen=True)
class Comparison:
    """The differences between two runs, A and B, over the samples that both have.

    Attributes:
        names: headings of the two runs.
        keys: for each ``task`` or ``task@length`` a dict: the mean scores ``a`` and ``b``; ``diff``, the mean
            difference B - A, its standard error ``stderr`` and, of scores in 0..1, the ends ``low`` and ``high`` of its
            95 % interval; the number of samples ``n``; and ``nll``, the difference of the reference answers' negative
            log-likelihood per token, its standard error and number of samples (None if there are no answers).
        changed: the samples whose scores differ, largest difference first: their ``id``, the scores ``a`` and ``b``,
            and the predictions ``said_a`` and ``said_b``.
        reworded: number of samples with the same score but different predictions.
        notes: reasons why the comparison may be misleading.
        answers: for each key with scores or answers a dict: ``flips``, the answers whose correctness differs
            (:func:`kvbench.metrics.fidelity.flips`), and ``left``, at which token answers of B first differ from those
            of A (:func:`kvbench.results.fidelity_fold.departure`); either may be None.
        fidelity: for each key with comparisons of predictions, their measures with paired intervals
            (:func:`kvbench.results.fidelity_fold.pair_fidelity`).
    """

    names: tuple[str, str]
    keys: dict[str, dict[str, Any]]
    changed: list[dict[str, Any]]
    reworded: int
    notes: list[str]
    answers: dict[str, dict[str, Any]] = field(default_factory=dict)
    fidelity: dict[str, dict[str, dict[str, float]]] = field(default_factory=dict)


def compare_runs(a: RunStore, b: RunStore) -> Comparison:
    """Compare two stored runs over the samples that both have; differences are B - A."""
    rows_a, rows_b = a.samples().rows, b.samples().rows
    common = [name for name in rows_a if name in rows_b]
    scores_a = aggregate.scores([rows_a[name] for name in common])
    scores_b = aggregate.scores([rows_b[name] for name in common], rows_a)
    keys = {}
    for key, entry in scores_b.items():
        pair, nll = entry["vs_fp16"] or {}, (entry["nll"] or {}).get("vs_fp16")
        keys[key] = {
            "a": scores_a[key]["score"],
            "b": entry["score"],
            "diff": pair.get("diff"),
            "stderr": pair.get("stderr"),
            **{name: pair[name] for name in ("low", "high") if name in pair},
            "n": pair.get("n", entry["n"]),
            "nll": nll,
        }
    changed, reworded = [], 0
    for name in common:
        x, y = _score_of(rows_a[name]), _score_of(rows_b[name])
        if x != y:
            answers = (rows_a[name]["prediction"], rows_b[name]["prediction"])
            changed.append({"id": name, "a": x, "b": y, "said_a": answers[0], "said_b": answers[1]})
        elif rows_a[name]["prediction"] != rows_b[name]["prediction"]:
            reworded += 1
    changed.sort(key=lambda item: (-abs((item["b"] or 0.0) - (item["a"] or 0.0)), item["id"]))
    notes = _notes(a, b, rows_a, rows_b, len(common))
    return Comparison(_names(a, b), keys, changed, reworded, notes, *_more(rows_a, rows_b, common))


def _more(
    rows_a: Mapping[str, Row], rows_b: Mapping[str, Row], common: Sequence[str]
) -> tuple[dict[str, dict[str, Any]], dict[str, dict[str, dict[str, float]]]]:
    """Return the fields `answers` and `fidelity` of a :class:`Comparison` over the sample ids `common`."""
    by_key: dict[str, list[str]] = {}
    for name in common:
        by_key.setdefault(aggregate.score_key(rows_b[name]), []).append(name)
    answers, fidelities = {}, {}
    for key, names in by_key.items():
        entry = {"flips": flips_of(rows_a, rows_b, names), "left": answers_left(rows_a, rows_b, names)}
        if entry["flips"] and any("problem" in rows_b[name] for name in names):
            entry["flips"] = {**entry["flips"], "p": _p_by_problem(rows_a, rows_b, names)}
        if any(entry.values()):
            answers[key] = entry
        figures = pair_fidelity([rows_a[name] for name in names], [rows_b[name] for name in names])
        if figures is not None:
            fidelities[key] = figures
    return answers, fidelities


def _p_by_problem(rows_a: Mapping[str, Row], rows_b: Mapping[str, Row], names: Sequence[str]) -> float:
    """Return McNemar's p over problems, each lost or won by most of its answers, which depend on each other."""
    from kvbench.metrics.fidelity import mcnemar

    changes: dict[str, float] = {}
    for name in names:
        before, after = _score_of(rows_a[name]), _score_of(rows_b[name])
        if before is not None and after is not None:
            problem = aggregate.problem_of(rows_b[name])
            changes[problem] = changes.get(problem, 0) + (after >= 1 - 1e-9) - (before >= 1 - 1e-9)
    return mcnemar(sum(change < 0 for change in changes.values()), sum(change > 0 for change in changes.values()))


def comparison_screen(comparison: Comparison) -> Group:
    """Render a comparison for a terminal: the table of differences, the samples whose scores differ, the notes."""
    body = [[Cell(text) for text in line] for line in difference_lines(comparison)]
    table = Grid(("", "A", "B", "B - A", "answer NLL", "n"), body)
    parts: list[Any] = [Text(f"A {comparison.names[0]}\nB {comparison.names[1]}\n"), table.drawn()]
    for head, texts in ((ANSWERS, answer_lines(comparison.answers)), (FIDELITY, fidelity_lines(comparison.fidelity))):
        if texts:
            parts += [Text(""), Grid(head, [[Cell(text) for text in line] for line in texts]).drawn()]
    summary = (
        f"\nsamples with different scores: {len(comparison.changed)}; with the same score but "
        f"different answers: {comparison.reworded}"
    )
    parts.append(Text(summary, style="dim"))
    for item in comparison.changed[:SHOWN]:
        parts.append(Text(f"{printable(item['id'])}  {_three_decimals(item['a'])} -> {_three_decimals(item['b'])}"))
        parts += [Text(f"  {name} {_one_line(item[key])}") for name, key in (("A", "said_a"), ("B", "said_b"))]
    parts += [Text(f"note: {printable(note)}", style="dim") for note in comparison.notes]
    return Group(*parts)


def comparison_markdown(comparison: Comparison) -> str:
    """Render a comparison as markdown: the table of differences, the samples whose scores differ, and the notes."""
    rows = [f"A: {comparison.names[0]}, B: {comparison.names[1]}", ""]
    rows += ["| | A | B | B - A | answer NLL | n |", "|:--|--:|--:|--:|--:|--:|"]
    rows += ["| " + " | ".join(line) + " |" for line in difference_lines(comparison)]
    for head, texts in ((ANSWERS, answer_lines(comparison.answers)), (FIDELITY, fidelity_lines(comparison.fidelity))):
        if texts:
            rows += ["", "| " + " | ".join(head) + " |", "|:--" + "|--:" * (len(head) - 1) + "|"]
            rows += ["| " + " | ".join(line) + " |" for line in texts]
    if comparison.changed:
        rows += ["", "| sample | A | B | answer of A | answer of B |", "|:--|--:|--:|:--|:--|"]
        for item in comparison.changed[:SHOWN]:
            answers = [_one_line(item[key]).replace("|", "\\|") for key in ("said_a", "said_b")]
            rows.append(
                "| " + " | ".join([item["id"], _three_decimals(item["a"]), _three_decimals(item["b"]), *answers]) + " |"
            )
    rows += ["", *(f"note: {note}" for note in comparison.notes)] if comparison.notes else []
    return "\n".join(map(printable, rows)) + "\n"


def comparison_csv(comparison: Comparison) -> str:
    """Return a comparison's mean scores and differences as CSV, with one line per task, or per task and length."""
    buffer = io.StringIO()
    writer = csv.writer(buffer, lineterminator="\n")
    measures = sorted({name for figures in comparison.fidelity.values() for name in figures})
    more = [f"{name}_{part}" for name in measures for part in ("a", "b", "diff", "low", "high")]
    flipped = ("flips", "lost", "won", "p") if comparison.answers else ()
    left = ("never", "median") if comparison.answers else ()
    writer.writerow(
        ["key", "a", "b", "diff", "stderr", "n", "nll_diff", "nll_stderr"]
        + [{"p": "mcnemar_p"}.get(name, name) for name in flipped]
        + [{"never": "never_left", "median": "left_median"}[name] for name in left]
        + more
    )
    for key, entry in comparison.keys.items():
        nll = entry["nll"] or {}
        answers, figures = comparison.answers.get(key, {}), comparison.fidelity.get(key, {})
        writer.writerow(
            [printable(key), *(entry[k] for k in ("a", "b", "diff", "stderr", "n")), nll.get("diff"), nll.get("stderr")]
            + [(answers.get("flips") or {}).get(name) for name in flipped]
            + [(answers.get("left") or {}).get(name) for name in left]
            + [figures.get(name, {}).get(p) for name in measures for p in ("a", "b", "diff", "low", "high")]
        )
    return buffer.getvalue()


def difference_lines(comparison: Comparison) -> list[tuple[str, ...]]:
    """Return the cells of the table of differences as text, one line per task, or per task and length.

    They are the task, the scores of A and B, their difference, the difference in NLL of the reference answers, and the
    number of samples.
    """
    cells: list[tuple[str, ...]] = []
    for key, entry in comparison.keys.items():
        nll = entry["nll"]
        beside = f"{nll['diff']:+.4f}{_reach_suffix(None, nll, 4)}" if nll else "-"
        diff = "-" if entry["diff"] is None else f"{entry['diff']:+.3f}{_reach_suffix(entry['b'], entry)}"
        cells.append((key, _three_decimals(entry["a"]), _three_decimals(entry["b"]), diff, beside, str(entry["n"])))
    return cells


def _notes(a: RunStore, b: RunStore, rows_a: Mapping[str, Row], rows_b: Mapping[str, Row], common: int) -> list[str]:
    notes = []
    if a.run_id.split("-", 1)[0] != b.run_id.split("-", 1)[0]:
        notes.append("the runs differ not only in the method, but also in the model, data, decoding or seed")
    data = [((store.metrics() or {}).get("data") or {}).get("identity") for store in (a, b)]
    if all(data) and data[0] != data[1]:
        notes.append("their data differ, so the same sample id may belong to different questions")
    if len(rows_a) != common or len(rows_b) != common:
        notes.append(f"A has {len(rows_a)} samples, B has {len(rows_b)}; the {common} that both have are compared")
    for name, store in (("A", a), ("B", b)):
        codes = (store.metrics() or {}).get("code") or {}
        if len(codes) > 1:
            notes.append(f"the samples of {name} were made by {len(codes)} versions of the code")
    versions = [{row["scorer_version"] for row in rows.values()} for rows in (rows_a, rows_b)]
    if versions[0] != versions[1]:
        notes.append(
            "they were scored by different versions of the scorer; run the older one again to update its scores"
        )
    return notes


def _names(a: RunStore, b: RunStore) -> tuple[str, str]:
    """Return headings of the two runs: run id, name with the settings that differ, model and data set."""
    runs = [(store.metrics() or {}, store.config() or {}) for store in (a, b)]
    whole = [metrics for metrics, _ in runs if metrics]
    fallback = [run_label(metrics) if metrics else "?" for metrics, _ in runs]
    names = labels(whole, beside=("model", "dataset")) if len(whole) == 2 else fallback
    headings = []
    for store, (_, config), name in zip((a, b), runs, names, strict=True):
        choices = (config.get(group) for group in ("model", "dataset"))
        model, data = (choice.get("name", "?") if isinstance(choice, dict) else "?" for choice in choices)
        headings.append(f"{store.run_id}  {name}, {model}, {data}")
    return headings[0], headings[1]


def _score_of(row: Row) -> float | None:
    value = row["scores"].get("score")
    return None if value is None else float(value)


def _three_decimals(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


def difference_reach(score: float | None, pair: Mapping[str, Any]) -> float | None:
    """Return the distance from a difference to the farther end of its 95 % interval; None if it is unknown.

    `score` is the mean score of B; None if the difference is not one of scores. `pair` is ``{diff, stderr, n}``, with
    ``low`` and ``high`` if known.
    """
    if pair["diff"] is None:
        return None
    return intervals.interval_reach(pair["diff"], aggregate.pair_interval(score, {"n": 0, **pair}))


def _reach_suffix(score: float | None, pair: Mapping[str, Any], digits: int = 3) -> str:
    length = difference_reach(score, pair)
    return "" if length is None else f" ±{length:.{digits}f}"


def _one_line(text: str) -> str:
    plain = " ".join(text.split())
    return repr(plain if len(plain) <= 100 else plain[:97] + "...")
