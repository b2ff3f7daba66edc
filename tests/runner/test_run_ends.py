"""Ends of a run over a made-up session: memory, errors, other ranks, and checks before the start."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from kvbench.errors import ModelError
from kvbench.results import summary
from kvbench.runner import origins, ranks, sources
from kvbench.runner import run as module
from kvbench.runner.run import answer_run
from kvbench.tasks.base import Sample
from tests.run_support import ToyTask, config
from tests.runner.loop_support import CODE, Session, logger

__all__ = ["logger"]


def test_memory_that_ran_out_in_a_batch_ends_the_run_and_keeps_what_is_done(tmp_path, logger) -> None:
    Session.fails["second/1"] = MemoryError("tried to allocate 77 bytes")
    metrics = answer_run(config(tmp_path, "fp16", dataset={"limit": 6}))
    assert metrics["status"] == "oom" and metrics["oom"]["bytes_asked"] == 77
    assert metrics["oom"]["code"] == CODE
    done = len(Session.batches)
    assert "second/1" in Session.batches[-1]
    assert metrics["oom"]["sample"] == Session.batches[-1][0]
    again = answer_run(config(tmp_path, "fp16", dataset={"limit": 6}))
    assert len(Session.batches) == done and again["oom"] == metrics["oom"], "it is final"
    assert again["env"] == metrics["env"]


def test_memory_that_ran_out_beyond_a_smaller_limit_is_nothing_to_it(tmp_path, logger) -> None:
    answer_run(config(tmp_path, "fp16", dataset={"limit": 1}))
    Session.fails["second/1"] = MemoryError("tried to allocate 77 bytes")
    assert answer_run(config(tmp_path, "fp16", dataset={"limit": 2}))["status"] == "oom"
    smaller = answer_run(config(tmp_path, "fp16", dataset={"limit": 1}))
    assert (smaller["status"], smaller["oom"], smaller["samples"]["done"]) == ("ok", None, 1)


def test_a_stored_out_of_memory_names_what_to_type(tmp_path, logger, monkeypatch, capsys) -> None:
    Session.fails["first/0"] = MemoryError("tried to allocate 77 bytes")
    answer_run(config(tmp_path, "fp16"))
    capsys.readouterr()
    answer_run(config(tmp_path, "fp16"))
    said = "fp16: an earlier attempt ran out of memory, which counts as a result; set runtime.retry=oom to try again"
    assert said in capsys.readouterr().err
    Session.fails.clear()
    assert answer_run(config(tmp_path, "fp16", runtime={"rerun": True}))["status"] == "oom", "the code is the same"
    monkeypatch.setattr(sources, "code", lambda config: {**CODE, "method": "n" * 12})
    capsys.readouterr()
    answer_run(config(tmp_path, "fp16"))
    said = capsys.readouterr().err
    assert "an earlier attempt with older code (changed since: method) ran out" in said
    assert "set runtime.rerun=true to try again" in said
    assert answer_run(config(tmp_path, "fp16", runtime={"rerun": True}))["status"] == "ok"


def test_an_error_after_the_samples_are_known_is_recorded_with_its_own_message(tmp_path, logger, monkeypatch) -> None:
    from kvbench.methods.fp16 import FP16

    def lacks(self: Any) -> None:
        raise ModelError("no encoder")

    monkeypatch.setattr(FP16, "ready", lacks)
    with pytest.raises(ModelError, match="no encoder"):
        answer_run(config(tmp_path, "fp16"))
    (last,) = logger.of("finish")
    assert (last["status"], last["error"], last["errors"][0]["sample"]) == ("error", "no encoder", None)


def test_data_notes_and_origin_are_recorded(tmp_path, logger, monkeypatch) -> None:
    settled: list[str] = []
    monkeypatch.setattr(origins, "settle", lambda store, checked: settled.append(store.run_id))
    monkeypatch.setattr(origins, "noted", lambda store: {"origin": {"model": {"revision": "abc"}}})
    monkeypatch.setattr(ToyTask, "notes", lambda self: {"licence": "MIT"})
    metrics = answer_run(config(tmp_path, "fp16"))
    assert metrics["data"] == {
        "identity": ToyTask(limit=4).identity(),
        "notes": {"licence": "MIT"},
        "origin": {"model": {"revision": "abc"}},
    }
    assert settled == [metrics["run_id"]] * 3, "before the weights are loaded, after it, and after the samples"
    assert metrics["scores"]["first"]["version"] == 1


class Team:
    """Ranks of which this process is one."""

    broken, shared, announced = False, None, True
    on_failure: Any = None

    def __init__(self, rank: int = 0) -> None:
        self.rank = rank
        self.told: list[list[str]] = []
        self.watched: list[Any] = []

    def tell(self, names: list[str]) -> None:
        self.told.append(names)

    def settle(self, rows: Any, failed: Any, seconds: float | None = None) -> list[Any]:
        self.watched.append(self.on_failure)
        if failed is not None:
            raise failed
        return [rows, rows]


def joined_as(monkeypatch, team: Team) -> None:
    @contextmanager
    def joined(*_: Any) -> Iterator[Team]:
        yield team

    monkeypatch.setattr(ranks, "joined_ranks", joined)


def test_the_first_rank_tells_the_others_what_is_missing_and_is_watched_meanwhile(
    tmp_path, logger, monkeypatch
) -> None:
    answer_run(config(tmp_path, "fp16", dataset={"limit": 1}))
    team = Team()
    joined_as(monkeypatch, team)
    metrics = answer_run(config(tmp_path, "fp16", dataset={"limit": 3}))
    assert team.told == [["second/1", "first/2"]]
    assert team.watched and all(callable(watch) for watch in team.watched) and team.on_failure is None
    assert metrics["kv_bytes"]["used"]["codes"] == round((6 + 12 + 12) / 3)


def test_a_rank_that_is_not_the_first_follows(tmp_path, logger, monkeypatch) -> None:
    team = Team(rank=1)
    joined_as(monkeypatch, team)
    monkeypatch.setattr(ranks, "follow", lambda checked, team: {"status": "ok", "rank": team.rank})
    assert answer_run(config(tmp_path, "fp16")) == {"status": "ok", "rank": 1}
    assert list(tmp_path.iterdir()) == []


def test_a_run_ends_at_the_first_error_if_the_others_are_lost(tmp_path, logger, monkeypatch) -> None:
    team = Team()
    joined_as(monkeypatch, team)
    Session.fails.update({"first/0": ValueError("lost"), "second/1": ValueError("lost"), "first/2": ValueError("lost")})
    team.broken = True
    metrics = answer_run(config(tmp_path, "fp16"))
    assert len(Session.batches) == 1 and metrics["status"] == "error"


def test_fp16_pairs_its_siblings_at_its_end(tmp_path, logger, monkeypatch) -> None:
    paired: list[str] = []
    monkeypatch.setattr(summary, "pair_siblings", lambda store: paired.append(store.run_id))
    metrics = answer_run(config(tmp_path, "fp16"))
    assert paired == [metrics["run_id"]]


def test_weights_that_are_missing_are_noticed_before_anything_else_unless_nothing_is_missing(
    tmp_path, logger, monkeypatch
) -> None:
    located: list[str] = []
    monkeypatch.setattr(module, "locate", lambda model: located.append(model.name))
    Session.fails["first/0"] = MemoryError("full")
    answer_run(config(tmp_path, "fp16", dataset={"limit": 1}))
    assert located == ["toy"]
    answer_run(config(tmp_path, "fp16", dataset={"limit": 1}))
    assert located == ["toy"], "memory ran out before"
    Session.fails.clear()
    answer_run(config(tmp_path, "fp16", dataset={"limit": 1}, runtime={"retry": "oom"}))
    answer_run(config(tmp_path, "fp16", dataset={"limit": 2}))
    assert located == ["toy"], "a stored row shows that the weights are there"


def test_points_that_did_not_fit_are_tried_again_on_demand(tmp_path, logger, monkeypatch) -> None:
    rows = Session.rows

    def too_large(self: Session, samples: list[Sample]) -> list[dict[str, Any]]:
        return [{**row, "status": "oom"} for row in rows(self, samples)]

    with monkeypatch.context() as patch:
        patch.setattr(Session, "rows", too_large)
        answer_run(config(tmp_path, "fp16", dataset={"limit": 2}))
    answer_run(config(tmp_path, "fp16", dataset={"limit": 2}))
    assert len(Session.batches) == 1
    answer_run(config(tmp_path, "fp16", dataset={"limit": 2}, runtime={"retry": "oom"}))
    assert len(Session.batches) == 2


def test_the_tokens_of_the_model_are_bound_to_a_task_that_needs_them(tmp_path, logger, monkeypatch) -> None:
    bound: list[Any] = []
    monkeypatch.setattr("kvbench.models.load.load_tokenizer", lambda model: f"the tokenizer of {model.name}")
    monkeypatch.setattr(ToyTask, "bind", lambda self, tokenizer: bound.append(tokenizer))
    answer_run(config(tmp_path, "fp16"))
    assert bound == []
    monkeypatch.setattr(ToyTask, "needs_tokenizer", True)
    answer_run(config(tmp_path, "fp16"))
    assert bound == ["the tokenizer of toy"]


def test_what_a_machine_lacks_is_said_before_anything_is_written(tmp_path, logger, monkeypatch) -> None:
    def lacks(checked: Any) -> None:
        raise ModelError("no package")

    monkeypatch.setattr(module, "check_here", lacks)
    with pytest.raises(ModelError, match="no package"):
        answer_run(config(tmp_path, "fp16"))
    assert list(tmp_path.iterdir()) == []


def test_a_session_without_memory_is_a_result_and_another_error_is_raised(tmp_path, logger, monkeypatch) -> None:
    @contextmanager
    def full(*_: Any) -> Iterator[Any]:
        raise MemoryError("tried to allocate 99 bytes")
        yield

    monkeypatch.setattr(ranks, "open_session", full)
    metrics = answer_run(config(tmp_path, "fp16"))
    assert (metrics["status"], metrics["oom"]["bytes_asked"], metrics["oom"]["sample"]) == ("oom", 99, None)
