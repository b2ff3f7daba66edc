"""The figures of every GPU as its data sheet gives them, and what predictions take from them."""

from __future__ import annotations

import pytest

from kvbench.errors import ConfigError
from kvbench.profiling.gpus import GPUS, Gpu, gpu_named, gpu_of, own_gpu


def test_figures_of_the_data_sheets():
    sheets = {name: (gpu.name, gpu.memory_gib, gpu.bandwidth / 1e9, gpu.flops / 1e12) for name, gpu in GPUS.items()}
    expected = {
        "a6000": (48, 768, 154.8),
        "l40s": (48, 864, 362.05),
        "a100-40gb": (40, 1555, 312),
        "a100-80gb": (80, 2039, 312),
        "a100-80gb-pcie": (80, 1935, 312),
        "h100": (80, 3350, 989.4),
        "h200": (141, 4800, 989.4),
    }
    assert {name: sheets[name] for name in expected} == {
        name: (name, *map(pytest.approx, figures)) for name, figures in expected.items()
    }
    measured = {name: (gpu.measured_read, gpu.measured_matmul) for name, gpu in GPUS.items() if gpu.measured_read}
    assert measured == {"h200": (pytest.approx(4.69e12), pytest.approx(718e12))}
    assert {gpu.kernel_s for gpu in GPUS.values()} == {2.3e-6}


def test_rates_without_a_measurement_are_shares_of_the_data_sheets():
    gpu = Gpu("x", 2, 100.0, 1000.0)
    assert (gpu.read, gpu.matmul, gpu.memory, gpu.ridge) == (92.0, 726.0, 2**31, 10.0)
    gpu = Gpu("x", 2, 100.0, 1000.0, measured_read=50.0, measured_matmul=300.0)
    assert (gpu.read, gpu.matmul, gpu.ridge) == (50.0, 300.0, 10.0)


def test_names_in_any_case_and_unknown_ones():
    assert gpu_of("nvidia h200") is GPUS["h200"] and gpu_named("nvidia h200") is GPUS["h200"]
    assert gpu_of("NVIDIA H100 NVL") is gpu_of("NVIDIA H200 MIG 1g.18gb") is gpu_of("XH200") is None
    assert own_gpu(1, 1, 1).name == "own" and own_gpu(1, 1, 1, "mine").name == "mine"
    with pytest.raises(ConfigError, match="gpu=abacus: is not a known GPU") as refusal:
        gpu_named("abacus")
    assert refusal.value.hint.startswith("Describe other GPUs with --bandwidth-TBs")
