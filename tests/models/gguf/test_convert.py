"""Conversion of GGUF files: weights, tokenizer and description, what is refused, and what is left after a failure."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from kvbench.cli import fetch
from kvbench.cli.compose import Composer
from kvbench.config.run_config import RuntimeConfig
from kvbench.errors import ConfigError, ModelError
from kvbench.models import arithmetic, by_name
from kvbench.models.gguf import convert
from kvbench.models.gguf.convert import converted
from kvbench.models.gguf.place import RECORD, checkpoint_of, finished, gguf_label, models_folder, record
from kvbench.models.load import load_model
from kvbench.models.spec import ModelConfig
from kvbench.results.identity import identity
from kvbench.results.notes import notes
from kvbench.runner.run import answer_run
from kvbench.util.fingerprint import sha256
from kvbench.util.schema import build
from tests.models.gguf import files

gguf = files.gguf


@pytest.fixture(scope="module")
def toy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A file of Q4_1, converted."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("KVBENCH_CACHE", str(tmp_path_factory.mktemp("data")))
        file = files.write(tmp_path_factory.mktemp("gguf") / "toy.gguf")
        converted(file)
        yield file


@pytest.fixture
def empty(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A folder of data with nothing in it."""
    monkeypatch.setenv("KVBENCH_CACHE", str(tmp_path / "data"))
    return tmp_path / "data" / "models"


def left(folder: Path) -> list[str]:
    """What lies in a folder, but for locks."""
    return [path.name for path in folder.glob("*") if path.suffix != ".lock"] if folder.exists() else []


def halves_apart(rows: np.ndarray, heads: int) -> np.ndarray:
    """Undo llama.cpp's order of the rows of a query or key head, in which the two channels of a RoPE pair lie together.

    transformers has all first channels of a head's pairs before all second ones.
    """
    size = rows.shape[0] // heads
    order = [head * size + 2 * pair + half for head in range(heads) for half in (0, 1) for pair in range(size // 2)]
    return rows[order]


def test_weights_are_the_packages_own_dequantization_with_query_and_key_rows_in_order(toy: Path) -> None:
    stored = load_file(converted(toy) / "model.safetensors")
    assert {weight.dtype for weight in stored.values()} == {torch.float32}
    names = {
        "attn_q": "self_attn.q_proj",
        "attn_k": "self_attn.k_proj",
        "attn_v": "self_attn.v_proj",
        "attn_output": "self_attn.o_proj",
        "ffn_gate": "mlp.gate_proj",
        "ffn_up": "mlp.up_proj",
        "ffn_down": "mlp.down_proj",
        "attn_norm": "input_layernorm",
        "ffn_norm": "post_attention_layernorm",
    }
    seen = set()
    for tensor in gguf.GGUFReader(toy).tensors:
        values = gguf.dequantize(tensor.data, tensor.tensor_type)
        if tensor.name == "token_embd.weight":
            name = "model.embed_tokens.weight"
        elif tensor.name == "output_norm.weight":
            name = "model.norm.weight"
        else:
            _, layer, part, _ = tensor.name.split(".")
            name = f"model.layers.{layer}.{names[part]}.weight"
            if part in ("attn_q", "attn_k"):
                values = halves_apart(values, files.HEADS if part == "attn_q" else files.KV_HEADS)
        assert np.array_equal(stored[name].numpy(), values), tensor.name
        seen.add(name)
    assert seen == stored.keys()


def test_the_description_depends_on_the_file_alone(toy: Path) -> None:
    folder = converted(toy)
    config = json.loads((folder / "config.json").read_text())
    assert config["rope_parameters"] == {"rope_theta": 10000.0, "rope_type": "default"}
    assert (config["num_key_value_heads"], config["tie_word_embeddings"], config["dtype"]) == (2, True, "float32")
    every = "".join(file.read_text() for file in folder.glob("*.json"))
    assert str(toy) not in every and toy.name not in every and "transformers_version" not in every
    known = record(folder)
    assert known is not None and known["sha256"] == sha256(toy)
    assert (known["form"], known["quantized"], known["tensors"]) == ("q4_1", True, {"Q4_1": 15, "F32": 5})
    assert gguf_label(str(toy)) == "toy-q4_1"


def test_digits_are_split_and_texts_begin_as_the_file_says(toy: Path, empty: Path, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    text = "the 123 the"
    tokenizer = AutoTokenizer.from_pretrained(converted(files.write(tmp_path / "a.gguf")))
    assert tokenizer.convert_ids_to_tokens(tokenizer(text).input_ids) == ["the", "Ġ", "1", "2", "3", "Ġthe"]
    assert tokenizer.convert_ids_to_tokens(tokenizer("<|start|>the").input_ids) == ["<|start|>", "the"]

    def begins(writer: Any) -> None:
        writer.add_add_bos_token(True)

    other = files.write(tmp_path / "b.gguf", keys={"tokenizer.ggml.pre": "gpt-2"}, change=begins)
    tokenizer = AutoTokenizer.from_pretrained(converted(other))
    assert tokenizer.convert_ids_to_tokens(tokenizer(text).input_ids) == ["<|start|>", "the", "Ġ", "123", "Ġthe"]


def test_a_template_runs_in_a_sandbox(empty: Path, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    turns = [{"role": "user", "content": "hello"}]
    tokenizer = AutoTokenizer.from_pretrained(converted(files.write(tmp_path / "a.gguf")))
    assert tokenizer.apply_chat_template(turns, tokenize=False) == "<user>hello"
    escape = "{{ ''.__class__.__mro__[1].__subclasses__() }}"
    tokenizer = AutoTokenizer.from_pretrained(
        converted(files.write(tmp_path / "b.gguf", keys={"tokenizer.chat_template": escape}))
    )
    with pytest.raises(Exception, match="is unsafe"):
        tokenizer.apply_chat_template(turns, tokenize=False)


def yarn(writer: Any) -> None:
    writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)


def rotary(writer: Any) -> None:
    writer.add_key_length(2 * files.HEAD_DIM)


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"keys": {"tokenizer.ggml.pre": "newer"}}, "tokenizer.ggml.pre is 'newer', a way of splitting"),
        ({"change": yarn}, r"sets llama\.rope\.scaling\.type=yarn, which transformers does not read"),
        ({"change": rotary}, r"sets llama\.attention\.key_length=32, which transformers does not read .*head_dim="),
        ({"extra": {"rope_freqs.weight": np.ones(8, np.float32)}}, "numbers in its tensors, but needs"),
        ({"extra": {"blk.0.attn_q.bias": np.ones(64, np.float32)}}, "numbers in its tensors, but needs"),
        ({"keys": {"tokenizer.ggml.model": "own"}}, "its tokenizer cannot be read"),
    ],
)
def test_what_transformers_would_leave_out_is_refused(
    empty: Path, tmp_path: Path, options: dict[str, Any], problem: str
) -> None:
    with pytest.raises(ModelError, match=problem):
        converted(files.write(tmp_path / "a.gguf", **options))
    assert left(empty) == []


def test_a_full_disk_and_a_killed_process_leave_nothing_half(
    empty: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = files.write(tmp_path / "a.gguf")
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=1000))
        with pytest.raises(ModelError, match=r"take 67\.\d MB, and 1\.0 kB are free in .*\n  hint: .*KVBENCH_CACHE="):
            converted(file)
    assert left(empty) == []

    def full(*args: Any, **kwargs: Any) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(convert, "_write_record", full)
        with pytest.raises(ModelError, match="are free in"):
            converted(file)
    assert left(empty) == []
    folder = checkpoint_of(sha256(file))
    half = folder.with_name(f".{folder.name}.partial")
    half.mkdir()
    (half / "model.safetensors").write_bytes(b"half")
    assert converted(file) == folder and left(empty) == [folder.name]
    (folder / "config.json").unlink()
    assert converted(file) == folder, "what is finished is not looked at again"


def test_without_the_extra_it_says_what_to_install(
    empty: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(convert.importlib.util, "find_spec", lambda name: None if name == "gguf" else name)
    with pytest.raises(
        ModelError, match=r"package 'gguf', .* not installed\.\n  hint: run pip install 'kvbench\[gguf\]'"
    ):
        converted(files.write(tmp_path / "a.gguf"))


def test_a_file_is_a_model_on_the_command_line(toy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    composer = Composer()
    monkeypatch.chdir(toy.parent)
    for typed in (f"model={toy}", f"model=./{toy.name}", f"model={toy.name}"):
        (job,) = composer.check([typed, "dataset=mini_text", "dataset.lengths=[64]"])
        model = composer.configuration(job).model
        assert (model.name, model.max_length, model.chat) == ("toy-q4_1", 256, "template"), typed
    (job,) = composer.check(["model=llama2-7b", f"model.path={toy}", "dataset=mini_text", "dataset.lengths=[64]"])
    model = composer.configuration(job).model
    assert (model.name, model.hub_id, model.architecture) == ("toy-q4_1", None, None)


def test_a_file_that_is_missing_is_named_and_fetch_converts_one_that_is_there(
    toy: Path, empty: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(toy.parent)
    assert fetch.main(["model=./missing.gguf"]) == 2
    refusal = capsys.readouterr().err
    assert "model=./missing.gguf: does not exist." in refusal and "./FOLDER or ./FILE.gguf" in refusal
    assert f"name a GGUF file that exists, as in model=./FILE.gguf; {Path()} has {toy.name}" in refusal
    assert "config.json" not in refusal
    assert fetch.main(["model=tiny", f"model.path={tmp_path / 'no.gguf'}"]) == 2
    refusal = capsys.readouterr().err
    assert f"python -m kvbench.fetch model={tmp_path / 'no.gguf'} converts it" in refusal
    digest = sha256(toy)
    assert not left(empty)
    typed = [f"model=./{toy.name}", "dataset=mini_text", "dataset.lengths=[64]"]
    assert fetch.main(typed) == 0 and finished(digest) is not None
    assert fetch.main(["--help"]) == 0 and "./FILE.gguf" in capsys.readouterr().out.partition("usage:")[2]


def test_both_digests_are_part_of_the_identity_and_the_place_is_not(toy: Path, tmp_path: Path) -> None:
    def setting(file: Path) -> dict[str, Any]:
        group = by_name.group(str(file))
        checked = build(ModelConfig, group, "model")
        config = {"model": group, "method": {"_target_": "m"}, "decoding": {}, "runtime": {}}
        model: dict[str, Any] = identity(config, {}, checked.folder())["setting"]["model"]
        return model

    first = setting(toy)
    assert first["gguf"] == sha256(toy) and len(first["files"]) == 16
    copy = tmp_path / toy.name
    shutil.copy(toy, copy)
    assert setting(copy) == first
    folder = converted(toy)  # as another version of transformers spells the same tokenizer
    (folder / "tokenizer.json").write_text(f"{(folder / 'tokenizer.json').read_text()}\n")
    assert setting(toy) == first
    template = folder / "chat_template.jinja"
    template.write_text("other")
    assert setting(toy) != first
    template.unlink()
    other = tmp_path / "other"
    other.mkdir()
    second = setting(files.write(other / toy.name, "Q8_0"))
    assert second["gguf"] != first["gguf"] and second["files"] != first["files"]


def test_it_computes_in_float32_and_stores_16_bits(toy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arithmetic, "faster_in_float32", lambda storage: False)
    monkeypatch.delenv("KVBENCH_ARITHMETIC")
    model = build(ModelConfig, by_name.group(str(toy)), "model")
    loaded = load_model(model, RuntimeConfig(device="cpu"))
    assert (loaded.dtypes.storage, loaded.dtypes.arithmetic) == (torch.bfloat16, torch.float32)
    assert loaded.dequantized == "gguf q4_1" and loaded.eos_token_ids == (0,)
    assert models_folder() in converted(toy).parents and (converted(toy) / RECORD).is_file()
    with pytest.raises(ConfigError, match=r"model\.weights=int4: rounds .*, but .* are already quantized"):
        build(ModelConfig, {**by_name.group(str(toy)), "weights": "int4"}, "model").check()


def test_a_run_says_of_what_its_weights_were_made(toy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    composer = Composer()
    typed = [
        f"model={toy}",
        "dataset=mini_text",
        "dataset.lengths=[64]",
        "dataset.limit=1",
        "decoding.max_new_tokens=2",
    ]
    (job,) = composer.check([*typed, "runtime.device=cpu", "logger=none"])
    metrics = answer_run(composer.configuration(job))
    assert metrics["env"]["dequantized"] == "gguf q4_1" and metrics["config"]["model"] == "toy-q4_1"
    rounded = "weights of toy-q4_1: dequantized from gguf q4_1 to float32, then rounded to bfloat16"
    shown = notes([metrics])
    assert rounded[:60] in "\n".join(shown) and ("rounded" in "\n".join(shown)) == (
        metrics["env"]["arithmetic"] != "float32"
    )
