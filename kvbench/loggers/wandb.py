"""Logging to Weights & Biases: a run with its samples, scores and files, and a sweep as a run of its own.

For a run, W&B gets a history row per sample, a summary of scores, bytes and times, and its files; for a sweep, its
table, its plots, its page and its files.

Only the modules ``kvbench.loggers.wandb*`` import wandb, and they do so only when the first row or the end of a run is
logged.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvbench.loggers.base import MIB, Logger, charted
from kvbench.loggers.csv import flatten
from kvbench.loggers.wandb_service import Service, log_files, plain_data
from kvbench.results.aggregate import percentile, score_key
from kvbench.results.samples import MEASURED
from kvbench.results.store import DONE

#: files of a run that are sent as an artifact
FILES = ("metrics.json", "config.yaml", "env.json", "origin.json", "samples.jsonl")
_GROUPS = ("scores", "mean", "samples", "kv_bytes", "peak_bytes", "ttft_s", "tpot_s", "inter_token", "attention", "env")
_FACTS = ("status", "tokens_per_s", "error", "run_id", "baseline")


class WandbLogger(Logger):
    """Logger that sends one run to Weights & Biases (W&B).

    The run has the same id there as in kvbench. If kvbench resumes a run, W&B therefore resumes it too.

    Args:
        settings: the checked `logger` group (project, entity, group, tags, mode, dir).
        label: method and quantizer, such as ``kivi int2``. In W&B the run is displayed as ``LABEL MODEL DATASET``.
        folder: the run's folder, whose files are sent as an artifact; None to send none.
        sweep: id of the sweep that the run belongs to; None for a single run.
        service: connection to W&B that several runs share; None: the logger makes its own.
    """

    def __init__(
        self,
        settings: Any,
        run_id: str,
        config: Mapping[str, Any],
        label: str,
        say: Callable[[str], None],
        folder: Path | None = None,
        sweep: str | None = None,
        service: Service | None = None,
    ) -> None:
        self.run_id, self.config, self.label = run_id, config, label
        self.folder, self.sweep = folder, sweep
        self.service = service or Service(settings, say)
        self._run: Any = None
        self._rows: list[Mapping[str, Any]] = []

    @property
    def local(self) -> Path | None:  # type: ignore[override]
        """See :attr:`kvbench.loggers.wandb_service.Service.local`."""
        return self.service.local

    def destination(self) -> str | None:
        """See :meth:`kvbench.loggers.wandb_service.Service.destination`."""
        return self.service.destination()

    def begin(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Remember the rows that the run already has; those that W&B lacks are sent later.

        They are sent when the connection is opened: at the first :meth:`sample`, or at :meth:`finish` if there is none.
        """
        self._rows = list(rows)

    def sample(self, row: Mapping[str, Any]) -> None:
        """Log the figures of a row (score, KV size, times) as one step of the W&B history.

        The texts of the row are not sent here, but in the table that :meth:`finish` logs.
        """
        run = self._start()
        self._rows.append(row)
        run.log(_history(row), step=len(self._rows) - 1)

    def finish(self, metrics: Mapping[str, Any]) -> None:
        """Log a table of all samples and the run's files, write the figures to the summary, and end the W&B run.

        Keys of the summary have slashes, for example ``scores/needle/score``.
        """
        import wandb

        run = self._start()
        if self._rows:
            columns, lines = sample_table(self._rows)
            samples = wandb.Table(columns=columns, data=plain_data(lines))
            run.log({"samples": samples}, step=len(self._rows) - 1)  # its own step would take the next row's number
        for name, value in plain_data(run_summary(metrics)).items():
            run.summary[name] = value
        if self.folder is not None:
            log_files(run, f"run-{self.run_id}", "kvbench-run", [self.folder / name for name in FILES])
        run.finish(exit_code=0 if metrics["status"] in (*DONE, "oom") else 1)
        self._run = None

    def _start(self) -> Any:
        if self._run is None:
            groups = {key: (self.config.get(key) or {}).get("name") for key in ("model", "quantizer", "dataset")}
            model, dataset = groups["model"], groups["dataset"]
            method = self.label.split(" ")[0]
            tags = [method, *(str(name) for name in groups.values() if name not in (None, "none"))]
            self._run = self.service.start(
                self.run_id,
                name=f"{self.label} {model} {dataset}",
                group=f"sweep {self.sweep}" if self.sweep else f"{model}/{dataset}",
                tags=[*tags, f"sweep {self.sweep}"] if self.sweep else tags,
                config=self.config,
                kind=method,
            )
            # a resumed online run continues after its last step; an offline run starts with step 0
            for step, row in enumerate(self._rows):
                if step >= self._run.step:
                    self._run.log(_history(row), step=step)
        return self._run


def run_summary(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """Return the figures of a run for W&B's summary, with units in their names (:mod:`kvbench.loggers.base`)."""
    flat = {
        key.replace(".", "/"): value
        for name in _GROUPS
        for key, value in flatten(metrics.get(name) or {}, name).items()
        if value is not None
    }
    return charted(flat) | {name: metrics[name] for name in _FACTS if metrics.get(name) is not None}


def _history(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return the history row of one sample, with the distribution of its inter-token times as a histogram."""
    import wandb

    values = history(row)
    steps = inter_token_ms(row)
    if len(steps) > 1:
        values["sample/inter_token_ms/histogram"] = wandb.Histogram(steps, num_bins=32)
    return values


_TEXTS = ("prompt_head", "prompt_tail", "prediction", "reference", "finish")
#: columns of the table of samples; those of :data:`_TEXTS` that no row has are left out
COLUMNS = ("id", "task", "length", "prompt_tokens", "truncated", *_TEXTS)
#: figures of a sample that are columns of the table too
_FIGURES = ("kv_MiB", "peak_MiB/prefill", "peak_MiB/decode", "ttft_ms", "tpot_ms", "tokens_per_s")

Row = Mapping[str, Any]


def history(row: Row) -> dict[str, Any]:
    """Return the figures of one sample as a step of the history, under names that begin with ``sample/``.

    Times of warm-up samples are left out, as in `metrics.json`.
    """
    key = score_key(row)
    values = {
        f"{key}/score": row["scores"].get("score"),
        f"{key}/nll": (row.get("nll") or {}).get("sum"),
        "prompt_tokens": row.get("prompt_tokens"),
        **sample_figures(row),
    }
    flat = {
        name.replace(".", "/"): value for name, value in flatten(_measured_figures(row).get("point") or {}, key).items()
    }
    values |= {name: value for name, value in charted(flat).items() if isinstance(value, (int, float))}
    steps = inter_token_ms(row)
    values |= {f"inter_token_ms/p{q}": percentile(steps, q) for q in (50, 90, 99)}
    return {f"sample/{name}": value for name, value in values.items() if value is not None}


def sample_figures(row: Row) -> dict[str, Any]:
    """Return the measurements of one sample: KV size and memory peaks in MiB, TTFT, TPOT and tokens per second.

    ``tpot_ms`` is the median time of a decode step without the first one, which is ``first_step_ms``. ``tokens_per_s``
    is the throughput of the sample's whole batch. Unknown figures are None.
    """
    measured = _measured_figures(row)
    peaks = measured.get("peak_bytes") or {}
    used = ((row.get("kv_bytes") or {}).get("used") or {}).get("total")
    values = {
        "kv_MiB": _scaled(used, 1 / MIB),
        **{f"peak_MiB/{phase}": _scaled(peaks.get(phase), 1 / MIB) for phase in ("prefill", "decode")},
    }
    if measured.get("warm_up"):
        return values
    steps = measured.get("step_s") or []
    seconds = (measured.get("decode_s") or sum(steps)) / (measured.get("batch_rows") or 1)
    return values | {
        "ttft_ms": _scaled(measured.get("ttft_s"), 1000),
        "first_step_ms": _scaled(steps[0] if steps else None, 1000),
        "tpot_ms": percentile(inter_token_ms(row), 50),
        "tokens_per_s": (measured.get("decoded") or 0) / seconds if seconds and measured.get("decoded") else None,
    }


def inter_token_ms(row: Row) -> list[float]:
    """Return the times between the tokens of a sample in milliseconds, without the first; empty for warm-ups."""
    measured = _measured_figures(row)
    steps = [] if measured.get("warm_up") else (measured.get("step_s") or [])[1:]
    return [1000 * step for step in steps]


def sample_table(rows: Sequence[Row]) -> tuple[list[str], list[list[Any]]]:
    """Return the columns and the lines of the table of samples."""
    texts = [name for name in _TEXTS if any(row.get(name) is not None for row in rows)]
    columns = [name for name in COLUMNS if name not in _TEXTS or name in texts]
    lines = []
    for row in rows:
        measured = sample_figures(row)
        lines.append([*map(row.get, columns), row["scores"].get("score"), *map(measured.get, _FIGURES)])
    return [*columns, "score", *_FIGURES], lines


def _measured_figures(row: Row) -> Mapping[str, Any]:
    return row.get(MEASURED) or {}


def _scaled(value: float | None, factor: float) -> float | None:
    return None if value is None else value * factor


@dataclass(frozen=True, kw_only=True)
class SweepContent:
    """Content of the run that represents a sweep in Weights & Biases.

    Args:
        config: facts about the sweep, such as its command.
        counts: number of jobs by state, for the summary.
        table: a line per job, all with the same keys.
        pareto: keys of `table` for the axes of the scatter plot, cost and quality; None for no plot.
        page: the sweep's report as one HTML page; empty for no page.
        plots: picture files by name.
        files: files of the sweep, sent as an artifact.
    """

    id: str
    run_id: str
    config: Mapping[str, Any]
    tags: Sequence[str]
    counts: Mapping[str, int]
    table: Sequence[Mapping[str, Any]]
    pareto: tuple[str, str] | None
    page: str
    plots: Mapping[str, Path]
    files: Sequence[Path]


def log_sweep(service: Service, content: SweepContent) -> None:
    """Send a sweep to W&B as a run in the group of its runs.

    Raises:
        wandb.errors.Error: the service refuses the run or cannot be reached.
    """
    import wandb

    group = f"sweep {content.id}"
    run = service.start(
        content.run_id,
        name=group,
        group=group,
        tags=["sweep", group, *content.tags],
        config=content.config,
        kind="sweep",
    )
    columns = list(content.table[0]) if content.table else []
    table = wandb.Table(columns=columns, data=plain_data([list(line.values()) for line in content.table]))
    media: dict[str, Any] = {"runs": table}
    if content.pareto is not None:
        known = [[line[key] for key in content.pareto] for line in content.table]
        points = wandb.Table(
            columns=list(content.pareto), data=[line for line in known if all(value is not None for value in line)]
        )
        x, y = content.pareto
        media["pareto"] = wandb.plot.scatter(points, x, y, title=f"{y} against {x}")
    if content.page:
        media["report"] = wandb.Html(content.page, inject=False, data_is_not_path=True)
    media |= {f"plots/{name}": wandb.Image(str(path)) for name, path in content.plots.items()}
    run.log(media)
    for name, count in content.counts.items():
        run.summary[f"jobs/{name}"] = count
    log_files(run, f"sweep-{content.run_id.removeprefix('sweep-')}", "kvbench-sweep", content.files)
    run.finish(exit_code=1 if content.counts.get("failed") else 0)
