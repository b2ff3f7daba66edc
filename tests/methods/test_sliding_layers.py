"""Layers with a sliding window, without a model: what each method holds of them, to the byte and by position."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from kvbench.attention import reference
from kvbench.cache.layer import KVLayer
from kvbench.cache.progress import Progress
from kvbench.methods import load_method
from kvbench.methods.byte_parts import KVBytes, Setting
from kvbench.methods.bytes import kv_bytes
from kvbench.methods.cocktail import ChunkPlan, Plans
from kvbench.methods.streamingllm import Turning
from kvbench.retrieval.chunks import Chunked, Widths
from tests import zoo

WINDOW, PROMPT, TOKENS = 70, 90, 180
ROW = slice(0, 1)
#: method, fields
CASES: list[tuple[str, dict[str, Any]]] = [
    ("fp16", {}),
    ("kivi", {"quantizer": "int4", "residual": 32}),
    ("kivi", {"quantizer": "int4", "residual": 32, "sinks": 5}),
    ("kivi", {"quantizer": "int4", "residual": 32, "sinks": 5, "evict": True}),
    ("atom", {}),
    ("logquant", {"window": 10}),
    ("logquant", {"window": 10, "sinks": 3}),
    ("logquant", {"window": 10, "evict": True}),
    ("logquant", {"window": 30}),  # the window shows exact tokens only
    ("partial_logquant", {"window": 10, "sinks": 3}),
    ("partial_logquant", {"window": 10, "value_window": "released"}),
    ("partial_logquant", {"window": 30}),
    ("quantspec", {"gamma": 0, "group": 16}),
    ("quantspec", {"gamma": 0}),  # groups of 128: the window shows exact tokens only
    ("streamingllm", {"budget": 40}),
    ("streamingllm", {"budget": 100}),
    ("streamingllm", {"budget": 40, "position": "original"}),
    ("streamingllm", {"budget": 0.25, "evict": "prefill"}),
    ("hf_quantized", {"backend": "hqq", "bits": 4, "residual": 32, "axis_key": 1, "axis_value": 1}),
]


def method_of(name: str, fields: dict[str, Any]) -> Any:
    fields = dict(fields)
    group = fields.pop("group", None)
    method = load_method(name, **fields)
    if group:
        method.quantizer = replace(method.quantizer, key=replace(method.quantizer.key, group_size=group))
    return method


def layer_of(method: Any, window: int | None = WINDOW) -> KVLayer:
    layer = KVLayer(method, 0, Progress(), window)
    if getattr(method, "position", "") == "cache":
        layer.progress.method_state = Turning(lambda keys, by: keys)
    return layer


def lengths(layer: KVLayer) -> Any:
    """The layer after the prompt and after single tokens, settled: the number of tokens at each stop."""
    keys, values = zoo.random_kv(TOKENS, channels=64)
    zoo.feed(layer, keys[:, :, :PROMPT], values[:, :, :PROMPT])
    yield PROMPT
    for n in range(PROMPT, TOKENS):
        zoo.feed(layer, keys[:, :, n : n + 1], values[:, :, n : n + 1])
        layer.settle()
        if n % 23 == 0 or n > TOKENS - 34:  # every place within a group of 32 once
            yield n + 1


@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join([case[0], *map(str, case[1].values())]))
def test_bytes_of_a_sliding_layer_are_the_formulas(case: Any) -> None:
    method = method_of(*case)
    if case[0] == "hf_quantized":
        pytest.importorskip("hqq")
    layer, most = layer_of(method), 0
    for n in lengths(layer):
        used: dict[str, int] = {"codes": 0, "scales": 0, "window": 0, "index": 0, "state": 0}
        for segment in layer.segments():
            for part, count in segment.used(0).items():
                used[part] += count
        window = None if case[0] == "hf_quantized" else WINDOW  # which ignores it, like transformers' cache
        at = Setting(n, PROMPT, 4, 2, 64, width=4, window=window)
        assert KVBytes(**used) == method.layer_bytes(at), n
        slots = layer.length(ROW)
        most = max(most, slots)
        positions = layer.method.columns(layer, 0)
        positions = layer.positions(0) if positions is None else positions
        assert len(positions) == slots == len(positions.unique())
    if case[0] not in ("hf_quantized", "logquant", "partial_logquant"):
        # a window less one, and groups that have not left it as a whole
        assert most <= WINDOW - 1 + 32 + getattr(method, "sinks", 0)


def test_layers_of_a_model_are_billed_with_their_own_windows() -> None:
    method = load_method("kivi", quantizer="int4", residual=32)
    shape = {"query_heads": 4, "heads": 2, "channels": 64, "prompt": 90}
    whole, sliding = (method.layer_bytes(Setting(260, 90, 4, 2, 64, window=window)) for window in (None, WINDOW))
    assert kv_bytes(method, 260, layers=3, windows=[WINDOW, None, WINDOW], **shape) == sliding * 2 + whole
    assert kv_bytes(method, 260, layers=3, **shape) == whole * 3 and sliding.total < whole.total


def plan(bits: list[int], size: int, first: int) -> ChunkPlan:
    return ChunkPlan(Chunked(first, size, ("",) * len(bits), "", "input"), Widths(tuple(bits), None, None))


@pytest.mark.parametrize("reorder", [True, False])
def test_cocktails_chunks_leave_when_all_of_their_tokens_are_hidden(reorder: bool) -> None:
    """Exact tokens 32 at a time; in place nothing leaves before what stands in front of it."""
    size, first, bits = 24, 5, [2, 4, 16, 2, 2, 4, 16, 4]
    method = load_method("cocktail", encoder="bm25", chunk_size=size, group_size=8, reorder=reorder)
    layer, prompt = layer_of(method), first + size * len(bits) + 30
    layer.progress.method_state = Plans([plan(bits, size, first)])
    keys, values = zoo.random_kv(TOKENS + 170, channels=64)
    keys[..., 0] = torch.arange(TOKENS + 170)
    spans = [(first + i * size, first + (i + 1) * size, width) for i, width in enumerate(bits)]
    zoo.feed(layer, keys[:, :, :prompt], values[:, :, :prompt])
    sizes = set()
    for n in range(prompt, TOKENS + 170):
        zoo.feed(layer, keys[:, :, n : n + 1], values[:, :, n : n + 1])
        layer.settle()
        seen = n + 1
        gone = (seen - (WINDOW - 1)) // 32 * 32
        split = [
            span for span in spans if span[0] < gone < span[1] and span[2] < 16
        ]  # a packed chunk that is partly seen
        if reorder:
            wanted = set(range(gone, seen)) | {t for a, b, _ in split for t in range(a, b)}
        else:
            wanted = set(range(split[0][0] if split else gone, seen))
        assert set(layer.positions(0).tolist()) == wanted, seen
        assert layer.length(ROW) == len(wanted) == layer.stores()[1].length(ROW)
        tail = layer.stores()[0].tail.view(ROW)[0, 0, :, 0].int().tolist()
        assert tail == layer.positions(0).tolist()[-len(tail) :]  # what is recorded is what is held
        sizes.add(len(wanted))
    assert len(sizes) > 40


@pytest.mark.parametrize(
    ("name", "fields"),
    [
        ("snapkv", {"budget": 40, "window": 8}),
        ("h2o", {"budget": 40, "recent": 12}),
        ("h2o", {"budget": 40, "evict": "prefill"}),
        ("h2o", {"budget": 0.5, "recent": 0.25, "group": "max", "per_query": True}),
    ],
)
def test_what_scores_have_chosen_leaves_a_sliding_window_too(name: str, fields: dict[str, Any]) -> None:
    method = load_method(name, **fields)
    layer, rng = layer_of(method), torch.Generator().manual_seed(3)
    keys, values = zoo.random_kv(TOKENS, channels=64)
    keys[..., 0] = torch.arange(TOKENS)
    queries = torch.randn(1, 4, TOKENS, 64, generator=rng)
    shown = WINDOW - 1  # the prompt's tokens that are placed
    handle, _ = layer.update(keys[:, :, :PROMPT], values[:, :, :PROMPT])
    layer.observed = torch.rand(1, 4, max(method.observe_prompt, 1), PROMPT, generator=rng)
    layer.end_chunk(*layer.extend_prompt(*handle.claim()))
    resident = sum(method.split(shown))
    assert layer.length(ROW) == resident and int(layer.positions(0).min()) >= PROMPT - shown
    for n in range(PROMPT, TOKENS):
        layer.append(*layer.update(keys[:, :, n : n + 1], values[:, :, n : n + 1])[0].claim())
        if method.observe_steps:
            reference.attend_reference(None, layer, queries[:, :, n : n + 1], None, 0.05)
        layer.settle()
        places, hidden = layer.positions(0), n + 1 - shown
        stored = layer.stores()[0].tail.view(ROW)[0, :, :, 0].int()
        assert torch.equal(stored, places.expand(2, -1).int()) and places.shape[-1] == layer.length(ROW)
        if method.observe_steps:
            assert layer.length(ROW) == sum(method.split(shown)) and int(places.min()) >= hidden
        else:
            first = places.amax(0)[0] if places.ndim > 1 else places[0]
            assert int(first) >= hidden // 32 * 32
