"""Columns of all tables of runs. To add a column, add an entry to :data:`COLUMNS`.

Columns of fidelity compare predictions with those of fp16.

Terminal tables, markdown, CSV and ``kvbench.report`` all use this list. The functions of a column take a line with the
typed record of a run (:mod:`kvbench.results.record`), which has defaults for keys that older versions did not write.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from kvbench.metrics import intervals
from kvbench.results import code as codes
from kvbench.results.aggregate import interval_of, pair_interval
from kvbench.results.record import Metrics
from kvbench.results.record_scores import Departure, Fidelity, Mean, Pair, RoundTimes, Score
from kvbench.util.table import Cell, seconds, size


def fidelity_cell(compared: Fidelity) -> Cell:
    """Return a cell with mean and 99.9 % percentile of the KL divergence, and below the share of equal top tokens."""
    kld, same = compared.kld, compared.same_top
    return Cell(f"KL {kld.mean:.3g} nats, 99.9 % {kld.p99_9:.3g}", f"same top {100 * same.share:.2f} %")


def _fidelity_reader(read: Callable[[Fidelity], Any]) -> Callable[[Score], Any]:
    return lambda score: score.fidelity and read(score.fidelity)


def _departure_reader(read: Callable[[Departure], Any]) -> Callable[[Score], Any]:
    """Return a reader of the departure of fp16's given answer, or else of freely generated answers."""

    def departure_figure(score: Score) -> Any:
        left = (score.fidelity and score.fidelity.left) or score.left
        return left and read(left)

    return departure_figure


#: figures in CSV files: heading after the task's name, and function that reads the figure
FIGURES: dict[str, Callable[[Score], Any]] = {
    "kld_mean": _fidelity_reader(lambda compared: compared.kld.mean),
    "kld_low": _fidelity_reader(lambda compared: compared.kld.low),
    "kld_high": _fidelity_reader(lambda compared: compared.kld.high),
    "kld_median": _fidelity_reader(lambda compared: compared.kld.median),
    "kld_p90": _fidelity_reader(lambda compared: compared.kld.p90),
    "kld_p95": _fidelity_reader(lambda compared: compared.kld.p95),
    "kld_p99": _fidelity_reader(lambda compared: compared.kld.p99),
    "kld_p99.9": _fidelity_reader(lambda compared: compared.kld.p99_9),
    "kld_max": _fidelity_reader(lambda compared: compared.kld.max),
    "kld_rms": _fidelity_reader(lambda compared: compared.kld.rms),
    "change_mean": _fidelity_reader(lambda compared: compared.change.mean),
    "change_rms": _fidelity_reader(lambda compared: compared.change.rms),
    "same_top": _fidelity_reader(lambda compared: compared.same_top.share),
    "top_mass": _fidelity_reader(lambda compared: compared.top_mass),
    "growth_per_1000": _fidelity_reader(lambda compared: compared.growth and compared.growth.per_1000),
    "never_left": _departure_reader(lambda left: left.never),
    "left_median": _departure_reader(lambda left: left.median),
    "left_gap": _departure_reader(lambda left: left.gap),
    "worst_layer": _fidelity_reader(lambda compared: compared.layers and compared.layers.worst),
    "positions": _fidelity_reader(lambda compared: compared.positions),
    "prompts": _fidelity_reader(lambda compared: compared.prompts),
}


Line = TypeVar("Line")

#: the places that can show a column: a table of runs, or the list of ``kvbench.report``
TABLE, LIST = "table", "list"
#: status of a run that has no `metrics.json`
UNFINISHED = "unfinished"


@dataclass(frozen=True)
class RunLine:
    """A run as one line of a table; `name`, its first cell, distinguishes it from the other runs in the table."""

    name: str
    run: Metrics


@dataclass(frozen=True)
class Column(Generic[Line]):
    """A column of a table in the terminal or in markdown, and the CSV columns with its figures as plain values.

    Args:
        unit: unit of the numbers in the CSV, as documentation; empty for texts and plain numbers.
        cell: function that returns a line's formatted cell; None if the column appears only in the CSV.
        csv: by heading of each CSV column, the function that returns a line's plain value.
        places: tables that have the column: :data:`TABLE` (table of runs), :data:`LIST` (list of ``kvbench.report``).
        wraps: True if the text may wrap on a narrow terminal.
        present: function of all lines of a table that returns False if the table should not have the column.
    """

    name: str
    unit: str = ""
    cell: Callable[[Line], Cell] | None = None
    csv: Mapping[str, Callable[[Line], Any]] = field(default_factory=dict)
    places: tuple[str, ...] = (TABLE,)
    wraps: bool = False
    present: Callable[[Sequence[Line]], bool] = lambda lines: True


def of_scores(lines: Sequence[RunLine]) -> list[Column[RunLine]]:
    """Return the columns with scores: one per task, or per task and length, that occurs in any of the runs.

    A cell shows the score, its 95 % interval and the difference from fp16.
    """
    names = dict.fromkeys(key for line in lines for key in line.run.scores)
    compared = {key for line in lines for key, entry in line.run.scores.items() if entry.fidelity}
    bounded = {key for line in lines for key, entry in line.run.scores.items() if entry.kl_bound}
    return [_of_score(name, compared=name in compared, bounded=name in bounded) for name in names]


def _of_score(key: str, *, compared: bool = False, bounded: bool = False) -> Column[RunLine]:
    def value(read: Callable[[Score], Any]) -> Callable[[RunLine], Any]:
        return lambda line: read(line.run.scores[key]) if key in line.run.scores else None

    return Column(
        key,
        cell=lambda line: score_cell(line.run.scores.get(key)),
        csv={
            f"{key} score": value(lambda score: score.score),
            f"{key} stderr": value(lambda score: score.stderr),
            f"{key} low": value(lambda score: score.low),
            f"{key} high": value(lambda score: score.high),
            f"{key} n": value(lambda score: score.n),
            f"{key} vs_fp16": value(lambda score: score.vs_fp16 and score.vs_fp16.diff),
            f"{key} vs_fp16_stderr": value(lambda score: score.vs_fp16 and score.vs_fp16.stderr),
            f"{key} vs_fp16_low": value(lambda score: score.vs_fp16 and score.vs_fp16.low),
            f"{key} vs_fp16_high": value(lambda score: score.vs_fp16 and score.vs_fp16.high),
            f"{key} nll": value(lambda score: score.nll and score.nll.mean),
            f"{key} ppl": value(lambda score: score.perplexity and score.perplexity.ppl),
            f"{key} bits_per_byte": value(lambda score: score.perplexity and score.perplexity.bits_per_byte),
            **({f"{key} {name}": value(read) for name, read in FIGURES.items()} if compared else {}),
            **(
                {f"{key} kl_lower_bound": value(lambda score: score.kl_bound and score.kl_bound.mean)}
                if bounded
                else {}
            ),
        },
    )


def shown_columns(lines: Sequence[RunLine], place: str | None = None) -> list[Column[RunLine]]:
    """Return the columns that a table of the given lines has in `place`: :data:`TABLE` or :data:`LIST`.

    None stands for the CSV, which has all columns.
    """
    chosen: list[Column[RunLine]] = []
    for column in COLUMNS:
        if column is SCORES:
            chosen += of_scores(lines) if place != LIST else []
        elif place is None or (column.cell is not None and place in column.places and column.present(lines)):
            chosen.append(column)
    return chosen


def status(run: Metrics) -> str:
    """Describe a run's status for a table; empty if the run is ok.

    Examples: ``error``; ``oom: 2 GiB more`` for a run that ran out of memory when it asked for another 2 GiB;
    ``older code: method`` for a run with samples that were made before the code of the method changed.
    """
    if run.status == "ok":
        return ""
    if run.status == "older":
        return codes.older_code_remark(run.older.parts if run.older else ())
    if run.status == "oom" and run.oom and run.oom.bytes_asked:
        return f"oom: {size(run.oom.bytes_asked)} more"
    return run.status


def score_cell(entry: Score | Mean | None) -> Cell:
    """Format a score, or a perplexity, with its 95 % interval, and on a second line its difference from fp16.

    For a comparison of predictions, the cell shows the mean and the 99.9 % percentile of the KL divergence, and on the
    second line the share of equal first choices. None gives a dash.
    """
    perplexity = entry.perplexity if isinstance(entry, Score) else None
    if isinstance(entry, Score) and entry.fidelity:
        return fidelity_cell(entry.fidelity)
    if perplexity:
        interval = intervals.of_moments(perplexity.ppl, perplexity.stderr, perplexity.windows or 0)
        return Cell(
            f"ppl {perplexity.ppl:.3f}{reach_text(intervals.interval_reach(perplexity.ppl, interval))}",
            _delta(perplexity.vs_fp16, None, 4),
        )
    if entry is None or entry.score is None:
        return Cell("-")
    interval = interval_of(vars(entry))
    return Cell(
        f"{entry.score:.3f}{reach_text(intervals.interval_reach(entry.score, interval))}",
        _delta(entry.vs_fp16, entry.score),
    )


def reach_text(length: float | None, digits: int = 3) -> str:
    """Format the distance to the farther end of a 95 % interval for printing after a value, for example `` ±.012``.

    `digits` counts decimal places. An unknown distance (None) gives an empty text.
    """
    return "" if length is None else f" ±{f'{length:.{digits}f}'.removeprefix('0')}"


def _delta(pair: Pair | None, score: float | None, digits: int = 3) -> str:
    if pair is None:
        return ""
    length = intervals.interval_reach(pair.diff, pair_interval(score, vars(pair)))
    return f"Δ {pair.diff:+.{digits}f}{reach_text(length, digits)}"


def _headline(run: Metrics) -> str:
    """Return a run's main figure as text: mean score, else best throughput of points, perplexities, or mean KLs."""
    if run.mean.score is not None:
        return f"{run.mean.score:.3f}"
    if run.scores and all(entry.points for entry in run.scores.values()):
        return "-" if run.tokens_per_s is None else f"{run.tokens_per_s:.4g}/s"
    texts = [f"ppl {entry.perplexity.ppl:.2f}" for entry in run.scores.values() if entry.perplexity]
    texts += [f"KL {entry.fidelity.kld.mean:.3g} nats" for entry in run.scores.values() if entry.fidelity]
    return ", ".join(texts) or "-"


def _code(run: Metrics) -> str:
    """Return the version of the code that made the samples (the number of versions if several), and changed parts."""
    versions = list(run.code)
    text = f"{len(versions)} kinds" if len(versions) > 1 else "-"
    if len(versions) == 1:
        text = versions[0] if versions[0] == codes.UNKNOWN else versions[0][:6]
    parts = [part for part in (run.older.parts if run.older else ()) if part != codes.UNKNOWN]
    return f"{text}, older: {', '.join(parts)}" if parts else text


def _sample_count(run: Metrics) -> str:
    requested = run.samples.requested
    return str(run.samples.done) if run.status == UNFINISHED else f"{run.samples.done}/{requested}"


def _peak(run: Metrics) -> Cell:
    peak = run.peak_bytes
    phases = [count for count in (peak.prefill, peak.decode) if count is not None]
    if not phases:
        return Cell(size(peak.rss), "RSS" if peak.rss else "")
    return Cell(size(max(phases)), f"dec {size(peak.decode)}")


def _tpot(run: Metrics) -> Cell:
    p99 = run.tpot_s.p99
    return Cell(seconds(run.tpot_s.median), f"p99 {seconds(p99)}" if p99 is not None else "")


def _accepted(run: Metrics) -> Cell:
    drafts = run.speculation
    if not drafts or drafts.acceptance_rate is None:
        return Cell("-")
    interval = intervals.of_moments(drafts.acceptance_rate, drafts.stderr, run.samples.done)
    shown = f"{drafts.acceptance_rate:.3f}{reach_text(intervals.interval_reach(drafts.acceptance_rate, interval))}"
    return Cell(shown, f"{drafts.tokens_per_round or 0:.2f} a round")


#: figures of a round in CSV files
ROUND = (
    "draft_s",
    "verify_s",
    "sampling_s",
    "flush_s",
    "acceptance",
    "tokens",
    "expected_tokens",
    "tpot_s",
    "expected_tpot_s",
    "why",
)


def round_cell(times: RoundTimes | None) -> Cell:
    """Return the cell with the times of a round by part, and below it the expected time per token."""
    if times is None:
        return Cell("-")
    parts = (times.draft_s, times.verify_s, times.sampling_s, times.flush_s)
    return Cell(" + ".join(seconds(part) for part in parts), f"expected TPOT {seconds(times.expected_tpot_s)}")


def _ratio(ratio: float | None) -> Cell:
    return Cell("-" if ratio is None else f"{ratio:.2f}x")


def _drafted(lines: Sequence[RunLine]) -> bool:
    return any(line.run.speculation for line in lines)


def _round(run: Metrics) -> Cell:
    times = run.speculation.round_times if run.speculation else None
    return round_cell(times)


def _round_figure(name: str) -> Callable[[RunLine], Any]:
    def read(line: RunLine) -> Any:
        times = line.run.speculation.round_times if line.run.speculation else None
        return getattr(times, name, None)

    return read


def _timed_rounds(lines: Sequence[RunLine]) -> bool:
    return any(line.run.speculation and line.run.speculation.round_times for line in lines)


def _kl_bounded(lines: Sequence[RunLine]) -> bool:
    return any(entry.kl_bound for line in lines for entry in line.run.scores.values())


def _kl_bound(run: Metrics) -> Cell:
    """Return the cell with the lower bound of the KL divergence over all tasks, and below it what it rests on."""
    bounds = [entry.kl_bound for entry in run.scores.values() if entry.kl_bound]
    places = sum(bound.positions for bound in bounds)
    if not places:
        return Cell("-")
    mean = sum(bound.mean * bound.positions for bound in bounds) / places
    return Cell(f"KL ≥ {mean:.3g} nats", f"top {max(bound.top for bound in bounds)}, to the first difference")


def _server(run: Metrics) -> Cell:
    """Return the cell with the engine of a server, and below it whether the format of its cache is proven."""
    server = run.env.endpoint
    if server is None:
        return Cell("-")
    return Cell(
        f"{server.engine} {server.version or ''}".strip(), f"cache {server.cache.proof}" if server.cache else ""
    )


def _server_figure(name: str) -> Callable[[RunLine], Any]:
    return lambda line: line.run.env.endpoint and getattr(line.run.env.endpoint, name)


def _cache_figure(name: str) -> Callable[[RunLine], Any]:
    def read(line: RunLine) -> Any:
        server = line.run.env.endpoint
        return getattr(server.cache, name) if server is not None and server.cache is not None else None

    return read


def _several_scores(lines: Sequence[RunLine]) -> bool:
    """Return True if more than one task has scores, so that a mean makes sense; perplexities do not count."""
    names = {key for line in lines for key, entry in line.run.scores.items() if entry.score is not None}
    return len(names) > 1


#: placeholder in the list; :func:`shown_columns` replaces it by one column per task
SCORES: Column[RunLine] = Column("scores")

COLUMNS: list[Column[RunLine]] = [
    Column("run", cell=lambda line: Cell(line.run.run_id or "-"), places=(LIST,)),
    Column("", cell=lambda line: Cell(line.name, status(line.run)), csv={"run": lambda line: line.name}),
    Column("method", cell=lambda line: Cell(line.name), places=(LIST,), wraps=True),
    Column("model", cell=lambda line: Cell(line.run.config.model or "?"), places=(LIST,), wraps=True),
    Column("data", cell=lambda line: Cell(line.run.config.dataset or "?"), places=(LIST,), wraps=True),
    Column("id", csv={"run_id": lambda line: line.run.run_id}),
    Column(
        "status",
        cell=lambda line: Cell(line.run.status),
        csv={"status": lambda line: line.run.status},
        places=(LIST,),
    ),
    Column("samples", cell=lambda line: Cell(_sample_count(line.run)), places=(LIST,)),
    SCORES,
    Column("mean", cell=lambda line: score_cell(line.run.mean), present=_several_scores),
    Column("score", cell=lambda line: Cell(_headline(line.run)), places=(LIST,)),
    Column(
        "KV",
        "bytes",
        lambda line: Cell(size(line.run.kv_bytes.used.total)),
        {
            "kv_bytes": lambda line: line.run.kv_bytes.used.total,
            "kv_reserved": lambda line: line.run.kv_bytes.reserved.total,
        },
        places=(TABLE, LIST),
    ),
    Column(
        "ratio",
        "fp16's bytes divided by those used",
        lambda line: _ratio(line.run.kv_bytes.ratio),
        {"kv_ratio": lambda line: line.run.kv_bytes.ratio},
    ),
    Column(
        "peak",
        "bytes",
        lambda line: _peak(line.run),
        {
            "peak_prefill": lambda line: line.run.peak_bytes.prefill,
            "peak_decode": lambda line: line.run.peak_bytes.decode,
            "peak_kind": lambda line: line.run.peak_bytes.kind,
            "peak_rss": lambda line: line.run.peak_bytes.rss,
        },
    ),
    Column(
        "TTFT",
        "seconds",
        lambda line: Cell(seconds(line.run.ttft_s.median)),
        {"ttft_s": lambda line: line.run.ttft_s.median},
    ),
    Column(
        "TPOT",
        "seconds",
        lambda line: _tpot(line.run),
        {"tpot_s": lambda line: line.run.tpot_s.median, "tpot_p99_s": lambda line: line.run.tpot_s.p99},
    ),
    Column("tokens/s", "tokens per second", csv={"tokens_per_s": lambda line: line.run.tokens_per_s}),
    Column(
        "device",
        csv={
            "device": lambda line: line.run.env.device_name,
            "dtype": lambda line: line.run.env.dtype,
            "arithmetic": lambda line: line.run.env.arithmetic or line.run.env.dtype,
        },
    ),
    Column(
        "accepted",
        "share of drafts",
        lambda line: _accepted(line.run),
        {
            "acceptance_rate": lambda line: line.run.speculation and line.run.speculation.acceptance_rate,
            "acceptance_stderr": lambda line: line.run.speculation and line.run.speculation.stderr,
            "tokens_per_round": lambda line: line.run.speculation and line.run.speculation.tokens_per_round,
        },
        present=_drafted,
    ),
    Column(
        "speed-up",
        "fp16's time per token divided by this run's",
        lambda line: _ratio(line.run.speculation.speedup if line.run.speculation else None),
        {
            "speedup": lambda line: line.run.speculation and line.run.speculation.speedup,
            "expected_speedup": lambda line: line.run.speculation and line.run.speculation.expected_speedup,
        },
        present=_drafted,
    ),
    Column(
        "round",
        "seconds: draft, verification, sampling, flush",
        lambda line: _round(line.run),
        {f"round_{name}": _round_figure(name) for name in ROUND},
        present=_timed_rounds,
    ),
    Column("KL bound", cell=lambda line: _kl_bound(line.run), present=_kl_bounded),
    Column(
        "server",
        cell=lambda line: _server(line.run),
        csv={f"server_{key}": _server_figure(key) for key in ("engine", "version", "concurrency", "prefix_reuse")}
        | {f"server_cache_{key}": _cache_figure(key) for key in ("proof", "word", "bytes_per_token")},
        present=lambda lines: any(line.run.env.endpoint for line in lines),
    ),
    Column("code", cell=lambda line: Cell(_code(line.run)), places=(LIST,), wraps=True),
]
