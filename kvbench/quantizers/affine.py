"""Asymmetric group quantization with a floating-point minimum (KIVI, sec. 3; also Cocktail's and LogQuant's here).

For a group with minimum ``mn`` and maximum ``mx``::

    scale = (mx - mn) / (2**bits - 1)
    code  = round_half_even(clamp((x - mn) / scale, 0, 2**bits - 1))
    x^    = code * scale + mn

fp16 input is quantized in fp16 arithmetic, each operation rounded, as KIVI's released code does (jy-yuan/KIVI,
quant/new_pack.py); bf16 in fp32; fp32 in fp32. Scale and minimum are stored as fp16 (fp32 for fp32 input), so one
packed format serves every model.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kvbench.errors import ConfigError, NonFiniteError
from kvbench.quantizers.packing import PLANES, join_planes, pack, split_planes, unpack
from kvbench.quantizers.spec import Axis, FormatSpec


@dataclass(frozen=True)
class Parameter:
    """One of the tensors that hold the parameters of groups, for tokens ``[..., T, D]``.

    Args:
        axis: ``token``: a group is `group` channels of one token, and the tensor is ``[..., T, D / group]``.
            ``channel``: a group is `group` tokens of one channel, and the tensor is ``[..., T / group, D]``.
        group: number of elements per group; None (axis ``token`` only) means all channels of a head.
        window: 0, or the number of tokens that are divided into as few groups of at most `group` tokens as possible
            (axis ``channel`` only; :class:`kvbench.quantizers.windowed.WindowedQuantizer`).
        padding: number of unused elements at the end of each row, if the original layout aligns rows (axis ``token``
            only). They are counted as stored.
    """

    dtype: torch.dtype
    axis: Axis = "token"
    group: int | None = None
    window: int = 0
    padding: int = 0

    @property
    def block_tokens(self) -> int:
        """Smallest number of tokens that have rows of their own in the tensor."""
        if self.axis == "token":
            return 1
        return self.window or self.group or 1

    @property
    def block_rows(self) -> int:
        """Number of rows of the tensor that belong to :attr:`block_tokens` tokens."""
        return -(-self.window // (self.group or self.window)) if self.window else 1

    def row(self, token: int) -> int:
        """Return the first row of the block that begins at `token`, a multiple of :attr:`block_tokens`."""
        return token // self.block_tokens * self.block_rows

    def shape(self, tokens: int, channels: int) -> tuple[int, int]:
        """Return the last two dimensions of the tensor for tokens ``[..., T, D]``; only whole blocks count."""
        if self.axis == "channel":
            return self.row(tokens), channels
        return tokens, channels // (self.group or channels) + self.padding

    def nbytes(self, tokens: int, channels: int) -> int:
        """Return the number of bytes of the tensor for one row and one KV head; only whole blocks of tokens count."""
        rows, width = self.shape(tokens, channels)
        return rows * width * self.dtype.itemsize


FP16_MAX = 65504.0


@dataclass
class Quantized:
    """A quantized tensor: its packed codes and the parameters needed to dequantize it.

    Shapes are given for the original tensor ``[..., T, D]`` of T tokens with D channels, in groups of G elements.

    Args:
        packed: one flat uint8 tensor per plane of the codes (:func:`kvbench.quantizers.packing.pack`).
        params: ``(scale, minimum)`` of every group, or ``(scale, zero point)`` for :class:`AtomQuantizer`. Both have
            the shape ``[..., T/G, D]`` for axis ``channel`` and ``[..., T, D/G]`` for axis ``token``.
    """

    quantizer: AffineQuantizer
    packed: list[Tensor]
    params: tuple[Tensor, ...]
    shape: torch.Size
    dtype: torch.dtype

    def codes(self) -> Tensor:
        """Unpack the codes; return them as uint8 in the shape of the original tensor."""
        return unpack(self.packed, self.quantizer.bits, self.shape)

    @property
    def scale(self) -> Tensor:
        """Scale of each group, in the shape described for `params`."""
        return self.params[0]

    @property
    def minimum(self) -> Tensor:
        """Value that code 0 stands for in each group; except for :class:`AtomQuantizer`, this is the stored minimum."""
        return self.quantizer.minimum(self.params)

    def dequantize(self) -> Tensor:
        """Return the dequantized tensor, in the original shape and dtype."""
        return self.quantizer.decode(self.codes(), self.params, self.dtype)

    @property
    def nbytes(self) -> int:
        """Number of bytes that codes and parameters take in memory."""
        return sum(t.numel() * t.element_size() for t in (*self.packed, *self.params))


class AffineQuantizer:
    """KIVI's asymmetric quantizer: a group of elements shares a floating-point scale and minimum.

    Args:
        bits: bits per code, one of :data:`~kvbench.quantizers.spec.PLANES`.
        group_size: number of elements that share a scale and a minimum; None (axis ``token`` only) means all channels
            of a head.
        axis: direction in which groups are formed (:class:`~kvbench.quantizers.spec.FormatSpec`).
    """

    def __init__(self, bits: int, group_size: int | None, axis: Axis = "channel") -> None:
        FormatSpec(bits=bits, group_size="head_dim" if group_size is None else group_size, axis=axis).check("quantizer")
        self.bits, self.group_size, self.axis = bits, group_size, axis
        self.levels = (1 << bits) - 1

    def __repr__(self) -> str:
        return f"{type(self).__name__}(bits={self.bits}, group_size={self.group_size}, axis={self.axis!r})"

    def quantize(self, x: Tensor) -> Quantized:
        """Quantize keys or values ``[..., T, D]`` and pack the codes.

        Raises:
            ConfigError: the group size does not divide T (axis ``channel``) or D (axis ``token``).
            NonFiniteError: `x` contains NaN or Inf; the message names the index of the first such element.
        """
        codes, params = self.encode(x)
        return Quantized(self, pack(codes, self.bits), params, x.shape, x.dtype)

    def encode(self, x: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Quantize keys or values ``[..., T, D]`` of T tokens with D channels, without packing the codes.

        Returns:
            The codes, uint8 in the shape of `x`, and the parameters of all groups, shaped as in :class:`Quantized`.

        Raises:
            ConfigError: the group size does not divide T (axis ``channel``) or D (axis ``token``).
            NonFiniteError: `x` contains NaN or Inf.
        """
        grouped = self.group(x)
        dim = grouped.ndim - 2 if self.axis == "channel" else grouped.ndim - 1
        low, high = torch.aminmax(grouped, dim=dim, keepdim=True)
        if bool(((low - low) + (high - high)).any()):  # 0 of what is finite, else NaN, which counts as True
            raise NonFiniteError(f"a tensor to be quantized contains NaN or Inf at index {first_non_finite(x)}")
        # -0 becomes 0, as either of the two may be returned as the extreme
        codes, params = self.encode_groups(grouped, low + 0.0, high + 0.0)
        return codes.to(torch.uint8).view(x.shape), tuple(p.squeeze(dim) for p in params)

    def encode_groups(self, x: Tensor, low: Tensor, high: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Compute codes and parameters of a tensor that :meth:`group` has reshaped. Subclasses override this step.

        Args:
            low: minimum of each group, shaped like `x` but with size 1 along the group; likewise `high`.

        Returns:
            The codes, whole numbers in a floating-point dtype in the shape of `x`, and ``(scale, minimum)`` in the
            shape of `low`.
        """
        levels = self.whole(self.levels, low)
        if x.dtype == torch.float16:
            fit = quarter(torch.isinf(high - low))  # high - low may pass 65504; the scale itself fits
            scale, minimum = (high * fit - low * fit) / levels / fit, low
        else:
            minimum, scale = low.float(), (high.float() - low.float()) / levels
            if x.dtype != torch.float32:  # bf16: the scale follows from the minimum as it is stored
                minimum = minimum.clamp(-FP16_MAX, FP16_MAX).half()
                scale = ((high.float() - minimum.float()) / levels).clamp(0.0, FP16_MAX).half()
        work = x.dtype if x.dtype in (torch.float16, torch.float32) else torch.float32
        step, base, x = scale.to(work), minimum.to(work), x.to(work)
        part = self.share(step, base, high)  # 1/4 where fp16 would overflow
        # A constant group (or one whose scale underflows) has code 0 throughout: x^ is its minimum.
        safe = torch.where(step == 0, torch.ones_like(step), step)
        if part is None:
            codes = (x - base) / safe
        else:
            codes = (x * part - base * part) / (safe * part)
        codes = codes.clamp_(0, self.levels).round_()
        return torch.where(step == 0, torch.zeros_like(codes), codes), (scale, minimum)

    def share(self, step: Tensor, base: Tensor, high: Tensor) -> Tensor | None:
        """Return factors, 1/4 or 1 for each group, that keep the computation of codes in fp16 from overflowing.

        The difference between an element and its group's minimum may exceed fp16's range, although both are inside it.
        The caller multiplies the elements, the minimum and the scale of a group by its factor, which leaves the codes
        the same.

        Returns:
            The factors in the shape of `step`; None if no group needs one, or if codes are not computed in fp16.
        """
        if step.dtype != torch.float16:
            return None
        wide = torch.isinf(high - base) | torch.isinf(step * self.levels)
        return quarter(wide) if bool(wide.any()) else None

    @staticmethod
    def whole(number: int, like: Tensor) -> Tensor:
        """Return `number` as a tensor without dimensions, so that dividing by it is correctly rounded on CUDA too.

        CUDA divides by a Python number inexactly: it multiplies by the rounded reciprocal. The result is on the device
        of `like`, and fp16 if `like` is, else fp32.
        """
        dtype = torch.float16 if like.dtype == torch.float16 else torch.float32
        return torch.full((), number, dtype=dtype, device=like.device)

    def decode(self, codes: Tensor, params: tuple[Tensor, ...], dtype: torch.dtype) -> Tensor:
        """Dequantize unpacked codes ``[..., T, D]``, in their shape.

        Args:
            params: ``(scale, minimum)`` of the groups, shaped as in :class:`Quantized`.
            dtype: dtype of the result. For fp16, every operation is rounded to fp16; for bf16, arithmetic is in fp32.
        """
        work = torch.float32 if dtype == torch.bfloat16 else dtype
        scale, minimum = (self.expand(p.to(work)) for p in params)
        values = self.group(codes.to(work)).mul_(scale).add_(minimum)
        if work == torch.float16 and not torch.isfinite(values).all():  # code * scale alone passed 65504
            return self.decode(codes, params, torch.float32).clamp(-FP16_MAX, FP16_MAX).half()
        return values.view(codes.shape).to(dtype)

    def minimum(self, params: tuple[Tensor, ...]) -> Tensor:
        """Return the value that code 0 stands for in each group."""
        return params[1]

    def group(self, x: Tensor) -> Tensor:
        """Reshape keys or values ``[..., T, D]`` so that the elements of a group lie along a dimension of their own.

        Returns:
            For groups of G elements, ``[..., T/G, G, D]`` if the axis is ``channel``, and ``[..., T, D/G, G]`` if it is
            ``token``.

        Raises:
            ConfigError: the group size does not divide T (axis ``channel``) or D (axis ``token``).
        """
        tokens, channels = x.shape[-2:]
        size = self.group_size or channels
        extent, what = (tokens, "tokens") if self.axis == "channel" else (channels, "channels")
        if extent % size:
            raise ConfigError("group_size", size, f"does not divide the {extent} {what} to be quantized")
        x = x.contiguous()
        if self.axis == "channel":
            return x.view(*x.shape[:-2], tokens // size, size, channels)
        return x.view(*x.shape[:-1], channels // size, size)

    def expand(self, param: Tensor) -> Tensor:
        """Insert a dimension of size 1 into scales or minima, which then broadcast over the result of :meth:`group`."""
        return param.unsqueeze(-2 if self.axis == "channel" else -1)

    def parameters(self, dtype: torch.dtype) -> tuple[Parameter, ...]:
        """Describe the parameter tensors that :meth:`encode` returns, in the same order."""
        parameter = Parameter(param_dtype(dtype), self.axis, self.group_size)
        return (parameter, parameter)

    def planes(self, channels: int) -> tuple[tuple[int, int], ...]:
        """Return the bits and the channels of each plane of codes (:meth:`split`), most significant bits first."""
        return tuple((width, channels) for width in PLANES[self.bits])

    def split(self, codes: Tensor) -> list[Tensor]:
        """Split codes, uint8 ``[..., D]``, into planes, uint8 ``[..., channels of the plane]``."""
        return split_planes(codes, self.bits)

    def join(self, planes: list[Tensor]) -> Tensor:
        """Combine planes into codes; the inverse of :meth:`split` for planes of any integer dtype."""
        return join_planes(planes, self.bits)

    @property
    def block_tokens(self) -> int:
        """Smallest number of tokens that can be encoded alone: the group size for axis ``channel``, else 1."""
        return (self.group_size or 1) if self.axis == "channel" else 1


def quarter(wide: Tensor) -> Tensor:
    """Return fp16 factors for a mask of groups whose range is too wide for fp16: 1/4 where it is True, else 1."""
    return torch.where(wide, 0.25, 1.0).half()


def param_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which scales and minima are stored for tensors of `dtype`: fp32 for fp32, else fp16."""
    return torch.float32 if dtype in (torch.float32, torch.float64) else torch.float16


def first_non_finite(x: Tensor) -> tuple[int, ...]:
    """Return the index, one number per dimension, of the first NaN or Inf of `x`, which must contain one."""
    return tuple(int(i) for i in (~torch.isfinite(x)).nonzero()[0])
