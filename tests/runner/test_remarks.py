"""The text after a progress bar."""

from __future__ import annotations

from typing import Any

import pytest

from kvbench.runner.remarks import note


@pytest.mark.parametrize(
    ("row", "text"),
    [
        ({"scores": {"score": 0.5}}, "a/0 0.50"),
        ({"scores": {"score": 0.5}, "status": "ok"}, "a/0 0.50"),
        ({"scores": {"score": 0.0}, "status": "ok"}, "a/0 0.00"),
        ({"scores": {}, "status": "oom"}, "a/0 oom"),
        ({"scores": {"score": None}}, "a/0 -"),
        ({"scores": {"other": 1.0}}, "a/0 -"),
    ],
)
def test_a_note_has_the_score_or_the_status(row: dict[str, Any], text: str) -> None:
    assert note({"id": "a/0", **row}) == text
