"""The user's folder of compiled kernels. Machine code is loaded from it, so nobody else may write to it."""

from __future__ import annotations

import hashlib
import os
import stat
from pathlib import Path

from kvbench.util.fingerprint import cache_folder


def folder() -> Path:
    """Return the folder of compiled kernels in the user's cache folder, with access for the user alone (0700).

    Raises:
        OSError: it cannot be made, or it belongs to another user.
    """
    path = cache_folder() / "kernels"
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    check_owner(path)
    if os.name == "posix" and stat.S_IMODE(path.stat().st_mode) != 0o700:
        path.chmod(0o700)
    return path


def check_owner(path: Path) -> None:
    """Raise PermissionError if a file or folder belongs to another user, who could put code into it."""
    if os.name == "posix" and path.lstat().st_uid != os.geteuid():
        raise PermissionError(f"{path} belongs to another user")


def key(*words: str) -> str:
    """Return the name of a kernel's file: a hash of its source and of all that its machine code depends on."""
    return hashlib.sha256("\n".join(words).encode()).hexdigest()[:32]
