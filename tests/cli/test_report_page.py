"""The page and its plots by command: which are asked for, of which runs, and where they are written."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from experiments.page.made import run_id, write_made_run
from kvbench.cli import report, report_page
from kvbench.errors import ConfigError, KvbenchError
from kvbench.page.server import PORT
from kvbench.results.store import find_runs
from tests.page.report_support import data_of
from tests.publish.sweep_support import write_sweep


def asked(*texts: str) -> Any:
    return report._report_parser().parse_args(texts)


def test_what_the_options_mean() -> None:
    plain = asked()
    assert (plain.html, plain.serve, plain.figures, plain.sweep, plain.pair) == (None, None, None, None, [])
    assert (asked("--html").html, asked("--html", "a.html").html) == (True, Path("a.html"))
    assert (asked("--serve").serve, asked("--serve", "0").serve) == (PORT, 0)
    assert asked("--figures", "plots").figures == Path("plots")
    given = asked("--html", "--pair", "a", "b", "--pair", "c", "d", "--sweep", "today")
    assert (given.pair, given.sweep) == ([["a", "b"], ["c", "d"]], "today")
    for together in (["--html", "--serve"], ["--html", "--figures", "x"], ["--pair", "a"]):
        with pytest.raises(SystemExit):
            asked(*together)


@pytest.mark.parametrize(
    ("texts", "wanted"),
    [
        ([], False),
        (["--html"], True),
        (["--serve", "0"], True),
        (["--figures", "x"], True),
        (["--sweep", "today"], False),
        (["--html", "--pair", "a", "b"], True),
        (["--serve", "--pair", "a", "b"], True),
    ],
)
def test_the_page_is_made_if_it_is_asked_for(texts: list[str], wanted: bool) -> None:
    assert report_page.wanted(asked(*texts)) is wanted


@pytest.mark.parametrize("texts", [[], ["--figures", "x"]])
def test_pairs_need_a_page(texts: list[str]) -> None:
    with pytest.raises(ConfigError, match=r"--pair=a b: needs --html or --serve(.|\n)*add --html"):
        report_page.wanted(asked(*texts, "--pair", "a", "b"))


def test_the_page_lies_beside_a_folder_of_runs_and_in_any_other() -> None:
    assert report_page.beside(Path("results/runs")) == Path("results/report.html")
    assert report_page.beside(Path("results/mine")) == Path("results/mine/report.html")


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of two runs, below the present one."""
    monkeypatch.chdir(tmp_path)
    for number in (1, 2):
        write_made_run(tmp_path / "results" / "runs", number)
    return tmp_path / "results" / "runs"


def test_pages_are_of_one_or_of_several_runs(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert report.main(["--html", "new/page.html"]) == 0
    size = Path("new/page.html").stat().st_size / 1e6
    assert capsys.readouterr().out == f"new/page.html: 2 runs, {size:.2f} MB\n"
    assert len(data_of(Path("new/page.html").read_text())["runs"]) == 2
    write_made_run(Path("other"), 3)
    assert report.main(["--results", "other", "--html"]) == 0
    assert capsys.readouterr().out.startswith("other/report.html: 1 run, ")


def test_a_pair_is_of_two_runs(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert report.main(["--html", "page.html", "--pair", run_id(1), run_id(2)]) == 0
    (pair,) = data_of(Path("page.html").read_text())["pairs"]
    assert pair["runs"] == [run_id(1), run_id(2)]
    capsys.readouterr()
    assert report.main(["--html", "page.html", "--pair", run_id(1), run_id(1)]) == 2
    assert "names one run twice" in capsys.readouterr().err


def test_without_runs_the_papers_items_are_shown_if_there_are_any(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "results" / "runs"
    folder.mkdir(parents=True)
    command = ["--results", str(folder), "--html", str(tmp_path / "page.html")]
    assert report.main(command) == 1 and f"there are no runs in {folder}." in capsys.readouterr().err
    monkeypatch.setattr(report_page.papers, "items", lambda folder, runs: ([{"item": str(folder)}], []))
    assert report.main(command) == 0
    printed = capsys.readouterr()
    assert f"note: there are no runs in {folder}; the page shows the papers' items in" in printed.err
    assert printed.out.startswith(f"{tmp_path / 'page.html'}: 0 runs, ")
    assert report.main([*command[:2], "--figures", "plots"]) == 1, "plots are of runs"
    assert "there are no runs" in capsys.readouterr().err


def test_a_page_that_cannot_be_written_is_said(
    runs: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(path: Path, content: bytes) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(report_page.atomic, "replace_file", full)
    assert report.main(["--html", "page.html"]) == 1
    printed = capsys.readouterr().err
    assert "page.html: cannot be written: No space left on device" in printed and "--html FILE" in printed


def test_the_page_is_served_until_it_is_interrupted(
    runs: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    seen: list[Any] = []

    class Server:
        address = "http://here/"

        def __init__(self, report: Any, port: int) -> None:
            seen.append((len(report.data()["runs"]), port))

        def __enter__(self) -> Any:
            return self

        def __exit__(self, *given: object) -> None:
            seen.append("closed")

        def serve_forever(self) -> None:
            raise KeyboardInterrupt

    monkeypatch.setattr(report_page.server, "Server", Server)
    assert report.main(["--serve", "7"]) == 0
    assert seen == [(2, 7), "closed"] and "http://here/ (Ctrl-C ends it)" in capsys.readouterr().out
    Path("later").mkdir()
    assert report.main(["--results", "later", "--serve", "8"]) == 0 and seen[2] == (0, 8), "runs may come"


def test_plots_are_listed_by_file(
    runs: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    made: list[Any] = []

    def figures(data: Any, folder: Path) -> tuple[str, list[Path]]:
        made.append((len(data["runs"]), folder.is_dir()))
        return "the title", files

    files = [Path("plots/a.png"), Path("plots/a.svg")]
    monkeypatch.setattr(report_page, "check_packages", lambda packages: made.append(packages[0]))
    monkeypatch.setitem(sys.modules, "kvbench.page.figures", SimpleNamespace(write_plots=figures))
    assert report.main(["--figures", "plots"]) == 0
    assert capsys.readouterr().out == "the title:\n  plots/a.png\n  plots/a.svg\n"
    package, drawn = made
    assert (package.module, package.key, package.value) == ("matplotlib", "--figures", "plots") and drawn == (2, True)
    files.clear()
    assert report.main(["--figures", "plots"]) == 1 and "no run has figures to draw" in capsys.readouterr().err
    files.append(Path("x"))
    monkeypatch.setattr(Path, "mkdir", lambda self, **options: (_ for _ in ()).throw(OSError(13, "Permission denied")))
    assert report.main(["--figures", "plots"]) == 1
    assert "plots: a plot cannot be written: Permission denied" in capsys.readouterr().err


def test_the_runs_of_a_sweep_are_those_of_its_jobs(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    stores = find_runs(runs)
    write_sweep(runs.parent, stores[:1], "today")
    write_sweep(runs.parent, [], "empty")
    (runs.parent / "sweeps" / "old").mkdir()
    (runs.parent / "sweeps" / "old" / "job-0000.json").write_text(f'{{"metrics": {{"run_id": "{run_id(2)}"}}}}')
    found = {}
    for name in ("today", "old"):
        assert report.main(["--sweep", name, "--html", "page.html"]) == 0
        data = data_of(Path("page.html").read_text())
        found[name] = ([run["id"] for run in data["runs"]], data["sweep"] and data["sweep"]["id"])
    assert found == {"today": ([stores[0].run_id], "today"), "old": ([run_id(2)], None)}
    assert report_page.sweep_of(asked("--sweep", "tod")).name == "today"
    assert report.main(["--sweep", "empty", "--html", "page.html"]) == 0, "its jobs are shown"
    capsys.readouterr()
    assert report.main(["--sweep", "empty", "--figures", "plots"]) == 1
    assert "no finished job of the sweep empty has a run" in capsys.readouterr().err


def test_a_damaged_run_is_skipped_and_an_unreadable_configuration_leaves_out_the_command(
    runs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    one, two = find_runs(runs)
    (one.path / "metrics.json").write_text("{")
    read = report_page.reader()
    assert read(one) is None and capsys.readouterr().err.startswith("skipped: ")
    entry = read(two)
    assert entry is not None and entry.command.startswith("python -m kvbench model=tiny") and entry.config
    (two.path / "config.yaml").unlink()
    entry = read(two)
    assert entry is not None and (entry.command, entry.config, dict(entry.changes)) == ("", {}, {})
    with pytest.raises(KvbenchError):
        report_page.find_run([], "x")
