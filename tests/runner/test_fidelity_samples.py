"""Runs of dataset=fidelity on a random model: windows and answers, stored and live references, damage, resumption."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from kvbench.errors import ConfigError
from kvbench.results import packed
from kvbench.results.samples import read_samples
from kvbench.runner import fidelity_batch, fidelity_samples
from kvbench.runner.references import References
from kvbench.runner.run import answer_run
from kvbench.tasks.work import CompareTokens
from tests.run_support import config

CUT = ("max_new_tokens", "warm_up", "skip")
FIDELITY = "kvbench.tasks.fidelity.Fidelity"


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text(" ".join(f"word{(7 * k * k + 3 * k) % 61}" for k in range(200)), encoding="utf-8")
    return path


def windows(results: Path, text: Path, method: str = "kivi", /, **options: Any) -> dict[str, Any]:
    dataset = {"_target_": FIDELITY, "name": "fidelity", "text": str(text), "window": 80, "prefill": 64, "limit": 2}
    plain = config(results, method, runtime={"batch_size": 2})
    return {**plain, "dataset": {**dataset, **options}}


def rows(metrics: dict[str, Any]) -> dict[str, Any]:
    return read_samples(Path(metrics["run_dir"]) / "samples.jsonl").rows


def kld(metrics: dict[str, Any]) -> Any:
    return np.array([row["fidelity"]["kld"] for row in rows(metrics).values()])


def test_stored_states_give_the_divergences_of_live_ones(tmp_path, text) -> None:
    """The first run stores what the second one reads; fp16 is exactly itself live, and nearly so from the store."""
    lossy = answer_run(windows(tmp_path, text))
    files = list(tmp_path.glob("references/*/*.safetensors"))
    assert len(files) == 2
    written = [file.stat().st_mtime_ns for file in files]
    exact = answer_run(windows(tmp_path, text, "fp16"))
    assert [file.stat().st_mtime_ns for file in files] == written
    assert np.abs(kld(exact)).max() < 1e-6
    live = [answer_run(windows(tmp_path, text, name, reference="live")) for name in ("kivi", "fp16")]
    assert (kld(live[1]) == 0).all()
    assert np.abs(kld(lossy) - kld(live[0])).max() < 1e-5
    assert kld(lossy).mean() > 1e-9 and kld(lossy).shape == (2, 15)
    row = next(iter(rows(lossy).values()))
    assert row["prompt_tokens"] == 64 and row["scores"] == {} and row["nll"] is None
    assert row["fidelity"]["first"]["kld"] < 1e-6 and row["fidelity"]["reference"]["batch_rows"] == 2
    source = row["fidelity"]["reference"]
    assert (source["kind"], source["compile"], source["prefill_chunk"]) == ("stored", False, None)
    folded = lossy["scores"]["text@80"]["fidelity"]
    assert folded["positions"] == 30 and folded["prompts"] == 2 and folded["left"] is None
    assert folded["kld"]["mean"] == pytest.approx(kld(lossy).mean())
    assert lossy["untouched"] is None and lossy["mean"]["score"] is None


def test_a_stale_or_damaged_file_is_named_and_made_again(tmp_path, text, monkeypatch, capsys) -> None:
    from kvbench.runner import references

    answer_run(windows(tmp_path, text, "fp16"))
    damaged, other = sorted(tmp_path.glob("references/*/*.safetensors"))
    content = bytearray(damaged.read_bytes())
    content[-5] ^= 255
    damaged.write_bytes(bytes(content))
    first = answer_run(windows(tmp_path, text))
    assert f"{damaged}: the file is damaged; making fp16's predictions of" in capsys.readouterr().err
    whole = other.read_bytes()
    other.write_bytes(whole[:100])
    answer_run(windows(tmp_path, text, probe=1))
    assert f"{other}: the file is damaged" in capsys.readouterr().err and other.read_bytes() == whole
    monkeypatch.setattr(references, "FORMAT", 2)
    again = answer_run(windows(tmp_path, text, statistics="llamacpp"))
    printed = capsys.readouterr().err
    assert printed.count("were made with another version of the file format; making them again") == 1
    assert np.abs(kld(first) - kld(again)).max() < 1e-4


def test_an_interrupted_run_keeps_the_references_that_it_has_written(tmp_path, text, monkeypatch) -> None:
    made: list[str] = []
    write = References.write

    def interrupted(self: References, sample: str, *rest: Any) -> None:
        if len(made) == 1:
            raise KeyboardInterrupt
        made.append(sample)
        write(self, sample, *rest)

    plain = windows(tmp_path, text)
    plain["runtime"]["span_rows"] = 1
    monkeypatch.setattr(References, "write", interrupted)
    with pytest.raises(KeyboardInterrupt):
        answer_run(plain)
    assert len(list(tmp_path.glob("references/*/*.safetensors"))) == 1
    monkeypatch.setattr(
        References, "write", lambda self, sample, *rest: (made.append(sample), write(self, sample, *rest))
    )
    assert answer_run(plain)["status"] == "ok" and len(set(made)) == len(made) == 2


def test_fp16s_own_answers_are_decoded_and_the_point_where_another_cache_leaves_them_is_found(tmp_path, text) -> None:
    """The first index at which a free greedy answer differs is that of the first other choice in the decoded one."""
    options = {"over": "text", "options": {key: free_dataset(text)[key] for key in ("path", "lengths", *CUT)}}
    given = [windows(tmp_path, text, name, **options) for name in ("fp16", "kivi")]
    exact, lossy = (answer_run(plain) for plain in given)
    assert exact["scores"]["text@100"]["fidelity"]["left"]["never"] == 1.0
    free = []
    for name in ("fp16", "kivi"):
        plain = config(tmp_path, name, runtime={"batch_size": 2})
        free.append(answer_run({**plain, "dataset": free_dataset(text)}))
    answers = [{key: row["tokens"] for key, row in rows(metrics).items()} for metrics in free]
    for name, row in rows(lossy).items():
        base, other = (part[name] for part in answers)
        differing = [k for k, (x, y) in enumerate(zip(base, other, strict=False)) if x != y]
        assert row["fidelity"]["left"]["at"] == (differing[0] if differing else None)
        assert row["fidelity"]["left"]["compared"] - len(base) in (0, 1)  # the end of the answer is a position too
        assert not differing or row["fidelity"]["left"]["gap"] > 0
    assert all(row["fidelity"]["left"]["at"] is not None for row in rows(lossy).values())
    assert lossy["scores"]["text@100"]["fidelity"]["answers"] == "fp16"


def test_figures_of_a_long_answer_are_stored_in_short_and_read_back(tmp_path, text, monkeypatch) -> None:
    exact = answer_run(windows(tmp_path / "exact", text))
    monkeypatch.setattr(fidelity_samples, "LONG", 15)
    monkeypatch.setattr(packed, "SHORTEST", 15)
    short = answer_run(windows(tmp_path / "short", text))
    line = json.loads((Path(short["run_dir"]) / "samples.jsonl").read_text().splitlines()[0])
    assert all(line["fidelity"][name].keys() == {"float32"} for name in ("kld", "change", "nll", "top_mass"))
    for name in ("kld", "nll_base", "top_mass"):
        whole, again = (np.array([r["fidelity"][name] for r in rows(one).values()]) for one in (exact, short))
        assert (whole != again).any() and np.allclose(whole, again, rtol=2e-4, atol=0)


def free_dataset(text: Path) -> dict[str, Any]:
    return {
        "_target_": "kvbench.tasks.continuation.Continuation",
        "name": "text",
        "text": "text",
        "path": str(text),
        "lengths": [100],
        "limit": 2,
        "per_document": None,
        "warm_up": 0,
        "max_new_tokens": 30,
        "skip": 0,
        "bos": True,
    }


def test_reference_answers_a_simulated_pass_and_the_error_of_each_layer(tmp_path, text) -> None:
    simulated = answer_run(windows(tmp_path, text, mode="simulated", statistics="llamacpp"))
    entry = simulated["scores"]["text@80"]["fidelity"]
    assert entry["positions"] == 30 and entry["first_kld"] is None and entry["bins"][0]["first"] == 0
    over = {"over": "mini/passkey", "options": {"lengths": [512], "limit": 1}, "answers": "task"}
    plain = windows(tmp_path, text, probe=1, **over)
    plain["model"]["max_length"] = 2048
    answered = answer_run(plain)["scores"]["passkey@512"]["fidelity"]
    assert answered["answers"] == "task" and answered["left"] is None
    layers = answered["layers"]
    assert layers["n"] == 1 and len(layers["own"]) == 2 and layers["worst"] == int(np.argmax(layers["own"]))
    assert layers["own"][0] == pytest.approx(layers["total"][0], rel=1e-4) and layers["own"][1] > 0


def test_a_window_longer_than_the_model_and_sampling_are_refused(tmp_path, text) -> None:
    with pytest.raises(ConfigError, match=r"model.max_length=512"):
        answer_run(windows(tmp_path, text, window=1024))
    plain = windows(tmp_path, text)
    with pytest.raises(ConfigError, match="compares greedy decoding"):
        answer_run({**plain, "decoding": {"temperature": 0.5}})


def test_a_state_that_is_not_a_number_is_an_error(tmp_path, text, monkeypatch, capsys) -> None:
    """A prediction of NaN after the prompt has no divergence, so the batch has no rows."""
    from kvbench.runner import fidelity_batch

    follow = fidelity_batch.follow

    def broken(*args: Any, **options: Any) -> Any:
        states, logits = follow(*args, **options)
        states = states.clone()
        states[1, 3] = float("nan")
        return states, logits

    monkeypatch.setattr(fidelity_batch, "follow", broken)
    assert answer_run(windows(tmp_path, text, reference="live"))["status"] == "error"
    assert "text@80/1: a final hidden state of the model contains NaN" in capsys.readouterr().err


def test_a_simulated_window_is_one_pass_and_a_decoded_one_goes_token_by_token(tmp_path, text, monkeypatch) -> None:
    """In one pass all keys are packed before a query reads them; token by token the newest are still exact."""
    calls: list[str] = []

    def spied(name: str) -> Any:
        act = getattr(fidelity_batch, name)
        return lambda *given, **options: (calls.append(name), act(*given, **options))[1]

    for name in ("simulate", "follow"):
        monkeypatch.setattr(fidelity_batch, name, spied(name))
    passed = kld(answer_run(windows(tmp_path, text, mode="simulated", limit=1)))
    assert set(calls) == {"simulate"}
    calls.clear()
    decoded = kld(answer_run(windows(tmp_path, text, limit=1)))
    assert set(calls) == {"follow"}
    assert passed.shape == decoded.shape == (1, 15) and (passed > decoded).any()


@pytest.mark.parametrize(
    ("length", "batch_size", "span_rows", "rows"),
    [
        (80, 2, "auto", 8),
        (80, 9, "auto", 9),
        (4096, 2, "auto", 4),
        (20000, 2, "auto", 2),
        (80, 2, 3, 3),
        (None, 2, "auto", 2),
        (None, 2, 3, 2),
    ],
)
def test_so_many_windows_of_a_text_run_together(length, batch_size, span_rows, rows) -> None:
    """At most 8, and 16384 tokens; answers run as many at a time as other prompts do."""
    runtime = SimpleNamespace(batch_size=batch_size, span_rows=span_rows)
    works = [CompareTokens(ids=None if each is None else tuple(range(each))) for each in (length, length and 8)]
    strategy = fidelity_samples.Comparisons.__new__(fidelity_samples.Comparisons)
    object.__setattr__(strategy, "config", SimpleNamespace(runtime=runtime))
    assert strategy.size([SimpleNamespace(work=work) for work in works]) == rows


def test_decoded_tokens_are_fed_up_to_the_last_but_one_and_counted(monkeypatch) -> None:
    fed: list[Any] = []
    said: list[tuple[float, str]] = []

    def follow(model: Any, cache: Any, ids: Any, mask: Any, given: Any, *, report: Any, **options: Any) -> Any:
        fed.append((cache, given.tolist()))
        report(1)
        return torch.zeros(len(given), given.shape[1] + 1, 4), torch.zeros(len(given), 8)

    monkeypatch.setattr(fidelity_batch, "follow", follow)
    monkeypatch.setattr(fidelity_batch.Passes, "new_cache", lambda self, method, batch, new: f"room for {new}")
    monkeypatch.setattr(fidelity_batch.Passes, "_check", lambda self, states, logits: None)
    loaded = SimpleNamespace(model=None, device=torch.device("cpu"))
    runtime = SimpleNamespace(prefill_chunk=None, prefill_rows=None, graphs="never", compile=False)
    passes: Any = fidelity_batch.Passes(runtime, loaded, None)  # type: ignore[arg-type]
    batch, work = SimpleNamespace(input_ids=None, mask=None), SimpleNamespace(mode="decode")
    passes.states(None, batch, [[5, 6, 7, 8, 9], [3, 4]], work, lambda *one: said.append(one), "kivi")
    assert fed == [("room for 4", [[5, 6, 7, 8], [3, 4, 0, 0]])]
    assert said == [(2 * 1 / 4, "kivi: 1 of 4 tokens")]
    passes.states(None, batch, [[5], []], work, None, "kivi")
    assert fed[1] == ("room for 0", [[], []]) and len(said) == 1
