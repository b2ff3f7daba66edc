"""Folders and names of converted GGUF files. Does not import torch.

A file is converted once, into the folder of kvbench's data (``KVBENCH_CACHE``, or ``~/.cache/kvbench``), under a name
made of its SHA-256: copies of a file share the result, and another file of the same name gets its own.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from kvbench.models.checkpoint import DamagedFile, read_object
from kvbench.util.fingerprint import cache_folder, sha256

ENDING = ".gguf"
#: file in the folder of a converted checkpoint, written last; it holds what :func:`record` returns
RECORD = "gguf.json"
#: to be incremented when a file would be converted to something else; older conversions are then made anew
CONVERSION = 1


def is_gguf(path: str | None) -> bool:
    """Return True if a value of ``model.path`` names a GGUF file rather than a folder."""
    return path is not None and path.lower().endswith(ENDING)


def models_folder() -> Path:
    """Return the folder that holds all converted checkpoints; it need not exist."""
    return cache_folder() / "models"


def checkpoint_of(digest: str) -> Path:
    """Return the folder for the converted checkpoint of the GGUF file with this SHA-256; it need not exist."""
    return models_folder() / f"gguf-{digest[:16]}-{CONVERSION}"


def finished(digest: str) -> Path | None:
    """Return the folder of the converted checkpoint of the GGUF file with this SHA-256; None before conversion."""
    folder = checkpoint_of(digest)
    return folder if (folder / RECORD).is_file() else None


def local_checkpoint(path: str) -> Path:
    """Return the folder for the converted checkpoint of a GGUF file; `path` itself if there is no such file."""
    file = Path(path).expanduser()
    return checkpoint_of(sha256(file)) if file.is_file() else file


def record(folder: Path | None) -> dict[str, Any] | None:
    """Return what is known about the GGUF file of a converted checkpoint; None for every other folder.

    Returns:
        ``sha256`` and ``bytes`` of the file, ``form`` (the name of its format, such as ``q4_1``), ``quantized`` (True
        if `form` has fewer than 16 bits), ``tensors`` (numbers of tensors by type), ``name`` and ``licence``.

    Raises:
        DamagedFile: the record cannot be read.
    """
    if folder is None or not (folder / RECORD).is_file():
        return None
    known = read_object(folder / RECORD)
    if not {"sha256", "form", "quantized", "tensors"} <= known.keys():
        raise DamagedFile(folder / RECORD, "lacks keys", f"remove {folder}; it is then converted anew")
    return known


def dequantized(folder: Path | None) -> str | None:
    """Return the format that a checkpoint's weights had before they were dequantized, for example ``gguf q4_1``.

    None if the folder has no record that they were quantized.
    """
    known = record(folder)
    return f"gguf {known['form']}" if known and known["quantized"] else None


def gguf_label(path: str) -> str:
    """Return a GGUF file's name in results: the file's name, and the weights' format unless the name contains it."""
    file = Path(path).expanduser()
    known = record(local_checkpoint(path))
    form = known["form"] if known else ""
    return file.stem if form in file.stem.lower().replace("-", "_") else f"{file.stem}-{form}"
