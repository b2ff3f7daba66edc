"""The comparison on mini: runs are found by their configuration, folded over the samples that all have done."""

import json
import math

import pytest
import yaml

from experiments import measured
from experiments.measured import Stored
from experiments.mini.__main__ import data, parse_mini_options
from experiments.mini.fold import STYLE, evenly, fold_mini, matching, same_group, score_stderr
from experiments.mini.grid import COMPARISONS, GRID, PAIRS
from experiments.runs import composed
from kvbench.config import setting as grammar
from kvbench.results import samples as rows
from kvbench.tasks.mini.task import TASKS


def write_run(folder, config, scores):
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    (folder / "env.json").write_text(json.dumps({"dtype": "bfloat16", "torch": "2", "transformers": "5"}))
    made = [
        {
            "id": name,
            "task": name.split("@")[0],
            "length": 4096,
            "scores": {"score": score},
            "scorer_version": 1,
            "prediction": "",
            "kv_bytes": {"used": {"total": 2**20}, "fp16_equivalent": 3 * 2**20},
            "measured": {"device": "some device"},
        }
        for name, score in scores.items()
    ]
    rows.append(folder / "samples.jsonl", made)


def written(runs, out, settings, configs, pairs=()):
    """Fold the runs of settings, found by their configurations, and write the files; the table's text."""
    found = {setting.name: matching(runs, configs[setting.name]) for setting in settings}
    stored = {name: Stored({"mini": done}, env) for name, (done, env) in found.items()}
    folded = fold_mini(stored, settings, pairs, runs)
    if folded.files:
        folded.write(out)
    return folded.text


def test_settings_are_paired_over_what_all_of_them_have_done(tmp_path):
    settings = [s for s in GRID if s.name in ("fp16", "kivi 2")]
    configs = {
        s.name: {"model": {"name": "tiny"}, "method": {"n": s.name}, "quantizer": {}, "dataset": {"lengths": [4096]}}
        for s in settings
    }
    full = {f"copy@4096/{i}": 1.0 for i in range(4)} | {f"repeat@4096/{i}": 1.0 for i in range(4)}
    write_run(tmp_path / "runs" / "a", configs["fp16"], full)
    part = {f"copy@4096/{i}": float(i > 0) for i in range(4)} | {"repeat@4096/0": 0.0}
    write_run(tmp_path / "runs" / "b", configs["kivi 2"], part)
    text = written(tmp_path / "runs", tmp_path / "out", settings, configs)
    assert "repeat" not in text  # one sample of four: an interrupted task
    table = {row["name"]: row for row in json.loads((tmp_path / "out" / "scores.json").read_text())}
    assert table["kivi 2"]["mean"]["score"] == 0.75
    assert table["kivi 2"]["mean"]["vs_fp16"] == {"diff": -0.25, "stderr": 0.25}
    assert table["kivi 2"]["kv_bytes"]["fp16_equivalent"] == 3 * 2**20
    assert (tmp_path / "out" / "table.md").read_text() == text


def config_of(name, **dataset):
    data = {"lengths": [4096], "tasks": ["copy", "repeat"], "limit": 100, "seed": 0} | dataset
    return {"model": {"name": "tiny"}, "method": {"n": name}, "quantizer": {}, "dataset": data, "decoding": {}}


def test_a_setting_may_have_several_runs_and_only_what_is_asked_for_counts(tmp_path):
    settings = [s for s in GRID if s.name in ("fp16", "kivi 2")]
    configs = {s.name: config_of(s.name) for s in settings}
    runs = tmp_path / "runs"
    write_run(runs / "a", config_of("fp16", tasks=["copy"]), {f"copy@4096/{i}": 1.0 for i in range(4)})
    write_run(runs / "b", config_of("fp16", tasks=["repeat"]), {f"repeat@4096/{i}": 1.0 for i in range(4)})
    write_run(runs / "other seed", config_of("fp16", seed=1), {f"copy@4096/{i}": 0.0 for i in range(4)})
    more = {f"{task}@4096/{i}": 0.5 for task in ("copy", "repeat", "needle") for i in (0, 1, 2, 3, 100)}
    write_run(runs / "c", config_of("kivi 2", limit=101), more)
    written(runs, tmp_path / "out", settings, configs)
    table = {row["name"]: row for row in json.loads((tmp_path / "out" / "scores.json").read_text())}
    assert list(table["fp16"]["tasks"]) == list(table["kivi 2"]["tasks"]) == ["copy@4096", "repeat@4096"]
    assert table["fp16"]["mean"] | {"vs_fp16": 0} == {"score": 1.0, "stderr": 0.0, "n": 8, "vs_fp16": 0}
    assert table["kivi 2"]["mean"]["vs_fp16"]["diff"] == -0.5


def test_a_setting_that_has_hardly_begun_is_named_and_pairs_have_their_own_samples(tmp_path):
    names = ("fp16", "kivi 2", "kivi 4", "atom 2")
    settings = [s for s in GRID if s.name in names]
    configs = {s.name: config_of(s.name) for s in settings}
    runs = tmp_path / "runs"
    write_run(runs / "a", configs["fp16"], {f"copy@4096/{i}": 1.0 for i in range(8)})
    write_run(runs / "b", configs["kivi 2"], {f"copy@4096/{i}": float(i % 2) for i in range(6)})
    write_run(runs / "c", configs["kivi 4"], {f"copy@4096/{i}": 1.0 for i in range(2)})
    text = written(runs, tmp_path / "out", settings, configs, [("kivi 4", "kivi 2"), ("kivi 4", "atom 2")])
    table = {row["name"]: row for row in json.loads((tmp_path / "out" / "scores.json").read_text())}
    assert set(table) == {"fp16", "kivi 2"}
    assert table["fp16"]["mean"]["n"] == 6
    assert "Not run, or not far enough: kivi 4 (2 samples), atom 2." in text
    (pair,) = json.loads((tmp_path / "out" / "pairs.json").read_text())
    assert pair["mean"] == {"diff": 0.5, "stderr": 0.5, "n": 2, "first": 1.0, "second": 0.5}
    line = "| kivi 4 less kivi 2 | 100.0, 50.0 | +50.0 ±50.0 | 2 | +50.0 ±50.0 | 1.00, 1.00 | +50.0 ±50.0 |"
    assert line in text


def test_by_task_a_short_task_weighs_as_much_as_a_long_one():
    long, short = {"diff": 0.1, "stderr": 0.03, "n": 100}, {"diff": 0.5, "stderr": 0.04, "n": 2}
    assert evenly({"copy@4096": long, "repeat@4096": short}) == pytest.approx({"diff": 0.3, "stderr": 0.025, "n": 2})
    assert evenly({}) is None
    assert evenly({"copy@4096": long, "repeat@4096": {"diff": 1.0, "stderr": math.nan, "n": 1}}) is None


def test_a_key_that_came_after_a_run_has_the_value_that_changes_nothing():
    assert same_group({"alpha": 0.6}, {"alpha": 0.6, "whole_words": None})
    assert not same_group({"alpha": 0.6}, {"alpha": 0.6, "residual": 128})
    assert not same_group({"alpha": 0.6, "whole_words": True}, {"alpha": 0.6, "whole_words": None})


def test_nothing_done_is_said(tmp_path):
    config = {"model": {}, "method": {}, "quantizer": {}, "dataset": {"lengths": [4096]}}
    assert "does not contain a sample" in written(tmp_path, tmp_path / "out", GRID[:1], {GRID[0].name: config})
    assert not (tmp_path / "out").exists()


def test_standard_error():
    assert score_stderr([0.0, 1.0, 1.0, 0.0]) == (1 / 3) ** 0.5 / 2


def test_pairs_and_comparisons_name_settings():
    names = {setting.name for setting in GRID}
    assert {name for pair in PAIRS for name in pair} <= names
    assert len(set(PAIRS)) == len(PAIRS)
    assert {setting.family for setting in GRID} <= set(STYLE)
    for comparison in COMPARISONS.values():
        assert {setting.name for setting in comparison.settings} <= names
        assert set(comparison.tasks) <= set(TASKS)


def test_the_command_line_of_a_setting():
    search = parse_mini_options(
        ["--grid", "search", "--batch", "16", "--device", "cuda", "--limit-for", "the same, random chunks=7"]
    )
    table = measured.Table("experiments.mini", lambda s: data(s, search), None, None)
    runs = {s.name: measured.runs_of(table, s, search)["mini"] for s in COMPARISONS["search"].settings}
    lines = {name: run.overrides for name, run in runs.items()}
    assert {"runtime.batch_size=16", "runtime.device=cuda"} <= set(lines["fp16"])
    assert "dataset.limit=200" in lines["fp16"]
    assert "dataset.limit=7" in lines["the same, random chunks"]
    assert "dataset.tasks=[key_value_hex,copy,copy_long]" in lines["fp16"]
    assert composed(lines["cocktail 15/35/50, per token"])["method"]["split"] == [15, 35, 50]
    assert parse_mini_options(["--limit", "3"]).tasks == ()
    with pytest.raises(SystemExit):
        parse_mini_options(["--only", "no such setting"])


def test_every_setting_of_the_grid_can_run():
    names = [setting.name for setting in GRID]
    assert len(set(names)) == len({setting.slug for setting in GRID}) == len(GRID)
    for setting in GRID:
        grammar.parse_setting(setting.setting).load()
