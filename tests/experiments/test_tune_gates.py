"""Outcomes of searches as a page, and as recipes."""

from __future__ import annotations

import json
from itertools import product
from pathlib import Path

import numpy as np
import pytest

from experiments.stored import ROOT
from experiments.tune import FOLDER, OURS, gates_page, recipe_of, results_page, verdicts
from experiments.tune_cost import cost_lines, rule_errors
from experiments.tune_grid import EVALUATIONS, GRIDS, RecipeGrid, Replay, grid_recipes, replay, replay_lines
from kvbench.page.shared import RECIPES
from kvbench.tune.aim import Aim, Scored
from kvbench.tune.exports import forms_in
from kvbench.tune.space import Space, layer_map


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
    assert record["kl"] == {"mean": 0.2, "se": 0.09999999999999999, "p99": 0.5, "windows": 2, "held_out": True}
    assert record["search_kl"] == {"mean": 0.1}
    stored = [one for one in json.loads((FOLDER / "gates.json").read_text()) if one["search"] == OURS]
    words = (ROOT / "docs" / "which-cache.md").read_text(encoding="utf-8")
    rows = verdicts(json.loads((FOLDER / "gates.json").read_text()))
    better = sum(row["difference"] < -2 * row["error"] for row in rows)
    assert f"in {better} of {len(rows)} cases, and never more" in " ".join(words.split())
    assert not any(row["difference"] > 2 * row["error"] for row in rows)
    kept = [json.loads(path.read_text()) for path in FOLDER.parent.glob(RECIPES)]
    assert {one["layers"] for one in stored} == {layer_map(forms_in(one)) for one in kept}
    written = {(one["model"], one["budget_bits"]): one for one in kept}
    assert written == {(one["model"], one["budget"]): recipe_of(one) for one in stored}


def test_the_page_is_that_of_the_files_beside_it() -> None:
    folder = ROOT / FOLDER
    page = results_page(json.loads((folder / "gates.json").read_text(encoding="utf-8")), folder)
    assert (folder / "README.md").read_text(encoding="utf-8") == page


def test_a_page_says_why_nothing_was_stopped_only_if_nothing_was() -> None:
    ours = outcome(OURS, [0.1, 0.3])
    assert "No recipe was stopped early" in gates_page([ours])
    assert "Their settings were not kept" not in gates_page([ours | {"together": 24}])
    assert "No recipe was stopped early" not in gates_page([ours | {"stopped": 2}])


def test_a_grid_has_all_recipes_under_its_budget_and_what_sensitivities_need() -> None:
    space = Space((2,) * 3, 64, 64, ("fp16", "q8_0", "iq4_nl"), (1, 1, 1))
    aim = Aim(space, 6.0)
    recipes = list(grid_recipes(aim, whole=False))
    every = list(product(space.forms, repeat=3))
    assert {one for one in every if aim.admits(one)} < set(recipes) < set(every)
    assert {("fp16", "iq4_nl/q8_0", "fp16"), ("q8_0",) * 3} < set(recipes)
    assert list(grid_recipes(aim, whole=True)) == every


def test_a_replay_reaches_the_same_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stored = json.loads((ROOT / FOLDER / "replay.json").read_text(encoding="utf-8"))
    row = next(row for row in stored if row["grid"] == "small")
    grid = GRIDS["small"]
    on = Replay(grid, json.loads((ROOT / FOLDER / grid.file).read_text(encoding="utf-8")))
    assert (row["recipes"], row["evaluations"]) == (len(on.recipes), EVALUATIONS)
    for seed, name in product((0, 7), ("adaptive", "random")):
        assert on.reached(name, seed, EVALUATIONS) == pytest.approx(row[name][seed], rel=1e-5)
    for row in stored:
        gaps = np.array(row["adaptive"]) - np.array(row["random"])
        assert (row["more"], row["as_much"]) == ((gaps > 0).sum(), (gaps == 0).sum())


def test_a_replay_of_a_grid_is_written_and_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("experiments.tune_grid.SEEDS", 2)
    monkeypatch.setattr("experiments.tune_grid.GRIDS", {"toy": RecipeGrid("toy.json", 1, 6.0)})
    space = Space((2,) * 3, 64, 64, ("fp16", "q8_0", "iq4_nl"), (1, 1, 1))
    rng = np.random.default_rng(0)
    scores = {" ".join(one): list(rng.uniform(1, 2, 3)) for one in grid_recipes(Aim(space, 6.0), whole=False)}
    record = {"heads": space.heads, "channels": 64, "rope": 64, "formats": space.formats, "tied": space.tied,
              "machine": "a card", "scores": scores}  # fmt: skip
    (tmp_path / "toy.json").write_text(json.dumps(record))
    replay(tmp_path)
    rows = json.loads((tmp_path / "replay.json").read_text())
    assert len(rows) == 4
    assert all(len(row["adaptive"]) == len(row["random"]) == 2 and row["more"] + row["as_much"] <= 2 for row in rows)
    assert sum(line.startswith("| toy | 6 |") for line in replay_lines(tmp_path)) == 4


def test_errors_of_the_rule_are_counted_in_pairs() -> None:
    space = Space((2,), 64, 64, ("fp16", "q8_0", "iq4_nl"), (1,))
    rng = np.random.default_rng(1)
    base = rng.uniform(1, 1.2, 16)
    scores = [Scored((form,), base * factor, 3.0) for form, factor in (("iq4_nl", 1.0), ("q8_0", 0.5))]
    counts = rule_errors(Aim(space, 8.5), scores)
    assert counts == {"better": 20, "better_stopped": 0, "worse": 20, "worse_stopped": 20}


def test_costs_are_shown_with_their_load_and_both_recipes(tmp_path: Path) -> None:
    time = {"model": "m", "bits": 5.4, "budget": 120, "windows": 1000, "wall_s": 600, "processor_s": 900, "threads": 2,
            "cores": 2, "load": [3.5, 1.25], "machine": "a processor"}  # fmt: skip
    side = {"windows": 1000, "stopped": 50, "kl": 0.25, "layers": "0:q8_0"}
    stops = {"model": "m", "bits": 5.4, "seed": 0, "stopping": side, "whole": side | {"windows": 1600, "stopped": 0},
             "difference": 0.0, "error": 0.0,
             "rule": {"better": 200, "better_stopped": 1, "worse": 300, "worse_stopped": 150}}  # fmt: skip
    assert cost_lines(tmp_path) == []
    (tmp_path / "times.json").write_text(json.dumps([time]))
    (tmp_path / "stops.json").write_text(json.dumps([stops]))
    lines = cost_lines(tmp_path)
    assert "| m | 5.4 | 120 | 1000 | 10.0 | 15.0 | 2 of 2 | 3.5, 1.25 | a processor |" in lines
    assert "| m | 5.4 | 0 | 1000 | 1600 | 50 | 0.25 | 0.25 | the same recipe |" in lines
    assert "200 pairs in which one beats the best before it, 1 are stopped (0.5 %;" in lines
