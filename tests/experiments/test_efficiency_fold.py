"""Points into tables and plots: limits, ratios to full precision, the papers' claims."""

import csv
import json
from dataclasses import replace
from pathlib import Path

import pytest

from experiments.efficiency.__main__ import GRIDS, main
from experiments.efficiency.fold import CLAIMS, fold_efficiency, judged, reached, read_points, relative, section
from kvbench.bench import __main__ as bench
from kvbench.results.point_record import bench_points
from kvbench.runner.run import answer_run
from tests.measure.test_meter import settings

GiB = 2**30
ROOT = Path(__file__).resolve().parents[2]


def row(setting, batch, rate=None, tpot=0.01, peak=20.0):
    base = {"setting": setting, "prompt": 512, "batch": batch, "new_tokens": 2000}
    if rate is None:
        return {**base, "status": "oom", "bytes_asked": GiB}
    figures = {
        "ttft_s": 0.1,
        "tpot_s": {"median": tpot},
        "tokens_per_s": rate,
        "weights": 16 * GiB,
        "stepping": "graph",
    }
    sizes = {"kv_used": {"total": GiB}, "peak": {"prefill": 22 * GiB, "decode": peak * GiB}}
    return {**base, "status": "ok", **figures, **sizes, "predicted": {"tpot_s": 0.009}}


@pytest.fixture
def file(tmp_path):
    rows = [row("fp16", 1, 100), row("fp16", 10, 800, 0.012, 44), row("fp16", 16)]
    rows += [row("logquant:int2_g64", 1, 90, 0.011), row("logquant:int2_g64", 10, 850, 0.0115, 22)]
    rows += [row("logquant:int2_g64", 18, 1200, 0.014, 30), row("logquant:int2_g64", 20)]
    rows += [row("cocktail:split=10/30/60", 10, 700, 0.0132, 33), {"setting": "kivi", "status": "failed"}]
    path = tmp_path / "memory.json"
    head = {"model": "llama3.1-8b", "device": "NVIDIA H200", "memory_limit_gb": 48.0}
    path.write_text(json.dumps({**head, "rows": rows}))
    return path


def test_limits_ratios_and_claims(file, tmp_path):
    points = read_points([file])
    assert len(points) == 8 and {point.limit_gb for point in points} == {48.0}
    full, log = reached(points, "fp16"), reached(points, "logquant:int2_g64")
    assert (log["max_batch"], log["oom_batch"], log["best"].batch) == (18, 20, 18)
    assert relative("batch", log, full) == (pytest.approx(0.8), None)
    assert relative("throughput", log, full) == (pytest.approx(0.5), None)
    assert relative("memory", log, full) == (pytest.approx(-0.5), 10)
    folded = fold_efficiency(points)
    folded.write(tmp_path)
    text = folded.text
    assert "| logquant:int2_g64 | 18 of 20 tried, 1.80x | 1200 (18), 1.50x | 11.5 ms (10), 0.96x | 9 ms |" in text
    assert "- LogQuant, Fig. 7 claims +60% batch; logquant:int2_g64: +80% (better)" in text
    assert (
        "- Cocktail, Fig. 4 claims -42% to -12% memory; cocktail:split=10/30/60: -25% at batch 10 (as claimed)" in text
    )
    assert "claims -52% to -32% tpot; cocktail:split=10/30/60: +10% at batch 10 (less)" in text
    cocktail = reached(points, "cocktail:split=10/30/60")
    assert relative("throughput", cocktail, full) is None  # its memory has not ended
    assert judged(CLAIMS[0], cocktail, full) == judged(CLAIMS[0], log, None) == ""
    lines = (tmp_path / "points.csv").read_text().splitlines()
    assert len(lines) == 9 and lines[0].startswith("model,device,setting,prompt,batch")


def test_plots_where_matplotlib_is(file, tmp_path):
    pytest.importorskip("matplotlib")
    fold_efficiency(read_points([file])).write(tmp_path)
    assert (tmp_path / "llama3.1-8b_batch_prompt512_new2000_48gb.png").stat().st_size > 10_000


def test_runs_of_the_data_set_are_read_too(tmp_path, capsys):
    grid = {"prompts": [32], "batches": [1], "repeats": 1}
    for name in ("fp16", "kivi"):
        answer_run(settings(tmp_path / "runs", name, grid=grid))
    assert main(["--fold", str(tmp_path / "runs"), "--out", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    assert "### toy, prompts of 32, 4 new tokens" in printed and "| kivi int2 dtype=float32 | 1 |" in printed


def test_a_compiled_step_and_one_that_is_not_are_two_points(tmp_path):
    head = {"model": "llama2-7b", "device": "NVIDIA H200", "dtype": "bfloat16"}
    plain = {**row("fp16", 1, 100), "fill": "random"}
    for number, each in enumerate((plain, {**plain, "compile": True}, {**row("fp16", 1, 90)})):
        (tmp_path / f"{number}.json").write_text(json.dumps({**head, "rows": [each], "command": "tpot --model x"}))
    (tmp_path / "p.json").write_text(json.dumps({**head, "rows": [row("fp16", 2)], "command": "prefill"}))
    points = read_points([tmp_path])
    assert sorted(point.how for point in points) == [
        "bfloat16",
        "bfloat16, compiled, random keys and values",
        "bfloat16, random keys and values",
    ]
    assert "(NVIDIA H200, bfloat16, compiled, random keys and values)" in fold_efficiency(points).text


def test_fp16_of_one_model_is_the_base_where_there_are_runs_of_two(file):
    points = [
        replace(each, setting=each.setting.replace("fp16", "fp16 model=llama3.1-8b")) for each in read_points([file])
    ]
    assert "- LogQuant, Fig. 7 claims +60% batch" in section(points)


@pytest.mark.parametrize("text", ['{"rows": [', '{"rows": [{"status": "ok", "setting": "fp16"}]}', "[]", "{}"])
def test_a_damaged_file_is_named(text, tmp_path, capsys):
    (tmp_path / "some.json").write_text(text)
    assert main(["--fold", str(tmp_path / "some.json"), "--out", str(tmp_path)]) == 2
    assert str(tmp_path / "some.json") in capsys.readouterr().err


def test_a_folder_that_takes_no_files_is_named(file, capsys):
    assert main(["--fold", str(file), "--out", str(file)]) == 2
    assert "--out FOLDER" in capsys.readouterr().err


def test_nothing_to_fold_is_said(tmp_path, capsys):
    assert main(["--fold", str(tmp_path / "none.json")]) == 2
    assert "does not exist" in capsys.readouterr().err
    assert main(["--fold", str(tmp_path)]) == 2
    assert "no points" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main([])


@pytest.mark.parametrize("name", GRIDS)
def test_grids_are_commands_of_the_bench(name):
    from kvbench.bench.choices import model_config
    from kvbench.config.setting import parse_setting

    args = bench.bench_parser().parse_args(GRIDS[name])
    assert model_config(args.model).weights == "random"
    assert "fp16" in [type(parse_setting(text).load()).__name__.lower() for text in args.settings]


@pytest.mark.parametrize("path", sorted((ROOT / "results").glob("h200/**/*.json")), ids=lambda path: path.name)
def test_recorded_files_stay_readable(path):
    content = json.loads(path.read_text())
    if isinstance(content, list):  # figures of single kernels, from no command
        assert all(isinstance(row, dict) for row in content) and content
        return
    points = list(bench_points(path))
    if content.get("command", "").split()[:1] in (["tpot"], ["memory"]):
        rows = [row for row in content["rows"] if row["status"] in ("ok", "oom")]
        assert len(points) == len(rows) > 0
        for point, row in zip(points, rows, strict=True):
            good = row["status"] == "ok"
            assert point.prompt > 0 and (point.tpot_s == row["tpot_s"]["median"] if good else point.tpot_s is None)
            assert not good or (point.kv_used and point.new_tokens > 1)


def test_the_recorded_table_is_made_again(tmp_path, monkeypatch):
    """results/efficiency/points.csv from its files: the columns of that time, to the digit."""
    monkeypatch.setattr("experiments.efficiency.fold.plot", lambda *rest: None)  # its own test is above
    folder = ROOT / "results/h200/whole"
    files = sorted(path for path in folder.glob("*.json") if path.name != "tpot_later.json")
    fold_efficiency(read_points(files)).write(tmp_path)
    with (ROOT / "results/efficiency/points.csv").open() as old, (tmp_path / "points.csv").open() as new:
        recorded, made = list(csv.DictReader(old)), list(csv.DictReader(new))
    again = [{key: row[key] for key in recorded[0]} for row in made]
    assert recorded and all(row in again for row in recorded)
