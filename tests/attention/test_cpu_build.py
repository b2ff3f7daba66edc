"""Compilation of the CPU kernel: what fails has a reason, and the reference path serves."""

import os
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from kvbench.attention.cpu import build
from kvbench.util import compiled


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """An empty cache folder, and a process that has compiled nothing."""
    monkeypatch.setenv("KVBENCH_CACHE", str(tmp_path))
    build._library.cache_clear()
    yield tmp_path / "kernels"
    build._library.cache_clear()


def compiler(folder: Path, script: str, monkeypatch) -> Path:
    """A compiler whose work is a shell script, in which $out is the file to make, and $log counts its calls."""
    path = folder / "compiler"
    find = 'while [ "$1" != -o ]; do shift; done; out=$2; log=$(dirname "$0")/log; echo call >> "$log"\n'
    path.write_text(f"#!/bin/sh\n{find}{script}\n")
    path.chmod(0o700)
    monkeypatch.setenv("CXX", str(path))
    return folder / "log"


NAMES = ("decode", "tiles", "columns")
EMPTY = (
    f"printf '{' '.join(f'void kvbench_{name}(void *a) {{}}' for name in NAMES)}' > $out.c"
    " && cc -shared -fPIC -o $out $out.c && rm $out.c"
)
needs_cc = pytest.mark.skipif(not any(map(build.shutil.which, ("cc",))), reason="needs a C compiler")


@needs_cc
def test_a_library_is_compiled_once_and_is_the_users_alone(folder, tmp_path, monkeypatch):
    log = compiler(tmp_path, EMPTY, monkeypatch)
    assert isinstance(build.kernel_library("plain"), build.Library)
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    build._library.cache_clear()  # as in another process
    assert isinstance(build.kernel_library("plain"), build.Library)
    assert log.read_text() == "call\n"
    build.kernel_library("avx2")  # other flags, another library
    assert log.read_text() == "call\n" * 2
    (tmp_path / "compiler").write_text((tmp_path / "compiler").read_text() + "# newer\n")
    build._library.cache_clear()
    build.kernel_library("plain")
    assert log.read_text() == "call\n" * 3


@needs_cc
def test_a_library_that_was_cut_short_is_compiled_once_more(folder, tmp_path, monkeypatch):
    log = compiler(tmp_path, EMPTY, monkeypatch)
    path = build._built(str(tmp_path / "compiler"), "plain")  # in another process, say
    path.write_bytes(b"")
    assert isinstance(build.kernel_library("plain"), build.Library)
    assert log.read_text() == "call\n" * 2


def test_without_a_compiler_the_reason_is_that(folder, monkeypatch):
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", "")
    assert build.missing() == "there is no C++ compiler"
    assert not folder.exists()


def test_a_failure_names_the_compilers_error_and_counts_for_other_processes(folder, tmp_path, monkeypatch):
    log = compiler(tmp_path, "echo 'a note' >&2; echo 'decode.cpp:1: error: no' >&2; exit 3", monkeypatch)
    reason = build.kernel_library("plain")
    assert reason == f"{tmp_path}/compiler failed with status 3: decode.cpp:1: error: no"
    build._library.cache_clear()
    assert build.kernel_library("plain") == reason and log.read_text() == "call\n"
    failure = next(folder.glob("*.failed"))
    os.utime(failure, (0, time.time() - build.REMEMBERED_S - 1))
    build._library.cache_clear()
    assert build.kernel_library("plain") == reason and log.read_text() == "call\n" * 2
    assert not list(folder.glob("*.so")) and not list(folder.glob(".*partial"))


def test_a_compiler_that_hangs_is_stopped_with_what_it_started(folder, tmp_path, monkeypatch):
    monkeypatch.setattr(build, "LIMIT_S", 0.1)
    compiler(tmp_path, "sleep 60 & echo $! > $(dirname $0)/child; wait", monkeypatch)
    assert "took more than 0 s to compile the kernel" in build.kernel_library("plain")
    child = int((tmp_path / "child").read_text())
    with pytest.raises(ProcessLookupError):
        for _ in range(200):
            os.kill(child, 0)
            if Path(f"/proc/{child}/stat").read_text().split()[2] == "Z":
                raise ProcessLookupError
            time.sleep(0.01)


def test_a_compiler_that_makes_nothing_and_a_library_without_the_function(folder, tmp_path, monkeypatch):
    compiler(tmp_path, "exit 0", monkeypatch)
    assert build.kernel_library("plain") == f"{tmp_path}/compiler made no library"
    compiler(tmp_path, "echo nonsense > $out", monkeypatch)
    assert "invalid ELF header" in build.kernel_library("avx2") or "file too short" in build.kernel_library("avx2")


@pytest.mark.skipif(os.geteuid() == 0, reason="root writes everywhere")
def test_a_folder_that_cannot_be_written_is_the_reason(folder, tmp_path, monkeypatch):
    compiler(tmp_path, EMPTY, monkeypatch)
    tmp_path.chmod(0o500)
    try:
        assert "Permission denied" in build.kernel_library("plain")
    finally:
        tmp_path.chmod(0o700)


def test_a_folder_that_is_a_file_is_the_reason(folder, tmp_path, monkeypatch):
    compiler(tmp_path, EMPTY, monkeypatch)
    folder.write_text("")
    assert "File exists" in build.kernel_library("plain")


def test_code_of_another_user_is_not_loaded(folder, tmp_path, monkeypatch):
    compiler(tmp_path, EMPTY, monkeypatch)
    folder.mkdir(mode=0o777)
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    assert build.kernel_library("plain") == f"{folder} belongs to another user"
    with pytest.raises(PermissionError, match="belongs to another user"):
        compiled.check_owner(tmp_path)
    monkeypatch.undo()


def test_a_folder_that_others_could_write_to_is_closed(folder, monkeypatch):
    folder.mkdir(parents=True)
    folder.chmod(0o777)
    assert stat.S_IMODE(compiled.folder().stat().st_mode) == 0o700


@needs_cc
def test_processes_that_need_it_at_once_compile_it_once(folder, tmp_path, monkeypatch):
    log = compiler(tmp_path, f"sleep 0.3; {EMPTY}", monkeypatch)
    code = "from kvbench.attention.cpu import build; print(build.kernel_library('plain'))"
    started = [
        subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, cwd=Path.cwd())
        for _ in range(2)
    ]
    assert all(process.communicate()[0].startswith("Library") for process in started)
    assert log.read_text() == "call\n"


@needs_cc
def test_a_process_that_is_killed_while_it_compiles_leaves_nothing_in_the_way(folder, tmp_path, monkeypatch):
    log = compiler(tmp_path, "echo half > $out; sleep 60", monkeypatch)
    code = "from kvbench.attention.cpu import build; build.kernel_library('plain')"
    process = subprocess.Popen([sys.executable, "-c", code], cwd=Path.cwd())
    while not log.exists() and process.poll() is None:
        time.sleep(0.01)
    process.kill()
    process.wait()
    compiler(tmp_path, EMPTY, monkeypatch)
    assert isinstance(build.kernel_library("plain"), build.Library)


def test_threads_are_those_of_torch():
    """Two OpenMP libraries in one process would have threads that wait for work side by side."""
    if "USE_OPENMP=ON" not in torch.__config__.show():
        pytest.skip("this torch has no OpenMP")
    assert build._parallel() is not None
