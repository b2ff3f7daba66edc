"""Layers with a sliding window, compared with stock transformers: stored tokens, and unchanged answers."""

from dataclasses import replace
from functools import cache as memo

import pytest
import torch
from transformers import (
    DynamicCache,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
)

from kvbench.attention.register import detach
from kvbench.cache import KVCache, Prompts
from kvbench.cache.progress import Options
from kvbench.decoding import generate
from kvbench.errors import CacheError
from kvbench.methods import Method, load_method
from kvbench.methods.bytes import kv_bytes
from tests import zoo
from tests.marks import fast, first_of_each

WINDOW = 50
#: two layers that slide, and one between them that does not
GEMMA = ["sliding_attention", "full_attention", "sliding_attention"]
SHAPE = {"query_heads": 4, "heads": 2, "channels": 32}


@memo
def model(name: str = "gemma3") -> PreTrainedModel:
    """Random models: like Gemma 3 (some layers slide), like Mistral (all do)."""
    numbers = {
        "vocab_size": zoo.VOCABULARY,
        "hidden_size": 64,
        "intermediate_size": 64,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "sliding_window": WINDOW,
        "max_position_embeddings": 1024,
        "pad_token_id": 0,
        "initializer_range": 0.2,
    }
    torch.manual_seed(0)
    if name == "gemma3":
        return Gemma3ForCausalLM(Gemma3TextConfig(**numbers, num_hidden_layers=3, layer_types=GEMMA)).eval()
    return MistralForCausalLM(MistralConfig(**numbers, num_hidden_layers=2)).eval()


@pytest.fixture(autouse=True)
def detached():
    """A test that fails must not leave its attention to the next one."""
    yield
    for name in ("gemma3", "mistral"):
        detach(model(name))


def windows(name: str) -> list[int | None]:
    return [WINDOW, None, WINDOW] if name == "gemma3" else [WINDOW, WINDOW]


def ids(count: int, seed: int = 0, batch: int = 1) -> torch.Tensor:
    return torch.randint(3, zoo.VOCABULARY, (batch, count), generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
def fed(name: str, cache, sizes: list[int], seed: int = 0) -> torch.Tensor:
    """Logits of a text that comes in parts."""
    text, outs, first = ids(sum(sizes), seed), [], 0
    for size in sizes:
        part = text[:, first : first + size]
        outs.append(model(name)(input_ids=part, past_key_values=cache, use_cache=True).logits)
        first += size
    return torch.cat(outs, 1)


def fresh(method: Method, name: str, prompt: int, *, windowless: bool = False) -> KVCache:
    """A cache; `windowless`: of before, which held every token of every layer."""
    prompts = Prompts.from_batch(
        ids(prompt), context_spans=[(3, prompt - 5)], queries=["3 4 5"], decode=lambda row: " ".join(map(str, row))
    )
    cache = method.new_cache(model(name), prompts if method.needs_prompts else None)
    if windowless:
        for layer in cache.layers:
            layer.window = None
    return cache


def stock_bytes(cache: DynamicCache) -> int:
    return sum(x.numel() * 2 for layer in cache.layers for x in (layer.keys, layer.values))


@pytest.mark.parametrize("name", ["gemma3", "mistral"])
@pytest.mark.parametrize("sizes", [[20, 1, 1], [49, 1, 1], [50, 1], [51, 1], [120, 1, 1, 7, 1], [10, 90, 1, 60, 1]])
def test_fp16_holds_and_answers_what_stock_does(name, sizes):
    stock, method = DynamicCache(config=model(name).config), load_method("fp16")
    cache = method.new_cache(model(name))
    ours = fed(name, cache, sizes)
    method.detach(model(name))
    torch.testing.assert_close(ours, fed(name, stock, sizes), rtol=1e-4, atol=1e-4)
    bill, held = cache.bill(), stock_bytes(stock)
    assert (bill.used.window, bill.used.total, bill.fp16_equivalent) == (2 * held, 2 * held, held)  # fp32 here
    layer = cache.layers[0]
    assert layer.positions(0).tolist() == list(range(max(0, sum(sizes) - WINDOW + 1), sum(sizes)))
    # buffers: the window and a named slack, whatever the text
    for layer, window in zip(cache.layers, windows(name), strict=True):
        if window:
            assert layer.stores()[0].tail.capacity <= max(window - 1 + 96, max(sizes) + window) * 1.5


def test_buffers_of_a_long_text_are_no_longer_than_the_window():
    method = load_method("fp16")
    cache = method.new_cache(model("gemma3"), max_length=700)
    fed("gemma3", cache, [600, *[1] * 12])
    method.detach(model("gemma3"))
    assert [layer.stores()[0].tail.capacity for layer in cache.layers] == [WINDOW - 1 + 96, 700, WINDOW - 1 + 96]


#: methods whose rule is that of the whole text: only what is hidden is dropped, so no answer may change
WHOLE = [
    ("kivi", "int2", {"residual": 32}),
    ("kivi", "int4", {"residual": 64, "sinks": 5}),
    ("kivi", "int4", {"residual": 32, "key_axis": "token"}),
    ("kivi", "int2", {"residual": 32, "evict": True, "sinks": 2}),
    ("atom", None, {}),
    ("atom", None, {"prefill": "quantized"}),
    ("logquant", "int2", {"window": 10}),
    ("logquant", "int4", {"window": 8, "sinks": 2, "key_axis": "token"}),
    ("logquant", "int4", {"window": 8, "evict": True}),
    ("partial_logquant", "int2", {"window": 10}),
    ("partial_logquant", "int4", {"window": 12, "value_window": "released", "sinks": 1}),
    ("quantspec", None, {"gamma": 0}),
    ("quantspec", "G32", {"gamma": 0}),
    ("quantspec", None, {"target": "fp16", "draft": "kivi", "draft_options": {"residual": 32, "quantizer": "int4"}}),
    ("cocktail", None, {"encoder": "bm25", "chunk_size": 16, "split": (20, 30, 50)}),
    ("cocktail", None, {"encoder": "bm25", "chunk_size": 8, "split": (20, 30, 50), "reorder": False}),
]
#: methods that choose among the tokens that are seen
SHOWN = [
    ("streamingllm", None, {"budget": 40, "position": "original"}),
    ("streamingllm", None, {"budget": 0.5, "position": "original", "evict": "prefill"}),
    ("snapkv", None, {"budget": 40}),
    ("h2o", None, {}),
    ("h2o", None, {"budget": 30, "recent": 10, "per_query": True}),
    ("h2o", None, {"evict": "prefill"}),
    ("logquant", "int2", {"window": 42}),
    ("partial_logquant", "int2", {"window": 42}),
]
#: a prompt, steps of one token and of several
SIZES = [130, 1, 1, 5, 1, 1, 16, 1, 30, 1, 1, 20, 1]


def made(name: str, quantizer: str | None, fields: dict) -> Method:
    """A method; ``G32``: QuantSpec with groups of 32 keys."""
    method = load_method(name, quantizer=None if quantizer == "G32" else quantizer, **fields)
    if quantizer == "G32":
        method.quantizer = replace(method.quantizer, key=replace(method.quantizer.key, group_size=32))
    return method


def case_id(case) -> str:
    return "-".join([case[0], *map(str, case[2].values())])[:60]


def formula(method: Method, name: str, tokens: int, prompt: int):
    """Return the bytes that :func:`kv_bytes` predicts for a model in fp32."""
    return kv_bytes(method, tokens, prompt=prompt, width=4, layers=len(windows(name)), windows=windows(name), **SHAPE)


@pytest.mark.parametrize("case", WHOLE, ids=case_id)
def test_what_is_hidden_goes_and_no_answer_changes(case):
    method = made(*case)
    if case[0] == "cocktail":
        pytest.importorskip("bm25s")
    cache, whole = (fresh(method, "gemma3", SIZES[0], windowless=windowless) for windowless in (False, True))
    # another order of sums turns a code here and there, so both take the path that sums alike
    cache.options = whole.options = Options(kernels="reference")
    torch.testing.assert_close(fed("gemma3", cache, SIZES), fed("gemma3", whole, SIZES), rtol=1e-4, atol=2e-4)
    method.detach(model("gemma3"))
    used, total = cache.bill().used, sum(SIZES)
    if case[0] != "cocktail" and len(cache.layers[0].chain()) == 1:  # which chunks are seen depends on the text
        assert vars(used) == vars(formula(method, "gemma3", total, SIZES[0]))
    before = whole.bill().used.total
    assert used.total < before or (case[0] == "logquant" and case[2].get("evict") and used.total == before)
    # beside what stock holds: the rest of a group, or exact tokens that the log rule goes on to hold
    slack = {"logquant": 3 * 10 + 12, "partial_logquant": 3 * 12 + 12, "kivi": 32, "atom": 32}.get(case[0], 32)
    for layer in (cache.layers[0], cache.layers[2]):
        assert WINDOW - 1 - (20 if method.__dict__.get("evict") else 0) <= layer.length(slice(0, 1)) + 16
        assert layer.length(slice(0, 1)) <= WINDOW - 1 + slack
    assert cache.bill().fp16_equivalent == 2 * 2 * 2 * 32 * (2 * (WINDOW - 1) + total)


@pytest.mark.parametrize("case", SHOWN, ids=case_id)
def test_methods_that_choose_among_what_is_seen_hold_what_the_formula_says(case):
    method = made(*case)
    for name, sizes in (("gemma3", SIZES), ("mistral", [40, 1, 1, 9, *[1] * 12])):
        cache = fresh(method, name, sizes[0])
        fed(name, cache, sizes)
        method.detach(model(name))
        used, most = cache.bill().used, formula(method, name, sum(sizes), sizes[0])
        if case[0] in ("snapkv", "h2o") and case[2].get("evict", "") != "steps" and "recent" not in case[2]:
            assert used.window <= most.window + 31 * 2 * 2 * 2 * 32 * 4  # 32 positions at a time
        if case[0] != "snapkv" and case[2].get("evict") != "prefill":
            assert vars(used) == vars(most)
        for layer, window in zip(cache.layers, windows(name), strict=True):
            if window:
                assert layer.length(slice(0, 1)) <= window - 1 + 31


@pytest.mark.parametrize(
    ("name", "fields"),
    [
        ("snapkv", {"budget": 500}),
        ("h2o", {"budget": 500}),
        ("h2o", {"budget": 500, "evict": "prefill"}),
        ("streamingllm", {"budget": 500, "position": "original"}),
        ("streamingllm", {"budget": 500, "position": "original", "evict": "prefill"}),
        ("streamingllm", {"budget": 500, "sinks": 0}),
        ("logquant", {"window": 170, "quantizer": "int2"}),
        ("quantspec", {"gamma": 0, "target": "fp16"}),
    ],
)
@pytest.mark.parametrize("sizes", [[40, *[1] * 20, 9, 1], [130, 1, 1, 30, 1]])
def test_budgets_that_hold_a_whole_window_answer_as_stock_does(name, fields, sizes):
    method, stock = load_method(name, **fields), DynamicCache(config=model("mistral").config)
    cache = fresh(method, "mistral", sizes[0])
    torch.testing.assert_close(fed("mistral", cache, sizes), fed("mistral", stock, sizes), rtol=1e-4, atol=1e-4)
    method.detach(model("mistral"))
    sinks = 4 if fields.get("position") else 0
    assert cache.bill().used.window <= 2 * stock_bytes(stock) * (WINDOW - 1 + sinks) / (WINDOW - 1)


EVERY = [*WHOLE, *SHOWN, ("fp16", None, {}), ("streamingllm", None, {"budget": 30})]


@pytest.mark.parametrize("case", fast(EVERY, first_of_each(EVERY), single=True), ids=case_id)
def test_rejected_tokens_are_taken_back_across_the_edge_of_the_window(case):
    """Drafts are fed and taken back at every step, the whole step or part of it, while the window begins to slide."""
    if case[0] == "cocktail":
        pytest.importorskip("bm25s")
    prompt, name = 44, "mistral" if case[0] == "streamingllm" else "gemma3"
    method, tokens = made(*case), ids(24, seed=5)

    @torch.no_grad()
    def run(reject: int) -> tuple[torch.Tensor, dict]:
        cache, outs = fresh(method, name, prompt), []
        fed(name, cache, [prompt])
        for step in range(0, 24, 2):
            new = tokens[:, step : step + 2]
            if reject:
                if step % 4:
                    model(name)(input_ids=ids(reject, seed=step), past_key_values=cache, use_cache=True)
                    cache.crop(-reject)
                new = torch.cat([new, ids(reject, seed=step)], 1)
            outs.append(model(name)(input_ids=new, past_key_values=cache, use_cache=True).logits[:, :2])
            if reject:
                cache.crop(-reject)
        return torch.cat(outs, 1), vars(cache.bill().used)

    (plain, bill), (rolled, rolled_bill) = run(0), run(9)
    method.detach(model(name))
    torch.testing.assert_close(rolled, plain, rtol=1e-4, atol=2e-4)
    assert rolled_bill == bill


def test_a_window_that_has_moved_on_cannot_be_taken_back():
    method = load_method("fp16")
    cache = method.new_cache(model("gemma3"))
    fed("gemma3", cache, [60, 3, 2])
    with pytest.raises(
        CacheError, match="cannot take back 3 tokens: in row 0 of layer 0, only the newest 2 can be removed"
    ):
        cache.crop(-3)
    cache.crop(-2)
    short = method.new_cache(model("gemma3"))
    fed("gemma3", short, [30, 3, 2])
    short.crop(-20)  # nothing was hidden yet
    method.detach(model("gemma3"))
    assert short.get_seq_length() == 15


@pytest.mark.parametrize("case", fast(EVERY, first_of_each(EVERY), single=True), ids=case_id)
def test_chunks_rows_and_beams(case):
    """Padded rows whose prompts come in chunks, and then change places, answer as each row alone in one piece."""
    if case[0] == "cocktail":
        pytest.importorskip("bm25s")
    name = "mistral" if case[0] == "streamingllm" else "gemma3"
    method, lengths = made(*case), [70, 96, 41]
    batch, mask = zoo.padded_batch(lengths, seed=3)

    def told(rows: torch.Tensor, real: torch.Tensor | None) -> KVCache:
        return method.new_cache(model(name), Prompts.from_batch(rows, real, decode=lambda row: " ".join(map(str, row))))

    together = told(batch, mask)
    out = generate(model(name), together, batch, mask, max_new_tokens=14, prefill_chunk=40)
    for row, length in enumerate(lengths):
        alone = told(batch[row : row + 1, -length:], None)
        one = generate(model(name), alone, batch[row : row + 1, -length:], None, max_new_tokens=14)
        assert one.tokens[0] == out.tokens[row]
        assert alone.bill().used == together.bill(row).used
    order = torch.tensor([2, 0, 0])
    twin, width = together.clone(), together.get_seq_length()
    twin.reorder_cache(order)
    tokens = torch.tensor([[5], [6], [7]])
    longer = torch.nn.functional.pad(mask, (0, width + 1 - mask.shape[1]), value=1)
    with torch.no_grad():
        first, second = (
            model(name)(
                input_ids=tokens[index],
                attention_mask=longer[index],
                position_ids=longer[index].sum(-1, keepdim=True) - 1,
                past_key_values=cache,
                use_cache=True,
            ).logits
            for cache, index in ((twin, order), (together, torch.arange(3)))
        )
    method.detach(model(name))
    torch.testing.assert_close(first, second[order], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("fields", [{"outliers": 0.0, "first_tokens": 3}, {"outliers": 0.05}, {"prefill": "quantized"}])
def test_kvquant_drops_blocks_of_its_outliers(fields):
    mistral = zoo.model("mistral")  # a window of 40
    method = load_method("kvquant", calibration=zoo.calibrations("llama"), **{"outliers": 0.05, **fields})
    text, outs = zoo.padded_batch([420], seed=2)[0], []
    with torch.no_grad():
        for windowless in (False, True):
            cache = method.new_cache(mistral)
            for layer in cache.layers if windowless else ():
                layer.window = None
            parts = text.split([300, 1, 1, 90, *[1] * 28], 1)
            outs.append(
                torch.cat([mistral(input_ids=part, past_key_values=cache, use_cache=True).logits for part in parts], 1)
            )
            if not windowless:
                lengths = {layer.length(slice(0, 1)) for layer in cache.layers if not layer.settle()}
                used = cache.bill().used
    method.detach(mistral)
    torch.testing.assert_close(*outs, rtol=1e-4, atol=2e-4)
    unit = 128 if method.outliers else 32
    first = method.first_tokens
    assert lengths == {420 - first - (420 - 39 - first) // unit * unit}
    stored = kv_bytes(method, 420, layers=2, query_heads=4, heads=2, channels=64, width=4, prompt=300, windows=[40, 40])
    assert (used.codes, used.scales) == (stored.codes, stored.scales)
    assert used.index == pytest.approx(stored.index, rel=0.5, abs=0)


def test_a_quantized_cache_of_transformers_knows_no_window():
    pytest.importorskip("hqq")
    method = load_method("hf_quantized", backend="hqq", bits=4, residual=32, group_size=32, axis_key=1, axis_value=1)
    cache = method.new_cache(model("gemma3"))
    fed("gemma3", cache, [80, 1])
    method.detach(model("gemma3"))
    assert {layer.length(slice(0, 1)) for layer in cache.layers} == {81}


def test_a_method_from_outside_keeps_everything_and_sees_the_window():
    """:meth:`Method.forgotten` says nothing by default: what a method does not know of cannot break it."""
    from kvbench.methods.fp16 import FP16

    class Outside(FP16):
        forgotten = Method.forgotten

    stock, method, sizes = DynamicCache(config=model("gemma3").config), Outside(), [60, 1, 9, 1]
    cache = method.new_cache(model("gemma3"))
    ours = fed("gemma3", cache, sizes)
    method.detach(model("gemma3"))
    torch.testing.assert_close(ours, fed("gemma3", stock, sizes), rtol=1e-4, atol=1e-4)
    assert {layer.length(slice(0, 1)) for layer in cache.layers} == {71}
