"""Live tensors while a 4k prompt is decoded: full-precision copies only of the window and the current layer."""

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from kvbench.decoding import generate
from kvbench.methods import load_method
from kvbench.profiling.memory import TensorCensus

LAYERS, HEADS, CHANNELS, PROMPT = 6, 2, 32, 4096


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=LAYERS,
        num_attention_heads=2,
        num_key_value_heads=HEADS,
        head_dim=CHANNELS,
        max_position_embeddings=8192,
    )
    return LlamaForCausalLM(config).bfloat16().eval()


@pytest.mark.parametrize(("name", "window"), [("kivi", 128), ("atom", 0)])
def test_no_full_precision_copy_outlives_its_layer(model, name, window):
    method = load_method(name)
    one_side = HEADS * CHANNELS * PROMPT * 2  # bytes of one layer's keys in bf16
    exact = {}

    class Look:
        def phase(self, phase):
            census.phase(phase)
            floats = [t for t in census.live() if t.dtype in (torch.bfloat16, torch.float32) and t.nbytes >= one_side]
            exact[phase] = len(floats)

    ids = torch.randint(3, 64, (1, PROMPT), generator=torch.Generator().manual_seed(0))
    with TensorCensus() as census, torch.no_grad():
        census.phase("forward")
        before = census.current
        model(input_ids=ids, use_cache=False, logits_to_keep=1)
    activations = census.peaks["forward"] - before
    cache = method.new_cache(model, max_length=PROMPT + 4)
    with TensorCensus() as census:
        before = census.current
        generate(model, cache, ids, max_new_tokens=4, observer=Look())
    method.detach(model)
    bill = cache.bill()
    assert bill.used.window <= 2 * LAYERS * HEADS * CHANNELS * window * 2
    # nothing as large as one layer's keys is left in full precision once the prompt is placed, and nothing comes back
    assert exact["decode"] == exact["prefill"]
    assert exact["end"] == exact["prefill"]
    # a decode step holds the packed cache and blocks of it in fp32: far from the 2 * LAYERS sides of an exact cache
    assert census.peaks["decode"] - before < bill.reserved.total + 6 * one_side
    # the prefill is a forward pass without any cache, the packed cache, and one layer on its way into it
    assert census.peaks["prefill"] - before < activations + bill.reserved.total + 2 * one_side
