"""hf_quantized is transformers' QuantizedCache: same states, same tokens."""

import importlib.util
import shutil

import pytest
import torch
from transformers import QuantizedCache

from kvbench.errors import CacheError, ConfigError
from kvbench.methods import load_method
from kvbench.methods.bytes import kv_bytes
from tests import zoo

NEEDS = {
    "quanto": importlib.util.find_spec("optimum") is not None and shutil.which("c++") and shutil.which("ninja"),
    "hqq": importlib.util.find_spec("hqq") is not None,
}
SETTINGS = [("quanto", 2, 0), ("quanto", 4, 0), ("hqq", 4, 1), ("hqq", 3, 0), ("hqq", 2, 0)]


@pytest.mark.parametrize(("backend", "bits", "axis"), SETTINGS)
@pytest.mark.parametrize("residual", [8, 128])
def test_logits_equal_transformers_own_cache(backend, bits, axis, residual):
    if not NEEDS[backend]:
        pytest.skip(f"{backend} is not installed (kvbench[hf]) or has no compiler")
    model = zoo.model("llama")
    method = load_method(
        "hf_quantized", backend=backend, bits=bits, residual=residual, axis_key=axis, axis_value=axis, group_size=64
    )
    method.detach(model)
    ids, _ = zoo.padded_batch([64])
    theirs = QuantizedCache(
        backend,
        model.config,
        nbits=bits,
        axis_key=axis,
        axis_value=axis,
        q_group_size=64,
        residual_length=residual,
    )

    def run(cache):
        with torch.no_grad():
            outs = [model(input_ids=ids, past_key_values=cache, use_cache=True).logits[:, -1]]
            for token in range(5, 5 + (20 if residual == 8 else 6)):  # two windows fill up, or none
                outs.append(
                    model(input_ids=torch.tensor([[token]]), past_key_values=cache, use_cache=True).logits[:, -1]
                )
        return torch.stack(outs)

    expected = run(theirs)
    got = run(method.new_cache(model))
    method.detach(model)
    # a number on the edge between two codes may fall either way (1e-3); a window that is off by one token gives 9e-3
    torch.testing.assert_close(got, expected, rtol=2e-3, atol=2e-3)


def test_the_whole_prompt_is_quantized_but_for_the_sinks():
    if not NEEDS["hqq"]:
        pytest.skip("hqq is not installed (kvbench[hf])")
    model = zoo.model("llama")
    settings = {"backend": "hqq", "bits": 4, "axis_key": 1, "axis_value": 1}
    ids, _ = zoo.padded_batch([100])
    for sinks in (0, 2):
        method = load_method("hf_quantized", sinks=sinks, **settings)
        cache = method.new_cache(model)
        with torch.no_grad():
            model(input_ids=ids, past_key_values=cache, use_cache=True)
        used = cache.bill().used
        method.detach(model)
        assert used.window == 2 * 2 * sinks * 2 * 64 * 4  # layers, sides, tokens, heads, channels, fp32
        assert used.codes >= 2 * 2 * (100 - sinks) * 2 * 64 // 2
        assert used.scales > 0


@pytest.mark.parametrize("count", [1, 2, 3, 77])
def test_any_number_of_tokens_can_be_held(count):
    """hqq itself fails on numbers that its packing does not divide."""
    if not NEEDS["hqq"]:
        pytest.skip("hqq is not installed (kvbench[hf])")
    method = load_method("hf_quantized", backend="hqq", bits=2, axis_key=1, axis_value=1, residual=3)
    keys, values = zoo.random_kv(count + 7, channels=64)
    layer = zoo.new_layer(method)
    zoo.feed(layer, keys[:, :, :count], values[:, :, :count])
    for n in range(count, count + 7):
        zoo.feed(layer, keys[:, :, n : n + 1], values[:, :, n : n + 1])
    layer.settle()
    row, store = slice(0, 1), layer.stores()[0]
    assert store.length(row) == count + 7
    stored = torch.cat([s.read(row, 0, s.length(row), torch.float32) for s in store.segments], 2)
    assert float((stored - keys).abs().mean()) < 1.0


def test_a_number_of_tokens_that_quanto_cannot_group_is_said():
    if not NEEDS["quanto"]:
        pytest.skip("quanto is not installed (kvbench[hf]) or has no compiler")
    layer = zoo.new_layer(load_method("hf_quantized", axis_key=-1, axis_value=-1))
    keys, values = zoo.random_kv(100, channels=64)
    with pytest.raises(CacheError, match=r"(?s)100 tokens of 2 heads along axis -1.*method.axis_key=0"):
        zoo.feed(layer, keys, values)


def test_groups_of_more_than_a_head_are_refused():
    for backend, axis in (("hqq", 1), ("hqq", 0), ("quanto", 0)):
        method = load_method("hf_quantized", backend=backend, axis_key=axis, axis_value=axis, group_size=48)
        with pytest.raises(ConfigError, match=r"method\.group_size=48"):
            method.check(head_dim=64)
        with pytest.raises(ConfigError, match=r"hint: set method\.group_size=16"):
            method.check(head_dim=80)
    # quanto's other axis has its groups along the tokens
    load_method("hf_quantized", axis_key=-1, axis_value=-1, group_size=48).check(head_dim=64)
    for sides in ({"axis_key": -1}, {"axis_value": -1}):
        with pytest.raises(ConfigError, match=r"does not divide the model's head_dim 64"):
            load_method("hf_quantized", group_size=48, **sides).check(head_dim=64)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"bits": 3}, "quanto does not support this number of bits"),
        ({"axis_key": 1}, "quanto does not support this axis"),
        ({"backend": "fp4"}, "method.backend"),
        ({"residual": 0}, "method.residual"),
        ({"residual": 64, "recent": 64}, "method.recent"),
        ({"value_residual": 0}, "method.value_residual"),
        ({"backend": "hqq", "bits": 3, "axis_key": 1}, "cannot unpack 3-bit"),
        ({"backend": "hqq", "bits": 3, "axis_value": 1}, "method.axis_value=1: hqq 0.2 cannot unpack 3-bit"),
        ({"recent": -1}, "method.recent=-1"),
        ({"sinks": -1}, "method.sinks=-1: must not be negative"),
        ({"group_size": 0}, "method.group_size=0: must be positive"),
    ],
)
def test_wrong_settings_are_refused(overrides, message):
    with pytest.raises(ConfigError, match=message):
        load_method("hf_quantized", **overrides)


def windows_of_the_authors(x, prompt, sinks, window, partial, quantize):
    """StreamingQuant and PartialStreaming on a whole tensor: what tokens read as after every step.

    The prompt is quantized from the sinks to the newest `window` (`partial`: to its end); whenever ``2 * window``
    (`partial`: `window`) exact tokens have gathered, all but the newest `window` (`partial`: all) are quantized
    together with everything before them, from what that reads as by then.
    """
    keep, full = (0, window) if partial else (window, 2 * window)
    seen = x[:, :, :prompt].clone()
    border = max(sinks, prompt - keep)
    seen[:, :, sinks:border] = quantize(seen[:, :, sinks:border])
    states = [seen]
    for n in range(prompt + 1, x.shape[2] + 1):
        seen = torch.cat([seen, x[:, :, n - 1 : n]], 2)
        if n - border >= full:
            border = n - keep
            seen[:, :, sinks:border] = quantize(seen[:, :, sinks:border])
        states.append(seen.clone())
    return states


@pytest.mark.parametrize("backend", ["quanto", "hqq"])
@pytest.mark.parametrize("partial", [False, True])
def test_streaming_windows_are_those_of_the_authors_files(backend, partial):
    if not NEEDS[backend]:
        pytest.skip(f"{backend} is not installed (kvbench[hf]) or has no compiler")
    window, sinks, prompt, count = 5, 4, 32, 64
    settings = {"value_residual": window} if partial else {}
    method = load_method(
        "hf_quantized", backend=backend, bits=4, sinks=sinks, recent=window, residual=2 * window, **settings
    )
    keys, values = zoo.random_kv(count, channels=64)
    layer = zoo.new_layer(method)
    zoo.feed(layer, keys[:, :, :prompt], values[:, :, :prompt])

    def quantize(x):
        library = layer.stores()[0].segments[1].backend
        return library._dequantize(library._quantize(x.contiguous(), axis=0))

    expected = (
        windows_of_the_authors(keys, prompt, sinks, window, False, quantize),
        windows_of_the_authors(values, prompt, sinks, window, partial, quantize),
    )
    row = slice(0, 1)
    for n in range(prompt, count + 1):
        if n > prompt:
            zoo.feed(layer, keys[:, :, n - 1 : n], values[:, :, n - 1 : n])
            layer.settle()
        for store, states in zip(layer.stores(), expected, strict=True):
            read = torch.cat([s.read(row, 0, s.length(row), torch.float32) for s in store.segments], 2)
            torch.testing.assert_close(read, states[n - prompt], rtol=1e-4, atol=1e-4)
        exact = [store.tail.length(row) for store in layer.stores()]
        assert window <= exact[0] < 2 * window
        assert exact[1] < window if partial else exact[1] == exact[0]
    assert layer.stores()[0].segments[0].length(row) == sinks


def test_fp8_equals_transformers_own_cache_and_its_bytes():
    """Logits of a prompt, of steps of one and of several tokens; codes of a byte and one scale per layer and side."""
    model, method = zoo.model("llama"), load_method("hf_quantized", backend="fp8")
    method.detach(model)
    ids, _ = zoo.padded_batch([60])

    def run(cache):
        with torch.no_grad():
            outs = [model(input_ids=ids[:, :40], past_key_values=cache, use_cache=True).logits[:, -1:]]
            for first, last in ((40, 41), (41, 42), (42, 50), (50, 51)):
                outs.append(model(input_ids=ids[:, first:last], past_key_values=cache, use_cache=True).logits)
        return torch.cat(outs, 1)

    expected = run(QuantizedCache("fp8", model.config))
    cache = method.new_cache(model)
    torch.testing.assert_close(run(cache), expected, rtol=1e-5, atol=1e-5)
    used = cache.bill().used
    assert (used.codes, used.scales, used.window) == (2 * 2 * 2 * 51 * 64, 2 * 2 * 4, 0)
    shape = {"layers": 2, "query_heads": 4, "heads": 2, "channels": 64, "width": 4}
    predicted = kv_bytes(method, 51, prompt=40, **shape)
    assert (predicted.codes, predicted.scales, predicted.window) == (used.codes, used.scales, 0)
    method.detach(model)


def test_fp8_gives_tokens_back_and_rows_do_not_depend_on_each_other():
    model, method = zoo.model("llama"), load_method("hf_quantized", backend="fp8", sinks=2)
    ids, mask = zoo.padded_batch([40, 25])
    drafts = torch.tensor([[9, 8, 7], [6, 5, 4]])

    def run(ids, mask, drafts):
        cache = method.new_cache(model)
        with torch.no_grad():
            position = (mask.cumsum(1) - 1).clamp(min=0)
            model(ids, attention_mask=mask, position_ids=position, past_key_values=cache, use_cache=True)
            outs = []
            for _ in range(2):
                longer = torch.nn.functional.pad(mask, (0, 3), value=1)
                position = longer.cumsum(1)[:, -3:] - 1
                outs.append(model(drafts, attention_mask=longer, position_ids=position, past_key_values=cache).logits)
                cache.crop(-3)
        return outs

    first, again = run(ids, mask, drafts)
    torch.testing.assert_close(first, again, rtol=0, atol=0)
    alone, _ = run(ids[1:, -25:], mask[1:, -25:], drafts[1:])
    torch.testing.assert_close(first[1:], alone, rtol=1e-4, atol=1e-4)
    method.detach(model)


@pytest.mark.parametrize(("option", "value"), [("bits", 4), ("residual", 64), ("axis_key", 1), ("group_size", 32)])
def test_fp8_has_no_options_of_groups(option, value):
    with pytest.raises(ConfigError, match=rf"method\.{option}={value}: has no effect with method\.backend=fp8"):
        load_method("hf_quantized", backend="fp8", **{option: value})
    assert load_method("hf_quantized", backend="fp8", sinks=2).packages() == ()
