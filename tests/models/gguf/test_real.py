"""The packaged model itself against llama.cpp; skipped where ``make fetch-real`` has not fetched it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml

from kvbench.models.gguf.place import finished
from kvbench.models.spec import ModelConfig
from kvbench.util.confdir import group_options
from kvbench.util.schema import build
from tests.data_support import GOLDEN, golden
from tests.models.gguf.lines import digest, lines


def folder() -> Path:
    """The converted checkpoint; skips the test where it is not there."""
    content = yaml.safe_load(group_options("model")["smollm2-135m-q4_1"].read_text(encoding="utf-8"))
    model = build(ModelConfig, content, "model")
    assert model.package is not None and model.package.sha256 == golden("gguf_tokens.json")["model"]
    there = finished(model.package.sha256)
    if there is None:
        pytest.skip("the trained model: run make fetch-real")
    return there


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder())


@pytest.mark.parametrize("kind", ["generated", "wikitext2", "python"])
def test_tokens_are_llama_cpps(tokenizer: Any, kind: str) -> None:
    texts, wanted = lines(kind), golden("gguf_tokens.json")["lines"][kind]
    assert len(wanted) == 8 * len(texts) == 8000
    found = [digest(tokenizer(text, add_special_tokens=False).input_ids)[:8] for text in texts]
    assert [text for place, text in enumerate(texts) if found[place] != wanted[8 * place : 8 * place + 8]] == []


@pytest.mark.slow
def test_logits_are_llama_cpps() -> None:
    """Those of an F32 file of the same tensors, with a cache in float32."""
    from transformers import AutoModelForCausalLM

    stored = np.load(GOLDEN / "gguf_logits.npz")
    model = AutoModelForCausalLM.from_pretrained(folder(), dtype=torch.float32).eval()
    with torch.inference_mode():
        logits = model(torch.from_numpy(stored["ids"])[None].long()).logits[0].numpy()
    found = logits[stored["positions"]][:, stored["tokens"]]
    assert np.abs(found - stored["logits"]).max() < 1e-4


@pytest.mark.slow
def test_weights_are_the_packages_own_dequantization() -> None:
    from safetensors import safe_open

    from tests.models.gguf.files import gguf
    from tests.models.gguf.test_convert import halves_apart

    file = folder().parent / "SmolLM2-135M-Instruct.Q4_1.gguf"
    if not file.is_file():
        pytest.skip("the GGUF file itself: run make fetch-real")
    tensors = {tensor.name: tensor for tensor in gguf.GGUFReader(file).tensors}
    with safe_open(folder() / "model.safetensors", framework="np") as opened:
        for layer in (0, 13, 29):
            for part, heads in (("q", 9), ("k", 3), ("v", 0)):
                name = f"model.layers.{layer}.self_attn.{part}_proj.weight"
                tensor = tensors[f"blk.{layer}.attn_{part}.weight"]
                values = gguf.dequantize(tensor.data, tensor.tensor_type)
                values = halves_apart(values, heads) if heads else values
                assert np.array_equal(opened.get_tensor(name), values), name
