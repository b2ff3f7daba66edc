"""Points of time and memory: files of other machines, and the figures that are folded from them."""

import json
from dataclasses import replace

import pytest

from experiments.cells.jobs import stale
from experiments.data import Plan
from experiments.fold.figures import FIGURES
from experiments.fold.grid import Source, fold_grid
from experiments.fold.points import OLDER, TRITON, point_source
from experiments.item import Claim, Column, Grid, Group, Model, Row

COLUMN = Column(name="TPOT", data="efficiency", figure="tpot_s", prompt=512, batch=2, memory_gb=44.7)


def record(setting, batch=2, status="ok", tpot=0.004, **more):
    figures = {"tpot_s": {"median": tpot}, "peak": {"prefill": 30, "decode": 20}} if status == "ok" else {}
    return {"setting": setting, "status": status, "prompt": 512, "batch": batch, **figures, **more}


def write(folder, name, *rows, limit=44.7, **more):
    folder.mkdir(exist_ok=True)
    content = {"model": "llama2-7b", "device": "NVIDIA H200", "memory_limit_gb": limit, "rows": rows, **more}
    (folder / f"{name}.json").write_text(json.dumps(content), encoding="utf-8")


def test_points_of_two_files_are_rows_with_one_id(tmp_path):
    """So that a table can compare them: a column is folded over the samples that all settings have."""
    write(tmp_path / "one", "a", record("fp16"))
    write(tmp_path / "one", "b", record("kivi:int4_g128"))
    rows = [point_source("llama2-7b", name, COLUMN, (tmp_path / "one",)) for name in ("fp16", "kivi:int4_g128")]
    assert [list(source.rows) for source in rows] == [["efficiency@512/b2"]] * 2
    assert [source.runs for source in rows] == [("a.json",), ("b.json",)]


def test_a_later_folder_wins_and_another_limit_is_another_point(tmp_path):
    write(tmp_path / "old", "z", record("fp16", tpot=1.0))
    write(tmp_path / "new", "a", record("fp16", tpot=2.0), record("fp16", batch=4, tpot=3.0))
    write(tmp_path / "new", "b", record("fp16", tpot=9.0), limit=None)
    source = point_source("llama2-7b", "fp16", COLUMN, (tmp_path / "old", tmp_path / "new"))
    assert FIGURES["tpot_s"](list(source.rows.values())).value == 2.0


def test_the_peak_is_the_larger_of_prefill_and_decoding():
    assert FIGURES["peak"]([{"measured": {"point": record("fp16")}}]).value == 30
    only_decoding = record("fp16") | {"peak": {"prefill": None, "decode": 20}}
    assert FIGURES["peak"]([{"measured": {"point": only_decoding}}]) is None


def test_the_rate_of_decoding_is_all_tokens_over_all_seconds():
    rows = [
        {"measured": {"decoded": 10, "step_s": [0.1] * 10}},
        {"measured": {"decoded": 30, "decode_s": 3.0, "step_s": [0.5] * 30}},  # a row of rounds
    ]
    rate = FIGURES["decode_rate"](rows)
    assert rate.value == pytest.approx(40 / 4)
    assert sum(rate.influences) / 2 == pytest.approx(rate.value)
    assert FIGURES["decode_rate"]([{"measured": {"decoded": 0, "step_s": []}}]) is None


def test_models_of_one_shape_share_their_points(tmp_path):
    """Time and memory depend on a model's dimensions: Longchat-7B has those of Llama-2-7B, Llama-3.1-8B has others."""
    write(tmp_path / "one", "a", record("fp16"))
    sources = {name: point_source(name, "fp16", COLUMN, (tmp_path / "one",)) for name in ("longchat-7b", "llama3.1-8b")}
    assert sources["longchat-7b"].runs == ("a.json",) and sources["llama3.1-8b"] is None


def test_the_best_throughput_and_the_last_batch_that_fitted_are_compared():
    """LogQuant's claim: each setting at its own best batch."""
    columns = tuple(
        Column(name=f"b{n}", data="efficiency", figure="tokens_per_s", scale=1.0, prompt=512, batch=n, x=float(n))
        for n in (1, 2, 4, 8)
    )
    names = tuple(column.name for column in columns)
    item = Grid(
        id="logquant/figure7",
        number="Figure 7",
        title="",
        caption="",
        models=(Model("llama3.1-8b", "8B"),),
        rows=(
            Row(name="BF16", setting="fp16"),
            Row(name="LogQuant", setting="logquant"),
            Row(name="KIVI", setting="kivi"),
        ),
        columns=columns,
        groups=(Group(name="best", columns=names, pick="largest"), Group(name="last", columns=names, pick="last")),
        base="BF16",
        claims=tuple(
            Claim(text=name, first="LogQuant", second="BF16", column=name, low=60.0, relative=True)
            for name in ("best", "last")
        ),
    )
    rates = {
        "BF16": (10.0, 30.0, None, None),
        "LogQuant": (12.0, 32.0, 45.0, None),
        "KIVI": (9.0, 99.0),  # stopped before memory ended
    }
    sources = {
        ("8B", row, f"b{n}"): Source(
            {} if rate is None else {f"{n}": {"measured": {"point": {"tokens_per_s": rate}}}},
            reason="out of memory" if rate is None else "",
        )
        for row, numbers in rates.items()
        for n, rate in zip((1, 2, 4, 8), numbers, strict=False)
    }
    table = fold_grid(item, Plan(), sources)
    assert [table.at("8B", row, "best").ours for row in rates] == [30.0, 45.0, None]
    assert [table.at("8B", row, "last").ours for row in rates] == [2.0, 4.0, None]
    assert table.at("8B", "KIVI", "last").reason == "not measured until memory ended"
    assert [(v.ours, v.verdict) for v in table.verdicts] == [(50.0, "undecided"), (100.0, "undecided")]


def test_the_speed_of_another_model_decides_no_claim():
    """A small model on a busy processor says nothing of the speed of a large one on a GPU."""
    item = Grid(
        id="quantspec/figure1",
        number="Figure 1",
        title="",
        caption="",
        models=(Model("lwm-text-chat-128k", "LWM"),),
        rows=(Row(name="AR", setting="fp16"), Row(name="QuantSpec", setting="quantspec")),
        columns=(Column(name="rate", data="pg19", figure="decode_rate", scale=1.0),),
        claims=(Claim(text="faster", first="QuantSpec", second="AR", column="rate"),),
    )
    rows = {
        name: {i: {"measured": {"decoded": 10, "decode_s": seconds + 0.01 * i}} for i in range(10)}
        for name, seconds in (("AR", 2.0), ("QuantSpec", 1.0))
    }
    for model, word in (("LWM", "holds"), ("tiny", "not comparable")):
        plan = Plan(models=() if model == "LWM" else ("tiny",))
        sources = {(model, name, "rate"): Source(by_id) for name, by_id in rows.items()}
        assert [verdict.verdict for verdict in fold_grid(item, plan, sources).verdicts] == [word]


def test_steps_of_older_kernels_are_told_apart(tmp_path):
    """So that a claim does not compare a batch with one of a slower kernel."""
    rows = [record("fp16", batch=batch, stepping="graph, compiled") for batch in (1, 2, 16, 18)]
    write(tmp_path / "one", "a", *rows, date="2026-11-22 11:05:59")
    columns = [replace(COLUMN, batch=batch) for batch in (1, 2, 16, 18)]
    notes = [point_source("llama2-7b", "fp16", column, (tmp_path / "one",)).note for column in columns]
    assert [note.endswith(OLDER) for note in notes] == [False, True, True, False]


def test_points_that_tritons_kernel_read_say_so_and_are_measured_again(tmp_path):
    paths = {"logquant": "triton", "fp16": "cuda", "cocktail:reorder=false": "in_place"}
    rows = [record(name, batch=1, stepping="graph", path=path) for name, path in paths.items()]
    column = replace(COLUMN, batch=1)
    for folder, date, notes in (
        ("one", "2026-11-22 11:46:52", [f", {TRITON}", "", ""]),
        ("two", "2026-12-01", [""] * 3),
    ):
        write(tmp_path / folder, "a", *rows, date=date)
        sources = [point_source("llama2-7b", name, column, (tmp_path / folder,)) for name in paths]
        assert [source.note for source in sources] == [f"NVIDIA H200, graph{note}" for note in notes]
        assert [stale(source) for source in sources] == [bool(note) for note in notes]
