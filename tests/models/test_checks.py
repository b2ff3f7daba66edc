"""Checks around loading: dtypes, shapes, vocabularies, and what transformers reports of the weights."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest
from transformers import GPTNeoXConfig, Lfm2Config, LlamaConfig

from kvbench.errors import ModelError
from kvbench.models import checkpoint
from kvbench.models.checkpoint import DamagedFile, context, has_chat_template, layer_of, longest
from kvbench.models.load import Shape, shape_of
from kvbench.models.locate import Source, announcement, wanted
from kvbench.models.spec import ModelConfig
from kvbench.models.verify import check_complete, check_served, check_vocabulary, unloadable_error

MODEL = ModelConfig(name="m", hub_id="some/model", max_length=64)
HERE = Source("the folder", local=True)


def config(**changes: Any) -> Any:
    numbers = {"model_type": "x", "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2}
    text = SimpleNamespace(**numbers | {"head_dim": 24, "hidden_size": 64, "vocab_size": 9} | changes)
    return SimpleNamespace(get_text_config=lambda decoder: text)


def test_the_shape_of_a_model() -> None:
    sizes = {"num_hidden_layers": 3, "num_attention_heads": 4, "hidden_size": 64, "vocab_size": 9}
    whole = shape_of(LlamaConfig(**sizes, num_key_value_heads=2, head_dim=24))
    assert whole == Shape("llama", layers=3, heads=4, kv_heads=2, head_dim=24, hidden_size=64, vocab_size=9)
    bare = shape_of(GPTNeoXConfig(**sizes))
    assert (bare.kv_heads, bare.head_dim) == (4, 16)
    hybrid = Lfm2Config(**sizes, num_key_value_heads=2, layer_types=["conv", "full_attention", "conv"])
    assert shape_of(hybrid).layers == 1  # those with keys and values


def tokenizer(vocabulary: dict[str, int], added: tuple[str, ...] = (), **special: int | None) -> Any:
    ids = {"pad_token_id": None, "bos_token_id": None, "eos_token_id": None} | special
    return SimpleNamespace(get_vocab=lambda: vocabulary, get_added_vocab=lambda: dict.fromkeys(added), **ids)


@pytest.mark.parametrize("name", ["pad_token_id", "bos_token_id", "eos_token_id"])
def test_tokens_without_an_embedding_are_refused_if_text_can_have_them(name: str) -> None:
    vocabulary = {"a": 0, "b": 8, "<image>": 10, "<end>": 9}
    check_vocabulary("m", tokenizer({"a": 0, "b": 8}), 9)
    check_vocabulary("m", tokenizer(vocabulary, ("<image>", "<end>")), 9)
    with pytest.raises(ModelError, match=r"its tokenizer has 1 tokens.*vocab_size is 9, but '<end>' has id 9"):
        check_vocabulary("m", tokenizer(vocabulary, ("<image>", "<end>"), **{name: 9}), 9)
    with pytest.raises(ModelError, match=r"2 tokens without an embedding.*'<end>' has id 9"):
        check_vocabulary("m", tokenizer(vocabulary), 9)


def test_models_that_are_not_served_are_refused_before_their_vocabulary() -> None:
    check_served(MODEL, config(), tokenizer({"a": 8}))
    check_served(MODEL, config(vocab_size=None), tokenizer({"a": 99}))
    with pytest.raises(ModelError, match=r"^model m: its tokenizer has 1 tokens"):
        check_served(MODEL, config(), tokenizer({"a": 9}))
    with pytest.raises(ModelError, match=r"^model m: mamba has no softmax attention"):
        check_served(MODEL, config(model_type="mamba"), tokenizer({"a": 9}))


def complete(**report: Any) -> None:
    check_complete(MODEL, HERE, SimpleNamespace(config=config()), report)


def test_weights_that_do_not_match_are_refused_in_this_order(capsys) -> None:
    complete()
    complete(missing_keys=[], mismatched_keys=None, unexpected_keys=())
    keys = {
        "unexpected_keys": ["model.layers.3.a", "extra"],
        "mismatched_keys": [("b", (2, 3), (4, 5)), ("a", (1,), (2,))],
        "missing_keys": ["d", "c", "a", "b"],
    }
    with pytest.raises(ModelError, match=r"model m: the folder lacks 4 tensors .* requires: a, b, c, \.\.\."):
        complete(**keys)
    with pytest.raises(ModelError, match=r"has 2 tensors whose shape does not match .*: a is \[1\], not \[2\]"):
        complete(**{**keys, "missing_keys": []})
    with pytest.raises(ModelError, match=r"has 1 tensor for more layers than .* describes \(3\): model.layers.3.a"):
        complete(unexpected_keys=keys["unexpected_keys"])
    assert capsys.readouterr().err == ""
    complete(unexpected_keys=["model.layers.2.a", "extra"])
    printed = capsys.readouterr().err
    assert printed == "model m: the folder has 2 tensors that the model does not use: extra, model.layers.2.a\n"


@pytest.mark.parametrize(
    ("error", "part", "said"),
    [
        (ValueError("set trust_remote_code=True"), "weights", "then set model.trust_remote_code=true"),
        (KeyError("x"), "weights", "building it from its config.json and its weights failed: KeyError: 'x'"),
        (KeyError("x"), "tokenizer", "its tokenizer cannot be read: KeyError: 'x'"),
        (OSError("no such\n  file"), "weights", "cannot be loaded: no such file\n  hint: set model.path=DIR"),
        (RuntimeError("weights_only"), "weights", "its weights is damaged, or contains code in addition to tensors"),
    ],
)
def test_a_checkpoint_that_cannot_be_loaded_says_why(error: Exception, part: str, said: str) -> None:
    assert said in str(unloadable_error(MODEL, HERE, error, part))
    assert str(unloadable_error(MODEL, HERE, error, part)).startswith("model m: the folder cannot be loaded: ")


def test_a_gated_model_says_how_to_get_access() -> None:
    gated = ModelConfig(name="m", hub_id="some/model", max_length=64, gated="ask the author")
    assert "hint: get access to the gated model: ask the author" in str(
        unloadable_error(gated, HERE, OSError("403"), "weights")
    )
    assert "hint: set model.path=DIR" in str(unloadable_error(gated, HERE, OSError("no disk"), "weights"))
    assert "hint: set model.path=DIR" in str(unloadable_error(MODEL, HERE, OSError("403"), "weights"))


def test_a_damaged_file_of_a_folder_is_named_in_place_of_the_error(tmp_path) -> None:
    (tmp_path / "config.json").write_text("{")
    computed = unloadable_error(MODEL, Source(str(tmp_path), local=True), ValueError("odd"), "weights")
    assert isinstance(computed, DamagedFile) and computed.file == tmp_path / "config.json"
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "pytorch_model.bin").write_bytes(b"x")
    computed = unloadable_error(MODEL, Source(str(tmp_path), local=True), ValueError("odd"), "weights")
    assert "building it from its config.json and its pytorch_model.bin failed" in str(computed)


def test_the_longest_sequence_is_that_of_the_first_key(tmp_path) -> None:
    assert longest({}) is None and longest({"n_ctx": 5, "seq_length": 7}) == 5
    assert longest({"max_position_embeddings": 9, "n_positions": 3}) == 9
    (tmp_path / "config.json").write_text("{}")
    assert context(tmp_path) is None
    for stated, length in ((4096, 4096), (1e30, None), (10**30, None), (0, None), (True, None)):
        (tmp_path / "tokenizer_config.json").write_text(json.dumps({"model_max_length": stated}))
        assert context(tmp_path) == length, stated
    (tmp_path / "config.json").write_text('{"n_positions": 77}')
    assert context(tmp_path) == 77


def test_multimodal_sizes_are_those_of_the_text(tmp_path) -> None:
    (tmp_path / "config.json").write_text('{"hidden_size": 8, "vocab_size": 5, "text_config": {"hidden_size": 16}}')
    numbers = checkpoint.read_config(tmp_path)
    assert (numbers["hidden_size"], numbers["vocab_size"]) == (16, 5)


@pytest.mark.parametrize(
    ("file", "content", "expected"),
    [
        ("chat_template.jinja", "x", True),
        ("chat_template.json", "{}", True),
        ("tokenizer_config.json", '{"chat_template": "x"}', True),
        ("tokenizer_config.json", '{"chat_template": null}', False),
        ("tokenizer_config.json", "{}", False),
        ("other.json", "{}", False),
    ],
)
def test_a_chat_template_is_found_where_checkpoints_keep_it(tmp_path, file: str, content: str, expected: bool) -> None:
    (tmp_path / file).write_text(content)
    assert has_chat_template(tmp_path) is expected


def test_layers_are_numbered_in_the_names_of_tensors() -> None:
    assert layer_of("model.layers.12.mlp.weight") == 12 and layer_of("h.0.attn") == 0
    assert layer_of("transformer.blocks.3.x") == 3 and layer_of("lm_head.weight") is None
    assert layer_of("sublayers.3.x") is None


def test_missing_layers_are_refused_and_those_of_a_vision_tower_do_not_count(tmp_path) -> None:
    names = ["model.layers.0.a", "model.layers.1.a"]
    checkpoint.check_layers({"num_hidden_layers": 2}, names, tmp_path)
    checkpoint.check_layers({"num_hidden_layers": 9}, ["embed"], tmp_path)
    checkpoint.check_layers({}, names, tmp_path)
    for more in ([], ["vision.layers.8.a"]):
        with pytest.raises(DamagedFile, match=r"sets num_hidden_layers=3, but the weights have only 2 layers"):
            checkpoint.check_layers({"num_hidden_layers": 3}, [*names, *more], tmp_path)


def test_one_copy_of_the_weights_and_all_small_files_are_wanted() -> None:
    small = ["config.json", "tokenizer.model", "chat.jinja", "vocab.txt", "code.py"]
    other = ["README.md", "sub/config.json", "training.bin", "consolidated.safetensors"]
    both = ["model.safetensors", "pytorch_model.bin"]
    assert wanted([*small, *other, *both]) == ["model.safetensors", *small]
    assert wanted([*small, *other, both[1]]) == ["pytorch_model.bin", *small]


def test_a_download_is_announced_with_what_is_missing() -> None:
    plan: Any = SimpleNamespace(files=("a", "b", "c"), missing=("a",), missing_bytes=1_500_000)
    assert (
        announcement("model m", plan)
        == "model m: 1 file, 1.5 MB to download (2 of 3 files are already on this machine)"
    )
    plan.missing = plan.files
    assert announcement("model m", plan) == "model m: 3 files, 1.5 MB to download"


@pytest.mark.parametrize(("end", "good"), [(0, True), (8, True), ([3, 8], True), (None, True), (9, False), (-1, False)])
def test_ends_of_answers_are_tokens_of_the_vocabulary(tmp_path, end: Any, good: bool) -> None:
    file = tmp_path / "generation_config.json"
    checkpoint.check_ends({"eos_token_id": 9}, {}, file)
    if good:
        checkpoint.check_ends({"eos_token_id": end}, {"vocab_size": 9}, file)
        return
    with pytest.raises(DamagedFile, match=f"sets eos_token_id={end}, which is not a token"):
        checkpoint.check_ends({"eos_token_id": end}, {"vocab_size": 9}, file)
