"""Figures of a comparison of predictions with fp16's, as tables of runs show them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kvbench.results.record_fidelity import Fidelity
from kvbench.results.record_scores import Score
from kvbench.util.table import Cell


def fidelity_cell(compared: Fidelity) -> Cell:
    """Return the mean and the 99.9 % percentile of the KL divergence, with the share of equal first choices below."""
    kld, same = compared.kld, compared.same_top
    return Cell(f"KL {kld.mean:.3g} nats, 99.9 % {kld.p99_9:.3g}", f"same top {100 * same.share:.2f} %")


def _fidelity_reader(read: Callable[[Fidelity], Any]) -> Callable[[Score], Any]:
    return lambda score: score.fidelity and read(score.fidelity)


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
    "growth_per_1000": _fidelity_reader(lambda compared: compared.growth and compared.growth.per_1000),
    "never_left": _fidelity_reader(lambda compared: compared.left and compared.left.never),
    "left_median": _fidelity_reader(lambda compared: compared.left and compared.left.median),
    "left_gap": _fidelity_reader(lambda compared: compared.left and compared.left.gap),
    "worst_layer": _fidelity_reader(lambda compared: compared.layers and compared.layers.worst),
    "positions": _fidelity_reader(lambda compared: compared.positions),
    "prompts": _fidelity_reader(lambda compared: compared.prompts),
}
