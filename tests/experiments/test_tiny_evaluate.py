"""The evaluation script on the bundled tokenizer and a random model, and the bundled model itself."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from experiments.tiny import evaluate
from kvbench.tasks.mini import Mini

TINY = Path(__file__).parents[2] / "kvbench" / "models" / "tiny"


@pytest.fixture(scope="module")
def tiny():
    return evaluate.load_checkpoint(TINY, torch.device("cpu"))


@pytest.mark.slow  # 5 s
def test_bundled_model_is_small_and_answers(tiny):
    assert sum(path.stat().st_size for path in TINY.iterdir()) <= 26e6
    model, tokenizer = tiny
    task = Mini()
    samples = [task.sample(name, 512, index) for name in ("needle", "key_value_hex") for index in range(4)]
    rows = [row for sample in samples for row in evaluate.rows_of(sample)]
    assert sum(right for right, _, _ in evaluate.forced(model, tokenizer, rows)) >= 7


@pytest.mark.slow  # 5 s
def test_teacher_forcing_agrees_with_greedy_decoding(tiny):
    model, tokenizer = tiny
    task = Mini()
    samples = [task.sample("multi_value", 512, index) for index in range(4)]
    forced = evaluate.forced(model, tokenizer, [row for s in samples for row in evaluate.rows_of(s)], tokens=1200)
    answers = evaluate.greedy(model, tokenizer, samples, size=3)
    assert [text.strip() == s.answers[0] for text, s in zip(answers, samples, strict=True)] == [r[0] for r in forced]


def test_several_questions_are_rows_of_one_context():
    sample = Mini().sample("several", 512, 0)
    rows = evaluate.rows_of(sample)
    assert len(rows) == 8
    assert rows[0][0] == sample.prompt
    assert all(prompt.startswith(sample.prompt[: sample.work.shared]) for prompt, _ in rows)


@pytest.mark.slow  # 6 s
def test_command_line(tmp_path, monkeypatch, capsys):
    out = tmp_path / "scores.json"
    monkeypatch.setattr(
        sys,
        "argv",
        [
            "evaluate",
            str(TINY),
            "--out",
            str(out),
            "--tasks",
            "passkey",
            "several",
            "--lengths",
            "512",
            "--limit",
            "1",
            "--workers",
            "1",
            "--device",
            "cpu",
        ],
    )
    evaluate.main()
    assert '"passkey@512"' in out.read_text()
    assert '"all"' in out.read_text()
