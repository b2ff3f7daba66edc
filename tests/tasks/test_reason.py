"""reason: pinned bytes, the same programs at all lengths, scores by the end, and what a wrong configuration says."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml

from kvbench.errors import ConfigError
from kvbench.tasks import load
from kvbench.tasks.reason import Reason


def test_bytes_are_pinned() -> None:
    """A change of these means a new `version`."""
    sample = next(Reason(lengths=(200,), lines=128, limit=1).samples())
    text = f"{sample.prompt}{sample.target}"
    assert hashlib.sha256(text.encode()).hexdigest()[:16] == "72cdc35f7a9f318e"
    (longer,) = Reason(lengths=(50,), limit=1).samples()
    assert hashlib.sha256(longer.prompt.encode()).hexdigest()[:16] == "d9bef5507d995c4d"
    assert sample.prompt.startswith("program\n") and sample.prompt.endswith("\ntrace")
    start, end = sample.context_span or (0, 0)
    assert sample.prompt[start:end].count("\n") == 129 and sample.prompt[end:].startswith(sample.query)


def test_lengths_ask_the_same_programs_and_limits_add_some() -> None:
    samples = list(Reason(lengths=(50, 400), lines=16, limit=3).samples())
    assert [sample.id for sample in samples[2:4]] == ["program@50/2", "program@400/0"]
    assert [len(sample.answers[0].split()) for sample in samples] == [50] * 3 + [400] * 3
    for short, long in zip(samples[:3], samples[3:], strict=True):
        assert short.prompt == long.prompt and long.answers[0].startswith(short.answers[0])
    more = list(Reason(lengths=(50,), lines=16, limit=5).samples())
    assert more[:3] == samples[:3] and len({sample.prompt for sample in more}) == 5
    assert next(Reason(lengths=(50,), lines=16, limit=1, seed=1).samples()).prompt != more[0].prompt


def test_the_score_is_that_of_the_last_step() -> None:
    task = Reason(lengths=(100,), lines=16, limit=1)
    (sample,) = task.samples()
    words = sample.answers[0].split()
    assert task.score(sample, sample.continuation) == {"score": 1.0, "words": 1.0}
    assert task.score(sample, " ".join(words[:-2])) == {"score": 0.0, "words": 0.98}
    other = [*words[:50], "x", *words[51:]]
    assert task.score(sample, " ".join(other)) == {"score": 1.0, "words": 0.5}
    assert task.score(sample, " ".join([*words[:-1], "x"]))["score"] == 0.0
    assert task.score(sample, "") == {"score": 0.0, "words": 0.0}


def test_the_preset_is_the_data_set_with_its_defaults() -> None:
    path = Path(__file__).parents[2] / "conf" / "dataset" / "reason.yaml"
    assert load(yaml.safe_load(path.read_text())) == Reason()


@pytest.mark.parametrize(
    ("options", "hint"),
    [
        ({"lengths": (51,)}, r"dataset\.lengths=\[52\]"),
        ({"lengths": (8000,), "lines": 64}, r"dataset\.lines=125"),
        ({"lengths": (50, 20000)}, r"dataset\.lengths=\[8192\]"),
        ({"lengths": ()}, "must not be empty"),
    ],
)
def test_wrong_lengths_are_refused(options: dict[str, object], hint: str) -> None:
    with pytest.raises(ConfigError, match=hint):
        replace(Reason(lines=128), **options).check()
    replace(Reason(), lengths=(8000,), lines=125).check()


def test_answers_must_fit_the_model() -> None:
    def fits(max_length: int) -> None:
        Reason(lengths=(8000,), lines=128).fits(
            SimpleNamespace(model=SimpleNamespace(max_length=max_length, random=False))
        )  # type: ignore[arg-type]

    fits(9030)
    with pytest.raises(ConfigError, match="at most 3066"):
        fits(4096)
