"""The figures of the documents, each with the file that it comes from (:mod:`experiments.check`).

A module for each folder of results, or for all documents that programs write as a whole. Each has a function of rules,
of sentences and of tables (:mod:`~experiments.checks.rules`). They import no torch.
"""

from __future__ import annotations

from collections.abc import Iterator

from experiments.checks.rules import Rule


def all_rules() -> Iterator[Rule]:
    """Yield all rules, module by module."""
    from experiments.checks.formats import format_rules
    from experiments.checks.h200 import h200_rules
    from experiments.checks.h200_steps import h200_step_rules
    from experiments.checks.h200_tables import h200_table_rules
    from experiments.checks.methods import method_rules
    from experiments.checks.mini import mini_rules
    from experiments.checks.reason import reason_rules
    from experiments.checks.written import written_rules
    from experiments.efficiency.latency import latency_rules
    from experiments.fit import fit_blocks
    from experiments.real.pages import page_blocks

    for rules in (h200_rules, h200_table_rules, mini_rules, format_rules, latency_rules, method_rules, written_rules):
        yield from rules()
    yield from h200_step_rules()
    yield from reason_rules()
    yield from page_blocks()
    yield from fit_blocks()
