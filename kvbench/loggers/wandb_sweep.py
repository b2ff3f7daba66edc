"""A sweep as a run of its own in Weights & Biases: its table, its plots, its page and its files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvbench.loggers.wandb_service import Service, log_files, plain_data


@dataclass(frozen=True, kw_only=True)
class SweepContent:
    """Content of the run that represents a sweep in Weights & Biases.

    Args:
        config: facts about the sweep, such as its command.
        counts: number of jobs by state, for the summary.
        table: a line per job, all with the same keys.
        pareto: keys of `table` for the axes of the scatter plot, cost and quality; None without one.
        page: the sweep's report as one HTML page; empty without one.
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
