"""Reading and finding data: every format, what is missing, what is said without a network."""

from __future__ import annotations

import gzip
import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from kvbench.cli import fetch
from kvbench.errors import DataError
from kvbench.hub import transfer as asking
from kvbench.tasks import data
from kvbench.tasks.data import Found, HubSource

RECORDS = [{"text": "é", "n": 1}, {"text": "b", "n": 2}]
LINES = "\n".join(json.dumps(record) for record in RECORDS)
SOURCE = HubSource(hub_id="kvbench/none", revision="0" * 40, file="data.zip!data/{task}.jsonl")


def every_form(folder: Path) -> list[Path]:
    forms = [folder / name for name in ("a.jsonl", "a.jsonl.gz", "a.json", "a.zip", "a.parquet")]
    forms[0].write_text(LINES + "\n\n", encoding="utf-8")
    forms[1].write_bytes(gzip.compress(LINES.encode()))
    forms[2].write_text(json.dumps(RECORDS), encoding="utf-8")
    with zipfile.ZipFile(forms[3], "w") as archive:
        archive.writestr("data/a.jsonl", LINES)
    parquet = pytest.importorskip("pyarrow.parquet")
    import pyarrow

    parquet.write_table(pyarrow.Table.from_pylist(RECORDS), forms[4])
    return forms


def test_every_form_gives_the_same_records_and_checksum(tmp_path: Path) -> None:
    prints = set()
    for path in every_form(tmp_path):
        records = data.read_records(data.find_records(SOURCE, "a", str(path), "toy"), ("text", "n"))
        assert records == RECORDS, path
        prints.add(data.records_fingerprint(records, ("text", "n")))
    assert len(prints) == 1


def test_a_folder_is_searched(tmp_path: Path) -> None:
    forms = every_form(tmp_path)
    for path in forms[1:]:
        path.unlink()
    assert data.find_records(SOURCE, "a", str(tmp_path), "toy").path.name == "a.jsonl"
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "b.jsonl.gz").write_bytes(gzip.compress(LINES.encode()))
    assert data.find_records(SOURCE, "b", str(tmp_path), "toy").path.parent.name == "data"
    with pytest.raises(DataError, match="no file for 'c'"):
        data.find_records(SOURCE, "c", str(tmp_path), "toy")
    with zipfile.ZipFile(tmp_path / "data.zip", "w") as archive:
        archive.writestr("data/c.jsonl", LINES)
    assert data.find_records(SOURCE, "c", str(tmp_path), "toy").member == "data/c.jsonl"


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("a.jsonl", b'{"text": "x"}\n{"te', "line 2: is not valid JSON"),
        ("a.jsonl", b'{"other": 1}', "no field 'text'"),
        ("a.jsonl.gz", b"no gzip", "cannot be read"),
        ("a.zip", b"no zip", "not a readable archive"),
        ("a.parquet", b"no parquet", "cannot be read"),
    ],
)
def test_damage_is_named(tmp_path: Path, name: str, content: bytes, said: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=said):
        data.read_records(data.find_records(SOURCE, "a", str(tmp_path / name), "toy"), ("text",))


def test_several_files_of_one_task_are_named_and_none_is_picked(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    places = [tmp_path / "a.jsonl", tmp_path / "a.json", tmp_path / "data" / "a.jsonl"]
    for place in places:
        place.write_text(LINES if place.suffix == ".jsonl" else json.dumps(RECORDS))
    with pytest.raises(DataError) as caught:
        data.find_records(SOURCE, "a", str(tmp_path), "dataset toy")
    assert "contains 3 files that could be 'a'" in str(caught.value)
    assert ": a.jsonl, a.json, data/a.jsonl.\n" in str(caught.value)
    assert f"name one of them, for example dataset.path={places[0]}" in str(caught.value)
    assert data.find_records(SOURCE, "a", str(places[1]), "toy").path == places[1]
    # the archive of the hub counts where it has the task
    for place in places[1:]:
        place.unlink()
    with zipfile.ZipFile(tmp_path / "data.zip", "w") as archive:
        archive.writestr("data/b.jsonl", LINES)
    assert data.find_records(SOURCE, "a", str(tmp_path), "toy").path == places[0]
    assert data.find_records(SOURCE, "b", str(tmp_path), "toy").path == tmp_path / "data.zip"
    with zipfile.ZipFile(tmp_path / "data.zip", "a") as archive:
        archive.writestr("data/a.jsonl", LINES)
    with pytest.raises(DataError, match="contains 2 files that could be 'a'"):
        data.find_records(SOURCE, "a", str(tmp_path), "toy")


def test_several_members_of_one_task_are_named_and_none_is_picked(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "x.zip", "w") as archive:
        archive.writestr("new/a.jsonl", LINES)
        archive.writestr("old/a.json", LINES)
        archive.writestr("old/b.jsonl", LINES)
    with pytest.raises(DataError, match=r"contains 2 files that could be 'a'.*: new/a.jsonl, old/a.json"):
        data.find_records(SOURCE, "a", str(tmp_path / "x.zip"), "toy")
    assert data.find_records(SOURCE, "b", str(tmp_path / "x.zip"), "toy").member == "old/b.jsonl"
    with pytest.raises(DataError, match=r"does not contain c.jsonl; it contains 3"):
        data.find_records(SOURCE, "c", str(tmp_path / "x.zip"), "toy")


def test_the_nearest_file_is_proposed_unless_it_holds_other_records(tmp_path: Path) -> None:
    (tmp_path / "qasper.jsonl").write_text(LINES)
    with pytest.raises(DataError, match=r"hint: if qasper.jsonl is the right file, rename it"):
        data.find_records(SOURCE, "qasper_e", str(tmp_path), "toy")
    with pytest.raises(DataError) as caught:
        data.find_records(SOURCE, "qasper_e", str(tmp_path), "toy", others={"qasper": "it is the other one"})
    assert "hint: qasper.jsonl is not the right file: it is the other one" in str(caught.value)
    assert "Rename" not in str(caught.value)


@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("", "dataset.path is empty"),
        ("/dev/zero", "/dev/zero is a device, not a regular file"),
        ("FOLDER/fifo", "fifo is a fifo, not a regular file"),
        ("FOLDER/none", "none does not exist"),
        ("FOLDER/file/below", "below does not exist"),
        ("FOLDER/" + "x" * 300, "File name too long"),
        ("~nobody-of-this-name/x", "Could not determine home directory"),
    ],
)
def test_places_that_cannot_be_read_are_named(tmp_path: Path, path: str, said: str) -> None:
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "file").write_text(LINES)
    with pytest.raises(DataError, match=said):
        data.find_records(SOURCE, "a", path.replace("FOLDER", str(tmp_path)), "dataset toy")


def test_a_fifo_in_a_folder_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "a.jsonl")
    with pytest.raises(DataError, match=r"a.jsonl is a fifo, not a regular file"):
        data.find_records(SOURCE, "a", str(tmp_path), "dataset toy")


def test_whoever_fetches_is_not_sent_to_fetch(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    assert fetch.main(["dataset=longbench/qasper"]) == 1
    printed = capsys.readouterr().err
    assert "HF_HUB_OFFLINE is set" in printed and "connect this machine to the network" in printed
    assert "kvbench.fetch" not in printed
    with pytest.raises(DataError, match=r"python -m kvbench\.fetch dataset="):
        data.find_records(SOURCE, "a", None, "dataset toy")


def test_wildcards_and_members(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "x.zip", "w") as archive:
        archive.writestr("a.txt", "abc")
    assert Found(tmp_path / "x.zip", "a.txt").content() == b"abc"
    assert Found(tmp_path / "x.zip", "a.txt").ending == ".txt"


def test_without_a_network_the_override_is_named_in_three_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")
    downloads: list[str] = []
    monkeypatch.setattr("huggingface_hub.hf_hub_download", lambda *a, **k: downloads.append("a retry loop of a minute"))
    with pytest.raises(DataError, match=r"(?s)kvbench/none.*dataset\.path="):
        data.find_records(SOURCE, "a", None, "dataset toy")
    assert not downloads
    assert asking.PROBE_SECONDS < 3


def test_damage_inside_a_file_is_named(tmp_path: Path) -> None:
    packed = bytearray(gzip.compress(LINES.encode()))
    packed[10] = 0xFF  # the first block of the deflate stream is of no known type
    (tmp_path / "a.jsonl.gz").write_bytes(packed)
    with pytest.raises(DataError, match="cannot be read"):
        data.read_records(Found(tmp_path / "a.jsonl.gz"))
    (tmp_path / "b.jsonl").write_bytes('{"text": "é"}'.encode("latin-1"))
    with pytest.raises(DataError, match="not UTF-8"):
        data.read_records(Found(tmp_path / "b.jsonl"))
    with pytest.raises(DataError, match="not UTF-8"):
        data.read_text(Found(tmp_path / "b.jsonl"))


def test_a_byte_order_mark_is_no_damage(tmp_path: Path) -> None:
    files = [tmp_path / "a.jsonl", tmp_path / "b.json", tmp_path / "c.txt"]
    for file, text in zip(files, (LINES, json.dumps(RECORDS), "text"), strict=True):
        file.write_text(text, encoding="utf-8-sig")
    assert data.read_records(data.Found(files[0])) == data.read_records(data.Found(files[1])) == RECORDS
    assert data.read_text(data.Found(files[2])) == "text"


def test_files_that_are_not_the_shards_of_one_split_are_refused(tmp_path: Path) -> None:
    for name in ("test-00000-of-00002.parquet", "test-b.parquet"):
        (tmp_path / name).touch()
    with pytest.raises(DataError, match=r"'test' matches 2 files of .* that are not the shards of one split"):
        data.find_records(SOURCE, "test", str(tmp_path), "dataset toy")


def test_the_command_line_says_it_before_a_model_is_loaded(tmp_path: Path) -> None:
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path)}
    root = Path(__file__).resolve().parents[2]
    environment["PYTHONPATH"] = os.pathsep.join([str(root), environment.get("PYTHONPATH", "")])
    command = [sys.executable, "-m", "kvbench", "dataset=longbench/qasper", f"runtime.results_dir={tmp_path}/runs"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=root, env=environment)
    assert done.returncode == 1
    assert "dataset.path=" in done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "runs").exists()


def test_fetch_of_what_is_here(capsys: pytest.CaptureFixture[str]) -> None:
    assert fetch.main(["dataset=mini", "model=tiny"]) == 0
    out = capsys.readouterr().out
    assert "its samples are generated; nothing to fetch" in out
    assert "model tiny: already on this machine" in out
    assert fetch.main(["dataset=nonsense"]) == 2
    assert "no such dataset" in capsys.readouterr().err


def test_fetch_without_anything_to_fetch_says_how(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, status in (([], 2), (["--help"], 0), (["dataset=mini", "-h"], 0)):
        assert fetch.main(arguments) == status
        assert "usage: python -m kvbench.fetch" in capsys.readouterr().out


def test_fetch_of_encoders_those_of_drafts_too(capsys: pytest.CaptureFixture[str]) -> None:
    draft = ["method=quantspec", "method.draft=cocktail"]
    for asked, said in (
        (["method=cocktail", "method.encoder=bm25"], "encoder bm25: nothing to fetch\n"),
        ([*draft, "method.draft_options={encoder:bm25}"], "encoder bm25: nothing to fetch\n"),
        (["method=quantspec"], ""),
        (["method=quantspec", "method.draft=kivi"], ""),
    ):
        assert fetch.main(asked) == 0
        assert capsys.readouterr().out == said
    assert fetch.encoders({"draft": "cocktail", "gamma": 4}) == ["contriever"]
    assert fetch.encoders({"draft": "cocktail", "gamma": 0}) == []
