"""Documents of results/ that programs write as a whole: every line of a table is the program's."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

from experiments import registry, reproduce, stored
from experiments.checks.rules import Block, Rule, Text
from experiments.draw.table import item_markdown
from experiments.efficiency.fold import point_tables
from experiments.formats.fold import formats_markdown
from experiments.formats.which import SOURCE, step_milliseconds
from experiments.mini.fold import mini_markdown
from experiments.place import TRIALS
from experiments.quantspec.table import differences, equality_rows, rates
from experiments.stored import ROOT, csv_rows, load_result_json
from experiments.tiny import perplexity, report
from experiments.write import read_folded
from kvbench.analysis.outcome import Outcome, analysis_markdown
from kvbench.results.point_record import MeasuredPoint

POINTS, PERPLEXITY = "results/efficiency/points.csv", "results/tiny/perplexity"
EQUALITY, ACCEPTANCE = "results/quantspec/equality", "results/quantspec/acceptance-tiny-float32-t0"


def written_rules() -> Iterator[Rule]:
    """Yield the rules."""
    yield from items()
    yield reproduce.reproduce_block(list(registry.items().values()))
    for document in sorted((ROOT / "results" / "analysis").glob("*/table.md")):
        folder = document.parent.relative_to(ROOT)
        text = analysis_markdown(Outcome.load(document.parent, arrays=False))
        yield Block(f"{folder}/table.md", text, f"{folder}/rows.jsonl")
    yield Block("results/efficiency/table.md", point_tables([written_point(row) for row in csv_rows(POINTS)]), POINTS)
    quantizers, claims = "results/formats/lines.json", "results/formats/claims.json"
    text = formats_markdown(load_result_json(quantizers), load_result_json(claims), step_milliseconds())
    yield Block("results/formats/table.md", text, f"{quantizers}, {claims}, {SOURCE}")
    for name in ("results/mini", "results/mini/all", "results/mini/search"):
        text = mini_markdown(load_result_json(f"{name}/scores.json"), load_result_json(f"{name}/pairs.json"))
        yield Block(f"{name}/table.md", text, f"{name}/scores.json, pairs.json")
    cells = load_result_json(f"{ACCEPTANCE}.json")
    parts: list[str] = []
    for data in dict.fromkeys(cell["data"] for cell in cells):
        mine = [cell for cell in cells if cell["data"] == data]
        parts += [*rates(mine), *differences(mine)]
    yield Block(f"{ACCEPTANCE}.md", "\n".join(parts), f"{ACCEPTANCE}.json")
    yield Block(
        f"{EQUALITY}.md", "\n".join(equality_rows(load_result_json(f"{EQUALITY}.json")["rows"])), f"{EQUALITY}.json"
    )
    for name, write in (
        ("scores", lambda content: report.score_table(content["scores"])),
        ("sensitivity", report.sensitivity),
    ):
        yield Block(
            f"results/tiny/{name}.md", write(load_result_json(f"results/tiny/{name}.json")), f"results/tiny/{name}.json"
        )
    yield from perplexities()


def items(root: Path = ROOT) -> Iterator[Rule]:
    """Yield a rule for each item whose table is in results (results/PAPER/ITEM and the scales below it)."""
    results = root / "results"
    paths = sorted([*results.glob("*/*/cells.json"), *results.glob("*/*/*/cells.json")])
    paths = [path for path in paths if path.relative_to(results).parts[0] != TRIALS]
    known = registry.items()
    for path in paths:
        content = stored.content(path)
        if "headings" not in content:  # of an older version; --uncovered lists its table
            continue
        document = str(path.with_name("table.md").relative_to(root))
        yield Block(document, item_markdown(known[content["item"]], read_folded(content)), str(path.relative_to(root)))


def perplexities() -> Iterator[Rule]:
    """Yield the rules of results/tiny/perplexity.md, whose sentences its program writes too."""
    content, document, source = load_result_json(f"{PERPLEXITY}.json"), f"{PERPLEXITY}.md", f"{PERPLEXITY}.json"
    yield Block(document, perplexity.perplexity_tables(content), source)
    sentences = [pattern.format(*values) for pattern, values in perplexity.quoted(content)]
    if "again" in content:
        cells, again = content["cells"], content["again"]["cells"]
        changes = [abs(cell["diff"] - cells[key]["diff"]) for key, cell in again.items() if cell["diff"] is not None]
        sentences += [f"Of its {len(cells)} cells {len(again)} were made again on 2026-11-22"]
        sentences += [f"differ from the ones below by at most {max(changes)}."]
    yield from (Text(document, source, sentence) for sentence in sentences)


def written_point(row: dict[str, str]) -> MeasuredPoint:
    """Return a line of a file of points as the point that it was written from."""
    values: dict[str, Any] = {}
    for field in fields(MeasuredPoint):
        text, kind = row.get(field.name) or "", str(field.type)
        if not text:
            values[field.name] = None if "None" in kind else ""
        else:
            values[field.name] = int(text) if "int" in kind else float(text) if "float" in kind else text
    return MeasuredPoint(**values)
