"""``python -m experiments.fidelity``: run all settings on a model, and fold them into results/tiny/fidelity.

Each setting is run twice on the same prompts: once with fp16's own answers decoded through its cache
(``dataset=fidelity/answers``), and once with answers of its own (``dataset=mini``). The same command resumes an
interrupted one; ``--fold-only`` makes the tables of what is there, and with a smaller ``--limit``, of each task's first
samples. Another model than the bundled one has its tables in results/MODEL/fidelity.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from experiments import measured
from experiments.fidelity.fold import LENGTH, SETTINGS, TASKS, data, fold_fidelity
from kvbench.util.door import reporting


def parse_fidelity_options(given: Sequence[str]) -> argparse.Namespace:
    """Parse the command line."""
    parser = measured.table_parser("experiments.fidelity", __doc__, "results/runs/fidelity", batch=8, limit=8)
    return measured.set_chosen(parser, parser.parse_args(given), SETTINGS, "results/tiny/fidelity")


@reporting("interrupted; run the same command again to resume")
def main(argv: Sequence[str] | None = None) -> int:
    """Run what is missing, write the tables, and return the exit status."""
    given = sys.argv[1:] if argv is None else argv
    arguments = parse_fidelity_options(given)
    runs, count = data(LENGTH, arguments.limit, arguments.limit), len(TASKS) * arguments.limit
    table = measured.Table("experiments.fidelity", lambda _: runs, partial(fold_fidelity, count=count), before)
    return measured.make_table(table, arguments, given)


def before(folder: Path) -> dict[str, int] | None:
    """Return the prompts and settings of the stored tables; None without any."""
    if not (folder / "table.md").exists():
        return None
    lines = (folder / "settings.csv").read_text(encoding="utf-8").splitlines()
    prompts = re.search(r"^(\d+) prompts", (folder / "table.md").read_text(encoding="utf-8"), re.MULTILINE)
    return {"prompts": int(prompts[1]) if prompts else 0, "settings": len(lines) - 1}


if __name__ == "__main__":
    sys.exit(main())
