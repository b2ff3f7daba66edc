"""``python -m experiments.formats``: run the table of formats on a small model, and fold it into results/formats.

Each line is run twice: with answers of its own (``dataset=mini``, which gives scores and bytes), and with fp16's
answers decoded through its cache (``dataset=fidelity/answers``, which gives the KL divergence). The same command
resumes an interrupted one; ``--fold-only`` makes the tables from existing runs. With ``--jobs``, lines run side by
side, which changes nothing in the table. For a model of the hub: ``--model llama3.1-8b-instruct --device cuda``, whose
tables are in results/MODEL/formats.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

from experiments import measured
from experiments.fidelity.fold import TASKS, data
from experiments.formats.fold import fold_formats, sizes
from experiments.formats.grid import ROWS
from experiments.formats.which import settings
from experiments.place import stored_counts
from kvbench.util.door import reporting


def parse_formats_options(given: Sequence[str]) -> argparse.Namespace:
    """Parse the command line."""
    parser = measured.table_parser("experiments.formats", __doc__, "results/runs/formats", batch=100, limit=100)
    add, default = parser.add_argument, " (default: %(default)s)"
    add("--length", type=int, default=1024, help="tokens of a prompt" + default)
    add("--fidelity-limit", type=int, default=32, help="samples per task for the KL divergence" + default)
    add("--settings", action="store_true", help="print the settings for kvbench.bench tpot")
    return measured.set_chosen(parser, parser.parse_args(given), ROWS.values(), "results/formats")


def table_of(arguments: argparse.Namespace) -> measured.Table:
    """Return the table that a command line asks for."""
    runs = data(arguments.length, arguments.fidelity_limit, arguments.limit)
    count, prompts = len(TASKS) * arguments.limit, len(TASKS) * arguments.fidelity_limit
    made = partial(fold_formats, count=count, prompts=prompts, model=arguments.model)
    return measured.Table("experiments.formats", lambda _: runs, made, before)


def before(folder: Path) -> Mapping[str, int] | None:
    """Return what the stored table rests on; None without one."""
    return stored_counts(folder / "lines.json", sizes)


@reporting("interrupted; run the same command again to resume")
def main(argv: Sequence[str] | None = None) -> int:
    """Run what is missing, write the tables, and return the exit status."""
    given = sys.argv[1:] if argv is None else argv
    arguments = parse_formats_options(given)
    if arguments.settings:
        print(*settings().values())
        return 0
    return measured.make_table(table_of(arguments), arguments, given)


if __name__ == "__main__":
    sys.exit(main())
