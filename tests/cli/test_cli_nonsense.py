"""Command lines that mean nothing: refused in words and with little work, and nothing is left behind."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from kvbench.cli.main import main
from kvbench.config.run_config import RunConfig
from kvbench.errors import ConfigError
from tests.cli.refusing import LIGHT, Refusing, refusing

ROOT = Path(__file__).resolve().parents[2]

REFUSED: list[tuple[str, list[str]]] = [
    # Hydra's own settings
    ("hydra.job.chdir=true", ["hydra.job.chdir=true", "hydra.sweep.dir=DIR with --multirun"]),
    ("hydra.mode=MULTIRUN", ["hydra.mode=MULTIRUN", "kvbench configures Hydra itself"]),
    ("hydra.launcher._target_=x", ["hydra.launcher._target_=x", "launcher=joblib"]),
    ("hydra.sweep.dir=mine", ["is a single run", "runtime.results_dir=DIR"]),
    ("hydra/launcher=joblib", ["hint: set launcher=joblib"]),
    ("hydra.searchpath=[file:///tmp]", ["--config-dir DIR"]),
    ("~hydra.job", ["kvbench configures Hydra itself"]),
    ("--multirun method=fp16,kivi hydra.sweep.dir=", ["must name exactly one folder"]),
    ("--multirun method=fp16,kivi hydra.sweep.dir=a,b", ["must name exactly one folder"]),
    ("--multirun method=fp16,kivi hydra.sweep.dir=${now:%Y}", ["plain path"]),
    ("--multirun method=fp16,kivi hydra.launcher.n_jobs=2", ["launcher=joblib, launcher=submitit or launcher=ray"]),
    # sweeps
    ("--multirun runtime.seed=range(0,100000000)", ["would start 100000000 jobs", "KVBENCH_MAX_JOBS=100000000"]),
    ("--multirun runtime.seed=range(0,10001)", ["would start 10001 jobs", "at most 10000"]),
    (
        "--multirun runtime.seed=range(0,101) dataset.limit=range(1,101)",
        ["would start 10100 jobs", "dataset.limit: 100"],
    ),
    ("--multirun runtime.seed=range(5,1)", ["is an empty sweep"]),
    ("--multirun runtime.seed=range(0,1,0)", ["range"]),
    ("--multirun runtime.seed=interval(0,1)", ["range(0.0,1.0,STEP)"]),
    ("--multirun runtime.seed=glob(*)", ["the choices of a group"]),
    ("--multirun method=glob(z*)", ["method=glob(z*)", "matches no choice"]),
    ("--multirun method=kivi,kivi", ["lists kivi twice"]),
    ("--multirun method=kivi,'kivi'", ["lists kivi twice"]),
    ("--multirun runtime.seed=1,2,1", ["lists 1 twice"]),
    ("--multirun experiment=null,quickstart/kivi4", ["no such experiment"]),
    ("launcher=null", ["launcher=null", "local"]),
    # the classes and names that a choice stands for
    ("method._target_=kvbench.methods.kivi.Kivi", ["method._target_", "method=NAME"]),
    ("dataset._target_=os.system", ["dataset._target_=os.system", "dataset=NAME"]),
    ("method=fp16 quantizer=int2 method.takes=[int2]", ["method.takes", "cannot be set on the command line"]),
    ("dataset.name=abc", ["dataset.name=abc", "cannot be set on the command line"]),
    ("method=kivi quantizer.name=int4", ["quantizer.name=int4", "follows from the formats"]),
    ("method=kivi quantizer.key={}", ["has no effect", "quantizer.key.bits=..."]),
    ("method=kivi method.takes=[]", ["method.takes", "cannot be set on the command line"]),
    ("method=kivi method.takes=[none] quantizer=none", ["method.takes", "cannot be set on the command line"]),
    # beyond the context: nothing would be packed under the method's name
    ("method=kivi method.residual=4096", ["method.residual=4096", "nothing would be packed"]),
    ("method=kivi method.sinks=4000", ["the first 4127 tokens all stay in full precision", "model.max_length=4096"]),
    ("method=logquant method.window=1366", ["method.window=1366", "the first 4097 tokens"]),
    ("method=logquant method.reserved=4098", ["method.reserved=4098"]),
    ("method=partial_logquant method.window=4096", ["method.window=4096"]),
    ("method=snapkv method.budget=4095", ["method.budget=4095"]),
    ("method=snapkv method.kernel=4097", ["method.kernel=4097", "larger than any prompt"]),
    ("method=snapkv method.window=4096 method.budget=5000", ["method.window=4096"]),
    ("method=h2o method.budget=4096", ["method.budget=4096"]),
    ("method=streamingllm method.budget=4096", ["method.budget=4096"]),
    ("method=streamingllm method.sinks=4096 method.budget=0.5", ["method.sinks=4096"]),
    ("method=kvquant method.first_tokens=4096", ["method.first_tokens=4096"]),
    ("method=cocktail method.chunk_size=8192 method.encoder=bm25", ["method.chunk_size=8192"]),
    ("method=hf_quantized method.residual=4096", ["method.residual=4096"]),
    ("method=quantspec quantizer.key.group_size=2176", ["the first 4351 tokens"]),
    # budgets and sizes beyond all reason
    ("runtime.batch_size=1000000000", ["at most 65536"]),
    ("runtime.memory_limit_gb=1e-6", ["at least 0.01"]),
    ("runtime.memory_limit_gb=1e9", ["at most 1048576"]),
    ("runtime.prefill_chunk=100000000", ["at most 16777216"]),
    ("runtime.seed=4294967296", ["at most 4294967295"]),
    ("model.prompt_limit=1", ["at least 16"]),
    ("decoding.temperature=1e-400", ["decoding.temperature=1e-400", "too small"]),
    ("decoding.temperature=0.001", ["likeliest token", "decoding.temperature=0"]),
    ("decoding.temperature=1e400", ["too small, too large"]),
    ("decoding.temperature=1 decoding.top_p=0.0001", ["at least 0.001"]),
    ("dataset.limit=10001", ["at most 10000"]),
    ("dataset=efficiency dataset.repeats=1001", ["at most 1000"]),
    ("dataset=efficiency dataset.batches=[65537]", ["dataset.batches[0]=65537", "at most 65536"]),
    ("dataset=pg19 dataset.warm_up=100000000000000000000", ["dataset.warm_up"]),
    ("dataset=gsm8k dataset.limit=99999999999999999999", ["is too large"]),
    ("model=llama2-7b model.weights=random model.architecture.num_hidden_layers=2000000000", ["at most 4096"]),
    ("model=llama2-7b model.weights=random model.architecture.rope.rope_theta=[1]", ["above 0"]),
    # messages that name the thing
    ("dataset.tasks=x", ["dataset.tasks=x: is not a task of dataset=mini", "allowed: "]),
    ("dataset=x", ["no such dataset", "python -m kvbench --help lists them"]),
    ("dataset=longbench dataset.tasks=qaspr", ["is not a task of LongBench", "'qasper'"]),
    # options
    ("--shell-completion", ["--help for a list of all choices"]),
    ("--experimental-rerun=x", ["run the same command again"]),
    ("--resolve", ["--cfg job --resolve"]),
    ("--cfg job --cfg all", ["given twice"]),
    ("--config-dir -m method=kivi", ["--config-dir=-m: this option needs a value"]),
    ("--info= method=kivi", ["--info", "defaults-tree"]),
    ("logger.path=s3://bucket/runs.csv", ["logger.path=s3://bucket/runs.csv: is a URL"]),
    ("runtime.results_dir=https://bucket", ["runtime.results_dir=https://bucket: is a URL"]),
    ("logger.path=/dev/null", ["is a device or pipe"]),
    ("dataset=gsm8k dataset.path=/dev/zero", ["is a device or a pipe"]),
    ("method=cocktail method.encoder=/dev/zero", ["method.encoder=/dev/zero: is not a known encoder"]),
    ("runtime.device=mps", ["Apple"]),
    ("--cfg x", ["--cfg=x", "job, hydra, all"]),
    ("--cfg job -m method=kivi,atom", ["does not have a single configuration"]),
    ("--multirun=1", ["does not take a value"]),
    ("--info x=", ["no such group as 'x'"]),
    ("--config-dir /proc/self method=kivi", ["no subfolder with the name of a configuration group"]),
]


@pytest.fixture(scope="module")
def answer() -> Iterator[Refusing]:
    with refusing() as process:
        yield process


@pytest.mark.parametrize(("line", "words"), REFUSED, ids=[line for line, _ in REFUSED])
def test_is_refused_in_words(line: str, words: list[str], answer: Refusing, tmp_path: Path) -> None:
    said = answer(line.split(), tmp_path)
    assert said.status == 2, said.err
    for word in words:
        assert word in said.err, f"{word!r} is missing in:\n{said.err}"
    assert said.err.startswith("error: ")
    assert not said.out and not said.started
    assert set(said.imported) <= LIGHT
    assert said.compositions <= 4
    assert not list(tmp_path.iterdir())


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[Mapping[str, Any]]:
    """Configurations that would be run."""
    seen: list[Mapping[str, Any]] = []

    def run(config: RunConfig, begun: Any = None) -> dict[str, Any]:
        seen.append(config.plain)
        return {"status": "ok"}

    monkeypatch.setattr("kvbench.runner.run.answer_run", run)
    for name in ("table_text", "runs_markdown", "runs_csv"):
        monkeypatch.setattr(f"kvbench.results.tables.{name}", lambda rows: "")
    monkeypatch.setattr("kvbench.results.ranking.best_first", list)
    monkeypatch.chdir(tmp_path)
    return seen


@pytest.mark.parametrize(
    ("line", "count"),
    [
        ("method=kivi --multirun runtime.seed=1,2", 2),  # options stand anywhere
        pytest.param("method=kivi -m quantizer=int2,int4 runtime.seed=range(0,2)", 4, marks=pytest.mark.slow),
        ("-m -- method=kivi,atom", 2),
        ("method=kivi --run", 1),
        ("experiment=null method=kivi", 1),
        ("-m runtime.seed=range(0,1,0.5)", 0),  # 0.5 is no seed
        ("-m method=kivi method.residual=4064", 1),
        ("-m method=logquant method.window=1365", 1),
        ("-m method=snapkv method.budget=4094", 1),
        ("decoding.temperature=0.01", 1),
    ],
)
def test_what_has_a_meaning_is_started(
    line: str, count: int, started: list[Mapping[str, Any]], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(line.split()) == (0 if count else 2), capsys.readouterr().err
    assert len(started) == count


def test_the_limit_on_jobs_is_raised_by_its_name(
    started: list[Mapping[str, Any]], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("KVBENCH_MAX_JOBS", "2")
    assert main(["-m", "runtime.seed=1,2,3"]) == 2
    assert "KVBENCH_MAX_JOBS=3" in capsys.readouterr().err
    assert main(["-m", "runtime.seed=1,2"]) == 0
    for wrong in ("0", "many", "-1", "1.5"):
        monkeypatch.setenv("KVBENCH_MAX_JOBS", wrong)
        assert main(["-m", "runtime.seed=1,2"]) == 2
        assert f"KVBENCH_MAX_JOBS={wrong}: must be a whole number" in capsys.readouterr().err
    assert len(started) == 2


def test_formats_that_were_changed_stand_in_the_name(started: list[Mapping[str, Any]]) -> None:
    assert main(["method=kivi", "quantizer.key.bits=4", "quantizer.value.group_size=64"]) == 0
    assert started[0]["quantizer"]["name"] == "int2+key.bits=4,value.group_size=64"
    assert main(["method=kivi", "quantizer=int4", "quantizer.key.bits=4"]) == 0
    assert started[1]["quantizer"]["name"] == "int4"


def test_a_folder_that_is_gone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    code = "import os, sys; os.rmdir(os.getcwd()); from kvbench.cli.main import main; sys.exit(main(['method=kivi']))"
    done = subprocess.run(
        [sys.executable, "-P", "-c", code], cwd=gone, env=environment, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 2
    assert done.stderr.startswith("error: current folder: was removed")


@pytest.mark.parametrize("name", ["RANK", "WORLD_SIZE"])
def test_what_torchrun_sets_must_be_numbers(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for variable in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_PORT"):
        monkeypatch.setenv(variable, "0" if "RANK" in variable else "2")
    monkeypatch.setenv("MASTER_ADDR", "localhost")
    monkeypatch.setenv(name, "x")
    assert main(["method=kivi"]) == 2
    assert f"{name}=x: must be a whole number, 0 or greater" in capsys.readouterr().err


@pytest.mark.parametrize("key", ["runtime.results_dir", "logger.path", "dataset.path", "model.path", "logger.dir"])
@pytest.mark.parametrize("value", ["x" * 256, "a/" * 2100 + "b", "loop/x"], ids=["name", "path", "loop"])
def test_a_path_that_cannot_be(
    key: str, value: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "loop").symlink_to("loop")
    monkeypatch.setattr("kvbench.runner.run.answer_run", lambda config: pytest.fail("was started"))
    before = ["logger=wandb"] if key == "logger.dir" else ["dataset=gsm8k"] if key == "dataset.path" else []
    assert main([*before, f"{key}={value}"]) == 2
    printed = capsys.readouterr().err
    assert printed.startswith(f"error: {key}=")
    assert len(printed) < 600


def test_a_file_of_ones_own_is_not_written_over(
    started: list[Mapping[str, Any]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for notes in ("my notes\n", "\nmy notes, day 1\n", "\nrun_id\n"):
        (tmp_path / "notes.txt").write_text(notes)
        assert main(["logger.path=notes.txt"]) == 2
        assert "is not a kvbench log" in capsys.readouterr().err
    for head in ("time,run_id,status\n", "run_id\n", "", "\n"):
        (tmp_path / "notes.txt").write_text(head)
        assert main(["logger.path=notes.txt"]) == 0
    assert len(started) == 4


def test_a_failure_of_the_disk_is_said_in_a_line(
    started: list[Mapping[str, Any]], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device", "results/sweeps/x")

    monkeypatch.setattr("kvbench.cli.main._conclude", full)
    assert main(["method=kivi"]) == 1
    assert capsys.readouterr().err.startswith("error: results/sweeps/x: No space left on device.")


def test_a_sweeps_folder_that_cannot_be_made(
    started: list[Mapping[str, Any]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    for folder in ("/proc/nothing/here", "file", "x" * 256, "s3://bucket/x"):
        assert main(["-m", "method=fp16,kivi", f"hydra.sweep.dir={folder}"]) in (1, 2)
        printed = capsys.readouterr().err
        assert printed.startswith("error: ")
        assert "Traceback" not in printed
    assert not started
    assert main(["-m", "method=fp16,kivi", "hydra.sweep.dir='mine'"]) == 0
    assert sorted(path.name for path in (tmp_path / "mine").glob("job-*")) == ["job-0000.json", "job-0001.json"]


def test_a_run_that_is_refused_late_keeps_its_exit_status(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(config: Mapping[str, Any], begun: Any = None) -> dict[str, Any]:
        raise ConfigError("runtime.device", "cuda:7", "does not exist on this machine")

    monkeypatch.setattr("kvbench.runner.run.answer_run", refuse)
    monkeypatch.chdir(tmp_path)
    assert main(["method=kivi"]) == 2
    assert "does not exist on this machine" in capsys.readouterr().err
    assert main(["-m", "method=kivi,atom"]) == 1  # a sweep failed, its command line was right


def test_a_closed_pipe_is_no_error(tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = f"{sys.executable} -m kvbench --help | true; exit ${{PIPESTATUS[0]}}"
    done = subprocess.run(
        ["bash", "-c", command], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0
    assert "Traceback" not in done.stderr
    assert "BrokenPipe" not in done.stderr
