"""Windows of texts: where they begin and end, what stands first in them, and texts that cannot be had."""

from __future__ import annotations

import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvbench.errors import DataError
from kvbench.tasks.continuation import Continuation
from kvbench.tasks.perplexity import Perplexity


class Letters(SimpleNamespace):
    """A tokenizer of one token a character."""

    def __call__(self, text: str, **kwargs: Any) -> dict[str, Any]:
        return {"input_ids": [ord(c) for c in text], "offset_mapping": [(i, i + 1) for i in range(len(text))]}


@pytest.mark.parametrize(("bos", "first"), [(0, [0, 0]), (1, [1, 1]), (None, [97, 105])])
def test_bos_replaces_the_first_token_where_there_is_one(tmp_path: Path, bos: int | None, first: list[int]) -> None:
    (tmp_path / "a.txt").write_text("abcdefghijklmnop")
    task = Perplexity(text="text", path=str(tmp_path / "a.txt"), window=8, bos=True)
    task.bind(Letters(bos_token_id=bos))
    assert [sample.work.ids[0] for sample in task.samples()] == first


def test_only_the_first_window_of_a_document_is_scored_whole_wherever_it_begins(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("abcdefghijklmnopqrstuvwxyz")
    task = Perplexity(text="text", path=str(tmp_path / "a.txt"), window=8, stride=4, skip=3)
    task.bind(Letters(bos_token_id=None))
    windows = [sample.work for sample in task.samples()]
    assert [chr(window.ids[0]) for window in windows] == ["d", "h", "l", "p"]
    assert [window.first for window in windows] == [1, 4, 4, 4]


def refused(**settings: Any) -> str:
    """Return the message about a text that is unavailable, for both tasks that read texts."""
    messages = set()
    for task in (Perplexity(**settings), Continuation(**settings)):
        with pytest.raises(DataError) as caught:
            _ = task.documents
        messages.add(str(caught.value))
    (message,) = messages
    return message


@pytest.mark.parametrize("text", ["text", "pg19"])
def test_texts_that_cannot_be_had_are_named(tmp_path: Path, text: Any) -> None:
    assert "none does not exist" in refused(text=text, path=str(tmp_path / "none"))
    assert f"{tmp_path} contains no text.\n  hint: name a file, or a folder of .txt" in refused(
        text=text, path=str(tmp_path)
    )
    assert "/dev/zero is a device, not a regular file" in refused(text=text, path="/dev/zero")
    (tmp_path / "a.txt").write_text(" \n")
    (tmp_path / "b.txt").write_text("\n\n")
    assert f"{tmp_path} contains no text" in refused(text=text, path=str(tmp_path))
    (tmp_path / "b.txt").write_text("words")
    assert Perplexity(text=text, path=str(tmp_path)).documents == [" \n", "words"]
    os.mkfifo(tmp_path / "c.txt")
    assert "c.txt is a fifo, not a regular file" in refused(text=text, path=str(tmp_path))


def test_records_of_texts_are_checked(tmp_path: Path) -> None:
    path = tmp_path / "test.jsonl"
    for value, said in ((None, "field 'text' is null"), (["a"], "field 'text' is a list"), ("", "contains no text")):
        path.write_text(json.dumps({"text": value}))
        assert said in refused(text="pg19", path=str(path))
    path.write_text("")
    assert "contains no records" in refused(text="pg19", path=str(path))


def test_wikitext2_is_one_text_of_the_lines_and_never_one_of_two(tmp_path: Path) -> None:
    (tmp_path / "wiki.test.raw").write_text(" = A = \n \n words \n")
    whole = [" = A = \n\n\n\n\n words \n"]
    assert Perplexity(text="wikitext2", path=str(tmp_path)).documents == whole
    assert Perplexity(text="wikitext2", path=str(tmp_path / "wiki.test.raw")).documents == whole
    (tmp_path / "test.txt").write_text("words")
    for task in (Perplexity(text="wikitext2", path=str(tmp_path)),):
        with pytest.raises(
            DataError, match=r"contains several files that could be the text: wiki\.test\.raw, test\.txt\."
        ):
            _ = task.documents
    (tmp_path / "test.txt").write_text(" \n\n")
    with pytest.raises(DataError, match=r"test\.txt contains no text"):
        _ = Perplexity(text="wikitext2", path=str(tmp_path / "test.txt")).documents
