"""The census of live tensors counts what lives, phase by phase."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from kvbench.profiling import memory
from kvbench.profiling.memory import PhasePeaks, TensorCensus, peak_rss, reset_peak_rss

MB = 1_000_000


def tensor(megabytes: int) -> torch.Tensor:
    return torch.zeros(megabytes * MB // 4)


def test_peaks_by_phase():
    with TensorCensus() as census:
        base = census.current
        census.phase("prefill")
        a = tensor(4)
        b = a + 1
        del a
        census.phase("decode")
        c = tensor(1)
        census.phase("end")
        d = tensor(50)
        assert census.live()[0].nbytes == 50 * MB and census.live()[0].shape == (50 * MB // 4,)
        assert sum(item.nbytes for item in census.live()) == census.current
        del d
        census.phase("prefill")  # a shorter one of the same name changes nothing
        census.phase("end")
        del b, c
    assert census.peaks["prefill"] - base == 8 * MB
    assert census.peaks["decode"] - base == 5 * MB
    assert census.current == base


def test_views_share_their_storage():
    with TensorCensus() as census:
        base = census.current
        x = tensor(4)
        view = x.view(2, -1)[0]
        del x
        assert census.current - base == 4 * MB
        del view
        assert census.current == base


def test_what_lived_before_counts():
    weights = tensor(8)
    with TensorCensus() as census:
        assert census.current >= 8 * MB
        census.phase("prefill")
    assert census.peaks["prefill"] >= weights.numel() * 4


def test_fake_tensors_take_no_memory():
    """A compiler leaves some behind that say they are on a CPU, of sizes that are no numbers."""
    mode = FakeTensorMode(shape_env=ShapeEnv(), static_shapes=False)
    fake = mode.from_tensor(torch.zeros(1 << 20, 3))
    assert fake.device.type == "cpu" and not isinstance(fake.untyped_storage().nbytes(), int)
    with TensorCensus() as census:
        census.phase("decode")
        with mode:
            other = torch.zeros(1 << 20)
        census.phase("end")
    assert isinstance(census.peaks["decode"], int)
    shapes = [item.shape for item in census.live()]
    assert (1 << 20,) not in shapes and all(isinstance(size, int) for shape in shapes for size in shape)
    assert other.shape == (1 << 20,)


def test_temporaries_inside_a_module_are_seen():
    layer = torch.nn.Linear(1000, 4000, bias=False)
    x = torch.zeros(100, 1000)
    with TensorCensus() as census, torch.inference_mode():
        base = census.current
        census.phase("prefill")
        layer(x).relu().sum()
    assert census.peaks["prefill"] - base >= 2 * 100 * 4000 * 4


def test_peak_rss_can_start_anew():
    reset_peak_rss()
    before = peak_rss()
    block = bytearray(200 * MB)
    block[::4096] = b"x" * len(block[::4096])
    assert peak_rss() - before > 150 * MB
    del block
    reset_peak_rss()
    assert peak_rss() < before + 100 * MB


@pytest.mark.parametrize("census", [True, False])
def test_phase_peaks_say_how_they_were_counted(census):
    peaks = PhasePeaks("cpu", census=census)
    with peaks.run():
        for phase in ("prefill", "likelihood", "decode", "end"):
            peaks.phase(phase)
    row = peaks.row()
    assert row["rss"] > 0
    assert row["kind"] == ("cpu_live_tensors" if census else None)
    assert (row["prefill"] is not None) == census


def test_on_a_gpu_a_peak_is_read_at_the_end_of_its_phase(monkeypatch):
    allocated, resets = iter([10, 5, 7, 20]), []
    monkeypatch.setattr(memory, "cuda_peak", lambda: next(allocated))
    monkeypatch.setattr(memory, "cuda_reset_peak", lambda: resets.append(1))
    peaks = PhasePeaks("cuda", census=True)
    with peaks.run():
        for phase in ("prefill", "decode", "end"):
            peaks.phase(phase)
        assert (peaks.row()["prefill"], peaks.row()["decode"], len(resets)) == (10, 5, 3)
        for phase in ("prefill", "end", "decode", "end"):
            peaks.phase(phase)
    assert (peaks.row()["prefill"], peaks.row()["decode"], len(resets)) == (10, 20, 7)
    assert peaks.kind == "cuda_allocator"


def test_peaks_of_all_gpus_are_added_and_reset(monkeypatch):
    calls = []
    monkeypatch.setattr(torch.cuda, "init", lambda: calls.append("init"))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda index: (3, 4)[index])
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", calls.append)
    assert memory.cuda_peak() == 7
    memory.cuda_reset_peak()
    assert calls == ["init", 0, 1]


def test_release_collects_and_gives_a_gpus_memory_back(monkeypatch):
    class Loop:
        pass

    calls = []
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: calls.append(1))
    for device, count in (("cpu", 0), ("cuda:1", 1)):
        loop = Loop()
        loop.itself, gone = loop, weakref.ref(loop)
        del loop
        memory.release(device)
        assert gone() is None and len(calls) == count


@pytest.mark.gpu
def test_cuda_peaks_are_the_allocators():
    gc.collect()  # what other tests left must not go in between
    peaks = PhasePeaks("cuda")
    with peaks.run():
        peaks.phase("prefill")
        x = torch.zeros(8 * MB, dtype=torch.uint8, device="cuda")
        del x
        peaks.phase("decode")
        y = torch.zeros(2 * MB, dtype=torch.uint8, device="cuda")
        peaks.phase("end")
        del y
    row = peaks.row()
    assert row["kind"] == "cuda_allocator"
    # the allocator does not split a free block whose rest is 1 MiB or less: y may count for that much more
    assert row["prefill"] - row["decode"] >= 4 * MB
