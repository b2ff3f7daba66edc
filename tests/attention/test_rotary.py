"""Keys that were rotated already are moved on as the model itself would have rotated them."""

import pytest
import torch
from transformers import CohereConfig, CohereForCausalLM, GPTNeoXConfig, GPTNeoXForCausalLM

from kvbench.attention.rotary import rotary
from kvbench.errors import ModelError
from kvbench.methods import load_method
from tests import zoo

SMALL = {"vocab_size": 50, "hidden_size": 64, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}


def other(name: str):
    """Architectures with other layouts: a part of the channels, interleaved pairs, scaled cosines and sines."""
    torch.manual_seed(0)
    if name == "gpt_neox":
        rope = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.25}
        return GPTNeoXForCausalLM(GPTNeoXConfig(**SMALL, rope_parameters=rope)).eval()
    if name == "cohere":
        return CohereForCausalLM(CohereConfig(**SMALL, num_key_value_heads=1, pad_token_id=0)).eval()
    model_class, config_class = type(zoo.model("llama")), type(zoo.model("llama").config)
    rope = {"rope_type": name, "rope_theta": 1e4, "factor": 4.0}
    if name == "longrope":
        rope |= {"short_factor": [1.0] * 32, "long_factor": [3.0] * 32, "original_max_position_embeddings": 64}
    config = config_class(**{**zoo.ARCHITECTURE, "num_hidden_layers": 1, "rope_parameters": rope})
    return model_class(config).eval()


def keys_at(model, ids: torch.Tensor, first: int) -> torch.Tensor:
    """The model's rotated keys of a text that begins at position `first`."""
    method = load_method("fp16")
    cache = method.new_cache(model)
    with torch.no_grad():
        positions = torch.arange(first, first + ids.shape[1])[None]
        model(input_ids=ids, position_ids=positions, past_key_values=cache, use_cache=True)
    method.detach(model)
    return cache.layers[0].stores()[0].tail.view(slice(None)).clone()


@pytest.mark.parametrize("name", ["llama", "qwen2", "phi3", "gpt_neox", "cohere", "yarn", "longrope"])
def test_a_turned_key_is_the_key_at_that_position(name):
    model = zoo.model(name) if name in zoo.MODELS else other(name)
    ids = torch.randint(3, 50, (1, 9), generator=torch.Generator().manual_seed(0))
    # longrope beyond its original length, so that the long frequencies are in use for both
    near, by = (100, 900) if name == "longrope" else (0, 1000)
    far = keys_at(model, ids, near + by)
    turned = rotary(model).turn(keys_at(model, ids, near), by)
    torch.testing.assert_close(turned, far, rtol=1e-4, atol=2e-4)
    assert not torch.allclose(turned, rotary(model).turn(turned, 1), atol=1e-2)


@pytest.mark.parametrize("name", ["llama", "gpt_neox", "cohere", "yarn", "longrope"])
@torch.no_grad()
def test_rows_turned_by_numbers_of_their_own_are_rows_turned_alone(name):
    """Every bit, as a batch of windows must not depend on who is in it; and other heads beside them change nothing."""
    model = zoo.model(name) if name in zoo.MODELS else other(name)
    size = model.config.hidden_size // model.config.num_attention_heads
    keys = torch.randn(5, 6, 3, size, generator=torch.Generator().manual_seed(2))
    by = [1, 4000, 17, 0, 4000]
    for x in (keys, keys.bfloat16()):
        joint = rotary(model).turn(x, by)
        for row, count in enumerate(by):
            alone = torch.cat([rotary(model).turn(x[row : row + 1, head : head + 2], count) for head in (0, 2, 4)], 1)
            assert torch.equal(joint[row], alone[0])


def test_turning_does_not_touch_the_models_frequencies():
    model = other("longrope")
    keys = keys_at(model, torch.full((1, 4), 7), 100)
    before = rotary(model).module.inv_freq.clone()
    rotary(model).turn(keys, 3)  # a small number, but the text is long
    assert torch.equal(rotary(model).module.inv_freq, before)


def test_models_whose_keys_cannot_be_turned_are_refused():
    with pytest.raises(ModelError, match=r"change with the length.*\n.*method.position=original"):
        rotary(other("dynamic"))
    model = other("yarn")
    model.config.no_rope_layers = [1, 0]
    with pytest.raises(ModelError, match="layers without rotary"):
        rotary(model)
    model.config.no_rope_layers = None
    del model.model.rotary_emb.inv_freq
    with pytest.raises(ModelError, match="has no rotary embedding"):
        load_method("streamingllm").new_cache(model)


def test_one_rounding_is_what_turning_costs():
    """In bf16 a turned key is as near to the exact one as a key that the model rotates itself."""
    model = zoo.model("llama", torch.bfloat16)
    turning = rotary(model)
    plain = torch.randn(1, 2, 512, 64, generator=torch.Generator().manual_seed(0)).bfloat16()
    exact = turning.turn(plain.double().float(), 5000)
    came = turning.turn(plain, 40)  # rotated by the model and stored in bf16
    turned = (turning.turn(came, 4960).float() - exact).pow(2).mean().sqrt()
    own = (turning.turn(plain, 5000).float() - exact).pow(2).mean().sqrt()
    assert turned < 1.6 * own  # two roundings instead of one: sqrt(2)
