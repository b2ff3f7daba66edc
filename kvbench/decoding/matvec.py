"""Linear layers of a step with a single row: products of a matrix and a vector, as one operation for ``torch.compile``.

Such a product is bound by reading its matrix. The compiler's own kernels for it depend on a search that measures, and
steps of 8.2 ms with them took 0.44 ms more in another process; libraries write theirs for many rows. The kernel here
(:mod:`kvbench.decoding.matvec_kernel`) asks for all that a program reads before it sums, in shapes that are fixed
(``python -m kvbench.bench products``; results/h200/README.md). fp32, and what it cannot read (:func:`served`), go to
torch's library.
"""

from __future__ import annotations

import warnings
from functools import cache, lru_cache

import torch
from torch import Tensor, library, nn

#: (most columns, (rows and columns of a program at a time, warps)), as measured on an H200
SHAPES = ((8192, (2, 2048, 4)), (1 << 30, (4, 2048, 8)))

#: columns up to which a program asks for all that it reads at once; beyond them it would run out of registers
UNROLLED = 16384


@library.custom_op("kvbench::matvec", mutates_args=())
def matvec(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Multiply ``x`` ``[..., K]`` by ``weight`` ``[N, K]`` and add ``bias`` ``[N]``: ``[..., N]``. Has no gradient."""
    return launch(x, weight, bias) if served(x, weight, bias) else nn.functional.linear(x, weight, bias)


@matvec.register_fake
def _(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    torch._check(x.shape[-1] == weight.shape[1], lambda: f"{x.shape[-1]} columns for a matrix of {weight.shape[1]}")
    return x.new_empty(*x.shape[:-1], weight.shape[0])


def served(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> bool:
    """Return True if the kernel computes it: a single row on a GPU in 16 bits, in memory as it reads it."""
    rows, columns = weight.shape
    return (
        x.is_cuda
        and x.numel() == x.shape[-1] == columns
        and x.dtype == weight.dtype
        and (bias is None or (bias.dtype == x.dtype and bias.is_contiguous()))
        and x.dtype in (torch.bfloat16, torch.float16)
        and x.stride(-1) == weight.stride(1) == 1
        and not columns % 8
        and not weight.stride(0) % 8
        and not (x.data_ptr() | weight.data_ptr()) % 16
        and rows > 0
        and kernels(x.device)
        and compiles(x.dtype, rows, columns, bias is not None, x.device)
    )


@cache
def kernels(device: torch.device) -> bool:
    """Return True if Triton is installed and compiles for this GPU."""
    try:
        import triton
    except ImportError:
        return False
    return not triton.knobs.runtime.interpret and torch.cuda.get_device_capability(device) >= (8, 0)


@lru_cache(maxsize=256)
def compiles(dtype: torch.dtype, rows: int, columns: int, bias: bool, device: torch.device) -> bool:
    """Return True if the kernel compiles for such a matrix; if not, warn once with the reason."""
    x, weight = torch.empty(columns, dtype=dtype, device=device), torch.empty(1, columns, dtype=dtype, device=device)
    try:
        launch(x, weight.expand(rows, columns).as_strided((rows, columns), (0, 1)), x.new_empty(rows) if bias else None)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        message = " ".join(str(error).split())[:200]
        warnings.warn(f"products of {rows} x {columns} go to torch's library: {message}", stacklevel=2)
        return False
    return True


def launch(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Launch the kernel for arguments that :func:`served` accepts."""
    from kvbench.decoding.matvec_kernel import product

    rows, columns = weight.shape
    own_rows, block, warps = shape(columns)
    out = x.new_empty(*x.shape[:-1], rows)
    with torch.cuda.device_of(x):
        product[(-(-rows // own_rows),)](
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
    """Return rows and columns that a program processes at a time, and its warps, for so many columns."""
    return next(shape for most, shape in SHAPES if columns <= most)
