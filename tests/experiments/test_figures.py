"""Figures that the documents quote, taken from the records of runs."""

import json

import pytest

from experiments import quickstart
from experiments.checks.methods import PRESETS, quickstart_records, readme_block
from experiments.runs import composed
from experiments.tiny import perplexity
from kvbench.config.run_config import checked_config

PAIRED = {"diff": 0.0154, "stderr": 0.0049, "n": 16}


def record(**more):
    return {"run_id": "a-b", "kv_bytes": {"used": {"total": 2**20}, "ratio": 3.19}, **more}


def test_perplexity_of_a_run():
    score = {"nll": {"mean": 4.7, "stderr": 0.1, "n": 16, "vs_fp16": PAIRED}, "perplexity": {"ppl": 113.409}}
    entry = perplexity.perplexity_cell(record(scores={"perplexity/wikitext2": score}))
    assert entry == {"ppl": 113.409, "diff": 0.0154, "stderr": 0.0049, "n": 16, "ratio": 3.19, "run": "a-b"}
    assert perplexity.signed(entry) == "+0.0154 ± 0.0049"
    alone = {"nll": {"mean": 4.7, "stderr": 0.1, "n": 16, "vs_fp16": None}, "perplexity": {"ppl": 111.0}}
    assert perplexity.signed(perplexity.perplexity_cell(record(scores={"x": alone}))) == ""


@pytest.mark.parametrize(
    "key", ["decode/books/hf_quantized 2 bits (hqq)", "axes/books/token/channel", "prefill/books/cocktail"]
)
def test_cells_of_perplexity_are_runs_that_kvbench_takes(key, tmp_path):
    (tmp_path / "a.txt").write_text("x")
    overrides = perplexity.cells()[key]
    config = composed((*overrides, f"dataset.path={tmp_path}"))
    assert checked_config(config).task.window == 512
    assert len(perplexity.cells()) == 12 + 8 + 2 + 4 + 1


def sweep(folder, commits=("abc", "abc", "abc", "abc"), status="ok"):
    """A sweep of the four presets, each with the kept record of its preset at another commit."""
    kept = quickstart_records()
    (folder / "sweep").mkdir(parents=True)
    created = {"created": "2026-01-02T03:04:05+00:00", "results_dir": str(folder)}
    (folder / "sweep/manifest.json").write_text(json.dumps(created))
    for number, (name, commit) in enumerate(zip(PRESETS, commits, strict=True)):
        content = kept[name] | {"status": status, "env": kept[name]["env"] | {"commit": commit}}
        (folder / content["run_id"]).mkdir()
        (folder / content["run_id"] / "metrics.json").write_text(json.dumps(content))
        (folder / content["run_id"] / "samples.jsonl").write_text(f"{name}\n")
        job = {"overrides": [f"experiment=quickstart/{name}"], "metrics": content}
        (folder / f"sweep/job-{number:04}.json").write_text(json.dumps(job))
    return folder / "sweep"


def test_a_run_is_kept_with_its_rows_and_readme_s_table_is_drawn_from_it(tmp_path):
    assert quickstart.keep_quickstart(sweep(tmp_path / "runs"), tmp_path) == []
    assert (tmp_path / "results/quickstart/kivi2/samples.jsonl").read_text() == "kivi2\n"
    lines = readme_block(tmp_path).splitlines()
    assert lines[0] == "| | fp16 | kivi int4 | kivi int2 | atom int4_token |"
    runs = quickstart_records(tmp_path)
    drawn = {line.split(" | ")[0].lstrip("| "): line for line in lines if line.startswith("|")}
    assert {*runs["fp16"]["scores"], "**mean** (n = 40)", "KV bytes, fp16's to them", "TTFT", "TPOT"} < drawn.keys()
    assert f"{runs['kivi2']['kv_bytes']['ratio']:.2f}x" in drawn["KV bytes, fp16's to them"]
    text = " ".join(lines)
    assert "One run of `make run` on 2026-01-02, " in text and "commit abc;" in text and "±: " in text


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"commits": ("abc", "abc", "abd", "abc")}, "made at abc, abd: commit all changes first"),
        ({"commits": ("abc+",) * 4}, "made at abc+: commit all changes first"),
        ({"status": "older"}, "fp16: its status is older"),
    ],
)
def test_records_that_are_not_one_run_of_committed_code_are_not_kept(changes, reason, tmp_path):
    assert reason in quickstart.keep_quickstart(sweep(tmp_path / "runs", **changes), tmp_path)[0]
    assert not (tmp_path / "results").exists()


def test_a_sweep_that_lacks_a_preset_is_not_kept(tmp_path):
    (sweep(tmp_path / "runs") / "job-0003.json").unlink()
    assert quickstart.keep_quickstart(tmp_path / "runs/sweep", tmp_path)[0].startswith("atom4: ")
