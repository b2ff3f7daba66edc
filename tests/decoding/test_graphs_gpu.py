"""Captured steps on a GPU: the bundled model, captured against eager with the same kernel, token for token."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kvbench.cache.progress import Options
from kvbench.decoding.autoregressive import generate
from kvbench.decoding.sampling import Sampling
from kvbench.methods import load_method
from tests.decoding.test_graphs_sliding import model_of as sliding

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

NEW = 160
TILES_OF_64 = {
    "key": {"bits": 4, "group_size": 64, "axis": "channel"},
    "value": {"bits": 4, "group_size": "head_dim", "axis": "token"},
}
SETTINGS: dict[str, tuple[str, dict[str, Any]]] = {
    "fp16": ("fp16", {}),
    "kivi": ("kivi", {"quantizer": "int4"}),
    "kivi with sinks": ("kivi", {"quantizer": "int2", "residual": 32, "sinks": 2}),
    "logquant": ("logquant", {"window": 64}),
    "logquant, W 42": ("logquant", {"window": 42}),
    "partial_logquant": ("partial_logquant", {"window": 64}),
    "atom": ("atom", {}),
    "kvarn": ("kvarn", {"sinks": 64}),
    "kvarn, tiles of 64": ("kvarn", {"window": 40, "quantizer": TILES_OF_64}),
    "engine": ("engine", {}),
    "engine, q4_0": ("engine", {"format": "q8_0/q4_0"}),
    "engine, iq4_nl": ("engine", {"format": "iq4_nl"}),
    "engine, octave": ("engine", {"format": "octave_k3v4"}),
    "engine, own token exact": ("engine", {"format": "nvfp4", "own": "exact"}),
    "quantspec, no draft": ("quantspec", {"gamma": 0}),
    "quantspec": ("quantspec", {"gamma": 3}),
    "quantspec, one draft": ("quantspec", {"gamma": 1}),
    "quantspec, kivi drafts": ("quantspec", {"gamma": 3, "draft": "kivi", "draft_options": {"quantizer": "int2"}}),
    "quantspec, int4 weights": ("quantspec", {"gamma": 3, "draft_weights": "int4"}),
    "quantspec, all int4": ("quantspec", {"gamma": 4, "draft_weights": "int4_all"}),
    "quantspec, streamingllm drafts": ("quantspec", {"gamma": 3, "draft": "streamingllm", "target": "fp16"}),
    "quantspec, snapkv drafts": ("quantspec", {"gamma": 3, "draft": "snapkv", "draft_weights": "int4"}),
    "streamingllm": ("streamingllm", {"budget": 128}),
    "snapkv": ("snapkv", {"budget": 128}),
    "h2o": ("h2o", {}),
    "h2o, largest of a group": ("h2o", {"budget": 128, "group": "max", "per_query": True}),
}


@pytest.fixture(scope="module")
def tiny() -> Any:
    """The bundled model in bf16."""
    from experiments.kernels.greedy import load_on_device

    return load_on_device("tiny", "cuda")[0]


def served(cache: Any, kernels: Any = "cuda") -> Any:
    """`cache`, whose eager and captured steps both take one kernel, also where nothing is packed."""
    cache.options = Options(kernels=kernels)
    return cache


def answer(model: Any, name: str, batch: int, graphs: str, compile: bool = False, **more: Any) -> Any:
    method_name, options = SETTINGS[name]
    method = load_method(method_name, **options)
    generator = torch.Generator().manual_seed(5)
    ids = torch.randint(3, model.config.vocab_size, (batch, 500), generator=generator).cuda()
    mask = torch.ones_like(ids)
    for row in range(batch):
        mask[row, : 7 * row] = 0
    cache = method.new_cache(model, max_length=500 + NEW)
    served(cache, "triton" if method_name == "h2o" else "cuda")  # no CUDA kernel returns its attention
    generation = generate(
        model,
        cache,
        ids,
        mask,
        max_new_tokens=NEW,
        graphs=graphs,
        compile=compile,
        **more,  # type: ignore[arg-type]
    )
    bill = cache.bill().as_dict()
    method.detach(model)
    return generation, bill


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("name", SETTINGS)
def test_captured_steps_say_what_eager_ones_say(tiny: Any, name: str, batch: int) -> None:
    """Tokens and bytes; and the row says that it was a graph."""
    captured, bill = answer(tiny, name, batch, "always")
    eager, wanted = answer(tiny, name, batch, "never")
    assert captured.stepping == "graph" and captured.capture_s > 0
    assert eager.stepping.startswith("eager (runtime.graphs=never)")
    assert captured.tokens == eager.tokens
    assert bill == wanted


@pytest.mark.parametrize("name", ["fp16", "kivi", "quantspec, no draft"])
@pytest.mark.parametrize(("model_name", "window"), [("mistral", 75), ("mistral", 300), ("qwen2", 300), ("gemma2", 200)])
def test_sliding_windows_say_what_eager_steps_say(model_name: str, window: int, name: str) -> None:
    """Windows that show exact tokens only, and windows that cut packed groups; layers of both kinds."""
    model = sliding(model_name, window).to(torch.bfloat16).cuda()
    captured, bill = answer(model, name, 2, "always")
    eager, wanted = answer(model, name, 2, "never")
    assert captured.stepping == "graph"
    assert captured.tokens == eager.tokens and bill == wanted


def test_sampled_tokens_are_the_same(tiny: Any) -> None:
    """The device draws what an eager step would have drawn."""
    sampling = Sampling(0.9, 0.95, 11)
    captured = answer(tiny, "kivi", 2, "always", sampling=sampling)[0]
    assert captured.tokens == answer(tiny, "kivi", 2, "never", sampling=sampling)[0].tokens


def test_short_answers_and_buffers_that_grow(tiny: Any) -> None:
    """Two sampled tokens; no ``max_length``, so that fp16's buffers move under the graph."""
    method, ids = load_method("fp16"), torch.randint(3, 200, (2, 300)).cuda()
    for new, sampling in ((2, Sampling(0.9, seed=3)), (200, None)):
        computed = [
            generate(tiny, served(method.new_cache(tiny)), ids, max_new_tokens=new, sampling=sampling, graphs=graphs)
            for graphs in ("always", "never")
        ]
        assert computed[0].stepping == "graph"
        assert computed[0].tokens == computed[1].tokens
    method.detach(tiny)


def test_sampled_rounds_are_the_same(tiny: Any) -> None:
    """Drafts, acceptance and the token after them draw the eager rounds' numbers on the device."""
    sampling = Sampling(0.9, 0.95, 11)
    for name in ("quantspec", "quantspec, kivi drafts"):
        captured = answer(tiny, name, 2, "always", sampling=sampling)[0]
        eager = answer(tiny, name, 2, "never", sampling=sampling)[0]
        assert captured.tokens == eager.tokens
        assert [r.accepted for r in captured.rounds] == [r.accepted for r in eager.rounds]


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("name", ["fp16", "quantspec", "quantspec, all int4"])
def test_compiled_layers_agree_but_for_near_ties(tiny: Any, name: str, batch: int) -> None:
    """Most of the tokens up to the first near tie; the first dozens at the least."""
    compiled = answer(tiny, name, batch, "always", compile=True)[0]
    eager = answer(tiny, name, batch, "never")[0]
    assert compiled.stepping == "graph, compiled"
    agreed = [
        next((i for i, (a, b) in enumerate(zip(x, y, strict=True)) if a != b), NEW)
        for x, y in zip(compiled.tokens, eager.tokens, strict=True)
    ]
    assert max(agreed) >= 16


def test_times_of_a_round_s_parts_are_the_device_s(tiny: Any) -> None:
    """Each round drafts and verifies; a flush takes time in the rounds before which tokens are packed."""
    generation = answer(tiny, "quantspec", 1, "always")[0]
    later = generation.rounds[1:]
    for each in later:
        assert each.draft_seconds > 0 and each.verify_seconds > 0
    flushed = [each.flush_seconds > 0 for each in later]
    assert any(flushed) and not all(flushed)


def test_gamma_is_chosen_while_decoding(tiny: Any) -> None:
    """A graph per gamma in use, captured when it is first needed."""
    method = load_method("quantspec", gamma="auto")
    ids = torch.randint(3, 200, (1, 300), generator=torch.Generator().manual_seed(3)).cuda()
    cache = served(method.new_cache(tiny, max_length=300 + NEW))
    generation = generate(tiny, cache, ids, max_new_tokens=NEW, graphs="always")
    method.detach(tiny)
    assert generation.stepping == "graph" and len(generation.tokens[0]) == NEW
    assert {each.drafted[0] for each in generation.rounds} <= set(range(9))


def test_what_cannot_be_captured_says_why(tiny: Any) -> None:
    """No kernel packs the tokens of a step before they attend."""
    method = load_method("atom", prefill="quantized")
    ids = torch.randint(3, 200, (1, 300)).cuda()
    generation = generate(tiny, served(method.new_cache(tiny)), ids, max_new_tokens=80, graphs="always")
    assert generation.stepping.startswith(
        "eager (the tokens of a step are packed before they attend, and no kernel packs"
    )
