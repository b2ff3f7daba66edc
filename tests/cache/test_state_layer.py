"""Layers with a state of fixed size in hybrid models: bytes, copies, beams, chunks, and what is refused."""

import pytest
import torch

from kvbench.cache import Prompts
from kvbench.cache.layer import KVLayer
from kvbench.cache.progress import Progress
from kvbench.cache.state_layer import StateLayer, layers_of
from kvbench.calibration.rotate import attended
from kvbench.decoding import recordable, shared_prefill
from kvbench.decoding.autoregressive import answer_nll, generate
from kvbench.decoding.passes import forward, prefill
from kvbench.decoding.perplexity import decode_nll, forward_nll, simulated_nll
from kvbench.decoding.sampling import Sampling
from kvbench.errors import CacheError, ModelError
from kvbench.measure.random_fill import go_on
from kvbench.methods import load_method
from kvbench.models.layers import LayerKind, attending, layer_kinds
from tests import architectures, zoo

LENGTHS = [40, 25]
#: a convolution's state alone; one beside attention in the same layer
MODELS = ["lfm2", "falcon_h1"]


@pytest.fixture(params=MODELS)
def model(request):
    """A hybrid that is detached from kvbench after the test."""
    small_model = architectures.model(request.param)
    yield small_model
    load_method("fp16").detach(small_model)


def filled(model, method=None):
    """A cache that holds two prompts, and the logits after them."""
    ids, mask = zoo.padded_batch(LENGTHS)
    cache = (method or load_method("fp16")).new_cache(model, Prompts.from_batch(ids, mask))
    with torch.inference_mode():
        return cache, prefill(model, cache, ids, mask)


def test_kinds_of_layers_follow_transformers_cache():
    assert layer_kinds(architectures.model("lfm2").config) == [LayerKind(attends=False, states=1), LayerKind()]
    assert layer_kinds(architectures.model("falcon_h1").config) == [LayerKind(states=1)] * 2
    assert [kind.one_by_one for kind in layer_kinds(architectures.model("jamba").config)] == [True, True]
    assert attending(architectures.model("nemotron_h").config) == [1]
    assert [kind.window for kind in layer_kinds(architectures.model("gemma3").config)] == [24, None]


def test_the_state_is_billed_apart_and_counts_on_both_sides_of_the_ratio(model):
    cache, _ = filled(model)
    bill, rows = cache.bill(), [cache.bill(row) for row in (0, 1)]
    state = sum(x.nbytes for layer in cache.state_layers for x in layer.states())
    assert bill.used.state == bill.reserved.state == state > 0
    assert [row.used.state for row in rows] == [state // 2] * 2
    assert bill.ratio == 1.0 and bill.fp16_equivalent == (bill.used.window + state) // 2
    packed, _ = filled(model, load_method("kivi", quantizer="int4", residual=32))
    assert packed.bill().used.state == state
    assert bill.used.window > packed.bill().used.total - state > 0
    assert [layer.index for layer in cache.kv_layers] == list(range(len(cache.kv_layers)))


def test_tokens_cannot_be_removed(model):
    cache, _ = filled(model)
    for attempt in (lambda: cache.crop(-1), lambda: cache.crop(30), lambda: cache.take_back([0, 1])):
        with pytest.raises(CacheError, match=r"state of fixed size.*cannot go back"):
            attempt()
    with pytest.raises(CacheError, match="cannot go back"):
        cache.activate_past_recording()
    with pytest.raises(CacheError, match="cannot go back"):
        cache.lead(filled(model)[0])
    cache.crop(0), cache.crop(99), cache.take_back([0, 0]), cache.lead(None)
    assert cache.get_seq_length() == 40 and not cache.is_croppable
    with pytest.raises(ModelError, match="cannot decode speculatively"):
        load_method("quantspec").new_cache(model)


def test_steps_are_not_captured(model):
    cache, _ = filled(model)
    assert recordable.eager_reason(model, cache, "always", 50, torch.device("cuda")) == recordable.STATES


def test_copies_and_reordered_rows_continue_alike(model):
    cache, _ = filled(model)
    twin, swapped = cache.clone(), cache.clone()
    swapped.reorder_cache(torch.tensor([1, 0, 0]))
    token = torch.tensor([[5], [9]])
    mask = torch.nn.functional.pad(zoo.padded_batch(LENGTHS)[1], (0, 1), value=1)
    positions = torch.tensor([[40], [25]])
    with torch.inference_mode():
        first = forward(model, cache, token, mask, positions)
        again = forward(model, twin, token, mask, positions)
        rows = [1, 0, 0]
        third = forward(model, swapped, token[rows], mask[rows], positions[rows])
    assert torch.equal(first, again)
    torch.testing.assert_close(third, first[rows], rtol=0, atol=1e-5)
    assert cache.bill().used.state == twin.bill().used.state == swapped.bill().used.state * 2 // 3
    repeated = cache.clone()
    repeated.batch_repeat_interleave(2)
    assert all(len(x) == 4 for layer in repeated.state_layers for x in layer.states())


def test_a_reset_cache_reads_the_prompts_anew(model):
    cache, logits = filled(model)
    ids, mask = zoo.padded_batch(LENGTHS)
    cache.reset()
    assert cache.get_seq_length() == 0 and cache.bill().used.total == 0
    with torch.inference_mode():
        assert torch.equal(prefill(model, cache, ids, mask), logits)


def test_a_shared_prefill_copies_the_states(model):
    ids, mask = zoo.padded_batch(LENGTHS)
    prompts = Prompts.from_batch(ids, mask)
    methods = [load_method("fp16"), load_method("kivi", quantizer="int4", residual=32)]
    alone = [generate(model, m.new_cache(model, prompts), ids, mask, max_new_tokens=6).tokens for m in methods]
    caches = [method.new_cache(model, prompts) for method in methods]
    prompt = shared_prefill.read_prompts(model, caches, prompts, ids, mask)
    for cache, tokens in zip(caches, alone, strict=True):
        assert generate(model, cache, ids, mask, max_new_tokens=6, prompt=prompt).tokens == tokens
        prompt.forget(cache)


def test_likelihoods_take_several_tokens_at_once(model):
    method = load_method("fp16")
    ids, _ = zoo.padded_batch([40])
    whole = forward_nll(model, ids, 10)
    torch.testing.assert_close(decode_nll(model, method.new_cache(model), ids, 10, chunk=8), whole, rtol=1e-5, atol=0)
    torch.testing.assert_close(simulated_nll(model, method.new_cache(model), ids, 10), whole, rtol=1e-5, atol=0)
    cache = method.new_cache(model)
    with torch.inference_mode():
        logits = prefill(model, cache, ids[:, :10], None)
    ((nll, count),) = answer_nll(model, cache, logits, [ids[0, 10:].tolist()])
    assert count == 30 and nll == pytest.approx(float(whole), rel=1e-5)
    assert cache.get_seq_length() == 10


def test_a_model_that_restarts_its_state_takes_tokens_one_by_one():
    model, method = architectures.model("jamba"), load_method("fp16")
    ids, mask = zoo.padded_batch(LENGTHS)
    try:
        prompts = Prompts.from_batch(ids, mask)
        with torch.inference_mode():
            chunked = prefill(model, method.new_cache(model, prompts), ids, mask, chunk=16)
            torch.testing.assert_close(chunked, prefill(model, method.new_cache(model, prompts), ids, mask))
            cache = method.new_cache(model)
            model(input_ids=ids[:1], past_key_values=cache)
            with pytest.raises(CacheError, match="16 tokens at once"):
                model(input_ids=ids[:1, :16], past_key_values=cache)
    finally:
        method.detach(model)


def test_keys_before_rope_and_moved_positions():
    model = architectures.model("falcon_h1")
    exact, whole = filled(model)
    try:
        within = load_method("streamingllm", budget=64, position="cache")  # keys are rotated anew, none is dropped
        torch.testing.assert_close(filled(model, within)[1], whole, rtol=0, atol=1e-6)
        cache, _ = filled(model, load_method("atom", rope="pre", prefill="quantized"))
        token, mask = torch.tensor([[5], [9]]), torch.nn.functional.pad(zoo.padded_batch(LENGTHS)[1], (0, 1), value=1)
        with torch.inference_mode():
            step = [forward(model, one, token, mask, torch.tensor([[40], [25]])) for one in (cache, exact)]
        torch.testing.assert_close(*step, rtol=0, atol=0.02)
        assert cache.reads_packed and not torch.equal(*step)
    finally:
        load_method("fp16").detach(model)


def test_calibrations_number_the_attention_layers():
    model = architectures.model("lfm2")
    layers: list[int] = []
    attended(model, zoo.padded_batch([20, 20])[0], lambda layer, *_: layers.append(layer))
    assert layers == [0, 0]


def test_random_fills_leave_the_states_empty(model):
    cache = load_method("kivi", quantizer="int4", residual=32).new_cache(model)
    assert len(go_on(model, cache, 2, 70, max_new_tokens=3, sampling=Sampling()).tokens[0]) == 3
    assert cache.get_seq_length() == 72 and cache.bill().used.codes and cache.bill().used.state


@pytest.mark.parametrize("name", ["jamba", "lfm2"])  # transformers refuses the first itself, without a reason
@pytest.mark.parametrize("kind", ["assistant", "prompt lookup"])
def test_assisted_generation_is_refused_with_the_reason_and_a_remedy(name, kind):
    model, method = architectures.model(name), load_method("fp16")
    ids, mask = zoo.padded_batch([20])
    more = {"assistant_model": architectures.model("llama")} if kind == "assistant" else {"prompt_lookup_num_tokens": 3}
    cache = method.new_cache(model)
    with pytest.raises(CacheError, match=r"state of fixed size (.|\n)*hint: .*(without|prompt lookup)"):
        model.generate(ids, attention_mask=mask, past_key_values=cache, max_new_tokens=8, do_sample=False, **more)
    method.detach(model)
    assert "_validate_generation_mode" not in vars(model), "nothing is left behind"


def test_layers_are_made_as_the_model_has_them():
    """Those with attention are numbered without the others; a state knows its place in the model."""
    kinds = [
        LayerKind(attends=False, states=2, one_by_one=True),
        LayerKind(window=16),
        LayerKind(attends=False),
        LayerKind(window=24, states=3, one_by_one=True),
        LayerKind(states=1),
    ]
    state, plain, nothing, both, last = layers_of(load_method("fp16"), kinds, Progress())
    assert (state.number_of_states, state.place_in_model, state.one_by_one) == (2, 0, True)
    assert (plain.index, plain.window) == (0, 16) and not isinstance(plain, StateLayer)
    assert not isinstance(nothing, (StateLayer, KVLayer))
    assert (both.index, both.window, both.number_of_states, both.place_in_model, both.one_by_one) == (1, 24, 3, 3, True)
    assert (last.index, last.window, last.number_of_states, last.place_in_model, last.one_by_one) == (
        2,
        None,
        1,
        4,
        False,
    )
