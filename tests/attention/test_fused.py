"""Choice of the kernel that serves a step; its output equals the reference path's."""

import re
import sys
from contextlib import nullcontext
from types import ModuleType, SimpleNamespace

import pytest
import torch

from kvbench.attention import fused, reference
from kvbench.attention.cpu import build
from kvbench.attention.logits import Logits
from kvbench.attention.phases import Format, NotServed, Part, Work, describe_part, pairs_of_row, window_of
from kvbench.attention.synthetic import groups_of
from kvbench.cache import Prompts
from kvbench.cache.progress import Options, Progress
from kvbench.cache.segments.packed import PackedSegment
from kvbench.methods import load_method
from kvbench.quantizers.windowed import WindowedQuantizer
from tests import zoo

gpu = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

#: the device of a query, as far as the choice of a kernel asks for it
GPU = SimpleNamespace(type="cuda", index=0)

SERVED = {
    "kivi int2": ("kivi", {"quantizer": "int2"}),
    "kivi int4": ("kivi", {"quantizer": "int4", "residual": 32}),
    "kivi with sinks": ("kivi", {"quantizer": "int4", "sinks": 4}),
    "kivi, keys per token": ("kivi", {"quantizer": "int2", "key_axis": "token"}),
    "atom": ("atom", {"quantizer": "int4_token"}),
    "logquant": ("logquant", {"window": 64}),
    "logquant, W 42": ("logquant", {"window": 42}),
    "logquant, W 85 in 4 bits": ("logquant", {"window": 85, "quantizer": "int4_g64"}),
    "logquant, keys per token": ("logquant", {"window": 64, "key_axis": "token"}),
    "partial_logquant": ("partial_logquant", {"window": 64}),
    "cocktail": ("cocktail", {"encoder": "bm25"}),
    "quantspec": ("quantspec", {}),
}


def test_phases_of_a_row_follow_both_stores():
    # KIVI after 300 tokens with R = 128: 256 packed keys, 172 packed values
    assert pairs_of_row([256, 44], [172, 128]) == {
        (0, 0): (0, 0, 172),
        (0, 1): (172, 0, 84),
        (1, 1): (0, 84, 44),
    }
    assert pairs_of_row([4, 0, 6], [4, 0, 6]) == {(0, 0): (0, 0, 4), (2, 2): (0, 0, 6)}
    assert pairs_of_row([0, 5], [3, 2]) == {(1, 0): (0, 0, 3), (1, 1): (3, 0, 2)}


@pytest.mark.parametrize("reason", [None, "there is no C++ compiler"])
def test_the_kernel_of_cpus_serves_where_it_is_there_and_else_the_row_says_why_not(reason, monkeypatch):
    if reason is not None:
        monkeypatch.setattr(build, "kernel_library", lambda: reason)
    elif build.missing():
        pytest.skip(build.missing())
    method = load_method("kivi", quantizer="int4")
    model = zoo.model("llama")
    ids = torch.arange(200)[None] % 90 + 3
    with nullcontext() if reason is None else pytest.warns(UserWarning, match=re.escape(reason or "")):
        cache = method.new_cache(model)
    model(ids, past_key_values=cache)
    model(ids[:, :1], past_key_values=cache)
    assert cache.path == (build.kernel_name() if reason is None else f"reference+reference (cpu: {reason})")
    assert cache.reads_packed
    method.detach(model)


class Layer:
    """The attributes of a layer that :func:`fused.plain_mask` reads."""

    def __init__(self, starts, seen):
        self.batch, self.seen, self.progress = len(starts), seen, Progress()
        self.start = starts.__getitem__


@pytest.mark.parametrize("count", [1, 4])
def test_a_mask_is_plain_when_it_hides_padding_and_the_future_alone(count):
    starts, width = [0, 3], 12
    mask = torch.ones(2, 1, count, width, dtype=torch.bool).tril(width - count)
    mask[1, ..., :3] = False
    assert fused.plain_mask(Layer(starts, width), mask, count)
    additive = torch.zeros(mask.shape).masked_fill(~mask, torch.finfo(torch.float32).min)
    assert fused.plain_mask(Layer(starts, width), additive, count)
    window = mask.clone()
    window[..., 4] = False
    assert not fused.plain_mask(Layer(starts, width), window, count)


@pytest.mark.parametrize("count", [1, 4])
def test_a_mask_is_that_of_a_sliding_window_or_it_is_not(count):
    """The answers for two windows, of which a model may have layers in turn, do not replace each other."""
    starts, width, window = [0, 3], 12, 5
    causal = torch.ones(2, 1, count, width, dtype=torch.bool).tril(width - count)
    causal[1, ..., :3] = False
    mask = causal & ~torch.ones_like(causal).tril(width - count - window)
    layer = Layer(starts, width)
    for _ in range(2):
        assert fused.plain_mask(layer, mask, count, window) and fused.plain_mask(layer, causal, count)
    assert len(layer.progress.plain_masks) == 2
    for other in (None, window - 1, window + 1):
        assert not fused.plain_mask(Layer(starts, width), mask, count, other)
    assert fused.plain_mask(Layer(starts, width), causal, count, width)  # a window that hides nothing


def test_a_mask_is_looked_at_again_when_the_rows_or_the_step_are_others():
    """The answer of a mask is remembered for the layers of a step, not for another mask or number of tokens."""
    layer, width = Layer([0], 12), 12
    plain = torch.ones(1, 1, 1, width, dtype=torch.bool)
    assert fused.plain_mask(layer, plain, 1) and fused.plain_mask(layer, plain, 1)
    hiding = plain.clone()
    hiding[..., 5] = False
    assert not fused.plain_mask(layer, hiding, 1) and fused.plain_mask(layer, plain, 1)
    layer.seen = 13  # the same tensor, changed in place for the next step
    plain[..., 2] = False
    assert not fused.plain_mask(layer, plain, 1)


@pytest.mark.parametrize(
    ("name", "settings", "count", "reason"),
    [
        ("h2o", {"budget": 40}, 1, None),
        ("h2o", {"observe_group": None}, 1, "h2o needs attention weights"),
        ("atom", {"prefill": "quantized"}, 1, None),
        ("atom", {"prefill": "quantized"}, 2, "several new tokens are packed before they attend"),
        ("kivi", {"residual": 32}, 5, None),
        ("cocktail", {"reorder": False}, 1, "segments must be read in the order of the text"),
        ("atom", {"rope": "pre"}, 1, "RoPE"),
    ],
)
def test_what_a_method_does_is_no_plain_attention(name, settings, count, reason):
    method = load_method(name, **{key: value for key, value in settings.items() if key != "observe_group"})
    if "observe_group" in settings:
        method = type("H2O", (type(method),), {"observe_group": None})()
    layer = zoo.new_layer(method)
    layer.rope = (lambda keys, positions: keys) if "rope" in settings else None
    if "reorder" in settings:
        layer.method.reading_order = lambda layer, rows: [(0, 1)]
        layer.device = torch.device("cpu")
    if reason is None:
        fused.check_plain_causal(layer, None, count)
        return
    with pytest.raises(NotServed, match=reason):
        fused.check_plain_causal(layer, None, count)


@pytest.mark.parametrize("wanted", ["auto", "triton", "reference"])
@pytest.mark.parametrize("logits", [Logits(), Logits(5.0), Logits(None, torch.zeros(4))], ids=["plain", "cap", "sinks"])
def test_exact_stores_are_left_to_sdpa_where_sdpa_serves_them(logits, wanted, monkeypatch):
    """As a GPU is asked: SDPA has neither caps nor sinks."""
    layer = zoo.new_layer(load_method("fp16"))
    zoo.feed(layer, *(x.half() for x in zoo.random_kv(20)))
    seen = []
    kernel = SimpleNamespace(attend=lambda query, work, scaling: seen.append(work.logits))
    monkeypatch.setattr(fused, "pick", lambda query, described, wanted: ("triton", kernel))
    monkeypatch.setattr(torch.cuda, "device_of", lambda query: nullcontext())
    query = SimpleNamespace(device=GPU, shape=(1, 4, 1, 32))
    layer.progress.options = Options(kernels=wanted)
    fused.attend_fused(layer, query, None, 0.2, logits)
    assert seen == ([] if wanted == "reference" or (wanted == "auto" and logits.plain) else [logits])


def test_the_reason_is_said_when_no_kernel_is_left():
    query = SimpleNamespace(device=GPU, dtype=torch.float32, shape=(1, 1, 1, 8), is_cuda=False)
    with pytest.raises(NotServed, match=r"cuda: .*; triton: "):
        fused.pick(query, _nothing(), "auto")
    with pytest.raises(NotServed, match=r"^cpu: heads of 8 channels"):
        fused.pick(torch.zeros(1, 1, 1, 8), _nothing(), "auto")


@pytest.mark.parametrize(
    ("window", "most", "said"),
    [
        (600, 512, "600 tokens in groups of 300"),
        (256, 256, "groups of 256"),
        (2048 + 32, 64, "windows of 2080"),
        (10, 64, "groups of 10 tokens"),
    ],
)
def test_windows_that_a_kernel_has_no_number_for_are_refused(window, most, said):
    """A group of 300 would be taken for one of 44 in windows of 601."""
    with pytest.raises(NotServed, match=said):
        window_of(WindowedQuantizer(2, window, most))
    assert window_of(WindowedQuantizer(2, 510, 255)) == 510
    assert window_of(WindowedQuantizer(2, 2047, 64)) == 2047


@pytest.mark.parametrize("window", [16, 42, 43, 85, 96, 128, 129, 200, 510])
def test_full_buffers_have_parameters_of_a_group_behind_the_last_one(window):
    """Kernels read those of the next group too, also in the last tile; used bytes count none of it."""
    quantizer = WindowedQuantizer(2, window, 48)
    for tokens in (0, 1, window, 128, 500):
        segment = PackedSegment(1, 2, 64, torch.float16, "cpu", quantizer=quantizer, side="key", capacity=tokens)
        last = groups_of(describe_part(segment, 64).format, torch.tensor([max(segment.capacity - 1, 0)]))
        assert all(param.shape[2] >= last.item() + 2 for param in segment.params)
    segment.append(slice(None), torch.randn(1, 2, 2 * window, 64).half())
    assert segment.used(0)["scales"] == 2 * 2 * (2 * quantizer.groups) * 64 * 2


def test_a_mask_that_hides_more_is_a_reason():
    layer = zoo.new_layer(load_method("fp16"))
    zoo.feed(layer, *zoo.random_kv(6))
    mask = torch.ones(1, 1, 2, 6, dtype=torch.bool).tril(4)
    fused.check_plain_causal(layer, mask, 2)
    hiding = mask.clone()
    hiding[..., 2] = False
    with pytest.raises(NotServed, match="the mask hides more than padding"):
        fused.check_plain_causal(layer, hiding, 2)


def test_kernels_are_tried_in_their_order_and_only_those_that_are_wanted(monkeypatch):
    modules = {name: ModuleType(name) for name in ("cuda", "triton", "cpu")}
    refusals, asked, query = {}, [], SimpleNamespace(device=GPU)
    for name, module in modules.items():
        module.refuses = lambda query, work, name=name: refusals[name]
    monkeypatch.setattr(fused, "load_kernel", lambda name: asked.append(name) or modules[name])
    for reasons, wanted, served, tried in (
        ({"cuda": None, "triton": None}, "auto", "cuda", ["cuda"]),
        ({"cuda": "no", "triton": None}, "auto", "triton", ["cuda", "triton"]),
        ({"cuda": None, "triton": None}, "triton", "triton", ["triton"]),
        ({"cuda": None, "triton": "no"}, "cuda", "cuda", ["cuda"]),
        ({"cuda": "small", "triton": "wide"}, "auto", "cuda: small; triton: wide", ["cuda", "triton"]),
        ({"cuda": "small", "triton": None}, "cuda", "cuda: small", ["cuda"]),
    ):
        asked.clear()
        refusals.update(reasons)
        if ":" in served:
            with pytest.raises(NotServed, match=f"^{served}$"):
                fused.pick(query, _nothing(), wanted)
        else:
            assert fused.pick(query, _nothing(), wanted) == (served, modules[served])
        assert asked == tried
    asked.clear()
    refusals["cpu"] = None
    assert fused.pick(torch.zeros(1), _nothing(), "auto")[0] == "cpu" and asked == ["cpu"]


@pytest.mark.parametrize("name", ["cuda", "triton"])
def test_a_kernel_that_cannot_be_imported_says_why(name, monkeypatch):
    package = f"kvbench.attention.{name}"
    monkeypatch.setitem(sys.modules, package, None)
    assert fused.load_kernel(name) == f"{package} is not installed"
    monkeypatch.setitem(sys.modules, package, ModuleType(package))
    monkeypatch.delitem(sys.modules, f"{package}.decode", raising=False)
    assert str(fused.load_kernel(name)).startswith("cannot import name 'decode'")
    with pytest.raises(NotServed, match=f"^{name}: cannot import name 'decode'"):
        fused.pick(torch.zeros(1, 1, 1, 8), _nothing(), name)


def test_a_row_names_the_kernel_and_whether_it_read_codes(monkeypatch):
    """Codes of keys or of values alone are codes; a refused step names the reason, and its output is None."""
    full, packed = Part(Format("full", 16)), Part(Format("affine", 4, "token", 64))
    for pairs, wanted in (
        ([(full, full)], {"mine"}),
        ([(full, full), (packed, full)], {"mine", "packed"}),
        ([(full, packed)], {"mine", "packed"}),
    ):
        described = Work(pairs, torch.zeros(1, len(pairs), 3), [[(0, 0, 0)] * len(pairs)], 1, 8, 8)
        assert fused.label("mine", described) == wanted
    layer = zoo.new_layer(load_method("fp16"))
    zoo.feed(layer, *zoo.random_kv(6))
    layer.progress.options = Options(kernels="triton")
    assert fused.attend_fused(layer, torch.zeros(1, 4, 1, 32), None, 0.2) is None
    assert layer.paths == {"reference (triton: queries in float32)"}
    layer.progress.options = Options(kernels="reference")
    layer.paths.clear()
    assert fused.attend_fused(layer, torch.zeros(1, 4, 1, 32), None, 0.2) is None and not layer.paths


def _nothing():
    return Work([], torch.zeros(1, 0, 3, dtype=torch.int32), [[]], 1, 8, 8)


def errors(name, kernels, count, dtype, lengths, monkeypatch):
    """Relative errors of a kernel's outputs, by layer and step, against the reference path on the same stores."""
    method_name, options = SERVED[name]
    method = load_method(method_name, **options)
    model = zoo.model("llama", dtype).cuda()
    ids, mask = zoo.padded_batch(lengths)
    ids, mask = ids.cuda(), mask.cuda()
    found, real = [], fused.attend_fused

    def both(layer, query, mask, scaling, logits):
        out = real(layer, query, mask, scaling, logits)
        assert out is not None, layer.paths
        expected = reference.attend_reference(None, layer, query.float(), mask, scaling, logits)
        found.append(float((out - expected).norm() / expected.norm()))
        return out

    monkeypatch.setattr(fused, "attend_fused", both)
    try:
        prompts = Prompts.from_batch(ids, mask, decode=lambda row: " ".join(map(str, row)))
        cache = method.new_cache(model, prompts)
        cache.options = Options(kernels=kernels)
        with torch.no_grad():
            model(ids, attention_mask=mask, past_key_values=cache)
            for step in range(6):
                new = (ids[:, -count:] * 7 + step) % 90 + 3
                mask = torch.cat([mask, torch.ones_like(new)], 1)
                model(new, attention_mask=mask, past_key_values=cache)
        return found
    finally:
        method.detach(model)


@pytest.mark.parametrize("kernels", ["cuda", "triton"])
@pytest.mark.parametrize("count", [1, 5])
@pytest.mark.parametrize("name", SERVED)
class TestOnAGpu:
    pytestmark = gpu

    def test_a_kernel_gives_what_the_reference_path_gives(self, name, count, kernels, monkeypatch):
        if name == "cocktail":
            pytest.importorskip("bm25s")
        for dtype, lengths in ((torch.bfloat16, [700]), (torch.float16, [431, 620, 431])):
            found = errors(name, kernels, count, dtype, lengths, monkeypatch)
            assert len(found) == 12
            assert max(found) < 3e-3


@pytest.mark.parametrize(
    ("name", "options", "model", "compiles"),
    [
        ("fp16", {}, "llama", False),
        ("streamingllm", {"budget": 64}, "llama", False),
        ("snapkv", {"budget": 64}, "llama", False),
        ("h2o", {"budget": 64}, "llama", False),
        ("keep", {"quantizer": "none"}, "llama", False),
        ("kivi", {"evict": True}, "llama", False),
        ("kivi", {}, "llama", True),
        ("keep", {"quantizer": "int4"}, "llama", True),
        ("fp16", {}, "gemma2", True),
        ("fp16", {}, "gpt_oss", True),
    ],
)
def test_the_kernel_of_a_cpu_is_compiled_where_it_may_serve(name, options, model, compiles, monkeypatch):
    calls = []
    monkeypatch.setattr(fused, "prepare", lambda: calls.append("compiled"))
    method, made = load_method(name, **options), zoo.model(model)
    method.new_cache(made)
    method.detach(made)  # other tests get the same model
    assert calls == ["compiled"] * compiles
