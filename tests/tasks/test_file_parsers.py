"""Data files: their formats, damage of every kind, and limits on unpacked sizes and on the length of a line."""

from __future__ import annotations

import gzip
import io
import json
import os
import tracemalloc
import warnings
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow
import pytest
from pyarrow import parquet

from kvbench.errors import ConfigError, DataError
from kvbench.tasks.file_parsers import read_json, read_records, read_text
from kvbench.tasks.files import DEFAULT_MB, MAX_FILE, MAX_LINE, Found, limit
from kvbench.tasks.records import TEXT

MIB = 1 << 20


def said(found: Found | Path, read: Callable[[Found], Any] = read_records) -> str:
    """The message with which reading is refused."""
    with pytest.raises(DataError) as caught:
        read(found if isinstance(found, Found) else Found(found))
    return str(caught.value)


def zipped(path: Path, **members: bytes) -> Path:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in members.items():
            archive.writestr(name, content)
    return path


# -- limits ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(MAX_FILE, "1")


def bombs(folder: Path) -> list[tuple[Found, Callable[[Found], Any]]]:
    """Files that unpack to 8 MiB, in every form; a parquet file says it by one page that all rows point to."""
    lines, texts = (b'{"a": 1}' + b" " * 991 + b"\n") * (8 * MIB // 1000), b"words " * (8 * MIB // 6)
    (folder / "a.jsonl.gz").write_bytes(gzip.compress(lines))
    (folder / "b.json.gz").write_bytes(gzip.compress(b"[" + b"1," * (4 * MIB) + b"1]"))
    (folder / "c.txt.gz").write_bytes(gzip.compress(texts))
    with (folder / "d.jsonl").open("wb") as sparse:
        sparse.truncate(8 * MIB)
    column = pyarrow.DictionaryArray.from_arrays(
        pyarrow.array([0] * 128, pyarrow.int32()), pyarrow.array(["x" * 65536])
    )
    parquet.write_table(pyarrow.table({"text": column}), folder / "e.parquet")
    return [
        (Found(folder / "a.jsonl.gz"), read_records),
        (Found(folder / "b.json.gz"), read_records),
        (Found(folder / "b.json.gz"), read_json),
        (Found(folder / "c.txt.gz"), read_text),
        (Found(folder / "d.jsonl"), read_records),
        (Found(folder / "d.jsonl"), read_text),
        (Found(zipped(folder / "f.zip", lines=lines), "lines"), read_records),
        (Found(zipped(folder / "g.zip", text=texts), "text"), read_text),
        (Found(folder / "e.parquet"), lambda found: read_records(found, {"text": TEXT})),
    ]


def test_what_unpacks_to_more_than_the_limit_is_refused_before_it_is_in_memory(tmp_path: Path, small: None) -> None:
    parquet.write_table(pyarrow.table({"text": ["x"]}), tmp_path / "z.parquet")
    read_records(Found(tmp_path / "z.parquet"))  # imports `datasets`, whose memory is not what is measured
    for found, read in bombs(tmp_path):
        tracemalloc.start()
        message = said(found, read)
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert str(found) in message and "exceeds the limit of 1 MiB after unpacking and parsing" in message, found
        assert "set KVBENCH_MAX_FILE_MB=4 in the environment" in message
        assert peak < 6 * MIB, found


def test_a_limit_can_be_raised(tmp_path: Path, small: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(MAX_FILE, "100")
    for found, read in bombs(tmp_path):
        if found.path.name in ("c.txt.gz", "e.parquet", "f.zip", "g.zip"):  # the others are no records
            assert read(found), found
    (tmp_path / "exact.txt").write_bytes(b"x" * MIB)
    (tmp_path / "more.txt").write_bytes(b"x" * (MIB + 1))
    monkeypatch.setenv(MAX_FILE, "1")
    assert len(read_text(Found(tmp_path / "exact.txt"))) == MIB
    assert "exceeds the limit of 1 MiB" in said(tmp_path / "more.txt", read_text)


def test_a_line_without_end_is_refused_with_its_number(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(MAX_LINE, "2")
    short, path = json.dumps({"text": "x" * MIB}), tmp_path / "a.jsonl"
    path.write_text(f"{short}\n{short}\n" + json.dumps({"text": "x" * 2 * MIB}))
    message = said(path)
    assert "a.jsonl line 3: the line exceeds the limit of 2 MiB" in message and "set KVBENCH_MAX_LINE_MB=8 " in message
    path.write_text(f"{short}\n{short}\n{short}")  # lines across the pieces that are read
    assert [record["text"] for record in read_records(Found(path))] == ["x" * MIB] * 3
    line = json.dumps({"text": "x" * (2 * MIB - len(json.dumps({"text": ""})))})
    assert len(line) == 2 * MIB
    path.write_text(line)
    assert len(read_records(Found(path))) == 1


@pytest.mark.parametrize("value", ["0", "-1", "many", "1.5", "²"])
def test_a_limit_that_is_no_number_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    (tmp_path / "a.jsonl").write_text("{}")
    monkeypatch.setenv(MAX_FILE, value)
    with pytest.raises(ConfigError, match=r"KVBENCH_MAX_FILE_MB=.*is not a valid size in MiB"):
        read_records(Found(tmp_path / "a.jsonl"))


def test_many_small_values_count_more_than_their_bytes(tmp_path: Path, small: None) -> None:
    """A record of 3 bytes takes hundreds, a value of 2 bytes dozens."""
    cases = {"a.jsonl": (b"{}\n", 2048), "b.json": (b",1", 32768)}
    for name, (value, most) in cases.items():
        for count in (most, most + 1):
            content = value * count if name == "a.jsonl" else b"[1" + value * (count - 1) + b"]"
            (tmp_path / name).write_bytes(content)
            if count > most:
                assert "exceeds the limit of 1 MiB after unpacking and parsing" in said(tmp_path / name)
            elif name == "a.jsonl":
                assert len(read_records(Found(tmp_path / name))) == most
            else:
                assert read_json(Found(tmp_path / name)) == [1] * most
                assert "record 0: expected a JSON object" in said(tmp_path / name)
    (tmp_path / "d.jsonl").write_text("\n" * 2049 + "{}")
    assert "exceeds the limit of 1 MiB after unpacking and parsing" in said(tmp_path / "d.jsonl")
    (tmp_path / "c.jsonl").write_text('{"text": "a", "more": [[], []]}')
    assert read_records(Found(tmp_path / "c.jsonl"), {"text": TEXT}) == [{"text": "a"}]
    assert read_records(Found(tmp_path / "c.jsonl"), ("text",)) == [{"text": "a", "more": [[], []]}]


def test_limits_let_the_largest_known_file_through() -> None:
    """Multi-LexSum's documents, 1.5 GB."""
    assert {name: limit(name) for name in DEFAULT_MB} == {MAX_FILE: 2048 * MIB, MAX_LINE: 64 * MIB}


# -- forms and damage ------------------------------------------------------------------------------------------------


def test_lines_may_end_in_any_way_and_be_blank(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"n": 1}\r\n\n  \n{"n": "\xc2\x85\xe2\x80\xa8"}\n\n{"n": 3}')
    assert [record["n"] for record in read_records(Found(path))] == [1, "\x85\u2028", 3]
    path.write_bytes(b'{"n": 1}\n\n{"n":\n')
    assert "a.jsonl line 3: is not valid JSON" in said(path)
    path.write_bytes(b'{"n": 1}\n{"n": [2, {"m": NaN}]}\n')
    assert "a.jsonl line 2: field 'n.1.m' is NaN, which is no value of JSON" in said(path)
    path.write_bytes(b'{"n": 1}\n\n{"n": "\xff"}\n')
    assert "a.jsonl line 3 is not UTF-8" in said(path)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.jsonl", b""),
        ("a.jsonl", b"\n \n\r\n"),
        ("a.json", b"[]"),
        ("a.json", b"\xef\xbb\xbf [ ] "),
        ("a.jsonl.gz", gzip.compress(b"", mtime=0)),
        ("a.jsonl.gz", b""),
    ],
)
def test_a_file_without_records_is_refused(tmp_path: Path, name: str, content: bytes) -> None:
    (tmp_path / name).write_bytes(content)
    assert f"{name} contains no records" in said(tmp_path / name)


def test_parquet_without_rows_is_refused(tmp_path: Path) -> None:
    parquet.write_table(pyarrow.table({"text": pyarrow.array([], pyarrow.string())}), tmp_path / "a.parquet")
    assert "a.parquet contains no records" in said(tmp_path / "a.parquet")


def test_parquet_pages_with_checksums_are_checked(tmp_path: Path) -> None:
    table = pyarrow.table({"text": [f"words {number}" for number in range(99)]})
    plain: dict[str, Any] = {"compression": "none", "use_dictionary": False, "write_statistics": False}
    parquet.write_table(table, tmp_path / "a.parquet", write_page_checksum=True, **plain)
    content = (tmp_path / "a.parquet").read_bytes()
    (tmp_path / "a.parquet").write_bytes(content.replace(b"words 50", b"words 51", 1))
    assert "a.parquet cannot be read" in said(tmp_path / "a.parquet")


def test_nesting_without_end_is_refused(tmp_path: Path) -> None:
    for name, content in (
        ("a.jsonl", '{"n": 1}\n' + "[" * 200_000),
        ("b.json", "[" * 200_000),
        ("c.json", "[[" * 99999),
    ):
        (tmp_path / name).write_text(content)
        assert "nested too deeply" in said(tmp_path / name)
    assert "a.jsonl line 2: " in said(tmp_path / "a.jsonl")
    assert "nested too deeply" in said(tmp_path / "b.json", read_json)


def test_records_that_are_no_objects_are_refused(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"n": 1}\n[2]')
    assert "a.jsonl line 2: expected a JSON object, not list" in said(tmp_path / "a.jsonl")
    (tmp_path / "b.json").write_text('[{"n": 1}, "x"]')
    assert "b.json record 1: expected a JSON object, not str" in said(tmp_path / "b.json")


def test_text_with_nul_is_damage(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"words\0\0\0")
    assert "a.txt is not a text file: character 5 is NUL" in said(tmp_path / "a.txt", read_text)


def test_members_of_one_name_are_refused(tmp_path: Path) -> None:
    with warnings.catch_warnings(), zipfile.ZipFile(tmp_path / "a.zip", "w") as archive:
        warnings.simplefilter("ignore")
        archive.writestr("a.jsonl", '{"n": 1}')
        archive.writestr("a.jsonl", '{"n": 2}')
    assert "several members named a.jsonl" in said(Found(tmp_path / "a.zip", "a.jsonl"))


def test_an_archive_whose_members_lie_is_damage(tmp_path: Path) -> None:
    path = zipped(tmp_path / "a.zip", **{"a.jsonl": b'{"n": 1}\n' * 100})
    content = path.read_bytes()
    path.write_bytes(content.replace(b"a.jsonl", b"b.jsonl", 1))  # the header and the directory differ
    assert "cannot be read" in said(Found(path, "a.jsonl"))
    path.write_bytes(content)
    assert "cannot be read" in said(Found(path, "c.jsonl"))


def test_cut_and_changed_files_are_refused(tmp_path: Path) -> None:
    """Every form, cut at each eighth, and with bytes changed in its middle."""
    rows = [{"text": f"text {number} " * 9} for number in range(200)]
    lines = "\n".join(map(json.dumps, rows)).encode()
    buffer = io.BytesIO()
    parquet.write_table(pyarrow.Table.from_pylist(rows), buffer)
    forms = {
        "a.jsonl.gz": gzip.compress(lines),
        "a.json": json.dumps(rows).encode(),
        "a.parquet": buffer.getvalue(),
        "a.zip": zipped(tmp_path / "a.zip", a=lines).read_bytes(),
    }
    for name, content in forms.items():
        computed = Found(tmp_path / name, "a" if name == "a.zip" else None)
        for eighth in range(8):
            computed.path.write_bytes(content[: len(content) * eighth // 8])
            assert name in said(computed)
        middle = len(content) // 2
        computed.path.write_bytes(
            content[:middle] + bytes(byte ^ 0xFF for byte in content[middle : middle + 60]) + content[middle + 60 :]
        )
        assert name in said(computed)


def test_what_is_no_file_is_named(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "a.jsonl")
    assert "a.jsonl is a fifo, not a regular file" in said(tmp_path / "a.jsonl")
    assert "/dev/zero is a device, not a regular file" in said(Path("/dev/zero"), read_text)
    assert "is not a file" in said(tmp_path)
    assert "is not a file" in said(tmp_path / "none")
    assert "cannot be read: File name too long" in said(tmp_path / ("x" * 300))
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    assert "cannot be read" in said(tmp_path / "loop")
