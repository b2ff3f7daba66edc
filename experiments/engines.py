"""``python -m experiments.engines``: an engine's server and kvbench itself, the same formats in one table.

For each cache format the engine's server answers (``model=endpoint``), and kvbench does (``method=engine``): prompts
of 2k tokens to continue, and short ones with a score. Each setting is compared with fp16 of its own side; the first
table's floor is the engine's fp16 with one request at a time. What is there is not run again; ``--fold-only`` makes the
tables from it. Below results/engines/endpoint are only tables and figures of prompts, no paths.

    python -m experiments.engines --serve llamacpp --served smollm2-f32.gguf --binary llama-server
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median
from typing import Any

from experiments import measured
from experiments.measured import Folded
from experiments.runs import Run, execute, identify
from experiments.stored import as_json, content, grid
from kvbench.endpoint.engines import SERVED
from kvbench.metrics.fidelity import first_difference
from kvbench.results import aggregate
from kvbench.results.fidelity_fold import flips_of
from kvbench.results.samples import MEASURED, Row
from kvbench.results.store import RunStore

#: the file with all figures
FILE = "figures.json"
#: the two kinds of prompts
TEXT, SCORED = "text", "scored"
#: nats between the first two tokens up to which a difference of greedy texts is a near-tie
TIE = 0.05
#: note below the table
NOTE = (
    "Equal, KL, Δ and flips: against fp16 of the same side. KL: lower bound from the server's first log-probabilities, "
    "until the first difference.\n"
)
#: the two sides
ENGINE, OWN = "engine", "kvbench"
Rows = Mapping[str, Row]


@dataclass(frozen=True)
class Line:
    """A line of the table: one side, one format, and overrides that others do not have."""

    side: str
    form: str
    more: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """Its label."""
        return " ".join([self.side, self.form, *(word.removeprefix("model.") for word in self.more)])

    @property
    def baseline(self) -> Line:
        """The line with which it is compared: fp16 of its side."""
        return Line(self.side, "fp16")


#: fp16 with one request at a time, the floor of all differences
FLOOR = Line(ENGINE, "fp16", ("model.concurrency=1",))
#: fp16 without llama.cpp's flash attention, which adds values up in 16 bits on a CPU; packed caches need it
EXACT = Line(ENGINE, "fp16", ("model.args=[--flash-attn,off]",))


def lines(formats: Sequence[str]) -> list[Line]:
    """Return the lines of the table, each side's fp16 first."""
    return [*(Line(side, form) for side in (ENGINE, OWN) for form in ("fp16", *formats)), FLOOR, EXACT]


def run_of_line(line: Line, kind: str, arguments: argparse.Namespace) -> Run:
    """Return the run of a line on one kind of prompts."""
    model = ["model=endpoint", f"model.preset={arguments.model}", f"model.serve={arguments.serve}"]
    model += [f"model.served={arguments.served}"] if arguments.served else []
    model += [f"model.binary={arguments.binary}"] if arguments.binary else []
    if line.side == OWN:  # fp16 as engines store it, not bfloat16
        model = [f"model={arguments.model}", "model.dtype=float16", f"runtime.device={arguments.device}"]
    method = ["method=fp16"] if line.form == "fp16" else ["method=engine", f"method.format={line.form}"]
    limit = arguments.limit if line.form == "fp16" and line != FLOOR else arguments.others
    data = {
        TEXT: ["dataset=mini_text", "dataset.warm_up=0", "dataset.max_new_tokens=32", f"dataset.limit={limit}"],
        SCORED: ["dataset=mini", "dataset.lengths=[512]", f"dataset.limit={arguments.scored}"],
    }[kind]
    where = [f"runtime.results_dir={arguments.runs}"]
    return Run((*model, *line.more, *method, *data, *where), "endpoint", data[0].partition("=")[2])


def parse_engine_options(given: Sequence[str]) -> argparse.Namespace:
    """Parse the command line."""
    parser = measured.command_line(
        "experiments.engines", __doc__, "results/engines/endpoint", "smollm2-135m-q4_1", "cpu"
    )
    add, default = parser.add_argument, " (default: %(default)s)"
    add("--serve", default="llamacpp", choices=list(SERVED), help="engine" + default)
    add("--served", help="file, folder or repository that the engine loads (default: the model's own)")
    add("--binary", help="program that starts the server (default: the engine's own)")
    add("--formats", nargs="+", default=["q8_0", "q4_0"], help="cache formats beside fp16" + default)
    add("--limit", type=measured.positive, default=40, help="texts to continue with fp16" + default)
    add("--others", type=measured.positive, default=40, help="texts to continue with every other setting" + default)
    add("--scored", type=measured.positive, default=8, help="scored prompts per task" + default)
    add("--runs", type=Path, default=Path("results/runs/engines"), help="folder of the runs" + default)
    add("--fold-only", action="store_true", help="write the tables from existing runs, without running anything")
    return parser.parse_args(given)


def main(argv: Sequence[str] | None = None) -> int:
    """Run what is missing, write the tables, and return the exit status."""
    arguments = parse_engine_options(sys.argv[1:] if argv is None else argv)
    failed, found = 0, {}
    for line in lines(arguments.formats):
        if line == EXACT and not arguments.serve.startswith("llamacpp"):
            continue
        for kind in (TEXT, SCORED):
            run = run_of_line(line, kind, arguments)
            if not arguments.fold_only:
                outcome = execute(run)
                print(": ".join(filter(None, (line.name, kind, outcome.status, outcome.reason))), flush=True)
                failed += outcome.status != "ok"
            found[line, kind] = RunStore(arguments.runs, identify(run)[0]).samples().rows
    status = measured.keep_measured_table(
        fold_engines(found, arguments.formats),
        arguments.out,
        measured.choice(arguments),
        stored_prompts,
        arguments.model,
    )
    return status or int(failed > 0)


def stored_prompts(folder: Path) -> dict[str, int] | None:
    """Return the prompts of each line of the stored table; None without one."""
    path = folder / FILE
    return {name: line["prompts"] for name, line in content(path)["lines"].items()} if path.exists() else None


def fold_engines(found: Mapping[tuple[Line, str], Rows], formats: Sequence[str]) -> Folded:
    """Return the table and its figures from the rows of each line and kind of prompts."""
    figures = {
        line.name: figures_of(*(found.get((one, kind), {}) for kind in (TEXT, SCORED) for one in (line, line.baseline)))
        for line in lines(formats)
        if found.get((line, TEXT))
    }
    if not figures:
        return Folded("There are no runs yet.")
    own = found.get((Line(OWN, "fp16"), TEXT), {})
    parity = {
        line.name: [differing(name, row, own[name]) for name, row in found.get((line, TEXT), {}).items() if name in own]
        for line in (Line(ENGINE, "fp16"), EXACT)
    }
    head = ("", *COLUMNS)
    body = [(name, *(show(line) for show in COLUMNS.values())) for name, line in figures.items()]
    text = "\n".join([grid(head, body), "", *(said(name, parts) for name, parts in parity.items() if parts), "", NOTE])
    counts = {name: line["prompts"] for name, line in figures.items()}
    return Folded(text, {FILE: as_json({"lines": figures, "parity": parity})}, counts)


def said(name: str, parts: Sequence[Mapping[str, Any]]) -> str:
    """Return the sentence about the greedy texts of a line, compared with kvbench's (:func:`differing`)."""
    other = [part for part in parts if part["at"] is not None]
    ties = sum(part["gap"] is not None and part["gap"] <= TIE for part in other)
    return (
        f"Greedy texts, {name}: {len(parts) - len(other)} of {len(parts)} are kvbench's with fp16; "
        f"{ties} of the other {len(other)} differ first at a near-tie (at most {TIE} nats).\n"
    )


def figures_of(texts: Rows, plain_texts: Rows, scored: Rows, plain_scored: Rows) -> dict[str, Any]:
    """Return the figures of a line: of its texts and scored prompts, beside those of fp16 on the same side."""
    names, both = [name for name in texts if name in plain_texts], [name for name in scored if name in plain_scored]
    timed = aggregate.timings(list(texts.values()))
    times = max(timed.values(), key=lambda one: one["n"], default=aggregate.no_timings())
    server = next(iter(texts.values()))[MEASURED].get("endpoint")
    bound = aggregate.kl_bound([texts[name] for name in names], plain_texts)
    scores = [row["scores"]["score"] for row in scored.values()]
    pairs = [scored[name]["scores"]["score"] - plain_scored[name]["scores"]["score"] for name in both]
    flipped = flips_of(plain_scored, scored, both)
    return {
        "prompts": len(texts),
        "equal": sum(plain_texts[name]["tokens"] == texts[name]["tokens"] for name in names),
        "compared": len(names),
        "scored": len(scores),
        "score": fmean(scores) if scores else None,
        "delta": fmean(pairs) if pairs else None,
        "flips": flipped and flipped["flips"],
        "tokens": fmean(len(row["tokens"]) for row in texts.values()),
        "kl_bound": bound,
        "ttft_s": times["ttft_s"]["median"],
        "tpot_s": times["tpot_s"]["median"],
        "kv_bytes": median([row["kv_bytes"]["used"]["total"] for row in texts.values() if row["kv_bytes"]] or [0])
        or None,
        "engine": server and f"{server['engine']} {server['version']}",
        "proof": server and server["cache"]["proof"],
    }


def differing(name: str, engine: Row, own: Row) -> dict[str, Any]:
    """Return the place of the first token in which two greedy texts differ, and the gap of the engine's first two."""
    place = first_difference(own["tokens"], engine["tokens"]).first
    tops = engine.get("top_logprobs") or []
    gap = None
    if place is not None and place < len(tops) and len(tops[place]) > 1:
        values = sorted((value for _, value in tops[place]), reverse=True)
        gap = values[0] - values[1]
    return {"id": name, "at": place, "gap": gap}


def _number(key: str, form: str, scale: float = 1.0) -> Callable[[Mapping[str, Any]], str]:
    return lambda line: "-" if line[key] is None else form.format(line[key] * scale)


def _bound(line: Mapping[str, Any]) -> str:
    return "-" if line["kl_bound"] is None else f"≥ {line['kl_bound']['mean']:.2g}"


#: columns of the table, and the function of a line's figures that fills them
COLUMNS: dict[str, Callable[[Mapping[str, Any]], str]] = {
    "texts": _number("prompts", "{:.0f}"),
    "equal to fp16": lambda line: f"{line['equal']}/{line['compared']}",
    "KL, nats": _bound,
    "score": _number("score", "{:.3f}"),
    "Δ": _number("delta", "{:+.3f}"),
    "flips": _number("flips", "{:.0%}"),
    "tokens": _number("tokens", "{:.1f}"),
    "KV, MiB": _number("kv_bytes", "{:.2f}", 2**-20),
    "TTFT, s": _number("ttft_s", "{:.2f}"),
    "TPOT, ms": _number("tpot_s", "{:.1f}", 1e3),
    "cache": lambda line: line["proof"] or "-",
}


if __name__ == "__main__":
    sys.exit(main())
