"""The comparison on mini: runs are found by their configuration, folded over the samples that all have done."""

import json

import yaml

from experiments.mini.fold import error, fold
from experiments.mini.grid import GRID
from kvbench.methods import load_method
from kvbench.results import samples as rows


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
    text = fold(tmp_path / "runs", tmp_path / "out", settings, configs)
    assert "repeat" not in text  # one sample of four: an interrupted task
    table = {row["name"]: row for row in json.loads((tmp_path / "out" / "scores.json").read_text())}
    assert table["kivi 2"]["mean"]["score"] == 0.75
    assert table["kivi 2"]["mean"]["vs_fp16"] == {"diff": -0.25, "stderr": 0.25}
    assert table["kivi 2"]["kv_bytes"]["fp16_equivalent"] == 3 * 2**20
    assert (tmp_path / "out" / "table.md").read_text() == text


def test_nothing_done_is_said(tmp_path):
    config = {"model": {}, "method": {}, "quantizer": {}, "dataset": {"lengths": [4096]}}
    assert "nothing" in fold(tmp_path, tmp_path / "out", GRID[:1], {GRID[0].name: config})


def test_standard_error():
    assert error([0.0, 1.0, 1.0, 0.0]) == (1 / 3) ** 0.5 / 2


def test_every_setting_of_the_grid_can_run():
    names = [setting.name for setting in GRID]
    assert len(set(names)) == len({setting.slug for setting in GRID}) == len(GRID)
    for setting in GRID:
        given = dict(item.split("=", 1) for item in setting.overrides)
        method = {k.removeprefix("method."): yaml.safe_load(v) for k, v in given.items() if k.startswith("method.")}
        load_method(given["method"], quantizer=given.get("quantizer"), **method)
