"""Models: quick and complete errors without weights, real architectures with random ones, the bundled model."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml

from kvbench.config.run_config import RuntimeConfig
from kvbench.errors import ConfigError, ModelError
from kvbench.hub import transfer as asking
from kvbench.hub.transfer import Answer
from kvbench.models.by_name import SERVED
from kvbench.models.load import byte_tokenizer, hf_config, load_model, random_model, resolve_device, shape_of
from kvbench.models.locate import locate
from kvbench.models.spec import ModelConfig, local_folder
from kvbench.profiling.roofline import Shape
from kvbench.util.confdir import group_options
from kvbench.util.schema import build

ROOT = Path(__file__).resolve().parents[2]
NAMES = [name for name in group_options("model") if name != SERVED]
#: in kvbench/models, with the most that their folders may hold, bytes
BUNDLED = {"tiny": 26 * 2**20, "tiny-reason": 3 * 2**20}
REAL = [name for name in NAMES if name not in BUNDLED]
#: the models of the papers
PAPERS = {
    "llama2-7b",
    "llama2-13b",
    "llama2-13b-chat",
    "mistral-7b",
    "mistral-7b-v0.3",
    "longchat-7b",
    "llama2-7b-32k-instruct",
    "lwm-text-chat-128k",
    "llama3-8b-instruct",
    "llama3.1-8b",
    "llama3.1-8b-instruct",
    "qwen1.5-7b-chat",
    "qwen1.5-7b-chat-awq",
    "qwen1.5-14b-chat-awq",
    "qwen2-7b-instruct",
    "phi3-mini-128k-instruct",
}


def entry(name: str, **changes: Any) -> ModelConfig:
    data = yaml.safe_load(group_options("model")[name].read_text(encoding="utf-8"))
    return build(ModelConfig, {**data, **changes}, "model")


@pytest.fixture
def unreachable(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A hub whose name resolves to nothing, and an empty cache."""
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "empty"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)


def answering(monkeypatch: pytest.MonkeyPatch, status: int) -> None:
    monkeypatch.setattr(asking, "_request", lambda url: Answer(status=status))


def test_the_papers_models_are_all_there() -> None:
    assert set(REAL) >= PAPERS


@pytest.mark.parametrize("name", NAMES)
def test_an_entry_says_what_a_user_must_know(name: str) -> None:
    model = entry(name)
    assert model.name == name
    assert model.licence
    if name in BUNDLED:
        return
    model.check()
    assert model.architecture is not None
    assert model.hub_id or model.package
    assert model.trust_remote_code is False
    assert model.max_length <= model.architecture.max_position_embeddings
    if (model.hub_id or "").startswith("meta-llama/"):
        assert f"huggingface.co/{model.hub_id}" in str(model.gated)
    assert model.requires is None


@pytest.mark.parametrize("name", REAL)
def test_random_weights_have_the_published_size(name: str) -> None:
    """On the meta device: shapes without memory."""
    model = entry(name, weights="random")
    made = random_model(hf_config(model), torch.bfloat16, "meta", seed=0)
    assert model.architecture is not None
    assert sum(p.numel() for p in made.parameters()) == model.architecture.parameters
    shape = shape_of(made.config)
    assert shape.head_dim == model.head_dim()
    assert shape.kv_heads == model.architecture.num_key_value_heads
    assert made.dtype == torch.bfloat16


@pytest.mark.parametrize("name", [name for name in REAL if entry(name).hub_id])
def test_no_network_and_no_weights(name: str, unreachable: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The hub is asked once, and not tried again for a minute as its own client does."""
    asked, request = [], asking._request
    monkeypatch.setattr(asking, "_request", lambda url: asked.append(url) or request(url))
    with pytest.raises(ModelError) as caught:
        locate(entry(name, requires=None))
    assert len(asked) == 1
    message = str(caught.value)
    model = entry(name)
    for part in (name, str(model.hub_id), "model.path=DIR", "model.weights=random", "model=tiny"):
        assert part in message
    assert not model.gated or model.gated in message


def test_a_hub_that_never_answers_is_not_waited_for(unreachable: None, monkeypatch: pytest.MonkeyPatch) -> None:
    assert asking.PROBE_SECONDS < 2
    monkeypatch.setattr(asking, "PROBE_SECONDS", 0.05)
    given_up, answered = threading.Event(), []

    def wait(url: str) -> Answer:
        if not given_up.wait(60):
            answered.append("after a minute, and locate still waits")
        return Answer(status=200)

    monkeypatch.setattr(asking, "_request", wait)
    with pytest.raises(ModelError, match="no answer in"):
        locate(entry("mistral-7b"))
    given_up.set()
    assert not answered


def test_offline_by_the_environment(unreachable: None, monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(ModelError, match="HF_HUB_OFFLINE is set"):
        locate(entry("mistral-7b"))


def test_a_gated_model_says_how_to_get_access(unreachable: None, monkeypatch: pytest.MonkeyPatch) -> None:
    answering(monkeypatch, 401)
    with pytest.raises(ModelError, match=r"to get access: accept the licence at https://huggingface\.co/meta-llama"):
        locate(entry("llama3.1-8b-instruct"))


def test_an_unknown_repository(unreachable: None, monkeypatch: pytest.MonkeyPatch) -> None:
    answering(monkeypatch, 404)
    with pytest.raises(ModelError, match="the hub does not have me/none at revision v2"):
        locate(entry("mistral-7b", hub_id="me/none", revision="v2"))


def test_a_hub_that_has_it(unreachable: None, monkeypatch: pytest.MonkeyPatch) -> None:
    answering(monkeypatch, 200)
    source = locate(entry("mistral-7b", revision="abc"))
    assert (source.name, source.local, source.revision) == ("mistralai/Mistral-7B-Instruct-v0.2", False, "abc")


def test_an_extra_package_is_named() -> None:
    with pytest.raises(ModelError, match="pip install gptqmodel"):
        locate(entry("qwen1.5-7b-chat-awq", requires="gptqmodel" if not _has("gptqmodel") else "no_such_package"))


def _has(package: str) -> bool:
    from importlib.util import find_spec

    return find_spec(package) is not None


def test_a_folder_without_weights(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ModelError, match="no weights"):
        locate(entry("llama2-7b", path=str(tmp_path)))


def test_groups_are_checked_against_the_folders_own_heads(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"hidden_size": 96, "num_attention_heads": 2}))
    assert entry("llama2-7b", path=str(tmp_path)).head_dim() == 48
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ConfigError, match=r"config\.json cannot be read"):
        entry("llama2-7b", path=str(tmp_path)).head_dim()


# -- loading ------------------------------------------------------------------------------------------------------

SMALL = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 300,
    "max_position_embeddings": 256,
    "rope": {"rope_type": "default", "rope_theta": 10000.0},
}


def small(**changes: Any) -> ModelConfig:
    data = {"name": "small", "weights": "random", "max_length": 256, "dtype": "float32", "architecture": SMALL}
    return build(ModelConfig, {**data, **changes}, "model")


CPU = RuntimeConfig(device="cpu", seed=3)


def test_random_weights_load_and_are_seeded() -> None:
    first, again, other = (
        load_model(small(), CPU),
        load_model(small(), CPU),
        load_model(small(), RuntimeConfig(device="cpu", seed=4)),
    )
    assert first.architecture.kv_heads == 2
    assert first.architecture.head_dim == 16
    assert first.eos_token_ids == ()
    assert first.random_weights
    name, weight = next(iter(first.model.named_parameters()))
    assert torch.equal(weight, dict(again.model.named_parameters())[name])
    assert not torch.equal(weight, dict(other.model.named_parameters())[name])
    ids = first.tokenizer("a prompt", return_tensors="pt").input_ids
    assert first.model(ids).logits.shape == (1, ids.shape[1], 300)


def test_loading_keeps_the_callers_random_state() -> None:
    torch.manual_seed(1)
    expected = torch.rand(1)
    torch.manual_seed(1)
    load_model(small(), CPU)
    assert torch.equal(torch.rand(1), expected)


def test_a_saved_folder_loads(tmp_path: Path) -> None:
    made = load_model(small(), CPU)
    made.model.save_pretrained(tmp_path)
    made.tokenizer.save_pretrained(tmp_path)
    loaded = load_model(small(weights="pretrained", path=str(tmp_path), architecture=None, dtype="auto"), CPU)
    assert loaded.dtype == loaded.storage == torch.bfloat16
    assert not loaded.random_weights
    assert loaded.tokenizer.padding_side == "left"
    assert loaded.tokenizer.pad_token_id is not None
    for (name, mine), (_, saved) in zip(loaded.model.named_parameters(), made.model.named_parameters(), strict=True):
        assert torch.equal(mine, saved.to(torch.bfloat16)), name


def test_a_damaged_folder_is_one_message(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "nonsense"}))
    (tmp_path / "model.safetensors").write_bytes(b"")
    with pytest.raises(ModelError, match="cannot be loaded"):
        load_model(small(weights="pretrained", path=str(tmp_path)), CPU)


def test_code_of_a_checkpoint_is_not_run_unless_asked_for_by_name(tmp_path: Path) -> None:
    config = {"model_type": "mine", "auto_map": {"AutoConfig": "mine.Mine", "AutoModelForCausalLM": "mine.Model"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "mine.py").write_text("raise SystemExit('this code must not run')")
    (tmp_path / "model.safetensors").write_bytes(b"")
    with pytest.raises(ModelError, match=r"model\.trust_remote_code=true"):
        load_model(small(weights="pretrained", path=str(tmp_path)), CPU)


def test_the_byte_tokenizer_round_trips_with_exact_offsets() -> None:
    tokenizer = byte_tokenizer()
    text = "héllo  wörld\n\tdef f(): 数"
    encoded = tokenizer(text, return_offsets_mapping=True)
    assert tokenizer.decode(encoded["input_ids"], skip_special_tokens=True) == text
    assert len(encoded["input_ids"]) == 1 + len(text.encode())
    assert encoded["offset_mapping"][-1][1] == len(text)
    assert tokenizer.decode([31999]) == ""


def test_a_device_that_is_not_there() -> None:
    with pytest.raises(ConfigError, match="does not exist on this machine"):
        resolve_device("cuda:99")
    assert resolve_device("cpu") == torch.device("cpu")
    assert resolve_device("auto").type in ("cpu", "cuda")


def test_loading_takes_any_runtime() -> None:
    assert load_model(small(), SimpleNamespace(device="cpu", device_map=None, seed=0)).device.type == "cpu"


@pytest.mark.parametrize("name", BUNDLED)
def test_a_bundled_model_loads(name: str) -> None:
    folder = local_folder(f"kvbench:{name}")
    if folder is None or not (folder / "model.safetensors").is_file():
        pytest.skip(f"the bundled model's weights are not in kvbench/models/{name}")
    model = entry(name)
    model.check()
    loaded = load_model(model, CPU)
    assert loaded.architecture.head_dim == model.head_dim()
    assert loaded.max_length <= loaded.model.config.max_position_embeddings
    assert loaded.eos_token_ids
    ids = loaded.tokenizer("The capital", return_tensors="pt").input_ids
    assert torch.isfinite(loaded.model(ids).logits).all()
    assert sum(path.stat().st_size for path in folder.iterdir()) <= BUNDLED[name]


@pytest.mark.parametrize(
    ("count", "name", "device"),
    [(0, "cuda", None), (0, "cuda:0", None), (2, "cuda", "cuda:0"), (2, "cuda:1", "cuda:1"), (2, "cuda:2", None)]
    + [(0, "auto", "cpu"), (2, "auto", "cuda:0"), (2, "cpu", "cpu")],
)
def test_a_gpu_that_the_machine_lacks_is_refused(monkeypatch, count: int, name: str, device: str | None) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    if device is not None:
        assert resolve_device(name) == torch.device(device)
        return
    with pytest.raises(ConfigError, match=f"runtime.device={name}: does not exist on this machine"):
        resolve_device(name)


@pytest.mark.parametrize(
    ("named", "own", "ids"),
    [(5, 7, (5, 7)), ([5, 6], 7, (5, 6, 7)), ([5, 7], 7, (5, 7)), (None, 7, (7,)), (5, None, (5,))],
)
def test_the_tokenizers_own_end_ends_an_answer_too(named: Any, own: int | None, ids: tuple[int, ...]) -> None:
    from kvbench.models.load import _eos_token_ids

    model = SimpleNamespace(generation_config=SimpleNamespace(eos_token_id=named))
    assert _eos_token_ids(model, SimpleNamespace(eos_token_id=own)) == ids


@pytest.mark.parametrize("name", REAL)
def test_random_weights_attend_as_far_as_the_preset_says(name):
    """Also where transformers' default is a window: MistralConfig's is one of 4096 tokens, and Mistral 0.2 has none."""
    data = yaml.safe_load(group_options("model")[name].read_text(encoding="utf-8"))
    model = build(ModelConfig, {**data, "weights": "random"}, "model")
    assert Shape.of(hf_config(model)) == Shape.of(model.architecture)
