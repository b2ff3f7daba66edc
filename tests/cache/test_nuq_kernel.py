"""The kernel that quantizes a new token in KVQuant's format, on a CPU by emulated instructions, against torch."""

import contextlib
import ctypes
import shutil
import subprocess
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from kvbench.cache.kernels import nuq
from kvbench.cache.segments.codebook import NuqFormat, NuqSegment
from kvbench.cache.watch import Watch
from tests.attention import emulated

ALL = slice(None)


def segments(bits, heads, channels, dtype, outliers, capacity=256, restored=False):
    """A segment of keys and one of values, empty, of two rows."""
    levels = torch.tanh(torch.linspace(-1.7, 1.9, 2**bits))
    border = torch.rand(heads * channels, generator=torch.Generator().manual_seed(5)) + 1.5
    made = []
    for side in ("key", "value"):
        thresholds = torch.stack([border, 0.3 - border]).half() if side == "key" else None
        form = NuqFormat(
            bits, levels, outliers=outliers, thresholds=thresholds, restored=1.1 * levels if restored else None
        )
        made.append(NuqSegment(2, heads, channels, dtype, "cpu", form=form, side=side, capacity=capacity))
    return made


@pytest.fixture
def on_cpu(monkeypatch, tmp_path):
    """Launches of the kernel run a program of this machine in its place."""
    if shutil.which("g++") is None:
        pytest.skip("needs g++ to compile the kernel for this machine")
    programs = {}

    def launch(build, arguments, places):
        if build not in programs:
            source, library = (tmp_path / f"{len(programs)}.{end}" for end in ("cpp", "so"))
            parts = (build.macros(), '#include "emulated.hpp"', "#define quantize_token decode", nuq.kernel_source())
            source.write_text("\n".join((*parts, '#include "emulated_run.hpp"')), encoding="utf-8")
            subprocess.run(["g++", *emulated.OPTIONS, str(source), "-o", str(library)], check=True)
            programs[build] = ctypes.CDLL(str(library))
        buffer = ctypes.create_string_buffer(arguments, len(arguments))
        programs[build].run(buffer, len(places), 2, 1 + build.parts, 0)

    monkeypatch.setattr(nuq, "launch", launch)


def same(one, other):
    assert one.lengths == other.lengths
    for row, count in enumerate(one.lengths):
        rows = slice(row, row + 1)
        assert torch.equal(one.codes(rows, 0, count), other.codes(rows, 0, count))
        for mine, theirs in zip(one.params, other.params, strict=True):
            assert torch.equal(mine[row, :count], theirs[row, :count])
        if one.exact is not None:
            assert one.exact.ends == other.exact.ends
            blocks = -(-count // one.exact.block)
            assert torch.equal(one.exact.table[row, :blocks], other.exact.table[row, :blocks])
            entries = one.exact.count(row)
            assert torch.equal(one.exact.values[row, :entries], other.exact.values[row, :entries])
            assert torch.equal(one.exact.indices[row, :entries], other.exact.indices[row, :entries])


@pytest.mark.parametrize(
    ("bits", "heads", "channels", "dtype", "outliers"),
    [
        (2, 2, 64, torch.float16, 0.05),
        (3, 3, 64, torch.bfloat16, 0.05),
        (4, 16, 64, torch.bfloat16, 0.02),
        (3, 2, 128, torch.float16, 0.0),
        (2, 3, 256, torch.bfloat16, 0.3),
        pytest.param(3, 40, 128, torch.bfloat16, 0.01, marks=pytest.mark.slow),
    ],
)
def test_tokens_are_stored_as_by_torch(bits, heads, channels, dtype, outliers, on_cpu):
    x = torch.randn(2, heads, 140, channels, generator=torch.Generator().manual_seed(0)).to(dtype)
    x[0, :, 131] = 0.5  # all elements are equal
    x[1, 0, 131, : channels // 2] = 3.0  # many equal extremes
    by_torch, by_kernel = (segments(bits, heads, channels, dtype, outliers, restored=bits == 4) for _ in range(2))
    for made in (*by_torch, *by_kernel):
        for row, count in ((0, 126), (1, 60)):
            made.append(slice(row, row + 1), x[row : row + 1, :, :count])
    for t in range(126, 134):
        new = x[:, :, t : t + 1]
        for made in by_torch:
            for row in range(2):
                made.append(slice(row, row + 1), new[row : row + 1])
        keys, values = by_kernel
        places = list(zip(keys.advance(), values.advance(), strict=True))
        nuq.pack_nuq_tokens(keys, values, new, new, torch.tensor(places, dtype=torch.int32))
    for one, other in zip(by_torch, by_kernel, strict=True):
        same(one, other)


@pytest.mark.parametrize("parts", nuq.PARTS)
def test_the_number_of_ctas_does_not_change_what_is_stored(parts, on_cpu, monkeypatch):
    x = torch.randn(2, 3, 40, 64, generator=torch.Generator().manual_seed(2)).half()
    by_torch, by_kernel = (segments(3, 3, 64, torch.float16, 0.05) for _ in range(2))
    for made in (*by_torch, *by_kernel):
        made.append(ALL, x[:, :, :39])
    for made in by_torch:
        made.append(ALL, x[:, :, 39:])
    run = nuq.launch
    monkeypatch.setattr(nuq, "launch", lambda build, *given: run(replace(build, parts=parts), *given))
    places = torch.tensor(list(zip(*(made.advance() for made in by_kernel), strict=True)), dtype=torch.int32)
    nuq.pack_nuq_tokens(*by_kernel, x[:, :, 39:], x[:, :, 39:], places)
    for one, other in zip(by_torch, by_kernel, strict=True):
        same(one, other)


def test_a_token_is_divided_among_as_many_ctas_as_run_at_once(monkeypatch):
    """7 rows of 2 sides have 126 CTAs of 8 parts and one for outliers each; 8 rows would have 144."""
    chosen = {rows: nuq.parts_of(rows, 132) for rows in (1, 7, 8, 13, 14, 100)}
    assert chosen == {1: 8, 7: 8, 8: 4, 13: 4, 14: 2, 100: 2}
    launched = []
    compiled = lambda build, device: SimpleNamespace(  # noqa: E731
        resident=132, launch=lambda grid, *given: launched.append((build.parts, grid))
    )
    monkeypatch.setattr(nuq, "token_kernel", compiled)
    monkeypatch.setattr(torch.cuda, "device_of", lambda tensor: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: SimpleNamespace(cuda_stream=7))
    build = nuq.TokenBuild(128, 32, 3, 1, True, True, False, 16)
    for rows in (1, 9):
        nuq.launch(build, b"", torch.zeros(rows, 2, dtype=torch.int32))
    assert launched == [(8, (1, 2, 9)), (4, (9, 2, 5))]


def test_a_rehearsed_token_is_not_stored(on_cpu):
    x = torch.randn(2, 2, 3, 64, generator=torch.Generator().manual_seed(0)).half()
    keys, values = segments(3, 2, 64, torch.float16, 0.05)
    for made in (keys, values):
        made.append(ALL, x)
    keys.lookup()
    before = [tensor.clone() for made in (keys, values) for _, tensor in made.buffers()]
    nuq.pack_nuq_tokens(keys, values, x[:, :, :1], x[:, :, :1], torch.full((2, 2), -1, dtype=torch.int32))
    after = [tensor for made in (keys, values) for _, tensor in made.buffers()]
    assert all(torch.equal(one.nan_to_num(), other.nan_to_num()) for one, other in zip(before, after, strict=True))


def test_the_first_element_that_is_not_finite_is_recorded(on_cpu):
    x = torch.zeros(2, 2, 1, 64).half()
    x[1, 1, 0, 7] = float("inf")
    keys, values = segments(3, 2, 64, torch.float16, 0.05)
    watch = Watch(torch.device("cpu"))
    for made in (keys, values):
        made.watch = (watch, watch.tag(lambda place: f"{place}"))
    places = torch.tensor(list(zip(keys.advance(), values.advance(), strict=True)), dtype=torch.int32)
    nuq.pack_nuq_tokens(keys, values, torch.zeros_like(x), x, places)
    assert watch.record.tolist() == [1, 1, 1, 1, 0, 7]


def test_buffers_grow_before_a_token_might_not_fit():
    x = torch.randn(2, 2, 128, 64, generator=torch.Generator().manual_seed(0)).half()
    keys, values = segments(3, 2, 64, torch.float16, 0.05, capacity=128)
    for made in (keys, values):
        made.append(ALL, x)
        before = [tensor.data_ptr() for _, tensor in made.buffers()]
        assert made.advance() == [128, 128] and made.lengths == [129, 129]
        assert made.capacity > 128
        assert made.exact.values.shape[1] >= max(made.exact.most) and made.exact.table.shape[1] > 1
        assert all(one != tensor.data_ptr() for one, (_, tensor) in zip(before[:1], made.buffers()[:1], strict=True))


def test_what_the_kernel_cannot_store_in_a_captured_step_is_said():
    def made(bits=3, dtype=torch.float16, outliers=0.05, channels=64):
        return segments(bits, 2, channels, dtype, outliers)

    assert nuq.nuq_refusal(*made()) is None and nuq.nuq_refusal(*made(outliers=0.0)) is None
    keys, values = made()
    values.gather = lambda x: x
    assert "divided between processes" in nuq.nuq_refusal(keys, values)
    keys, values = made()
    keys.most = 5
    assert "outliers of a token is limited" in nuq.nuq_refusal(keys, values)
    assert nuq.nuq_refusal(*made(dtype=torch.float32)) == "tokens are float32"
    assert "96 channels" in nuq.nuq_refusal(*made(channels=96))
    assert "different formats" in nuq.nuq_refusal(made(3)[0], made(4)[1])
    assert "different formats" in nuq.nuq_refusal(made()[0], made(outliers=0.0)[1])
    assert "different formats" in nuq.nuq_refusal(made(outliers=0.0)[0], made()[1])


def test_a_captured_step_is_packed_by_the_kernel_of_its_segments(monkeypatch):
    from kvbench.cache.kernels import at_once, engine
    from kvbench.cache.segments.packed import PackedSegment
    from kvbench.quantizers.engine.llamacpp import Q8_0

    asked = []
    for module, refusal, pack in (
        (nuq, "nuq_refusal", "pack_nuq_tokens"),
        (engine, "engine_refusal", "pack_engine_tokens"),
    ):
        name = module.__name__.rsplit(".", 1)[1]
        monkeypatch.setattr(module, refusal, lambda *given, name=name: asked.append((name, given)) or f"{name} says")
        monkeypatch.setattr(module, pack, lambda *given, name=name: asked.append((name, given)))
    packed = tuple(PackedSegment(1, 1, 64, torch.float16, "cpu", quantizer=Q8_0(), side=s) for s in ("key", "value"))
    for name, pair in (("nuq", tuple(segments(3, 2, 64, torch.float16, 0.0))), ("engine", packed)):
        assert at_once.packing_refusal(pair) == f"{name} says" and asked.pop() == (name, pair)
        at_once.pack_new_tokens(pair, "key", "value", "places")
        assert asked.pop() == (name, (*pair, "key", "value", "places"))
