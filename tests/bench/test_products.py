"""Products of one row: which a layer has, what a row of the table says."""

from __future__ import annotations

import pytest
import torch

from kvbench.bench import __main__ as command
from kvbench.bench import products
from kvbench.bench.choices import shape_of


def test_a_layer_has_four_products() -> None:
    """Queries, keys and values are one, gate and up too; all together are the layer's linear elements."""
    for name, first in (("llama2-7b", (12288, 4096)), ("llama3.1-8b", (6144, 4096))):
        shape = shape_of(name)
        found = products.products(shape)
        assert found["queries, keys, values"] == first
        assert found["down"] == (shape.hidden, shape.intermediate)
        assert sum(rows * columns for rows, columns in found.values()) * shape.layers == shape.linear_elements


def test_rows_of_the_table_with_their_rate_and_those_that_failed() -> None:
    """Bytes over time, and its share of the plain read."""
    row = {"model": "m", "product": "down", "rows": 4, "columns": 8, "by": "kernel"}
    good = products.line(row | {"us": 10.0, "p10": 9.9, "p90": 10.1, "bytes": 40_000, "error": 1e-3}, 8.0)
    assert good[5:] == pytest.approx([10.0, 1.0, 4.0, 50.0, 1e-3])
    assert products.line(row | {"failed": "no room"}, 8.0)[-1] == "no room"


def test_a_way_that_fails_is_a_row() -> None:
    """And the others go on."""

    def broken(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("no\nsuch kernel")

    x, weight = torch.ones(1, 1, 8), torch.ones(4, 8)
    assert products.measured(broken, x, [weight], torch.ones(4), 0.1) == {"failed": "RuntimeError: no such kernel"}


def test_an_unknown_model_is_said_before_anything_is_measured(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Exit status 2, and the names that there are."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert command.main(["products", "--models", "llama9"]) == 2
    assert "llama2-7b" in capsys.readouterr().err


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_the_kernel_and_the_library_agree() -> None:
    """Small ones, in bf16."""
    weights = [products.one(64, 256, torch.bfloat16, seed) for seed in range(8)]
    x = products.one(1, 256, torch.bfloat16, 9, scale=1.0)[None]
    exact = weights[0].float() @ x[0, 0].float()
    for way in products.ways(False).values():
        row = products.measured(way, x, weights, exact, 0.01)
        assert row["error"] < products.TOLERANCE and row["us"] > 0
