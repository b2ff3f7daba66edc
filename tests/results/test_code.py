"""Versions of the code that made rows: which parts count, what has changed, and how a table says it."""

from __future__ import annotations

from typing import Any

import pytest

from kvbench.results import code
from kvbench.results.samples import MEASURED

NOW = {"method": "m", "cache": "c", "scorer": "s", "kernels": "k", "quantizer": None}


def row(name: str = "a", **own: Any) -> dict[str, Any]:
    return {"id": name, MEASURED: {"code": own or None}}


def test_kernels_matter_on_a_gpu_only() -> None:
    assert code.used(NOW, on_gpu=True) == NOW
    assert code.used(NOW, on_gpu=False) == {key: value for key, value in NOW.items() if key != "kernels"}


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


def test_parts_are_named_in_the_order_of_how_often_they_are_edited() -> None:
    parts = ["unknown", "cache", "task", "method", "quantizer"]
    assert sorted(parts, key=code.order) == ["method", "quantizer", "task", "cache", "unknown"]


def test_shared_parts_that_differ_from_fp16_are_named_once() -> None:
    rows = [row("a", method="m", cache="c", decoding="d"), row("b", method="m", cache="x", decoding="d"), row("c")]
    full = {"a": row("a", method="f", cache="c", decoding="e"), "b": row("b", cache="c", decoding="d", kernels="z")}
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
