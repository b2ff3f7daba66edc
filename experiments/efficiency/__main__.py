"""``python -m experiments.efficiency``: measure a grid on this GPU, or fold what was measured into tables and plots.

``--run logquant`` measures LogQuant's own setting, ``--run batch`` and ``--run context`` a 7B model against batch and
context; ``--model`` another model, whose tables are in results/MODEL/efficiency (what is typed after ``--`` is added to
the bench's arguments). ``--fold FILE_OR_FOLDER ...`` reads JSON files of ``kvbench.bench memory | tpot``, folders of
such files, and folders of runs of ``dataset=efficiency``.
"""

from __future__ import annotations

import sys
from pathlib import Path

from experiments import measured
from experiments.efficiency.fold import fold_efficiency, read_points
from experiments.place import choice, place_result
from kvbench.errors import KvbenchError

COCKTAIL = "cocktail:split=10/30/60,encoder=bm25"
LOGQUANT = "logquant:int2_g128:window=64,reserved=192"

_GRIDS = {
    # LogQuant, Fig. 7: 8B, prompts of 512 tokens, 2,000 new ones, 48 GB
    "logquant": "memory --model llama3.1-8b --contexts 512 --new-tokens 2000 --memory-limit-gb 48 --bisect 4"
    f" --settings fp16 {LOGQUANT} kivi:int2_g128",
    # Cocktail, Fig. 4-6: Llama2-7B, the batch growing until memory ends
    "batch": "memory --model llama2-7b --contexts 4k 8k --new-tokens 128 --bisect 2"
    f" --settings fp16 kivi:int4_g128 {LOGQUANT} {COCKTAIL}",
    # one sequence, the context growing
    "context": "tpot --model llama2-7b --contexts 4k 32k 64k 128k --fill random --baselines static-compiled"
    f" --settings fp16 kivi:int4_g128 kivi:int4 {LOGQUANT} {COCKTAIL}",
}
#: name -> what is typed after ``python -m kvbench.bench``
GRIDS = {name: tuple(text.split()) for name, text in _GRIDS.items()}


def main(argv: list[str] | None = None) -> int:
    """Measure or fold; the bench's exit status."""
    given = list(sys.argv[1:] if argv is None else argv)
    given, more = (given[: given.index("--")], given[given.index("--") + 1 :]) if "--" in given else (given, [])
    parser = measured.command_line("experiments.efficiency", __doc__, "")
    parser.add_argument("--model", help="model to measure (default: that of the grid)")
    parser.add_argument("--run", choices=GRIDS, help="measure this grid first")
    folded = "files and folders with measured points, to make tables and plots from"
    parser.add_argument("--fold", nargs="+", type=Path, default=[], metavar="PLACE", help=folded)
    args = parser.parse_args(given)
    if not args.run and not args.fold:
        parser.error("nothing to do; use --run or --fold")
    args.out = args.out or measured.home("results/efficiency", args.model or measured.TINY)
    status, places = 0, list(args.fold)
    if args.run:
        from kvbench.bench.__main__ import main as bench

        folder = place_result(args.out, choice(args)).path
        model = ["--model", args.model] if args.model else []
        status = bench([*GRIDS[args.run], *model, "--out", str(folder), "--name", args.run, *more])
        places.append(folder / f"{args.run}.json")
    try:
        points = read_points(places)
    except (FileNotFoundError, KvbenchError) as error:
        print(f"error: {error}", file=sys.stderr)
        return status or 2
    if not points:
        print(f"error: there are no points in {', '.join(map(str, places))}", file=sys.stderr)
        return status or 2
    return measured.keep_measured_table(fold_efficiency(points), args.out, choice(args), before) or status


def before(folder: Path) -> dict[str, int] | None:
    """Return the number of points of the stored tables; None without any."""
    old = folder / "points.csv"
    return {"points": len(old.read_text(encoding="utf-8").splitlines()) - 1} if old.exists() else None


if __name__ == "__main__":
    raise SystemExit(main())
