"""A loaded model that several runs use, one after the other: nothing of one method reaches the next."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest

from kvbench.models import shared
from kvbench.results.samples import MEASURED, outputs
from kvbench.runner import session
from kvbench.runner.run import answer_run
from tests.run_files import store_of
from tests.run_support import METHODS, config

#: methods that attach something to the model: hooks that see keys before RoPE, weights in 4 bits
ATTACHING: dict[str, dict[str, Any]] = {
    "int4_token": {"_target_": "kvbench.methods.atom.Atom", "rope": "pre", "prefill": "quantized"},
    "hierarchical": {"_target_": "kvbench.methods.quantspec.QuantSpec", "draft_weights": "int4"},
}
FORMATS: dict[str, dict[str, dict[str, Any]]] = {
    "int4_token": {side: {"bits": 4, "group_size": "head_dim", "axis": "token"} for side in ("key", "value")},
    "hierarchical": {
        "key": {"bits": 8, "group_size": 128, "axis": "channel", "kind": "hierarchical"},
        "value": {"bits": 8, "group_size": "head_dim", "axis": "token", "kind": "hierarchical"},
    },
}


def grid(folder: Path) -> list[dict[str, Any]]:
    """Two models by four methods, in the order of a sweep."""
    groups = {"dataset": {"limit": 2, "words": 16}}
    runs = []
    for seed in (0, 1):
        groups["runtime"] = {"seed": seed}
        runs += [config(folder, name, **copy.deepcopy(groups)) for name in METHODS]
        for name, method in ATTACHING.items():
            one = config(folder, "fp16", **copy.deepcopy(groups))
            runs.append({**one, "method": {**method, "takes": [name]}, "quantizer": {"name": name, **FORMATS[name]}})
        for one in runs:
            one["runtime"].setdefault("device", "cpu")
    return runs


def without_times(row: dict[str, Any]) -> dict[str, Any]:
    """A row without what differs between two repetitions: times, and the process's resident memory."""
    times = ("ttft_s", "step_s", "decode_s", "capture_s", "peak_bytes", "rounds")
    return {**row, MEASURED: {key: value for key, value in row[MEASURED].items() if key not in times}}


@pytest.mark.parametrize(
    "chosen",
    [
        pytest.param(slice(2, 4), id="what two methods attach to a model"),
        pytest.param(slice(0, 8), id="two models by four methods", marks=pytest.mark.slow),
    ],
)
def test_rows_of_runs_that_share_a_model_are_those_of_single_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any, chosen: slice
) -> None:
    monkeypatch.setattr(shared, "_shelf", None)
    loads: list[int] = []
    real = session.load_joined

    def load(model: Any, runtime: Any) -> Any:
        loads.append(runtime.seed)
        return real(model, runtime)

    monkeypatch.setattr(session, "load_joined", load)
    sweep = []
    for one in grid(tmp_path / "sweep")[chosen]:
        with shared.sharing():
            sweep.append(answer_run(one))
    assert loads == sorted({one["runtime"]["seed"] for one in grid(tmp_path)[chosen]}), "each model is loaded once"
    assert "a run has changed" not in capsys.readouterr().err
    shared.free()
    loads.clear()
    for one, metrics in zip(grid(tmp_path / "single")[chosen], sweep, strict=True):
        alone = answer_run(one)
        assert metrics["run_id"] == alone["run_id"]
        mine, its = (store_of(each).samples().rows for each in (metrics, alone))
        assert len(mine) == 2
        for name, row in mine.items():
            assert outputs(row) == outputs(its[name])
            assert without_times(row) == without_times(its[name])
        peaks = [each["peak_bytes"] for each in (metrics, alone)]
        assert peaks[0]["decode"] == pytest.approx(peaks[1]["decode"], rel=1e-3)
    assert len(loads) == len(sweep)
