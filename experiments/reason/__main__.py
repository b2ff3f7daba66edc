"""``python -m experiments.reason``: run all settings on tiny-reason, and fold them into results/tiny-reason/reason.

One run a setting, of the longest answers. The same command resumes an interrupted one; ``--fold-only`` makes the tables
of what is there. ``--lines`` makes the task harder (more lines are more alike) or easier, from 125, below which a trace
of 8000 tokens may repeat itself, to 160. Another model has its tables in results/MODEL/reason.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from experiments import measured
from experiments.reason.fold import LENGTHS, SETTINGS, fold_reason, longest_answers
from kvbench.tasks import load
from kvbench.util.door import reporting


def parse_reason_options(given: Sequence[str]) -> argparse.Namespace:
    """Parse the command line."""
    parser = measured.table_parser("experiments.reason", __doc__, "results/runs/reason", batch=8, limit=100)
    parser.add_argument("--lines", type=int, default=140, help="lines of a program (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="random seed of the programs (default: %(default)s)")
    parser.set_defaults(model="tiny-reason")
    return measured.set_chosen(parser, parser.parse_args(given), SETTINGS, "results/tiny/reason")


@reporting("interrupted; run the same command again to resume")
def main(argv: Sequence[str] | None = None) -> int:
    """Run what is missing, write the tables, and return the exit status."""
    given = sys.argv[1:] if argv is None else argv
    arguments = parse_reason_options(given)
    programs = {"lines": arguments.lines, "limit": arguments.limit, "seed": arguments.seed}
    load({"_target_": "kvbench.tasks.reason.Reason", "lengths": [max(LENGTHS)], **programs})  # all settings need them
    runs, fold = longest_answers(**programs), partial(fold_reason, **programs)
    return measured.make_table(
        measured.Table("experiments.reason", lambda _: runs, fold, stored_programs), arguments, given
    )


def stored_programs(folder: Path) -> dict[str, int] | None:
    """Return the programs, by their kind, and the settings of the stored table; None without any."""
    table = folder / "table.md"
    if not table.exists():
        return None
    text = table.read_text(encoding="utf-8")
    programs = re.search(r"^(\d+) (programs of \d+ lines, seed \d+)", text, re.MULTILINE)
    lines = (folder / "lengths.csv").read_text(encoding="utf-8").splitlines()
    settings = {line.partition(",")[0] for line in lines[1:]}
    return {**({programs[2]: int(programs[1])} if programs else {}), "settings": len(settings)}


if __name__ == "__main__":
    sys.exit(main())
