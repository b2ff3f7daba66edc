"""Products of a matrix and a vector: the operation on a CPU, the kernel in Triton's interpreter, and on a GPU."""

from __future__ import annotations

import os

import pytest
import torch
from torch import library

from kvbench.linear import matvec
from tests.attention.interpreter import require

SIZES = [(8, 64), (7, 96), (1, 8), (33, 40)]


def pair(rows: int, columns: int, dtype: torch.dtype, device: str = "cpu") -> tuple[torch.Tensor, torch.Tensor]:
    """A vector as a step has it, and a matrix."""
    rng = torch.Generator().manual_seed(rows)
    x, weight = (torch.randn(*size, generator=rng) for size in ((1, 1, columns), (rows, columns)))
    return x.to(device, dtype), weight.to(device, dtype)


def wanted(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """In fp64, rounded once."""
    out = weight.double() @ x[0, 0].double()
    return (out if bias is None else out + bias.double()).to(x.dtype)[None, None]


def test_on_a_cpu_it_is_the_linear_layer() -> None:
    """Any number of rows, as ``torch.nn.functional.linear``."""
    x, weight = torch.randn(2, 3, 16), torch.randn(5, 16)
    assert torch.equal(torch.ops.kvbench.matvec(x, weight), torch.nn.functional.linear(x, weight))
    bias = torch.randn(5)
    assert torch.equal(torch.ops.kvbench.matvec(x, weight, bias), torch.nn.functional.linear(x, weight, bias))
    library.opcheck(torch.ops.kvbench.matvec, (x, weight))
    library.opcheck(torch.ops.kvbench.matvec, (x, weight, bias))
    for odd in (torch.ones(2, 8), torch.ones(32)):  # as many numbers, other shapes
        with pytest.raises(RuntimeError):
            torch.ops.kvbench.matvec(odd, weight)


def test_a_kernel_that_cannot_be_had_leaves_it_to_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    """The reason is shown once for each kind of matrix; running out of memory does not count as one."""
    asked, kind = [], (torch.bfloat16, 8, 16, True, torch.device("cpu"))

    def broken(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        asked.append((tuple(weight.shape), bias is not None))
        raise failure

    monkeypatch.setattr(matvec, "launch_matvec", broken)
    matvec.compiles.cache_clear()
    failure: Exception = torch.OutOfMemoryError("full")
    with pytest.raises(torch.OutOfMemoryError):
        matvec.compiles(*kind)
    failure = RuntimeError("out of resource: registers")
    with pytest.warns(UserWarning, match="8 x 16 use torch's library instead of kvbench's kernel: out of resource"):
        assert not matvec.compiles(*kind)
    assert not matvec.compiles(*kind) and asked == [((8, 16), True)] * 2
    matvec.compiles.cache_clear()


def test_wide_matrices_are_read_by_more_warps() -> None:
    """As measured: two rows and four warps up to 8192 columns, four and eight beyond."""
    assert matvec.shape(1) == matvec.shape(8192) == (2, 2048, 4)
    assert matvec.shape(8193) == matvec.shape(28672) == (4, 2048, 8)


def test_the_kernel_is_not_asked_for_tensors_of_a_cpu_or_by_an_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    x, weight = pair(8, 64, torch.float16)
    assert not matvec.served(x, weight)
    triton = pytest.importorskip("triton")
    for interpreted, capability, wanted in ((False, (8, 0), True), (True, (9, 0), False), (False, (7, 5), False)):
        monkeypatch.setattr(triton.knobs.runtime, "interpret", interpreted)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device, found=capability: found)
        assert matvec.kernels.__wrapped__(torch.device("cuda")) is wanted


class Shaped:
    """The attributes of a tensor on a GPU that the choice reads."""

    def __init__(self, tensor: torch.Tensor, address: int = 64) -> None:
        self.is_cuda, self.shape, self.dtype, self.device = True, tensor.shape, tensor.dtype, "cuda"
        self.numel, self.stride, self.is_contiguous = tensor.numel, tensor.stride, tensor.is_contiguous
        self.data_ptr = lambda: address


def test_the_kernel_serves_single_rows_of_aligned_half_precision(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[object] = []
    monkeypatch.setattr(matvec, "kernels", lambda device: True)
    monkeypatch.setattr(matvec, "compiles", lambda *kind: asked.append(kind) or True)
    x, weight = pair(8, 64, torch.float16)
    bias = torch.zeros(8, dtype=torch.float16)
    assert matvec.served(Shaped(x), Shaped(weight)) and matvec.served(Shaped(x), Shaped(weight), bias)
    assert asked == [(torch.float16, 8, 64, False, "cuda"), (torch.float16, 8, 64, True, "cuda")]
    wide = torch.zeros(8, 130, dtype=torch.float16)
    refused = [
        (Shaped(torch.cat([x, x])), Shaped(weight), None),
        (Shaped(x.view(2, 32)), Shaped(weight), None),
        (Shaped(x.bfloat16()), Shaped(weight), None),
        (Shaped(x.float()), Shaped(weight.float()), None),
        (Shaped(x), Shaped(weight), bias.float()),
        (Shaped(x), Shaped(weight), torch.zeros(16, dtype=torch.float16)[::2]),
        (Shaped(x[..., :60]), Shaped(weight[:, :60].contiguous()), None),
        (Shaped(x), Shaped(wide[:, :64]), None),  # rows begin at multiples of 260 bytes
        (Shaped(x), Shaped(weight.t().contiguous().t()), None),
        (Shaped(x, 8), Shaped(weight), None),
        (Shaped(x), Shaped(weight, 72), None),
        (Shaped(x), Shaped(weight[:0]), None),
    ]
    for number, given in enumerate(refused):
        assert not matvec.served(*given), number
    monkeypatch.setattr(matvec, "kernels", lambda device: False)
    assert not matvec.served(Shaped(x), Shaped(weight))


@pytest.mark.skipif(
    torch.cuda.is_available() and os.environ.get("TRITON_INTERPRET") != "1",
    reason="the GPU runs the kernel itself; TRITON_INTERPRET=1 runs this",
)
@pytest.mark.parametrize(("rows", "columns"), SIZES)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["fp16", "bf16"])
def test_the_kernel_sums_in_fp32(rows: int, columns: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where its rows and columns do not divide the matrix, and where the matrix is a part of a wider one."""
    require()
    monkeypatch.setattr(matvec, "SHAPES", ((1 << 30, (2, 32, 1)),))
    x, weight = pair(rows, columns, dtype)
    made = matvec.launch_matvec(x, weight)
    torch.testing.assert_close(made, wanted(x, weight))
    bias = torch.linspace(-1, 1, rows).to(dtype)
    torch.testing.assert_close(matvec.launch_matvec(x, weight, bias), wanted(x, weight, bias))
    monkeypatch.setattr(matvec, "UNROLLED", 0)  # a loop, as for many columns
    assert torch.equal(matvec.launch_matvec(x, weight), made)
    wide = torch.cat([weight, weight], 1)[:, :columns]
    assert wide.stride(0) == 2 * columns
    assert torch.equal(matvec.launch_matvec(x, wide), matvec.launch_matvec(x, weight))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
class TestOnAGpu:
    @pytest.mark.parametrize(
        ("rows", "columns"),
        [*SIZES, (12288, 4096), (4096, 11008), (28672, 4096), (4096, 14336), (1001, 3080), (512, 28672)],
    )
    @pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["fp16", "bf16"])
    def test_the_kernel_sums_in_fp32(self, rows: int, columns: int, dtype: torch.dtype) -> None:
        """Within the last bit of the rounded sum, and the same bits every time."""
        x, weight = pair(rows, columns, dtype, "cuda")
        assert matvec.served(x, weight)
        out = torch.ops.kvbench.matvec(x, weight)
        torch.testing.assert_close(out, wanted(x, weight), atol=1e-2, rtol=2e-2)
        assert torch.equal(out, torch.ops.kvbench.matvec(x, weight))

    def test_what_it_does_not_read_goes_the_library_s_way(self) -> None:
        """Several rows, fp32, odd widths, parts that begin anywhere."""
        x, weight = pair(6, 72, torch.bfloat16, "cuda")
        assert matvec.served(x, weight)
        odd = [(torch.cat([x, x]), weight), (x.float(), weight.float()), (x[..., :71], weight[:, :71].contiguous())]
        odd += [(x[..., 1:65], weight[:, :64]), (x[..., :64], weight[:, 1:65])]
        assert not matvec.served(x.view(2, 36), weight)
        for a, b in odd:
            assert not matvec.served(a, b)
            torch.testing.assert_close(torch.ops.kvbench.matvec(a, b), torch.nn.functional.linear(a, b))
