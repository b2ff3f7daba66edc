"""Calibration files: safetensors with the thresholds and codebooks of every layer, and their provenance.

The tensors for layer I, with SIDE ``key`` or ``value`` and each number of BITS per code, are:

- ``layers.I.key.thresholds``, fp16 ``[2, C]``: the upper and the lower threshold of each key channel;
- ``layers.I.SIDE.levels.BITS``, fp32 ``[2**BITS]``: the codebook;
- ``layers.I.SIDE.norm.BITS``, fp32 ``[2]``: Q-Norm's scale and offset.

``probe.*`` is a sample of the model's weights, which identifies the model.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from torch import Tensor

from kvbench.calibration import stored
from kvbench.calibration.stored import FOLDER as FOLDER
from kvbench.calibration.stored import KEY as KEY
from kvbench.calibration.stored import probe as probe
from kvbench.calibration.stored import save as save
from kvbench.calibration.stored import versions as versions
from kvbench.errors import ConfigError

FORMAT = "kvbench-kvquant-1"


@dataclass
class Calibration(stored.Stored):
    """KVQuant's thresholds and codebooks for one model, as a calibration file holds them.

    Args:
        info: how the calibration was made, all as strings: ``model``, ``bits`` (such as "2,3,4"), ``outliers``,
            ``layers``, ``kv_heads``, ``head_dim``, ``text_sha256``, ``tokens``, ``fisher``, versions of packages, and
            others.
        tensors: thresholds, codebooks and a sample of the model's weights, under the names that this module's docstring
            lists.
        path: the file; None if it has not been written yet.
    """

    FORMAT: ClassVar[str] = FORMAT

    @property
    def bits(self) -> tuple[int, ...]:
        """The code sizes, in bits, for which there are codebooks."""
        return tuple(int(width) for width in self.info["bits"].split(","))

    @property
    def outliers(self) -> float:
        """Fraction of the elements that are outliers, for which the thresholds were chosen."""
        return float(self.info["outliers"])

    def thresholds(self, layer: int) -> Tensor:
        """Return the upper and the lower outlier threshold of each key channel of a layer, fp16 ``[2, C]``."""
        return self.tensors[f"layers.{layer}.key.thresholds"]

    def levels(self, layer: int, side: str, bits: int) -> Tensor:
        """Return the codebook (the levels) of the keys or values of a layer, fp32 ``[2**bits]``."""
        return self.tensors[f"layers.{layer}.{side}.levels.{bits}"]

    def norm(self, layer: int, side: str, bits: int) -> Tensor:
        """Return Q-Norm's correction of a codebook: its scale and its offset, fp32 ``[2]``.

        If the levels are multiplied by the scale and increased by the offset, the dequantized elements get the mean and
        the standard deviation of the original ones.
        """
        return self.tensors[f"layers.{layer}.{side}.norm.{bits}"]

    def expected(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Yield the name and the shape of each tensor that a complete file must contain, given its metadata."""
        layers, heads, channels = self.shape
        for layer in range(layers):
            yield f"layers.{layer}.key.thresholds", (2, heads * channels)
            for side in ("key", "value"):
                for width in self.bits:
                    yield f"layers.{layer}.{side}.levels.{width}", (1 << width,)
                    yield f"layers.{layer}.{side}.norm.{width}", (2,)

    def defect(self, name: str, tensor: Tensor) -> str | None:
        """Return what is wrong with a tensor, or None; see :meth:`Stored.defect`.

        Levels must ascend and not all be equal; where there were too few distinct elements, the last level is repeated.
        Upper thresholds must not be below lower ones, and Q-Norm's scale must be positive.
        """
        if ".levels." in name and (bool((tensor.diff() < 0).any()) or bool(tensor[0] == tensor[-1])):
            return f"is not a codebook of ascending levels, but {_some(tensor)}"
        if name.endswith(".thresholds") and bool((tensor[0] < tensor[1]).any()):
            channel = int((tensor[0] < tensor[1]).nonzero()[0])
            upper, lower = tensor[:, channel].tolist()
            return f"has an upper threshold below the lower one, {upper:g} and {lower:g} in channel {channel}"
        if ".norm." in name and not bool(tensor[0] > 0):
            return f"has a scale that is not positive, {float(tensor[0]):g}"
        return None

    def check_info(self) -> None:
        """Raise KeyError or ValueError if the metadata is incomplete."""
        float(self.info["outliers"]), self.info["model"]

    def check_format(self, bits: int, outliers: float) -> None:
        """Check that the file has codebooks of `bits`, and was made with this fraction of outliers.

        Raises:
            ConfigError: it does not fit.
        """
        if bits not in self.bits:
            raise ConfigError(
                "method.bits",
                bits,
                f"{self.path} contains only codebooks with {self.info['bits']} bits",
                allowed=self.bits,
            )
        if abs(self.outliers - outliers) > 1e-9:
            raise ConfigError(
                "method.outliers",
                outliers,
                f"{self.path} was made with outliers={self.outliers!r}",
                allowed=[repr(self.outliers)],
                hint=f"run python -m kvbench.calibrate again with --outliers {outliers!r}",
            )


def _some(numbers: Tensor) -> str:
    """Return the first numbers of a tensor, for a message."""
    return ", ".join(f"{number:g}" for number in numbers[:4].tolist()) + (", ..." if len(numbers) > 4 else "")


def load_calibration(path: Path) -> Calibration:
    """Return the checked contents of a calibration file; an unchanged file is read only once per process.

    Raises:
        ConfigError: the file is missing, damaged, or not a calibration file.
    """
    return stored.load_stored(path, Calibration)


def calibrations_in(folders: Iterable[Path]) -> Iterator[Calibration]:
    """Yield the calibrations found in some folders, those of a folder in the order of their file names.

    Other files are skipped. Damaged files are skipped with a warning.
    """
    return stored.calibrations_of_kind(folders, Calibration)


def command(model: str, bits: int, outliers: float) -> str:
    """Return the command line that would create a file with given options, as a hint; see :meth:`Stored.command`."""
    return f"{Calibration.command(model)} --bits {bits} --outliers {outliers!r}"
