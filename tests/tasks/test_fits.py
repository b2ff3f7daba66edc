"""Fit of a data set with the rest of a configuration: room in the model, batches, stop strings."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from kvbench.errors import ConfigError, KvbenchError
from kvbench.models.spec import is_random
from kvbench.tasks.base import Sample, Task, TokenTask, check_shots
from kvbench.tasks.continuation import check_fits, check_lengths, check_warm_up
from kvbench.tasks.efficiency import Efficiency
from kvbench.tasks.hub_files import HubSource
from kvbench.tasks.load import load
from kvbench.tasks.mini import Mini
from kvbench.tasks.perplexity import Perplexity


def setup(**changes: Any) -> Any:
    """A configuration of a model of 1,000 tokens with changes by dotted key."""
    parts: dict[str, dict[str, Any]] = {
        "model": {"max_length": 1000, "prompt_limit": None, "weights": "pretrained", "path": "somewhere"},
        "decoding": {"max_new_tokens": None, "stop": ()},
        "runtime": {"batch_size": 1},
    }
    for key, value in changes.items():
        group, _, name = key.partition("_")
        parts[group][name] = value
    checked: list[tuple[str, int]] = []
    method = SimpleNamespace(alone=lambda: SimpleNamespace(check_windows=lambda *pair: checked.append(pair)))
    parts["model"]["random"] = is_random(parts["model"]["weights"])
    groups = {name: SimpleNamespace(**values) for name, values in parts.items()}
    return SimpleNamespace(**groups, method=method, checked=checked)


def refused(task: Any, **changes: Any) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        task.fits(setup(**changes))
    return caught.value


def test_points_fit_together_with_their_new_tokens() -> None:
    task = Efficiency(prompts=(64, 968), new_tokens=32)
    task.fits(setup())
    assert refused(Efficiency(prompts=(64, 969), new_tokens=32)).key == "dataset.prompts"
    assert "at most 968 tokens per prompt" in str(refused(Efficiency(prompts=(969,), new_tokens=32)))
    assert "shorter prompts and fewer new tokens" in str(refused(Efficiency(prompts=(64,), new_tokens=990)))
    assert refused(task, decoding_max_new_tokens=33).key == "dataset.prompts"
    Efficiency(prompts=(99999,)).fits(setup(model_weights="random"))
    assert refused(task, decoding_max_new_tokens=1).key == "decoding.max_new_tokens"
    task.fits(setup(decoding_max_new_tokens=2))
    error = refused(task, runtime_batch_size=4)
    assert (error.key, error.hint) == ("runtime.batch_size", "dataset.batches=[4]")
    assert refused(task, decoding_stop=("x",)).key == "decoding.stop"


def test_the_identity_of_points_is_what_their_figures_depend_on() -> None:
    assert set(Efficiency().identity()) == {"target", "version", "new_tokens", "repeats", "warm_up", "seed"}
    for name, value in {"untimed": 1, "fill": "random", "compare": 2, "stock": ("dynamic",), "seed": 5}.items():
        assert Efficiency(**{name: value}).identity()[name] == value
    from kvbench.config.run_config import RuntimeConfig

    facts = Efficiency().machine_identity(RuntimeConfig(batch_size=7, device="cpu"), lambda: "H200")
    assert facts is not None and facts["device"] == "H200" and facts["graphs"] == RuntimeConfig().graphs
    # a new key changes the id of every earlier run, so it belongs here only if these figures depend on it
    assert set(facts) == {
        *("device", "prefill_chunk", "mlp_chunk", "prefill_rows", "memory_limit_gb", "device_map", "tensor_parallel"),
        *("rerun", "mix_code", "kernels", "graphs", "compile"),
    }
    (sample,) = Efficiency(prompts=(64,), batches=(2,), repeats=5, untimed=1, stock=("static",), seed=3).samples()
    work: Any = sample.work
    assert (work.prompt, work.batch, work.repeats, work.untimed, work.stock, work.seed) == (64, 2, 5, 1, ("static",), 3)
    assert (sample.id, sample.length, sample.max_new_tokens) == ("efficiency@64/b2", 64, 32)
    assert Efficiency().score(sample, "x") == {}


def test_spans_fit_the_model_and_the_method_is_asked() -> None:
    config = setup()
    Perplexity(window=1000, prefill=9).fits(config)
    assert config.checked == [("decode", 9)]
    error = refused(Perplexity(window=1001))
    assert error.key == "dataset.window" and error.hint == "dataset.window=1000"
    for options, key in (
        ({"window": 64, "stride": 65}, "dataset.stride"),
        ({"window": 64, "prefill": 64}, "dataset.prefill"),
        ({"text": "c4", "window": 64, "stride": 32}, "dataset.stride"),
        ({"text": "text"}, "dataset.path"),
        ({"source": HubSource(hub_id="none")}, "dataset.source.hub_id"),
    ):
        with pytest.raises(ConfigError) as caught:
            Perplexity(**options).check()
        assert caught.value.key == key
    for options in ({"window": 64, "stride": 64}, {"window": 64, "prefill": 63}, {"text": "c4", "stride": 2048}):
        Perplexity(**options).check()


def test_prompts_of_fixed_lengths_fit_with_their_new_tokens() -> None:
    check_fits(setup(), (16, 910), 90)
    with pytest.raises(ConfigError, match=r"with 90 new tokens \(model\.max_length=1000\)(.|\n)*16 to 910") as caught:
        check_fits(setup(), (16, 911), 90)
    assert caught.value.hint == "dataset.lengths=[910]"
    check_fits(setup(decoding_max_new_tokens=10), (990,), 90)
    with pytest.raises(ConfigError, match=r"model\.prompt_limit=500(.|\n)*16 to 500"):
        check_fits(setup(model_prompt_limit=500), (501,), 90)
    check_fits(setup(model_prompt_limit=500), (500,), 90)
    with pytest.raises(ConfigError, match="no length"):
        check_fits(setup(), (16,), 985)
    check_fits(setup(), (16,), 984)
    check_lengths((16, 17))
    for wrong in ((), (15,), (16, 16)):
        with pytest.raises(ConfigError, match="different prompt lengths of at least 16 tokens"):
            check_lengths(wrong)
    check_warm_up("x", 4, 16, 3)
    with pytest.raises(KvbenchError, match="only 3 prompts of 16 tokens"):
        check_warm_up("x", 3, 16, 3)


def test_the_bundled_tasks_are_measured_in_tokens_of_the_bundled_model() -> None:
    task = Mini(lengths=(512, 2048))
    task.fits(setup(model_max_length=1024))  # another tokenizer may need half as many tokens
    error = refused(task, model_max_length=1023)
    assert error.key == "dataset.lengths" and error.hint == "dataset.lengths=[1024]"
    task.fits(setup(model_max_length=2048, model_path="kvbench:tiny"))
    assert refused(task, model_max_length=2047, model_path="kvbench:tiny").hint == "dataset.lengths=[1024]"
    task.fits(setup(model_max_length=16, model_weights="random"))
    assert refused(task, model_max_length=16).hint == "choose another model"


def test_a_repository_has_an_owner_and_a_name() -> None:
    HubSource(hub_id="a/b").check()
    HubSource().check()
    for name in ("a", "a/b/c"):
        with pytest.raises(ConfigError, match=r"dataset\.source\.hub_id.*is not a valid repository name"):
            HubSource(hub_id=name).check()


def test_what_a_data_set_need_not_say() -> None:
    task, sample = Task(), Sample("a/0", "a", "p", ("x", "y"), 3)
    for name in ("samples", "identity"):
        with pytest.raises(NotImplementedError, match=f"Task.{name}"):
            getattr(task, name)()
    with pytest.raises(NotImplementedError, match=r"Task\.score"):
        task.score(sample, "x")
    assert (task.packages(), list(task.files()), task.notes(), task.machine_identity(None, str)) == ((), [], {}, None)
    assert (task.needs_tokenizer, task.adaptive, task.single_process) == (False, False, False)
    task.check()
    with pytest.raises(KvbenchError, match=r"TokenTask: samples are built from tokens"):
        _ = TokenTask().tokenizer
    assert TokenTask.needs_tokenizer
    assert (sample.score_key, sample.continuation, sample.truncation) == ("a", "x", "middle")
    assert Sample("a", "a", "p", (), 3, length=8).score_key == "a@8" and Sample("a", "a", "p", (), 3).continuation == ""
    assert Sample("a", "a", "p", ("x",), 3, target=" x").continuation == " x"
    check_shots(2, [1, 2], "here")
    with pytest.raises(ConfigError, match="exceeds the number of records in here, 1") as caught:
        check_shots(2, [1], "here")
    assert "at most 1" in caught.value.hint
    with pytest.raises(ConfigError, match=r"dataset\._target_=.*: is not a task"):
        load({"_target_": "kvbench.methods.kivi.Kivi"})
