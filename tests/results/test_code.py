"""Versions of the code that made rows: which parts count, what has changed, and how a table says it."""

from __future__ import annotations

from typing import Any

import pytest

from kvbench.results import code
from kvbench.results.samples import MEASURED

NOW = {"method": "m", "cache": "c", "scorer": "s", "quantizer": None}
FAMILIES = {"attention/cuda": "a", "attention/triton": "t", "attention/cpu": "p"}
ON_GPU = {"cache/kernels": "k", "attention/kernels": "l", "decoding/steps": "d"}
SOME = {"runner/points": "o", "runner/fidelity": "f", "runner/shared_runs": "r"}
ALL = {**NOW, **FAMILIES, **ON_GPU, **SOME}


def row(name: str = "a", **own: Any) -> dict[str, Any]:
    return {"id": name, MEASURED: {"code": own or None}}


def used(path: str | None, on_gpu: bool = True, measured: Any = (), **more: Any) -> set[str]:
    """The parts that count for a row with an attention path beside those of every row."""
    attention = None if path is None else {"path": path}
    computed = code.used(ALL, {**more, MEASURED: {"attention": attention, **dict(measured)}}, on_gpu=on_gpu)
    assert {part: computed.get(part) for part in NOW} == NOW and computed == {part: ALL[part] for part in computed}
    return set(computed) - set(NOW)


@pytest.mark.parametrize(
    ("path", "families"),
    [
        ("cuda", {"attention/cuda"}),
        ("cuda+triton", {"attention/cuda", "attention/triton"}),
        ("cpu:avx512+sdpa", {"attention/cpu"}),
        ("reference (cuda: head dimension 80; triton: the same)+packing by torch (cuda)", set()),
        ("sdpa", set()),
        ("cudagraphs", set()),
        ("none", set(FAMILIES)),
        (None, set(FAMILIES)),
    ],
)
def test_the_kernels_of_attention_count_where_the_path_names_them(path: Any, families: set[str]) -> None:
    assert used(path, on_gpu=False) == families
    assert used(path) == families | set(ON_GPU)


def test_the_kernel_of_a_draft_is_unknown() -> None:
    assert used("sdpa", on_gpu=False, speculation={}) == set(FAMILIES)
    assert used("sdpa", on_gpu=False, measured={"point": {"speculation": {}}}) == {*FAMILIES, "runner/points"}


@pytest.mark.parametrize(
    ("stepping", "counts"),
    [("graph", True), ("graph, compiled", True), (None, True), ("eager", False), ("eager (few steps)", False)],
)
def test_captured_steps_count_on_a_gpu_unless_steps_were_eager(stepping: Any, counts: bool) -> None:
    for measured in ({"stepping": stepping}, {"point": {"stepping": stepping}}):
        measured = {} if stepping is None else measured
        assert ("decoding/steps" in used("cuda", measured=measured)) == counts
        assert "decoding/steps" not in used("sdpa", on_gpu=False, measured=measured)


def test_figures_that_only_some_rows_have() -> None:
    assert used("sdpa", on_gpu=False, measured={"point": {"status": "ok"}}) == {"runner/points"}
    assert used("sdpa", on_gpu=False, measured={"shared_prefill": {"methods": 2}}) == {"runner/shared_runs"}
    assert used("sdpa", on_gpu=False, fidelity={"kld": [0.1]}) == {"runner/fidelity"}
    assert used("sdpa", on_gpu=False, fidelity=None) == set()


def test_all_that_predictions_to_compare_with_may_use_on_a_device() -> None:
    assert code.used(ALL, None, on_gpu=True) == ALL
    assert code.used(ALL, None, on_gpu=False) == {**NOW, **FAMILIES, "runner/fidelity": "f"}


@pytest.mark.parametrize(
    ("stored", "changed"),
    [
        (None, ["unknown"]),
        ({}, []),
        (NOW, []),
        ({"method": "n", "cache": "d"}, ["method", "cache"]),
        ({"scorer": "t"}, []),
        ({"cache": None}, []),
        ({"quantizer": "q"}, []),
        ({"absent": "a"}, []),
    ],
)
def test_parts_that_have_changed(stored: Any, changed: list[str]) -> None:
    assert code.changed(stored, NOW) == changed


def test_a_digest_leaves_out_the_scorer_and_the_order() -> None:
    one = code.code_digest({"method": "m", "cache": "c", "scorer": "s"})
    assert len(one) == 12 and one == code.code_digest({"cache": "c", "method": "m", "scorer": "t"})
    assert one != code.code_digest({"method": "m", "cache": "d"}) and code.code_digest(None) == "unknown"


def test_rows_are_counted_by_their_code() -> None:
    rows = [
        row("a", method="m", scorer="s"),
        row("b", method="m", scorer="t"),
        row("c", method="n"),
        row("d"),
        {"id": "e"},
    ]
    counts, parts = code.kinds(rows)
    first, second = code.code_digest({"method": "m"}), code.code_digest({"method": "n"})
    assert counts == {first: 2, second: 1, "unknown": 2}
    assert parts == {first: {"method": "m"}, second: {"method": "n"}}
    assert code.older(counts, parts, {"method": "n", "scorer": "u"}) == {"samples": 4, "parts": ["method", "unknown"]}
    assert code.older({first: 2}, parts, {"method": "m"}) is None


def test_rows_of_one_version_may_have_used_different_kernels() -> None:
    both = {"cache": "c", "attention/cuda": "a", "attention/triton": "t"}
    rows = [row(cache="c"), row(cache="c", **{"attention/cuda": "a"}), row(cache="c", **{"attention/triton": "t"})]
    assert code.kinds(rows) == ({code.code_digest(both): 3}, {code.code_digest(both): both})
    counts, parts = code.kinds([*rows, row(cache="c", **{"attention/cuda": "b"}), row(cache="d")])
    assert sorted(counts.values()) == [1, 1, 3] and len(parts) == 3
    assert code.older(counts, parts, {**both, "attention/cuda": "b"}) == {
        "samples": 4,
        "parts": ["attention/cuda", "cache"],
    }
    assert len(code.kinds([row(cache="c"), row(cache="c", method="m")])[0]) == 2


def test_kernels_of_rows_before_there_were_families_of_them() -> None:
    """Old rows keep what they recorded; digests of all kernels in one part are not compared with those of today."""
    old = row(method="m", kernels="old")
    assert code.of(old) == {"method": "m", "kernels": "old"} and code.changed(code.of(old), ALL) == []
    assert code.kinds([old, row(method="m")])[0] == {code.code_digest({"method": "m", "kernels": "old"}): 2}


def test_parts_are_named_in_the_order_of_how_often_they_are_edited() -> None:
    parts = ["unknown", "models", "cache", "task", "method", "quantizer"]
    assert sorted(parts, key=code.order) == ["method", "quantizer", "task", "cache", "models", "unknown"]


def test_shared_parts_that_differ_from_fp16_are_named_once() -> None:
    mine = {"attention/cuda": "y", "decoding": "d"}
    rows = [row("a", method="m", cache="c", **mine), row("b", method="m", cache="x", kernels="y", **mine), row("c")]
    full = {
        "a": row("a", method="f", cache="c", decoding="e"),
        "b": row("b", cache="c", decoding="d", kernels="z", **{"attention/cuda": "z"}),
    }
    assert code.unlike(rows, full) == ["cache", "decoding"]
    assert code.unlike(rows, {}) == [] and code.unlike(rows[:1], {"a": {"id": "a"}}) == []


def test_the_mark_of_a_run_in_tables() -> None:
    assert (code.older_code_remark([]), code.older_code_remark(["unknown"])) == ("", "unknown code")
    assert code.older_code_remark(["method", "unknown"]) == "older code: method, unknown"


def test_a_row_without_digests_by_part_has_none() -> None:
    assert code.of(row()) is None and code.of({"id": "a"}) is None
    assert code.of({MEASURED: {"code": "0123"}}) is None
    own = {"method": "m"}
    computed = code.of({MEASURED: {"code": own}})
    assert computed == own and computed is not own
