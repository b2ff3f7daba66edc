"""Attention that also tells what tokens receive: the kernels, run by Triton's interpreter, against plain softmax."""

import sys
from types import SimpleNamespace

import pytest
import torch

from tests.attention import interpreter

interpreter.require()

from kvbench.attention import fused  # noqa: E402
from kvbench.attention.logits import Logits  # noqa: E402
from kvbench.attention.phases import NotServed, Received  # noqa: E402
from kvbench.attention.synthetic import FULL, Piece, layer  # noqa: E402
from kvbench.attention.triton import decode as triton_decode  # noqa: E402
from kvbench.attention.triton import observed  # noqa: E402
from kvbench.cache.progress import Options  # noqa: E402
from kvbench.methods import load_method  # noqa: E402
from tests import zoo  # noqa: E402

LENGTHS = (150, 33)


def work(group: int, count: int, scores: int, mean: bool, dtype: torch.dtype, channels: int = 64):
    """A layer of two rows in full precision, a query, and room for the attention, filled with -1."""
    made = layer(
        [Piece(FULL, LENGTHS)],
        [Piece(FULL, LENGTHS)],
        heads=2,
        key_dim=channels,
        value_dim=channels,
        dtype=dtype,
        device="cpu",
        seed=0,
    )
    made.received = Received(torch.full((2, 2, scores, count, 160), -1.0), mean)
    rng = torch.Generator().manual_seed(1)
    return made, (torch.randn(2, count, 2 * group, channels, generator=rng) * 1.5).to(dtype).transpose(1, 2)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(
    ("group", "count", "scores", "mean"),
    [(1, 1, 1, True), (1, 3, 1, True), (4, 1, 1, True), (2, 3, 1, False), (2, 2, 2, True), (3, 1, 3, True)],
)
def test_output_and_attention_are_those_of_a_softmax(dtype, group, count, scores, mean):
    made, query = work(group, count, scores, mean, dtype)
    assert observed.refuses(query, made) is None
    out = observed.attend(query, made, 0.2)
    key, value = (part.buffer for part in made.phases[0])
    for row, length in enumerate(LENGTHS):
        first_k, first_v, _ = made.counts[row][0]
        keys, values = key[row, :, None, first_k : first_k + length], value[row, :, None, first_v : first_v + length]
        products = query[row].unflatten(0, (2, group)).float() @ keys.float().transpose(-1, -2) * 0.2
        visible = torch.ones(count, length, dtype=torch.bool).tril(length - count)
        weights = products.masked_fill(~visible, -torch.inf).softmax(-1)
        wanted = (weights @ values.float()).flatten(0, 1).transpose(0, 1)
        torch.testing.assert_close(out[row].float(), wanted, rtol=1e-2, atol=1e-2)
        room = made.received.buffer[row]
        received = weights if scores > 1 else weights.mean(1, keepdim=True) if mean else weights.sum(1, keepdim=True)
        torch.testing.assert_close(room[..., :length], received, rtol=1e-4, atol=1e-6)
        assert (room[..., length:] == -1).all()


def test_what_they_cannot_serve_is_named():
    made, query = work(1, 1, 1, True, torch.float16)
    assert observed.refuses(query.to(torch.bfloat16), made) == "queries in bfloat16, but keys in float16"
    made.logits = Logits(5.0)
    assert observed.refuses(query, made) == "observed attention with a softcap or sinks"
    many, query = work(4, 9, 1, True, torch.float16)
    assert observed.refuses(query, many) == "4 query heads a KV head x 9 tokens of observed attention"
    narrow, query = work(1, 1, 1, True, torch.float16, channels=32)
    assert observed.refuses(query, narrow) == "heads of 32 channels"
    with pytest.raises(NotServed, match="cuda: it does not return attention weights"):
        fused.pick(query, narrow, "cuda")


def test_h2o_is_served_and_drops_what_the_reference_path_drops():
    """Token by token through the method: scores, places and outputs."""
    method = load_method("h2o", budget=40, recent=10)
    keys, values = (x.half() for x in zoo.random_kv(90, channels=64))
    queries = torch.randn(1, 4, 90, keys.shape[-1], generator=torch.Generator().manual_seed(2)).half()
    layers = []
    for kernels in ("triton", "reference"):
        made = zoo.new_layer(method)
        made.progress.options = Options(kernels=kernels)
        made.observed = torch.rand(1, 4, 1, 60, generator=torch.Generator().manual_seed(3))
        zoo.feed(made, keys[:, :, :60], values[:, :, :60])
        for n in range(60, 90):
            made.append(*made.update(keys[:, :, n : n + 1], values[:, :, n : n + 1])[0].claim())
            query = queries[:, :, n : n + 1]
            out = fused.attend_fused(made, query, None, 0.1)
            if kernels == "reference":
                from kvbench.attention import reference

                assert out is None
                reference.attend_reference(None, made, query, None, 0.1)
        made.settle()
        layers.append(made)
    served, plain = layers
    assert served.paths == {"triton"} and plain.paths == {"reference"}
    assert torch.equal(served.positions(0), plain.positions(0))
    scores = [made.stores()[0].tail.scores.view(slice(None)) for made in layers]
    torch.testing.assert_close(*scores, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("name", ["kivi", "h2o"])
def test_only_attention_that_a_method_observes_is_kept(name):
    """H2O gets that of its step from the kernel, in slot order; KIVI none."""
    made = zoo.new_layer(load_method(name, **({"budget": 60, "recent": 10} if name == "h2o" else {})))
    made.progress.options = Options(kernels="triton")
    keys, values = (x.half() for x in zoo.random_kv(41, channels=64))
    made.observed = torch.rand(1, 4, 1, 40, generator=torch.Generator().manual_seed(3)) if name == "h2o" else None
    zoo.feed(made, keys[:, :, :40], values[:, :, :40])
    made.append(*made.update(keys[:, :, 40:], values[:, :, 40:])[0].claim())
    query = torch.randn(1, 4, 1, 64, generator=torch.Generator().manual_seed(2)).half()
    out = fused.attend_fused(made, query, None, 0.1)
    weights = (query.float() @ keys.float().repeat_interleave(2, 1).transpose(-1, -2) * 0.1).softmax(-1)
    wanted = (weights @ values.float().repeat_interleave(2, 1)).transpose(1, 2)
    torch.testing.assert_close(out.float(), wanted, rtol=2e-3, atol=2e-3)
    pending = getattr(made.stores()[0].tail, "pending", None)
    assert pending is None if name == "kivi" else [len(steps) for steps in pending] == [1]
    if name == "h2o":
        torch.testing.assert_close(pending[0][0].sum(-1).mean().item(), 1.0, rtol=1e-3, atol=1e-3)


def test_tokens_are_shared_by_as_many_programs_as_fill_the_gpu_once(monkeypatch):
    """132 multiprocessors with 4 programs each; a program has two blocks of 32 tokens at least."""
    about = SimpleNamespace(multi_processor_count=132)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: about)
    for cells, width, wanted in (
        (1, 10**6, 528),
        (8, 10**6, 66),
        (8, 640, 10),
        (8, 641, 11),
        (1000, 640, 1),
        (1, 1, 1),
    ):
        assert observed.observed_split(torch.device("cuda"), cells, width, observed.LAUNCH) == wanted


def test_observed_attention_is_refused_for_what_the_kernels_do_not_do(monkeypatch):
    made, query = work(4, 8, 1, True, torch.float16)
    assert observed.refuses(query, made) is None  # 32 rows
    assert "5 query heads a KV head x 8 tokens" in observed.refuses(work(5, 8, 1, True, torch.float16)[1], made)
    assert "16 query heads a KV head x 3 tokens" in observed.refuses(work(16, 3, 1, True, torch.float16)[1], made)
    made.logits = Logits(2.0)
    assert "softcap or sinks" in observed.refuses(query, made)
    made.logits = Logits(None, torch.zeros(8))
    assert "softcap or sinks" in observed.refuses(query, made)
    made.logits = Logits()
    made.phases = made.phases * 2
    assert "packed tokens" in observed.refuses(query, made)
    monkeypatch.setattr(triton_decode, "INTERPRETED", False)
    assert observed.refuses(query, made) == "tensors on cpu"
    assert fused.observing("cuda") == "it does not return attention weights" and fused.observing("triton") is observed


def test_the_module_of_a_kernel_is_imported_by_name_or_what_is_missing_is_said(monkeypatch):
    from kvbench.attention.codebook import decode as looked_up
    from kvbench.attention.cpu import decode as cpu_decode
    from kvbench.attention.cuda import decode as cuda_decode

    modules = {"cuda": cuda_decode, "triton": triton_decode, "codebook": looked_up, "cpu": cpu_decode}
    assert {name: fused.load_kernel(name) for name in modules} == modules
    import kvbench.attention.triton as package

    monkeypatch.delattr(package, "decode")
    monkeypatch.setitem(sys.modules, "kvbench.attention.triton.decode", None)
    said = "kvbench.attention.triton.decode is not installed"
    assert fused.load_kernel("triton") == said == fused.observing("triton")
    made, query = work(1, 1, 1, True, torch.float16)
    with pytest.raises(NotServed, match=f"^cuda: it does not return attention weights; triton: {said}$"):
        fused.pick(SimpleNamespace(device=SimpleNamespace(type="cuda")), made, "auto")
    with pytest.raises(NotServed, match=r"^cpu: it does not return attention weights$"):
        fused.pick(query, made, "auto")
