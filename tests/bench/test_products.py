"""Products of a few rows: which a step has, what a row of the table says, what a whole step takes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from kvbench.bench import __main__ as command
from kvbench.bench import clock, products, report
from kvbench.bench.choices import shape_of
from kvbench.bench.clock import Time
from kvbench.linear import int4
from kvbench.profiling.roofline import Shape

SHAPE = Shape(hidden=4, intermediate=7, layers=2, query_heads=3, heads=1, channels=2, vocabulary=9)


def way(call: Any, matrices: list[torch.Tensor], tolerance: float = 2e-2) -> products.Way:
    return products.Way("this", 16, call, matrices, 128, tolerance)


def test_a_step_has_four_products_a_layer_and_the_head() -> None:
    """Queries, keys and values are one, gate and up too; all together are the layer's linear elements."""
    for name, first in (("llama2-7b", (12288, 4096)), ("llama3.1-8b", (6144, 4096))):
        shape = shape_of(name)
        sizes = products.products_of(shape)
        assert sizes["queries, keys, values"] == first
        assert sizes["down"] == (shape.hidden, shape.intermediate)
        assert sizes.pop("head") == (shape.vocabulary, shape.hidden)
        assert sum(rows * columns for rows, columns in sizes.values()) * shape.layers == shape.linear_elements


def test_the_shape_of_each_product_where_all_differ() -> None:
    assert products.products_of(SHAPE) == {
        "queries, keys, values": (6 + 2 * 2, 4),
        "output": (4, 6),
        "gate, up": (14, 4),
        "down": (4, 7),
        "head": (9, 4),
    }


def test_rows_of_the_table_with_their_rate_and_those_that_failed() -> None:
    """Bytes over time, and its share of the plain read."""
    row = {"model": "m", "product": "down", "channels": 4, "columns": 8, "rows": 5, "bits": 4, "by": "kvbench"}
    good = products.product_cells(row | {"us": 10.0, "p10": 9.9, "p90": 10.1, "bytes": 40_000, "error": 1e-3}, 8.0)
    assert good[7:] == pytest.approx([10.0, 1.0, 4.0, 50.0, 1e-3])
    assert good[:7] == ["m", "down", 4, 8, 5, 4, "kvbench"]
    assert products.product_cells(row | {"failed": "no room"}, 8.0)[7:] == [None, None, None, None, "no room"]


def test_a_step_takes_its_layers_products_and_one_head() -> None:
    """An implementation that lacks a product has no entry."""
    rows: list[dict[str, Any]] = [
        {"model": "m", "product": what, "rows": 1, "bits": 4, "by": by, "us": 10.0}
        for what in products.products_of(SHAPE)
        for by in ("kvbench", "torch")
    ]
    rows[-1] = {key: value for key, value in rows[-1].items() if key != "us"} | {"failed": "no room"}
    other = [row | {"model": "n", "us": 1.0} for row in rows]
    (step,) = products.whole_steps("m", SHAPE, rows + other)
    assert step == {"model": "m", "rows": 1, "bits": 4, "by": "kvbench", "ms": pytest.approx((4 * 2 + 1) * 0.01)}


def test_a_way_that_fails_is_a_row() -> None:
    """And the others go on."""

    def broken(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("no\nsuch kernel")

    figures = products.timed_product(way(broken, [torch.ones(4, 8)]), torch.ones(1, 8), torch.ones(4, 8), 0.1)
    assert figures == {"failed": "RuntimeError: no such kernel"}


def test_a_wrong_product_is_a_failed_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """Off by more than its tolerance, and NaN."""
    monkeypatch.setattr(products, "replayed", lambda calls, seconds: Time(5.0, 5.0, 5.0, 3))
    x, weight = torch.ones(2, 8), torch.ones(4, 8)
    good = products.timed_product(way(torch.nn.functional.linear, [weight]), x, weight, 0.1)
    assert (good["us"], good["error"], good["bytes"]) == (5.0, 0.0, 128)
    for factor, tolerance in ((0.67, 0.3), (0.996, 3e-3), (float("nan"), 0.3)):
        wrong = way(lambda x, w, by=factor: by * (x @ w.T), [weight], tolerance)  # type: ignore[misc]
        assert "differs by" in products.timed_product(wrong, x, weight, 0.1)["failed"]


@pytest.mark.parametrize("broken", [False, True])
def test_the_command_writes_rows_as_they_come_and_says_whether_all_are_good(
    broken: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Five products by two implementations and for two numbers of rows; no room for the matrices is a row too."""

    def matrix(channels: int, columns: int, dtype: torch.dtype, seed: int, scale: float = 0.02) -> torch.Tensor:
        if broken and (channels, columns) == (4096, 4096):
            raise torch.OutOfMemoryError("full")
        return torch.ones(channels if channels < 9 else 1, 8)

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *number: "NVIDIA X")
    monkeypatch.setattr(products, "replayed", lambda calls, seconds: Time(5.0, 5.0, 5.0, 3))
    monkeypatch.setattr(products, "random_matrix", matrix)
    monkeypatch.setattr(products.matvec, "launch_matvec", torch.nn.functional.linear)
    monkeypatch.setattr(clock, "measure_ceiling", lambda seconds: clock.Ceiling([(1000, 1.0)], "triton"))
    monkeypatch.setattr(report, "machine", dict)
    asked = ["products", "--models", "llama2-7b", "--bits", "16", "--rows", "1", "5", "--out", str(tmp_path)]
    assert command.main(asked) == int(broken)
    written = json.loads((tmp_path / "products.json").read_text())
    assert len(written["rows"]) == (17 if broken else 20)
    assert sum("failed" in row for row in written["rows"]) == int(broken)
    assert len(written["steps"]) == (0 if broken else 4)


def test_an_unknown_model_is_said_before_anything_is_measured(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Exit status 2, and the names that there are."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert command.main(["products", "--models", "llama9"]) == 2
    assert "llama2-7b" in capsys.readouterr().err


def test_random_4_bit_matrices_use_all_codes_and_zeros() -> None:
    weight = products.random_int4(40, 256, 128, 1, "cpu")
    codes, scales, zeros = int4.unpacked(weight)
    assert codes.shape == (40, 256) and set(codes.unique().tolist()) == set(range(16))
    assert scales.dtype == torch.bfloat16 and 0.001 <= float(scales.min()) < float(scales.max()) <= 0.0051
    assert 0 <= int(zeros.min()) < int(zeros.max()) <= 16
    with pytest.raises(RuntimeError, match=r"does not serve 1 rows of torch\.bfloat16 on cpu"):
        products.kernel_product(torch.ones(1, 256).bfloat16(), weight)


def test_torch_s_4_bit_product_is_given_the_same_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nibbles in torch's order (even columns in the upper bits), zeros as the weight of code 8."""
    given: list[torch.Tensor] = []
    monkeypatch.setattr(
        torch.ops.aten,
        "_convert_weight_to_int4pack",
        lambda nibbles, tiles: given.append(nibbles) or nibbles,
        raising=False,
    )
    weight = products.random_int4(32, 256, 128, 2, "cpu")
    params = products.torch_weight(weight)[1].float()
    codes = torch.stack([given[0] >> 4, given[0] & 15], -1).flatten(1)
    groups = codes.view(32, 2, 128).float()
    restored = ((groups - 8) * params[..., 0].T[..., None] + params[..., 1].T[..., None]).flatten(1)
    torch.testing.assert_close(restored, int4.dequantized(weight, torch.float32), rtol=0, atol=2e-4)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_all_implementations_agree() -> None:
    """Small ones, in bf16; torch's have larger errors."""
    for bits in (4, 16):
        ways, exact = products.prepared_ways(bits, 64, 256, torch.bfloat16, False)
        for implementation in ways:
            for rows in (1, 5):
                x = products.random_matrix(rows, 256, torch.bfloat16, 9, 1.0)
                figures = products.timed_product(implementation, x, exact, 0.01)
                assert "failed" not in figures, (implementation.by, rows, figures["failed"])
                assert figures["error"] < implementation.tolerance and figures["us"] > 0
