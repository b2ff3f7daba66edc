"""Predictions against what engines print and others publish (results/fit); the package's file against its sources."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from experiments import fit, llama_sizes
from experiments.checks.rules import check_documents
from experiments.formats.grid import ROWS
from kvbench.fit.engines import FORMATS
from kvbench.fit.model import model_of, read_model

SIZES = json.loads((fit.ROOT / "results" / "fit" / "llamacpp.json").read_text(encoding="utf-8"))
#: a log of four GPUs of which one is shown; vLLM takes the least of what they have
ONE_OF_FOUR = "github.com/vllm-project/vllm/issues/21348"


def test_tokens_of_vllms_logs() -> None:
    """From the bytes that a log prints: within 1 %; from the card alone, where it tells how it was profiled: 3.5 %."""
    rows = fit.logs()
    assert all(row["address"].startswith("github.com/") for row in rows)
    errors = {(row["address"], row["available"], row["format"]): row["ours"] / row["tokens"] - 1 for row in rows}
    far = {address for (address, *_), error in errors.items() if abs(error) > 0.01}
    assert len(errors) >= 18 and far == {ONE_OF_FOUR}
    alone = [row["alone"] / row["tokens"] - 1 for row in rows if row["alone"]]
    assert len(alone) == 9 and max(map(abs, alone)) < 0.035


@pytest.mark.parametrize("row", SIZES["rows"], ids=lambda row: row["model"]["model_type"])
def test_sizes_that_llama_cpp_prints(row: Mapping[str, Any]) -> None:
    model = model_of("random", row["model"])
    assert len(row["printed"]) == len(llama_sizes.TYPES) == 7
    for printed in row["printed"]:
        form = FORMATS["fp16" if printed["type"] == "f16" else printed["type"]]
        half = model.cache_bytes(form.method, printed["cells"]) / 2 / 2**20
        assert printed["keys_mib"] == printed["values_mib"] == f"{half:.2f}", printed


def test_steps_of_models_that_were_left_out() -> None:
    errors = fit.left_out()
    assert set(errors) == {"llama2-7b", "llama2-13b", "llama3.1-8b", "mistral-7b"}
    assert sum(map(len, errors.values())) == len(fit.step_points()) == 119
    assert max(abs(error) for mine in errors.values() for error in mine) < 0.15
    assert max(abs(row["error"]) for row in fit.cards()) < 0.15


def test_the_packages_file_and_the_documents_are_those_of_the_results() -> None:
    stored = json.loads(fit.MEASURED.read_text(encoding="utf-8"))
    made = fit.measured()
    assert stored["fidelity"] == made["fidelity"]
    assert {form.line for form in FORMATS.values()} - {*ROWS} == {"q5_0, rotated | open"}  # a line that no grid has yet
    for part in ("tpot", "elsewhere"):
        for key, value in made[part].items():
            assert stored[part][key] == (pytest.approx(value, rel=1e-3) if not isinstance(value, str) else value)
    outcome = check_documents(fit.fit_blocks())
    assert not outcome.lost and not outcome.differences


def test_a_gguf_files_header_gives_the_same_model(tmp_path: Path) -> None:
    pytest.importorskip("gguf")
    for row in SIZES["rows"]:
        kind = row["model"]["model_type"]
        file = tmp_path / f"{kind}.gguf"
        llama_sizes.write_gguf(file, kind)
        model, same = read_model(str(file)), model_of("random", {**row["model"], "tie_word_embeddings": True})
        assert model.weights == same.weights and model.cache == same.cache and model.gguf
        assert model.weight_bytes == pytest.approx(4 * model.weights.total, rel=0.01)  # float32, with padding
