"""What the papers' items cost on two cores: classes, what is reckoned from them, the tables, and the timed run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from experiments.checks.rules import check_documents
from experiments.real import costs, pages, timing
from experiments.real.plan import PARTS
from experiments.runs import Run

LOADS = {"imports": {"seconds": 5.0}, "load": {"seconds": 2.0}}


def measured(*seconds, start=3.0):
    samples = [{"seconds": one, "prompt": 100 * number, "answer": 7} for number, one in enumerate(seconds, start=1)]
    return {"setting": "method=x", "start": start, "samples": samples, "load": 9.4}


CLASSES = {
    **LOADS,
    "logquant/figure1": {"prompts": 2, "seconds": 42.0},
    "longbench_logquant/hotpotqa | fp16": measured(30.0),
    "longbench_logquant/qasper | fp16": measured(10.0, 30.0),
    "longbench_logquant/qasper | logquant": measured(50.0, start=4.0),
}


def group(name, runs, samples, new=None):
    return {"class": name, "runs": runs, "new": runs if new is None else new, "samples": samples}


def test_a_class_that_was_not_measured_is_reckoned_from_others():
    assert costs.sources_of("longbench_logquant/musique | fp16") == ["longbench_logquant/hotpotqa | fp16"]
    assert costs.sources_of("longbench_logquant/musique | partial_logquant") == [
        "longbench_logquant/hotpotqa | fp16",
        "longbench_logquant/qasper | logquant",
        "longbench_logquant/qasper | fp16",
    ]
    assert costs.sources_of("pg19@2048 | quantspec streamingllm") == [
        "pg19@2048 | quantspec",
        "pg19@1024 | quantspec snapkv",
        "pg19@1024 | quantspec",
    ]
    assert costs.sources_of("gsm8k_logquant | fp16") == ["gsm8k_logquant | kivi"]
    # 30 s, times 50 over the mean of 10 and 30; the beginning is the method's own
    assert costs.estimate("longbench_logquant/musique | partial_logquant", CLASSES) == (4.0, pytest.approx(75.0))
    assert costs.estimate("longbench_logquant/qasper | fp16", CLASSES) == (3.0, 20.0)
    assert costs.estimate("longbench_logquant/qasper | kivi", CLASSES) is None


def test_an_item_takes_its_runs_and_a_study_its_prompts():
    groups = [group("longbench_logquant/qasper | fp16", 2, 7), group("longbench_logquant/musique | logquant", 3, 6, 1)]
    item = costs.reckoned({"id": "x", "n": 7, "runs": 5, "not_here": 1, "groups": groups}, CLASSES)
    assert item["seconds"] == 2 * 5 + 2 * (3 + 7 * 20) + 3 * (4 + 6 * 75)
    assert item["seconds_new"] == item["seconds"] - 2 * (4 + 6 * 75) and item["hours"] == round(
        item["seconds"] / 7200, 3
    )
    assert item["share"] == 1 and item["measured"] == round(14 / 32, 3)
    study = {"id": "logquant/figure1", "n": 20, "runs": 0, "not_here": 0, "groups": []}
    assert costs.item_seconds(study, CLASSES) == 5 + 2 + (42 - 2) * 10
    part = {**item, "groups": [*groups, group("pg19@1024 | fp16", 4, 8)]}
    assert costs.reckoned(part, CLASSES)["seconds"] == item["seconds"] and costs.reckoned(part, CLASSES)["share"] == 0.5
    for missing in ({**study, "id": "logquant/figure2"}, {**item, "groups": [group("pg19@1024 | fp16", 1, 1)]}):
        empty = costs.reckoned(missing, CLASSES)
        assert empty["seconds"] is None and empty["hours"] is None


def test_the_tables_show_what_was_measured_and_what_was_reckoned():
    machine = {"cpu": "Abacus", "amx": False, "cores": 2, "torch": "2", "transformers": "5", "date": "2026-11-28"}
    groups = [group("longbench_logquant/qasper | fp16", 2, 7), group("longbench_logquant/musique | logquant", 3, 6)]
    item = costs.reckoned({"id": "x", "n": 7, "runs": 5, "not_here": 1, "groups": groups}, CLASSES)
    missing = costs.reckoned(
        {"id": "y", "n": 1, "runs": 1, "not_here": 0, "groups": [group("z | fp16", 1, 1)]}, CLASSES
    )
    text = costs.time_markdown({"machine": machine, "classes": CLASSES, "items": [item, missing]})
    assert "| x | 7 | 5 (+ 1 not here) | 32 | 1,658 | 0.23 | 100 | 44 |" in text
    assert "| y | 1 | 1 | 1 | - | - | 0 | 0 |" in text
    assert r"| longbench_logquant/qasper \| fp16 | `method=x` | 2 | 100 to 200 | 7 | 10.0 to 30.0 | 3.0 | 9 |" in text
    assert "over `longbench_logquant/qasper | fp16`: `longbench_logquant/musique | logquant`." in text
    widths = {line.replace(r"\|", "").count("|") for line in text.splitlines() if line.startswith("|")}
    assert widths == {9} and "Together 0.23 hours" in text


def test_the_kept_figures_follow_from_the_kept_classes_and_the_table_from_both():
    whole = json.loads((pages.FOLDER / "time" / costs.FILE).read_text(encoding="utf-8"))
    assert [item["id"] for item in whole["items"]] == [name for part in PARTS for name in part.items]
    assert whole["items"] == [costs.reckoned(item, whole["classes"]) for item in whole["items"]]
    blocks = [block for block in pages.page_blocks() if block.document == "results/smollm2/time/table.md"]
    assert len(blocks) == 1 and check_documents(blocks).differences == []


def test_a_class_is_the_data_and_the_method_of_a_run():
    words = "dataset.tasks=[qasper] dataset.lengths=[2048]".split()
    run = Run(("method=quantspec", "method.draft=snapkv", "model=m", "dataset=d", *words), "m", "d")
    assert (timing.data_name(run), timing.method_name(run)) == ("d/qasper@2048", "quantspec snapkv")
    run = Run(("method=kivi", "model=m", "dataset=fidelity/answers", "dataset.over=g"), "m", "fidelity/answers")
    assert timing.key_of(timing.data_name(run), timing.method_name(run)) == "g, KL | kivi"


def test_every_class_is_reckoned_from_measured_ones():
    measured_keys = {costs.key_of(data, method) for data, methods in costs.MEASURED.items() for method in methods}
    for data in (*costs.LIKE, *costs.MEASURED):
        for source in costs.sources_of(data if "|" in data else costs.key_of(data, "fp16")):
            assert source in measured_keys
    assert {*costs.ANCHOR.values(), *costs.SHORT} <= costs.MEASURED.keys()


def test_a_run_is_left_after_its_samples_without_a_trace(tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(timing.tempfile, "tempdir", None)
    data = "dataset=mini dataset.tasks=[repeat] dataset.lengths=[512] dataset.limit=5 decoding.max_new_tokens=4".split()
    run = Run(("method=kivi", "quantizer=int4", "model=tiny", *data, "runtime.device=cpu"), "tiny", "mini")
    outcome = timing.timed_run(run, 2)
    assert outcome["setting"] == "method=kivi quantizer=int4" and len(outcome["samples"]) == 2
    assert all(sample["prompt"] > 0 and 0 < sample["answer"] <= 4 for sample in outcome["samples"])
    assert not list(Path(tmp_path).glob("tmp*")) and timing.sample_count(run) == 5
