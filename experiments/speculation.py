"""Tables of ``results/h200/speculation``: QuantSpec's speed-ups at forced acceptance, beside its own parts.

python -m experiments.speculation            # print them
python -m experiments.speculation --write    # into tables.md of that folder, docs/speed.md and README.md
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from experiments import stored
from experiments.checks.rules import Block, write_blocks
from experiments.fold import forced
from experiments.fold.analytic import length
from experiments.fold.forced import FOLDER
from experiments.stored import ROOT, markdown_table
from kvbench.util import atomic

#: cases in the order of the table, with their names
CASES = {
    "quantspec": "QuantSpec",
    "kv": "cache alone in 4 bits",
    "weights": "weights alone in 4 bits",
    "streamingllm": "StreamingLLM draft",
    "snapkv": "SnapKV draft",
}
MODELS = {"llama2-7b": "7B", "llama3.1-8b": "8B", "mistral-7b-v0.3": "Mistral 7B"}
#: contexts in the README's table
BRIEF = (2**15, 2**17)
Row = Mapping[str, Any]
Key = tuple[str, int, int]


class Results:
    """The rows of all files of a folder, by point and case; an unfinished row never hides a finished one.

    Args:
        folder: the folder.
    """

    def __init__(self, folder: Path = FOLDER) -> None:
        self.rows: dict[Key, dict[str, Row]] = {}
        self.at, self.devices = 0.9, []
        for path in sorted(folder.glob("*.json")):
            content = stored.content(path)
            self.devices.append(content["device"])
            self.at = content["at"]
            for row in content["rows"]:
                place = row["model"], row["batch"], row["context"]
                cases = self.rows.setdefault(place, {})
                plain = forced.plain_ms(content["rows"], place)
                if (self.ms(row) is not None and plain is not None) or row["case"] not in cases:
                    cases[row["case"]] = {**row, "plain_ms": plain}

    def measured(self, row: Row) -> Row:
        """Return what was measured in blocks of tokens at the acceptance of the file; empty if nothing was."""
        return row if row["case"] == "plain" else forced.at_acceptance(row, self.at)

    def ms(self, row: Row | None) -> float | None:
        """Return the measured milliseconds per token of a row."""
        return None if row is None else self.measured(row).get("ms")

    def factor(self, key: Key, case: str) -> float | None:
        """Return the measured speed-up of a case over plain decoding in the same run."""
        row = self.rows[key].get(case)
        own = self.ms(row)
        return None if row is None or own is None or row["plain_ms"] is None else row["plain_ms"] / own

    def points(self) -> list[Key]:
        """Return the points at which QuantSpec and plain decoding were measured: by batch, model and context."""
        known = [key for key in self.rows if self.factor(key, "quantspec") is not None]
        return sorted(known, key=lambda key: (key[1], key[0], key[2]))


def name(key: Key) -> str:
    """Return a point as text: ``7B, 32k``, with the batch if it is not 1."""
    model, batch, context = key
    text = f"{MODELS.get(model, model)}, {length(context)}"
    return text if batch == 1 else f"{text}, batch {batch}"


def number_or_dash(value: float | None, digits: int = 2) -> str:
    """Return a number as text; a dash for None."""
    return "-" if value is None else f"{value:.{digits}f}"


def break_even(results: Results, key: Key) -> float | None:
    """Return the acceptance from which rounds with one draft are faster than plain decoding.

    It is a in ``(1 + a) * plain = draft + verification + rest``, with the times of the smallest measured gamma.
    """
    row = results.rows[key]["quantspec"]
    plain, first = row["plain_ms"], row["gammas"][0]
    if "draft_ms" not in first:
        return None
    return max(sum(first[f"{part}_ms"] for part in ("draft", "verify", "sampling")) / plain - 1.0, 0.0)


def speeds(results: Results) -> list[str]:
    """Return the table of speed-ups by case: a line for each point."""
    lines = []
    for key in results.points():
        row = results.rows[key]["quantspec"]
        best = results.measured(row)
        figures = [number_or_dash(row["plain_ms"]), number_or_dash(best["ms"]), str(best["gamma"])]
        factors = [number_or_dash(results.factor(key, case)) for case in CASES]
        lines.append([name(key), *figures, *factors, number_or_dash(break_even(results, key))])
    head = ("", "bf16, ms", "QuantSpec, ms", "γ", *(f"{title}, x" for title in CASES.values()), "pays from a =")
    return markdown_table(head, lines)


def brief(results: Results) -> list[str]:
    """Return the table of speed-ups for the README: single sequences, without QuantSpec's halves and sparse drafts."""
    lines = []
    for key in results.points():
        if key[1] == 1 and key[2] in BRIEF:
            row = results.rows[key]["quantspec"]
            figures = row["plain_ms"], results.measured(row)["ms"], results.factor(key, "quantspec")
            lines.append([name(key), *map(number_or_dash, figures), number_or_dash(break_even(results, key))])
    head = ("", "bf16, ms a token", "QuantSpec, ms a token", "speed-up, x", "pays from an acceptance of")
    return markdown_table(head, lines)


def part_table(results: Results) -> list[str]:
    """Return the table of the parts of a round at the best gamma, and of expected and measured speed-up."""
    lines = []
    for key in results.points():
        row = results.rows[key]["quantspec"]
        best, plain = results.measured(row), row["plain_ms"]
        expected = next(
            (c["ms"] for c in row["grid"] if (c["acceptance"], c["gamma"]) == (results.at, best["gamma"])), None
        )
        figures = [best.get(f"{part}_ms") for part in ("draft", "verify", "sampling", "flush")]
        factors = [None if expected is None else plain / expected, results.factor(key, "quantspec")]
        auto = row.get("auto")
        factors.append(None if auto is None else plain / auto["ms"])
        lines.append([name(key), *(number_or_dash(figure, 3) for figure in figures), *map(number_or_dash, factors)])
    names = ("one draft", "verification", "rest of a round", "flushes per token")
    return markdown_table(("", *(f"{title}, ms" for title in names), "expected, x", "measured, x", "γ=auto, x"), lines)


def peaks(results: Results) -> list[str]:
    """Return the table of peak memory while decoding, weights included, in GiB."""
    lines = []
    for key in results.points():
        rows = [results.rows[key].get(case) for case in ("plain", *CASES)]
        peaks = [row.get("peak") if row else None for row in rows]
        lines.append([name(key), *(number_or_dash(None if peak is None else peak / 2**30, 1) for peak in peaks)])
    return markdown_table(("", "bf16", *CASES.values()), lines)


def speed_up_grid(results: Results, key: Key) -> list[str]:
    """Return the speed-ups of a point by acceptance and gamma; an asterisk marks times between measured gammas."""
    row = results.rows[key]["quantspec"]
    plain = row["plain_ms"]
    gammas = sorted({cell["gamma"] for cell in row["grid"]})
    cells = {(cell["acceptance"], cell["gamma"]): cell for cell in row["grid"]}
    lines = []
    for acceptance in sorted({cell["acceptance"] for cell in row["grid"]}):
        mine = [cells[acceptance, gamma] for gamma in gammas]
        shown = [number_or_dash(plain / cell["ms"]) + ("*" if cell["times"] == "interpolated" else "") for cell in mine]
        seen = next((one for one in row["measured"] if one["acceptance"] == acceptance), None)
        measured = "-" if seen is None else f"{plain / seen['ms']:.2f} (γ {seen['gamma']})"
        lines.append([f"{acceptance:.2f}", *shown, measured])
    return markdown_table((name(key), *(f"γ {gamma}" for gamma in gammas), "measured"), lines)


def speculation_tables(results: Results) -> str:
    """Return all tables as the file tables.md."""
    at = f"{results.at:g}"
    sections = [
        "# Speculative decoding at a forced acceptance",
        "Written by `python -m experiments.speculation --write`. Random weights; drafts are accepted by chance with "
        f"probability {at}, where nothing else is said. x: speed-up over captured and compiled bf16 steps in the same "
        "run.",
        "## Speed-ups",
        "\n".join(speeds(results)),
        "## Parts of a round at the best γ",
        "\n".join(part_table(results)),
        "## Peak memory while decoding, GiB",
        "\n".join(peaks(results)),
        "## Speed-up by acceptance and γ",
        "From the measured times of the parts; *: interpolated between measured γ. Last column: measured over blocks "
        "of tokens with the best γ.",
        *("\n".join(speed_up_grid(results, key)) for key in results.points()),
    ]
    return "\n\n".join(sections) + "\n"


def speculation_blocks() -> list[Block]:
    """Return what stands in the documents; nothing before anything has been measured."""
    results, source = Results(), str(FOLDER.relative_to(ROOT))
    if not results.points():
        return []
    return [
        Block(f"{source}/tables.md", speculation_tables(results), source),
        Block("docs/speed.md", "\n".join(speeds(results)), source, "speculation"),
        Block("README.md", "\n".join(brief(results)), source, "speculation"),
    ]


def main(argv: Sequence[str] | None = None) -> int:
    """Print the tables, or write them with ``--write``; return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m experiments.speculation")
    written = "write tables.md, and the tables of docs/speed.md and README.md"
    parser.add_argument("--write", action="store_true", help=written)
    args = parser.parse_args(argv)
    results = Results()
    if not results.points():
        print(f"{FOLDER} has no file with both QuantSpec and plain decoding", file=sys.stderr)
        return 1
    if not args.write:
        print(speculation_tables(results))
        return 0
    atomic.replace_file(FOLDER / "tables.md", speculation_tables(results).encode())
    return write_blocks(speculation_blocks(), ROOT)


if __name__ == "__main__":
    sys.exit(main())
