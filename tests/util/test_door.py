"""Ctrl-C at any moment of a command: one line, and the exit status of a shell."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from typing import Any

import pytest

from kvbench.util import door

DOORS = [f"kvbench{name}" for name in ("", ".report", ".score", ".fetch", ".calibrate", ".publish", ".bench")]
DOORS += ["kvbench.analysis", "kvbench.lm_eval", "experiments"]

#: executed when Python starts: Ctrl-C once the module MODULE, if any, is looked for
INTERRUPT = """
import os, signal, sys
class Finder:
    @staticmethod
    def find_spec(name, path=None, target=None):
        if name == os.environ["MODULE"]:
            os.kill(os.getpid(), signal.SIGINT)
sys.meta_path.insert(0, Finder)
"""


def heard() -> None:
    """Let a child process get SIGINT though these tests may run in the background, where shells ignore it."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


CHILD: dict[str, Any] = {"capture_output": True, "text": True, "check": False, "preexec_fn": heard}


@pytest.mark.parametrize("module", DOORS)
def test_while_modules_are_imported(tmp_path, module):
    (tmp_path / "sitecustomize.py").write_text(INTERRUPT)
    first = {"kvbench": "kvbench.cli", "experiments": "kvbench.errors", "kvbench.lm_eval": "kvbench.lm_eval.command"}
    place = first.get(module, "argparse")
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{os.getcwd()}", "MODULE": place}
    ended = subprocess.run(
        [sys.executable, "-m", module, "--help"],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        preexec_fn=heard,
    )
    assert (ended.returncode, ended.stderr) == (130, "interrupted\n")


def test_while_the_script_imports_modules(tmp_path):
    """The script that pip installs imports kvbench.__main__ and calls its function."""
    (tmp_path / "sitecustomize.py").write_text(INTERRUPT)
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{os.getcwd()}", "MODULE": "kvbench.cli"}
    script = "import sys; from kvbench.__main__ import main; sys.exit(main())"
    ended = subprocess.run([sys.executable, "-c", script], env=environment, **CHILD)
    assert (ended.returncode, ended.stderr) == (130, "interrupted\n")


def test_an_interruption_of_executed_text_has_the_status_too(tmp_path):
    (tmp_path / "mine.py").write_text(
        "import sys; from kvbench.util.door import enter\n"
        "sys.exit(enter(lambda: exec('import os, signal; os.kill(os.getpid(), signal.SIGINT)')))\n"
    )
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{os.getcwd()}"}
    ended = subprocess.run([sys.executable, "-m", "mine"], env=environment, **CHILD)
    assert (ended.returncode, ended.stderr) == (130, "interrupted\n")


def test_inside_a_command_it_is_an_exception_and_afterwards_the_end(capsys):
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        door.guard()
        guarded = signal.getsignal(signal.SIGINT)
        assert guarded is not before

        def main() -> int:
            os.kill(os.getpid(), signal.SIGINT)
            raise AssertionError("the command went on")

        assert door.enter(main) == 130
        assert capsys.readouterr().err == "interrupted\n"
        assert signal.getsignal(signal.SIGINT) is guarded, "the end of the interpreter is guarded again"
        assert door.enter(lambda: 3) == 3 and door.enter(lambda: None) == 0
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # as a shell starts jobs in the background
        door.guard()
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
        assert door.enter(lambda: 0) == 0 and signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)
