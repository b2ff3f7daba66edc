"""Quantizers, which turn blocks of keys or values into codes with scales, and back (torch only)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvbench.quantizers.spec import FormatSpec, QuantizerSpec

if TYPE_CHECKING:
    from kvbench.quantizers.affine import AffineQuantizer, Quantized
    from kvbench.quantizers.atom import AtomQuantizer
    from kvbench.quantizers.hierarchical import HierarchicalQuantizer

__all__ = ["AffineQuantizer", "AtomQuantizer", "FormatSpec", "HierarchicalQuantizer", "Quantized", "QuantizerSpec"]


def __getattr__(name: str) -> Any:
    """Import a quantizer on first use; checking a config through `kvbench.quantizers.spec` therefore needs no torch."""
    if name in ("AffineQuantizer", "Quantized"):
        from kvbench.quantizers import affine

        return getattr(affine, name)
    if name == "AtomQuantizer":
        from kvbench.quantizers.atom import AtomQuantizer

        return AtomQuantizer
    if name == "HierarchicalQuantizer":
        from kvbench.quantizers.hierarchical import HierarchicalQuantizer

        return HierarchicalQuantizer
    raise AttributeError(f"module 'kvbench.quantizers' has no attribute {name!r}")
