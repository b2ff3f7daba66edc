"""Stored rows of older code: which they are, what is said of them, and when samples may be added."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from kvbench.methods.kivi import Kivi
from kvbench.results import code as codes
from kvbench.results.samples import MEASURED
from kvbench.runner import stored
from kvbench.runner.stored import OlderCodeError, remedies, split_by_code
from tests.run_support import ToyTask

NOW = {"method": "m" * 12, "cache": "c" * 12, "task": "t" * 12, "scorer": "s" * 12}


def row(**code: Any) -> dict[str, Any]:
    return {MEASURED: {"code": {**NOW, **code}}}


OLD = "0123456789ab"
ROWS = {
    "a": row(),
    "b": row(method=OLD),
    "c": row(method="ba9876543210", cache=OLD),
    "d": row(scorer="edited"),
    "e": {MEASURED: {}},
}


def checked(mix_code: bool = False) -> Any:
    return SimpleNamespace(method=object.__new__(Kivi), task=ToyTask(), runtime=SimpleNamespace(mix_code=mix_code))


def test_rows_are_separated_by_the_parts_that_have_changed() -> None:
    current, older = split_by_code(ROWS, NOW)
    assert list(current) == ["a", "d"] and current["a"] is ROWS["a"]
    assert older == {"b": ["method"], "c": ["method", "cache"], "e": ["unknown"]}


def check(rows: Any, wanted: list[str], missing: int, mix_code: bool = False) -> str:
    lines: list[str] = []
    stored.check_older_rows(rows, wanted, missing, NOW, checked(mix_code), label="kivi int2", say=lines.append)
    return "".join(lines)


def test_rows_of_the_current_code_are_nothing_to_mention() -> None:
    assert check(ROWS, ["a", "d", "absent"], 1) == ""


def test_older_rows_are_shown_with_a_warning() -> None:
    message = check(ROWS, ["a", "b", "c"], 0)
    assert message.startswith(
        "kivi int2: warning: 2 of 3 samples were made by older code: "
        "method (was 01234567, ba987654, is mmmmmmmm), cache (was 01234567, is cccccccc); "
        "the stored results are shown unchanged\n  hint: set runtime.rerun=true to repeat the 2 old samples; "
        "or set `version = 2` in class Kivi to start a new run and keep the 2 old samples"
    )
    assert "unknown" in check(ROWS, ["a", "b", "e"], 0)
    assert "1 of 1 samples do not record which code made them (unknown)" in check(ROWS, ["e"], 0)


def test_samples_are_not_added_to_older_rows_unless_one_says_so() -> None:
    with pytest.raises(OlderCodeError) as error:
        check(ROWS, ["a", "b", "absent"], 1)
    assert "kivi int2: 1 of 3 samples were made by older code" in str(error.value)
    assert "and 1 samples are missing. A run must not mix" in str(error.value)
    assert "set runtime.mix_code=true to add the 1 missing samples anyway" in str(error.value)
    message = check(ROWS, ["a", "b", "absent"], 1, mix_code=True)
    assert message.endswith("; the 1 missing samples are made by the current code (runtime.mix_code=true)")


def test_samples_of_another_storage_are_not_added_whatever_one_says() -> None:
    rows = {"a": {MEASURED: {"code": NOW, "dtype": "float32"}}, "b": {MEASURED: {"code": NOW, "dtype": "bfloat16"}}}
    now = {**NOW, **codes.storage_now({"model": {"dtype": "auto"}})}
    with pytest.raises(OlderCodeError, match=r"(?s)1 of 3 samples.*storage.*runtime.rerun=true.*model.dtype=float32"):
        stored.check_older_rows(
            rows, ["a", "b", "absent"], 1, now, checked(mix_code=True), label="kivi int2", say=print
        )


def test_a_class_whose_code_has_changed_may_get_a_new_version(monkeypatch) -> None:
    monkeypatch.setattr(ToyTask, "version", 4)
    hint = remedies({"a": ["task"], "b": ["quantizer", "cache"]}, checked())
    assert hint == (
        "set runtime.rerun=true to repeat the 2 old samples"
        "; or set `version = 2` in class QuantizerSpec to start a new run and keep the 2 old samples"
        "; or set `version = 5` in class ToyTask to start a new run and keep the 2 old samples"
    )
    assert remedies({"a": ["cache"]}, checked()) == "set runtime.rerun=true to repeat the old sample"
