"""Failures of a run: which one gives the run its status, and what is said and recorded of each."""

from __future__ import annotations

import pytest
import torch

from kvbench.runner.run_state import MAX_ERRORS, Failures, lost


def test_memory_that_ran_out_is_the_status_whatever_failed_before() -> None:
    failures = Failures("kivi int2")
    assert failures.status == "ok"
    failures.add("a", ValueError("a record without a question"), show=lambda line: None)
    assert failures.status == "error"
    failures.ran_out(torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."), "b")
    assert failures.status == "oom"
    assert failures.samples() == {"a"}
    assert failures.oom is not None and failures.oom["bytes_asked"] == 2 << 30


@pytest.mark.parametrize(
    ("message", "sample", "asked", "where", "size"),
    [
        ("tried to allocate 3.00 GiB", "b/7", 3 << 30, "b/7", "3 GiB"),
        ("no more", None, None, "loading the model", "an unknown amount"),
    ],
)
def test_memory_that_ran_out_is_recorded_with_its_code_and_said(capsys, message, sample, asked, where, size) -> None:
    failures = Failures("kivi int2", {"method": "0123"})
    failures.ran_out(MemoryError(message + ". " + "x" * 2000), sample)
    assert failures.oom == {
        "bytes_asked": asked,
        "sample": sample,
        "message": (message + ". " + "x" * 2000)[:1000],
        "code": {"method": "0123"},
    }
    printed = capsys.readouterr().err
    assert printed == f"kivi int2: out of memory during {where} (requested: {size}); recorded as a result\n"


def test_a_run_gives_up_at_the_third_failure_and_shows_each_message_once() -> None:
    failures, lines = Failures("kivi int2"), []
    went_on = [failures.add(name, ValueError("bad" if name != "b" else "worse"), lines.append) for name in "abc"]
    assert MAX_ERRORS == 3 and went_on == [True, True, False]
    assert lines == ["kivi int2: a: bad", "kivi int2: b: worse", "kivi int2: stopped, because 3 samples failed"]
    assert [(error["sample"], error["type"], error["message"]) for error in failures.errors] == [
        ("a", "ValueError", "bad"),
        ("b", "ValueError", "worse"),
        ("c", "ValueError", "bad"),
    ]


def test_samples_that_failed_alike_are_named_after_the_first(capsys) -> None:
    failures = Failures("kivi int2")
    for name, message in (("a", "bad"), ("b", "worse"), ("c", "bad"), ("d", "bad")):
        failures.add(name, ValueError(message), lambda line: None)
    failures.say_repeats()
    assert capsys.readouterr().err.splitlines() == ["kivi int2: 2 more samples failed with the same error as a: c, d"]


@pytest.mark.parametrize(
    ("kind", "oom", "expected"),
    [
        ("KeyboardInterrupt", False, ("interrupted", None, None)),
        (
            "OutOfMemoryError",
            True,
            ("oom", {"bytes_asked": 77, "sample": None, "message": "rank 2: tried to allocate 77 bytes"}, None),
        ),
        (
            "ValueError",
            False,
            (
                "error",
                None,
                {
                    "sample": None,
                    "type": "ValueError",
                    "message": "rank 2: tried to allocate 77 bytes",
                    "traceback": "",
                },
            ),
        ),
    ],
)
def test_the_failure_of_another_rank_ends_the_run_as_ones_own_would(kind, oom, expected) -> None:
    failure = {"rank": 2, "kind": kind, "message": "tried to allocate 77 bytes", "oom": oom}
    assert lost(failure) == expected
