"""Files of OSCAR's rotations: safetensors with a matrix per layer and side, and their provenance.

The tensors are ``key.I`` and ``value.I`` for layer I, fp32: ``[D, D]``, or ``[H, D, D]`` if each KV head has a matrix
of its own. ``method.rotation.key=FILE`` reads the same file. ``probe.*`` is a sample of the model's weights, which
identifies the model.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from kvbench.calibration.stored import Stored

#: the two sides of a layer
SIDES = ("key", "value")


@dataclass
class Rotations(Stored):
    """OSCAR's rotations of one model, as a calibration file holds them.

    Args:
        info: how the calibration was made, all as strings; ``heads`` is ``shared`` or ``each``.
        tensors: rotations and a sample of the model's weights, under the names that this module's docstring lists.
        path: the file; None if it has not been written yet.
    """

    FORMAT: ClassVar[str] = "kvbench-oscar-1"
    ARGUMENTS: ClassVar[str] = " method=oscar"

    @property
    def per_head(self) -> bool:
        """True if each KV head has a matrix of its own, False if the heads of a layer share one."""
        return self.info["heads"] == "each"

    def rotation(self, layer: int, side: str) -> Tensor:
        """Return the matrix R of a layer by which rows are multiplied from the right, fp32 ``[D, D]`` or ``[H, D, D]``.

        Args:
            layer: index of the layer.
            side: ``key`` or ``value``.
        """
        return self.tensors[f"{side}.{layer}"]

    def expected(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Yield the name and the shape of each tensor that a complete file must contain, given its metadata."""
        layers, heads, channels = self.shape
        shape = (heads, channels, channels) if self.per_head else (channels, channels)
        for layer in range(layers):
            for side in SIDES:
                yield f"{side}.{layer}", shape

    def check_info(self) -> None:
        """Raise KeyError or ValueError if the metadata is incomplete."""
        super().check_info()
        if self.info["heads"] not in ("shared", "each"):
            raise ValueError(f"heads={self.info['heads']}")


def command(model: str) -> str:
    """Return the command line that would create a file of rotations, for a hint in an error message.

    Args:
        model: name of the model.
    """
    return f"python -m kvbench.calibrate{Rotations.ARGUMENTS} --model {model} --text FILE"
