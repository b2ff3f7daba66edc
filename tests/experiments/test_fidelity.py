"""The power table from made-up runs: a measure tells a pair apart where its paired interval excludes 0."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

from experiments.fidelity.fold import MEASURES, fold_fidelity
from experiments.measured import Stored, keep_measured_table
from experiments.place import Choice


def row(number: int, kld: float, at: int | None, score: float) -> dict[str, Any]:
    part = {
        "mode": "decode",
        "kld": [kld * (1 + number + k) for k in range(20)],
        "change": [0.0] * 20,
        "nll_base": [1.0] * 20,
        "nll": [1.0] * 20,
        "other_top": [] if at is None else [at],
        "left": {"at": at, "compared": 21, "gap": None},
    }
    return {"id": f"t/{number}", "scores": {"score": score}, "fidelity": part}


def runs(kld: float, wrong: int = 0, count: int = 12) -> Stored:
    """Prompts of which the first `wrong` are answered wrong, after 4 tokens of fp16's answer."""
    rows = {f"t/{k}": row(k, kld, 4 if k < wrong else None, float(k >= wrong)) for k in range(count)}
    return Stored({"fidelity": rows, "mini": rows})


def lines(path: Path) -> list[dict[str, str]]:
    with path.open(encoding="utf-8") as handle:
        return list(csv.DictReader(handle))


def test_only_divergences_tell_caches_apart_that_answer_alike(tmp_path) -> None:
    stored = {"fp16": runs(0.0), "kivi 4": runs(1e-4), "atom 4": runs(2e-4), "bad": runs(1.0, 9)}
    stored["short"] = runs(1.0, count=3)
    folded = fold_fidelity(stored, 12)
    folded.write(tmp_path)
    text = folded.text
    pairs = {(line["a"], line["b"]): line for line in lines(tmp_path / "pairs.csv")}
    apart = {names: [line[f"{name}_apart"] == "True" for name in MEASURES] for names, line in pairs.items()}
    assert apart["kivi 4", "atom 4"] == [True, True, True, False, False, False, False]
    assert apart["fp16", "bad"] == [True] * 7 and len(apart) == 6
    assert float(pairs["fp16", "bad"]["flips_diff"]) == 0.75 and float(pairs["fp16", "bad"]["score_diff"]) == -0.75
    assert "| two formats of 4 bits, of 1 | 1 | 1 | 1 | 0 | 0 | 0 | 0 |" in text
    assert "12 prompts, 240 decoded tokens" in text and "Left out, with fewer prompts: short" in text
    (bad,) = [line for line in lines(tmp_path / "settings.csv") if line["setting"] == "bad"]
    assert float(bad["never_left"]) == 0.25 and abs(float(bad["kept"]) - (0.25 + 0.75 * 4 / 21)) < 1e-5


def test_without_all_of_fp16s_samples_there_is_no_table(tmp_path) -> None:
    folded = fold_fidelity({"fp16": runs(0.0, count=3)}, 12)
    assert folded.text == "fp16 has 3 of 12 samples in both of its runs" and not folded.files
    assert (
        keep_measured_table(folded, tmp_path / "out", Choice(), lambda folder: None) == 1
        and not (tmp_path / "out").exists()
    )
