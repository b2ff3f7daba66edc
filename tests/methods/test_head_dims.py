"""Default groups on heads that they do not divide: fitted, named in the row and the label; a person's are refused."""

from __future__ import annotations

import ast
import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

import kvbench
from kvbench.cache.prompts import Prompts
from kvbench.config.setting import parse_setting
from kvbench.errors import ConfigError
from kvbench.methods.bytes import kv_bytes
from kvbench.runner.run import answer_run
from tests.run_support import ARCHITECTURE, config

SETTINGS = [
    ("kivi", None, {}),
    ("kivi", "int4", {}),
    ("kivi", "int2", {"key_axis": "token"}),
    ("logquant", None, {}),
    ("logquant", "int4_g64", {"key_axis": "token"}),
    ("partial_logquant", None, {}),
    ("cocktail", None, {"encoder": "bm25", "split": (10, 30, 60)}),
]
#: value groups that are expected of head dims, by the default: 32 (KIVI), 64 (LogQuant, Cocktail)
GROUPS = {
    80: {32: 16, 64: 16},
    32: {32: 32, 64: 32},
    96: {32: 32, 64: 32},
    128: {32: 32, 64: 64},
}


def model(head_dim: int) -> PreTrainedModel:
    torch.manual_seed(0)
    numbers = {"hidden_size": 2 * head_dim, "intermediate_size": 32, "num_hidden_layers": 1, "head_dim": head_dim}
    return LlamaForCausalLM(LlamaConfig(vocab_size=300, num_attention_heads=2, num_key_value_heads=1, **numbers)).eval()


@pytest.mark.parametrize("head_dim", list(GROUPS))
@pytest.mark.parametrize(("name", "quantizer", "options"), SETTINGS)
def test_a_default_group_fits_every_head(name: str, quantizer: str | None, options: Any, head_dim: int) -> None:
    """The cache's buffers, the formula of its bytes and the group that is said are one."""
    default = 32 if name == "kivi" else 64
    method, made = kvbench.load_method(name, quantizer=quantizer, **options), model(head_dim)
    ids = torch.arange(3, 3 + 260)[None] % 90 + 3
    prompts = Prompts.from_batch(
        ids, context_spans=[(0, 256)], queries=["what"], decode=lambda t: " ".join(map(str, t))
    )
    cache = method.new_cache(made, prompts)
    with torch.inference_mode():
        made(ids, past_key_values=cache)
    group = GROUPS[head_dim][default]
    values = [s.quantizer for s in cache.layers[0].stores()[1].segments if hasattr(s, "quantizer")]
    assert values
    assert {each.group_size or head_dim for each in values} == {group}
    notes = cache.notes[0]["chunks"] if cache.notes else None
    chunks = None if notes is None else (notes["int2"], notes["int4"])
    expected = kv_bytes(
        method, ids.shape[1], layers=1, query_heads=2, heads=1, channels=head_dim, width=4, chunks=chunks
    )
    assert cache.bill().used.as_dict() == {**vars(expected), "total": expected.total}
    sizes = method.fitted(head_dim)
    if head_dim == 128 or (head_dim == 96 and default == 32):
        assert sizes == {}
    elif not (name == "cocktail" and head_dim == 32):  # there the default is the whole head
        key = "method.value_group_size" if name == "cocktail" else "quantizer.value.group_size"
        assert sizes == ({} if group == default else {key: group})


def test_a_method_serves_models_of_other_heads_one_after_the_other() -> None:
    method = kvbench.load_method("kivi", quantizer="int2", residual=32)
    narrow, wide = model(80), model(128)
    caches = [method.new_cache(narrow), method.new_cache(wide)]
    ids = torch.arange(3, 80)[None]
    for made, cache, group in zip((narrow, wide), caches, (16, 32), strict=True):
        with torch.inference_mode():
            made(ids, past_key_values=cache)
        assert cache.layers[0].stores()[1].segments[0].quantizer.group_size == group


@pytest.mark.parametrize("name", ["kivi", "logquant"])
def test_a_persons_group_is_refused_with_what_can_be_typed_in_python(name: str) -> None:
    formats = {
        "key": {"bits": 2, "group_size": 32, "axis": "channel"},
        "value": {"bits": 2, "group_size": 64, "axis": "token"},
    }
    small_model = model(80)
    with pytest.raises(ConfigError, match="does not divide the model's head_dim 80") as caught:
        kvbench.load_method(name, quantizer=formats).new_cache(small_model)
    typed = ast.literal_eval(caught.value.hint.partition("in Python, pass quantizer=")[2])
    assert typed == {**formats, "value": {"bits": 2, "group_size": 16, "axis": "token"}}
    kvbench.load_method(name, quantizer=typed).new_cache(small_model)


def test_a_persons_group_for_cocktail_too() -> None:
    made, ids = model(80), torch.arange(3, 80)[None]
    prompts = Prompts.from_batch(ids, decode=str)
    with pytest.raises(ConfigError, match="does not divide the model's head_dim 80") as caught:
        kvbench.load_method("cocktail", encoder="bm25", value_group_size=64).new_cache(made, prompts)
    assert caught.value.hint == "value_group_size=16"


def test_a_person_on_the_command_line_is_refused_and_the_hint_is_accepted(capsys: pytest.CaptureFixture[str]) -> None:
    from kvbench.cli.main import main

    shape = ["model=llama2-7b", "model.weights=random", "model.architecture.hidden_size=2560", "dataset=mini/needle"]
    assert main([*shape, "method=kivi", "quantizer.value.group_size=64"]) == 2
    printed = capsys.readouterr().err
    assert "quantizer.value.group_size=64: does not divide the model's head_dim 80" in printed
    assert "hint: set quantizer.value.group_size=16" in printed
    for typed in (["quantizer.value.group_size=16"], []):
        assert main([*shape, "method=kivi", *typed, "--cfg", "job"]) == 0


def test_the_row_and_the_label_name_the_fitted_group(tmp_path: Path) -> None:
    asked = config(tmp_path, "kivi", model={"architecture": {**copy.deepcopy(ARCHITECTURE), "head_dim": 80}})
    done = answer_run(asked)
    assert done["status"] == "ok"
    assert done["label"] == "kivi int2+value.group_size=16"
    assert done["config"]["formats"]["value"]["group_size"] == 16
    assert done["config"]["formats"]["key"]["group_size"] == 32
    stored = json.loads((Path(done["run_dir"]) / "metrics.json").read_text())
    assert stored["label"] == "kivi int2+value.group_size=16"
    assert answer_run(asked)["run_id"] == done["run_id"]


def test_the_row_of_a_group_that_fits_says_nothing_new(tmp_path: Path) -> None:
    done = answer_run(config(tmp_path, "kivi"))
    assert (done["label"], done["config"]["quantizer"]) == ("kivi int2", "int2")
    assert done["config"]["formats"]["value"]["group_size"] == 32


def test_predictions_take_any_head() -> None:
    for text in ("kivi:int2", "logquant", "cocktail:split=10/30/60"):
        method = parse_setting(text).load()
        method.check(80)
        assert kv_bytes(method, 4096, layers=1, query_heads=2, heads=1, channels=80).scales > 0
