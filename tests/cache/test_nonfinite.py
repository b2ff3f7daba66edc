"""NaN and Inf in a cache: errors that name the layer, the side and the place, and the records of the kernels."""

from __future__ import annotations

import weakref

import pytest
import torch

from kvbench.cache import KVCache, Prompts
from kvbench.cache.layer import KVLayer
from kvbench.cache.nonfinite import nonfinite_message, watch_segments
from kvbench.cache.progress import Padding, Progress
from kvbench.cache.watch import Place, Watch, Watches, uncached_message
from kvbench.errors import NonFiniteError
from kvbench.methods import load_method
from tests import zoo

CPU = torch.device("cpu")


def spoilt(side: int, row: int, head: int, token: int, channel: int, tokens: int = 40) -> list[torch.Tensor]:
    """Keys and values of two rows, one element of which is NaN; a later one is Inf."""
    both = list(zoo.random_kv(tokens, 2))
    both[side][row, head, token, channel] = float("nan")
    both[side][1, 1, tokens - 1, 31] = float("inf")
    return both


def kivi_layer(starts: list[int], index: int = 0) -> KVLayer:
    method = load_method("kivi", quantizer="int8", residual=32)
    return KVLayer(method, index, Progress(padding=Padding(starts)))


@pytest.mark.parametrize(("side", "name"), [(0, "key"), (1, "value")])
def test_a_prompt_that_is_not_finite_is_named_by_layer_side_and_position(side, name):
    layer = kivi_layer([1, 3], index=5)
    with pytest.raises(NonFiniteError) as raised:
        zoo.feed(layer, *spoilt(side, 1, 0, 7, 9))
    assert str(raised.value) == (
        f"layer 5: NaN or Inf in the {name} at position 7 (row 1, KV head 0, channel 9).\n"
        "  hint: download the weights again, since they may be damaged"
    )


def test_rows_of_a_group_have_their_number_in_the_whole_batch():
    cache = KVCache(load_method("kivi", quantizer="int8", residual=32), 1, Prompts([0] * 5, [40] * 5))
    with (
        pytest.raises(NonFiniteError, match=r"key at position 3 \(row 3, KV head 1, channel 2\)"),
        cache.only(slice(2, 4), 5),
    ):
        zoo.feed(cache.layers[0], *spoilt(0, 1, 1, 3, 2))


def test_a_chunk_that_is_stored_as_it_comes_names_the_position_in_the_prompt():
    layer = KVLayer(load_method("atom", prefill="quantized"), 1, Progress(padding=Padding([0, 2])))
    layer.progress.prefill.open = True
    keys, values = zoo.random_kv(10, 2)
    layer.update(keys, values)
    layer.place_chunk(keys, values)
    keys, values = spoilt(1, 1, 0, 4, 8, tokens=6)
    layer.update(keys, values)
    with pytest.raises(NonFiniteError, match=r"layer 1: NaN or Inf in the value at position 14 \(row 1, KV head 0"):
        layer.place_chunk(keys, values)


@pytest.mark.parametrize(("side", "name"), [(0, "key"), (1, "value")])
@pytest.mark.parametrize("row", [0, 1])
def test_a_token_that_is_not_finite_is_named_when_it_is_packed(side, name, row):
    """Keys are packed 32 at a time, values one by one; a row's own padding decides its step."""
    layer = kivi_layer([0, 4])
    zoo.feed(layer, *zoo.random_kv(40, 2))
    step = zoo.random_kv(1, 2)
    step[side][row, 1, 0, 6] = float("inf")
    zoo.feed(layer, *step)
    with pytest.raises(NonFiniteError, match=rf"layer 0: .* {name} at position 40 \(row {row}, KV head 1, channel 6\)"):
        for _ in range(40):
            zoo.feed(layer, *zoo.random_kv(1, 2))
    keys, values = layer.stores()
    assert (keys.packed.side, values.packed.side) == ("key", "value")


def test_a_value_is_named_by_its_position_although_its_key_has_been_packed_and_moved():
    layer = KVLayer(load_method("logquant", quantizer="int8", window=8), 0, Progress())
    keys, values = zoo.random_kv(24)
    values[0, 1, 5, 3] = float("nan")
    for first, last in ((0, 22), (22, 24)):
        zoo.feed(layer, keys[:, :, first:last], values[:, :, first:last])
    with pytest.raises(NonFiniteError, match=r"value at position 5 \(row 0, KV head 1, channel 3\)"):
        layer.settle()


def test_an_error_about_finite_tails_stays_what_it_is():
    layer = kivi_layer([0, 0])
    zoo.feed(layer, *zoo.random_kv(40, 2))

    def fail(layer, rows):
        raise NonFiniteError("something else")

    layer.method.settle = fail
    with pytest.raises(NonFiniteError, match=r"^something else$"):
        layer.settle()


def test_what_a_kernel_noted_is_described_by_side_and_position_as_long_as_the_token_is_held():
    layer = kivi_layer([0, 2], index=3)
    zoo.feed(layer, *zoo.random_kv(40, 2))  # keys: 32 and 8; values: 8 and 32; two fewer exact in the padded row
    end = "\n  hint: download the weights again, since they may be damaged"
    message = nonfinite_message(weakref.ref(layer), 3, "key", 0, Place(1, 0, 5, 2))
    assert message == f"layer 3: NaN or Inf in the key at position 7 (row 1, KV head 0, channel 2).{end}"
    message = nonfinite_message(weakref.ref(layer), 3, "value", 1, Place(0, 1, 4, 6))
    assert message == f"layer 3: NaN or Inf in the value at position 12 (row 0, KV head 1, channel 6).{end}"
    layer.dtype = torch.float16
    assert "model.dtype=float32" in nonfinite_message(weakref.ref(layer), 3, "value", 1, Place(0, 1, 4, 6))
    layer.order[0] = torch.stack([torch.arange(40), torch.arange(40).flip(0)])
    layer.method.positions = lambda layer, row: layer.order[row]
    assert "position 37 (row 0, KV head 1" in nonfinite_message(weakref.ref(layer), 3, "key", 0, Place(0, 1, 2, 6))
    assert "in the key (row 0, KV head 1" in nonfinite_message(weakref.ref(layer), 3, "key", 1, Place(0, 1, 8, 6))
    gone = weakref.ref(kivi_layer([0]))
    assert nonfinite_message(gone, 3, "key", 0, Place(1, 0, 5, 2)) == (
        "layer 3: NaN or Inf in the key (row 1, KV head 0, channel 2)."
    )


def test_kernels_on_a_cpu_need_no_record():
    layer = kivi_layer([0, 0])
    zoo.feed(layer, *zoo.random_kv(40, 2))
    watch_segments(layer)
    assert [store.packed.watch for store in layer.stores()] == [None, None]


def test_packed_segments_on_a_gpu_are_noted_in_the_record_of_their_device(monkeypatch):
    layer, watch = kivi_layer([0, 0], index=2), Watch(CPU)
    zoo.feed(layer, *zoo.random_kv(40, 2))
    monkeypatch.setattr(layer.progress.watches, "of", lambda device: watch if device.type == "cuda" else None)
    layer.device = torch.device("cuda")
    watch_segments(layer)
    assert watch.fresh and [store.packed.watch for store in layer.stores()] == [(watch, 0), (watch, 1)]
    for tag, name in ((0, "key"), (1, "value")):
        watch.record.copy_(torch.tensor([1, tag, 0, 1, 3, 4]))
        with pytest.raises(NonFiniteError, match=rf"layer 2: .* {name} at position 3 \(row 0, KV head 1, channel 4\)"):
            watch.check()


def test_a_record_is_reported_once_in_the_words_of_its_segment():
    with torch.inference_mode():
        watch = Watch(CPU)  # written outside of inference mode, too
    assert watch.record.tolist() == [0] * 6 and watch.record.dtype == torch.int32 and not watch.fresh
    tags = [watch.tag(lambda place, name=name: f"{name}: {place}") for name in ("first", "second")]
    assert tags == [0, 1]
    watch.check()
    watch.poll()
    for look in (watch.check, watch.poll):
        watch.fresh = True
        watch.record.copy_(torch.tensor([1, 1, 2, 3, 4, 5]))
        with pytest.raises(NonFiniteError, match=r"^second: Place\(row=2, head=3, token=4, channel=5\)$"):
            look()
        assert not watch.fresh and watch.record.tolist() == [0] * 6
        look()
    assert uncached_message(Place(2, 3, 4, 5)) == "a segment contains NaN or Inf at index (2, 3, 4, 5)"


def test_each_device_of_a_cache_has_one_record():
    watches = Watches()
    watches.check()
    watches.poll()
    first = watches.of(CPU)
    assert watches.of(torch.device("cpu")) is first
    other = watches.of(torch.device("cpu", 0))
    assert other is not first
    other.tag(lambda place: "other")
    for look in (watches.check, watches.poll):
        other.record[0] = 1
        with pytest.raises(NonFiniteError, match="other"):
            look()
