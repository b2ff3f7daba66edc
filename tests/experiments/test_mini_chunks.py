"""What counts as found by the chunk search."""

from __future__ import annotations

import pytest

from experiments.mini import chunks
from kvbench.retrieval.chunks import Chunked, Widths
from kvbench.tasks.base import Sample
from kvbench.tasks.mini import Mini

PROMPT = "aa keyed: 12\nbb zz"


def sample(key: str, answer: str) -> Sample:
    start = PROMPT.index(answer)
    return Sample(
        id="key_value@4096/0",
        task="key_value",
        prompt=PROMPT,
        query=f"What is the value of the key {key}?",
        answers=(answer,),
        max_new_tokens=1,
        meta={"answer_spans": [[start, start + len(answer)]]},
    )


@pytest.mark.parametrize(
    ("bits", "figures"),
    [
        ((16, 2, 2), {"key": 1.0, "whole key": 0.0, "answer": 0.0, "cut": 1.0}),
        ((2, 4, 2), {"key": 1.0, "whole key": 0.0, "answer": 1.0, "cut": 1.0}),
        ((4, 4, 2), {"key": 1.0, "whole key": 1.0, "answer": 1.0, "cut": 1.0}),
        ((2, 2, 16), {"key": 0.0, "whole key": 0.0, "answer": 0.0, "cut": 1.0}),
    ],
)
def test_a_key_on_a_border_counts_in_two_ways(bits, figures):
    """One token a character, chunks of six from the first: "aa key", "ed: 12", and so on."""
    offsets = [(i, i + 1) for i in range(len(PROMPT))]
    computed = chunks.judge(sample("keyed", "12"), offsets, Chunked(0, 6, ("", "", ""), "", ""), Widths(bits, 0.0, 0.0))
    assert {name: computed[name] for name in figures} == figures
    assert sum(computed[width] for width in ("2", "4", "16")) == pytest.approx(1.0)


def test_the_remainder_is_exact():
    offsets = [(i, i + 1) for i in range(len(PROMPT))]
    computed = chunks.judge(sample("bb", "zz"), offsets, Chunked(0, 6, ("", ""), "", ""), Widths((2, 2), 0.0, 0.0))
    assert (computed["key"], computed["answer"], computed["cut"]) == (1.0, 1.0, 0.0)


@pytest.mark.parametrize("task", chunks.KEYS)
def test_the_key_is_found_in_every_tasks_question(task):
    for made in Mini(tasks=(task,), lengths=(1024,), limit=3).samples():
        pairs = chunks.places(made)
        assert len(pairs) == (3 if task == "multi_value" else 1)
        for (start, stop), (begin, _) in pairs:
            assert made.prompt[start:stop] in made.query
            assert start < stop <= begin


def test_bm25_finds_what_is_asked_for(tmp_path, monkeypatch, capsys):
    pytest.importorskip("bm25s")
    arguments = ["chunks", "--limit", "4", "--length", "1024", "--tasks", "key_value_hex", "--out", str(tmp_path / "a")]
    monkeypatch.setattr("sys.argv", arguments)
    assert chunks.main() == 0
    assert "| key_value_hex | whole words | 1.000" in capsys.readouterr().out
    assert "n = 4" in (tmp_path / "a").read_text()
