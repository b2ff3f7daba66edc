"""``python -m experiments --reproduce``: docs/reproduce.md, from the registry and what lies in results.

For each item: its command, the hardware and the time that the paper's models and data take (``--expect``: predicted
anew, which takes minutes, and kept in :data:`EXPECTED`), what was measured here, and how each claim came out.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from experiments import stored
from experiments.checks.rules import Block, write_blocks
from experiments.data import Plan
from experiments.draw.table import amount, because
from experiments.fold.cells import OUT_OF_MEMORY, Verdict
from experiments.fold.claims import ALL_ROWS, APART, FAILS, FLOOR, HOLDS, NOT_RUN, OPEN, RULE, VERDICTS
from experiments.item import Computed, Item
from experiments.stored import ROOT, as_json, markdown_table
from experiments.write import claims_of
from kvbench.util import atomic

#: file with the expected time and memory of every item with the paper's models and data
EXPECTED = ROOT / "results" / "expected.json"
#: beginnings of the overrides that a setting is made of
_OF_SETTING = ("method=", "method.", "quantizer")
#: what the rows at hand would not decide
FOR_ROWS = "undecided for rows"
#: fewest samples of a decided claim that is not counted as one of few
MANY = 30
#: counts of each verdict in words, in the order of lists: of one claim, and of several
COUNTED = {
    HOLDS: ("holds", "hold"),
    FAILS: ("does not hold", "do not hold"),
    OPEN: ("undecided", "undecided"),
    FOR_ROWS: ("undecided for rows", "undecided for rows"),
    FLOOR: ("at the floor", "at the floor"),
    APART: ("not comparable", "not comparable"),
    NOT_RUN: ("not run", "not run"),
}


@dataclass(frozen=True)
class Scale:
    """The results of an item with certain models and data.

    Args:
        name: folder below the item's; empty for the paper's own models and data.
        path: the ``cells.json``.
        content: what the file holds.
    """

    name: str
    path: Path
    content: Mapping[str, Any]

    @property
    def title(self) -> str:
        """Models and data in words."""
        return self.name or "paper's models"

    @property
    def verdicts(self) -> list[Verdict]:
        """The outcomes of the claims, from the table's cells."""
        return claims_of(self.content)

    @property
    def numbers(self) -> int:
        """Number of cells with a number of ours."""
        return sum(cell["ours"] is not None for cell in self.content["cells"])

    @property
    def counts(self) -> str:
        """Number of cells with a number of ours, of those that did not fit into memory, and of all, in words."""
        cells = self.content["cells"]
        full = sum(cell["ours"] is None and cell.get("reason", "").startswith(OUT_OF_MEMORY) for cell in cells)
        return f"{self.numbers} of {len(cells)}" + (f", and {full} out of memory" if full else "")


def scales(item: Item, results: Path) -> list[Scale]:
    """Return the results of an item that have a number, those with the paper's models first; no generated records."""
    paths = [results / item.id / "cells.json", *sorted((results / item.id).glob("*/cells.json"))]
    there = []
    for path in paths:
        if path.exists():
            name = "" if path.parent == results / item.id else path.parent.name
            scale = Scale(name, path, stored.content(path))
            if scale.numbers and not scale.content["marks"]:
                there.append(scale)
    return there


def page(items: Sequence[Item], results: Path, expected: Mapping[str, Mapping[str, float]]) -> str:
    """Return the generated part of the page: a table of all items, then their claims.

    `expected` has by item the ``hours`` on one H200 and the peak ``gib`` with the paper's models and data, and the
    number of ``runs``.
    """
    body = []
    by_item = {item.id: scales(item, results) for item in items}
    for item in items:
        measured = "; ".join(f"{one.title}: {one.counts}" for one in by_item[item.id])
        if isinstance(item, Computed) and item.compute.startswith("analytic:"):
            measured += " (computed, nothing measured)" if measured else ""
        claims = "; ".join(f"{one.title}: {text}" for one in by_item[item.id] if (text := counted(one)))
        time = needed(item, expected.get(item.id))
        name = f"[{item.id}](#{anchor(item)})"
        body.append([name, f"{item.number}: {item.title}", time, measured or "-", claims or "-"])
    head = ["item", "of the paper", "on one H200 with real weights", "numbers here", "claims"]
    totals = ["Claims of all items together, by models and data:", "", *totals_table(by_item)]
    lines = [*totals, "", *markdown_table(head, body, "l"), "", *RULE.splitlines()]
    for item in items:
        lines += ["", f"### {item.id}", "", *section(item, by_item[item.id], results)]
    return "\n".join(lines)


def section(item: Item, scales_: Sequence[Scale], results: Path) -> Iterator[str]:
    """Yield the lines of one item: command, tables, and claims with the numbers that decide them."""
    yield f"{item.number}: {item.title}. `python -m experiments {item.id}`"
    if not scales_:
        yield ""
        yield "Nothing was measured here."
    for scale in scales_:
        folder, limit = scale.path.parent.relative_to(results), scale.content.get("limit")
        drawn = (scale.path.parent / "figure.png").exists()
        more = f", [figure.png](../results/{folder}/figure.png)" if drawn else ""
        known = next((note for note in scale.content.get("notes", ()) if note.startswith("At most ")), "")
        cut = f", at most {limit} samples per data set" if limit is not None else ""
        cut = f", a{known[1:-1]}" if known else cut
        yield ""
        yield f"{scale.title}{cut} ([table](../results/{folder}/table.md){more}):"
        yield ""
        claims = scale.verdicts
        for word in VERDICTS[:-1]:
            for claim in claims:
                if claim.verdict == word:
                    model = f" ({claim.model})" if len({c.model for c in claims}) > 1 else ""
                    count = f", n = {claim.n}" if claim.least is not None else ""
                    yield f"- {word}: {claim.claim}{model}: {amount(claim)}{count}{because(claim)}"
        missing = sum(claim.verdict == NOT_RUN for claim in claims)
        if missing:
            yield f"- not run: {missing} claim{'s' if missing > 1 else ''}"
        if not claims:
            yield "- the paper's claims are in words, beside the table"


def outcomes(scale: Scale) -> Counter[str]:
    """Return how many claims of a scale came out in each way of :data:`COUNTED`."""
    return Counter(FOR_ROWS if ALL_ROWS in claim.label else claim.verdict for claim in scale.verdicts)


def counted(scale: Scale) -> str:
    """Return how the claims of a scale came out, as counts."""
    counts = outcomes(scale)
    return ", ".join(f"{counts[word]} {COUNTED[word][counts[word] > 1]}" for word in COUNTED if counts[word])


def totals_table(by_item: Mapping[str, Sequence[Scale]]) -> list[str]:
    """Return the table of the claims of all items together: a line for each choice of models and data.

    A claim is *decided* where it holds or does not, some with few samples, and *undecided for time* where the rows at
    hand would decide it, or where their number is not known.
    """
    titles = list(dict.fromkeys(scale.title for scales_ in by_item.values() for scale in scales_))
    body = []
    for title in titles:
        own = [scale for scales_ in by_item.values() for scale in scales_ if scale.title == title]
        counts = sum(map(outcomes, own), Counter[str]())
        few = sum(v.verdict in (HOLDS, FAILS) and 0 < (v.n or 0) < MANY for scale in own for v in scale.verdicts)
        small = f", {few} with n below {MANY}" if few else ""
        decided = f"{counts[HOLDS] + counts[FAILS]} ({counts[HOLDS]} hold{small})"
        rest = [str(counts[word]) for word in (OPEN, FOR_ROWS, FLOOR, APART, NOT_RUN)]
        body.append([title, str(len(own)), str(counts.total()), decided, *rest])
    head = ["models and data", "items", "claims", "decided", "undecided for time", FOR_ROWS, FLOOR, APART, NOT_RUN]
    return markdown_table(head, body)


def needed(item: Item, expected: Mapping[str, float] | None) -> str:
    """Return the time and memory that an item is expected to take, or what an item without runs needs."""
    if isinstance(item, Computed):
        return item.needs or "nothing"
    if expected is None:
        return "not predicted"
    if not expected["runs"]:
        return "no run"
    if not expected["hours"]:
        return f"{expected['runs']:.0f} runs, not predicted"
    return f"{expected['hours']:.2g} h, {expected['gib']:.0f} GiB ({expected['runs']:.0f} runs)"


def anchor(item: Item) -> str:
    """Return the anchor of an item's section."""
    return item.id.replace("/", "")


def expect_items(items: Sequence[Item]) -> dict[str, dict[str, float]]:
    """Return what every item is expected to take with the paper's models and data.

    The first setting of a model and a data set stands for all of them: prefill and weights take most of the time.
    """
    from experiments import predict
    from experiments.session import item_runs

    expected = {}
    figures: dict[tuple[str, ...], tuple[float, float] | None] = {}
    for item in items:
        runs = item_runs(item, Plan())
        keys = [tuple(text for text in run.overrides if not text.startswith(_OF_SETTING)) for run in runs]
        for key, run in zip(keys, runs, strict=True):
            if key not in figures:
                figures[key] = predict.expect_run(run)
        known = [one for key in keys if (one := figures[key]) is not None]
        hours = sum(seconds for seconds, _ in known) / 3600
        gib = max((size for _, size in known), default=0.0) / 2**30
        expected[item.id] = {"runs": len(runs), "hours": round(hours, 3), "gib": round(gib, 1)}
    return expected


def main(items: Sequence[Item], write: bool = False, again: bool = False) -> int:
    """Print the generated part of the page, or `write` it into docs/reproduce.md; `again`: predict all times anew."""
    if again:
        atomic.replace_file(EXPECTED, as_json(expect_items(items)).encode())
    if not write:
        print(reproduce_block(items).text)
        return 0
    return write_blocks([reproduce_block(items)], ROOT)


def follow_results(plan: Plan) -> None:
    """Write the generated part of docs/reproduce.md anew after items were kept below results."""
    if plan.write and plan.out.resolve() == ROOT / "results":
        from experiments.registry import items

        main(list(items().values()), write=True)


def reproduce_block(items: Sequence[Item]) -> Block:
    """Return the generated part of docs/reproduce.md."""
    text = page(items, ROOT / "results", stored_predictions())
    return Block("docs/reproduce.md", text, "results/*/*/cells.json, results/expected.json", "reproduce")


def stored_predictions() -> dict[str, dict[str, float]]:
    """Return the expected time and memory by item, as they were predicted last; empty if they never were."""
    return dict(stored.content(EXPECTED)) if EXPECTED.exists() else {}
