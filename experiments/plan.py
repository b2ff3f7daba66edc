"""The choices of a command line that shape the runs of an item: models, data, limits, device."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from experiments.item import Item, Model

DataChoice = Literal["paper", "mini", "standin"]


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The choices of a command line.

    Args:
        models: ``model=`` values in place of the item's models; empty: the paper's models.
        data: ``paper``: the paper's data sets; ``mini``: the bundled tasks in place of an item's data sets;
            ``standin``: generated records in each benchmark's layout, to try the format only.
        limit: samples per data set (with mini: per task); None: all.
        max_new_tokens: limit of an answer; None: each data set's own.
        paths: ``dataset.path`` of data sets by their choice, for files that are on this machine.
        lengths: prompt lengths in place of a data set's or item's; empty: those that fit the model.
        device: ``runtime.device``.
        rerun: True to make samples of older code anew (``runtime.rerun``).
        fold_only: make tables of what exists, and compute nothing.
        runs: folder of the runs, which the main command line shares (``runtime.results_dir``).
        out: folder of tables and figures.
        write: True to write them below results/, and docs/reproduce.md; else they are trials.
        replace: True to replace tables of more samples, too.
    """

    models: tuple[str, ...] = ()
    data: DataChoice = "paper"
    limit: int | None = None
    max_new_tokens: int | None = None
    paths: tuple[tuple[str, str], ...] = ()
    lengths: tuple[int, ...] = ()
    device: str = "auto"
    rerun: bool = False
    fold_only: bool = False
    runs: Path = Path("results/runs")
    out: Path = Path("results")
    write: bool = False
    replace: bool = False

    def models_of(self, item: Item) -> tuple[Model, ...]:
        """Return the models of an item: those of the command line, or the paper's."""
        if not self.models:
            return item.models
        own = {model.preset: model for model in item.models}
        return tuple(own.get(name, Model(name)) for name in self.models)

    def compares(self, item: Item, model: Model) -> bool:
        """Return True if figures of `model` may be set against the paper's: its own model on its own data."""
        return self.data == "paper" and model in item.models

    def folder(self, item: Item) -> Path:
        """Return the folder of an item's table and figure: the item's own, or one below it for other models or data."""
        if not self.models and self.data == "paper":
            return self.out / item.id
        name = "+".join(text.replace("/", "_") for text in self.models) or "paper-models"
        return self.out / item.id / f"{name}-{self.data}"
