"""The loop of a run over a session that is made up: what is recorded, logged and shown, without a model."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar

import torch

from kvbench.results import load
from kvbench.results.samples import MEASURED
from kvbench.runner import run as module
from kvbench.runner.run import answer_run
from kvbench.tasks.base import Sample
from tests.run_files import on_disk, store_of
from tests.run_support import ToyTask, config
from tests.runner.loop_support import CODE, Session, logger

__all__ = ["logger"]


def test_every_new_row_is_logged_with_its_prompt_and_the_stored_ones_at_the_beginning(tmp_path, logger) -> None:
    answer_run(config(tmp_path, "fp16", dataset={"limit": 2}))
    assert logger.calls[0] == ("begin", []) and [name for name, _ in logger.calls] == [
        "begin",
        "sample",
        "sample",
        "finish",
    ]
    first = logger.of("sample")[0]
    assert first["prompt_head"].startswith("Read: word") and first["prompt_tail"] == ""
    assert first["reference"] == " word" + first["id"][-1] and first["scores"]["score"] == 0.5
    logger.calls.clear()
    metrics = answer_run(config(tmp_path, "fp16", dataset={"limit": 4}))
    (stored,) = logger.of("begin")
    assert [row["id"] for row in stored] == [row["id"] for row in store_of(metrics).samples().rows.values()][:2]
    assert all(row["prompt_head"].startswith("Read: ") for row in stored)
    assert sorted(row["id"] for row in logger.of("sample")) == ["first/2", "second/3"]
    logger.calls.clear()
    answer_run(config(tmp_path, "fp16", dataset={"limit": 1}))
    assert [[row["id"] for row in rows] for rows in logger.of("begin")] == [["first/0"]], "samples outside the limit"


def test_the_last_message_has_the_metrics_and_is_sent_once_to_each_place(tmp_path, logger) -> None:
    logger.place = "here"
    metrics = answer_run(config(tmp_path, "fp16"))
    assert logger.of("finish") == [on_disk(metrics)]
    assert list(store_of(metrics).deliveries()) == ["here"]
    logger.calls.clear()
    answer_run(config(tmp_path, "fp16"))
    assert logger.of("finish") == [], "it has them already"
    logger.place = "there"
    answer_run(config(tmp_path, "fp16"))
    assert len(logger.of("finish")) == 1 and set(store_of(metrics).deliveries()) == {"here", "there"}
    answer_run(config(tmp_path, "fp16", dataset={"limit": 2}))
    assert len(logger.of("finish")) == 2, "they have changed"


def test_a_delivery_that_failed_is_repeated(tmp_path, logger) -> None:
    logger.place, logger.failed = "here", True
    metrics = answer_run(config(tmp_path, "fp16"))
    assert store_of(metrics).deliveries() == {}
    logger.failed = False
    answer_run(config(tmp_path, "fp16"))
    assert len(logger.of("finish")) == 2 and list(store_of(metrics).deliveries()) == ["here"]


def test_a_logger_without_a_place_decides_itself(tmp_path, logger) -> None:
    metrics = answer_run(config(tmp_path, "fp16"))
    answer_run(config(tmp_path, "fp16"))
    assert len(logger.of("finish")) == 2 and store_of(metrics).deliveries() == {}


def test_rows_record_the_code_of_their_kind_of_device(tmp_path, logger, monkeypatch) -> None:
    (row, *_) = store_of(answer_run(config(tmp_path / "cpu", "fp16"))).samples().rows.values()
    assert row[MEASURED]["code"] == {"method": "m" * 12, "scorer": "s" * 12}
    monkeypatch.setattr(Session, "device", torch.device("cuda"))
    (row, *_) = store_of(answer_run(config(tmp_path / "gpu", "fp16"))).samples().rows.values()
    assert row[MEASURED]["code"] == CODE


def test_the_environment_is_that_of_the_session(tmp_path, logger, monkeypatch) -> None:
    monkeypatch.setattr(load, "busyness", lambda found: None)
    metrics = answer_run(config(tmp_path, "fp16"))
    env = on_disk(metrics)["env"]
    assert (env["device"], env["device_name"], env["dtype"]) == ("cpu", "a cpu", "float32")
    assert (env["devices"], env["layout"]) == (["cpu"], "one device")
    assert list(metrics["timings"]) == ["a cpu"] and metrics["code"] == {next(iter(metrics["code"])): 4}
    assert store_of(metrics).environment() == env


def test_the_bar_counts_what_is_done_and_shows_the_last_score(tmp_path, logger, monkeypatch) -> None:
    bars: list[Any] = []

    class Bar:
        def __init__(self, title: str, total: int, done: int) -> None:
            self.opened, self.total, self.steps = (title, total, done), total, []
            bars.append(self)

        def __enter__(self) -> Any:
            return self

        def __exit__(self, *_: Any) -> None:
            pass

        def within(self, share: float, note: str) -> None:
            pass

        def advance(self, count: int, note: str) -> None:
            self.steps.append((count, note))

    monkeypatch.setattr(module, "Progress", Bar)
    answer_run(config(tmp_path, "fp16", dataset={"limit": 1}))
    answer_run(config(tmp_path, "fp16", dataset={"limit": 4}))
    assert [bar.opened for bar in bars] == [("fp16", 1, 0), ("fp16", 4, 1)]
    assert sorted(count for count, _ in bars[1].steps) == [1, 2]
    assert all(note.endswith(" 0.50") for _, note in bars[1].steps)


def test_a_finished_run_says_so_and_keeps_its_environment(tmp_path, logger, monkeypatch, capsys) -> None:
    first = answer_run(config(tmp_path, "fp16"))
    capsys.readouterr()
    monkeypatch.setattr(module, "environment", lambda *_: {"device": "another"})
    again = answer_run(config(tmp_path, "fp16", dataset={"limit": 3}))
    assert "fp16: all 3 samples are already done" in capsys.readouterr().err
    assert again["env"] == first["env"] and len(Session.batches) == 2


class Growing(ToyTask):
    """A task whose next sample depends on the rows so far: at most three, one after the other."""

    adaptive: ClassVar[bool] = True

    def next_samples(self, rows: Any) -> Iterator[Sample]:
        for sample in self.samples():
            yield sample
            if sample.id not in rows:
                return


def test_an_adaptive_task_is_asked_after_every_row(tmp_path, logger, monkeypatch) -> None:
    monkeypatch.setattr(ToyTask, "adaptive", True)
    monkeypatch.setattr(ToyTask, "next_samples", Growing.next_samples)
    metrics = answer_run(config(tmp_path, "fp16", dataset={"limit": 3}))
    assert Session.batches == [["first/0"], ["second/1"], ["first/2"]]
    assert (metrics["samples"]["requested"], metrics["samples"]["done"]) == (3, 3)


def test_an_adaptive_task_does_not_ask_again_for_what_failed(tmp_path, logger, monkeypatch) -> None:
    monkeypatch.setattr(ToyTask, "adaptive", True)
    Session.fails["second/1"] = ValueError("a bad record")
    metrics = answer_run(config(tmp_path, "fp16", dataset={"limit": 3}))
    assert Session.batches == [["first/0"], ["second/1"], ["first/2"]]
    assert metrics["status"] == "error" and metrics["samples"]["done"] == 2


def test_an_adaptive_task_may_begin_with_nothing(tmp_path, logger, monkeypatch) -> None:
    monkeypatch.setattr(ToyTask, "adaptive", True)
    metrics = answer_run(config(tmp_path, "fp16", dataset={"limit": 0}))
    assert metrics["status"] == "ok" and metrics["samples"]["done"] == 0


def test_warm_up_samples_are_not_counted(tmp_path, logger, monkeypatch) -> None:
    plain = ToyTask.samples

    def samples(self: ToyTask) -> Iterator[Sample]:
        yield Sample("warm", "first", "p", (), 1, warm_up=True)
        yield from plain(self)

    monkeypatch.setattr(ToyTask, "samples", samples)
    metrics = answer_run(config(tmp_path, "fp16", dataset={"limit": 2}))
    assert (metrics["samples"]["requested"], metrics["samples"]["done"]) == (2, 2)
    assert "warm" in store_of(metrics).samples().rows and Session.batches[0] == ["warm"]
    monkeypatch.setattr(ToyTask, "samples", plain)
    assert answer_run(config(tmp_path, "fp16", dataset={"limit": 1}))["samples"]["left_out"] == ["second/1"]
