"""KIVI's state for every length and split, its codes, and its attention against a slow whole-tensor statement."""

import random

import pytest
import torch

from kvbench.attention import reference
from kvbench.errors import ConfigError, NonFiniteError
from kvbench.methods import load_method
from kvbench.quantizers import AffineQuantizer
from tests import slow
from tests.marks import fast
from tests.zoo import feed, new_layer, random_kv

ALL = slice(None)


def windows(layer):
    layer.settle()
    return tuple(store.tail.length(ALL) for store in layer.stores())


def test_a_window_holds_its_tokens_and_the_keys_of_an_open_group():
    method = load_method("kivi", quantizer="int2", residual=32, window=96, sinks=16)
    keys, values = random_kv(400, heads=1)
    layer = new_layer(method)
    feed(layer, keys[:, :, :150], values[:, :, :150])
    assert windows(layer) == (96 + (134 - 96) % 32, 96)
    for position in range(150, 400):
        feed(layer, keys[:, :, position : position + 1], values[:, :, position : position + 1])
        behind = position + 1 - 16 - 96
        assert windows(layer) == (96 + behind % 32, 96)
    assert [segment.length(ALL) for segment in layer.stores()[0].segments] == [16, 288 - 288 % 32, 96 + 288 % 32]


@pytest.mark.parametrize("residual", [32, 64, 128])
def test_window_is_n_mod_r_keys_and_min_n_r_values_for_every_n_and_split(residual):
    method = load_method("kivi", quantizer="int2", residual=residual)
    keys, values = random_kv(600, heads=1)
    rng = random.Random(residual)
    for prompt in (1, 31, 32, 33, residual, residual + 1, 5 * residual - 1 if residual < 128 else 300, 600):
        layer = new_layer(method)
        position = prompt
        feed(layer, keys[:, :, :prompt], values[:, :, :prompt])
        assert windows(layer) == (prompt % residual, min(prompt, residual))
        while position < 600:
            step = min(1 if prompt == 1 else rng.choice((1, 1, 1, 2, 5, 40, 200)), 600 - position)
            feed(layer, keys[:, :, position : position + step], values[:, :, position : position + step])
            position += step
            assert windows(layer) == (position % residual, min(position, residual))
        # quantized once, from exact tokens, whatever the split: the codes are those of the whole sequence
        for store, x, axis, held in (
            (layer.stores()[0], keys, "channel", 600 // residual * residual),
            (layer.stores()[1], values, "token", 600 - residual),
        ):
            whole = AffineQuantizer(2, 32, axis).quantize(x[:, :, :held])
            assert torch.equal(store.segments[0].codes(ALL, 0, held), whole.codes().to(torch.int16))


WINDOWS = [(32, 0, "channel"), (64, 0, "token"), (64, 3, "channel"), (128, 40, "channel")]
STATED = [(bits, *window) for bits in (2, 3, 4, 5, 6, 8) for window in WINDOWS]


@pytest.mark.parametrize(
    ("bits", "residual", "sinks", "key_axis"),
    fast(STATED, lambda case: case[0] == 2 or case[1:] == WINDOWS[2 if case[0] % 2 else 1]),
)
def test_attention_equals_a_slow_whole_tensor_statement(bits, residual, sinks, key_axis):
    method = load_method("kivi", quantizer=f"int{bits}", residual=residual, sinks=sinks, key_axis=key_axis)
    for prompt, decoded, step in ((1499, 0, 1), (150, 45, 5), (2, 70, 1), (1, 300, 9)):
        before = prompt + decoded
        keys, values = random_kv(before + step, seed=before)
        query = torch.randn(1, 4, step, 32, generator=torch.Generator().manual_seed(5))
        layer = new_layer(method)
        feed(layer, keys[:, :, :prompt], values[:, :, :prompt])
        for position in range(prompt, before):
            feed(layer, keys[:, :, position : position + 1], values[:, :, position : position + 1])
        feed(layer, keys[:, :, before:], values[:, :, before:])
        assert any(store.only_full(ALL) is None for store in layer.stores()), "nothing is packed: compare more tokens"
        got = reference.attend_reference(None, layer, query, None, 0.2)
        # the step's own tokens are exact, whatever the windows become afterwards
        past = slow.kivi_past(
            keys[:, :, :before],
            values[:, :, :before],
            bits=bits,
            group=32,
            residual=residual,
            sinks=sinks,
            key_axis=key_axis,
        )
        full = [torch.cat([p, x[:, :, before:]], 2) for p, x in zip(past, (keys, values), strict=True)]
        torch.testing.assert_close(got, slow.attention(query, *full, 0.2), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("group", [32, 64])
@pytest.mark.parametrize("sinks", [0, 2])
def test_the_bill_is_the_formula_to_the_byte(dtype, group, sinks):
    """H D [Lk (b/8 + S/G) + (L - Lk) P] + H [Lv (D b/8 + S D/Gv) + (L - Lv) D P]."""
    heads, channels, residual = 2, 64, 64
    full = 4 if dtype == torch.float32 else 2
    pair = 2 * full if dtype == torch.float32 else 4
    for bits in (2, 3, 5, 6, 8):
        formats = {
            "name": "test",
            "key": {"bits": bits, "group_size": group, "axis": "channel"},
            "value": {"bits": bits, "group_size": 32, "axis": "token"},
        }
        method = load_method("kivi", quantizer=formats, residual=residual, sinks=sinks, takes=["test"])
        for count in (1, 63, 64, 65, 128, 500):
            keys, values = (x.to(dtype) for x in random_kv(count, channels=channels))
            layer = new_layer(method)
            feed(layer, keys, values)
            held_keys = residual * (max(count - sinks, 0) // residual)
            held_values = max(0, count - sinks - residual)
            expected = {
                "codes": heads * channels * held_keys * bits // 8 + heads * held_values * channels * bits // 8,
                "scales": heads * channels * held_keys * pair // group + heads * held_values * pair * channels // 32,
                "window": heads * channels * full * (2 * count - held_keys - held_values),
            }
            used = {"codes": 0, "scales": 0, "window": 0}
            for store in layer.stores():
                for segment in store.segments:
                    for part, size in segment.used(0).items():
                        used[part] += size
            assert used == expected


def test_nan_names_layer_side_and_position():
    method = load_method("kivi", quantizer="int2", residual=32)
    for side in (0, 1):
        tensors = [x.clone() for x in random_kv(100)]
        tensors[side][0, 1, 17, 3] = float("nan")
        name = ("key", "value")[side]
        with pytest.raises(NonFiniteError, match=f"layer 0: NaN or Inf in the {name} at position 17"):
            feed(new_layer(method), *tensors)
    layer = new_layer(method)
    keys, values = random_kv(100)
    feed(layer, keys[:, :, :60], values[:, :, :60])
    keys[0, 0, 62, 0] = float("inf")
    feed(layer, keys[:, :, 60:], values[:, :, 60:])
    with pytest.raises(NonFiniteError, match="key at position 62"):
        layer.settle()


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"residual": 100}, "method.residual=100: must be a multiple of the key group"),
        ({"residual": 0}, "method.residual=0"),
        ({"sinks": -1}, "method.sinks=-1"),
        ({"window": -1}, "method.window=-1"),
        ({"window": 64, "evict": True}, "method.window=64: has no meaning"),
        ({"key_axis": "row"}, "method.key_axis=row"),
        ({"quantizer": "int7"}, "quantizer=int7"),
        ({"quantizer": "none"}, "does not accept this quantizer"),
        ({"residul": 64}, "did you mean 'residual'"),
        ({"residual": "many"}, "method.residual=many"),
    ],
)
def test_wrong_settings_are_refused_with_the_remedy(overrides, message):
    with pytest.raises(ConfigError, match=message):
        load_method("kivi", **overrides)


def test_a_group_that_does_not_divide_the_head_is_refused():
    sides = [{"bits": 2, "group_size": 32, "axis": axis} for axis in ("channel", "token")]
    with pytest.raises(ConfigError, match=r"quantizer.value.group_size=32: does not divide the model's head_dim 80"):
        load_method("kivi", quantizer={"key": sides[0], "value": sides[1]}).check(head_dim=80)


@pytest.mark.parametrize("sinks", [0, 2])
def test_the_eviction_twin_keeps_the_newest_r_keys_and_values(sinks):
    method = load_method("kivi", residual=32, sinks=sinks, evict=True)
    keys, values = random_kv(150, heads=1)
    keys[..., 0] = values[..., 0] = torch.arange(150)
    for prompt in (1, 20, 40, 100):
        layer = new_layer(method)
        feed(layer, keys[:, :, :prompt], values[:, :, :prompt])
        for n in range(prompt, 150):
            feed(layer, keys[:, :, n : n + 1], values[:, :, n : n + 1])
            layer.settle()
            total = n + 1
            expected = [*range(min(sinks, total)), *range(max(total - 32, min(sinks, total)), total)]
            assert layer.positions(0).tolist() == expected
            for store in layer.stores():
                stored = torch.cat([s.view(ALL) for s in store.segments], 2)
                assert stored[0, 0, :, 0].tolist() == expected


@pytest.mark.parametrize("sinks", [0, 2])
def test_positions_of_the_eviction_twin_are_columns_of_the_padded_batch(sinks):
    layer = new_layer(load_method("kivi", residual=32, sinks=sinks, evict=True), [0, 30, 70])
    feed(layer, *random_kv(80, batch=3))
    for row, start in enumerate((0, 30, 70)):
        first = min(start + sinks, 80)
        assert layer.positions(row).tolist() == [*range(start, first), *range(max(48, first), 80)]


@pytest.mark.parametrize("key_axis", ["channel", "token"])
def test_values_per_channel_leave_in_whole_groups(key_axis):
    """The other half of QuantSpec's Table 3: key axis by value axis."""
    form = {"bits": 2, "group_size": 32}
    quantizer = {"key": {**form, "axis": "channel"}, "value": {**form, "axis": "channel"}}
    method = load_method("kivi", quantizer=quantizer, residual=64, key_axis=key_axis)
    keys, values = random_kv(300, heads=1)
    layer = new_layer(method)
    feed(layer, keys[:, :, :100], values[:, :, :100])
    for position in range(100, 300):
        feed(layer, keys[:, :, position : position + 1], values[:, :, position : position + 1])
        assert windows(layer)[1] == (position + 1) % 64
    whole = AffineQuantizer(2, 32, "channel").quantize(values[:, :, :256])
    assert torch.equal(layer.stores()[1].segments[0].codes(ALL, 0, 256), whole.codes().to(torch.int16))
    with pytest.raises(ConfigError, match="value group"):
        wide = {**quantizer, "value": {"bits": 2, "group_size": 128, "axis": "channel"}}
        load_method("kivi", quantizer=wide, residual=64, key_axis="token").check(64)
