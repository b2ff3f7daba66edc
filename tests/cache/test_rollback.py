"""A rollback raises CacheError, or leaves the state of never having seen what was taken back; random cases."""

import random
from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch

from kvbench.attention import observe, reference
from kvbench.cache import KVCache, Prompts
from kvbench.cache.layer import KVLayer
from kvbench.errors import CacheError
from kvbench.methods import Method, load_method
from kvbench.methods.fp16 import FP16
from kvbench.methods.kivi import Kivi
from tests import zoo

PLAIN = {"key": "none", "value": "none"}
#: method, quantizer, fields, sliding window of the layer
CASES = [
    ("fp16", None, {}, None),
    ("fp16", None, {}, 60),
    ("kivi", "int8", {"residual": 32}, None),
    ("kivi", "int8", {"residual": 32, "sinks": 3}, 60),
    ("kivi", None, {"evict": True, "residual": 32}, None),
    ("kivi", "int8", {"residual": 32, "window": 20}, None),
    ("kvarn", "int4_g128", {"sinks": 3, "rotation": PLAIN}, None),
    ("kvarn", "int4_g128", {"sinks": 0, "window": 20, "rotation": PLAIN}, None),
    ("oscar", "int2_token", {"sinks": 4, "window": 20, "basis": "rotation"}, None),
    ("engine", None, {"format": "q8_0", "window": 20, "rotation": PLAIN}, None),
    ("atom", "int4_token", {}, None),
    ("atom", "int4_token", {}, 60),
    ("logquant", "int8", {"window": 8}, None),
    ("logquant", "int8", {"window": 8}, 60),
    ("logquant", None, {"window": 8, "evict": True}, None),
    ("partial_logquant", "int8", {"window": 8, "sinks": 2}, None),
    ("quantspec", None, {"gamma": 0}, None),
    ("streamingllm", None, {"budget": 40}, None),
    ("streamingllm", None, {"budget": 40, "position": "original"}, 60),
    ("streamingllm", None, {"budget": 0.5, "evict": "prefill"}, None),
    ("snapkv", None, {"budget": 0.5, "window": 8}, None),
    ("snapkv", None, {"budget": 0.5, "window": 8}, 60),
    ("h2o", None, {"budget": 0.4}, None),
    ("h2o", None, {"budget": 40, "group": "max", "per_query": True}, 60),
    ("h2o", None, {"evict": "prefill"}, None),
    ("kvquant", None, {"outliers": 0.05, "first_tokens": 3}, None),
    ("cocktail", None, {"encoder": "bm25", "chunk_size": 8, "split": (30, 30, 40), "group_size": 8}, None),
]
#: largest mean error of values, by method; those with 8 bits have the default
LOSSES = {"atom": 0.3, "cocktail": 0.6, "kvquant": 0.3, "kvarn": 0.3, "oscar": 0.6}
#: what attention asks of a model's module
MODULE = SimpleNamespace(num_key_value_groups=2, is_causal=True)
#: tokens that there are: a token is known by its number
MOST = 260


def texts() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Keys, values ``[1, 2, n, 64]`` and queries ``[1, 4, n, 64]``."""
    keys, values = zoo.random_kv(MOST, channels=64, seed=3)
    return keys, values, torch.randn(1, 4, MOST, 64, generator=torch.Generator().manual_seed(4))


class Text:
    """One layer that is fed tokens by their numbers, and the parts in which they came."""

    def __init__(self, method: Method, window: int | None, prompt: int) -> None:
        ids, _ = zoo.padded_batch([prompt], seed=1)
        prompts = Prompts.from_batch(ids, context_spans=[(0, prompt)], queries=["3"], decode=lambda row: str(row))
        model = zoo.model("llama")
        self.cache: KVCache = method.new_cache(model, prompts)
        method.detach(model)
        self.layer: KVLayer = self.cache.layers[0]
        self.layer.window, self.layer.rope = window, None
        self.method, self.all = method, texts()
        self.parts: list[list[int]] = []

    def feed(self, numbers: list[int]) -> torch.Tensor | None:
        """The prompt, or a step and what it attends to."""
        layer = self.layer
        keys, values, queries = (x[:, :, numbers] for x in self.all)
        self.parts.append(numbers)
        keys, values = layer.update(keys, values)[0].claim()
        if layer.sealed:
            layer.append(keys, values)
            layer.settle(forget=False) if self.method.eager else None
            return reference.attend_reference(MODULE, layer, queries, self.mask(len(numbers)), 0.1)
        layer.progress.see(None, 1, len(numbers))
        if self.method.quantized_prefill:
            layer.place_chunk(keys, values)
        else:
            if self.method.observe_prompt:
                layer.observed = observe.extend(layer, queries, keys, None, 0.1)
            layer.end_chunk(*layer.extend_prompt(keys, values))
        return None

    def mask(self, count: int) -> torch.Tensor | None:
        """Of a sliding window, over columns."""
        if self.layer.window is None:
            return None
        columns, newest = torch.arange(self.layer.seen), torch.arange(self.layer.seen - count, self.layer.seen)[:, None]
        return ((columns <= newest) & (columns > newest - self.layer.window))[None, None]

    def take_back(self, count: int) -> None:
        self.cache.layers[0].crop(-count)
        while count:
            part = self.parts.pop()
            if len(part) > count:
                self.parts.append(part[: len(part) - count])
            count = max(count - len(part), 0)

    def state(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Positions, keys and values of all slots, after settling."""
        self.layer.settle()
        one, slots = slice(0, 1), self.layer.length(slice(0, 1))
        read = []
        for store in self.layer.stores():
            cuts = store.cuts(one, 0, slots)
            blocks = [store.read(one, a, b, torch.float32) for a, b in pairwise(cuts)]
            read.append(torch.cat(blocks, 2)[0])
            assert read[-1].shape[1] == slots
        return self.layer.positions(0).expand(2, -1), *read


@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(map(str, (case[0], *case[2].values(), case[3]))))
def test_a_rollback_raises_or_leaves_no_trace(case, monkeypatch):
    """Within a prompt KIVI's tails may be taken back although that leaves a trace; the rule for the rest is tried."""
    name, quantizer, fields, window = case
    monkeypatch.setattr(Kivi, "gives_tail", False)
    if name == "cocktail":
        pytest.importorskip("bm25s")
    made = {"calibration": zoo.calibrations("llama")} if name == "kvquant" else {}
    method = load_method(name, quantizer=quantizer, **fields, **made)
    draw, refused, done, past_a_step = random.Random(name + str(fields)), 0, 0, 0
    for _ in range(6):
        prompt = draw.randint(17, 170)
        text, number = Text(method, window, prompt), prompt
        text.feed(list(range(prompt)))
        for _ in range(draw.randint(1, 5)):
            count = draw.choice([1, 1, 1, 2, 5, 11])
            text.feed(list(range(number, number + count)))
            number += count
        back = draw.choice([1, 2, 3, 5, 9, 20, 40])
        before = [segment.lengths[0] for store in text.layer.stores() for segment in store.segments]
        past_a_step += back > len(text.parts[-1])
        try:
            text.take_back(back)
        except CacheError:
            refused += 1
            assert before == [segment.lengths[0] for store in text.layer.stores() for segment in store.segments]
            text.feed([number])  # nothing has happened
            continue
        done += 1
        if len(text.parts) == 0:
            continue
        again = Text(method, window, len(text.parts[0]) if name != "cocktail" else prompt)
        if name == "cocktail" and len(text.parts[0]) != prompt:
            pytest.fail("a part of the prompt that the chunks were cut of was taken back")
        for part in list(text.parts):
            again.feed(part)
        more = [MOST - 1, MOST - 2]  # tokens that neither has seen
        outs = [each.feed(more[:1]) for each in (text, again)] + [each.feed(more) for each in (text, again)]
        torch.testing.assert_close(outs[0], outs[1], rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(outs[2], outs[3], rtol=1e-4, atol=1e-5)
        mine, other = text.state(), again.state()
        for a, b in zip(mine, other, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)
        assert_slots_hold_what_their_positions_say(text, mine)
    assert done or past_a_step
    assert refused or past_a_step < 6


def assert_slots_hold_what_their_positions_say(text: Text, state) -> None:
    """Values (never turned, never before RoPE) within what their quantizer may lose; the newest tokens are there."""
    fed = torch.tensor([number for part in text.parts for number in part])
    positions, _, values = state
    if text.method.__class__.__name__ == "StreamingLLM" and text.method.position == "cache":
        sinks = text.method.sinks
        positions = torch.cat([torch.arange(sinks).expand(2, -1), positions[:, sinks:]], 1)
    true = text.all[1][0]
    for head in range(2):
        error = (values[head] - true[head, fed[positions[head]]]).abs().mean()
        assert error < LOSSES.get(type(text.method).__name__.lower(), 0.02)
        assert len(set(positions[head].tolist())) == positions.shape[1]
        assert positions[head].max() == len(fed) - 1


def test_rows_that_give_back_unequally_move_to_the_right_and_beams_take_their_positions_along():
    layer = zoo.new_layer(load_method("fp16"), starts=[0, 2])
    keys, values = zoo.random_kv(9, batch=2)
    zoo.feed(layer, keys, values)
    layer.order = [torch.arange(9), torch.arange(2, 9)]
    with pytest.raises(
        CacheError, match="cannot take back 8 tokens: in row 1 of layer 0, only the newest 7 can be removed"
    ):
        layer.take_back([1, 8])
    layer.take_back([1, 3])
    layer.progress.padding.starts = [0, 4]
    assert layer.seen == 8
    assert [order.tolist() for order in layer.order] == [list(range(8)), [4, 5, 6, 7]]
    layer.batch_select_indices(torch.tensor([1, 0, 1]))
    assert [len(order) for order in layer.order] == [4, 8, 4]


def flushed() -> KVLayer:
    """Two rows; the second has packed tokens at column 24, the first, whose padding is longer, none. Then 4 more."""
    layer = zoo.new_layer(load_method("logquant", quantizer="int8", window=8), [5, 0])
    keys, values = zoo.random_kv(28, batch=2)
    zoo.feed(layer, keys[:, :, :22], values[:, :, :22])
    assert layer.firm == [0, 0]  # nothing of the prompt is packed
    for column in range(22, 28):
        zoo.feed(layer, keys[:, :, column : column + 1], values[:, :, column : column + 1])
    assert layer.firm == [0, 24] and layer.seen == 28
    return layer


def test_a_row_that_moves_to_the_right_takes_along_what_it_may_still_give_back():
    layer = flushed()
    layer.take_back([1, 3])  # the second row moves by two columns; one of its four new tokens is left
    assert layer.firm == [0, 26] and layer.seen == 27
    with pytest.raises(CacheError, match="take back 2 tokens: in row 1 of layer 0, only the newest 1 can be removed"):
        layer.take_back([1, 2])
    assert layer.seen == 27
    layer.take_back([0, 1])
    assert layer.firm == [0, 27] and layer.seen == 27
    with pytest.raises(CacheError, match="in row 1 of layer 0, only the newest 0 can be removed"):
        layer.take_back([0, 1])
    layer = flushed()
    layer.take_back([4, 2])  # the first row moves
    assert layer.firm == [2, 24] and layer.seen == 26
    with pytest.raises(CacheError, match="in row 1 of layer 0, only the newest 2 can be removed"):
        layer.take_back([3, 3])
    layer.take_back([2, 2])
    assert layer.firm == [2, 24] and layer.seen == 24


def test_the_tail_of_a_method_that_gives_it_may_go_although_older_tokens_were_packed():
    """Unless the layer has a sliding window, which may have dropped tokens that would be seen again."""
    for window, available in ((None, 8), (100, 0)):
        layer = zoo.new_layer(load_method("kivi", quantizer="int8", residual=32))
        layer.window = window
        zoo.feed(layer, *zoo.random_kv(40))
        assert [store.signature(0) for store in layer.stores()] == [(32, 8), (8, 32)] and layer.firm == [40]
        with pytest.raises(CacheError, match=f"only the newest {available} can be removed, because the cache has"):
            layer.take_back([available + 1])
        layer.take_back([available])
        assert layer.seen == 40 - available and layer.firm == [40 - available]
        zoo.feed(layer, *zoo.random_kv(2))
        layer.take_back([2])


@pytest.mark.parametrize(
    ("name", "fields", "window", "firm"),
    [
        # after a prompt of 40 tokens, after a step, and when that has settled
        ("fp16", {}, None, [0, 0, 0]),
        ("fp16", {}, 50, [0, 0, 0]),
        ("fp16", {}, 20, [40, 40, 41]),
        ("kivi", {"quantizer": "int8", "residual": 32}, None, [40, 40, 41]),  # values are packed one by one
        ("kivi", {"quantizer": "int8", "residual": 64}, None, [0, 0, 0]),
        ("atom", {}, None, [0, 0, 0]),  # each token is packed on its own
        ("atom", {}, 9, [40, 40, 40]),  # the prompt has lost 32 tokens, the step none: they go 32 at a time
        ("streamingllm", {"budget": 30, "position": "original"}, None, [40, 40, 41]),
        ("streamingllm", {"budget": 50, "position": "original"}, None, [0, 0, 0]),
        ("streamingllm", {"budget": 30, "position": "original", "evict": "prefill"}, None, [40, 40, 40]),
    ],
)
def test_tokens_are_final_once_the_layer_has_packed_or_dropped_any(name, fields, window, firm):
    layer, marks = zoo.new_layer(load_method(name, **fields)), []
    layer.window = window
    for count in (40, 1):
        zoo.feed(layer, *zoo.random_kv(count))
        marks += layer.firm
    layer.settle()
    assert [*marks, *layer.firm] == firm
    layer.settle()  # nothing new: nothing becomes final
    assert layer.firm == firm[-1:]


def test_tokens_that_are_packed_one_by_one_are_final_once_older_ones_have_left_the_window():
    layer = zoo.new_layer(load_method("atom"))
    layer.window = 9
    zoo.feed(layer, *zoo.random_kv(20))
    zoo.feed(layer, *zoo.random_kv(19))
    layer.settle()
    assert layer.length(slice(0, 1)) == 39 and layer.firm == [0]
    zoo.feed(layer, *zoo.random_kv(1))
    layer.settle()  # 32 tokens are hidden and go
    assert layer.length(slice(0, 1)) == 8 and layer.firm == [40]


def test_a_method_that_sums_attention_up_cannot_give_back_what_has_settled():
    class Summing(FP16):
        observe_steps = True

        def settle(self, layer, rows):
            """Nothing moves, but the sums do."""

    layer = zoo.new_layer(Summing())
    zoo.feed(layer, *zoo.random_kv(6))
    zoo.feed(layer, *zoo.random_kv(2))
    assert layer.firm == [6]
    layer.take_back([2])
    with pytest.raises(CacheError, match="only the newest 0"):
        layer.take_back([1])


def test_no_more_tokens_can_go_than_there_are():
    layer = zoo.new_layer(load_method("fp16"), starts=[0, 4])
    zoo.feed(layer, *zoo.random_kv(6, batch=2))
    with pytest.raises(CacheError, match="take back 3 tokens: in row 1 of layer 0, only the newest 2 can be removed"):
        layer.take_back([3, 3])
    layer.take_back([2, 2])
    assert [layer.lengths(slice(row, row + 1)) for row in (0, 1)] == [[(4,), (4,)], [(0,), (0,)]]
