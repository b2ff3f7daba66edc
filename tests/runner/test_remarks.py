"""The text after a progress bar, excerpts of a sample, and the note on a method without effect."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from kvbench.runner.remarks import note, shown_excerpts, untouched
from kvbench.tasks.base import Sample


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


class Keeps:
    """A method that keeps 10 tokens exactly, those of the prompt alone or those of the answer too."""

    def __init__(self, of_prompt: bool = False, known: bool = True) -> None:
        self.value = SimpleNamespace(key="residual", value=8, tokens=10, of_prompt=of_prompt) if known else None

    def reach(self) -> Any:
        return self.value


@pytest.mark.parametrize(
    ("of_prompt", "rows", "longest"),
    [
        (False, [{"prompt_tokens": 6, "tokens": [1, 2, 3, 4, 5]}], 10),  # the last one is never cached
        (False, [{"prompt_tokens": 6, "tokens": [1, 2, 3, 4, 5, 6]}], None),
        (True, [{"prompt_tokens": 10, "tokens": [1, 2, 3]}], 10),
        (True, [{"prompt_tokens": 11, "tokens": [1]}], None),
        (False, [{"prompt_tokens": 11, "window": {}}], 10),  # the last token of a span is never cached
        (False, [{"prompt_tokens": 12, "window": {}}], None),
        (False, [{"prompt_tokens": 4}, {"prompt_tokens": 7, "tokens": None}, {"prompt_tokens": None}], 7),
        (False, [{"prompt_tokens": 4}, {"prompt_tokens": 11}], None),
        (False, [{"prompt_tokens": 8, "fidelity": {"kld": [0.1, 0.2], "mode": "decode"}}], 10),
        (False, [{"prompt_tokens": 8, "fidelity": {"kld": [0.1, 0.2, 0.3], "mode": "decode"}}], None),
        (False, [{"prompt_tokens": 8, "fidelity": {"kld": [0.1, 0.2, 0.3], "mode": "simulate"}}], 8),
        (False, [{}], None),
        (False, [], None),
    ],
)
def test_a_method_that_keeps_every_token_of_every_sample_is_noted(
    of_prompt: bool, rows: list[dict[str, Any]], longest: int | None
) -> None:
    told = {"key": "residual", "value": 8, "exact": 10, "longest": longest}
    assert untouched(Keeps(of_prompt), rows) == (None if longest is None else told)  # type: ignore[arg-type]
    assert untouched(Keeps(known=False), rows) is None  # type: ignore[arg-type]


@pytest.mark.parametrize("count", [0, 1, 239, 240, 241, 479, 480, 481])
def test_loggers_show_both_ends_of_a_prompt_once(count: int) -> None:
    prompt = "".join(chr(ord("a") + index % 26) for index in range(count))
    parts = shown_excerpts(Sample(id="a", task="a", prompt=prompt, answers=("one", "two"), max_new_tokens=1))
    head, tail = parts["prompt_head"], parts["prompt_tail"]
    assert (len(head), len(tail)) == (min(count, 240), min(max(count - 240, 0), 240))
    assert prompt.startswith(head) and prompt.endswith(tail) and parts["reference"] == "one"
    assert shown_excerpts(Sample(id="a", task="a", prompt=prompt, answers=(), max_new_tokens=1))["reference"] == ""
