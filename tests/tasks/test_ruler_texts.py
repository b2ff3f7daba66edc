"""RULER's question files in a wrong layout: an error that names the file, not a traceback."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kvbench.errors import DataError
from kvbench.tasks.ruler import outside_texts

PARAGRAPH = {"context": "x y", "qas": [{"question": "q", "is_impossible": True, "answers": []}]}


@pytest.mark.parametrize(
    ("read", "content", "message"),
    [
        (
            outside_texts.squad,
            {"data": [{"paragraphs": [{"context": "x", "qas": [{"question": "q"}]}]}]},
            "is_impossible",
        ),
        (outside_texts.squad, {"data": 5}, "does not have the layout of SQuAD 2.0's dev split"),
        (outside_texts.squad, {"data": [{"paragraphs": [PARAGRAPH]}]}, "has no question that can be answered"),
        (outside_texts.hotpotqa, [{"question": "q", "answer": "a", "context": {"title": ["t"]}}], "sentences"),
        (
            outside_texts.hotpotqa,
            [{"question": "q", "answer": "a", "context": ["t"]}],
            "does not have the layout of HotpotQA",
        ),
    ],
)
def test_a_file_in_another_layout_is_refused_by_name(read: Any, content: Any, message: str, tmp_path: Path) -> None:
    file = tmp_path / "questions.json"
    file.write_text(json.dumps(content), encoding="utf-8")
    with pytest.raises(DataError, match=r"questions\.json") as refused:
        read(str(file), outside_texts.HubSource())
    assert message in str(refused.value)
