"""Quantizers: blocks of keys or values to codes with scales, and back (torch only)."""

from kvbench.quantizers.affine import AffineQuantizer, Quantized
from kvbench.quantizers.atom import AtomQuantizer
from kvbench.quantizers.spec import FormatSpec, QuantizerSpec

__all__ = ["AffineQuantizer", "AtomQuantizer", "FormatSpec", "Quantized", "QuantizerSpec"]
