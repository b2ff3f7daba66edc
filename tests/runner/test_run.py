"""A run from samples to `metrics.json`: resume, re-scoring, pairing, failures; on a random two-layer model."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from kvbench.config.run_config import checked_config
from kvbench.errors import ConfigError, KvbenchError, ModelError
from kvbench.methods import load_method
from kvbench.results import samples
from kvbench.results.labels import labels
from kvbench.results.samples import DiskError, outputs
from kvbench.runner.remarks import untouched
from kvbench.runner.resolve import settled as settle
from kvbench.runner.run import answer_run
from tests.run_files import on_disk, store_of, validate
from tests.run_support import ARCHITECTURE, ToyTask, config


def no_model(monkeypatch) -> None:
    """From here on, loading a model is a failure."""

    def refuse(*_):
        raise AssertionError("the model was loaded although nothing is missing")

    monkeypatch.setattr("kvbench.runner.session.load_joined", refuse)


def broken(monkeypatch, error: Callable | BaseException, when=lambda sample: True) -> None:
    """`error` is raised in place of generating a sample."""
    from kvbench.runner.session import Session

    rows = Session.rows

    def rows_or_error(self, batch):
        if when(batch[0]):
            raise error
        return rows(self, batch)

    monkeypatch.setattr(Session, "rows", rows_or_error)


def test_a_run_leaves_what_it_promises(tmp_path):
    metrics = answer_run(config(tmp_path))
    content = on_disk(metrics)
    assert content["status"] == "ok"
    assert list(content["scores"]) == ["first", "second@64"]
    assert {entry["n"] for entry in content["scores"].values()} == {2}
    used = content["kv_bytes"]["used"]
    assert used["total"] == used["codes"] + used["scales"] + used["window"] + used["index"] > 0
    assert used["codes"] > 0
    assert content["attention"]["reads_packed"] is True
    assert content["peak_bytes"]["kind"] == "cpu_live_tensors"
    assert content["peak_bytes"]["prefill"] > content["kv_bytes"]["fp16_equivalent"]
    assert content["peak_bytes"]["rss"] > 10**7
    assert content["ttft_s"]["n"] == 3  # four samples, one of them the warm-up
    assert content["tpot_s"]["n"] == 3 * 2  # four tokens: one from the prefill, the first step apart, two more
    assert content["tokens_per_s"] > 0
    assert content["scores"]["first"]["nll"]["n"] == 2
    assert torch.__version__.startswith(content["env"]["torch"])  # a local label (+cu130) is not in all metadata
    assert content["env"]["dtype"] == "float32"
    names = {path.name for path in Path(metrics["run_dir"]).iterdir() if not path.name.startswith(".")}
    assert names == {"config.yaml", "env.json", "samples.jsonl", "metrics.json"}
    assert store_of(metrics).config() == config(tmp_path)


def test_weights_in_4_bits_are_said_and_make_another_setting(tmp_path):
    exact = answer_run(config(tmp_path, model={"weights": "random"}))
    rounded = answer_run(config(tmp_path, model={"weights": "random_int4"}))
    assert "weights" not in exact["env"] and "weights" not in exact["config"]
    form = rounded["env"]["weights"]
    assert (form["source"], form["bits"], form["groups"], form["head"]) == ("rounded", 4, [64], False)
    assert 0 < form["bytes"] < 259 * 64 * 4 * 2 + 10**5  # embedding and head in float32 and small layers
    assert rounded["config"]["weights"] == "random_int4" and rounded["status"] == "ok"
    assert exact["run_id"].split("-")[0] != rounded["run_id"].split("-")[0]
    assert labels([exact, rounded])[1].endswith(" weights=random_int4")


def test_the_warm_up_is_the_longest_prompt_and_says_so(tmp_path):
    rows = store_of(answer_run(config(tmp_path))).samples().rows
    assert next(iter(rows)) == max(rows, key=lambda name: rows[name]["prompt_tokens"])
    assert [row["measured"]["warm_up"] for row in rows.values()] == [True, False, False, False]


def test_the_same_run_again_loads_nothing(tmp_path, monkeypatch):
    first = answer_run(config(tmp_path))
    no_model(monkeypatch)
    again = answer_run(config(tmp_path, runtime={"batch_size": 2, "prefill_chunk": 16}))
    assert {**again, "config": None} == {**first, "config": None}


def test_a_larger_limit_adds_samples_and_a_smaller_one_takes_fewer(tmp_path, monkeypatch):
    answer_run(config(tmp_path, dataset={"limit": 2}))
    metrics = answer_run(config(tmp_path, dataset={"limit": 5}))
    assert metrics["samples"]["done"] == 5
    rows = store_of(metrics).samples().rows
    undisturbed = store_of(answer_run(config(tmp_path / "other", dataset={"limit": 5}))).samples().rows
    assert {k: outputs(row) for k, row in rows.items()} == {k: outputs(row) for k, row in undisturbed.items()}
    no_model(monkeypatch)
    assert answer_run(config(tmp_path, dataset={"limit": 3}))["samples"]["done"] == 3


def test_another_scorer_version_scores_anew_without_the_model(tmp_path, monkeypatch):
    before = answer_run(config(tmp_path))
    no_model(monkeypatch)
    monkeypatch.setattr(ToyTask, "scorer_version", 2, raising=False)
    after = answer_run(config(tmp_path, dataset={"scorer_version": 2}))
    assert after["run_id"] == before["run_id"]
    for key, entry in on_disk(after)["scores"].items():
        assert entry["scorer_version"] == 2
        assert entry["score"] == pytest.approx(2 * before["scores"][key]["score"])
    assert after["ttft_s"] == before["ttft_s"]


def test_paired_differences_whichever_run_comes_first(tmp_path):
    kivi = answer_run(config(tmp_path, "kivi"))
    assert kivi["scores"]["first"]["vs_fp16"] is None
    full = answer_run(config(tmp_path, "fp16", dataset={"limit": 2}))
    assert full["scores"]["first"]["vs_fp16"] is None
    assert full["baseline"] is None
    paired = json.loads((Path(kivi["run_dir"]) / "metrics.json").read_text())
    validate(paired)
    assert paired["scores"]["first"]["vs_fp16"]["n"] == 1  # fp16 has two samples, one of each task
    assert paired["baseline"] == full["run_id"]
    later = answer_run(config(tmp_path, "kivi", method={"residual": 64}))
    assert later["scores"]["first"]["vs_fp16"]["n"] == 1
    assert later["scores"]["first"]["nll"]["vs_fp16"]["n"] == 1


def test_a_batch_gives_the_rows_of_one_by_one(tmp_path):
    alone = store_of(answer_run(config(tmp_path / "a", dataset={"limit": 6}))).samples().rows
    together = (
        store_of(answer_run(config(tmp_path / "b", dataset={"limit": 6}, runtime={"batch_size": 4}))).samples().rows
    )
    for name, row in alone.items():
        other = together[name]
        assert other["prediction"] == row["prediction"]
        assert other["kv_bytes"]["used"] == row["kv_bytes"]["used"]
        assert other["nll"]["sum"] == pytest.approx(row["nll"]["sum"], rel=1e-4)


def test_sampled_rows_do_not_depend_on_what_was_left_to_do(tmp_path):
    decoding = {"temperature": 1.0, "top_p": 0.9}
    answer_run(config(tmp_path / "a", dataset={"limit": 2}, decoding=decoding))
    resumed = store_of(answer_run(config(tmp_path / "a", dataset={"limit": 6}, decoding=decoding))).samples().rows
    whole = store_of(answer_run(config(tmp_path / "b", dataset={"limit": 6}, decoding=decoding))).samples().rows
    assert {k: row["tokens"] for k, row in resumed.items()} == {k: row["tokens"] for k, row in whole.items()}
    assert len({tuple(row["tokens"]) for row in whole.values()}) > 1


def test_long_prompts_are_cut_and_counted_or_refused(tmp_path):
    metrics = answer_run(config(tmp_path, model={"prompt_limit": 100}))
    rows = store_of(metrics).samples().rows.values()
    assert metrics["samples"]["truncated"] == sum(row["truncated"] > 0 for row in rows) == 3
    assert max(row["prompt_tokens"] for row in rows) == 100
    refused = answer_run(config(tmp_path, model={"prompt_limit": 100}, dataset={"truncation": "refuse", "words": 9}))
    assert refused["status"] == "error"
    assert "the task does not allow the prompt to be cut" in on_disk(refused)["error"]


def test_out_of_memory_is_a_result_and_final(tmp_path, monkeypatch):
    error = torch.OutOfMemoryError(
        "CUDA out of memory. Tried to allocate 3.00 GiB. GPU 0 has a total capacity of 8 GiB"
    )
    with monkeypatch.context() as patch:
        broken(patch, error, when=lambda sample: sample.id == "first/2")
        metrics = answer_run(config(tmp_path))
    assert on_disk(metrics)["status"] == "oom"
    assert metrics["oom"]["bytes_asked"] == 3 * 2**30
    assert metrics["oom"]["sample"] == "first/2"
    with monkeypatch.context() as patch:
        no_model(patch)
        again = answer_run(config(tmp_path))
    assert on_disk(again)["status"] == "oom"
    assert again["oom"]["bytes_asked"] == 3 * 2**30
    retried = answer_run(config(tmp_path, runtime={"retry": "oom"}))
    assert retried["status"] == "ok"
    assert retried["oom"] is None
    assert retried["samples"]["done"] == 4


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="Linux counts private memory")
def test_memory_really_runs_out(tmp_path, monkeypatch):
    big = {"architecture": {**ARCHITECTURE, "intermediate_size": 160_000}, "dtype": "float32"}  # 0.23 GiB of weights
    metrics = answer_run(config(tmp_path, model=big, runtime={"memory_limit_gb": 0.25}))
    assert on_disk(metrics)["status"] == "oom"
    assert metrics["oom"]["bytes_asked"] > 160_000 * 4
    bigger = {"architecture": {**ARCHITECTURE, "intermediate_size": 2_000_000}}
    with monkeypatch.context() as patch, pytest.raises(ConfigError, match=r"limit_gb=0\.25: the weights of .* alone"):
        no_model(patch)
        answer_run(config(tmp_path, model=bigger, runtime={"memory_limit_gb": 0.25}))
    assert answer_run(config(tmp_path, runtime={"memory_limit_gb": 4.0}))["status"] == "ok"


def test_out_of_memory_while_loading(tmp_path, monkeypatch):
    def refuse(*_):
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 77 bytes.")

    monkeypatch.setattr("kvbench.runner.session.load_joined", refuse)
    metrics = answer_run(config(tmp_path))
    assert on_disk(metrics)["status"] == "oom"
    assert metrics["oom"]["bytes_asked"] == 77
    assert metrics["samples"]["done"] == 0


def test_a_failing_sample_does_not_cost_the_others(tmp_path, monkeypatch, capsys):
    with monkeypatch.context() as patch:
        broken(patch, KvbenchError("a bad record"), when=lambda sample: sample.id == "second/1")
        metrics = answer_run(config(tmp_path))
    assert on_disk(metrics)["status"] == "error"
    assert metrics["error"] == "a bad record"
    assert metrics["samples"]["done"] == 3
    assert "second/1: a bad record" in capsys.readouterr().err
    assert answer_run(config(tmp_path))["status"] == "ok"  # errors are tried again


def test_a_broken_set_up_gives_up(tmp_path, monkeypatch):
    broken(monkeypatch, ValueError("always"))
    metrics = answer_run(config(tmp_path, dataset={"limit": 10}))
    assert metrics["status"] == "error"
    assert len(metrics["errors"]) == 3


def test_a_model_that_cannot_be_had_is_recorded_and_raised(tmp_path, monkeypatch):
    def refuse(*_):
        raise ModelError("model toy: not here")

    monkeypatch.setattr("kvbench.runner.session.load_joined", refuse)
    with pytest.raises(ModelError, match="not here"):
        answer_run(config(tmp_path))
    (directory,) = tmp_path.iterdir()
    content = json.loads((directory / "metrics.json").read_text())
    validate(content)
    assert content["status"] == "error"
    assert content["error"] == "model toy: not here"


def test_interrupted_is_recorded_and_resumed(tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        broken(patch, KeyboardInterrupt(), when=lambda sample: sample.id == "second/1")
        with pytest.raises(KeyboardInterrupt):
            answer_run(config(tmp_path))
    (directory,) = tmp_path.iterdir()
    content = json.loads((directory / "metrics.json").read_text())
    validate(content)
    assert content["status"] == "interrupted"
    assert content["samples"]["done"] == 2
    assert answer_run(config(tmp_path))["samples"]["done"] == 4


def test_a_damaged_line_is_said_and_done_again(tmp_path, capsys):
    metrics = answer_run(config(tmp_path))
    path = Path(metrics["run_dir"]) / "samples.jsonl"
    before = {name: outputs(row) for name, row in samples.read_samples(path).rows.items()}
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(lines[0] + lines[1][:40] + b"\xff\xfe" + lines[1][42:] + lines[2] + lines[3][:-30])
    capsys.readouterr()
    answer_run(config(tmp_path))
    printed = capsys.readouterr().err
    assert "line 2" in printed
    assert "line 4: incomplete line" in printed
    assert {name: outputs(row) for name, row in samples.read_samples(path).rows.items()} == before


def test_full_disk_is_said_and_what_is_there_stays(tmp_path, monkeypatch):
    append = samples.append
    calls = []

    def full(path, rows):
        calls.append(path)
        if len(calls) > 2:
            raise DiskError(path, OSError(28, "No space left on device"))
        append(path, rows)

    with monkeypatch.context() as patch:
        patch.setattr("kvbench.results.samples.append", full)
        with pytest.raises(DiskError, match="no space left"):
            answer_run(config(tmp_path))
    (directory,) = tmp_path.iterdir()
    assert len(samples.read_samples(directory / "samples.jsonl").rows) == 2
    assert answer_run(config(tmp_path))["samples"]["done"] == 4


def test_a_wrong_value_touches_nothing(tmp_path):
    with pytest.raises(ConfigError):
        answer_run(config(tmp_path, method={"residual": 33}))
    assert not list(tmp_path.iterdir())


def test_spelling_a_default_out_is_the_same_run(tmp_path):
    one = answer_run(config(tmp_path, dataset={"limit": 1}))
    other = answer_run(config(tmp_path, dataset={"limit": 1}, decoding={"top_p": 1.0, "temperature": 0.0}))
    assert one["run_id"] == other["run_id"]


def test_two_samples_of_one_id_are_refused(tmp_path, monkeypatch):
    twice = ToyTask.samples
    monkeypatch.setattr(ToyTask, "samples", lambda self: [*twice(self), *twice(self)])
    with pytest.raises(KvbenchError, match="have the id"):
        answer_run(config(tmp_path))


def test_sigterm_ends_a_run_as_ctrl_c_does(tmp_path, monkeypatch):
    import os
    import signal

    from kvbench.runner.session import Session

    rows = Session.rows

    def terminated(self, batch):
        if batch[0].id == "first/2":
            os.kill(os.getpid(), signal.SIGTERM)
        return rows(self, batch)

    monkeypatch.setattr(Session, "rows", terminated)
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(KeyboardInterrupt):
        answer_run(config(tmp_path))
    assert signal.getsignal(signal.SIGTERM) is before
    (directory,) = tmp_path.iterdir()
    assert json.loads((directory / "metrics.json").read_text())["status"] == "interrupted"


def test_settled_fills_in_defaults(tmp_path):
    settings = config(tmp_path)
    settled = settle(checked_config(settings))
    assert settled["decoding"]["temperature"] == 0.0
    assert settled["method"]["_target_"] == settings["method"]["_target_"]
    assert settled["method"]["residual"] == 32


def test_what_a_method_lacks_is_said_before_the_model_is_loaded(tmp_path, monkeypatch):
    from kvbench.methods.kivi import Kivi

    def lacks(method):
        raise ModelError("no weights of the encoder")

    monkeypatch.setattr(Kivi, "ready", lacks)
    monkeypatch.setattr("kvbench.runner.session.load_joined", lambda *_: pytest.fail("the model was loaded"))
    with pytest.raises(ModelError, match="no weights of the encoder"):
        answer_run(config(tmp_path))
    (metrics,) = tmp_path.glob("*/metrics.json")
    assert json.loads(metrics.read_text())["status"] == "error"


def test_failures_alike_are_said_once_with_their_count(tmp_path, monkeypatch, capsys):
    broken(monkeypatch, RuntimeError("a broken kernel\nits second line"))
    metrics = answer_run(config(tmp_path, dataset={"limit": 6}))
    printed = capsys.readouterr().err
    assert printed.count("a broken kernel") == 1
    assert (
        "2 more samples failed with the same error as second/1: first/" in printed
        or "2 more samples failed with the same error as first/" in printed
    )
    assert len(metrics["errors"]) == 3
    names = iter("abc")
    monkeypatch.undo()
    broken(monkeypatch, lambda: None)
    from kvbench.runner.session import Session

    def differently(self, batch):
        raise RuntimeError(f"kernel {next(names)}")

    monkeypatch.setattr(Session, "rows", differently)
    answer_run(config(tmp_path / "other", dataset={"limit": 6}))
    printed = capsys.readouterr().err
    assert [printed.count(f"kernel {name}") for name in "abc"] == [1, 1, 1]
    assert "more samples failed" not in printed


def test_a_method_that_touched_nothing_says_so(tmp_path, capsys):
    from kvbench.results import tables

    quiet = answer_run(config(tmp_path, method={"residual": 256}))
    longest = quiet["samples"]["prompt_tokens"]["max"] + 3
    expected = {"key": "method.residual", "value": 256, "exact": 255, "longest": longest}
    assert on_disk(quiet)["untouched"] == expected
    assert quiet["kv_bytes"]["used"]["codes"] == 0
    words = (
        f"the longest sample had {longest} tokens in the cache, and method.residual=256 keeps up to "
        "255 in full precision"
    )
    assert sum(words in note for note in tables.notes([quiet])) == 1
    assert words not in capsys.readouterr().err, "it is said once, below the table"
    packed = answer_run(config(tmp_path))
    assert on_disk(packed)["untouched"] is None
    assert packed["kv_bytes"]["used"]["codes"] > 0
    assert not any("nothing was packed" in note for note in tables.notes([packed]))


def test_one_sample_that_was_touched_is_enough():
    method = load_method("kivi", residual=32)
    row = {"prompt_tokens": 20, "tokens": [1] * 12}
    assert untouched(method, [row])["longest"] == 31
    assert untouched(method, [row, {"prompt_tokens": 20, "tokens": [1] * 13}]) is None
    assert untouched(method, []) is None
    assert untouched(load_method("fp16"), [row]) is None
    assert untouched(load_method("snapkv", budget=40), [{"prompt_tokens": 40, "tokens": [1] * 99}])
    assert untouched(load_method("snapkv", budget=40), [{"prompt_tokens": 41, "tokens": []}]) is None
    window = {"prompt_tokens": 32, "tokens": [], "window": {}}
    assert untouched(method, [window])["longest"] == 31
