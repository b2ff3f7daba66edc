"""The tensors in the files of a checkpoint, read one at a time, and a check of their types."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from kvbench.models.checkpoint import DamagedFile, tensor_names, tensor_types

if TYPE_CHECKING:
    import torch
    from torch import Tensor

#: types of weights that are not quantized
FLOATS = ("F64", "F32", "F16", "BF16")


class Tensors:
    """The tensors of a checkpoint's safetensors files, of which only the headers are read at first.

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


def check_types(file: Path) -> None:
    """Raise DamagedFile if a safetensors or pickled file has weights in a type that cannot be read without a scale.

    This is for checkpoints whose ``config.json`` names no quantization; transformers would load the codes as weights.
    Integers that are not weights (positions, masks of four dimensions) are allowed.
    """
    types = tensor_types(file) if file.suffix == ".safetensors" else _pickled_types(file)
    for name, (form, dimensions) in types.items():
        weight = name.endswith(".weight") or (name.endswith(".bias") and dimensions == 1)
        if form not in FLOATS and (weight or form.startswith(("I8", "F8"))):
            raise DamagedFile(
                file,
                f"stores {name} as {form}, not in floating point of 16 bits or more, and config.json names no "
                "quantization by which to read it",
                "use the checkpoint with 16-bit weights, or the config.json (with quantization_config) that belongs to "
                "these files",
            )


def _pickled_types(file: Path) -> dict[str, tuple[str, int]]:
    """Return the result of :func:`tensor_types` for a pickled file (``*.bin``), without loading its tensors.

    If torch cannot read the file, it raises exceptions of various types.
    """
    import torch

    content = torch.load(file, map_location="meta", weights_only=True)
    names = {torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}
    names |= {torch.int8: "I8", torch.uint8: "U8"}
    tensors = {name: entry for name, entry in content.items() if isinstance(entry, torch.Tensor)}
    return {name: (names.get(entry.dtype, str(entry.dtype)), entry.ndim) for name, entry in tensors.items()}
