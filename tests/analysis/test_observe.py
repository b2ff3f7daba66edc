"""An observed model: exact attention as stock transformers has it, and caches as a run of the method fills them."""

import math
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from kvbench.analysis.analyse import Text, analyse, observed
from kvbench.analysis.bins import Bins
from kvbench.analysis.blocks import ROW
from kvbench.analysis.observe import Observation, Options
from kvbench.decoding.passes import forward, prefill
from kvbench.errors import CacheError, ConfigError, NonFiniteError
from kvbench.methods import load_method
from kvbench.models.arithmetic import Dtypes
from kvbench.models.load import LoadedModel, shape_of
from tests import zoo
from tests.analysis import full_matrix

BINS = Bins(sinks=2, doublings=8)
OPTIONS = Options(steps=3, bins=BINS, positions=True, prompt_queries=None, block=37, queries=11)
#: one of each kind: several formats, evictions, own attention, packed before it is read, keys before RoPE, moved sinks
METHODS = {
    "kivi": ("kivi", {"quantizer": "int2", "residual": 32}),
    "logquant": ("logquant", {"quantizer": "int2", "window": 16}),
    "atom": ("atom", {"quantizer": "int4_token", "prefill": "quantized"}),
    "kvquant": ("kvquant", {"outliers": 0.05}),  # and a calibration
    "h2o": ("h2o", {"budget": 40}),
    "snapkv": ("snapkv", {"budget": 40, "window": 8}),
    "streamingllm": ("streamingllm", {"budget": 40}),
}


def loaded_of(name="llama", model=None):
    model = zoo.model(name) if model is None else model
    return LoadedModel(
        model=model,
        tokenizer=None,
        name=name,
        dtypes=Dtypes(model.dtype, model.dtype, model.dtype),
        device=torch.device("cpu"),
        max_length=4096,
        architecture=shape_of(model.config),
        eos_token_ids=(),
        parameters=0,
        random_weights=True,
    )


def text_of(tokens, seed=0):
    ids, _ = zoo.padded_batch([tokens], seed)
    return Text(f"text {seed}", tuple(ids[0].tolist()))


def made(name):
    base, settings = METHODS[name]
    more = {"calibration": zoo.calibrations("llama")} if base == "kvquant" else {}
    method = load_method(base, **settings, **more)
    return method


def stock_attention(model, ids, steps):
    """Attention matrices of stock transformers, a list of ``[Hq, T, T]``, over a greedy continuation, and all ids."""
    usual = model.config._attn_implementation
    model.set_attn_implementation("eager")
    try:
        with torch.inference_mode():
            for _ in range(steps):
                ids = torch.cat([ids, model(ids, use_cache=False).logits[:, -1:].argmax(-1)], 1)
            return [x[0] for x in model(ids, use_cache=False, output_attentions=True).attentions], ids
    finally:  # models are shared with the tests of other files
        model.set_attn_implementation(usual)


@pytest.mark.parametrize("name", ["llama", "mistral", "gemma2", "gpt_oss"])
def test_exact_attention_is_that_of_stock_transformers(name):
    text, tokens = text_of(70), 70
    observation, _ = observed(loaded_of(name), text, {}, OPTIONS)
    matrices, _ = stock_attention(zoo.model(name), torch.tensor([text.ids]), OPTIONS.steps)
    columns = torch.arange(tokens + OPTIONS.steps)
    for layer, p in enumerate(matrices):
        expected = full_matrix.by_bin(p.double(), columns, BINS)
        for step in range(OPTIONS.steps):
            ours = observation.steps[step][layer].mass[:, 0].double()
            assert torch.allclose(ours, expected[:, tokens + step], atol=1e-5)
        sums, _, count = observation.prompt[layer]
        assert count == tokens
        assert torch.allclose(sums[0].double(), expected[:, :tokens].sum(1), atol=1e-4)
    for step in range(OPTIONS.steps):
        rows = torch.stack([p[:, tokens + step, : tokens + step + 1] for p in matrices])
        assert torch.allclose(observation.highest[step], rows.amax((0, 1)), atol=1e-5)
        assert torch.allclose(observation.mean[step], rows.mean((0, 1)), atol=1e-5)


@pytest.mark.parametrize("name", METHODS)
def test_a_candidate_is_filled_as_in_a_run_of_its_method(name):
    """Layer 0 has the same queries, keys and values in both, so its stores must hold the same, slot by slot."""
    loaded, text, steps = loaded_of(), text_of(90), 9
    kept = []

    class Watched(Observation):
        def __init__(self, candidates, options):
            super().__init__(candidates, options)
            kept.append(self)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("kvbench.analysis.analyse.Observation", Watched)
        observed(loaded, text, {name: made(name)}, Options(steps=steps, bins=BINS))
    candidate = kept[0].candidates[name].layers[0]
    _, ids = stock_attention(loaded.model, torch.tensor([text.ids]), steps)
    method = made(name)
    if name == "atom":  # the analysed prompt is read exactly; layer 0's keys and values are the same
        assert method.quantized_prefill
    cache = method.new_cache(loaded.model, max_length=ids.shape[1])
    with torch.inference_mode():
        prefill(loaded.model, cache, ids[:, : len(text.ids)], None)
        for column in range(len(text.ids), ids.shape[1]):
            forward(loaded.model, cache, ids[:, column : column + 1], None, torch.tensor([[column]]))
    cache.settle()
    method.detach(loaded.model)
    layer = cache.layers[0]
    for ours, theirs in zip(candidate.stores(), layer.stores(), strict=True):
        assert [len(s.lengths) and s.lengths[0] for s in ours.segments] == [s.lengths[0] for s in theirs.segments]
        for mine, other in zip(ours.segments, theirs.segments, strict=True):
            a, b = (s.read(ROW, 0, s.lengths[0], torch.float32) for s in (mine, other))
            assert torch.allclose(a, b, atol=1e-5)
    own, others = (x.method.columns(x, 0) for x in (candidate, layer))
    assert (own is None and others is None) or torch.equal(own, others)


def test_methods_are_told_apart_and_ordered():
    settings = {
        "fp16": load_method("fp16"),
        "int8": load_method("kivi", quantizer="int8", residual=32),
        "int4": load_method("kivi", quantizer="int4", residual=32),
        "int2": load_method("kivi", quantizer="int2", residual=32),
        "dropped": load_method("kivi", quantizer="int2", residual=32, evict=True),
    }
    outcome = analyse(loaded_of(), [text_of(150), text_of(170, 1)], settings, Options(steps=2, bins=BINS))
    for figure in ("l1", "kl", "output_error"):
        means = [outcome.figures(name, figure).mean() for name in settings]
        assert means[0] < 1e-5 and all(a * 1.5 < b for a, b in pairwise(means)), means
    assert outcome.figures("dropped", "lost").min() > 0.1 > 1e-6 > outcome.figures("int2", "lost").max()
    assert np.allclose(outcome.figures("dropped", "l1_share"), outcome.figures("dropped", "lost"), atol=1e-5)
    assert outcome.figures("fp16", "kv_bytes").tolist() == (2 * outcome.figures("fp16", "fp16_bytes")).tolist()  # fp32
    assert outcome.errors["int2"]["l1"].shape == (2, 2, 4, BINS.count)
    l1 = outcome.errors["int2"]["l1"].sum((1, 2, 3))
    assert np.allclose(l1, outcome.figures("int2", "l1"))


def test_blocks_change_nothing():
    settings, loaded = {name: made(name) for name in ("kivi", "logquant")}, loaded_of()
    whole, small = (
        analyse(loaded, [text_of(120)], settings, Options(steps=2, bins=BINS, prompt_queries=20, block=b, queries=q))
        for b, q in ((10_000, 10_000), (19, 3))
    )
    for part, array in whole.exact.items():
        assert np.allclose(array, small.exact[part], atol=1e-5), part
    for name, parts in whole.errors.items():
        for part, array in parts.items():
            assert np.allclose(array, small.errors[name][part], atol=1e-5), (name, part)


def test_an_outcome_goes_on_where_it_ended():
    settings, loaded, options = {"kivi": made("kivi")}, loaded_of(), Options(steps=1, bins=BINS)
    texts = [text_of(60, seed) for seed in range(3)]
    whole = analyse(loaded, texts, settings, options)
    half, reported = analyse(loaded, texts[:2], settings, options), []
    assert analyse(loaded, texts, settings, options, reported.append, half) is half
    assert reported == ["text 2"] and half.rows == whole.rows
    assert np.array_equal(half.errors["kivi"]["l1"], whole.errors["kivi"]["l1"])


class Largest(TorchDispatchMode):
    """The number of elements of the largest tensor that any operation returns."""

    elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for x in tree_iter(out):
            if isinstance(x, torch.Tensor):
                self.elements = max(self.elements, x.numel())
        return out


def test_an_answer_ends_at_the_first_end_token_after_the_first_step():
    loaded, text = loaded_of(), text_of(40)
    _, ids = stock_attention(loaded.model, torch.tensor([text.ids]), 5)
    answer = ids[0, 40:].tolist()
    for ends in (answer[1], answer[0]):
        wanted = next((i for i in range(1, 5) if answer[i] == ends), 5)
        observation, _ = observed(replace(loaded, eos_token_ids=(ends,)), text, {}, Options(steps=5, bins=BINS))
        assert len(observation.steps) == wanted


def test_what_a_method_packs_at_once_is_packed_when_it_is_compared():
    """So no token is in full precision, not even the newest; with other methods the newest one is."""
    settings = {name: made(name) for name in ("atom", "logquant")}
    observation, _ = observed(loaded_of(), text_of(40), settings, Options(steps=2, bins=BINS))
    exact = {name: [float(e.full.sum()) for of_step in of for e in of_step] for name, of in observation.errors.items()}
    assert set(exact["atom"]) == {0.0} and min(exact["logquant"]) > 0


def test_defaults_of_an_analysis():
    assert Options() == Options(
        steps=16, prompt_queries=0, positions=False, spike=10.0, bins=Bins(2, 17), block=1024, queries=64
    )
    observation, bills = observed(loaded_of(), text_of(30), {"kivi": made("kivi")}, Options(steps=1, bins=BINS))
    assert not observation.prompt and not observation.highest and not observation.mean
    config = zoo.model("llama").config
    fp16 = 31 * 2 * 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim
    assert {name: bill[1] for name, bill in bills.items()} == {"kivi": fp16}


def test_the_last_queries_of_a_prompt_are_summed():
    text = text_of(50)
    some, _ = observed(loaded_of(), text, {}, Options(steps=1, bins=BINS, prompt_queries=7, queries=3))
    every, _ = observed(loaded_of(), text, {}, Options(steps=1, bins=BINS, prompt_queries=None))
    more, _ = observed(loaded_of(), text, {}, Options(steps=1, bins=BINS, prompt_queries=51))
    assert [count for _, _, count in some.prompt] == [7, 7]
    assert torch.allclose(some.prompt[0][0][0].sum(-1), torch.tensor(7.0), atol=1e-4)
    assert some.prompt[0][1].sum() == sum(range(44, 51))  # tokens that the last seven queries see
    assert every.prompt[0][1].sum() == more.prompt[0][1].sum() == sum(range(1, 51))


def test_heads_in_several_processes_are_refused():
    with pytest.raises(ConfigError, match=r"runtime\.tensor_parallel=auto: splits the heads over processes"):
        analyse(replace(loaded_of(), layout="tensor_parallel"), [text_of(20)], {})


def test_no_tensor_grows_with_queries_times_keys():
    """With all queries of the prompt: at most keys, and blocks; 500 x 500 in each head would be four times as large."""
    block, queries, tokens = 32, 8, 500
    options = Options(steps=1, bins=BINS, prompt_queries=None, block=block, queries=queries, positions=True)
    loaded, config = loaded_of(), zoo.model("llama").config
    with Largest() as largest:
        observed(loaded, text_of(tokens), {name: made(name) for name in ("kivi", "logquant")}, options)
    room = 1.6 * (tokens + 1)  # buffers grow by half
    activations = room * max(config.hidden_size, 2 * config.intermediate_size, config.num_key_value_heads * 64)
    tiles = 4 * max(queries * block, BINS.count * block, BINS.count * 64 * queries)
    limit = max(activations, tiles)
    assert largest.elements <= limit < tokens * tokens * 4 / 4


def test_refusals_name_what_they_need():
    loaded = loaded_of()
    with pytest.raises(ConfigError, match="at least one prompt to analyse"):
        analyse(loaded, [], {})
    method = load_method("fp16")
    ids, mask = zoo.padded_batch([20, 12])
    for rows, reason in (
        (slice(0, 2), "the batch has 2 rows"),
        (slice(1, 2), "without padding, but the prompt begins"),
    ):
        exact = method.new_cache(loaded.model)
        Observation({}, Options()).attach(loaded.model)
        with pytest.raises(CacheError, match=reason), torch.inference_mode():
            prefill(loaded.model, exact, ids[rows], mask[rows])
        method.detach(loaded.model)
    exact = method.new_cache(loaded.model)
    Observation({}, Options()).attach(loaded.model)
    with torch.inference_mode():
        prefill(loaded.model, exact, ids[:1], None)
        with pytest.raises(CacheError, match="token by token, but a step after the prompt has 2 tokens"):
            forward(loaded.model, exact, ids[:1, :2], None, torch.tensor([[20, 21]]))
    method.detach(loaded.model)


def test_nan_is_refused_with_its_layer():
    _, model_class, _ = zoo.MODELS["llama"]
    model = model_class(zoo.model("llama").config).eval()
    with torch.no_grad():
        model.model.layers[1].self_attn.v_proj.weight[0, 0] = math.nan
    loaded = loaded_of(model=model)
    with pytest.raises(NonFiniteError):
        analyse(loaded, [text_of(40)], {"fp16": load_method("fp16")}, Options(steps=1, bins=BINS))
    assert model.config._attn_implementation != "kvbench_analysis"


def test_the_model_is_as_before_afterwards():
    loaded = loaded_of()
    loaded.model.set_attn_implementation("sdpa")
    analyse(loaded, [text_of(30)], {"kivi": made("kivi")}, Options(steps=1, bins=BINS))
    assert loaded.model.config._attn_implementation == "sdpa"
