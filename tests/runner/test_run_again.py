"""A run that is started again: what older code made, what an earlier limit left, what was done in another way."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from kvbench.errors import ConfigError, DataError
from kvbench.results import samples
from kvbench.results.samples import MEASURED
from kvbench.runner import sources
from kvbench.runner.batching import batches, plan
from kvbench.runner.prompting import own_limit, sample_seed
from kvbench.runner.rows import row_bill
from kvbench.runner.run import answer_run
from kvbench.runner.session import Session
from kvbench.tasks.base import PromptRules, Sample
from kvbench.tasks.work import AskQuestions, Question
from tests.run_files import on_disk, store_of
from tests.run_support import ToyTask, config


def no_model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvbench.runner.session.load_joined", lambda *_: pytest.fail("the model was loaded"))


def test_every_row_says_which_code_made_it(tmp_path):
    rows = store_of(answer_run(config(tmp_path))).samples().rows.values()
    full = store_of(answer_run(config(tmp_path, "fp16"))).samples().rows.values()
    (mine,), (other,) = ({json.dumps(row[MEASURED]["code"]) for row in group} for group in (rows, full))
    mine, other = json.loads(mine), json.loads(other)
    always = {part for part in sources.code(config(tmp_path)) if "/" not in part}
    paths = {row[MEASURED]["attention"]["path"] for row in rows}
    kernels = {"attention/cpu"} if any(path.startswith("cpu") for path in paths) else set()  # with a compiler of C++
    assert set(mine) == always | kernels and set(other) == always
    assert {"method", "quantizer", "task", "scorer", "cache", "attention", "decoding", "runner", "model"} < set(mine)
    assert {part for part in always if mine[part] != other[part]} == {"method", "quantizer"}
    assert all(len(digest) == sources.DIGITS for digest in mine.values())


@pytest.mark.parametrize("limit", [0, 4])
def test_a_run_without_samples_is_refused(tmp_path, monkeypatch, limit):
    no_model(monkeypatch)
    monkeypatch.setattr(ToyTask, "samples", lambda self: iter(()))
    with pytest.raises(DataError, match="no samples") as error:
        answer_run(config(tmp_path, dataset={"limit": limit}))
    assert ("dataset.limit=8" in str(error.value)) == (limit == 0)
    (directory,) = tmp_path.iterdir()
    assert json.loads((directory / "metrics.json").read_text())["status"] == "error"
    assert not (directory / "samples.jsonl").exists()


def test_an_older_scorers_rows_outside_the_limit_wait_for_their_turn(tmp_path, monkeypatch):
    answer_run(config(tmp_path, dataset={"limit": 4}))
    no_model(monkeypatch)
    monkeypatch.setattr(ToyTask, "scorer_version", 2, raising=False)
    metrics = answer_run(config(tmp_path, dataset={"limit": 2, "scorer_version": 2}))
    assert metrics["status"] == "ok"
    versions = [row["scorer_version"] for row in store_of(metrics).samples().rows.values()]
    assert sorted(versions) == [1, 1, 2, 2]
    metrics = answer_run(config(tmp_path, dataset={"limit": 4, "scorer_version": 2}))
    assert [row["scorer_version"] for row in store_of(metrics).samples().rows.values()] == [2] * 4


def test_what_a_smaller_limit_leaves_out_is_named(tmp_path):
    whole = answer_run(config(tmp_path, dataset={"limit": 4}))
    assert whole["samples"]["left_out"] == []
    part = on_disk(answer_run(config(tmp_path, dataset={"limit": 2})))
    assert (part["samples"]["requested"], part["samples"]["done"]) == (2, 2)
    stored = store_of(whole).samples().rows
    assert (
        sorted(part["samples"]["left_out"]) == ["first/2", "second/3"] == sorted(set(stored) - {"first/0", "second/1"})
    )
    full = answer_run(config(tmp_path, "fp16", dataset={"limit": 4}))
    assert full["samples"]["left_out"] == []
    paired = json.loads((Path(part_dir := whole["run_dir"]) / "metrics.json").read_text())
    assert {entry["vs_fp16"]["n"] for entry in paired["scores"].values()} == {1}, part_dir


def test_samples_of_another_precision_are_said(tmp_path, capsys):
    answer_run(config(tmp_path, dataset={"limit": 2}))
    capsys.readouterr()
    store = next(iter(tmp_path.glob("*/samples.jsonl")))
    rows = list(samples.read_samples(store).rows.values())
    for row in rows:
        row[MEASURED] |= {"dtype": "bfloat16", "arithmetic": "bfloat16"}
    store.unlink()
    samples.append(store, rows)
    answer_run(config(tmp_path, dataset={"limit": 3}))
    printed = capsys.readouterr().err
    assert "earlier samples ran in bfloat16, these run in float32" in printed
    answer_run(config(tmp_path / "other", dataset={"limit": 2}))
    answer_run(config(tmp_path / "other", dataset={"limit": 3}))
    assert "ran in" not in capsys.readouterr().err


@pytest.mark.parametrize(("limit", "failing", "told"), [(6, 2, False), (6, 3, True), (3, 3, True)])
def test_a_run_gives_up_with_the_third_error(tmp_path, monkeypatch, capsys, limit, failing, told):
    rows, tried = Session.rows, []

    def some(self, batch):
        tried.append(batch[0].id)
        if len(tried) <= failing:
            raise ValueError("a bad record")
        return rows(self, batch)

    monkeypatch.setattr(Session, "rows", some)
    metrics = answer_run(config(tmp_path, dataset={"limit": limit}))
    assert ("stopped, because 3 samples failed" in capsys.readouterr().err) == told
    assert len(metrics["errors"]) == failing and metrics["status"] == "error"
    assert len(tried) == (3 if told else limit)
    assert metrics["samples"]["done"] == (0 if told else limit - failing)
    assert metrics["samples"]["requested"] == limit


def test_damaged_environment_is_mended_and_whole_one_left_alone(tmp_path, monkeypatch):
    metrics = answer_run(config(tmp_path))
    path = Path(metrics["run_dir"]) / "env.json"
    content = path.read_bytes()
    assert json.loads(content) == metrics["env"]
    no_model(monkeypatch)
    for damage in (b"", b"{", b"[1]", b"\xff\xfe"):
        path.write_bytes(damage)
        answer_run(config(tmp_path))
        assert path.read_bytes() == content
    before = path.stat().st_mtime_ns
    answer_run(config(tmp_path))
    assert path.stat().st_mtime_ns == before


def test_the_load_of_the_machine_is_recorded(tmp_path, monkeypatch, capsys):
    from kvbench.results import notes

    monkeypatch.setattr(notes, "busyness", lambda found: found and "busy with 2 processors")
    metrics = on_disk(answer_run(config(tmp_path, dataset={"limit": 2})))
    assert set(metrics["env"]["load"]) == {"cpus", "average", "mhz", "own_cpus", "other_cpus", "held_back"}
    said = [note for note in notes.notes([metrics]) if ": busy with 2 processors" in note]
    assert len(said) == 1 and "runtime.rerun=times" in said[0]
    again = answer_run(config(tmp_path, dataset={"limit": 2}))
    assert again["env"] == metrics["env"]
    assert "busy" not in capsys.readouterr().err, "it is said once, below the table"


@pytest.mark.parametrize("key", ["results_dir", "logger"])
@pytest.mark.parametrize("name", ["x" * 256, "ä" * 128, "/".join(["y" * 200] * 25)])
def test_names_that_no_file_system_takes_are_refused(tmp_path, key, name):
    place = str(tmp_path / name)
    changes = (
        {"runtime": {"results_dir": place}} if key == "results_dir" else {"logger": {"name": "csv", "path": place}}
    )
    with pytest.raises(ConfigError, match=r"more than 255 bytes|File name too long"):
        answer_run(config(tmp_path / "r", **changes))
    assert not list(tmp_path.iterdir())


def sample(name: str, **changes) -> Sample:
    return Sample(**{"id": name, "task": "t", "prompt": name, "answers": ("a",), "max_new_tokens": 4} | changes)


def test_the_seed_of_a_draw_is_of_the_run_and_of_the_sample():
    seeds = {sample_seed(seed, sample(name)) for seed in (0, 1, 2) for name in ("a", "b")}
    assert len(seeds) == 6
    assert sample_seed(1, sample("a")) == sample_seed(1, sample("a", prompt="other", task="u"))
    assert all(0 <= seed < 2**32 for seed in seeds)


def test_another_seed_draws_other_tokens(tmp_path):
    tokens = []
    for seed in (0, 1):
        settings = config(tmp_path, decoding={"temperature": 1.0}, runtime={"seed": seed}, dataset={"new_tokens": 8})
        settings["model"]["weights"] = "random"
        rows = store_of(answer_run(settings)).samples().rows
        tokens.append({name: tuple(row["tokens"]) for name, row in rows.items()})
    assert tokens[0].keys() == tokens[1].keys() and tokens[0] != tokens[1]


def test_batches_are_of_samples_that_end_alike():
    made = [sample(str(i)) for i in range(5)] + [sample("long", max_new_tokens=9), sample("stop", stop=("x",))]
    made += [sample("end", end_text="."), sample("say", say_something=True), sample("last")]
    computed = [[each.id for each in batch] for batch in batches(made, 2)]
    assert computed == [["0", "1"], ["2", "3"], ["4"], ["long"], ["stop"], ["end"], ["say"], ["last"]]
    assert list(batches([], 2)) == []
    assert [len(batch) for batch in batches(made[:5], 9)] == [5]


def test_a_data_sets_limit_goes_before_the_models():
    from types import SimpleNamespace

    model = SimpleNamespace(name="m", preset=None, prompt_limit=100)
    assert own_limit(sample("a"), model) == 100
    assert own_limit(sample("a", rules=PromptRules(limit=50)), model) == 50
    assert own_limit(sample("a", rules=PromptRules(limit=50, limits={"m": 30})), model) == 30
    assert own_limit(sample("a", rules=PromptRules(limits={"other": 30})), model) == 100
    assert own_limit(sample("a", rules=PromptRules(limits={"m": "fill"})), model) is None
    chosen = SimpleNamespace(name="own", preset="m", prompt_limit=100)
    assert own_limit(sample("a", rules=PromptRules(limits={"m": 30})), chosen) == 30
    assert own_limit(sample("a", rules=PromptRules(limits={"m": 30, "own": 20})), chosen) == 20
    assert own_limit(sample("a"), SimpleNamespace(name="m", preset=None, prompt_limit=None)) is None


def test_a_rows_bill_is_its_own_bytes_and_its_part_of_the_buffers():
    from types import SimpleNamespace

    asked = []

    def bill(row):
        asked.append(row)
        parts = {"total": 12 + row, "codes": 9}
        return SimpleNamespace(
            as_dict=lambda: {"used": parts, "reserved": {"total": 41, "codes": 30}, "fp16_equivalent": 7}
        )

    computed = row_bill(SimpleNamespace(bill=bill), 2, 4)
    assert asked == [2]
    assert computed == {"used": {"total": 14, "codes": 9}, "reserved": {"total": 10, "codes": 7}, "fp16_equivalent": 7}


@pytest.mark.parametrize(("finish", "steps"), [("eos", 2), ("stop", 1), ("length", 1)])
def test_a_rows_tokens_took_a_step_each_but_the_first_and_the_end_took_one(tmp_path, monkeypatch, finish, steps):
    from dataclasses import replace

    from kvbench.runner import answers

    generate = answers.generate

    def ended(*args, **kwargs):
        generation = generate(*args, **kwargs)
        return replace(
            generation,
            tokens=[generation.tokens[0][:2], *generation.tokens[1:]],
            finish=[finish, *generation.finish[1:]],
        )

    monkeypatch.setattr(answers, "generate", ended)
    settings = config(tmp_path, dataset={"limit": 2}, runtime={"batch_size": 2})
    rows = list(store_of(answer_run(settings)).samples().rows.values())
    assert [row[MEASURED]["decoded"] for row in rows] == [steps, 3]
    assert [len(row[MEASURED]["step_s"]) for row in rows] == [3, 3]


def test_batches_share_their_times_and_prompts_come_longest_first(tmp_path):
    settings = config(tmp_path, dataset={"limit": 6}, runtime={"batch_size": 2})
    rows = list(store_of(answer_run(settings)).samples().rows.values())
    assert [row[MEASURED]["batch_rows"] for row in rows] == [2] * 6
    assert [row[MEASURED]["warm_up"] for row in rows] == [True, True, False, False, False, False]
    assert max(row["prompt_tokens"] for row in rows) in [row["prompt_tokens"] for row in rows[:2]]
    assert rows[2][MEASURED]["step_s"] == rows[3][MEASURED]["step_s"] != rows[4][MEASURED]["step_s"]
    counted = [row for row in rows if row[MEASURED]["peak_bytes"]["prefill"] is not None]
    assert counted == rows[:2]
    assert all(row[MEASURED]["decoded"] == len(row["tokens"]) - (row["finish"] != "eos") for row in rows)
    assert torch.get_num_threads() >= 1


def test_the_batch_of_the_longest_prompt_comes_first_wherever_it_stands_in_it():
    made = [sample(name, prompt="p" * length) for name, length in zip("abcdef", (5, 5, 4, 9, 8, 1), strict=True)]
    assert [[each.id for each in batch] for batch in plan(made, 2)] == [["c", "d"], ["a", "b"], ["e", "f"]]


def test_a_shared_text_leaves_room_for_its_longest_question(tmp_path, monkeypatch):
    shared, asked = "Read: " + "word " * 40, ["Who?", "What was said of " + "it " * 12 + "?", "Why so?"]
    work = AskQuestions(len(shared), tuple(Question(prompt, " a") for prompt in asked))
    monkeypatch.setattr(ToyTask, "samples", lambda self: iter([sample("a/0", prompt=shared + asked[0], work=work)]))
    (row,) = store_of(answer_run(config(tmp_path, model={"max_length": 128}))).samples().rows.values()
    assert row["prompt_tokens"] == 128 - 4 - len(asked[1])  # a token a byte
    assert row["truncated"] == 1 + len(shared) - row["prompt_tokens"]
