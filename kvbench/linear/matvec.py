"""Linear layers for 1 to 16 rows of input, as one operation for ``torch.compile``.

Such a product takes as long as reading its matrix. The compiler chooses among its own kernels by timing them, so the
choice differs between processes: a step took 8.2 ms in one process and 0.44 ms more in another. The kernels of
libraries are optimised for many rows. For one row there is a Triton kernel (:mod:`kvbench.linear.matvec_kernel`) with
fixed block shapes, in which a program requests all its data before it sums. For 2 to 16 rows, as in the verification of
drafts, there is the CUDA kernel that also multiplies 4-bit weights (:mod:`kvbench.linear.product_kernels`). Both are
measured by ``python -m kvbench.bench products`` (results/h200/README.md). Products in fp32, and those that neither can
compute (:func:`served`), go to torch's library.
"""

from __future__ import annotations

import warnings
from functools import cache, lru_cache

import torch
from torch import Tensor, library, nn

from kvbench.linear import product_kernels

#: for one row: pairs of a largest number of columns and the (rows of a program, columns at a time, warps) to use, as
#: measured on an H200
SHAPES = ((8192, (2, 2048, 4)), (1 << 30, (4, 2048, 8)))

#: number of columns up to which a program requests everything that it reads at once; with more, registers would not
#: suffice
UNROLLED = 16384


@library.custom_op("kvbench::matvec", mutates_args=())
def matvec(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Compute a linear layer, ``x @ weight.T + bias``, without gradients.

    x is ``[..., K]``, the matrix ``[N, K]``, the bias ``[N]`` or None, and the output ``[..., N]``. A kernel of kvbench
    computes the product if one can (:func:`served`), and torch's library otherwise.
    """
    return launch_matvec(x, weight, bias) if served(x, weight, bias) else nn.functional.linear(x, weight, bias)


@matvec.register_fake
def _(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    torch._check(
        x.shape[-1] == weight.shape[1],
        lambda: f"the input has {x.shape[-1]} columns, but the matrix has {weight.shape[1]}",
    )
    return x.new_empty(*x.shape[:-1], weight.shape[0])


def served(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> bool:
    """Return True if a kernel of kvbench can compute the product of these arguments, which are those of :func:`matvec`.

    All tensors must have the same 16-bit dtype and be on a GPU for which the kernels compile. Elements of a row must be
    contiguous, and each row of the matrix must begin at a multiple of 16 bytes. The number of columns must be a
    multiple of 8 for an input of one row, and of 128 for one of 2 to 16 rows.
    """
    rows, columns = weight.shape
    if not (
        x.is_cuda
        and x.shape[-1] == columns
        and x.dtype == weight.dtype
        and (bias is None or (bias.dtype == x.dtype and bias.is_contiguous()))
        and x.dtype in (torch.bfloat16, torch.float16)
        and x.stride(-1) == weight.stride(1) == 1
        and not columns % 8
        and not weight.stride(0) % 8
        and not (x.data_ptr() | weight.data_ptr()) % 16
        and rows > 0
    ):
        return False
    if x.numel() == columns:
        return kernels(x.device) and compiles(x.dtype, rows, columns, bias is not None, x.device)
    if not product_kernels.serves(x, columns, bias):
        return False
    lines, bf16 = x.numel() // columns, x.dtype == torch.bfloat16
    return product_kernels.configuration(lines, rows, columns, 0, False, bf16, x.device.index or 0) is not None


@cache
def kernels(device: torch.device) -> bool:
    """Return True if Triton kernels can run on a GPU: Triton is installed, compiles, and supports the GPU.

    In Triton's interpreter mode the result is False, because kernels are not compiled. The GPU must have compute
    capability 8.0 or higher.
    """
    try:
        import triton
    except ImportError:
        return False
    return not triton.knobs.runtime.interpret and torch.cuda.get_device_capability(device) >= (8, 0)


@lru_cache(maxsize=256)
def compiles(dtype: torch.dtype, rows: int, columns: int, bias: bool, device: torch.device) -> bool:
    """Return True if the kernel for one row compiles for matrices of a given shape; otherwise warn and return False."""
    x, weight = torch.empty(columns, dtype=dtype, device=device), torch.empty(1, columns, dtype=dtype, device=device)
    try:
        launch_matvec(
            x, weight.expand(rows, columns).as_strided((rows, columns), (0, 1)), x.new_empty(rows) if bias else None
        )
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        message = " ".join(str(error).split())[:200]
        warnings.warn(
            f"products of {rows} x {columns} use torch's library instead of kvbench's kernel: {message}", stacklevel=2
        )
        return False
    return True


def launch_matvec(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Compute a product with a kernel of kvbench and return it; the arguments must be valid for :func:`served`."""
    rows, columns = weight.shape
    if x.numel() > columns:
        return product_kernels.half_precision(x, weight, bias)
    from kvbench.linear.matvec_kernel import matvec_product

    own_rows, block, warps = shape(columns)
    out = x.new_empty(*x.shape[:-1], rows)
    with torch.cuda.device_of(x):
        matvec_product[(-(-rows // own_rows),)](
            x,
            weight,
            x if bias is None else bias,
            out,
            rows,
            weight.stride(0),
            columns,
            own_rows,
            block,
            columns % block == 0,
            rows % own_rows == 0,
            bias is not None,
            columns <= UNROLLED,
            num_warps=warps,
        )
    return out


def shape(columns: int) -> tuple[int, int, int]:
    """Return the block sizes with which to launch the kernel for one row, for a matrix with `columns` columns.

    They are the rows that a program of the kernel computes, the columns that it reads at a time, and its warps.
    """
    return next(shape for most, shape in SHAPES if columns <= most)
