"""Rotation of heads: keys and values are stored in another basis, and queries rotated to match. Needs only torch.

Attention scores do not change if the keys and the queries of a head are multiplied by the same orthogonal matrix, nor
does the output if the values are multiplied by such a matrix and the output by its inverse. In another basis, large
channels are spread over all channels, so that quantization loses less (QuaRot, Ashkboos et al. 2024, arXiv 2404.00456).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvbench.rotation.spec import RotationSpec

if TYPE_CHECKING:
    from kvbench.rotation.basis import Transform
    from kvbench.rotation.named import transform

__all__ = ["RotationSpec", "Transform", "transform"]


def __getattr__(name: str) -> Any:
    """Import a transform on first access, so that checking a config through `kvbench.rotation.spec` needs no torch."""
    if name == "Transform":
        from kvbench.rotation.basis import Transform

        return Transform
    if name == "transform":
        from kvbench.rotation.named import transform

        return transform
    raise AttributeError(f"module 'kvbench.rotation' has no attribute {name!r}")
