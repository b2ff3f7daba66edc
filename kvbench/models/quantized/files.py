"""The tensors in the safetensors files of a checkpoint, read one at a time."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from kvbench.models.checkpoint import tensor_names

if TYPE_CHECKING:
    import torch
    from torch import Tensor


class Tensors:
    """The tensors of a checkpoint.

    Args:
        files: its safetensors files; only their headers are read at first.

    Raises:
        DamagedFile: the header of a file cannot be read.
    """

    def __init__(self, files: Sequence[Path]) -> None:
        self._file = {name: file for file in files for name in tensor_names(file)}

    @property
    def names(self) -> Collection[str]:
        """Names of all tensors."""
        return self._file.keys()

    def read(self, name: str, device: torch.device) -> Tensor:
        """Read a tensor, in its own dtype, onto a device."""
        from safetensors import safe_open

        with safe_open(self._file[name], framework="pt") as opened:
            tensor: Tensor = opened.get_tensor(name)
        return tensor.to(device)
