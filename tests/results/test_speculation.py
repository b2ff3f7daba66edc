"""A speculative run from samples to the table: acceptance with its error, tokens a round, speed-up."""

import json
from pathlib import Path

import pytest

from kvbench.results import ranking, tables
from kvbench.results.speculation import ratio_error, speculation, speedup
from kvbench.runner.run import answer_run
from tests.run_files import validate
from tests.run_support import config

METHOD = {"_target_": "kvbench.methods.quantspec.QuantSpec", "takes": ["hierarchical"], "gamma": 3}
QUANTIZER = {
    "name": "hierarchical+key.group_size=32",
    "key": {"bits": 8, "group_size": 32, "axis": "channel", "kind": "hierarchical"},
    "value": {"bits": 8, "group_size": "head_dim", "axis": "token", "kind": "hierarchical"},
}


@pytest.mark.parametrize("batch", [1, 2])
def test_a_run_says_what_speculation_gave(tmp_path, batch):
    def settings(name, **groups):
        runtime = {"batch_size": batch}
        return config(tmp_path, name, dataset={"words": 20, "new_tokens": 12}, runtime=runtime, **groups)

    answer_run(settings("fp16"))
    metrics = answer_run(settings("fp16", method=METHOD, quantizer=QUANTIZER))
    validate({key: value for key, value in metrics.items() if key != "run_dir"})
    computed = metrics["speculation"]
    assert (computed["gamma"], computed["draft"], computed["draft_weights"], computed["n"]) == (3, None, None, 4)
    assert computed["tokens"] == 4 * 11
    assert computed["acceptance_rate"] == computed["accepted"] / computed["drafted"]
    assert computed["tokens"] == computed["accepted"] + computed["rounds"]  # each round adds one token of the target's
    assert computed["speedup"] > 0
    times = computed["round_times"]
    assert times["draft_s"] > 0 and times["verify_s"] > 0 and 0 <= times["acceptance"] <= 1
    expected = computed["speedup"] * times["tpot_s"] / times["expected_tpot_s"]
    assert computed["expected_speedup"] == pytest.approx(expected)
    rows = [json.loads(line) for line in (Path(metrics["run_dir"]) / "samples.jsonl").read_text().splitlines()]
    for row in rows:
        assert len(row["measured"]["step_s"]) == row["measured"]["decoded"] == 11
        assert row["measured"]["decode_s"] >= sum(row["measured"]["step_s"]) - 1e-4
    assert " a round" in tables.table_text([metrics]) and "x" in tables.table_text([metrics])
    assert "acceptance_rate" in tables.runs_csv([metrics])


def test_the_error_counts_samples_not_drafts():
    rows = [{"speculation": {"rounds": 10, "drafted": 40, "accepted": a, "tokens": 10 + a}} for a in (40, 20, 30, 30)]
    computed = speculation(rows, {"gamma": 4, "draft": "upper"})
    assert computed["acceptance_rate"] == 0.75 and computed["tokens_per_round"] == 4.0
    # equal weights: the standard error of the mean of 1, .5, .75, .75
    assert computed["stderr"] == pytest.approx((((0.25**2) * 2) / 3 / 4) ** 0.5)
    assert ratio_error([1.0], [2.0]) is None
    assert speculation([{"id": "plain"}], {}) is None


def test_times_of_a_warm_up_do_not_count():
    def row(scale, **measured):
        times = dict.fromkeys(("draft_s", "verify_s", "flush_s", "sampling_s"), scale * 0.1)
        rounds = {"rounds": 1, "seconds": scale, "accepted": 2, "refused": 1, "tokens": 3, "limits": {"4": 1}, **times}
        counts = {"rounds": 1, "drafted": 4, "accepted": 2, "tokens": 3}
        return {"speculation": counts, "measured": {"rounds": rounds, **measured}}

    slow = row(100.0, warm_up=True)
    computed = speculation([slow, row(1.0)], {"gamma": 4})
    assert computed["rounds"] == 2 and computed["round_times"]["draft_s"] == 0.1
    assert speculation([slow], {"gamma": 4})["round_times"] is None


def test_a_search_for_gamma_puts_the_fastest_first_and_what_failed_last():
    def made(tpot, status="ok", drafts=True):
        return {"status": status, "speculation": {"gamma": 4} if drafts else None, "tpot_s": {"median": tpot}}

    runs = [made(0.03), made(0.01), made(0.001, "oom"), made(0.02)]
    assert [run["tpot_s"]["median"] for run in ranking.best_first(runs)] == [0.01, 0.02, 0.03, 0.001]
    mixed = [{**made(t, drafts=t > 0.01), "mean": {"score": s}} for t, s in ((0.03, 0.5), (0.01, 0.7))]
    assert ranking.best_first(mixed) == mixed[::-1]  # by score where not all speculate


def test_speed_is_compared_on_one_device_at_one_batch_size():
    mine = {"config": {"batch_size": 1}, "timings": {"gpu": {"tpot_s": {"median": 0.01}}}}
    theirs = {"config": {"batch_size": 1}, "timings": {"gpu": {"tpot_s": {"median": 0.02}}}}
    assert speedup(mine, theirs) == 2.0
    assert speedup(mine, None) is None
    assert speedup(mine, {**theirs, "config": {"batch_size": 8}}) is None
    assert speedup(mine, {**theirs, "timings": {"cpu": theirs["timings"]["gpu"]}}) is None
