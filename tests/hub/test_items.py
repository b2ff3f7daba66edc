"""Every item of ``experiments`` through a stand-in for the hub: the papers' own models and data sets, two records each.

``python -m experiments ITEM --limit 2`` as a user types it, with short answers and, for QuantSpec's prompts of up to
128k tokens, shorter lengths. All items share one folder of runs and one cache, as on a user's machine.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from experiments import runs
from experiments.__main__ import main
from experiments.data import POINTS, choice_data
from experiments.fold import forced
from experiments.item import Column, Computed, Grid, Item, Model, Row
from experiments.registry import items
from kvbench.retrieval.encoders import encoder
from tests.hub.loopback import watched
from tests.hub.papers import add_datasets, add_encoders, add_model
from tests.hub.standin import Hub, reachable, serving

ROOT = Path(__file__).resolve().parents[2]
LIMIT = 2
#: by paper: QuantSpec's lengths exceed the context of the weights that are served
SHORTER = {"quantspec": ["--lengths", "512"]}
#: of items with many models: those whose runs no other item makes, and one whose checkpoint has weights in 4 bits
MODELS = {
    "cocktail/table2": ["mistral-7b"],
    "logquant/table3": ["llama3.1-8b-instruct", "qwen1.5-7b-chat-awq"],
    "logquant/table6": ["llama3.1-8b-instruct", "qwen1.5-14b-chat-awq"],
}
#: an id of a run; the other names behind cells are analyses, and files of points that were measured elsewhere
RUN = re.compile(r"[0-9a-f]{10}-[0-9a-f]{10}")
#: reason of a cell whose speed-up no file of results/h200 has
FORCED = f"not measured: {forced.COMMAND}"

pytestmark = pytest.mark.slow


def options(item: Item) -> list[str]:
    models = ["--models", *MODELS[item.id]] if item.id in MODELS else []
    short = SHORTER.get(item.paper, [])
    return ["--limit", str(LIMIT), "--max-new-tokens", "4", "--device", "cpu", *short, *models]


def models_of(item: Item) -> list[Model]:
    return [model for model in item.models if model.preset in MODELS.get(item.id, [model.preset])]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Hub, list[str]]]:
    """A folder to run in, a hub with all that the items need, and the list of other machines that were asked."""
    folder = tmp_path_factory.mktemp("items")
    with pytest.MonkeyPatch.context() as patch, serving() as hub, watched() as strangers:
        patch.setattr("huggingface_hub.file_download.time", SimpleNamespace(sleep=lambda seconds: None))
        patch.setattr(runs, "has_gpu", lambda: False)  # points of large models are those in results/h200
        patch.chdir(folder)
        patch.setenv("KVBENCH_CACHE", str(folder / "vectors"))
        patch.delenv("OPENAI_API_KEY", raising=False)
        add_datasets(hub)
        add_encoders(hub, tmp_path_factory.mktemp("encoder"))
        for name in dict.fromkeys(model.preset for item in items().values() for model in item.models):
            add_model(hub, name)
        with reachable(patch, folder / "cache", hub.address):
            yield hub, strangers


@pytest.fixture
def hub(place: tuple[Hub, list[str]], monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """The hub, as a process finds it that has not asked for anything yet; in the end, nobody else was asked."""
    monkeypatch.setattr(runs, "_absent", {})
    runs.identify.cache_clear()
    encoder.cache_clear()  # one that another test's hub had would not be fetched from this one
    yield place[0]
    assert place[1] == []


def obstacle(item: Grid, model: Model, row: Row, column: Column) -> str | None:
    """Return how the reason of a cell without a number begins; empty if the cell must have one, None if it may."""
    needed = choice_data("model", model.preset)["requires"]
    if column.only and model.preset not in column.only:
        return "not in the paper's table"
    if column.data == POINTS:
        return None
    if needed and importlib.util.find_spec(needed) is None:
        return f"model={model.preset}: needs the package {needed}, which is not installed."
    if "encoder=openai" in str(row.setting):
        return "method.encoder=openai needs an API key"
    shape = choice_data("model", model.preset)["architecture"]
    if "hf_quantized" in str(row.setting) and shape["hidden_size"] // shape["num_attention_heads"] % 64:
        return "method.group_size=64: does not divide the model's head_dim"  # Phi-3: 96 channels
    if column.figure == "acceptance" and row.setting == "fp16":
        return "a run of this setting does not have this figure"
    return ""


def check_cells(item: Item, content: dict[str, Any], table: str) -> None:
    """Hold each cell to have its number over all records, or the reason why it cannot, and the table to say so."""
    cells = {(cell["model"], cell["row"], cell["column"]): cell for cell in content["cells"]}
    for cell in cells.values():
        assert (cell["ours"] is None) == bool(cell["reason"]), cell
        assert not cell["reason"] or cell["reason"].splitlines()[0] in table, cell
    if isinstance(item, Computed):
        assert all(cell["ours"] is not None or cell["reason"] == FORCED for cell in cells.values())
        measured = not item.compute.startswith(("analytic:", "kernels:"))
        without = [cell for cell in cells.values() if not cell["n"] and not cell["row"].endswith(", predicted")]
        assert not measured or all(cell["reason"] == FORCED for cell in without)
        return
    assert isinstance(item, Grid)
    assert len(cells) == len(models_of(item)) * len(item.rows) * (len(item.columns) + len(item.groups))
    for model in models_of(item):
        for row in item.rows:
            expected = {column.name: obstacle(item, model, row, column) for column in item.columns}
            for column in item.columns:
                cell, begin = cells[model.title, row.name, column.name], expected[column.name]
                if begin is None:
                    known = cell["reason"] in (runs.NO_GPU, FORCED) or "memory" in cell["reason"]
                    assert cell["ours"] is not None or known, cell
                elif begin:
                    assert cell["reason"].startswith(begin), cell
                else:
                    assert cell["ours"] is not None and cell["n"] == LIMIT, cell
            for group in item.groups:
                cell = cells[model.title, row.name, group.name]
                members = group.columns or [c.name for c in item.columns if c.figure == item.columns[0].figure]
                if not any(expected[name] is None for name in members):
                    assert (cell["ours"] is None) == any(expected[name] for name in members), cell
                    assert cell["ours"] is None or cell["n"] == LIMIT * len(members), cell
    if any(cell["n"] == LIMIT for cell in cells.values()):
        assert f"(n = {LIMIT})" in table or item.only_groups


def check_records(item: Item, content: dict[str, Any], hub: Hub) -> None:
    """Hold the record of each run behind a cell to name model and data by their ids and commits on the hub."""
    models = {model.title: choice_data("model", model.preset)["hub_id"] for model in item.models}
    columns = {column.name: column for column in item.columns} if isinstance(item, Grid) else {}
    for cell in content["cells"]:
        for name in cell["runs"]:
            folder = Path("results/runs", name)
            if RUN.fullmatch(name):
                metrics = json.loads((folder / "metrics.json").read_text())
                assert metrics["status"] == "ok" and metrics["samples"]["done"] == LIMIT, metrics["error"]
                origin = metrics["data"]["origin"]
            elif name.startswith("attention-"):
                origin = json.loads((folder / "about.json").read_text())["origin"]
            else:
                assert list(ROOT.glob(f"results/h200/*/{name}"))
                continue
            model, own = origin["model"], models[cell["model"]]
            assert (model["hub_id"], model["revision"]) == (own, hub.repositories[own].main)
            assert len(model["sha256"]) == 2  # both shards
            if item.id == "cocktail/table3":
                encoder = ("facebook/contriever", hub.repositories["facebook/contriever"].main)
                assert (origin["encoder"]["hub_id"], origin["encoder"]["revision"]) == encoder
            assert origin["data"] and all(entry["sha256"] for entry in origin["data"])
            for entry in origin["data"]:
                assert entry["revision"] == hub.repositories[f"datasets/{entry['hub_id']}"].main
            if cell["column"] in columns:
                source = choice_data("dataset", columns[cell["column"]].data)["source"]
                assert {entry["hub_id"] for entry in origin["data"]} == {source["hub_id"]}


#: without a GPU, none of its runs can be made here: it says so and writes nothing
NOTHING = ("quantspec/figure1",)


@pytest.mark.parametrize("item", items().values(), ids=items())
def test_an_item_as_typed(item: Item, hub: Hub, capsys: pytest.CaptureFixture[str]) -> None:
    if item.id in NOTHING:
        assert main([item.id, "--write", *options(item)]) == 1
        assert "--models tiny --data mini" in capsys.readouterr().err and not Path("results", item.id).exists()
        return
    assert main([item.id, "--write", *options(item)]) == 0
    shown = capsys.readouterr()
    folder = Path("results", item.id, *(["+".join(MODELS[item.id]) + "-paper"] if item.id in MODELS else []))
    assert f"-> {folder}" in shown.out and "] failed " not in shown.err and "] error " not in shown.err
    content = json.loads((folder / "cells.json").read_text())
    assert content["data"] == "paper" and content["limit"] == LIMIT
    check_cells(item, content, (folder / "table.md").read_text())
    check_records(item, content, hub)
    if isinstance(item, Computed) and item.compute.startswith("statistics:"):
        (source,) = {text for text in content["notes"] if text.startswith("Records of ")}
        commits = re.findall(r"(\S+) at commit ([0-9a-f]{40})", source)
        assert commits and all(hub.repositories[f"datasets/{name}"].main == commit for name, commit in commits)


def test_what_items_share_is_downloaded_once_and_nothing_is_done_twice(
    hub: Hub, capsys: pytest.CaptureFixture[str]
) -> None:
    item = items()["cocktail/table4"]
    assert main([item.id, "--write", *options(item)]) == 0
    contents = [path for method, path, _ in hub.asked if method == "GET" and not path.startswith("api/")]
    assert contents and len(contents) == len(set(contents))
    files = [path for path in Path("results/runs").rglob("samples.jsonl") if path.stat().st_size]
    before = {path: path.stat().st_mtime_ns for path in files}
    hub.asked.clear()
    assert main([item.id, "--write", *options(item)]) == 0
    assert hub.asked == [] and before == {path: path.stat().st_mtime_ns for path in files}
    capsys.readouterr()
    assert main([]) == 0
    listed = capsys.readouterr().out.split("cocktail/table4 ")[1].split("cocktail/table5 ")[0]
    assert f"here: the paper's models, the paper's data, limit {LIMIT}, max-new-tokens 4: 20 of 25 cells\n" in listed


def test_an_item_in_a_process_of_its_own(hub: Hub, tmp_path: Path) -> None:
    """With HF_ENDPOINT in the environment, as a user sets it, and a cache of its own."""
    guard, strangers = tmp_path / "guard", tmp_path / "strangers.txt"
    guard.mkdir()
    guard.joinpath("sitecustomize.py").write_text(
        "from pathlib import Path\nfrom tests.hub.loopback import watch\n"
        f"watch(lambda name: Path({str(strangers)!r}).open('a').write(name + '\\n'))\n"
    )
    left_out = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "HF_TOKEN")
    environment = {name: value for name, value in os.environ.items() if name not in left_out}
    environment |= {"HF_ENDPOINT": hub.address, "HF_HOME": str(tmp_path / "home"), "KVBENCH_CACHE": str(tmp_path)}
    environment["PYTHONPATH"] = os.pathsep.join(map(str, (guard, ROOT)))
    command = [sys.executable, "-m", "experiments", "cocktail/table3", "--limit", "2", "--max-new-tokens", "4"]
    done = subprocess.run(
        [*command, "--device", "cpu", "--write"],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    assert not strangers.exists(), strangers.read_text()
    content = json.loads((tmp_path / "results" / "cocktail" / "table3" / "cells.json").read_text())
    assert all(cell["n"] == LIMIT and cell["runs"] for cell in content["cells"])
    assert list((tmp_path / "home" / "hub").glob("models--meta-llama--Llama-2-7b-hf/snapshots/*/config.json"))
