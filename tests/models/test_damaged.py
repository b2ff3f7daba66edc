"""Damaged checkpoints: every kind of file that loading reads, in several ways, is refused by the file's name."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from kvbench.config.run_config import RuntimeConfig
from kvbench.errors import ConfigError, KvbenchError, ModelError
from kvbench.models.load import byte_tokenizer, load_model, random_model
from kvbench.models.spec import ModelConfig

CPU = RuntimeConfig(device="cpu")
WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
OBJECTS = ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json")
SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small Llama of 3 layers with a tokenizer of bytes, as `save_pretrained` leaves it."""
    from transformers import GenerationConfig, LlamaConfig

    place = tmp_path_factory.mktemp("good") / "llama"
    config = LlamaConfig(
        vocab_size=300,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        tie_word_embeddings=False,
    )
    random_model(config, torch.float32, "cpu", seed=0).save_pretrained(place)
    byte_tokenizer().save_pretrained(place)
    GenerationConfig(eos_token_id=2).save_pretrained(place)
    return place


@pytest.fixture
def folder(good: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(good, tmp_path / "copy"))


def loaded(folder: Path) -> Any:
    model = ModelConfig(name="mine", path=str(folder), max_length=128)
    model.check()
    model.head_dim()
    return load_model(model, CPU)


def edit(file: Path, **changes: Any) -> None:
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


def resave(folder: Path, change: Callable[[dict[str, torch.Tensor]], Any]) -> None:
    tensors = load_file(folder / WEIGHTS)
    change(tensors)
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})


def drop(folder: Path, part: str) -> None:
    resave(folder, lambda tensors: [tensors.pop(name) for name in list(tensors) if part in name])


def retype(folder: Path, part: str, dtype: torch.dtype, pickled: bool = False) -> None:
    resave(folder, lambda tensors: tensors.update({n: t.to(dtype) for n, t in tensors.items() if part in n}))
    if pickled:
        torch.save(load_file(folder / WEIGHTS), folder / "pytorch_model.bin")
        (folder / WEIGHTS).unlink()


def shard(folder: Path) -> dict[str, str]:
    """The weights as two files and an index; returns its map."""
    tensors = load_file(folder / WEIGHTS)
    (folder / WEIGHTS).unlink()
    names = sorted(tensors)
    parts = dict(zip(SHARDS, (names[: len(names) // 2], names[len(names) // 2 :]), strict=True))
    for file, mine in parts.items():
        save_file({name: tensors[name] for name in mine}, folder / file, metadata={"format": "pt"})
    table = {name: file for file, mine in parts.items() for name in mine}
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": table}))
    return table


def test_an_undamaged_checkpoint_loads_whole_or_in_shards(folder: Path) -> None:
    one = loaded(folder).model.state_dict()
    shard(folder)
    for name, tensor in loaded(folder).model.state_dict().items():
        assert torch.equal(tensor, one[name]), name


def test_weights_of_any_precision_and_integers_that_are_no_weights_load(folder: Path) -> None:
    retype(folder, "k_proj", torch.float64)
    more = {"model.position_ids": torch.arange(4), "model.layers.0.attn.bias": torch.ones(1, 1, 4, 4).byte()}
    resave(folder, lambda tensors: tensors.update(more))
    loaded(folder)
    retype(folder, "q_proj", torch.bfloat16, pickled=True)
    loaded(folder)


def test_tied_weights_are_not_missing(folder: Path) -> None:
    edit(folder / "config.json", tie_word_embeddings=True)
    drop(folder, "lm_head")
    model = loaded(folder).model
    assert model.lm_head.weight.data_ptr() == model.model.embed_tokens.weight.data_ptr()


WAYS: dict[str, Callable[[bytes], bytes]] = {
    "cut": lambda data: data[: len(data) // 2],
    "empty": lambda data: b"",
    "nul": lambda data: b"\0" * len(data),
    "list": lambda data: b"[1, 2]",
    "number": lambda data: b"7",
    "null": lambda data: b"null",
    "deep": lambda data: b"[" * 100_000 + b"]" * 100_000,
    "huge number": lambda data: b'{"a": ' + b"9" * 10_000 + b"}",
    "not utf-8": lambda data: b'{"a": "\xff\xfe"}',
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", OBJECTS)
def test_a_damaged_file_beside_the_weights_is_named(folder: Path, name: str, way: str) -> None:
    (folder / name).write_bytes(WAYS[way]((folder / name).read_bytes()))
    with pytest.raises(KvbenchError) as caught:
        loaded(folder)
    assert name in str(caught.value)
    assert str(folder) in str(caught.value)


def with_length(data: bytes, length: int) -> bytes:
    return length.to_bytes(8, "little") + data[8:]


WEIGHT_WAYS: dict[str, tuple[Callable[[bytes], bytes], str]] = {
    "cut": (lambda data: data[: len(data) // 2], "it is incomplete"),
    "longer": (lambda data: data + b"\0" * 8, "bytes of tensors instead of the"),
    "empty": (lambda data: b"", "is not a safetensors file"),
    "nul": (lambda data: b"\0" * len(data), "is not a safetensors file"),
    "long header": (lambda data: with_length(data, 2**62), "is not a safetensors file"),
    "garbled header": (lambda data: data[:8] + b"x" * 50 + data[58:], "has a header that cannot be read"),
    "deep header": (lambda data: with_length(b"\0" * 8 + b"[" * 100_000, 100_000), "nested too deeply"),
    "list": (lambda data: with_length(b"\0" * 8 + b"[1]", 3), "is a list, not a JSON object"),
    "no offsets": (
        lambda data: with_length(b"\0" * 8 + b'{"a": {}}', 9),
        "has a header that does not give the position of the tensor a",
    ),
    "another type": (lambda data: data.replace(b'"F32"', b'"F16"', 1), "bytes, but F16 of shape ["),
}


@pytest.mark.parametrize("way", WEIGHT_WAYS)
@pytest.mark.parametrize("file", [WEIGHTS, SHARDS[1]])
def test_damaged_weights_are_named(folder: Path, file: str, way: str) -> None:
    if file != WEIGHTS:
        shard(folder)
    change, said = WEIGHT_WAYS[way]
    (folder / file).write_bytes(change((folder / file).read_bytes()))
    with pytest.raises(ModelError) as caught:
        loaded(folder)
    assert str(folder / file) in str(caught.value)
    assert said in str(caught.value)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda folder: drop(folder, "layers.1."), r"lacks 9 tensors .*model\.layers\.1\.input_layernorm\.weight"),
        (lambda folder: drop(folder, "layers.2.mlp.up_proj"), r"lacks 1 tensor .*layers\.2\.mlp\.up_proj\.weight\."),
        (lambda folder: drop(folder, "lm_head"), r"lacks 1 tensor .*lm_head"),
        (lambda folder: drop(folder, "layers.2."), r"num_hidden_layers=3, but the weights have only 2 layers"),
        (lambda folder: edit(folder / "config.json", num_hidden_layers=6), r"=6, but the weights have only 3"),
        (
            lambda folder: edit(folder / "config.json", num_hidden_layers=2),
            r"9 tensors for more layers .*\(2\).*layers\.2",
        ),
        (
            lambda folder: edit(folder / "config.json", intermediate_size=64),
            r"9 tensors whose shape does not match .*\[32, 48\], not \[32, 64\]",
        ),
        (lambda folder: retype(folder, "1.self_attn.k_proj", torch.int8), r"stores \S*k_proj\.weight as I8, .*quantiz"),
        (lambda folder: retype(folder, "lm_head", torch.float8_e4m3fn), r"stores lm_head\.weight as F8_E4M3, "),
        (
            lambda folder: retype(folder, "model.norm", torch.int64),
            r"model\.safetensors .*norm\.weight as I64",
        ),
        (
            lambda folder: retype(folder, "lm_head", torch.int8, pickled=True),
            r"model\.bin .*lm_head\.weight as I8",
        ),
        (
            lambda folder: resave(folder, lambda t: t.update({"model.norm.weight": torch.zeros(31)})),
            r"1 tensor whose shape does not match .*model\.norm\.weight is \[31\], not \[32\]",
        ),
    ],
)
def test_weights_that_are_not_the_models_are_refused(
    folder: Path, change: Callable[[Path], None], message: str
) -> None:
    change(folder)
    with pytest.raises(ModelError, match=message):
        loaded(folder)


@pytest.mark.parametrize(
    ("table", "message"),
    [
        (lambda table: [], "contains a list instead of a JSON object"),
        (lambda table: {}, "has no valid weight_map"),
        (lambda table: {"weight_map": {}}, "has no valid weight_map"),
        (lambda table: {"weight_map": dict.fromkeys(table, 5)}, "has no valid weight_map"),
        (lambda table: {"weight_map": dict.fromkeys(table, "../x.safetensors")}, "outside its own folder"),
        (
            lambda table: {"weight_map": {**table, "a": "gone.safetensors"}},
            "refers to 3 files, of which gone.safetensors is missing",
        ),
    ],
)
def test_a_damaged_index_is_named(folder: Path, table: Callable[[dict[str, str]], Any], message: str) -> None:
    (folder / INDEX).write_text(json.dumps(table(shard(folder))))
    with pytest.raises(ModelError) as caught:
        loaded(folder)
    assert str(folder / INDEX) in str(caught.value)
    assert message in str(caught.value)


def test_a_missing_shard_is_refused_before_anything_is_loaded(folder: Path) -> None:
    from kvbench.models.locate import locate

    shard(folder)
    (folder / SHARDS[1]).unlink()
    with pytest.raises(ModelError, match=f"refers to 2 files, of which {SHARDS[1]} is missing"):
        locate(ModelConfig(name="mine", path=str(folder), max_length=128))


@pytest.mark.parametrize(
    "numbers",
    [
        {"num_attention_heads": 0},
        {"num_attention_heads": -4},
        {"num_attention_heads": "x"},
        {"num_key_value_heads": 3},
        {"head_dim": "x"},
        {"head_dim": 16.5},
        {"hidden_size": True},
        {"hidden_size": 10**12},
        {"num_hidden_layers": 10**9},
        {"vocab_size": 0},
        {"max_position_embeddings": -1},
        {"model_type": 5},
    ],
    ids=str,
)
def test_numbers_that_cannot_be_are_refused_from_the_configuration(folder: Path, numbers: dict[str, Any]) -> None:
    edit(folder / "config.json", **numbers)
    with pytest.raises(ConfigError, match=rf"its config\.json sets {next(iter(numbers))}"):
        ModelConfig(name="mine", path=str(folder), max_length=128).head_dim()


@pytest.mark.parametrize("end", ["x", [2, "x"], 300, -1, True, 2.5])
def test_an_end_that_no_answer_can_have_is_refused(folder: Path, end: Any) -> None:
    edit(folder / "generation_config.json", eos_token_id=end)
    with pytest.raises(ModelError, match=r"generation_config\.json cannot be loaded: it sets eos_token_id="):
        loaded(folder)


def test_a_vocabulary_smaller_than_the_tokenizers(folder: Path) -> None:
    edit(folder / "config.json", vocab_size=200)
    with pytest.raises(ModelError, match=r"has 59 tokens without an embedding in the model: vocab_size is 200"):
        loaded(folder)


def test_tokens_that_were_added_may_lie_beyond_unless_they_are_used(folder: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.add_tokens([f"<image{number}>" for number in range(60)])
    tokenizer.save_pretrained(folder)
    assert loaded(folder).architecture.vocab_size == 300 < len(tokenizer)
    tokenizer.pad_token = "<image59>"
    tokenizer.save_pretrained(folder)
    with pytest.raises(ModelError, match=r"has 1 tokens? without an embedding in the model.*'<image59>' has id 318"):
        loaded(folder)


class Malicious:
    """Would make a file if it were unpickled freely."""

    def __init__(self, place: Path) -> None:
        self.place = place

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.place,)


def test_code_in_a_pickle_is_refused_in_words_and_never_run(folder: Path) -> None:
    (folder / WEIGHTS).unlink()
    torch.save({"a": Malicious(folder / "ran")}, folder / "pytorch_model.bin")
    with pytest.raises(ModelError, match=r"pytorch_model\.bin is damaged, or contains code .* never runs"):
        loaded(folder)
    assert not (folder / "ran").exists()


@pytest.mark.parametrize("content", [b"", b"garbage" * 9, None])
def test_a_damaged_pickle_is_named(folder: Path, content: bytes | None) -> None:
    (folder / WEIGHTS).unlink()
    file = folder / "pytorch_model.bin"
    torch.save([1, 2], file)
    file.write_bytes(file.read_bytes() if content is None else content)
    with pytest.raises(ModelError, match=r"pytorch_model\.bin"):
        loaded(folder)


def test_what_the_model_has_no_use_for_is_said(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    resave(folder, lambda tensors: tensors.update({"vision.weight": torch.zeros(2)}))
    loaded(folder)
    assert "1 tensor that the model does not use: vision.weight" in capsys.readouterr().err
