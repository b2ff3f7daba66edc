"""The user's own commands through a stand-in for the hub: fetching, running and continuing, and what goes wrong."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from experiments import runs
from experiments.__main__ import main as experiments
from kvbench.cli import fetch
from kvbench.cli.main import main
from kvbench.config.downloads import downloads
from kvbench.hub.repository import Repository, recorded
from tests.hub.papers import add_datasets, add_encoders, add_model, datasets
from tests.hub.standin import Hub, reachable, serving

#: answers of a few tokens, and no line in a table of all runs
SHORT = ["decoding.max_new_tokens=3", "logger=none", "runtime.device=cpu"]


@pytest.fixture(scope="module")
def stocked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hub]:
    """A hub with all data sets, four models of the papers and the encoders."""
    with serving() as hub:
        add_datasets(hub)
        for preset in ("llama2-7b", "llama3.1-8b-instruct", "lwm-text-chat-128k", "qwen1.5-7b-chat-awq"):
            add_model(hub, preset)
        add_encoders(hub, tmp_path_factory.mktemp("encoder"))
        yield hub


@pytest.fixture
def hub(stocked: Hub, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Hub]:
    """The same hub without faults, with an empty cache, in an empty folder."""
    monkeypatch.setattr("huggingface_hub.file_download.time", SimpleNamespace(sleep=lambda seconds: None))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("KVBENCH_CACHE", str(tmp_path / "vectors"))
    stocked.faults.cut, stocked.faults.wrong, stocked.faults.gone = {}, set(), {}
    stocked.asked.clear()
    with reachable(monkeypatch, tmp_path / "cache", stocked.address):
        yield stocked


def metrics() -> dict[str, Any]:
    (file,) = Path("results/runs").glob("*/metrics.json")
    content: dict[str, Any] = json.loads(file.read_text())
    assert content["status"] == "ok", content["error"]
    return content


@pytest.mark.slow  # 10 s
def test_cocktail_as_typed(hub: Hub, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["method=cocktail", "model=llama2-7b", "dataset=longbench_cocktail", "dataset.limit=1", *SHORT]
    assert main(command) == 0
    origin = metrics()["data"]["origin"]
    model = hub.repositories["meta-llama/Llama-2-7b-hf"]
    assert origin["model"]["hub_id"] == "meta-llama/Llama-2-7b-hf" and origin["model"]["revision"] == model.main
    assert set(origin["model"]["sha256"]) == {f"model-0000{n}-of-00002.safetensors" for n in (1, 2)}
    encoder = hub.repositories["facebook/contriever"].main
    assert (origin["encoder"]["hub_id"], origin["encoder"]["revision"]) == ("facebook/contriever", encoder)
    assert set(origin["encoder"]["sha256"]) == {"model.safetensors"}
    (archive,) = origin["data"]
    assert archive["revision"] == "5e628be450b7e67fb7ae6e201bd6d8f7056f7672" and set(archive["sha256"]) == {"data.zip"}
    assert metrics()["samples"]["done"] == 8
    assert "consolidated.safetensors" not in hub.downloads() and "data.zip" in hub.downloads()
    assert "model llama2-7b: 7 files, " in capsys.readouterr().err  # the size, before the download
    hub.asked.clear()
    assert main(command) == 0  # all there: neither the hub nor the model is needed
    assert not hub.downloads() and "8 samples" in capsys.readouterr().err


@pytest.mark.slow  # 3 s
def test_a_checkpoint_in_4_bits_as_typed(hub: Hub, capsys: pytest.CaptureFixture[str]) -> None:
    """No package but kvbench's own dependencies is needed, and the weights keep their 4 bits."""
    task = ["dataset=longbench_logquant", "dataset.tasks=[musique]", "dataset.limit=1"]
    command = ["method=logquant", "model=qwen1.5-7b-chat-awq", *task, *SHORT]
    assert main(command) == 0
    content = metrics()
    assert content["data"]["origin"]["model"]["hub_id"] == "Qwen/Qwen1.5-7B-Chat-AWQ"
    form = content["env"]["weights"]
    assert (form["source"], form["bits"], form["groups"], form["head"]) == ("awq", 4, [64], False)
    assert "of the AWQ checkpoint, groups of 64, output head 16 bits" in " ".join(capsys.readouterr().out.split())
    assert main([*command, "model.weights=int4"]) == 2
    assert "already quantized" in capsys.readouterr().err


@pytest.mark.slow
def test_all_tasks_of_ruler(hub: Hub) -> None:
    command = ["method=kivi", "model=llama2-7b", "dataset=ruler", "dataset.lengths=[1024]"]
    assert main([*command, "dataset.limit=1", *SHORT]) == 0
    content = metrics()
    assert content["samples"]["done"] == 13 and len(content["scores"]) == 13
    assert set(content["data"]["notes"]["prompts_sha256"]) == set(content["scores"])
    assert set(content["data"]["notes"]["texts_sha256"]) == {"haystack", "squad", "hotpotqa"}
    ids = {origin["hub_id"] for origin in content["data"]["origin"]["data"]}
    assert ids == {"baber/paul_graham_essays", "rajpurkar/squad_v2", "hotpotqa/hotpot_qa"}


@pytest.mark.slow  # 2 s
def test_quantspec_as_typed(hub: Hub) -> None:
    """A branch, not a commit: the first fetch records it, and a run keeps it."""
    size = [
        "dataset.lengths=[256]",
        "dataset.limit=1",
        "dataset.warm_up=0",
        "dataset.skip=0",
        "dataset.max_new_tokens=4",
    ]
    command = [
        "method=quantspec",
        "model=lwm-text-chat-128k",
        "dataset=pg19",
        *size,
        "logger=none",
        "runtime.device=cpu",
    ]
    assert main(command) == 0
    origin = metrics()["data"]["origin"]
    model, books = (Repository("LargeWorldModel/LWM-Text-Chat-128K"), Repository("emozilla/pg19-test", "dataset"))
    assert origin["model"]["revision"] == recorded(model)["commit"] == hub.repositories[model.hub_id].main
    assert origin["data"][0]["revision"] == recorded(books)["commit"]
    assert len(origin["data"][0]["sha256"]) == 2  # both shards


@pytest.mark.slow  # 5 s
def test_a_run_does_not_go_on_with_weights_of_another_commit(
    hub: Hub, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """As where results are on a shared disk, and the second machine fetched later."""
    command = ["method=kivi", "model=lwm-text-chat-128k", "dataset=mini/repeat", "dataset.lengths=[512]", *SHORT]
    assert main([*command, "dataset.limit=1"]) == 0
    name = "LargeWorldModel/LWM-Text-Chat-128K"
    first, files = hub.repositories[name].main, dict(hub.repositories[name].commits[hub.repositories[name].main])
    rows = next(Path("results/runs").glob("*/samples.jsonl")).read_text()
    content = bytearray(files["model-00002-of-00002.safetensors"])
    content[-1] ^= 1
    second = hub.add(name, {**files, "model-00002-of-00002.safetensors": bytes(content)})
    try:
        with reachable(monkeypatch, tmp_path / "second", hub.address):
            assert main([*command, "dataset.limit=2"]) == 1
        message = capsys.readouterr().err
        assert f"has samples of {name} at commit {first}, and this machine has commit {second}" in message
        assert f"model.revision={second}" in message
        assert next(Path("results/runs").glob("*/samples.jsonl")).read_text() == rows
        assert main([*command, "dataset.limit=2"]) == 0  # the first machine goes on, though the branch has moved
    finally:
        hub.repositories[name].main = first


@pytest.mark.slow  # 7 s
def test_every_data_set_is_fetched_and_read(hub: Hub, capsys: pytest.CaptureFixture[str]) -> None:
    names = sorted({name.split()[0] for name in datasets() if not name.startswith("longbench/")})  # longbench has them
    assert fetch.main([f"dataset={','.join(names)}"]) == 0
    shown = capsys.readouterr().out
    for name in names:
        assert f"dataset {name}: sha256 " in shown, name
    contents = [path for method, path, _ in hub.asked if method == "GET" and not path.startswith("api/")]
    assert len(contents) == len(set(contents)) == 15  # each file once
    hub.asked.clear()
    again = [name for name in names if name in ("gsm8k", "longbench", "pg19")]  # a file, an archive, a branch
    assert fetch.main([f"dataset={','.join(again)}"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert not hub.asked and len(again) == 3 and len(lines) >= 3 and set(lines) <= set(shown.splitlines())


def test_a_model_is_fetched_in_two_goes(hub: Hub, capsys: pytest.CaptureFixture[str]) -> None:
    hub.faults.gone = {"model-00002-of-00002.safetensors": 503}
    assert fetch.main(["model=llama2-7b"]) == 1
    message = capsys.readouterr().err
    assert "error: model llama2-7b: the download of meta-llama/Llama-2-7b-hf " in message
    assert message.count("hint: ") == 1 and "run the same command again" in message and "Traceback" not in message
    (size,) = [entry.bytes for entry in downloads(["llama2-7b"], [])]
    files = hub.repositories["meta-llama/Llama-2-7b-hf"].commits[hub.repositories["meta-llama/Llama-2-7b-hf"].main]
    assert size == len(files["model-00002-of-00002.safetensors"])
    hub.faults.gone = {}
    hub.asked.clear()
    assert fetch.main(["model=llama2-7b"]) == 0
    assert hub.downloads() == ["model-00002-of-00002.safetensors"]
    assert "model llama2-7b: 1 file, " in capsys.readouterr().err
    assert [str(entry) for entry in downloads(["llama2-7b", "tiny"], ["mini"])] == [
        "model llama2-7b (meta-llama/Llama-2-7b-hf, gated): on this machine"
    ]


@pytest.mark.parametrize("status", [401, 403])
def test_a_gated_model_is_one_message(hub: Hub, status: int, capsys: pytest.CaptureFixture[str]) -> None:
    hub.repositories["meta-llama/Llama-2-7b-hf"].refuses = status
    try:
        for command in (lambda: fetch.main(["model=llama2-7b"]), lambda: main(["model=llama2-7b", "dataset=mini"])):
            assert command() == 1
            message = capsys.readouterr().err
            assert f"({status})" in message and "accept the licence at https://huggingface.co/meta-llama" in message
            assert "Traceback" not in message and not hub.downloads()
    finally:
        hub.repositories["meta-llama/Llama-2-7b-hf"].refuses = None


def test_a_wrong_checksum_stops_a_run_and_leaves_what_was_there(hub: Hub, capsys: pytest.CaptureFixture[str]) -> None:
    hub.faults.wrong = {"model-00001-of-00002.safetensors"}
    command = [
        "method=fp16",
        "model=llama2-7b",
        "dataset=mini/repeat",
        "dataset.lengths=[512]",
        "dataset.limit=1",
        *SHORT,
    ]
    assert main(command) == 1
    message = capsys.readouterr().err
    assert "model llama2-7b: the content of model-00001-of-00002.safetensors does not have the checksum" in message
    hub.faults.wrong = set()
    hub.asked.clear()
    assert fetch.main(["model=llama2-7b"]) == 0
    assert hub.downloads() == ["model-00001-of-00002.safetensors"]


def test_sizes_without_a_hub_are_estimates_or_unknown(
    hub: Hub, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with reachable(monkeypatch, tmp_path / "none", None):
        shown = [str(entry) for entry in downloads(["llama2-7b", "qwen1.5-7b-chat-awq"], ["gsm8k"])]
    assert shown[0].startswith("model llama2-7b (meta-llama/Llama-2-7b-hf, gated): 13.5 GB (about, 2 bytes ")
    assert shown[1:] == [
        "model qwen1.5-7b-chat-awq (Qwen/Qwen1.5-7B-Chat-AWQ): unknown size (HF_HUB_OFFLINE is set)",
        "data openai/gsm8k/main/train-00000-of-00001.parquet: unknown size (HF_HUB_OFFLINE is set)",
        "data openai/gsm8k/main/test-00000-of-00001.parquet: unknown size (HF_HUB_OFFLINE is set)",
    ]


def test_a_table(hub: Hub, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """One item by the command of experiments, on the paper's model and data; ``test_items.py`` has all of them."""
    monkeypatch.setattr(runs, "_absent", {})  # what other tests of this process did not have
    runs.identify.cache_clear()
    options = ["--limit", "1", "--lengths", "256", "--max-new-tokens", "2", "--device", "cpu", "--out", "out"]
    assert experiments(["quantspec/table2", *options]) == 0
    shown = capsys.readouterr()
    records = [json.loads(file.read_text()) for file in Path("results/runs").glob("*/metrics.json")]
    assert [metrics["error"] for metrics in records if metrics["status"] != "ok"] == [] and len(records) == 4
    assert all(metrics["data"]["origin"]["model"] for metrics in records)
    assert "] absent " not in shown.err and "] failed " not in shown.err
    table = Path("out/quantspec/table2/table.csv")
    assert table.read_text().count("\n") > 2 and f"-> {table.parent}" in shown.out
