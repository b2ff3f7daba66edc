"""Products of one row: which a layer has, what a row of the table says."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from kvbench.bench import __main__ as command
from kvbench.bench import ceiling, products
from kvbench.bench.choices import shape_of
from kvbench.bench.clock import Time
from kvbench.profiling.roofline import Shape


def test_a_layer_has_four_products() -> None:
    """Queries, keys and values are one, gate and up too; all together are the layer's linear elements."""
    for name, first in (("llama2-7b", (12288, 4096)), ("llama3.1-8b", (6144, 4096))):
        shape = shape_of(name)
        found = products.products(shape)
        assert found["queries, keys, values"] == first
        assert found["down"] == (shape.hidden, shape.intermediate)
        assert sum(rows * columns for rows, columns in found.values()) * shape.layers == shape.linear_elements


def test_the_shape_of_each_product_where_all_differ() -> None:
    shape = Shape(hidden=4, intermediate=7, layers=2, query_heads=3, heads=1, channels=2, vocabulary=9)
    assert products.products(shape) == {
        "queries, keys, values": (6 + 2 * 2, 4),
        "output": (4, 6),
        "gate, up": (14, 4),
        "down": (4, 7),
    }
    assert list(products.ways(False)) == ["kernel", "torch (library)"]
    assert products.TOLERANCE == 0.02


def test_rows_of_the_table_with_their_rate_and_those_that_failed() -> None:
    """Bytes over time, and its share of the plain read."""
    row = {"model": "m", "product": "down", "rows": 4, "columns": 8, "by": "kernel"}
    good = products.line(row | {"us": 10.0, "p10": 9.9, "p90": 10.1, "bytes": 40_000, "error": 1e-3}, 8.0)
    assert good[5:] == pytest.approx([10.0, 1.0, 4.0, 50.0, 1e-3])
    assert good[:5] == ["m", "down", 4, 8, "kernel"]
    assert products.line(row | {"failed": "no room"}, 8.0)[5:] == [None, None, None, None, "no room"]


def test_a_way_that_fails_is_a_row() -> None:
    """And the others go on."""

    def broken(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("no\nsuch kernel")

    x, weight = torch.ones(1, 1, 8), torch.ones(4, 8)
    assert products.measured(broken, x, [weight], torch.ones(4), 0.1) == {"failed": "RuntimeError: no such kernel"}


def test_a_wrong_product_is_a_failed_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """Off by a third of the largest output, and NaN."""
    monkeypatch.setattr(products, "replayed", lambda calls, seconds: Time(5.0, 5.0, 5.0, 3))
    x, weight = torch.ones(1, 1, 8), torch.ones(4, 8)
    exact = weight @ x[0, 0]
    good = products.measured(torch.nn.functional.linear, x, [weight], exact, 0.1)
    assert (good["us"], good["error"], good["bytes"]) == (5.0, 0.0, 128)
    for wrong in (0.67, float("nan")):
        row = products.measured(lambda x, w, by=wrong: by * (x @ w.T), x, [weight], exact, 0.1)  # type: ignore[misc]
        assert "differs by" in row["failed"]


@pytest.mark.parametrize("broken", [False, True])
def test_the_command_writes_rows_as_they_come_and_says_whether_all_are_good(
    broken: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Four products by two ways; no room for the matrices is a row too."""

    def matrix(rows: int, columns: int, dtype: torch.dtype, seed: int, scale: float = 0.02) -> torch.Tensor:
        if broken and (rows, columns) == (4096, 4096):
            raise torch.OutOfMemoryError("full")
        return torch.ones(1, 8)

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *number: "NVIDIA X")
    monkeypatch.setattr(products, "replayed", lambda calls, seconds: Time(5.0, 5.0, 5.0, 3))
    monkeypatch.setattr(products, "one", matrix)
    monkeypatch.setattr(products.matvec, "launch", torch.nn.functional.linear)
    monkeypatch.setattr(products.ceiling, "measure", lambda seconds: ceiling.Ceiling([(1000, 1.0)], "triton"))
    monkeypatch.setattr(products.report, "machine", dict)
    asked = ["products", "--models", "llama2-7b", "--out", str(tmp_path)]
    assert command.main(asked) == int(broken)
    rows = json.loads((tmp_path / "products.json").read_text())["rows"]
    assert len(rows) == (7 if broken else 8) and sum("failed" in row for row in rows) == int(broken)


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
