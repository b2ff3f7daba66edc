"""KVarN's placement for every length, its attention against a slow whole-tensor statement, its bytes and refusals."""

import random

import pytest
import torch

from kvbench.attention import reference
from kvbench.errors import ConfigError
from kvbench.methods import load_method
from kvbench.methods.byte_parts import Setting
from kvbench.quantizers.kvarn import KvarnQuantizer
from tests import slow
from tests.zoo import feed, new_layer, random_kv

ALL = slice(None)


def formats(key: int = 4, value: int = 2, tile: int = 64, key_axis: str = "channel", value_group="head_dim") -> dict:
    """A quantizer group: bits of keys and values, and the tokens of a tile."""
    return {
        "key": {"bits": key, "group_size": tile, "axis": key_axis},
        "value": {"bits": value, "group_size": value_group, "axis": "token"},
    }


def kvarn(**fields):
    """KVarN in the model's basis, so that tiles are those of the test."""
    plain = {"sinks": 5, "quantizer": formats(), "rotation": {"key": "none", "value": "none"}}
    return load_method("kvarn", **plain | fields)


def parts(layer) -> list[tuple[int, ...]]:
    layer.settle()
    return [tuple(segment.length(ALL) for segment in store.segments) for store in layer.stores()]


@pytest.mark.parametrize(("window", "tile"), [(0, 64), (40, 64), (0, 128)])
def test_whole_tiles_are_packed_behind_the_sinks_and_the_window(window, tile):
    method = kvarn(window=window, quantizer=formats(tile=tile))
    keys, values = random_kv(420, heads=1)
    rng = random.Random(window)
    for prompt in (1, 5, 68, 69, 70, 197, 420):
        layer = new_layer(method)
        position = prompt
        feed(layer, keys[:, :, :prompt], values[:, :, :prompt])
        while True:
            sinks, behind = min(position, 5), max(position - 5 - window, 0)
            packed = behind // tile * tile
            assert parts(layer) == [(sinks, packed, position - sinks - packed)] * 2
            if position == 420:
                break
            step = min(1 if prompt == 1 else rng.choice((1, 2, 40, 200)), 420 - position)
            feed(layer, keys[:, :, position : position + step], values[:, :, position : position + step])
            position += step
        # each tile is encoded once, from exact tokens, whatever the split
        for store, x, axis, bits in zip(layer.stores(), (keys, values), ("channel", "token"), (4, 2), strict=True):
            codes, params = KvarnQuantizer(bits, tile, axis).encode(x[:, :, 5 : 5 + packed])
            segment = store.segments[1]
            assert torch.equal(segment.codes(ALL, 0, packed), codes.to(torch.int16))
            for stored, expected in zip(segment.params, params, strict=True):
                assert stored.dtype == torch.float16
                assert torch.equal(stored[:, :, : expected.shape[2]], expected)


def test_attention_equals_a_slow_whole_tensor_statement():
    method = kvarn(iterations=3)
    keys, values = random_kv(300, seed=2)
    query = torch.randn(1, 4, 3, keys.shape[-1], generator=torch.Generator().manual_seed(5))
    layer = new_layer(method)
    for first, last in ((0, 230), (230, 231), (231, 297), (297, 300)):
        feed(layer, keys[:, :, first:last], values[:, :, first:last])
    got = reference.attend_reference(None, layer, query, None, 0.2)
    packed = (297 - 5) // 64 * 64
    read = []
    for x, axis, bits in ((keys, "channel", 4), (values, "token", 2)):
        quantizer = KvarnQuantizer(bits, 64, axis, iterations=3)
        middle = quantizer.decode(*quantizer.encode(x[:, :, 5 : 5 + packed]), torch.float32)
        read.append(torch.cat([x[:, :, :5], middle, x[:, :, 5 + packed :]], 2))
    torch.testing.assert_close(got, slow.attention(query, *read, 0.2), rtol=1e-4, atol=1e-5)


def test_keys_and_values_are_rotated_by_default():
    method = load_method("kvarn", sinks=0, quantizer=formats())
    keys, values = random_kv(64)
    layer = new_layer(method)
    feed(layer, keys, values)
    layer.settle()
    hadamard = torch.ones(1, 1)
    while len(hadamard) < keys.shape[-1]:
        hadamard = torch.cat([torch.cat([hadamard, hadamard], 1), torch.cat([hadamard, -hadamard], 1)])
    for store, x, axis, bits in zip(layer.stores(), (keys, values), ("channel", "token"), (4, 2), strict=True):
        quantizer = KvarnQuantizer(bits, 64, axis)
        wanted = quantizer.decode(*quantizer.encode(x @ hadamard / len(hadamard) ** 0.5), torch.float32)
        torch.testing.assert_close(store.segments[0].read(ALL, 0, 64, torch.float32), wanted, rtol=1e-3, atol=1e-2)


@pytest.mark.parametrize(
    ("value", "tile", "per_tile"), [(4, 128, 17_920), (2, 128, 13_824), (2, 64, 64 * 128 * 6 // 8 + 3 * 192 * 2)]
)
@pytest.mark.parametrize("width", [2, 4])
def test_bytes_of_a_tile_are_those_of_the_authors_layout(value, tile, per_tile, width):
    method = kvarn(sinks=128, quantizer=formats(4, value, tile))
    at = Setting(tokens=128 + 5 * tile + 7, prompt=500, query_heads=8, heads=3, channels=128, width=width)
    size = method.layer_bytes(at)
    assert size.codes + size.scales == 3 * 5 * per_tile
    assert size.window == 2 * 3 * (128 + 7) * 128 * width
    dense = kvarn(sinks=128, quantizer=formats(3, value, tile)).layer_bytes(at)
    assert size.codes - dense.codes == 3 * 5 * tile * 128 // 8  # 3 bits take 3 bits


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_formula_of_the_bytes_equals_the_buffers(dtype):
    method = kvarn(window=9)
    keys, values = (x.to(dtype) for x in random_kv(300, batch=1))
    layer = new_layer(method)
    feed(layer, keys, values)
    layer.settle()
    used = [segment.used(0) for segment in layer.segments()]
    heads, channels = keys.shape[1], keys.shape[3]
    size = method.layer_bytes(Setting(300, 300, 2 * heads, heads, channels, width=keys.element_size()))
    assert sum(part.get("codes", 0) for part in used) == size.codes
    assert sum(part.get("scales", 0) for part in used) == size.scales
    assert sum(sum(part.values()) for part in used) == size.total


@pytest.mark.parametrize(
    ("fields", "key"),
    [
        ({"iterations": -1}, "method.iterations"),
        ({"window": -1}, "method.window"),
        ({"quantile": 0.5}, "method.quantile"),
        ({"balance": "sinkhorn"}, "method.balance"),
        ({"balance": "norm", "iterations": 3}, "method.iterations=3: has no effect with method.balance=norm"),
        ({"quantizer": formats(tile=32)}, "quantizer.key.group_size"),
        ({"quantizer": formats(value_group=32)}, "quantizer.value.group_size"),
        ({"quantizer": formats(key_axis="token")}, "quantizer.key.axis"),
        ({"quantizer": "int4_token"}, "quantizer"),
    ],
)
def test_settings_that_are_not_kvarn_are_refused(fields, key):
    with pytest.raises(ConfigError, match=key.replace(".", r"\.")):
        kvarn(**fields).check(64)
