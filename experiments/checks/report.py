"""Rules for results/report: size and times of the report's page."""

from __future__ import annotations

from collections.abc import Iterator

from experiments.checks.rules import Row, Rule, Text, load

DOCUMENT, SOURCE = "docs/report.md", "results/report/page.json"


def rules() -> Iterator[Rule]:
    """Yield the rules of the table in docs/report.md."""
    page = load(SOURCE)
    yield Text(DOCUMENT, "A page of {} made-up runs", [page["runs"]], SOURCE)
    yield Text(DOCUMENT, "medians of {} visits", [page["visits"]], SOURCE)
    yield Row(DOCUMENT, "", "size of the page, MB", [page["page_bytes"] / 1e6], SOURCE)
    yield Row(DOCUMENT, "", "writing the page, s", [page["written_s"]], SOURCE)
    for name, milliseconds in page["median_ms"].items():
        yield Row(DOCUMENT, "", f"{name}, ms", [milliseconds, page["median_cpu_ms"][name]], SOURCE)
