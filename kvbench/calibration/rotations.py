"""Files of OSCAR's rotations: safetensors with a matrix per layer and side, and their provenance.

The tensors are ``key.I`` and ``value.I`` for layer I, fp32: ``[D, D]``, or ``[H, D, D]`` if each KV head has a matrix
of its own. ``method.rotation.key=FILE`` reads the same file. ``probe.*`` is a sample of the model's weights, which
identifies the model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import torch
from torch import Tensor

from kvbench.calibration.stored import FOLDER, KEY, Stored, calibrations_of_kind, load_stored, unfit
from kvbench.errors import ConfigError

#: largest error of R times its transpose, to which fp32 adds about 1e-6
ORTHOGONAL = 1e-3
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
        """Return the matrix R of a layer, by which rows are multiplied from the right, fp32 ``[(H,) D, D]``."""
        return self.tensors[f"{side}.{layer}"]

    def expected(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Yield the name and the shape of each tensor that a complete file must contain, given its metadata."""
        layers, heads, channels = self.shape
        shape = (heads, channels, channels) if self.per_head else (channels, channels)
        for layer in range(layers):
            for side in SIDES:
                yield f"{side}.{layer}", shape

    def defect(self, name: str, tensor: Tensor) -> str | None:
        """Return what is wrong with a matrix, which must be orthogonal; see :meth:`Stored.defect`."""
        product = tensor.double() @ tensor.double().mT
        error = float((product - torch.eye(len(product[-1]), dtype=torch.float64)).abs().max())
        return None if error <= ORTHOGONAL else f"is not a rotation: R R^T is {error:g} from the identity"

    def check_info(self) -> None:
        """Raise KeyError or ValueError if the metadata is incomplete."""
        super().check_info()
        if self.info["heads"] not in ("shared", "each"):
            raise ValueError(f"heads={self.info['heads']}")


def find_rotations(
    named: Path | None, fits: Callable[[Rotations], bool], beside: Path | None, model: str, command: str
) -> Rotations:
    """Return the file `named`, or else the first file of rotations for which ``fits(file)`` is True.

    Args:
        named: a file, which is returned whatever `fits` says, or the only folder to search; None for the usual folders.
        beside: folder of the model's weights, whose subfolder ``calibration`` is searched; None: unknown.

    Raises:
        ConfigError: there is no such file. The message shows `command`.
    """
    if named is not None and named.is_file():
        return load_stored(named, Rotations)
    folders = [named] if named is not None else [*([beside / "calibration"] if beside is not None else []), FOLDER]
    others = []
    for file in calibrations_of_kind(folders, Rotations):
        if fits(file):
            return file
        others.append(file)
    raise ConfigError(
        KEY,
        None if named is None else str(named),
        f"oscar needs a calibration (rotations), but there is none for {model} in {' or '.join(map(str, folders))}"
        f"{unfit(others)}",
        hint=f"{command}\n        or, without a calibration, "
        "method.basis=rotation method.rotation.key=hadamard method.rotation.value=hadamard",
    )
