"""Parquet through the package `datasets`: the same records as every other form, shards, odd paths, its traps."""

from __future__ import annotations

import gzip
import json
import logging
import zipfile
from pathlib import Path
from typing import Any

import pyarrow
import pytest
from pyarrow import parquet

from kvbench.errors import DataError
from kvbench.tasks import data
from kvbench.tasks.data import Found, HubSource, read_records
from tests.hub.loopback import watched

#: texts of several scripts, lists that are empty, nested fields, and a column in which every value is null
RECORDS: list[dict[str, Any]] = [
    {
        "text": f"text {number} é 漢\u2028",
        "n": number,
        "x": number / 3,
        "answers": ["a", ""][: number % 3],
        "question": {"stem": "s", "choices": [{"label": "A", "text": None}]},
        "all_classes": None,
        "flag": bool(number % 2),
    }
    for number in range(40)
]
SOURCE = HubSource(hub_id="kvbench/none", revision="0" * 40, file="data/{task}-*.parquet")


def write(path: Path, records: list[dict[str, Any]], **options: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    parquet.write_table(pyarrow.Table.from_pylist(records), path, **options)
    return path


def test_datasets_and_the_checked_reader_give_the_same_records(tmp_path: Path) -> None:
    lines = "\n".join(map(json.dumps, RECORDS))
    (tmp_path / "a.jsonl").write_text(lines)
    (tmp_path / "b.json").write_text(json.dumps(RECORDS))
    (tmp_path / "c.jsonl.gz").write_bytes(gzip.compress(lines.encode()))
    with zipfile.ZipFile(tmp_path / "d.zip", "w") as archive:
        archive.writestr("d.jsonl", lines)
        archive.write(write(tmp_path / "e.parquet", RECORDS, row_group_size=7), "e.parquet")
    (tmp_path / "e.parquet.gz").write_bytes(gzip.compress((tmp_path / "e.parquet").read_bytes()))
    checked = read_records(Found(tmp_path / "a.jsonl"))
    assert checked == RECORDS
    others = [Found(tmp_path / name) for name in ("b.json", "c.jsonl.gz", "e.parquet", "e.parquet.gz")]
    for found in (*others, Found(tmp_path / "d.zip", "d.jsonl"), Found(tmp_path / "d.zip", "e.parquet")):
        assert read_records(found) == checked, found
        assert data.records_fingerprint(read_records(found), tuple(RECORDS[0])) == data.records_fingerprint(
            checked, tuple(RECORDS[0])
        )


def test_shards_are_one_split_in_order(tmp_path: Path) -> None:
    folder = tmp_path / "odd [1]*name"  # characters of patterns, which `datasets` would expand
    for shard in range(3):
        write(folder / f"test-0000{shard}-of-00003.parquet", RECORDS[shard * 10 : shard * 10 + 10])
    file = data.find_records(SOURCE, "test", str(folder), "toy")
    assert read_records(file) == RECORDS[:30]
    assert str(file) == f"{folder}/test-00000-of-00003.parquet and 2 more"
    (folder / "test-00001-of-00003.parquet").unlink()
    with pytest.raises(DataError, match=r"toy: 'test' lacks test-00001-of-00003\.parquet, one of its 3 shards in"):
        data.find_records(SOURCE, "test", str(folder), "toy")
    write(folder / "test-00001-of-00003.parquet", [{"other": 1}])
    with pytest.raises(DataError, match="cannot be read"):
        read_records(data.find_records(SOURCE, "test", str(folder), "toy"))


def test_a_type_without_an_equivalent_is_refused_by_name(tmp_path: Path) -> None:
    column = pyarrow.array([[("k", 1)]], pyarrow.map_(pyarrow.string(), pyarrow.int32()))
    parquet.write_table(pyarrow.table({"m": column}), tmp_path / "a.parquet")
    with pytest.raises(DataError, match=r"a\.parquet cannot be read: Arrow type map<string, int32 \('m'\)>"):
        read_records(Found(tmp_path / "a.parquet"))


def test_reading_leaves_nothing_behind_and_logs_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from datasets.utils import logging as library

    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    level = library.get_verbosity()
    assert len(read_records(Found(write(tmp_path / "a.parquet", RECORDS)))) == 40
    (tmp_path / "b.parquet").write_bytes(b"PAR1 and no more")
    with pytest.raises(DataError, match=r"b\.parquet cannot be read: "):
        read_records(Found(tmp_path / "b.parquet"))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.parquet", "b.parquet"]
    assert capsys.readouterr().err == "" and library.get_verbosity() == level != logging.CRITICAL


def test_no_other_machine_learns_what_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("datasets.config.HF_UPDATE_DOWNLOAD_COUNTS", True)
    path = tmp_path / "a.parquet"
    parquet.write_table(pyarrow.Table.from_pylist([{"a": 1}]), path)
    with watched() as strangers:
        assert list(read_records(Found(path))) == [{"a": 1}]
    assert strangers == []
