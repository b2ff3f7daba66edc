"""One table of each paper by its own command, with the paper's models and data from a stand-in for the hub."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from experiments import runs
from experiments.__main__ import main
from tests.hub.papers import add_datasets, add_encoder, add_model
from tests.hub.standin import Hub, reachable, serving


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hub]:
    """A hub with all data sets, two models of the papers and an encoder."""
    with serving() as hub:
        add_datasets(hub)
        for preset in ("llama2-7b", "llama3.1-8b-instruct"):
            add_model(hub, preset)
        add_encoder(hub, tmp_path_factory.mktemp("encoder"))
        yield hub


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache that the items share, empty at first."""
    return tmp_path_factory.mktemp("cache")


@pytest.mark.parametrize(
    ("item", "options"),
    [
        ("cocktail/table3", ["--limit", "1"]),
        ("logquant/table1", ["--limit", "1", "--models", "llama3.1-8b-instruct"]),
        ("quantspec/table2", ["--limit", "1", "--lengths", "256"]),
    ],
)
def test_a_table_of_each_paper(
    item: str,
    options: list[str],
    hub: Hub,
    cache: Path,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("KVBENCH_CACHE", str(tmp_path / "vectors"))
    monkeypatch.setattr(runs, "_absent", {})  # what other tests of this process did not have
    runs.identify.cache_clear()
    with reachable(monkeypatch, cache, hub.address):
        assert main([item, *options, "--max-new-tokens", "2", "--device", "cpu", "--out", "out"]) == 0
    shown = capsys.readouterr()
    folders = [json.loads(file.read_text()) for file in Path("results/runs").glob("*/metrics.json")]
    assert [metrics["error"] for metrics in folders if metrics["status"] != "ok"] == [] and folders
    assert all(metrics["data"]["origin"]["model"] for metrics in folders)
    assert "] absent " not in shown.err and "] failed " not in shown.err
    (table,) = Path("out", item).rglob("table.csv")
    assert table.read_text().count("\n") > 2 and f"-> {table.parent}" in shown.out
