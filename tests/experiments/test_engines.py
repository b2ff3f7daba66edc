"""The table of an engine beside kvbench: what is compared with what, and greedy texts of both sides."""

from __future__ import annotations

import json
from typing import Any

import pytest

from experiments.engines import (
    ENGINE,
    FLOOR,
    OWN,
    SCORED,
    TEXT,
    Line,
    fold_engines,
    lines,
    parse_engine_options,
    run_of_line,
)
from kvbench.results.samples import MEASURED


def row(tokens: list[int], score: float | None = None, *, engine: bool = False, first: float = -0.1) -> dict[str, Any]:
    measured: dict[str, Any] = {"device": "x", "ttft_s": 0.5, "step_s": [0.1, 0.1], "batch_rows": 1, "decoded": 2}
    if engine:
        measured["endpoint"] = {"engine": "llamacpp", "version": "1", "cache": {"proof": "proven"}}
    tops = {"top_logprobs": [[[token, first], [token + 1, first - 0.03]] for token in tokens]} if engine else {}
    bill = {"used": {"total": 2**20}}
    return {"tokens": tokens, "scores": {"score": score}, "kv_bytes": bill, MEASURED: measured, **tops}


def found() -> dict[tuple[Line, str], Any]:
    texts = {f"t/{number}": [number, 2, 3] for number in range(4)}
    both: dict[tuple[Line, str], Any] = {}
    for line in lines(["q8_0"]):
        engine = line.side == ENGINE
        moved = {**texts, "t/0": [0, 9, 3]} if line.form != "fp16" or line.side == OWN else texts
        first = -0.1 if line.form == "fp16" else -0.3
        both[line, TEXT] = {name: {"id": name, **row(ids, engine=engine, first=first)} for name, ids in moved.items()}
        scores = (1.0, 0.0, 1.0) if line.form == "fp16" else (1.0, 1.0, 0.0)
        both[line, SCORED] = {f"s/{n}": {"id": f"s/{n}", **row([1], score)} for n, score in enumerate(scores)}
    return both


def test_the_table() -> None:
    folded = fold_engines(found(), ["q8_0"])
    figures = json.loads(folded.files["figures.json"])
    assert folded.counts == dict.fromkeys(figures["lines"], 4)
    q8 = figures["lines"]["engine q8_0"]
    assert (q8["equal"], q8["compared"], q8["flips"], q8["delta"], q8["proof"]) == (
        3,
        4,
        pytest.approx(2 / 3),
        0.0,
        "proven",
    )
    # texts of three tokens, of which one ends at its second
    assert q8["kl_bound"]["positions"] == 3 * 3 + 2
    assert q8["kl_bound"]["mean"] > 0
    assert figures["lines"]["kvbench q8_0"]["kl_bound"] is None
    parity = figures["parity"]["engine fp16"]
    assert [part["at"] for part in parity] == [1, None, None, None]
    assert parity[0]["gap"] == pytest.approx(0.03)
    assert "engine fp16: 3 of 4 are kvbench's with fp16; 1 of the other 1 differ first at a near-tie" in folded.text
    assert fold_engines({}, ["q8_0"]).text == "There are no runs yet."


def test_the_runs_of_a_line() -> None:
    given = parse_engine_options(["--serve", "llamacpp", "--served", "f.gguf", "--limit", "5", "--others", "2"])
    engine = run_of_line(Line(ENGINE, "q8_0"), TEXT, given).command
    assert "model=endpoint model.preset=smollm2-135m-q4_1 model.serve=llamacpp model.served=f.gguf" in engine
    assert "method=engine method.format=q8_0 dataset=mini_text" in engine
    assert "dataset.limit=2" in engine
    own = run_of_line(Line(OWN, "fp16"), SCORED, given).command
    assert "model=smollm2-135m-q4_1 model.dtype=float16" in own
    assert "method=fp16 dataset=mini " in own
    floor = FLOOR
    assert (floor.name, floor.baseline) == ("engine fp16 concurrency=1", Line(ENGINE, "fp16"))
    assert "model.concurrency=1 method=fp16" in run_of_line(floor, TEXT, given).command
