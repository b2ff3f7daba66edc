"""hf_quantized is transformers' QuantizedCache: same states, same tokens."""

import importlib.util
import shutil

import pytest
import torch
from transformers import QuantizedCache, cache_utils

from kvbench.errors import CacheError, ConfigError, ModelError
from kvbench.methods import load_method
from kvbench.methods.bytes import kv_bytes
from kvbench.methods.refusals import Reach
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
        ({"sinks": -1}, "method.sinks=-1: must be at least 0"),
        ({"group_size": 0}, "method.group_size=0: must be at least 1"),
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


class Library:
    """Stands for a quantizer of transformers: it notes its options, and rounds to halves."""

    def __init__(self, *options):
        self.options = options

    def _quantize(self, x, axis):
        return (2 * x).round(), axis

    def _dequantize(self, quantized):
        return quantized[0] / 2


@pytest.fixture
def libraries(monkeypatch):
    """Both libraries as if they were installed."""
    monkeypatch.setattr(cache_utils, "QuantoQuantizedLayer", type("Quanto", (Library,), {}))
    monkeypatch.setattr(cache_utils, "HQQQuantizedLayer", type("HQQ", (Library,), {}))


@pytest.mark.parametrize(("backend", "name", "axes"), [("quanto", "Quanto", (-1, 0)), ("hqq", "HQQ", (1, 0))])
def test_options_reach_the_library(backend, name, axes, libraries):
    axis_key, axis_value = axes
    method = load_method(
        "hf_quantized", backend=backend, bits=4, axis_key=axis_key, axis_value=axis_value, group_size=32, residual=7
    )
    made = method.backend_layer()
    assert type(made).__name__ == name and made.options == (4, axis_key, axis_value, 32, 7)
    layer = zoo.new_layer(method)
    zoo.feed(layer, *(x.bfloat16() for x in zoo.random_kv(9, channels=64)))
    for store, axis in zip(layer.stores(), axes, strict=True):
        packed, tail = store.segments
        assert (packed.axis, packed.multiple) == (axis, 8 if axis == 1 else 1)
        assert packed.backend.dtype == packed.backend.keys.dtype == packed.backend.values.dtype == torch.bfloat16
        assert packed.backend.device == layer.device and tail.capacity == 7 + 64


def test_a_library_that_is_missing_is_named(monkeypatch):
    def missing(*options):
        raise ImportError

    monkeypatch.setattr(cache_utils, "HQQQuantizedLayer", missing)
    with pytest.raises(ModelError, match=r"method\.backend=hqq needs a package(?s:.*)kvbench\[hf\]"):
        load_method("hf_quantized", backend="hqq").backend_layer()
    monkeypatch.delattr(cache_utils, "Fp8QuantizedLayer")
    with pytest.raises(ModelError, match=r"needs transformers 5\.23"):
        load_method("hf_quantized", backend="fp8").backend_layer()


def halves(x):
    return (2 * x).round() / 2


@pytest.mark.parametrize("prompt", [3, 32])
@pytest.mark.parametrize("partial", [False, True])
def test_tokens_are_quantized_when_the_residual_is_full(partial, prompt, libraries):
    """The sinks and the newest tokens stay as they are; values may have a residual of their own."""
    window, sinks, count = 5, 4, 50
    settings = {"value_residual": window} if partial else {}
    method = load_method("hf_quantized", bits=4, sinks=sinks, recent=window, residual=2 * window, **settings)
    assert method.window("key") == (10, 5) and method.window("value") == ((5, 0) if partial else (10, 5))
    keys, values = zoo.random_kv(count, channels=64)
    layer, row = zoo.new_layer(method), slice(0, 1)
    zoo.feed(layer, keys[:, :, :prompt], values[:, :, :prompt])
    borders = [min(sinks, prompt) + max(prompt - sinks - method.window(side)[1], 0) for side in ("key", "value")]
    for n in range(prompt, count + 1):
        if n > prompt:
            zoo.feed(layer, keys[:, :, n - 1 : n], values[:, :, n - 1 : n])
            layer.settle()
        for number, (store, x, side) in enumerate(zip(layer.stores(), (keys, values), ("key", "value"), strict=True)):
            full, stay = method.window(side)
            borders[number] = max(borders[number], min(sinks, n))
            if n > prompt and n - borders[number] >= full:
                borders[number] = n - stay
            first, border = min(sinks, n), borders[number]
            assert [segment.length(row) for segment in store.segments] == [first, border - first, n - border]
            read = torch.cat([s.read(row, 0, s.length(row), torch.float32) for s in store.segments if s.length(row)], 2)
            wanted = torch.cat([x[:, :, :first], halves(x[:, :, first:border]), x[:, :, border:n]], 2)
            assert torch.equal(read, wanted)


@pytest.mark.parametrize("prompt", [1, 3, 30])
@pytest.mark.parametrize(
    "options",
    [
        {"residual": 8},
        {"residual": 8, "recent": 3, "sinks": 2},
        {"residual": 8, "recent": 7, "sinks": 1},
        {"residual": 8, "recent": 3, "value_residual": 5, "sinks": 4},
    ],
    ids=str,
)
def test_the_formula_counts_exact_tokens_as_the_rule_leaves_them(options, prompt):
    method, sinks = load_method("hf_quantized", **options), options.get("sinks", 0)
    tails = {side: min(max(prompt - sinks, 0), method.window(side)[1]) for side in ("key", "value")}
    for n in range(prompt, 60):
        exact = 0
        for side, (full, stay) in ((side, method.window(side)) for side in tails):
            tails[side] += n > max(prompt, sinks)
            if tails[side] >= full:
                tails[side] = stay
            exact += min(sinks, n) + tails[side]
        found = kv_bytes(method, n, prompt=prompt, layers=1, query_heads=1, heads=2, channels=64, width=2)
        assert found.window == exact * 2 * 64 * 2


@pytest.mark.parametrize(
    ("backend", "bits", "axis", "codes", "groups"),
    [
        ("quanto", 2, 0, 2 * 64, 5),  # a row of 64 codes per group; two bytes hold the five codes of a column
        ("quanto", 4, -1, 32 * 5, 5),  # a column per group
        ("hqq", 4, 1, 4 * 64, 8),  # eight tokens, of which three fill up
        ("hqq", 8, 1, 8 * 64, 8),
        ("hqq", 2, 0, 16 * 5, 5),
        ("hqq", 3, 0, 7 * 4 * 5, 5),  # ten codes in four bytes
        ("hqq", 1, 0, 8 * 5, 5),
    ],
)
@pytest.mark.parametrize("width", [2, 4])
def test_bytes_of_five_tokens_are_those_of_the_libraries_layouts(backend, bits, axis, codes, groups, width):
    method = load_method("hf_quantized", backend=backend, bits=bits, axis_key=axis, axis_value=axis)
    found = kv_bytes(method, 5, prompt=5, layers=1, query_heads=1, heads=1, channels=64, width=width)
    assert (found.codes, found.scales, found.window) == (2 * codes, 2 * 2 * groups * width, 0)
    half = load_method("hf_quantized", backend=backend, bits=bits, axis_key=axis, axis_value=axis, group_size=32)
    found = kv_bytes(half, 5, prompt=5, layers=1, query_heads=1, heads=1, channels=64, width=width)
    assert found.scales == 2 * 2 * 2 * groups * width


@pytest.mark.parametrize(
    ("options", "reach"),
    [
        ({}, None),
        ({"sinks": 2}, Reach("method.sinks", 2, 2)),
        ({"recent": 16}, Reach("method.recent", 16, 16)),
        ({"recent": 16, "sinks": 2}, Reach("method.recent", 16, 18)),
    ],
    ids=str,
)
def test_nothing_is_quantized_up_to_the_sinks_and_the_newest_tokens(options, reach):
    assert load_method("hf_quantized", **options).reach() == reach


@pytest.mark.parametrize("options", [{"residual": 100}, {"residual": 50, "value_residual": 100}], ids=str)
def test_a_residual_that_never_fills_is_refused(options):
    method = load_method("hf_quantized", **options)
    method.check_reach(101)
    key = list(options)[-1]
    with pytest.raises(ConfigError, match=rf"method\.{key}=100: is so large"):
        method.check_reach(100)
    load_method("hf_quantized", backend="fp8").check_reach(2)


def test_only_fp8_stores_a_token_by_itself():
    fp8, quanto = load_method("hf_quantized", backend="fp8"), load_method("hf_quantized")
    assert (fp8.by_token, fp8.eager, fp8.window("key"), fp8.window("value")) == (True, True, (1, 0), (1, 0))
    assert (quanto.by_token, quanto.eager, quanto.window("key")) == (False, False, (128, 0))


def test_limits_of_options_are_allowed():
    for options in ({"residual": 1}, {"recent": 127}, {"recent": 0, "value_residual": 1}, {"sinks": 0}):
        load_method("hf_quantized", **options).check(64)
    for bits in (1, 2, 3, 4, 8):
        load_method("hf_quantized", backend="hqq", bits=bits).check(64)
    for bits in (2, 4):
        load_method("hf_quantized", backend="quanto", bits=bits, axis_key=-1).check(64)
