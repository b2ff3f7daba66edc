"""Progress without a terminal: a few plain lines."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from kvbench.util.progress import Progress, duration, interactive


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


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.4, "0 s"),
        (89.4, "89 s"),
        (90, "2 min"),
        (600, "10 min"),
        (5399, "90 min"),
        (5400, "1.5 h"),
        (36000, "10.0 h"),
    ],
)
def test_a_duration_has_a_unit_that_fits(seconds, text):
    assert duration(seconds) == text


def test_without_a_terminal_lines_are_far_apart(monkeypatch, capsys):
    clock = [100.0]
    monkeypatch.setattr("kvbench.util.progress.time.monotonic", lambda: clock[0])
    with Progress("fp16", 9) as bar:
        for clock[0] in (119.9, 120.0, 139.9, 140.0):
            bar.advance(2, f"at {clock[0]:g}")
        clock[0] = 142.9
        bar.within(0.5, "early")
        clock[0] = 143.0
        bar.within(0.5, "first")
        clock[0] = 162.9
        bar.within(0.75, "soon")
        bar.advance(1, "end")
    assert capsys.readouterr().err.splitlines() == [
        "fp16: 9 samples",
        "fp16: 4/9  at 120",
        "fp16: 8/9  at 140",
        "fp16: 8/9  first, about 2 s left",  # 6.5 samples in 23.1 s: the first two are left out
        "fp16: 9/9 in 62.9 s",
    ]


def test_the_first_pass_is_no_part_of_the_estimate(monkeypatch, capsys):
    """It loads and compiles: here it takes 300 s, and those after it 1 s each."""
    clock = [0.0]
    monkeypatch.setattr("kvbench.util.progress.time.monotonic", lambda: clock[0])
    with Progress("fp16", 80, every_s=0) as bar:
        clock[0] = 10
        bar.within(0, "before the first")
        for clock[0], done in ((300, 1), (301, 2), (302, 3)):
            bar.within(done, f"pass {done}")
        bar.advance(10)
        clock[0] = 303
        bar.within(0.5, "pass 11")
    said = [line.partition("  ")[2] for line in capsys.readouterr().err.splitlines()]
    assert [line for line in said if line] == [
        "before the first",
        "pass 1",
        "pass 2, about 78 s left",
        "pass 3, about 77 s left",
        "pass 11, about 2 min left",  # 69.5 at half a sample a second, as since the first batch
    ]


def test_an_error_between_batches_names_no_stage(capsys):
    with pytest.raises(ValueError), Progress("fp16", 3, every_s=0) as bar:
        bar.within(0.5, "text@8/1: 50%")
        bar.advance(1)
        raise ValueError
    with Progress("fp16", 3) as bar:
        bar.within(0.5, "text@8/1: 50%")
    assert "stopped" not in capsys.readouterr().err


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
        bar.within(0.5, "needle: half")
        bar.advance(1, "needle 2.00")
    out, err = capsys.readouterr()
    assert "a line [with brackets]" in err and "kivi int2" in err and "2/2" in err and "needle 2.00" in err
    assert not out and "samples" not in err


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
        "fp16: 1/3  text@8/1: 40%, about 16 s left",  # 0.3 samples in 3 s, and 1.6 are left
        "fp16: 1/3  text@8/1: 90%, about 40 s left",
        "fp16: 2/3  text@8/2: 50%, about 20 s left",
        "fp16: stopped at text@8/2: 50%; the next run repeats unfinished samples",
    ]
