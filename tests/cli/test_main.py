"""The door of the main command: what ends it with which status, and what is handed on."""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hydra.errors import HydraException
from omegaconf import OmegaConf

from kvbench.cli import fetch, job, main, model_choice, multirun, plan, unit
from kvbench.errors import ConfigError, KvbenchError
from kvbench.parallel import team
from kvbench.results.sweeps import Job
from tests.publish.sweep_support import write_sweep


@pytest.fixture
def ends(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    """Function that lets the command end with an error or a status; returns the status and what is said."""

    def end(cause: BaseException | int) -> tuple[int, str]:
        def act(argv: list[str]) -> int:
            if isinstance(cause, BaseException):
                raise cause
            return cause

        monkeypatch.setattr(main, "_main", act)
        return main.main(["a=b"]), capsys.readouterr().err

    return end


def test_what_the_user_can_mend_is_a_message_and_a_status(ends) -> None:
    assert ends(7) == (7, "")
    assert ends(KvbenchError("no")) == (1, "error: no\n")
    assert ends(ConfigError("a", 1, "is wrong"))[0] == 2
    assert ends(KeyboardInterrupt()) == (130, "interrupted; run the same command again to resume\n")
    status, said = ends(OSError(28, "No space left on device", "a/file"))
    assert status == 1 and said.startswith("error: a/file: No space left on device.\n  hint: ")
    assert ends(OSError("odd"))[1].startswith("error: odd.\n")
    status, said = ends(HydraException("something of Hydra"))
    assert status == 2 and said.startswith("error: ")
    with pytest.raises(ZeroDivisionError):
        ends(ZeroDivisionError())


def test_a_reader_that_leaves_is_no_error(ends, monkeypatch: pytest.MonkeyPatch) -> None:
    silenced: list[Any] = []
    monkeypatch.setattr(main, "silence", silenced.append)
    assert ends(BrokenPipeError())[0] == 0 and silenced == [sys.stdout]
    monkeypatch.setattr(main, "silence", lambda stream: (_ for _ in ()).throw(ValueError()))
    assert ends(BrokenPipeError())[0] == 0


@pytest.mark.parametrize(("rank", "said"), [(0, True), (1, False)])
def test_one_of_several_processes_prints(
    rank: int, said: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(main.launch, "rank", lambda: rank)
    monkeypatch.setattr(sys, "stdout", sys.stdout)
    monkeypatch.setattr(sys, "stderr", sys.stderr)
    monkeypatch.setattr(main, "_main", lambda argv: print("words") or 0)
    assert main.main([]) == 0
    if not said:
        assert sys.stdout is sys.stderr
        sys.stdout.close()
    assert ("words" in capsys.readouterr().out) == said


def test_a_folder_that_was_removed_is_named(ends, monkeypatch: pytest.MonkeyPatch) -> None:
    def gone() -> str:
        raise FileNotFoundError

    monkeypatch.setattr(main.os, "getcwd", gone)
    status, said = ends(0)
    assert status == 2 and "current folder: was removed or cannot be read" in said and "cd" in said


@pytest.mark.parametrize(
    ("texts", "found", "refused"),
    [
        (["launcher=submitit"], None, True),
        (["launcher=submitit"], "/bin/srun", False),
        (["launcher=submitit_local"], None, False),
        ([], None, False),
    ],
)
def test_slurm_must_be_there_for_its_launcher(
    texts: list[str], found: str | None, refused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(main.shutil, "which", lambda name: found if name == "srun" else "/bin/other")
    if not refused:
        return main._check_launcher(texts)
    with pytest.raises(ConfigError) as caught:
        main._check_launcher(texts)
    assert (caught.value.key, caught.value.value) == ("launcher", "submitit") and "launcher=joblib" in caught.value.hint
    return None


@pytest.mark.parametrize(
    ("launched", "broken", "status", "wanted"),
    [
        (True, False, 3, [3, "left"]),
        (True, True, 3, ["ended 3"]),
        (True, True, 0, ["ended 1"]),
        (True, None, 3, [3, "left"]),
        (False, True, 3, [3]),
    ],
)
def test_a_process_whose_team_has_failed_ends_at_once(
    launched: bool, broken: bool | None, status: int, wanted: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    class End(Exception):
        pass

    def exited(code: int) -> None:
        done.append(f"ended {code}")
        raise End

    done: list[Any] = []
    monkeypatch.setattr(main.launch, "launched", lambda: launched)
    monkeypatch.setattr(team, "current", lambda: None if broken is None else SimpleNamespace(broken=broken))
    monkeypatch.setattr(team, "leave", lambda: done.append("left"))
    monkeypatch.setattr(main.os, "_exit", exited)
    with suppress(End):
        done.insert(0, main._left(status))
    assert done == wanted


@pytest.fixture
def handed(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What is handed to Hydra and to sweeps."""
    calls: list[Any] = []
    monkeypatch.setattr(multirun, "by_hydra", lambda argv: calls.append(("hydra", argv)) or 5)
    monkeypatch.setattr(multirun, "run_sweep", lambda *given: calls.append(("sweep", *given)) or 6)
    monkeypatch.setattr(job, "outcome_of_job", lambda configure: calls.append(("job", configure())) or {"status": "ok"})
    return calls


def test_help_and_information_of_hydra_are_hydras(handed: list[Any]) -> None:
    assert main._main(["--hydra-help"]) == 5
    assert main._main(["--cfg", "hydra"]) == 5 and main._main(["--info", "defaults", "method=kivi"]) == 5
    assert [call[0] for call in handed] == ["hydra"] * 3 and "method=kivi" in handed[2][1]
    assert "--hydra-help" in handed[0][1] and "--cfg" in handed[1][1] and "--info" in handed[2][1]


def test_a_sweep_and_a_job_are_started_with_what_was_typed(handed: list[Any]) -> None:
    typed = ["--multirun", "method=fp16,kivi", "experiment=null"]
    assert main._main(typed) == 6
    _, argv, arguments, composer, overrides = handed[0]
    assert argv == typed and arguments.multirun and overrides == ["method=fp16,kivi"]
    assert composer is job.composer_of(None)
    assert main._main(["method=fp16", "model=tiny"]) == 0
    kind, configuration = handed[1]
    assert kind == "job" and configuration.plain["model"]["name"] == "tiny"


def test_a_configuration_is_shown_without_a_run(handed: list[Any], capsys: pytest.CaptureFixture[str]) -> None:
    assert main._main(["--cfg", "job", "--package", "decoding", "method=fp16"]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("# @package decoding\n") and "temperature" in printed and not handed
    with pytest.raises(ConfigError, match="--package=nothing: the configuration has no such part"):
        main._main(["--cfg", "job", "--package", "nothing"])
    assert main._main(["--version"]) == 0 and capsys.readouterr().out.startswith("kvbench ")


@pytest.mark.parametrize(
    ("outcome", "status"),
    [
        ({"status": "ok"}, 0),
        ({"status": "oom"}, 1),
        ({"status": "error", "exit_code": 2}, 2),
        ({"status": "error"}, 1),
        ({"status": "interrupted", "exit_code": 130}, 130),
    ],
)
def test_the_status_of_a_run(outcome: dict[str, Any], status: int) -> None:
    assert main._conclude(outcome) == status


def test_a_sweep_is_continued_in_the_folder_where_it_was_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, handed: list[Any]
) -> None:
    monkeypatch.chdir(tmp_path)
    write_sweep(tmp_path / "results", [], "today", command=("--multirun", "method=fp16,kivi"))
    assert main._resumed("tod") == ["--multirun", "method=fp16,kivi"]
    assert main._main(["--resume", "today"]) == 6 and handed[0][1] == ["--multirun", "method=fp16,kivi"]
    own = ("--multirun", "method=fp16,kivi", "hydra.sweep.dir='mine/sweeps/own'")
    write_sweep(tmp_path / "mine", [], "own", command=own)
    assert main._resumed("mine/sweeps/own") == list(own)
    other = ("--multirun", "hydra.sweep.dir=x", f"hydra.sweep.dir={tmp_path}/mine/sweeps/last")
    write_sweep(tmp_path / "mine", [], "last", command=other)
    assert main._resumed(str(tmp_path / "mine/sweeps/last")) == list(other)
    (tmp_path / "sub").mkdir()
    monkeypatch.chdir(tmp_path / "sub")
    for name in (f"{tmp_path}/results/sweeps/today", f"{tmp_path}/mine/sweeps/own"):
        with pytest.raises(ConfigError, match="was started in another working folder"):
            main._resumed(name)


def test_a_job_ends_with_its_error_as_message(capsys: pytest.CaptureFixture[str]) -> None:
    def failing(error: Exception) -> Any:
        def act() -> Any:
            raise error

        return act

    refused = job.outcome_of(failing(ConfigError("a", 1, "is wrong")), lambda: None, 0.0)
    assert (refused["status"], refused["exit_code"]) == ("error", 2) and "a=1: is wrong" in refused["message"]
    assert "metrics" not in refused and capsys.readouterr().err.startswith("error: a=1")
    bug = job.outcome_of(failing(ZeroDivisionError("by zero")), lambda: None, 0.0)
    assert bug == {"status": "error", "message": "ZeroDivisionError: by zero", "exit_code": 1}
    assert "Traceback" in capsys.readouterr().err
    broken = job.outcome_of_job(failing(KvbenchError("no")), row=failing(KvbenchError("no row")))
    assert broken == {"status": "error", "message": "no", "exit_code": 1}
    assert job.outcome_of_job(failing(KvbenchError("no"))) == broken


def test_a_run_that_stored_nothing_new_was_done_before(tmp_path: Path) -> None:
    samples = tmp_path / "samples.jsonl"
    samples.write_text("")
    os.utime(samples, (100, 100))
    metrics = {"status": "oom", "error": None, "run_dir": str(tmp_path)}
    for began, before in ((101.0, True), (100.0, False), (99.0, False)):
        ended = job.outcome_of(lambda: metrics, lambda: None, began)
        assert ended == {"status": "oom", "message": "", "metrics": metrics, "before": before}
    elsewhere = {**metrics, "error": "e", "run_dir": str(tmp_path / "none")}
    ended = job.outcome_of(lambda: elsewhere, lambda: None, 101.0)
    assert (ended["message"], ended["before"]) == ("e", False)
    other = job.outcome_of(lambda: {"status": "ok", "rank": 1}, lambda: None, 101.0)
    assert other == {"status": "ok", "message": ""}


def test_hydra_gets_the_command_line_and_its_own_is_put_back(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []

    def decorated(**options: Any) -> Any:
        seen.append(options)
        return lambda function: lambda: seen.append((function, list(sys.argv)))

    monkeypatch.setattr(multirun.hydra, "main", decorated)
    monkeypatch.setattr(multirun.launchers, "register", lambda: seen.append("registered"))
    monkeypatch.setattr(sys, "argv", ["kvbench", "x"])
    assert multirun.by_hydra(["a=1", "b=2"]) == 0 and sys.argv == ["kvbench", "x"]
    assert seen[0] == "registered" and seen[2] == (multirun.run_job, ["kvbench", "a=1", "b=2"])
    assert (seen[1]["version_base"], seen[1]["config_name"]) == ("1.3", "config")


def test_a_job_of_hydra_runs_its_unit(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[Any] = []
    sources = [SimpleNamespace(provider="main", path="x"), SimpleNamespace(provider="command-line", path="extra")]
    known = SimpleNamespace(runtime=SimpleNamespace(config_sources=sources), sweep=SimpleNamespace(dir="s"))
    monkeypatch.setattr(multirun.HydraConfig, "get", lambda: known)
    monkeypatch.setattr(multirun, "run_unit", lambda *arguments: given.append(arguments) or "ok")
    config = OmegaConf.create({plan.JOB: "value"})
    assert multirun.run_job(config) == "ok"
    del sources[1]
    multirun.run_job(config)
    assert given == [("value", Path("s"), Path("extra")), ("value", Path("s"), None)]


def test_records_that_could_not_be_written_are_tried_once_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(plan.TOKEN, "token")
    one = {"status": "ok", "number": 1, "overrides": [], "message": ""}
    monkeypatch.setattr(unit, "outcomes", {1: one, 2: {**one, "number": 2}})
    monkeypatch.setattr(multirun.launch, "rank", lambda: 1)
    assert multirun._record_late(tmp_path / "s", "token") == 0 and not (tmp_path / "s").exists()
    monkeypatch.setattr(multirun.launch, "rank", lambda: 0)
    assert multirun._record_late(tmp_path / "s", "token") == 0
    assert [outcome["number"] for outcome in plan.outcomes(tmp_path / "s")] == [1, 2]
    assert multirun._record_late(tmp_path / "s", "token") == 0
    (tmp_path / "file").write_text("")
    assert multirun._record_late(tmp_path / "file", "token") == 2
    multirun._keep_table(tmp_path / "file", [])
    assert f"the sweep's table cannot be written to {tmp_path / 'file'}: " in capsys.readouterr().err


def test_other_ranks_keep_a_sweep_of_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(multirun.launch, "rank", lambda: 1)
    monkeypatch.setattr(multirun.tempfile, "mkdtemp", lambda prefix: str(tmp_path / f"{prefix}x"))
    planned = [Job(number=0, overrides=("a=1",), label="a")]
    own = multirun._sweep_folder(["--multirun"], planned, "local", None)
    assert own.folder == tmp_path / "kvbench-rank-x" == tmp_path / own.manifest.id
    assert not (tmp_path / "results").exists()


def test_where_jobs_store_their_runs() -> None:
    def of(*texts: str) -> str:
        return multirun._results_dir([Job(number=0, overrides=texts, label="")])

    assert of("a=1") == "results/runs" == of()
    assert of("runtime.results_dir='a'", 'runtime.results_dir="my b"') == "my b"


def test_the_same_folder_continues_only_the_same_command(tmp_path: Path) -> None:
    folder = write_sweep(tmp_path, [], command=("a", "b"))
    same = multirun._sweep_of_command(folder, ("a", "b"))
    assert same is not None and same.folder == folder
    assert multirun._sweep_of_command(folder, ("a",)) is None and multirun._sweep_of_command(tmp_path, ("a",)) is None


@pytest.mark.parametrize(("text", "repeats"), [("times", True), ("all", True), ("null", False)])
def test_runs_that_are_repeated(text: str, repeats: bool) -> None:
    jobs = [Job(number=n, overrides=("a=1", f"runtime.rerun={text if n else 'null'}"), label="") for n in range(2)]
    assert multirun._repeats(jobs) is repeats


def test_encoders_of_a_method_and_of_its_draft(monkeypatch: pytest.MonkeyPatch) -> None:
    assert fetch.encoders({}) == [] and fetch.encoders({"encoder": "bm25"}) == ["bm25"]
    monkeypatch.setattr(fetch, "group_options", lambda group: {"cocktail": group})
    monkeypatch.setattr(fetch, "read_choice", lambda path: {"encoder": f"preset of {path}"})
    method = {"encoder": None, "draft": "cocktail", "gamma": 4}
    assert fetch.encoders(method) == ["preset of method"]
    assert fetch.encoders({**method, "draft_options": {"encoder": "mine"}, "encoder": "own"}) == ["own", "mine"]
    assert fetch.encoders({**method, "draft_options": {"encoder": None}}) == []
    assert fetch.encoders({**method, "gamma": 0}) == fetch.encoders({**method, "draft": "kivi"}) == []


def test_a_model_is_fetched_unless_it_is_here(monkeypatch: pytest.MonkeyPatch) -> None:
    model: Any = SimpleNamespace(name="tiny", path=None, hub_id="o/n")
    done: list[Any] = []
    place = SimpleNamespace(name=None, local=False)
    monkeypatch.setattr(fetch, "locate", lambda model: place)
    monkeypatch.setattr(fetch, "fetched", done.append)
    monkeypatch.setattr(fetch, "repository_of", lambda model: SimpleNamespace(snapshot=lambda: "there"))
    assert fetch.fetch_model(model) == "model tiny: random weights; nothing to fetch"
    place.name, place.local = "o/n", True
    assert fetch.fetch_model(model) == "model tiny: already on this machine" and not done
    place.local = False
    assert fetch.fetch_model(model) == "model tiny: there" and done == [model]


def test_each_part_of_a_configuration_is_fetched_if_it_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetch, "fetch_dataset", lambda config: [f"dataset {config}"])
    monkeypatch.setattr(fetch, "fetch_model", lambda model: f"model {model['name']}")
    monkeypatch.setattr(fetch, "build", lambda kind, config, group: config)
    monkeypatch.setattr(fetch, "encoders", lambda config: [config, "x"])
    monkeypatch.setattr(fetch, "fetch_encoder", lambda name: f"encoder {name}")
    config = {"dataset": "d", "model": {"name": "m"}, "method": "e"}
    assert list(fetch.fetch(config, {"dataset"})) == ["dataset d"]
    assert list(fetch.fetch(config, {"method", "model"})) == ["model m", "encoder e", "encoder x"]


def test_a_preset_is_not_chosen_by_its_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "model" / "own").mkdir(parents=True)
    (tmp_path / "model" / "own" / "mine.yaml").write_text("name: x")
    monkeypatch.setattr(model_choice.by_name, "check_model_name", lambda *given: None)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match="is also the path of a preset's file") as caught:
        model_choice.accept("'own/mine'", (), "", tmp_path)
    model_choice.accept("own/mine", ("own/mine",), "", tmp_path)  # the preset
    assert caught.value.hint == f"write the full path: model={tmp_path / 'own' / 'mine'}"
