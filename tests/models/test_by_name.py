"""Any model by name: a repository or a folder after ``model=`` runs by its own files and under its own name."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from kvbench.cli import calibrate, fetch
from kvbench.cli.compose import Composer
from kvbench.cli.main import main
from kvbench.config.run_config import checked_config
from kvbench.errors import ConfigError
from kvbench.models import by_name
from kvbench.models.endpoint_config import KEYS
from kvbench.models.load import byte_tokenizer, random_model
from kvbench.results.identity import identity, run_id
from kvbench.runner.resolve import settled
from kvbench.util.confdir import group_options
from tests.hub.standin import Hub, reachable, serving

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small Qwen3 with sliding and full layers, as `save_pretrained` leaves it, and a chat template."""
    from transformers import Qwen3Config

    place = tmp_path_factory.mktemp("made") / "small-qwen"
    config = Qwen3Config(
        vocab_size=300,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=2048,
        use_sliding_window=True,
        sliding_window=64,
        max_window_layers=1,
    )
    random_model(config, torch.float32, "cpu", seed=0).save_pretrained(place)
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = "{{ messages[0].content }}"
    tokenizer.save_pretrained(place)
    return place


@pytest.fixture(scope="module")
def hub(checkpoint: Path) -> Iterator[Hub]:
    """A hub that has the checkpoint as ``me/small``."""
    with serving() as hub:
        hub.add("me/small", {file.name: file.read_bytes() for file in checkpoint.iterdir() if file.is_file()})
        yield hub


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A folder and a cache of the hub of their own, without network."""
    by_name.fetch_description.cache_clear()
    monkeypatch.chdir(tmp_path)
    with reachable(monkeypatch, tmp_path / "cache", None):
        yield
    by_name.fetch_description.cache_clear()


def composed(*overrides: str) -> dict[str, Any]:

    composer = Composer()
    composer.check(overrides)
    return composer.plain(overrides)


def id_of(config: Mapping[str, Any]) -> str:
    checked = checked_config(config)
    return run_id(identity(settled(checked), {}, checked.model.folder()))


def folder(place: Path, **numbers: Any) -> Path:
    place.mkdir(parents=True)
    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "head_dim": 16}
    text = json.dumps({"model_type": "llama", "max_position_embeddings": 4096, **sizes, **numbers})
    (place / "config.json").write_text(text)
    return place


@pytest.mark.parametrize("typed", ["{0}", "./link", "link", "{1}/../{2}/link"])
def test_a_folder_is_a_model(checkpoint: Path, tmp_path: Path, typed: str) -> None:
    (tmp_path / "link").symlink_to(checkpoint)
    name = typed.format(checkpoint, "..", tmp_path.name).replace("../../", "../")
    config = composed(f"model={name}", "method=kivi")
    model = config["model"]
    assert (model["name"], model["path"], model["hub_id"]) == ("small-qwen", name, None)
    assert (model["max_length"], model["chat"], model["dtype"]) == (2048, "template", "auto")
    assert checked_config(config).model.head_dim() == 32
    typed_out = composed("model=tiny", f"model.path={name}", "method=kivi")
    assert config == typed_out
    assert id_of(config) == id_of(typed_out)


def test_a_repository_is_a_model_of_the_commit_in_the_cache(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with reachable(monkeypatch, tmp_path / "cache", hub.address):
        config = composed("model=me/small")
    model = config["model"]
    assert (model["name"], model["hub_id"], model["revision"]) == (
        "me/small",
        "me/small",
        hub.repositories["me/small"].main,
    )
    assert (model["path"], model["max_length"], model["chat"], model["dtype"]) == (None, 2048, "template", "auto")
    assert composed("model=me/small") == config  # from the cache: the same run without network
    typed_out = composed("model=tiny", "model.hub_id=me/small", f"model.revision={hub.repositories['me/small'].main}")
    assert id_of(config) == id_of(typed_out)
    other = {**config, "model": {**model, "revision": "f" * 40}}
    assert id_of(other) != id_of(config)


def test_what_a_person_sets_wins(checkpoint: Path) -> None:
    changed = composed(f"model={checkpoint}", "model.max_length=1999", "model.chat=none", "model.dtype=float32")
    assert [changed["model"][key] for key in ("max_length", "chat", "dtype")] == [1999, "none", "float32"]
    elsewhere = folder(Path("elsewhere"))
    moved = composed("model=me/unknown", f"model.path={elsewhere}")["model"]
    assert (moved["name"], moved["hub_id"], moved["max_length"]) == ("elsewhere", None, 4096)


def test_a_row_never_carries_a_presets_name() -> None:
    """A folder that is called as a preset is called by its parent's name too; a preset's own name stays the preset."""
    folder(Path("mine/llama2-7b"))
    folder(Path("tiny"))
    assert composed("model=./mine/llama2-7b")["model"]["name"] == "mine/llama2-7b"
    assert composed("model=tiny")["model"]["path"] == "kvbench:tiny"
    assert composed(f"model={Path('tiny').absolute()}")["model"]["name"] == f"{Path.cwd().name}/tiny"
    with pytest.raises(ConfigError, match=r"is also the path of a preset's file.*\n.*model=/.*/tiny"):
        composed("model=./tiny")


def test_random_weights_of_a_named_architecture(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with reachable(monkeypatch, tmp_path / "cache", hub.address):
        config = composed("model=me/small", "model.weights=random")
    assert config["model"]["name"] == "me/small"
    assert checked_config(config).model.head_dim() == 32


@pytest.mark.slow  # 6 s
def test_a_sweep_over_presets_repositories_and_folders(
    checkpoint: Path, hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Weights, tokenizer and rows of all three, from one command, and from the hub as from the folder."""
    data = ["dataset=mini/needle", "dataset.lengths=[512]", "dataset.limit=1", "decoding.max_new_tokens=2"]
    with reachable(monkeypatch, tmp_path / "cache", hub.address):
        assert fetch.main(["model=me/small"]) == 0
    assert "model me/small: " in capsys.readouterr().out
    command = ["--multirun", f"model=tiny,me/small,{checkpoint}", "method=fp16", "runtime.device=cpu", *data]
    assert main(command) == 0
    capsys.readouterr()
    stored = [yaml.safe_load(file.read_text())["model"] for file in Path("results/runs").glob("*/config.yaml")]
    assert sorted(model["name"] for model in stored) == ["me/small", "small-qwen", "tiny"]
    texts = {file.parent.name: file.read_text() for file in Path("results/runs").glob("*/samples.jsonl")}
    assert len(texts) == 3
    assert main(command) == 0
    assert "3 ok (3 of them were already done)" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("typed", "parts"),
    [
        ("me/none", ["model=me/none: is not on this machine", "HF_HUB_OFFLINE is set", "kvbench.fetch model=me/none"]),
        ("Qwen/Qwen2-9B-Instruct", ["kvbench.fetch model=Qwen/Qwen2-9B-Instruct", "a preset: qwen2-7b-instruct"]),
        ("./nothing", ["model=./nothing: does not exist", "config.json"]),
        ("a/b/c", ["model=a/b/c: does not exist"]),
        ("./empty", ["model=./empty: has no config.json"]),
        ("empty", ["model=empty: has no config.json"]),
        ("sub/empty", ["is not on this machine", "the folder ./sub/empty has no config.json"]),
        ("llama2-7", ["no such model", "did you mean 'llama2-7b'", "model=OWNER/NAME"]),
        ("'https://huggingface.co/Qwen/Qwen3-8B'", ["only the repository's name: model=Qwen/Qwen3-8B"]),
        ("'https://me:hf_abcdefghijkl@huggingface.co/me/mine'", ["no such model", "***"]),
        ("../dataset/mini", ["model=../dataset/mini", "the full path: model=/"]),
        ("./latent", ["latent attention (MLA)"]),
        ("./recurrent", ["layers of type chunked_attention"]),
        ("./odd", ["config.json", "hidden_size"]),
    ],
)
def test_a_wrong_name_is_refused_with_what_to_type(
    typed: str, parts: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    for place in ("empty", "sub/empty"):
        Path(place).mkdir(parents=True)
    folder(Path("latent"), kv_lora_rank=512)
    folder(Path("recurrent"), layer_types=["chunked_attention", "full_attention"])
    folder(Path("odd"), hidden_size="many")
    for command in ([f"model={typed}"], ["--multirun", f"model=tiny,{typed}"]):
        assert main([*command, "--cfg", "job"] if command[0] != "--multirun" else command) == 2
        refusal = capsys.readouterr().err
        for part in parts:
            assert part in refusal
        assert "hf_abcdefghijkl" not in refusal
    assert not Path("results").exists()


def test_a_hub_that_does_not_have_it(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with (
        reachable(monkeypatch, tmp_path / "cache", hub.address),
        pytest.raises(ConfigError, match=r"the hub does not have it at revision main \(404\)"),
    ):
        composed("model=me/other")


def test_fetching_without_network_says_what_is_missing(capsys: pytest.CaptureFixture[str]) -> None:
    assert fetch.main(["model=me/none"]) == 2
    assert "HF_HUB_OFFLINE is set" in capsys.readouterr().err


def test_other_commands_take_the_same_names(
    checkpoint: Path, hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from kvbench.bench import choices

    with reachable(monkeypatch, tmp_path / "cache", hub.address):
        for name, row in ((str(checkpoint), "small-qwen"), ("me/small", "me/small")):
            assert calibrate.model_config(name, None, None, False).name == row
            assert choices.model_config(name).name == row
            assert choices.shape_of(name).layers == 2
    for refused in (lambda name: calibrate.model_config(name, None, None, False), choices.model_config):
        with pytest.raises(ConfigError, match=r"--model=me/none: is not on this machine"):
            refused("me/none")
        with pytest.raises(ConfigError, match=r"did you mean 'tiny'.*--model OWNER/NAME"):
            refused("tinny")


def test_help_says_it(capsys: pytest.CaptureFixture[str]) -> None:
    """And so does the README, whose model needs the hub: that much of it is held here."""
    assert main(["--help"]) == 0
    shown = capsys.readouterr().out
    assert "model=OWNER/NAME" in shown
    assert "model=./FOLDER" in shown
    assert "model=Qwen/Qwen3-8B" in (ROOT / "README.md").read_text(encoding="utf-8")
    assert by_name.source_key("Qwen/Qwen3-8B") == "hub_id"


def test_the_plain_group_has_every_key_of_a_preset() -> None:
    """An override of any preset's key is one of a named model's too."""
    for path in group_options("model").values():
        keys = set(yaml.safe_load(path.read_text(encoding="utf-8")))
        own = KEYS | {"preset"} if path.stem == by_name.SERVED else set()
        assert keys - {"package"} - own == set(by_name.PLAIN), path.name  # few models come in packages
