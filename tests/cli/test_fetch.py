"""`kvbench.fetch`: its downloads, their names and revisions, and its messages; a stand-in serves the hub."""

from __future__ import annotations

import io
import json
import zipfile
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow
import pytest
from pyarrow import parquet

from kvbench.cli import fetch
from kvbench.errors import ConfigError, DataError, ModelError
from kvbench.hub import transfer as asking
from kvbench.models.locate import fetched, wanted
from kvbench.models.spec import ModelConfig
from kvbench.tasks import data
from kvbench.tasks.data import HubSource
from tests.hub.standin import Hub, reachable, serving

REVISION = "5" * 40


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Hub]:
    """A hub with a data set at a pinned commit, and an empty cache."""
    monkeypatch.setattr("huggingface_hub.file_download.time", SimpleNamespace(sleep=lambda seconds: None))
    with serving() as hub, reachable(monkeypatch, tmp_path / "cache", hub.address):
        hub.add("datasets/o/n", {"README.md": b"#", "data/a.txt": b"a text", "data/test-1.parquet": rows(0)})
        hub.pin("datasets/o/n", REVISION)
        yield hub


def rows(*numbers: int) -> bytes:
    buffer = io.BytesIO()
    parquet.write_table(pyarrow.table({"text": [f"text {number}" for number in numbers]}), buffer)
    return buffer.getvalue()


def source(file: str, revision: str | None = REVISION) -> HubSource:
    return HubSource(hub_id="o/n", revision=revision, file=file)


def test_a_file_is_fetched_by_name_and_revision_and_then_read_from_the_cache(hub: Hub) -> None:
    file = data.find_records(source("data/{task}.txt!in/{task}.jsonl"), "a", None, "toy")
    assert file.path.read_bytes() == b"a text" and file.path.parent.parent.name == REVISION
    assert file.member == "in/a.jsonl"
    hub.asked.clear()
    assert data.find_records(source("data/a.txt"), "a", None, "toy").path == file.path
    assert not hub.asked
    assert data.find_records(source("data/a.txt", None), "a", None, "toy").path == file.path  # main is the same commit
    with pytest.raises(DataError, match=r"toy: no file is given.\n  hint: set dataset.path="):
        data.find_records(HubSource(), "test", None, "toy")


def test_a_pattern_is_a_file_or_all_shards_of_a_split(hub: Hub) -> None:
    assert data.find_records(source("data/test-*.parquet"), "test", None, "toy").path.name == "test-1.parquet"
    shards = {f"test-0000{shard}-of-00002.parquet": rows(shard, shard + 10) for shard in range(2)}
    hub.add("datasets/o/n", {"README.md": b"#", **shards})
    hub.faults.gone = {"test-00001-of-00002.parquet": 500}
    with pytest.raises(DataError, match="toy: the download of o/n stopped early"):
        data.find_records(source("test-*.parquet", None), "test", None, "toy")
    hub.faults.gone = {}
    file = data.find_records(
        source("test-*.parquet", None), "test", None, "toy"
    )  # one of two does not pass for the split
    assert [record["text"] for record in data.read_records(file)] == ["text 0", "text 10", "text 1", "text 11"]
    hub.asked.clear()
    assert data.find_records(source("test-*.parquet", None), "test", None, "toy") == file and not hub.asked
    hub.add("datasets/o/m", {"README.md": b"#", "test-a.parquet": rows(0), "test-b.parquet": rows(1)})
    with pytest.raises(DataError, match=r"toy: 'test-\*\.parquet' matches 2 files of o/m \(test-a\.parquet, \.\.\.\)"):
        data.find_records(HubSource(hub_id="o/m", file="test-*.parquet"), "test", None, "toy")
    with pytest.raises(DataError, match=r"o/m/train-\*\.parquet is not on this machine, and the hub does not have"):
        data.find_records(HubSource(hub_id="o/m", file="train-*.parquet"), "test", None, "toy")


README = """---
configs:
- config_name: main
  data_files:
  - split: train
    path: main/train-*
  - split: test
    path: main/test-*
- config_name: lines
  data_files: lines/*.jsonl
---
"""


def test_a_split_is_what_datasets_finds_in_the_repository(hub: Hub) -> None:
    """Its rules, on names alone: no request of its own, and what it found is known offline afterwards."""
    shards = {f"main/test-0000{shard}-of-00002.parquet": rows(shard) for shard in range(2)}
    lines = {f"lines/{name}.jsonl": json.dumps({"text": name}).encode() for name in "ab"}
    hub.add("datasets/o/r", {"README.md": README.encode(), **shards, **lines, "main/train-0.parquet": rows(5)})

    def texts(name: str, split: str, repository: str = "o/r") -> list[str]:
        file = data.find_records(HubSource(hub_id=repository, file=name), split, None, "toy")
        return [record["text"] for record in data.read_records(file)]

    assert texts("@main/{task}", "test") == ["text 0", "text 1"]
    assert texts("@lines/{task}", "train") == ["a", "b"]
    hub.asked.clear()
    assert texts("@main/{task}", "test") == ["text 0", "text 1"] and not hub.asked
    with pytest.raises(DataError, match=r"the repository has no split 'dev' \(it has: train, test\)\.\n  hint: set"):
        texts("@main/{task}", "dev")
    with pytest.raises(DataError, match=r"the split's files: BuilderConfig 'mian' not found\. Available: \['main'"):
        texts("@mian/{task}", "test")
    # by the names of the files, without a README
    hub.add("datasets/o/s", {"data/train.jsonl": b'{"text": "t"}', "data/test.csv": b"text\nu"})
    hub.add("datasets/o/t", {"data/validation-00000-of-00001.parquet": rows(7), "other.txt": b"x"})
    assert texts("@/{task}", "validation", "o/t") == ["text 7"]
    hub.add("datasets/o/u", {"u.py": b"raise SystemExit('a script')"})
    with pytest.raises(DataError, match=r"it has a script \(u\.py\), and scripts are never run\.\n  hint: "):
        texts("@/{task}", "test", "o/u")


@pytest.mark.parametrize(
    ("status", "said"),
    [
        (401, "denied access to this account (401)"),
        (403, "denied access to this account (403)"),
        (404, "does not have this file at revision main (404)"),
        (500, "responded with status 500"),
    ],
)
def test_what_the_hub_answers_is_said(
    hub: Hub, monkeypatch: pytest.MonkeyPatch, status: int, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(asking, "_request", lambda url: asking.Answer(status=status))
    with pytest.raises(DataError) as caught:
        data.find_records(source("a.jsonl", None), "a", None, "dataset toy")
    assert "dataset toy: o/n/a.jsonl is not on this machine, and " in str(caught.value)
    assert said in str(caught.value) and "dataset.path=FILE_OR_FOLDER" in str(caught.value) and not hub.asked


def test_a_hub_that_does_not_answer_is_given_up_at_once(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(asking, "PROBE_SECONDS", 0.02)
    release = asking.threading.Event()
    monkeypatch.setattr(asking, "_request", lambda url: release.wait(60) and None)
    with pytest.raises(DataError, match=r"cannot be reached \(no answer in 0\.02 s\)"):
        data.find_records(source("a.jsonl"), "a", None, "toy")
    release.set()


def test_a_data_set_that_moved_is_refused_and_what_was_fetched_stays(hub: Hub) -> None:
    hub.add("datasets/o/q", {"train.jsonl": b'{"n": 1}', "test.jsonl": b'{"n": 2}'})
    first = hub.repositories["datasets/o/q"].main
    question = HubSource(hub_id="o/q", file="{task}.jsonl")
    train = data.find_records(question, "train", None, "toy")
    second = hub.add("datasets/o/q", {"train.jsonl": b'{"n": 1}', "test.jsonl": b'{"n": 3}'})
    assert data.find_records(question, "train", None, "toy") == train
    with pytest.raises(DataError) as caught:
        data.find_records(question, "test", None, "dataset toy")
    message = str(caught.value)
    moved = f"revision main of o/q has moved: it was commit {first} when it was first fetched ("
    assert message.startswith(f"dataset toy: {moved}")
    assert f"dataset.source.revision={first} to complete the first commit" in message and second in message
    pinned = HubSource(hub_id="o/q", file="{task}.jsonl", revision=first)
    assert data.read_records(data.find_records(pinned, "test", None, "toy")) == [{"n": 2}]
    assert data.read_records(data.find_records(question, "test", None, "toy")) == [{"n": 2}]  # the remedy: runs go on


def longbench(hub: Hub) -> None:
    """The official archive with two records of each of two tasks, under the commit that the configuration names."""
    record = {"input": "q", "context": "c", "answers": ["a"], "length": 1, "all_classes": ["a"]}
    archive = io.BytesIO()
    with zipfile.ZipFile(archive, "w") as members:
        for name in ("qasper", "trec"):
            members.writestr(f"data/{name}.jsonl", f"{json.dumps(record)}\n" * 2)
    hub.add("datasets/zai-org/LongBench", {"data.zip": archive.getvalue()})
    hub.pin("datasets/zai-org/LongBench", "5e628be450b7e67fb7ae6e201bd6d8f7056f7672")


def test_sizes_come_first_then_files_and_checksums(hub: Hub, capsys: pytest.CaptureFixture[str]) -> None:
    longbench(hub)
    assert fetch.main(["dataset=longbench/qasper,longbench/trec"]) == 0
    shown = capsys.readouterr()
    size = len(
        hub.repositories["datasets/zai-org/LongBench"].commits["5e628be450b7e67fb7ae6e201bd6d8f7056f7672"]["data.zip"]
    )
    assert f"dataset longbench/qasper: zai-org/LongBench/data.zip, {size} B to download\n" in shown.err
    assert shown.out.count("data.zip!data/qasper.jsonl") == 1 and shown.out.count(": sha256 {") == 2
    assert hub.downloads() == ["data.zip"]


def test_one_copy_of_the_weights_and_all_small_files_are_wanted() -> None:
    small = ["config.json", "tokenizer.model", "generation_config.json"]
    safe = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    pickled = ["pytorch_model-00001-of-00002.bin", "pytorch_model-00002-of-00002.bin"]
    others = ["README.md", ".gitattributes", "original/params.json", "original/consolidated.00.pth", "onnx/model.bin"]
    assert set(wanted([*small, *safe, *pickled, *others, "consolidated.safetensors"])) == {*small, *safe}
    assert set(wanted([*small, *pickled, *others, "training_args.bin"])) == {*small, *pickled}


def test_a_model_whose_weights_the_repository_lacks_is_incomplete(hub: Hub) -> None:
    index = {"weight_map": {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}}
    files = {"config.json": b'{"num_hidden_layers": 2}', "model.safetensors.index.json": json.dumps(index).encode()}
    hub.add("o/model", {**files, "model-00001-of-00002.safetensors": b"x" * 64})
    model = ModelConfig(name="m", hub_id="o/model", max_length=8)
    with pytest.raises(ModelError, match=r"model m: the download of o/model is incomplete: weights are missing in "):
        fetched(model)


def test_encoders_are_fetched_with_their_layers(hub: Hub, capsys: pytest.CaptureFixture[str]) -> None:
    files = ["config.json", "modules.json", "1_Pooling/config.json", "pytorch_model.bin", "tokenizer.json"]
    hub.add("o/encoder", {**dict.fromkeys(files, b"{}"), "onnx/model.onnx": b"x", "README.md": b"#"})
    folder = Path(fetch.fetch_encoder("o/encoder").removeprefix("encoder o/encoder: "))
    assert sorted(str(file.relative_to(folder)) for file in folder.rglob("*") if file.is_file()) == sorted(files)
    assert "encoder o/encoder: 5 files, 10 B to download" in capsys.readouterr().err
    assert fetch.fetch_encoder("openai") == "encoder openai: nothing to fetch"
    with pytest.raises(ModelError, match=r"o/none is not on this machine, and .* \(404\)\.\n  hint: .*encoder=bm25"):
        fetch.fetch_encoder("o/none")


def test_only_what_is_named_is_fetched_and_each_thing_once(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert fetch.named_groups(["dataset=a", "model.path=b", "runtime.seed=1", "methods=x"]) == {"dataset", "model"}
    monkeypatch.setattr(fetch, "fetch_model", lambda model: f"model {model.name}: fetched")
    assert fetch.main(["dataset=mini,mini_text", "model=tiny", "runtime.seed=1,2"]) == 0
    message = capsys.readouterr().out.splitlines()
    assert len(message) == len(set(message)) == 3
    assert {"dataset mini: its samples are generated; nothing to fetch", "model tiny: fetched"} < set(message)
    assert fetch.main(["dataset=text", f"dataset.path={tmp_path}"]) == 0
    assert capsys.readouterr().out == f"dataset text: {tmp_path} is a local file or folder; nothing to fetch\n"

    def interrupted(*args: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(fetch, "fetch", interrupted)
    assert fetch.main(["dataset=mini"]) == 130
    assert "run the same command again to resume" in capsys.readouterr().err


def test_without_anything_to_fetch_it_says_how_it_is_called(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for typed, status in (([], 2), (["--help"], 0), (["dataset=mini", "-h"], 0)):
        assert fetch.main(typed) == status
        assert "usage: python -m kvbench.fetch" in capsys.readouterr().out
    monkeypatch.setattr(fetch.sys, "argv", ["fetch.py", "runtime.seed=1"])
    assert fetch.main() == 2
    assert "runtime.seed=1: does not name anything to fetch" in capsys.readouterr().err
    assert fetch.main(["dataset=mini", "--multirun"]) == 2
    said = capsys.readouterr().err
    assert "--multirun: is no option of kvbench.fetch" in said and "dataset=gsm8k,longbench" in said


def test_a_checksum_is_that_of_fields_in_order() -> None:
    """Run ids hold it, so it must never change."""
    records = [{"a": "é", "b": [1, None]}, {"a": "x"}]
    assert data.records_fingerprint(records, ("a", "b")) == "5f2be57c34cd6b5d"
    different = {
        data.records_fingerprint(records, ("b", "a")),
        data.records_fingerprint(records[::-1], ("a", "b")),
        data.records_fingerprint(records[:1], ("a", "b")),
        data.records_fingerprint(records, ("a",)),
        data.records_fingerprint([], ()),
    }
    assert len(different) == 5 and "5f2be57c34cd6b5d" not in different


def test_repositories_are_owner_and_name() -> None:
    HubSource(hub_id="a/b").check()
    HubSource().check()
    for name in ("a", "a/b/c"):
        with pytest.raises(ConfigError, match=rf"x\.hub_id={name}: is not a valid repository name"):
            HubSource(hub_id=name).check("x")
