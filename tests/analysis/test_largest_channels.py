"""The largest channels of a model: what is measured is what was made on purpose."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from kvbench.analysis import command
from kvbench.analysis.largest_channels import Layer, Ratio, _ratio, verdict


def measured(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[list[list[str]], list[str]]:
    typed = [
        "outliers",
        "model=tiny",
        "dataset=mini/key_value",
        "dataset.limit=1",
        "dataset.lengths=[512]",
        "runtime.device=cpu",
        *words,
    ]
    assert command.main(typed) == 0
    lines = capsys.readouterr().out.splitlines()
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("| ")][1:]
    return rows, [line for line in lines if line.startswith(("keys:", "values:"))]


def test_outliers_on_purpose_are_found_where_they_were_made(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plain, said = measured(capsys)
    assert len(plain) == 8 and "factor 64" not in " ".join(said)
    more = ("model.outliers=first_last", "--out", str(tmp_path / "table.md"))
    with_them, said = measured(capsys, *more)
    assert with_them[1:-1] == plain[1:-1]
    for place in (0, -1):
        assert float(with_them[place][1]) > 5 * float(plain[place][1])
        assert int(with_them[place][2].partition(", ")[2]) in (8, 24, 40, 56)
        assert with_them[place][3:] == plain[place][3:]
    assert "in layers 0, 7: row keys, factor 64 (docs/which-format.md" in said[0] and said[1].startswith("values: ")
    assert "tiny outliers=first_last: largest channel" in (tmp_path / "table.md").read_text()


def test_a_ratio_is_that_of_the_largest_channel_to_the_median_of_its_head() -> None:
    squares = torch.tensor([[1.0, 4.0, 9.0, 4.0, 4.0], [100.0, 100.0, 100.0, 100.0, 400.0]], dtype=torch.double)
    assert _ratio(squares) == Ratio(2.0, 1, 4)


@pytest.mark.parametrize(
    ("ratios", "said"),
    [
        ([3.0, 4.0, 5.0], "up to 5.0 times the median channel, in all layers alike: row keys, factor 1 ("),
        ([60.0, 4.0, 5.0], "in layers 0: row keys, factor 16 ("),
        ([900.0, 4.0, 5.0, 4.0, 600.0], "in layers 0, 4: row keys, factor 64 ("),
        ([25.0, 24.0, 23.0], "in all layers alike: row keys, factor 4 ("),
    ],
)
def test_the_row_follows_from_the_largest_ratio(ratios: list[float], said: str) -> None:
    layers = [Layer(Ratio(ratio, 0, 0), Ratio(1.0, 0, 0)) for ratio in ratios]
    assert said in verdict(layers, "keys")
    assert "row values, factor 1" in verdict(layers, "values")
