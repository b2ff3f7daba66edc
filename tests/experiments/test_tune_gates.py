"""Outcomes of searches as a page, and as recipes."""

from __future__ import annotations

import json

from experiments.stored import ROOT
from experiments.tune import FOLDER, OURS, gates_page, recipe_of, verdicts
from kvbench.page.shared import RECIPES
from kvbench.tune.exports import forms_in
from kvbench.tune.space import layer_map


def outcome(search: str, kl: list[float], layers: str = "0-1:q8_0,2:q8_0/iq4_nl") -> dict:
    return {
        "model": "m", "budget": 5.4, "search": search, "evaluations": 3, "stopped": 0, "machine": "a card",
        "bits": 5.25, "search_kl": 0.1, "kl": kl, "p99": 0.5, "layers": layers,
    }  # fmt: skip


def test_verdicts_are_paired_with_the_best_baseline_on_held_out_windows() -> None:
    ours, near, far = outcome(OURS, [0.1, 0.3, 0.2]), outcome("ends", [0.2, 0.4, 0.31]), outcome("random", [9, 9, 9])
    (row,) = verdicts([ours, far, near])
    assert (row["baseline"], round(row["difference"], 4)) == ("ends", -0.1033)
    assert "| better |" in gates_page([ours, near, far])
    assert "| worse |" in gates_page([near | {"search": OURS}, ours | {"search": "ends"}])
    assert "| not decided |" in gates_page([ours, outcome("ends", [0.3, 0.1, 0.21])])
    assert "| equal |" in gates_page([ours, ours | {"search": "ends"}])


def test_recipes_name_each_layer() -> None:
    record = recipe_of(outcome(OURS, [0.1, 0.3]))
    assert record["layers"] == [{"keys": "q8_0", "values": "q8_0"}] * 2 + [{"keys": "q8_0", "values": "iq4_nl"}]
    assert record["kl"] == {"mean": 0.2, "se": 0.09999999999999999, "p99": 0.5}
    stored = {one["layers"] for one in json.loads((FOLDER / "gates.json").read_text()) if one["search"] == OURS}
    words = (ROOT / "docs" / "which-cache.md").read_text(encoding="utf-8")
    rows = verdicts(json.loads((FOLDER / "gates.json").read_text()))
    better = sum(row["difference"] < -2 * row["error"] for row in rows)
    assert f"in {better} of {len(rows)} cases, and never more" in " ".join(words.split())
    assert not any(row["difference"] > 2 * row["error"] for row in rows)
    kept = [json.loads(path.read_text()) for path in FOLDER.parent.glob(RECIPES)]
    assert stored == {layer_map(forms_in(one)) for one in kept}
