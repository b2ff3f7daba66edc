"""Compilation of the CPU kernel by the machine's compiler, once per machine and instruction set.

The same sources are compiled for one of several instruction sets (:data:`SETS`): the best that torch may use, so that
``ATEN_CPU_CAPABILITY`` limits this kernel too. They have a plain C interface and no dependencies, so a compiler takes a
few seconds; the library is kept in the user's cache folder (:mod:`kvbench.util.compiled`). Without a compiler or a
folder that can be written, :func:`missing` says why, and attention runs in plain torch.
"""

from __future__ import annotations

import ctypes
import os
import platform
import re
import shlex
import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock, Timeout

from kvbench.util import atomic, compiled
from kvbench.util.processor import cpu_flags, cpu_name

#: instruction sets, and the compiler's flags for each. `neon` has not been tried on a machine that has it
_AVX2 = ("-mavx2", "-mfma", "-mf16c")
_AVX512 = (*_AVX2, "-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq")
SETS = {
    "avx512_vnni": (*_AVX512, "-mavx512vnni"),
    "avx512": _AVX512,
    "avx2": _AVX2,
    "neon": (),
    "plain": (),
}
FLAGS = (
    *("-O3", "-std=c++17", "-fPIC", "-shared", "-pthread"),
    *("-ffp-contract=fast", "-fno-strict-aliasing", "-fno-math-errno"),
)
#: seconds after which a compiler is stopped, and for which another process's failure counts
LIMIT_S, REMEMBERED_S = 120.0, 600.0
HINT = "hint: install a C++ compiler, for example g++ (apt install g++), or name one in the variable CXX"


@dataclass(frozen=True)
class Library:
    """The compiled kernel, loaded into this process.

    Args:
        decode: the C function ``kvbench_decode``; its argument is the address of a struct ``Args``.
        pack: the C function ``kvbench_pack``; its argument is the address of a struct ``Packing``. It returns 0 if all
            tokens were packed, and another number if one of them has no finite scale.
        tiles: the C function ``kvbench_tiles``; its argument is the address of a struct ``TilesArgs``.
        columns: the C function ``kvbench_columns``; its argument is the address of a struct ``ColumnsArgs``.
        parallel: address of ``GOMP_parallel`` of the OpenMP library that torch uses, so that both share threads; None
            if it was not found; the kernel then starts threads of its own.
    """

    decode: Callable[[object], None]
    pack: Callable[[object], int]
    tiles: Callable[[object], None]
    columns: Callable[[object], None]
    parallel: int | None


def instructions() -> str:
    """Return the best instruction set of :data:`SETS` that torch may use on this machine."""
    if platform.machine() in ("aarch64", "arm64"):
        return "neon"
    capability = torch.backends.cpu.get_cpu_capability()
    if capability.startswith("AVX512"):
        return "avx512_vnni" if "avx512_vnni" in cpu_flags() else "avx512"
    return "avx2" if capability == "AVX2" else "plain"


def kernel_name() -> str:
    """Return the name of the kernel in results, with its instruction set: ``cpu-avx2``."""
    return f"cpu-{instructions()}"


def missing() -> str | None:
    """Return the reason why this machine cannot compile or load the kernel, or None if it can."""
    compiled_kernel = kernel_library()
    return compiled_kernel if isinstance(compiled_kernel, str) else None


def kernel_library(chosen: str | None = None) -> Library | str:
    """Load the kernel for an instruction set (None: :func:`instructions`), compiling it if needed; or return why not.

    Other processes that need the same library wait for the one that compiles it.
    """
    return _library(chosen or instructions())


@cache
def _library(chosen: str) -> Library | str:
    try:
        compiler = _compiler()
        path = _built(compiler, chosen)
        try:
            return _loaded(path)
        except OSError:  # cut short, as by a power failure: compiled once more
            path.unlink(missing_ok=True)
            return _loaded(_built(compiler, chosen))
    except (OSError, AttributeError, Timeout, RuntimeError, ValueError) as error:
        return " ".join(str(error).split())[:300]


def _compiler() -> list[str]:
    """Return the words of the command that compiles C++: of ``CXX`` (such as ``ccache g++``), else g++ or clang++.

    Raises:
        RuntimeError: there is no compiler, or ``CXX`` names no program.
    """
    words = shlex.split(os.environ.get("CXX", ""))
    if not words:
        words = next(([name] for name in ("g++", "clang++") if shutil.which(name)), [])
    if not words:
        raise RuntimeError("there is no C++ compiler")
    program = shutil.which(words[0])
    if program is None:
        raise RuntimeError(f"there is no program {words[0]}, which the variable CXX names as the C++ compiler")
    return [program, *words[1:]]


def _compiler_stamp(words: list[str]) -> str:
    """Return the paths, sizes and modification times of the programs in a command, which change with their versions."""
    programs = [Path(program).resolve() for program in map(shutil.which, words) if program]
    stats = [(program, program.stat()) for program in programs]
    return " ".join(f"{program} {stat.st_size} {stat.st_mtime_ns}" for program, stat in stats)


def _built(compiler: list[str], chosen: str) -> Path:
    """Return the path of the library in the cache folder, after compiling it if it is not there.

    Args:
        compiler: the command, without flags.

    Raises:
        OSError: the cache folder cannot be used.
        RuntimeError: the compiler failed, or took too long.
    """
    flags = (*FLAGS, *SETS[chosen])
    sources = sorted(path for path in Path(__file__).parent.iterdir() if path.suffix in (".cpp", ".hpp"))
    words = [
        _compiler_stamp(compiler),
        *compiler,
        cpu_name(),
        platform.machine(),
        *flags,
        *(path.read_text(encoding="utf-8") for path in sources),
    ]
    path = compiled.folder() / f"{compiled.key(*words)}.so"
    if not path.exists():  # a complete library needs no lock, so a folder that can only be read will do
        failure = path.with_suffix(".failed")
        with FileLock(f"{path}.lock", timeout=LIMIT_S + 10):
            if not path.exists():  # nobody has compiled it while this process waited
                if failure.exists() and time.time() - failure.stat().st_mtime < REMEMBERED_S:
                    raise RuntimeError(failure.read_text(encoding="utf-8"))
                try:
                    _compile([*compiler, *flags, *(str(source) for source in sources if source.suffix == ".cpp")], path)
                except RuntimeError as error:
                    atomic.replace_file(failure, str(error).encode())
                    raise
                failure.unlink(missing_ok=True)
    compiled.check_owner(path)
    return path


def _compile(command: list[str], path: Path) -> None:
    """Compile a library to `path` atomically; raise RuntimeError if the compiler fails or takes too long."""
    with atomic.replacing(path) as partial:
        quiet: Any = {"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE}
        with subprocess.Popen([*command, "-o", str(partial)], **quiet, start_new_session=True) as process:
            try:
                log = process.communicate(timeout=LIMIT_S)[1].decode(errors="replace")
            except BaseException as error:
                with suppress(OSError):  # the compiler's own processes too
                    os.killpg(process.pid, signal.SIGKILL)
                if isinstance(error, subprocess.TimeoutExpired):
                    raise RuntimeError(f"{command[0]} took more than {LIMIT_S:.0f} s to compile the kernel") from None
                raise
        if process.returncode:
            line = next((line for line in log.splitlines() if "error" in line), log.strip()[:200] or "no message")
            raise RuntimeError(f"{command[0]} failed with status {process.returncode}: {line}")
        if not partial.exists():
            raise RuntimeError(f"{command[0]} made no library")


def _loaded(path: Path) -> Library:
    opened = ctypes.CDLL(str(path))
    decode, pack, tiles, columns = (
        getattr(opened, f"kvbench_{name}") for name in ("decode", "pack", "tiles", "columns")
    )
    for function in (decode, pack, tiles, columns):
        function.argtypes, function.restype = [ctypes.c_void_p], None
    pack.restype = ctypes.c_int
    return Library(decode, pack, tiles, columns, _parallel())


@cache
def _parallel() -> int | None:
    """Return the address of ``GOMP_parallel`` in the OpenMP library that torch has loaded, or None.

    It is looked for in torch's own folder, among the symbols of the process, and in all libraries that are mapped.
    """
    found: list[str | None] = [*map(str, sorted((Path(torch.__file__).parent / "lib").glob("lib*omp*"))), None]
    with suppress(OSError):
        maps = Path("/proc/self/maps").read_text(encoding="utf-8", errors="replace")
        found += dict.fromkeys(re.findall(r"(/\S*(?:gomp|iomp5|libomp)\S*)", maps))
    for path in found:
        with suppress(OSError, AttributeError):  # RTLD_NOLOAD: only a library that is loaded already
            opened = ctypes.CDLL(path, mode=os.RTLD_NOLOAD | os.RTLD_NOW if path else ctypes.DEFAULT_MODE)
            return ctypes.cast(opened.GOMP_parallel, ctypes.c_void_p).value
    return None
