"""A preset that loads another checkpoint: the name, the context and the chat are those of what is loaded."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml

from kvbench.cli.compose import Composer
from kvbench.cli.main import main
from kvbench.config.run_config import checked_config
from kvbench.errors import ConfigError
from kvbench.models import checkpoint
from kvbench.models.by_name import SERVED
from kvbench.models.spec import ModelConfig
from kvbench.results.identity import identity, run_id
from kvbench.runner.prompting import own_limit
from kvbench.tasks.base import PromptRules, Sample
from kvbench.util.confdir import group_options
from kvbench.util.schema import build
from tests.hub.standin import reachable, serving

QWEN = {
    "model_type": "qwen3",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": 300,
    "max_position_embeddings": 1024,
}


def composed(*overrides: str, extra: Path | None = None) -> dict[str, Any]:

    composer = Composer(extra)
    return composer.plain(overrides)


def folder(place: Path, chat: bool = False, **numbers: Any) -> Path:
    place.mkdir(parents=True)
    place.joinpath("config.json").write_text(json.dumps({**QWEN, **numbers}))
    if chat:
        place.joinpath("tokenizer_config.json").write_text(json.dumps({"chat_template": "{{ messages[0].content }}"}))
    return place


def of_preset(name: str) -> dict[str, Any]:
    """The numbers that a preset gives, as its checkpoint's config.json has them."""
    numbers = yaml.safe_load(group_options("model")[name].read_text(encoding="utf-8"))["architecture"]
    return {key: value for key, value in numbers.items() if key not in ("rope", "parameters")}


@pytest.mark.parametrize("preset", ["tiny", "llama2-7b-chat"])
def test_another_checkpoint_is_named_and_limited_by_itself(tmp_path: Path, preset: str) -> None:
    place = folder(tmp_path / "Qwen3-mine", chat=True)
    model = composed(f"model={preset}", f"model.path={place}")["model"]
    assert (model["name"], model["max_length"], model["chat"]) == ("Qwen3-mine", 1024, "template")
    assert model["hub_id"] is None
    assert (model["prompt_limit"], model["dtype"], model["architecture"]) == (None, "auto", None)
    assert (model["gated"], model["licence"]) == (None, "")
    assert build(ModelConfig, model, "model").head_dim() == 32


def test_what_a_person_says_wins(tmp_path: Path) -> None:
    place = folder(tmp_path / "other", chat=True)
    said = ["model.name=llama2-7b", "model.max_length=900", "model.chat=none", "model.dtype=float16"]
    model = composed("model=llama2-7b", f"model.path={place}", *said)["model"]
    assert (model["name"], model["max_length"], model["chat"], model["dtype"]) == ("llama2-7b", 900, "none", "float16")


def test_the_presets_own_checkpoint_keeps_the_presets_rules(tmp_path: Path) -> None:
    """The README's `model=llama2-7b model.path=DIR`: LongBench's wrapper and limits are still meant."""
    place = folder(tmp_path / "my-llama", chat=True, **of_preset("llama2-7b-chat"))
    model = composed("model=llama2-7b-chat", f"model.path={place}")["model"]
    assert (model["name"], model["max_length"], model["prompt_limit"]) == ("my-llama", 4096, 3500)
    assert (model["chat"], model["dtype"], model["preset"]) == ("[INST]{prompt}[/INST]", "float16", "llama2-7b-chat")
    base = composed("model=llama2-7b", f"model.path={place}")["model"]
    assert base["chat"] == "template"  # of the same architecture, with a template where the preset has none


def test_a_longer_context_than_the_presets_has_no_limit_of_prompts(tmp_path: Path) -> None:
    numbers = {**of_preset("llama2-7b-chat"), "max_position_embeddings": 8192}
    place = folder(tmp_path / "my-llama", chat=True, **numbers)
    model = composed("model=llama2-7b-chat", f"model.path={place}")["model"]
    assert (model["max_length"], model["prompt_limit"], model["dtype"]) == (8192, None, "float16")


def test_a_data_sets_limit_for_the_preset_counts_for_its_checkpoint_alone(tmp_path: Path) -> None:
    rules = PromptRules(limits={"llama3-8b-instruct": 77}, limit=5)
    sample = Sample(id="a", task="t", prompt="p", answers=(), max_new_tokens=1, rules=rules)
    mine = folder(tmp_path / "mine", chat=True, **of_preset("llama3-8b-instruct"))
    other = folder(tmp_path / "other")
    for place, limit in ((mine, 77), (other, 5)):
        model = composed("model=llama3-8b-instruct", f"model.path={place}")["model"]
        assert own_limit(sample, build(ModelConfig, model, "model")) == limit, place


def test_a_repository_is_named_and_does_not_stand_behind_the_presets_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cached = folder(tmp_path / "snapshot", chat=True)
    monkeypatch.setattr(checkpoint, "snapshot", lambda hub_id, revision=None: cached if hub_id == "me/mine" else None)
    model = composed("model=tiny", "model.hub_id=me/mine")["model"]
    assert (model["name"], model["path"], model["max_length"], model["chat"]) == ("me/mine", None, 1024, "template")
    assert build(ModelConfig, model, "model").head_dim() == 32
    unknown = composed("model=llama2-7b", "model.hub_id=me/unknown")["model"]
    assert unknown["name"] == "me/unknown"


def test_random_weights_are_of_the_repositorys_own_architecture(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = folder(tmp_path / "shape")
    monkeypatch.setattr(checkpoint, "snapshot", lambda hub_id, revision=None: place if hub_id == "me/mine" else None)
    for preset in ("tiny", "llama2-7b"):
        model = composed(f"model={preset}", "model.weights=random", "model.hub_id=me/mine")["model"]
        assert (model["name"], model["max_length"]) == ("me/mine", 1024)
        assert build(ModelConfig, model, "model").head_dim() == 32
        with pytest.raises(ConfigError, match=r"me/unknown: its config\.json is neither on this machine nor"):
            composed(f"model={preset}", "model.weights=random", "model.hub_id=me/unknown")
    assert composed("model=llama2-7b", "model.weights=random", f"model.path={place}")["model"]["name"] == "shape"


def test_a_repository_that_is_not_here_yet_is_described_by_the_hub(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = {
        "config.json": json.dumps(QWEN).encode(),
        "tokenizer_config.json": json.dumps({"chat_template": "{{ messages }}"}).encode(),
    }
    with serving() as hub:
        hub.add("me/mine", files)
        with reachable(monkeypatch, tmp_path / "cache", hub.address):
            first = composed("model=tiny", "model.hub_id=me/mine")["model"]
            assert (first["name"], first["max_length"], first["chat"]) == ("me/mine", 1024, "template")
            before = len(hub.asked)
            assert composed("model=tiny", "model.hub_id=me/mine")["model"] == first
            assert len(hub.asked) == before  # from the cache: the same run id without the hub
            assert composed("model=tiny", "model.hub_id=me/other")["model"]["name"] == "me/other"
    with reachable(monkeypatch, tmp_path / "cache", None):
        assert composed("model=tiny", "model.hub_id=me/mine")["model"] == first


def test_cfg_job_shows_what_would_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    place = folder(tmp_path / "mine")
    changed = ["quantizer=int2", "quantizer.key.group_size=64"]
    assert main(["--cfg", "job", "model=tiny", f"model.path={place}", "method=kivi", *changed]) == 0
    shown = yaml.safe_load(capsys.readouterr().out)
    assert (shown["model"]["name"], shown["model"]["max_length"]) == ("mine", 1024)
    assert shown["quantizer"]["name"] == "int2+key.group_size=64"
    assert main(["--cfg", "job", "--package", "method", "method=kivi"]) == 0
    assert yaml.safe_load(capsys.readouterr().out)["residual"] == 128
    assert main(["--cfg", "job", "--package", "nothing"]) == 2
    assert "no such part" in capsys.readouterr().err


def test_a_snapshot_of_the_hubs_cache_is_named_for_its_repository(tmp_path: Path) -> None:
    place = folder(tmp_path / "models--Qwen--Qwen3-8B" / "snapshots" / ("0123456789" * 4))
    assert composed("model=tiny", f"model.path={place}")["model"]["name"] == "Qwen/Qwen3-8B@0123456"


@pytest.mark.parametrize("preset", [name for name in group_options("model") if name != SERVED])
def test_plain_presets_are_as_they_are_written(preset: str) -> None:
    written = yaml.safe_load(group_options("model")[preset].read_text(encoding="utf-8"))
    config = composed(f"model={preset}")
    assert config["model"] == written
    asked = {**config, "model": {**config["model"], **vars(build(ModelConfig, config["model"], "model"))}}
    assert "preset" not in identity(asked, {}, None)["setting"]["model"]  # no run of before has another id
    other = identity({**asked, "model": {**asked["model"], "preset": "x"}}, {}, None)
    assert run_id(other) != run_id(identity(asked, {}, None))


def test_a_length_that_no_file_says_is_asked_for(tmp_path: Path) -> None:
    place = folder(tmp_path / "x", max_position_embeddings=None)
    (place / "tokenizer_config.json").write_text('{"model_max_length": 1000000000000000019884624838656}')
    with pytest.raises(ConfigError, match=r"model\.max_length: the config\.json of x does not give the maximum"):
        composed("model=tiny", f"model.path={place}")
    assert composed("model=tiny", f"model.path={place}", "model.max_length=9")["model"]["max_length"] == 9
    (place / "tokenizer_config.json").write_text('{"model_max_length": 777}')
    assert composed("model=tiny", f"model.path={place}")["model"]["max_length"] == 777


@pytest.mark.parametrize(
    "given", ["https://me:hf_abcdefghijkl@huggingface.co/me/mine", "me/mine?token=secret", "a/b/c"]
)
def test_a_secret_in_a_repositorys_name_goes_nowhere(
    given: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for extra in ([], ["model.weights=random"]):
        assert main(["model=llama2-7b", f'model.hub_id="{given}"', *extra]) == 2
        printed = capsys.readouterr().err
        assert "is not a valid repository name" in printed
        assert "hf_abcdefghijkl" not in printed
        assert "secret" not in printed
    assert not list(tmp_path.rglob("*"))


def test_the_whole_run_is_recorded_under_the_folders_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from kvbench.models.spec import local_folder

    bundled = local_folder("kvbench:tiny")
    assert bundled is not None
    place = tmp_path / "renamed"
    shutil.copytree(bundled, place, ignore=shutil.ignore_patterns("calibration"))
    numbers = json.loads((place / "config.json").read_text())
    (place / "config.json").write_text(json.dumps({**numbers, "max_position_embeddings": 2048}))
    monkeypatch.chdir(tmp_path)
    overrides = [f"model.path={place}", "dataset=mini/needle", "dataset.lengths=[512]", "dataset.limit=1"]
    assert main([*overrides, "decoding.max_new_tokens=2"]) == 0
    row = (tmp_path / "results" / "runs.csv").read_text()
    assert "renamed" in row
    assert "tiny" not in row
    stored = yaml.safe_load(next((tmp_path / "results" / "runs").glob("*/config.yaml")).read_text())
    assert (stored["model"]["name"], stored["model"]["max_length"]) == ("renamed", 2048)


def test_the_schema_takes_what_is_labelled(tmp_path: Path) -> None:
    place = folder(tmp_path / "mine", chat=True, **of_preset("llama2-7b"))
    assert checked_config(composed("model=llama2-7b", f"model.path={place}", "method=kivi")).model.preset == "llama2-7b"
