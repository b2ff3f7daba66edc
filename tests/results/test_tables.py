"""Tables: readable on 100 to 160 columns, the same cells in markdown and CSV."""

from __future__ import annotations

import copy
import csv
import io
import itertools

import pytest

from kvbench.results import aggregate, columns, tables
from kvbench.util.table import Cell


def run(label: str, status: str = "ok", score: float = 0.9, tasks: int = 3, **config) -> dict:
    keys = [f"task{i}@2048" for i in range(tasks)]
    pair = {"diff": score - 1, "stderr": 0.012, "n": 20}
    nll = {"mean": 0.3, "stderr": 0.01, "n": 20, "vs_fp16": None}
    scores = {
        k: {"score": score, "stderr": 0.03, "n": 20, "vs_fp16": None if label == "fp16" else pair, "nll": nll}
        for k in keys
    }
    parts = {"total": 1_500_000, "codes": 10**6, "scales": 2 * 10**5, "window": 3 * 10**5, "index": 0}
    return {
        "run_id": "0123456789-0123456789",
        "label": label,
        "status": status,
        "config": {
            "model": "tiny",
            "dataset": "mini",
            "seed": 0,
            "method": {"_target_": "x.Y", **config},
            "quantizer": "int2",
            "decoding": {"temperature": 0.0},
            "batch_size": 1,
        },
        "samples": {"requested": 20, "done": 20, "truncated": 0, "left_out": []},
        "scores": scores,
        "mean": aggregate.overall(scores),
        "kv_bytes": {"used": parts, "reserved": parts, "fp16_equivalent": 6_000_000, "ratio": 4.0},
        "peak_bytes": {"prefill": 3 * 10**8, "decode": 2 * 10**8, "kind": "cuda_allocator", "rss": 10**9},
        "ttft_s": {"median": 0.123, "n": 19},
        "tpot_s": {"median": 0.0123, "p99": 0.02, "first_step": 0.03, "n": 300},
        "tokens_per_s": 80.0,
        "timings": {},
        "attention": {"reads_packed": True, "path": "reference"},
        "error": None,
        "env": {"device_name": "a GPU", "dtype": "bfloat16"},
        "oom": {"bytes_asked": 2**31, "sample": None, "message": ""} if status == "oom" else None,
    }


def four(tasks: int) -> list[dict]:
    return [
        run("fp16", tasks=tasks),
        *(run(name, tasks=tasks, score=0.8) for name in ("kivi int4", "kivi int2", "atom")),
    ]


@pytest.mark.parametrize("width", [100, 120, 160])
@pytest.mark.parametrize("tasks", [1, 3, 4, 6, 12])
def test_four_methods_fit_the_screen_and_lose_nothing(width, tasks):
    text = tables.table_text(four(tasks), width, color=False)
    assert max(map(len, text.splitlines())) <= width
    flat = " ".join(text.split())
    for wanted in ("fp16", "kivi int4", "atom", "0.800 ±.063", "Δ -0.200 ±.025", "1.43 MiB", "4.00x", "286 MiB"):
        assert wanted in flat, (wanted, text)
    assert "123 ms" in flat
    assert "12.3 ms" in flat
    assert "a GPU" in flat
    for index in range(tasks):
        assert f"task{index}@2048" in flat


def test_a_large_sweep_fits_too():
    runs = [
        run("cocktail int4", alpha=a, beta=b, chunk_size=c) for a in (1, 2, 3) for b in (4, 5, 6) for c in (7, 8, 9)
    ]
    text = tables.table_text(runs, 120, color=False)
    assert max(map(len, text.splitlines())) <= 120
    assert "alpha=2 beta=6" in text
    assert "chunk_size=8" in text


def test_labels_name_what_differs_and_nothing_else():
    runs = [run("kivi int2", residual=32, sinks=0), run("kivi int2", residual=64, sinks=0), run("fp16")]
    assert tables.labels(runs) == ["kivi int2 residual=32", "kivi int2 residual=64", "fp16"]


def test_labels_name_how_the_turns_of_a_conversation_see_earlier_ones():
    """Runs of one-off questions have no turns in their identity; an older record has no data."""
    asked = ({"turns": "stored"}, {"turns": "anew", "questions": 4}, {"turns": "stored", "history": "own"}, {}, None)
    runs = [{**run("kivi int2"), "data": {"identity": identity}} for identity in asked] + [run("kivi int2")]
    assert tables.labels(runs) == [
        "kivi int2 turns=stored",
        "kivi int2 turns=anew questions=4",
        "kivi int2 turns=stored history=own",
        *["kivi int2"] * 3,
    ]
    assert tables.labels(runs[:1]) == ["kivi int2"]


def test_labels_name_a_rotation_that_only_some_runs_have():
    """Runs from before the option rotate nothing."""
    sides = (
        {"key": "hadamard", "value": "hadamard"},
        {"key": "rht", "value": "none"},
        {"key": "none", "value": "none"},
    )
    runs = [run("kivi int2"), *(run("kivi int2", rotation=rotation) for rotation in sides)]
    assert tables.labels(runs) == [
        "kivi int2 rotation=none",
        "kivi int2 rotation=hadamard",
        "kivi int2 rotation=rht/none",
        "kivi int2 rotation=none",
    ]


def test_labels_do_not_repeat_a_map_of_layers_that_was_typed_in_two_ways():
    runs = [run("kivi int4 layers=0:fp16", layers=layers) for layers in ({"0": "fp16"}, ["0:fp16"])]
    assert tables.labels(runs) == ["kivi int4 layers=0:fp16"] * 2


def test_a_failed_run_says_so():
    runs = [run("fp16"), {**run("kivi int2", status="oom"), "scores": {}, "mean": aggregate.overall({})}]
    text = tables.table_text(runs, 140, color=False)
    assert "oom: 2 GiB more" in text


def test_markdown_and_csv_have_a_line_per_run():
    runs = four(2)
    lines = tables.runs_markdown(runs).splitlines()
    assert len(lines) == 2 + len(runs)
    assert len({line.count("|") for line in lines}) == 1
    table = list(csv.DictReader(io.StringIO(tables.runs_csv(runs))))
    assert [row["run"] for row in table] == ["fp16", "kivi int4", "kivi int2", "atom"]
    assert float(table[1]["task0@2048 vs_fp16"]) == pytest.approx(-0.2)
    assert int(table[1]["kv_bytes"]) == 1_500_000


def test_nothing_measured_is_a_dash():
    empty = copy.deepcopy(run("fp16"))
    empty["ttft_s"]["median"] = empty["tpot_s"]["median"] = empty["tpot_s"]["p99"] = None
    empty["kv_bytes"] = aggregate.kv_bytes([])
    empty["peak_bytes"] = aggregate.peak_bytes([])
    assert "-" in tables.table_text([empty], 100, color=False)


@pytest.mark.parametrize(
    ("count", "text"),
    [(None, "-"), (0, "0 B"), (999, "999 B"), (1536, "1.5 KiB"), (5 * 2**30, "5 GiB"), (2**50, "1.02e+03 TiB")],
)
def test_sizes(count, text):
    assert tables.size(count) == text


#: widths of the terminal, and numbers of tasks, that the splitting into tables is checked for
WIDTHS, TASKS = range(80, 161, 4), (2, 3, 5, 8)


def sweep(tasks: int) -> list[dict]:
    names = ["fp16", *["partial_logquant int2_g128"] * 7]
    return [run(name, tasks=tasks, residual=i) for i, name in enumerate(names)]


def column_widths(runs: list[dict]) -> list[int]:
    header, body = tables.table_grid(runs)
    widths = [max(len(name), *(line[i].width for line in body)) for i, name in enumerate(header)]
    return [min(widths[0], 34), *widths[1:]]  # a longer name takes a second line


def check_split(runs: list[dict], width: int) -> int:
    """Check that no column stands alone and that no column would better be in the next table; return their number."""
    text = tables.table_text(runs, width, color=False)
    assert max(map(len, text.splitlines())) <= width
    split = [len(table.columns) - 1 for table in tables.runs_screen(runs, width).renderables]
    if len(split) == 1:
        return 1
    names, *others = column_widths(runs)
    assert min(split) >= 2 and sum(split) == len(others), (split, text)
    ends = list(itertools.accumulate(split))
    blocks = [[part + 2 for part in others[end - count : end]] for end, count in zip(ends, split, strict=True)]
    assert all(names + sum(block) <= width for block in blocks)
    for left, right in itertools.pairwise(blocks):
        wider, narrower, moved = (left, right, left[-1]) if sum(left) > sum(right) else (right, left, right[0])
        assert len(wider) == 2 or sum(wider) - sum(narrower) <= moved, (split, text)
    return len(split)


def add_column(monkeypatch, heading: str, text: str, before: str | None = None) -> None:
    """Add a column to the tables, before the column named `before` or as the last one."""
    place = [column.name for column in columns.COLUMNS].index(before) if before else len(columns.COLUMNS)
    entry = columns.Column(heading, cell=lambda line: Cell(text))
    monkeypatch.setattr(columns, "COLUMNS", [*columns.COLUMNS[:place], entry, *columns.COLUMNS[place:]])


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("tasks", TASKS)
def test_no_column_stands_alone(width, tasks):
    check_split(sweep(tasks), width)


@pytest.mark.parametrize(
    ("heading", "text", "before"),
    [("new", "1", None), ("two words", "0.123 ±.012", "KV"), ("wide", "x" * 28, None), ("wide", "x" * 28, "peak")],
)
def test_no_column_stands_alone_after_one_more_is_added(monkeypatch, heading, text, before):
    add_column(monkeypatch, heading, text, before)
    assert heading in tables.table_grid(sweep(2))[0]
    numbers = [check_split(sweep(tasks), width) for tasks in TASKS for width in WIDTHS[::8]]
    assert max(numbers) > 1


@pytest.mark.parametrize("width", [80, 100, 160])
def test_a_hundred_columns_are_split_evenly(width):
    number = len(tables.table_grid(sweep(50))[0])
    assert len(tables.table_grid(runs := sweep(150 - number))[0]) == 100
    assert check_split(runs, width) > 1


@pytest.mark.parametrize("added", [0, 1, 2])
def test_one_table_where_a_narrower_gap_or_a_second_line_for_names_makes_it_fit(monkeypatch, added):
    for index in range(added):
        add_column(monkeypatch, f"new {index}", "1")
    runs = [run("a method of a name that is longer than its column is", tasks=2, residual=i) for i in range(3)]
    assert all(len(line[0].main) > 34 for line in tables.table_grid(runs)[1])
    widths = column_widths(runs)
    needed = sum(widths) + len(widths) - 1
    assert check_split(runs, needed) == 1
    assert check_split(runs, needed - 1) > 1


def test_labels_beside_columns_and_as_typed():
    runs = [run("a", x=None, y=[1, 2]), run("a", x=True, y=[1]), {**run("b"), "config": {**run("b")["config"]}}]
    runs[1]["config"]["model"] = "another"
    assert tables.labels(runs) == ["a model=tiny x=null y=[1,2]", "a model=another x=true y=[1]", "b"]
    assert tables.labels(runs, beside=("model",)) == ["a x=null y=[1,2]", "a x=true y=[1]", "b"]
    presets = [run("a", preset="one"), run("a", preset="two")]
    assert tables.labels(presets) == ["a", "a"]


def test_a_single_sample_says_why_it_has_no_times():
    alone = run("kivi int2")
    alone["samples"]["done"] = 1
    alone["ttft_s"], alone["tpot_s"] = aggregate.no_timings()["ttft_s"], aggregate.no_timings()["tpot_s"]
    assert "the warm-up" in tables.table_text([alone], 120, color=False)
    assert "the warm-up" not in tables.table_text([run("kivi int2")], 120, color=False)
    alone["samples"]["done"] = 0  # nothing was done at all
    assert "the warm-up" not in tables.table_text([alone], 120, color=False)


def test_a_busy_machine_is_said_once_for_all_its_runs():
    load = {"cpus": 2, "average": [3.0, 4.0], "mhz": [None, None], "own_cpus": 1.0, "other_cpus": 1.0, "held_back": 0.0}
    busy = [run(name) for name in ("a", "b", "c", "d", "e")]
    for each in busy[:4]:
        each["env"] = {**each["env"], "load": load}
    text = " ".join(tables.table_text(busy, 160, color=False).split())
    assert text.count("other programs used") == 1
    assert "a, b, c and 1 more: other programs used 1.0 of the machine's 2 processors" in text


def test_a_batch_and_what_a_sweep_shows_are_said_below_the_table():
    alone, batched = run("kivi int2", score=0.86), run("fp16", score=1.0)
    assert not any("batches" in line for line in tables.notes([alone, batched]))
    batched["config"]["batch_size"] = 8
    assert any(line.startswith("batches of 8 prompts: TTFT, TPOT and peak") for line in tables.notes([alone, batched]))
    wanted = "kivi int2 loses 14.0 points (95 %: 12.6 to 15.4) at 4.0x less memory"
    assert wanted in " ".join(tables.table_text([alone, batched], 160).split())
    assert "loses" not in tables.table_text([alone], 160)
