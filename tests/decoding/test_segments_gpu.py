"""Captured passes over layers on two GPUs: the bundled model, with one GPU's captured tokens and bytes."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import pytest
import torch

from kvbench.cache.progress import Options
from kvbench.decoding.autoregressive import generate
from kvbench.decoding.sampling import Sampling
from kvbench.methods import load_method
from kvbench.parallel.spread import balanced, connect
from tests.decoding.test_graphs_gpu import SETTINGS

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
]

NEW = 160


@pytest.fixture(scope="module")
def models() -> Any:
    """The bundled model in bf16 on one GPU, and on two."""
    from experiments.kernels.greedy import load_on_device

    one = load_on_device("tiny", "cuda:0")[0]
    two = deepcopy(one)
    where = balanced(two, [torch.device("cuda", index) for index in range(2)])
    for part, device in where.items():
        two.get_submodule(part).to(device)
    connect(two, where)
    return one, two


def answer(model: Any, name: str, **more: Any) -> Any:
    method_name, options = SETTINGS[name]
    method = load_method(method_name, **options)
    ids = torch.randint(3, model.config.vocab_size, (2, 500), generator=torch.Generator().manual_seed(5)).to("cuda:0")
    mask = torch.ones_like(ids)
    mask[1, :7] = 0
    cache = method.new_cache(model, max_length=500 + NEW)
    cache.options = Options(kernels="triton" if method_name == "h2o" else "cuda")
    generation = generate(model, cache, ids, mask, max_new_tokens=NEW, graphs="always", **more)
    used = cache.bill().used
    method.detach(model)
    return generation, used


@pytest.mark.parametrize("sampling", [None, Sampling(0.9, 0.95, 11)], ids=["greedy", "sampled"])
@pytest.mark.parametrize(
    "name",
    [
        "fp16",
        "kivi",
        "logquant, W 42",
        "quantspec",
        "quantspec, kivi drafts",
        "quantspec, all int4",
        "streamingllm",
        "h2o",
    ],
)
def test_two_gpus_say_what_one_says(models: Any, name: str, sampling: Any) -> None:
    (one, used), (two, also) = (answer(model, name, sampling=sampling) for model in models)
    assert (one.stepping, two.stepping) == ("graph", "graph in 3 parts")
    assert two.tokens == one.tokens and used == also


def test_compiled_layers_on_two_gpus_say_what_they_say_on_one(models: Any) -> None:
    one, two = (answer(model, "kivi", compile=True)[0] for model in models)
    assert two.stepping == "graph in 3 parts, compiled"
    assert two.tokens == one.tokens
