"""A folded item as a table: for the screen and markdown, LaTeX (booktabs) and CSV."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Sequence
from textwrap import shorten

from experiments.fold.cells import OUT_OF_MEMORY, Cell, Folded, Heading, Verdict
from experiments.item import Item

#: characters of a reason below a table; the whole is in cells.json
LONGEST = 240
#: what the numbers of a table mean
SPREAD = (
    "±: distance to the farther end of the 95 % interval. Scores and shares in percent, their differences in points."
)
#: unit of ratios, which are no differences
FACTOR = "factor"


def item_markdown(item: Item, folded: Folded) -> str:
    """Return the tables of all models, then the claims, the reasons of empty cells, the caption and the notes."""
    lines = [f"# {item.paper} {item.number}: {item.title}", ""]
    lines += [f"**{mark}**" for mark in folded.marks] + ([""] if folded.marks else [])
    for model in folded.models:
        lines += [f"## {model}", ""] if len(folded.models) > 1 or model else []
        lines += [*_model(folded, model), ""]
    if folded.verdicts and not folded.marks:
        lines += [*claims(folded.verdicts), ""]
    lines += [f"- {words}" for words in item.words] + ([""] if item.words else [])
    lines += [*_reasons(folded), " ".join(item.caption.split()), ""]
    lines += [f"{note}\n" for note in folded.notes]
    if any(cell.low is not None for cell in folded.cells) and not folded.marks:
        lines += [f"{SPREAD}\n"]
    return "\n".join(lines).rstrip("\n") + "\n"


def _model(folded: Folded, model: str) -> list[str]:
    """Return the table of one model: per setting a line of the paper, ours, the difference and the paired one."""
    cells = {(c.row, c.column): c for c in folded.cells if c.model == model}
    counts = {h.name: sorted({c.n for (_, col), c in cells.items() if col == h.name and c.n}) for h in folded.headings}
    heads = [_heading(h, counts[h.name]) for h in folded.headings]
    lines = ["| | | " + " | ".join(heads) + " |", "|:--|:--|" + "--:|" * len(heads)]
    for row in folded.rows:
        own = [(cells.get((row, h.name)), h) for h in folded.headings]
        label = row
        for name, texts in _setting_lines(own, bool(folded.marks), folded.base):
            if any(texts):
                lines.append(f"| {label} | {name} | " + " | ".join(texts) + " |")
                label = ""
        if label:
            lines.append(f"| {label} | ours | " + " | ".join("-" for _ in own) + " |")
    return lines


def _heading(heading: Heading, counts: Sequence[int]) -> str:
    unit = f", {heading.unit}" if heading.unit and heading.unit != "%" else ""
    shown = ", ".join(map(str, counts)) if len(counts) < 3 else f"{counts[0]} to {counts[-1]}"
    return f"{heading.name}{unit}" + (f" (n = {shown})" if counts and counts != [1] else "")


def _setting_lines(own: Sequence[tuple[Cell | None, Heading]], bare: bool, base: str) -> list[tuple[str, list[str]]]:
    """Return the lines of one setting: name and texts, empty where no cell has that figure."""
    names = ["paper", "ours", "ours - paper", f"ours - {base}" if base else "ours - base"]
    lines: list[tuple[str, list[str]]] = [(name, []) for name in names]
    for cell, heading in own:
        digits = heading.digits
        texts = ["", "", "", ""]
        if cell is not None:
            texts = [
                decimal_text(cell.paper, digits),
                "OOM" if out_of_memory(cell) else with_reach(cell.ours, cell.low, cell.high, digits),
                decimal_text(cell.difference, digits, sign=True),
                with_reach(cell.to_base, cell.to_base_low, cell.to_base_high, digits, sign=True),
            ]
        for (_, column), text in zip(lines, texts, strict=True):
            column.append(text)
    if bare:  # no difference is printed of generated records
        return [lines[1]]
    return lines


def out_of_memory(cell: Cell) -> bool:
    """Return True if a cell's point did not fit into memory, which is an answer, and shown as one."""
    return cell.ours is None and cell.reason.startswith(OUT_OF_MEMORY)


def decimal_text(value: float | None, digits: int = 2, sign: bool = False) -> str:
    """Return a number with `digits` decimals; empty for None."""
    if value is None:
        return ""
    return f"{value:+.{digits}f}" if sign else f"{value:.{digits}f}"


def with_reach(value: float | None, low: float | None, high: float | None, digits: int = 2, sign: bool = False) -> str:
    """Return a number and the distance to the farther end of its 95 % interval."""
    text = decimal_text(value, digits, sign)
    if value is None or low is None or high is None:
        return text
    return f"{text} ±{max(value - low, high - value):.{digits}f}"


def amount(one: Verdict) -> str:
    """Return a claim's number with its interval, unit and label: ``-11.7 points [-24.2, +0.9]``."""
    if one.ours is None:
        return f"- ({one.label})" if one.label else "-"
    text = f"factor {one.ours:.{one.digits}f}" if one.unit == FACTOR else decimal_text(one.ours, one.digits, sign=True)
    text += f" {one.unit}" if one.unit and one.unit != FACTOR else ""
    if one.least is not None and one.most is not None:
        text += f" [{decimal_text(one.least, one.digits, sign=True)}, {decimal_text(one.most, one.digits, sign=True)}]"
    return f"{text} ({one.label})" if one.label else text


def because(one: Verdict) -> str:
    """Return what stands behind a verdict: why a claim is not comparable, or how many samples would decide it."""
    if one.reason:
        return f": {one.reason}"
    if one.needed is None:
        return ""
    return (
        " (more than a million samples would)"
        if one.needed > 1e6
        else f" (about {rounded_count(one.needed)} samples would)"
    )


def rounded_count(count: int) -> str:
    """Return a number of samples with two significant digits, upwards: ``1,300``."""
    step = 10 ** max(0, len(str(count)) - 2)
    return f"{-(-count // step) * step:,}"


def claims(verdicts: Sequence[Verdict]) -> list[str]:
    """Return the table of claims: the paper's difference, ours with its interval, and the verdict."""
    lines = ["| claim | model | paper | ours | n | holds within | verdict |", "|:--|:--|--:|--:|--:|:--|:--|"]
    for one in verdicts:
        paper = decimal_text(one.paper, one.digits, sign=one.unit != FACTOR) or "-"
        said = f"{one.verdict}{because(one)}"
        lines.append(
            f"| {one.claim} | {one.model} | {paper} | {amount(one)} | {one.n or '-'} | {_bounds(one)} | {said} |"
        )
    return lines


def _bounds(one: Verdict) -> str:
    before, behind = ("factor ", "") if one.unit == FACTOR else ("", one.unit and f" {one.unit}")
    if math.isinf(one.high):
        return f"{before}above {one.low:g}{behind}"
    span = f"below {one.high:g}" if math.isinf(one.low) else f"{one.low:g} to {one.high:g}"
    return f"{before}{span}{behind}"


def _reasons(folded: Folded) -> list[str]:
    """Return one line per reason why cells are empty, with the places."""
    places: dict[str, list[str]] = {}
    for cell in folded.cells:
        if cell.ours is None and cell.reason:
            text = shorten(cell.reason.split("\n")[0], LONGEST, placeholder=" ...")
            places.setdefault(text, []).append(cell.row or cell.column)
    word = {True: "OOM", False: "Empty"}
    lines = [
        f"{word[text.startswith(OUT_OF_MEMORY)]} ({', '.join(dict.fromkeys(rows))}): {text}"
        for text, rows in places.items()
    ]
    return [*lines, ""] if lines else []


def to_csv(folded: Folded) -> str:
    """Return one line per cell."""
    buffer = io.StringIO()
    writer = csv.writer(buffer, lineterminator="\n")
    keys = ("model", "row", "column", "paper", "ours", "difference", "stderr", "n", "to_base", "to_base_stderr")
    keys += ("low", "high", "to_base_low", "to_base_high")
    writer.writerow([*keys, "runs", "reason"])
    for cell in folded.cells:
        reason = cell.reason.split("\n")[0]
        writer.writerow(
            [*("" if (v := getattr(cell, key)) is None else v for key in keys), " ".join(cell.runs), reason]
        )
    return buffer.getvalue()


def latex(item: Item, folded: Folded) -> str:
    """Return a table environment (booktabs): per setting ours with its interval, and the paper's number below it."""
    spec = "l" + "r" * len(folded.headings)
    lines = [r"\begin{table}", r"\centering", rf"\begin{{tabular}}{{{spec}}}", r"\toprule"]
    lines.append(" & ".join(["", *(escaped(h.name) for h in folded.headings)]) + r" \\")
    for model in folded.models:
        lines += [r"\midrule", rf"\multicolumn{{{len(folded.headings) + 1}}}{{l}}{{\emph{{{escaped(model)}}}}} \\"]
        for row in folded.rows:
            own = [(folded.at(model, row, h.name), h) for h in folded.headings]
            ours = [
                "OOM" if c and out_of_memory(c) else with_reach(c.ours, c.low, c.high, h.digits) if c else ""
                for c, h in own
            ]
            ours = [text.replace(" ±", r"\,$\pm$\,") for text in ours]
            lines.append(" & ".join([escaped(row), *(text or "--" for text in ours)]) + r" \\")
            if any(c is not None and c.paper is not None for c, _ in own) and not folded.marks:
                paper = [decimal_text(c.paper, h.digits) if c else "" for c, h in own]
                lines.append(" & ".join([r"\quad paper", *(text or "--" for text in paper)]) + r" \\")
    caption = escaped(" ".join([*folded.marks, f"{item.title}.", *item.caption.split()]))
    name = item.id.replace("/", "-")
    lines += [r"\bottomrule", r"\end{tabular}", rf"\caption{{{caption}}}", rf"\label{{tab:{name}}}", r"\end{table}"]
    return "\n".join(lines) + "\n"


_LATEX = {"&": r"\&", "%": r"\%", "_": r"\_", "#": r"\#", "$": r"\$", "{": r"\{", "}": r"\}", "~": r"\textasciitilde{}"}
_LATEX |= {"γ": r"$\gamma$", "α": r"$\alpha$", "β": r"$\beta$", "±": r"$\pm$", "−": "-", "\\": r"\textbackslash{}"}


def escaped(text: str) -> str:
    """Return text for LaTeX."""
    return "".join(_LATEX.get(char, char) for char in text)
