"""Kernels refuse every format, dtype and head that is not in their lists, and the reference path then serves it."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.attention import interpreter

interpreter.require()

from kvbench.attention import fused, phases, reference  # noqa: E402
from kvbench.attention import reads as lists  # noqa: E402
from kvbench.attention.codebook import decode as looked_up_cuda  # noqa: E402
from kvbench.attention.cuda import decode as cuda_decode  # noqa: E402
from kvbench.attention.phases import Format, NotServed, Part, Work  # noqa: E402
from kvbench.attention.synthetic import FULL  # noqa: E402
from kvbench.attention.triton import decode as triton_decode  # noqa: E402
from kvbench.attention.triton import observed  # noqa: E402
from kvbench.cache.progress import Options  # noqa: E402
from kvbench.methods import load_method  # noqa: E402
from kvbench.quantizers.spec import PLANES  # noqa: E402
from tests import zoo  # noqa: E402

ALL = slice(None)
AFFINE = Format("affine", 4, "channel", 64), Format("affine", 4, "token", 64)
BOOK = Format("codebook", 4, "channel"), Format("codebook", 4, "token")
#: kernel -> its module, formats of keys and values that it reads, its lists
KERNELS = {
    "cuda": (cuda_decode, AFFINE, (lists.CUDA_KEYS, lists.CUDA_VALUES)),
    "triton": (triton_decode, AFFINE, (lists.TRITON_KEYS, lists.TRITON_VALUES)),
    "codebook": (looked_up_cuda, BOOK, (lists.LOOKED_UP_KEYS, lists.LOOKED_UP_VALUES)),
    "observed": (observed, (FULL, FULL), (lists.OBSERVED, lists.OBSERVED)),
}
#: a value that no kernel knows, for each dimension of a format, and what the reason says
UNKNOWN = [
    ({"bits": 5}, "5-bit codes"),
    ({"bits": 7}, "7-bit codes"),
    ({"kind": "ternary"}, "codes of the kind ternary"),
    ({"axis": "diagonal"}, "groups per diagonal"),
    ({"group": 48}, "groups of 48 "),
    ({"scale": "bf16"}, "codes with scales in bf16"),
    ({"window": 2}, "windows of 2 tokens"),
]
HALF = torch.float16


@pytest.fixture(autouse=True)
def compiles(monkeypatch):
    """A machine on which CUDA kernels compile: the lists alone decide."""
    monkeypatch.setattr(cuda_decode, "cuda_problem", lambda *asked: None)
    monkeypatch.setattr(looked_up_cuda, "codebook_problem", lambda *asked: None)
    monkeypatch.setattr(cuda_decode, "available", lambda: None)
    monkeypatch.setattr(looked_up_cuda, "missing", lambda: None)


def work(key, value, channels=64, stored=HALF):
    exact = Part(FULL, buffer=torch.zeros(1, 1, 8, channels, dtype=stored))
    sides = [Part(form, params=[torch.zeros(1, 1, 2)], words=[torch.zeros(1, 1, 1)]) for form in (key, value)]
    pairs = [(exact, exact)] if key == value == FULL else [tuple(sides), (exact, exact)]
    return Work(pairs, torch.zeros(1, len(pairs), 3), [[(0, 0, 1)] * len(pairs)], 1, channels, channels)


def query(channels=64, dtype=HALF):
    return torch.zeros(1, 1, 1, channels, dtype=dtype)


@pytest.mark.parametrize("name", KERNELS)
def test_an_unknown_value_of_any_dimension_is_refused_by_its_name(name):
    module, (key, value), (keys, values) = KERNELS[name]
    assert lists.misfit(query(), work(key, value), (64,), keys, values) is None
    for change, reason in UNKNOWN if name != "observed" else ():
        assert module.refuses(query(), work(replace(key, **change), value)).startswith(f"keys in {reason}")
        assert module.refuses(query(), work(key, replace(value, **change))).startswith(f"values in {reason}")
    for channels in (40, 72, 512):
        made = work(key, value, channels) if name == "observed" else work(FULL, value, channels)
        assert module.refuses(query(channels), made) == f"heads of {channels} channels"
    for dtype in (torch.float32, torch.float64, torch.float8_e4m3fn):
        said = f"queries in {str(dtype)[6:]}"
        assert module.refuses(query().to(dtype), work(key, value, stored=dtype)) == said
        assert module.refuses(query().to(dtype), work(key, value)) == said  # arithmetic apart from storage
        assert module.refuses(query(), work(key, value, stored=dtype)) == f"queries in float16, but keys in {said[11:]}"
    assert module.refuses(query(), work(key, value, stored=torch.bfloat16)).endswith("but keys in bfloat16")


def test_codes_of_a_codebook_are_not_asked_of_triton():
    with pytest.raises(NotServed, match="triton: only the CUDA kernel reads codes of a codebook"):
        fused.pick(query(), work(*BOOK), "triton")
    with pytest.raises(NotServed, match=r"^codebook: keys in 5-bit codes"):
        fused.pick(query(), work(replace(BOOK[0], bits=5), BOOK[1]), "cuda")
    with pytest.raises(NotServed, match=r"^cpu: keys in codes of the kind codebook"):
        fused.pick(query(), work(*BOOK), "auto")


def stored(method, keys, values):
    """A layer after a prompt and one more token, as a decode step finds it."""
    layer = zoo.new_layer(method)
    layer.progress.options = Options(kernels="triton")
    zoo.feed(layer, keys[:, :, :-1], values[:, :, :-1])
    zoo.feed(layer, keys[:, :, -1:], values[:, :, -1:])
    return layer


def quantizer(key, value):
    return {"name": "odd", "key": key, "value": value}


def affine(bits=4, tokens=32, channels=32):
    key = {"bits": bits, "group_size": tokens, "axis": "channel"}
    return quantizer(key, {"bits": bits, "group_size": channels, "axis": "token"})


@pytest.mark.parametrize(
    ("method", "options", "channels", "dtype", "reason"),
    [
        ("kivi", {"quantizer": "int5"}, 64, HALF, "5-bit codes"),
        ("kivi", {"quantizer": "int6"}, 64, torch.bfloat16, "6-bit codes"),
        ("logquant", {"quantizer": affine(5, 64), "window": 42}, 64, HALF, "5-bit codes"),
        ("atom", {"quantizer": quantizer(*[{"bits": 6, "group_size": "head_dim", "axis": "token"}] * 2)}, 64, HALF,
         "6-bit codes"),
        ("kivi", {"quantizer": affine(7)}, 64, HALF, "no kernel reads 7-bit codes"),
        ("kivi", {"quantizer": affine(tokens=48), "residual": 96}, 64, HALF, "no kernel reads groups of 48 tokens"),
        ("kivi", {"quantizer": affine(channels=8)}, 64, HALF, "no kernel reads groups of 8 channels"),
        ("kivi", {"quantizer": affine(channels=40)}, 40, HALF, "heads of 40 channels"),
        ("kivi", {"quantizer": "int4"}, 64, torch.float32, "queries in float32"),
        ("kivi", {"quantizer": "int4"}, 64, torch.float64, "no kernel reads keys and values in float64"),
        ("engine", {"format": "int8fork"}, 64, HALF, "no kernel reads the codes of a Ranged"),
    ],
)  # fmt: skip
def test_what_is_refused_is_served_by_the_reference_path(method, options, channels, dtype, reason, monkeypatch):
    """A width of 7 bits needs one entry in the table of planes, and no kernel then takes it for another."""
    monkeypatch.setitem(PLANES, 7, (4, 2, 1))
    made = load_method(method, **{"takes": ["odd", "int5", "int6", "int4", "none"], **options})
    keys, values = (x.to(dtype) for x in zoo.random_kv(300, 1, 2, channels))
    layer = stored(made, keys, values)
    q = torch.randn(1, 4, 1, channels, generator=torch.Generator().manual_seed(2)).to(dtype)
    assert fused.attend_fused(layer, q, None, 0.2) is None
    assert len(layer.paths) == 1 and reason in layer.paths.pop()
    with pytest.raises(NotServed, match=reason):
        fused.pick(q, phases.work(layer), "triton")
    found = reference.attend_reference(None, layer, q, None, 0.2)
    held = [
        torch.cat([part.read(ALL, 0, part.length(ALL), torch.float32) for part in store.segments], 2)
        for store in layer.stores()
    ]
    order = layer.positions(0)
    for sent, kept, store in zip((keys, values), held, layer.stores(), strict=True):
        bits = next(part.quantizer.bits for part in store.segments if part.packed)
        sent = sent.float() if order is None else sent.float().index_select(2, torch.as_tensor(order))
        spread = float(sent.amax() - sent.amin())
        assert 0 < float((kept - sent).abs().max()) <= 0.51 * spread / (2**bits - 1) + 0.02 * (method == "engine")
    scores = (q.float() @ held[0].repeat_interleave(2, 1).transpose(-1, -2) * 0.2).softmax(-1)
    wanted = (scores @ held[1].repeat_interleave(2, 1)).transpose(1, 2)
    assert float((found.float() - wanted).norm() / wanted.norm()) < (6e-3 if dtype.itemsize == 2 else 1e-5)
