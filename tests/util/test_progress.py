"""Where nobody watches, progress is a few plain lines."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from kvbench.util.progress import Progress, interactive


def test_plain_lines(capsys):
    with Progress("kivi int2", 3, done=1, every_s=0) as bar:
        bar.advance(1, "needle 1.00")
        bar.say("something happened")
        bar.advance(1)
    lines = capsys.readouterr().err.splitlines()
    assert lines[:3] == [
        "kivi int2: 3 samples, 1 of them already done",
        "kivi int2: 2/3  needle 1.00",
        "something happened",
    ]
    assert lines[3].startswith("kivi int2: 3/3 in ")


def test_a_batch_counts_as_its_samples(capsys):
    with Progress("kivi int2", 6, done=1, every_s=0) as bar:
        bar.advance(2, "needle 1.00")
        bar.advance(3)
    lines = capsys.readouterr().err.splitlines()
    assert lines[1] == "kivi int2: 3/6  needle 1.00" and lines[2].startswith("kivi int2: 6/6 in ")


@pytest.mark.parametrize(("terminal", "ci", "watched"), [(True, "", True), (True, "true", False), (False, "", False)])
def test_who_watches(monkeypatch, terminal, ci, watched):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: terminal)
    monkeypatch.setenv("CI", ci)
    assert interactive() == watched


def test_a_bar_on_a_terminal(monkeypatch, capsys):
    monkeypatch.setattr("kvbench.util.progress.interactive", lambda: True)
    with Progress("kivi int2", 2) as bar:
        bar.advance(1, "needle 1.00")
        bar.say("a line [with brackets]")
        bar.advance(1)
    assert "a line [with brackets]" in capsys.readouterr().err


@pytest.mark.parametrize("stream", ["stdout", "stderr"])
def test_a_reader_that_has_gone_ends_nothing(stream: str) -> None:
    code = (
        "import sys; from kvbench.util.progress import Progress, say, show\n"
        "sys.stdin.readline()\n"
        "with Progress('a', 3) as bar:\n"
        "    for _ in range(3): say('x' * 9999); show('y' * 99999); bar.advance(1)\n"
        "open(sys.argv[1], 'w').write('done')\n"
    )
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "end"
        pipes = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL, stream: subprocess.PIPE}
        child = subprocess.Popen([sys.executable, "-c", code, str(path)], stdin=subprocess.PIPE, **pipes)
        getattr(child, stream).close()
        child.stdin.write(b"go\n")
        child.stdin.close()
        assert child.wait() == 0
        assert path.read_text() == "done"


def test_a_long_sample_shows_where_it_is_and_what_an_interruption_costs(monkeypatch, capsys):
    clock = [0.0]
    monkeypatch.setattr("kvbench.util.progress.time.monotonic", lambda: clock[0])
    with pytest.raises(KeyboardInterrupt), Progress("fp16", 3, done=1, every_s=20) as bar:
        for seconds, share in ((1, 0.1), (4, 0.4), (10, 0.6), (30, 0.9)):
            clock[0] = seconds
            bar.within(share, f"text@8/1: {share:.0%}")
        clock[0] = 40
        bar.advance(1)
        clock[0] = 60
        bar.within(0.5, "text@8/2: 50%")
        raise KeyboardInterrupt
    assert capsys.readouterr().err.splitlines()[1:5] == [
        "fp16: 1/3  text@8/1: 40%, about 16 s left",  # 0.4 samples in 4 s, and 1.6 are left
        "fp16: 1/3  text@8/1: 90%, about 37 s left",
        "fp16: 2/3  text@8/2: 50%, about 20 s left",
        "fp16: stopped at text@8/2: 50%; the next run repeats unfinished samples",
    ]
