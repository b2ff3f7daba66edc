"""The schema of the group `model`: what contradicts itself is refused, and what a folder or an architecture states."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kvbench.errors import ConfigError
from kvbench.models import spec
from kvbench.models.layer_types import unserved
from kvbench.models.spec import Architecture, ModelConfig, is_repository, local_folder, without_secrets

SIZES: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 300,
    "max_position_embeddings": 1024,
    "rope": {"rope_type": "default", "rope_theta": 1e4},
}


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({}, ""),
        ({"rope": {}}, ""),
        ({"rope": {"rope_type": "yarn", "factor": 4.0, "short_factor": [1.0], "truncate": False, "other": None}}, ""),
        ({"rope": {"rope_theta": 0}}, "rope.rope_theta=0: must be a number above 0"),
        ({"rope": {"rope_theta": -1.0}}, "rope.rope_theta=-1.0"),
        ({"rope": {"rope_theta": 1e12}}, "allowed: below 1e12"),
        ({"rope": {"factor": "4"}}, "rope.factor=4: must be a number"),
        ({"rope": {"rope_theta": None}}, "rope.rope_theta: must be a number above 0"),
        ({"rope": {"rope_theta": True}}, "rope.rope_theta=true"),
        ({"rope": {"rope_theta": [1.0]}}, "a common value is 10000.0"),
        ({"num_key_value_heads": 3}, "num_key_value_heads=3: does not divide num_attention_heads=4"),
        ({"hidden_size": 66}, "num_attention_heads=4: does not divide hidden_size=66"),
        ({"hidden_size": 66, "head_dim": 16}, ""),
    ],
)
def test_sizes_that_contradict_each_other_are_refused(changes: dict[str, Any], said: str) -> None:
    architecture = Architecture(**{**SIZES, **changes})
    if not said:
        architecture.check()
        return
    with pytest.raises(ConfigError) as error:
        architecture.check()
    assert said in str(error.value)


def model(**changes: Any) -> ModelConfig:
    parts = {"name": "m", "hub_id": "some/model", "max_length": 128, "architecture": Architecture(**SIZES)}
    return ModelConfig(**parts | changes)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({}, ""),
        ({"prompt_limit": 128}, ""),
        ({"prompt_limit": 129}, "model.prompt_limit=129: exceeds the model's limit (model.max_length=128)"),
        ({"chat": "template"}, ""),
        ({"chat": "a{prompt}b"}, ""),
        ({"chat": "no place"}, "model.chat=no place: is not a valid chat template"),
        ({"chat": "{prompt}{prompt}"}, "is not a valid chat template"),
        ({"architecture": Architecture(**{**SIZES, "num_key_value_heads": 3})}, "num_key_value_heads=3"),
        ({"path": " "}, "model.path='': must name a folder"),
        ({"path": "nowhere"}, "model.path=nowhere: is not a folder"),
        ({"path": "."}, "model.path=.: has no config.json, so it is not a checkpoint"),
        ({"hub_id": "a/b/c"}, "model.hub_id=a/b/c: is not a valid repository name"),
        ({"hub_id": "https://user:secret@hub/a"}, "https://***@hub/a"),
        ({"hub_id": None}, "no source of weights is given"),
        ({"hub_id": None, "weights": "random"}, ""),
        ({"hub_id": None, "weights": "random", "architecture": None}, "requires model.architecture"),
        (
            {"architecture": Architecture(**{**SIZES, "model_type": "mamba"})},
            "model.hub_id=some/model: is not supported: mamba has no softmax attention",
        ),
    ],
)
def test_values_that_cannot_be_meant_are_refused(changes: dict[str, Any], said: str, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    if not said:
        model(**changes).check()
        return
    with pytest.raises(ConfigError) as error:
        model(**changes).check()
    assert said in str(error.value)


def test_a_folder_is_read_before_the_architecture(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(
        json.dumps({"hidden_size": 80, "num_attention_heads": 4, "num_hidden_layers": 7})
    )
    of_folder = model(path=str(tmp_path))
    assert (of_folder.head_dim(), of_folder.layers(), of_folder.folder()) == (20, 7, tmp_path)
    (tmp_path / "config.json").write_text("{")
    assert of_folder.layers() == 7, "it is read once"
    with pytest.raises(ConfigError, match=r"model\.path=.*: its config\.json cannot be read"):
        model(path=str(tmp_path)).layers()
    plain = model()
    assert (plain.head_dim(), plain.layers(), plain.folder()) == (16, 3, None)
    assert model(architecture=Architecture(**{**SIZES, "head_dim": 40})).head_dim() == 40


def test_nothing_is_known_of_a_repository_that_is_not_here(monkeypatch, tmp_path: Path) -> None:
    asked: list[Any] = []
    monkeypatch.setattr(spec.checkpoint, "snapshot", lambda *args: asked.append(args))
    absent = model(architecture=None, revision="v2")
    assert absent.head_dim() is None and absent.layers() is None
    assert set(asked) == {("some/model", "v2")}
    (tmp_path / "config.json").write_text('{"num_hidden_layers": 5, "head_dim": 24}')
    monkeypatch.setattr(spec.checkpoint, "snapshot", lambda *args: tmp_path)
    here = model(architecture=None)
    assert (here.head_dim(), here.layers()) == (24, 5)


def test_packages_of_a_checkpoint_are_not_those_of_random_weights() -> None:
    (package,) = model(requires="gptqmodel").packages()
    assert (package.module, package.key, package.value) == ("gptqmodel", "model", "m")
    assert "run pip install gptqmodel, or set model.weights=random" in package.hint
    assert model(requires="gptqmodel", weights="random").packages() == model().packages() == ()


def test_folders_and_repositories_by_their_text() -> None:
    assert local_folder(None) is None
    assert local_folder("kvbench:tiny") == Path(spec.__file__).parent / "tiny"
    assert local_folder("~/x") == Path.home() / "x" and local_folder("x") == Path("x")
    assert all(map(is_repository, ("gpt2", "Qwen/Qwen3-8B", "a/b_c.d-e")))
    assert not any(map(is_repository, ("", "a/b/c", "-a", "a/.b", ".a/b", "a b", "x" * 97, "a/")))


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("https://me:secret@hub/a/b?token=1", "https://***@hub/a/b?***"),
        ("a/hf_abcdefgh12", "a/hf_***"),
        ("a/hf_short", "a/hf_short"),
        ("https://hub/a@b", "https://hub/a@b"),
    ],
)
def test_secrets_are_not_shown(text: str, shown: str) -> None:
    assert without_secrets(text) == shown


class Config:
    """A configuration as transformers has it, of a model with several parts."""

    def __init__(self, **text: Any) -> None:
        self.text = type("Text", (), text)()

    def get_text_config(self, decoder: bool) -> Any:
        assert decoder
        return self.text


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"model_type": "llama"}, ""),
        ({}, ""),
        ({"model_type": "rwkv", "architectures": ["Rwkv5"]}, "Rwkv5 has no softmax attention"),
        ({"model_type": "diffllama"}, "diffllama splits the cached values itself"),
        ({"model_type": "deepseek_v3", "kv_lora_rank": 512}, "deepseek_v3 has multi-head latent attention (MLA)"),
        ({"model_type": "x", "kv_lora_rank": None}, ""),
        ({"num_kv_shared_layers": 2}, "the model has layers that share the keys and values"),
        ({"num_kv_shared_layers": 0}, ""),
        ({"layer_types": ["full_attention", "sliding_attention"]}, ""),
        ({"layer_types": ["hybrid", "conv", "linear_attention", "mamba", "moe"]}, ""),
        ({"model_type": "minimax"}, "minimax accepts only a cache class of its own"),
        ({"layer_types": ["full_attention", "conv", "a"]}, "has layers of type a, but kvbench supports only"),
        ({"model_type": "outer", "text_config": {"model_type": "mamba"}}, "mamba has no softmax attention"),
        (Config(model_type="llama"), ""),
        (Config(model_type="jetmoe"), "jetmoe repeats the cached keys"),
    ],
)
def test_models_that_are_not_served_are_known_by_their_configuration(config: Any, said: str) -> None:
    reason = unserved(config)
    assert said in reason and bool(said) == bool(reason)
    assert not reason or reason.endswith("; choose a model such as Llama, Mistral, Qwen2, Qwen3, Phi-3 or GPT-NeoX")


def test_the_class_of_a_model_names_it() -> None:
    assert unserved({"model_type": "mamba", "architectures": ["A"]}, "Named").startswith("Named has no softmax")
