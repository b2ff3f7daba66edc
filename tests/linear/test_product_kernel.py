"""The CUDA kernel of products: on a CPU by emulation of its instructions, and on a GPU; choices and refusals."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch

from kvbench.linear import build, int4, matvec, product_kernels
from kvbench.linear.build import Build
from tests.linear.emulate import dequantized, product

BF16, FP16 = torch.bfloat16, torch.float16


def problem(
    rows: int, channels: int, columns: int, group: int, half: bool, dtype: torch.dtype, device: str = "cpu"
) -> tuple[torch.Tensor, torch.Tensor | int4.Int4Weight, torch.Tensor, torch.Tensor]:
    """An input, a matrix of 4 bits (group 0: of 16), a bias, and their product in fp32."""
    rng = torch.Generator(device).manual_seed(rows + channels)
    where: Any = {"generator": rng, "device": device}
    x = (torch.randn(rows, columns, **where) + 0.3).to(dtype)
    bias = torch.randn(channels, **where).to(dtype)
    if not group:
        matrix = (torch.randn(channels, columns, **where) * 0.05).to(dtype)
        return x, matrix, bias, x.float() @ matrix.float().T + bias.float()
    codes = torch.randint(0, 16, (channels, columns), dtype=torch.uint8, **where)
    scales = (torch.rand(channels, columns // group, **where) * 0.01 + 0.005).to(FP16 if half else BF16)
    weight = int4.pack(codes, scales, torch.randint(0, 17, scales.shape, **where))
    return x, weight, bias, x.float() @ int4.dequantized(weight, torch.float32).T + bias.float()


def close(out: torch.Tensor, exact: torch.Tensor) -> bool:
    """Within a rounding of the output, in the root mean square."""
    return bool((out.float() - exact).norm() <= 3e-3 * exact.norm())


@pytest.mark.parametrize(
    ("config", "rows", "channels", "columns", "ctas"),
    [
        # CTAs with two blocks and with one, the last of half a tile; 5 slots for 2 warps
        pytest.param(Build(4, group=128, warps=2, stages=3, chains=2), 5, 40, 640, 2, id="4 bits"),
        pytest.param(
            Build(4, bf16=False, group=32, half=False, warps=2, stages=4, tiles=2, keep=False, early=2),
            *(3, 72, 384, 2),
            id="4 bits fp16 x in the ring",
        ),
        pytest.param(
            Build(4, wide=True, group=64, warps=4, stages=2, tiles=2, early=1),
            13,
            40,
            384,
            1,
            id="4 bits wide, a warp idle",
            marks=pytest.mark.slow,
        ),
        pytest.param(Build(16, unit=64, warps=2, stages=3), 5, 40, 320, 2, id="16 bits"),
        pytest.param(
            Build(16, bf16=False, wide=True, warps=2, stages=4, tiles=2, keep=False, early=3, spread=True),
            *(16, 72, 384, 2),
            id="16 bits fp16 wide",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            Build(16, unit=64, warps=2, stages=4, direct=True, early=1, spread=True),
            5,
            40,
            320,
            2,
            id="16 bits through registers",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_the_source_computes_the_product(
    config: Build, rows: int, channels: int, columns: int, ctas: int, tmp_path: Path
) -> None:
    dtype = BF16 if config.bf16 else FP16
    x, weight, bias, exact = problem(rows, channels, columns, config.group, config.half, dtype)
    if isinstance(weight, int4.Int4Weight):
        out = product(config, x, weight.codes, weight.groups, channels, bias, ctas, tmp_path)
    else:
        out = product(config, x, weight, None, channels, bias, ctas, tmp_path)
    assert close(out, exact)


@pytest.mark.parametrize(
    ("dtype", "half", "group"), [(BF16, True, 128), pytest.param(FP16, False, 32, marks=pytest.mark.slow)]
)
def test_the_source_dequantizes(dtype: torch.dtype, half: bool, group: int, tmp_path: Path) -> None:
    """Bit for bit, also the last half of a tile."""
    weight = problem(1, 40, 256, group, half, dtype)[1]
    assert isinstance(weight, int4.Int4Weight)
    assert torch.equal(dequantized(weight, dtype, tmp_path), int4.dequantized(weight, dtype))


def test_macros_and_shared_memory_of_a_configuration() -> None:
    config = Build(4, group=64, tiles=2, warps=4, stages=3, wide=True, early=1)
    assert config.macros().splitlines() == [
        f"#define {name} {value}"
        for name, value in (
            ("UNIT", 128), ("HINT", 1), ("BF16", 1), ("GROUP", 64), ("HALF", 1), ("NT", 2), ("MT", 2),
            ("WARPS", 4), ("SPREAD", 0), ("STAGES", 3), ("XRES", 1), ("DIRECT", 0), ("CHAINS", 1), ("EARLY", 1),
            ("PDL", 1), ("MINB", 1),
        )
    ]  # fmt: skip
    assert config.slot == 2 * (1024 + 128)  # 16 x 128 codes, and two groups of 16 scales and zeros
    assert config.shared(9, 640) == 4 * (2 * 2 * 2 * 512 + 2 * 9 * 256 + 3 * 2304)  # 5 slots: two for a warp
    ring = Build(16, unit=64, warps=4, stages=3, keep=False)
    assert ring.slot == 2048 and ring.shared(9, 640) == 4 * (2 * 512 + 3 * (2048 + 9 * 128))


def test_wide_matrices_keep_the_input_in_shared_memory() -> None:
    """So that it is read once per CTA; with less to read, or too long an input, it passes through the ring."""
    kept = {
        (n, k): product_kernels.choose(8, n, k, 0, False, True)[0].keep
        for n, k in ((22016, 4096), (4096, 4096), (22016, 16384))
    }
    assert kept == {(22016, 4096): True, (4096, 4096): False, (22016, 16384): False}


@pytest.mark.parametrize("group", [0, 32, 128])
def test_every_product_has_a_configuration_that_fits(group: int) -> None:
    """On sm_80 (163 KiB), sm_86, 89 and 120 (99 KiB), sm_90 and 100 (227 KiB)."""
    for kib in (99, 163, 227):
        for channels, columns in ((16, 128), (4096, 4096), (22016, 4096), (4096, 14336), (128256, 4096), (5120, 27648)):
            for rows in (1, 2, 8, 9, 16):
                chosen, ctas = product_kernels.choose(rows, channels, columns, group, True, True, kib * 1024)
                assert ctas * chosen.shared(rows, columns) <= kib * 1024 and chosen.wide is (rows > 8)
                assert columns % chosen.unit == 0 and chosen.bits == (4 if group else 16)


def test_inputs_that_the_kernel_cannot_take(monkeypatch: pytest.MonkeyPatch) -> None:
    class Shaped:
        def __init__(self, *shape: int, dtype: torch.dtype = BF16, cuda: bool = True) -> None:
            self.shape, self.dtype, self.is_cuda = shape, dtype, cuda
            self.numel = torch.Size(shape).numel

    product_kernels.compilable.cache_clear()
    monkeypatch.setattr(product_kernels.nvrtc, "missing", lambda: None)
    assert product_kernels.serves(Shaped(1, 128), 128) and product_kernels.serves(Shaped(4, 4, 256, dtype=FP16), 256)
    assert product_kernels.serves(Shaped(1, 128), 128, torch.zeros(8, dtype=BF16))
    for x, columns in ((Shaped(17, 128), 128), (Shaped(0, 128), 128), (Shaped(1, 192), 192), (Shaped(1, 256), 128)):
        assert not product_kernels.serves(x, columns)
    assert not product_kernels.serves(Shaped(1, 128, dtype=torch.float32), 128)
    assert not product_kernels.serves(Shaped(1, 128, cuda=False), 128)
    assert not product_kernels.serves(Shaped(1, 128), 128, torch.zeros(8))
    product_kernels.compilable.cache_clear()
    monkeypatch.setattr(product_kernels.nvrtc, "missing", lambda: "there is no GPU")
    with pytest.warns(UserWarning, match="because there is no GPU: 4-bit weights are dequantized"):
        assert not product_kernels.serves(Shaped(1, 128), 128)
    product_kernels.compilable.cache_clear()


def test_a_kernel_that_does_not_compile_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*given: object) -> object:
        raise RuntimeError("nvrtc could not compile\nthe product kernel")

    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: object())
    monkeypatch.setattr(build, "function", broken)
    product_kernels.configuration.cache_clear()
    with pytest.warns(UserWarning, match="5 rows with 48 x 256 weights of 4 bits .* compile the product kernel"):
        assert product_kernels.configuration(5, 48, 256, 128, True, True, 0) is None
    product_kernels.configuration.cache_clear()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
class TestOnAGpu:
    @pytest.mark.parametrize("rows", [1, 2, 5, 8, 9, 16])
    @pytest.mark.parametrize("group", [0, 32, 64, 128])
    @pytest.mark.parametrize("dtype", [BF16, FP16])
    def test_the_product_and_the_same_bits_every_time(self, rows: int, group: int, dtype: torch.dtype) -> None:
        for channels, columns in ((40, 128), (4096, 4096), (1000, 11008), (11008, 1280)):
            x, weight, bias, exact = problem(rows, channels, columns, group, dtype == FP16, dtype, "cuda")
            if isinstance(weight, int4.Int4Weight):
                assert product_kernels.serves(x, columns, bias)
                outs = [int4.product(x[None], weight, bias) for _ in range(3)]
            else:
                assert matvec.served(x, weight, bias)
                outs = [torch.ops.kvbench.matvec(x[None], weight, bias) for _ in range(3)]
            assert outs[0].shape == (1, rows, channels) and close(outs[0][0], exact)
            assert all(torch.equal(out, outs[0]) for out in outs)

    def test_a_graph_replays_it(self) -> None:
        x, weight, bias, exact = problem(5, 4096, 4096, 128, True, BF16, "cuda")
        assert isinstance(weight, int4.Int4Weight)
        int4.product(x, weight, bias)
        torch.cuda.synchronize()
        graph, given = torch.cuda.CUDAGraph(), torch.zeros_like(x)
        with torch.cuda.graph(graph):
            out = int4.product(given, weight, bias)
        given.copy_(x)
        for _ in range(3):
            graph.replay()
        assert close(out, exact)

    @pytest.mark.parametrize("group", [32, 64, 128])
    @pytest.mark.parametrize("dtype", [BF16, FP16])
    def test_it_dequantizes_bit_for_bit(self, group: int, dtype: torch.dtype) -> None:
        for channels, columns in ((40, 128), (1000, 4096)):
            weight = problem(1, channels, columns, group, dtype == FP16, dtype, "cuda")[1]
            assert isinstance(weight, int4.Int4Weight)
            assert torch.equal(int4.dequantized(weight, dtype).cpu(), int4.dequantized(weight.to("cpu"), dtype))

    def test_more_rows_are_multiplied_by_dequantized_weights(self) -> None:
        x, weight, bias, exact = problem(17, 64, 256, 64, True, BF16, "cuda")
        assert isinstance(weight, int4.Int4Weight) and not product_kernels.serves(x, 256, bias)
        assert (int4.product(x, weight, bias).float() - exact).norm() <= 1e-2 * exact.norm()


@pytest.mark.skipif(os.environ.get("KVBENCH_NVRTC") != "1", reason="needs nvrtc: set KVBENCH_NVRTC=1")
@pytest.mark.parametrize("architecture", ["sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120"])
def test_it_compiles_for(architecture: str) -> None:
    from kvbench.util import nvrtc

    for config in (
        Build(4, group=128),
        Build(4, group=32, bf16=False, wide=True),
        Build(16, unit=64),
        Build(16, wide=True),
    ):
        assert nvrtc.compiled(config.source, architecture, "product")
    macros = "#define BF16 1\n#define GROUP 128\n#define HALF 1\n#define WARPS 8\n"
    assert nvrtc.compiled(macros + build.linear_source("dequantize"), architecture, "dequantize")
