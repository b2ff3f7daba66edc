"""The same command after an edit of code outside the package: a method, its base class, a quantizer, a data set.

The files are really edited, and imported anew as another process would.
"""

from __future__ import annotations

import importlib
import sys
import textwrap
from pathlib import Path

import pytest

from kvbench.cli import report
from kvbench.methods.kivi import Kivi
from kvbench.results import samples
from kvbench.results.samples import MEASURED
from kvbench.runner import sources
from kvbench.runner.run import answer_run
from kvbench.runner.stored import OlderCodeError
from kvbench.tasks.base import Task
from tests.marks import fast
from tests.run_files import on_disk, store_of
from tests.run_support import METHODS, ToyTask, config

FILES = {
    "stale_quantizer": '''
        """Codes that are a level too high."""
        from kvbench.quantizers.affine import AffineQuantizer

        class Shifted(AffineQuantizer):
            """Shift the groups' minimum."""

            def encode_groups(self, x, low, high):
                return super().encode_groups(x, low - 0.5, high)
        ''',
    "stale_base": '''
        """A base class."""
        from dataclasses import dataclass
        from kvbench.methods.kivi import Kivi
        from kvbench.quantizers.affine import AffineQuantizer
        from stale_quantizer import Shifted

        @dataclass(kw_only=True)
        class Base(Kivi):
            """KIVI with a quantizer of its own."""

            def segments(self, layer, side):
                made = super().segments(layer, side)
                for segment in made:
                    mine = getattr(segment, "quantizer", None)
                    if type(mine) is AffineQuantizer:
                        segment.quantizer = Shifted(mine.bits, mine.group_size, mine.axis)
                return made
        ''',
    "stale_method": '''
        """A method."""
        from dataclasses import dataclass
        from typing import ClassVar
        from stale_base import Base

        @dataclass(kw_only=True)
        class Mine(Base):
            """The base with other defaults."""

            version: ClassVar[int] = 1
            sinks: int = 2  # exact
        ''',
    "stale_task": '''
        """A data set."""
        from dataclasses import dataclass
        from typing import ClassVar
        from tests.run_support import ToyTask

        @dataclass(kw_only=True)
        class Questions(ToyTask):
            """Prompts with another ending."""

            def samples(self):
                yield from super().samples()

            def score(self, sample, prediction):
                return {"score": 0.5}
        ''',
}

#: part -> (module, text, what an edit makes of it)
EDITS = {
    "method": ("stale_method", "sinks: int = 2", "sinks: int = 4"),
    "base": ("stale_base", "type(mine) is AffineQuantizer", "type(mine) is AffineQuantizer and side == 'key'"),
    "quantizer": ("stale_quantizer", "low - 0.5", "low - 5.0"),
    "task": ("stale_task", "super().samples()", "reversed(list(super().samples()))"),
}
PARTS = {"method": "method", "base": "method", "quantizer": "quantizer", "task": "task"}


class Workshop:
    """A user's folder of modules, and runs of what is in it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        for name, text in FILES.items():
            self.write(name, textwrap.dedent(text))

    def write(self, name: str, text: str) -> None:
        (self.folder / f"{name}.py").write_text(text)
        for module in FILES:
            sys.modules.pop(module, None)
        importlib.invalidate_caches()

    def edit(self, name: str, old: str, new: str) -> None:
        text = (self.folder / f"{name}.py").read_text()
        assert old in text
        self.write(name, text.replace(old, new))

    def run(self, limit: int = 2, results: str = "runs", **runtime) -> dict:
        method, quantizer = METHODS["kivi"]
        settings = config(
            self.folder / results,
            dataset={"_target_": "stale_task.Questions", "limit": limit},
            runtime=runtime,
        )
        settings["method"] = {**method, "_target_": "stale_method.Mine"}
        del settings["method"]["sinks"]  # the class's own default
        assert settings["quantizer"] == quantizer
        return answer_run(settings)


@pytest.fixture
def workshop(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)  # edits within a second of each other
    yield Workshop(tmp_path)
    for name in FILES:
        sys.modules.pop(name, None)


def never_load(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvbench.runner.session.load_joined", lambda *_: pytest.fail("the model was loaded"))


@pytest.mark.parametrize("part", fast(EDITS, ["base", "task"]))
def test_edited_code_is_named_marked_and_never_mixed(workshop, part, monkeypatch, capsys):
    if part == "method":  # a default of the class stands in the identity; here it must not hide the edit
        workshop.edit(
            "stale_method", "sinks: int = 2  # exact", "\n    def reach(self):\n        return super().reach()"
        )
    first = workshop.run(3)
    assert first["status"] == "ok" and first["older"] is None
    before = store_of(first).samples_path.read_bytes()
    capsys.readouterr()

    module, old, new = EDITS[part]
    if part == "method":
        old, new = "return super().reach()", "return super().reach() or None"
    workshop.edit(module, old, new)
    with monkeypatch.context() as patch:
        never_load(patch)
        stored = workshop.run(3)
        assert stored["run_id"] == first["run_id"]
        message = capsys.readouterr().err
        assert f"warning: 3 of 3 samples were made by older code: {PARTS[part]} (was " in message
        assert "set runtime.rerun=true to repeat the 3 old samples" in message
        owner = {"method": "Mine", "quantizer": "QuantizerSpec", "task": "Questions"}[PARTS[part]]
        assert f"`version = 2` in class {owner} to start a new run" in message
        assert stored["status"] == "older"
        assert on_disk(stored)["older"] == {"samples": 3, "parts": [PARTS[part]]}
        assert stored["scores"] == first["scores"]
        with pytest.raises(OlderCodeError, match=f"3 of 5 samples were made by older code: {PARTS[part]}") as refusal:
            workshop.run(5)
    assert "runtime.rerun=true" in str(refusal.value) and "runtime.mix_code=true" in str(refusal.value)
    assert store_of(first).samples_path.read_bytes() == before  # nothing was mixed

    capsys.readouterr()
    monkeypatch.setenv("COLUMNS", "200")
    assert report.main(["--results", str(workshop.folder / "runs")]) == 0
    shown = "".join(capsys.readouterr().out.split())  # a narrow column breaks its words
    assert f"older:{PARTS[part]}".replace(" ", "") in shown

    anew = workshop.run(5, rerun=True)
    assert "3 stored samples were made by older code; running them again" in capsys.readouterr().err
    assert anew["status"] == "ok" and anew["older"] is None and anew["samples"]["done"] == 5
    assert len(on_disk(anew)["code"]) == 1 and anew["code"] != first["code"]
    with monkeypatch.context() as patch:
        never_load(patch)
        assert workshop.run(5, rerun=True)["status"] == "ok"  # done once: nothing is older any more
        assert workshop.run(5)["status"] == "ok"
    elsewhere = workshop.run(5, results="fresh")
    rows, fresh = (store_of(metrics).samples().rows for metrics in (anew, elsewhere))
    assert {name: samples.outputs(row) for name, row in rows.items()} == {
        name: samples.outputs(row) for name, row in fresh.items()
    }


@pytest.mark.parametrize("module", FILES)
def test_what_cannot_matter_trips_nothing(workshop, module, monkeypatch, capsys):
    first = workshop.run(2)
    text = (workshop.folder / f"{module}.py").read_text()
    lines = [line for line in text.splitlines() if not line.strip().startswith('"""')]
    workshop.write(module, "# a comment\n" + "\n\n".join(lines) + "\n")
    never_load(monkeypatch)
    capsys.readouterr()
    again = workshop.run(2)
    assert "warning" not in capsys.readouterr().err
    assert (again["status"], again["older"], again["code"]) == ("ok", None, first["code"])


def test_mixing_is_done_on_demand_and_marked(workshop, capsys):
    workshop.run(2)
    workshop.edit(*EDITS["base"])
    capsys.readouterr()
    mixed = workshop.run(4, mix_code=True)
    assert "the 2 missing samples are made by the current code (runtime.mix_code=true)" in capsys.readouterr().err
    assert mixed["status"] == "older" and mixed["older"] == {"samples": 2, "parts": ["method"]}
    assert sorted(on_disk(mixed)["code"].values()) == [2, 2]
    assert report.main(["--results", str(workshop.folder / "runs"), "--show", mixed["run_id"]]) == 0
    shown = capsys.readouterr().out
    (line,) = [line for line in shown.splitlines() if "older code  method: " in line]
    assert sorted(line.split(": ")[1].split(", ")) == ["first/0", "second/1"]
    assert "2 of 4 samples, older code: method; set runtime.rerun=true to repeat them" in " ".join(shown.split())
    whole = workshop.run(4, rerun=True)
    assert whole["status"] == "ok" and list(whole["code"].values()) == [4]


def test_a_raised_version_is_another_run(workshop):
    first = workshop.run(2)
    workshop.edit("stale_method", "version: ClassVar[int] = 1", "version: ClassVar[int] = 2")
    second = workshop.run(2)
    assert second["status"] == "ok" and second["run_id"] != first["run_id"]
    assert second["run_id"].split("-")[0] == first["run_id"].split("-")[0]
    workshop.edit("stale_method", "version: ClassVar[int] = 2", "version: ClassVar[int] = 1")
    assert workshop.run(2)["run_id"] == first["run_id"]


def test_an_edited_scorer_scores_stored_predictions_anew(workshop, monkeypatch, capsys):
    first = workshop.run(3)
    assert {entry["score"] for entry in first["scores"].values()} == {0.5}
    workshop.edit("stale_task", '"score": 0.5', '"score": 0.75')
    never_load(monkeypatch)
    capsys.readouterr()
    again = workshop.run(3)
    assert "3 stored predictions are scored again" in capsys.readouterr().err
    assert {entry["score"] for entry in again["scores"].values()} == {0.75}
    assert again["status"] == "ok" and again["code"] == first["code"]
    workshop.run(3)
    assert "scored again" not in capsys.readouterr().err


@pytest.mark.parametrize("code", [None, "0123456789ab"], ids=["none", "of the method alone"])
def test_rows_that_do_not_say_their_code_are_unknown(tmp_path, monkeypatch, capsys, code):
    first = answer_run(config(tmp_path))
    store = store_of(first)
    rows = [dict(row) for row in store.samples().rows.values()]
    for row in rows:
        row[MEASURED] = {**row[MEASURED], "code": code}
    store.samples_path.unlink()
    samples.append(store.samples_path, rows)
    again = answer_run(config(tmp_path))
    assert "4 of 4 samples do not record which code made them (unknown)" in capsys.readouterr().err
    assert on_disk(again)["code"] == {"unknown": 4}
    assert again["older"] == {"samples": 4, "parts": ["unknown"]} and again["status"] == "older"
    assert again["scores"] == first["scores"]
    with pytest.raises(OlderCodeError, match="2 samples are missing"):
        answer_run(config(tmp_path, dataset={"limit": 6}))
    assert answer_run(config(tmp_path, runtime={"rerun": True}))["status"] == "ok"


def test_memory_that_ended_with_older_code_is_said_and_tried_again_on_demand(workshop, monkeypatch, capsys):
    from kvbench.runner.session import Session

    def full(self, batch):
        raise MemoryError("out of memory")

    with monkeypatch.context() as patch:
        patch.setattr(Session, "rows", full)
        assert workshop.run(2)["status"] == "oom"
    workshop.edit(*EDITS["base"])
    with monkeypatch.context() as patch:
        never_load(patch)
        stored = workshop.run(2)
    assert "an earlier attempt with older code (changed since: method) ran out of memory" in capsys.readouterr().err
    assert stored["status"] == "oom" and stored["older"] == {"samples": 0, "parts": ["method"]}
    assert workshop.run(2, rerun=True)["status"] == "ok"


def test_a_baseline_of_other_shared_code_is_said(tmp_path, capsys):
    full = answer_run(config(tmp_path, "fp16"))
    store = store_of(full)
    rows = [dict(row) for row in store.samples().rows.values()]
    for row in rows:
        row[MEASURED] = {**row[MEASURED], "code": {**row[MEASURED]["code"], "decoding": "0" * 12, "method": "0" * 12}}
    store.samples_path.unlink()
    samples.append(store.samples_path, rows)
    metrics = answer_run(config(tmp_path))
    assert on_disk(metrics)["baseline_differs"] == ["decoding"]
    assert report.main(["--results", str(tmp_path), "--show", metrics["run_id"]]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "the fp16 run that it is compared with was made by different code: decoding" in shown


def test_bases_outside_the_package_count(workshop):
    """The data set's base is in another package; its module counts, and that of kvbench's own base."""
    settings = {
        group: {"_target_": f"stale_{name}"}
        for group, name in (("method", "method.Mine"), ("dataset", "task.Questions"))
    }
    parts = sources.parts(settings)
    assert {"stale_task", ToyTask.__module__, Task.__module__} <= set(parts["task"])
    assert {"stale_method", "stale_base", Kivi.__module__} <= set(parts["method"]) and "stale_quantizer" in parts[
        "quantizer"
    ]
