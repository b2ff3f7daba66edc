"""``python -m experiments.mini``: run a comparison and fold it into results/mini.

``--grid all`` is every method at comparable bytes, ``--grid search`` Cocktail's chunk search against random chunks. The
same command resumes an interrupted one; ``--fold-only`` makes the tables of what is there. With ``--jobs`` settings run
side by side: times are then not comparable and stay out of the table; scores and bytes do not depend on it. On one
GPU: ``--device cuda --batch 16 --jobs 4``. Another model than the bundled one has its tables in results/MODEL/mini.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

from experiments import measured
from experiments.measured import Setting
from experiments.mini.fold import find_samples, fold_mini
from experiments.mini.grid import COMPARISONS, PAIRS
from experiments.place import stored_counts
from kvbench.util.door import reporting


def data(setting: Setting, arguments: argparse.Namespace) -> dict[str, list[str]]:
    """Return the data of a setting's only run."""
    texts = [
        "dataset=mini/full",
        f"dataset.lengths=[{','.join(map(str, arguments.lengths))}]",
        f"dataset.limit={arguments.limit_for.get(setting.name, arguments.limit)}",
    ]
    return {"mini": [*texts, *([f"dataset.tasks=[{','.join(arguments.tasks)}]"] if arguments.tasks else [])]}


def parse_mini_options(given: Sequence[str]) -> argparse.Namespace:
    """Parse the command line, with the comparison's defaults."""
    parser = measured.table_parser("experiments.mini", __doc__, "results/runs/mini", batch=1, limit=None)
    add = parser.add_argument
    add("--grid", choices=tuple(COMPARISONS), default="all", help="comparison (default: %(default)s)")
    add(
        "--limit-for",
        nargs="+",
        default=[],
        metavar="NAME=N",
        help="other limits of single settings, such as slow ones",
    )
    add("--lengths", type=int, nargs="+", default=[4096], help="tokens of a prompt (default: 4096)")
    add("--tasks", nargs="*", help="tasks of mini (default: all; of --grid search those that tell the settings apart)")
    arguments = parser.parse_args(given)
    grid = COMPARISONS[arguments.grid]
    pairs = [text.rpartition("=") for text in arguments.limit_for]
    measured.check_names(parser, [name for name, _, _ in pairs], [setting.name for setting in grid.settings])
    arguments.limit_for = {name: int(count) for name, _, count in pairs}
    arguments.limit = arguments.limit or grid.limit
    arguments.tasks = grid.tasks if arguments.tasks is None else arguments.tasks
    return measured.set_chosen(parser, arguments, grid.settings, grid.out)


def before(folder: Path) -> Mapping[str, int] | None:
    """Return the samples of each setting of the stored table; None without one."""
    return stored_counts(folder / "scores.json", lambda content: {row["name"]: row["mean"]["n"] for row in content})


@reporting("interrupted; run the same command again to resume")
def main(argv: Sequence[str] | None = None) -> int:
    """Run what is missing, write the tables, and return the exit status."""
    given = sys.argv[1:] if argv is None else argv
    arguments = parse_mini_options(given)
    table = measured.Table(
        "experiments.mini",
        partial(data, arguments=arguments),
        partial(fold_mini, settings=arguments.chosen, pairs=PAIRS, runs=arguments.runs, model=arguments.model),
        before,
        find_samples,
    )
    return measured.make_table(table, arguments, given)


if __name__ == "__main__":
    sys.exit(main())
