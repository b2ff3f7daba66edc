"""Logging to Weights & Biases: a history row per sample, scores, bytes and times as summary, and the run's files.

Only the modules ``kvbench.loggers.wandb*`` import wandb, and they do so only when the first row or the end of a run is
logged.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from kvbench.loggers import wandb_rows
from kvbench.loggers.base import Logger, charted
from kvbench.loggers.csv import flatten
from kvbench.loggers.wandb_service import Service, log_files, plain
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
        service: an open way to W&B for several runs; None for one of its own.
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
        """Remember the rows that the run already has; those that W&B lacks are sent when the connection is opened.

        That is at the first :meth:`sample`, or at :meth:`finish` if there is none.
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
            columns, lines = wandb_rows.table(self._rows)
            table = wandb.Table(columns=columns, data=plain(lines))
            run.log({"samples": table}, step=len(self._rows) - 1)  # its own step would take the next row's number
        for name, value in plain(summary(metrics)).items():
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


def summary(metrics: Mapping[str, Any]) -> dict[str, Any]:
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

    values = wandb_rows.history(row)
    steps = wandb_rows.inter_token_ms(row)
    if len(steps) > 1:
        values["sample/inter_token_ms/histogram"] = wandb.Histogram(steps, num_bins=32)
    return values
