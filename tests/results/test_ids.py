"""The ids of runs as they were at c91ff693: stored results of that code are found, reported and continued."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kvbench.cli.compose import Composer
from kvbench.results import environment
from kvbench.results.identity import run_id
from kvbench.runner.resolve import material

#: what is typed after ``python -m kvbench``, but for :data:`BASE` -> id
IDS = json.loads((Path(__file__).parent / "ids_at_c91ff693.json").read_text(encoding="utf-8"))
BASE = ["model=tiny", "dataset=mini", "dataset.limit=2", "runtime.device=cpu", "logger=none"]


@pytest.fixture(scope="module")
def composer() -> Composer:
    return Composer()


@pytest.mark.parametrize("typed", IDS)
def test_a_run_keeps_its_id(composer: Composer, typed: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment, "cpu_name", lambda: "AMD EPYC")  # the ids of times name the device
    own = typed.split()
    left_out = {text.partition("=")[0] for text in own}
    if "dataset" in left_out:
        left_out.add("dataset.limit")
    if "experiment" in left_out:
        left_out |= {"model", "dataset", "dataset.limit"}
    texts = [*(text for text in BASE if text.partition("=")[0] not in left_out), *own]
    (job,) = composer.check(texts)
    assert run_id(material(composer.configuration(job))) == IDS[typed]
