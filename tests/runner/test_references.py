"""Stored predictions of fp16: what comes back, what is stale, and what cannot be read or written."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from kvbench.errors import NonFiniteError
from kvbench.results.samples import DiskError
from kvbench.runner.references import Reference, References

MADE = Reference(np.arange(3, dtype=np.int64), np.full((2, 4), 0.5, dtype=np.float16), 5, {"path": "exact"})


def shelf(folder: Path, said: list[str] | None = None, **stamp: object) -> References:
    return References(folder, {"model": "a", **stamp}, (said if said is not None else []).append)


def test_what_is_stored_comes_back(tmp_path: Path) -> None:
    said: list[str] = []
    references = shelf(tmp_path / "new", said)
    assert references.read("a/1", "digest") is None, "nothing is stored yet"
    references.write("a/1", "digest", MADE)
    back = references.read("a/1", "digest")
    assert back is not None and said == []
    assert back.tokens.tolist() == [0, 1, 2] and back.states.tolist() == MADE.states.tolist()
    assert (back.tokens.dtype, back.states.dtype) == (np.int64, np.float16)
    assert (back.batch_rows, back.how) == (5, {"path": "exact"})
    assert references.read("a/2", "digest") is None


def test_names_of_files_are_plain_short_and_unique(tmp_path: Path) -> None:
    references = shelf(tmp_path)
    names = ["a/1", "a 1", "a_1", "x" * 80 + "1", "x" * 80 + "2", "task@512/3.b-c"]
    paths = [references.path(name) for name in names]
    assert len(set(paths)) == len(names) and {path.parent for path in paths} == {tmp_path}
    assert [path.name.rsplit("-", 1)[0] for path in paths[:3]] == ["a_1"] * 3
    assert {path.name.rsplit("-", 1)[0] for path in paths[3:5]} == {"x" * 80}
    assert paths[5].name.startswith("task@512_3.b-c-") and len(paths[5].stem.rsplit("-", 1)[1]) == 8


def test_predictions_of_another_setting_or_prompt_are_stale_and_it_is_said_once(tmp_path: Path) -> None:
    shelf(tmp_path).write("a/1", "digest", MADE)
    shelf(tmp_path).write("a/2", "digest", MADE)
    said: list[str] = []
    other = shelf(tmp_path, said, model="b")
    assert other.read("a/1", "digest") is None and other.read("a/2", "digest") is None
    assert len(said) == 1 and "making them again" in said[0] and str(tmp_path) in said[0]
    assert shelf(tmp_path, said).read("a/1", "another") is None and len(said) == 2
    assert shelf(tmp_path, said, more=1).read("a/1", "digest") is None and len(said) == 3


def test_a_damaged_file_is_named_and_made_again(tmp_path: Path) -> None:
    said: list[str] = []
    references = shelf(tmp_path, said)
    references.write("a/1", "digest", MADE)
    path = references.path("a/1")
    whole = path.read_bytes()
    for content in (b"", whole[:20], whole[:-1] + bytes([whole[-1] ^ 1])):
        path.write_bytes(content)
        assert references.read("a/1", "digest") is None
    assert len(said) == 1 and str(path) in said[0] and "damaged" in said[0], "each message is shown once"


def test_a_file_or_a_folder_that_cannot_be_used_is_an_error_of_the_disk(tmp_path: Path) -> None:
    references = shelf(tmp_path)
    references.path("a/1").mkdir()
    with pytest.raises(DiskError):
        references.read("a/1", "digest")
    (tmp_path / "file").touch()
    with pytest.raises(DiskError):
        shelf(tmp_path / "file").write("a/1", "digest", MADE)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_states_beyond_fp16_are_not_stored(tmp_path: Path, value: float) -> None:
    states = MADE.states.copy()
    states[1, 2] = value
    references = shelf(tmp_path)
    with pytest.raises(NonFiniteError, match=r"(?s)a/1.*dataset\.reference=live"):
        references.write("a/1", "digest", Reference(MADE.tokens, states, 1, {}))
    assert not references.path("a/1").exists()
