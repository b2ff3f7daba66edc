"""Which part of the code an edit changes, for a file of each package; and that parts have all that a run executes."""

from __future__ import annotations

import inspect
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import yaml

import kvbench
from kvbench.results import code as codes
from kvbench.results.code import Code
from kvbench.results.samples import MEASURED
from kvbench.runner import modules, sources
from kvbench.runner.run import answer_run
from tests.run_support import config

ROOT = Path(kvbench.__file__).parent
KIVI: dict[str, Any] = {
    "method": {"_target_": "kvbench.methods.kivi.Kivi"},
    "quantizer": {"name": "int2"},
    "dataset": {"_target_": "kvbench.tasks.mini.Mini"},
}

#: file -> the parts that an edit of it changes for a run of kivi on mini
TABLE = {
    "__init__.py": "",
    "__main__.py": "",
    "endpoint/client.py": "runner/served",
    "errors.py": "",
    "fit/answer.py": "",
    "submit/check.py": "",
    "tune/space.py": "",
    "report.py": "",
    "analysis/analyse.py": "",
    "attention/reference.py": "attention",
    "attention/check_kernels.py": "",
    "attention/rope/rotary.py": "attention",
    "attention/codebook/decode.py": "attention/codebook",
    "attention/codebook/decode.cu": "attention/codebook",
    "attention/cuda/config.py": "attention/cuda attention/codebook",
    "attention/cuda/values.cuh": "attention/cuda attention/codebook",
    "attention/triton/decode_kernel.py": "attention/triton",
    "bench/kernel.py": "",
    "cache/__init__.py": "cache",
    "cache/bill.py": "cache",
    "cache/segments/packed.py": "cache",
    "cache/kernels/pack.py": "cache",
    "cache/kernels/pack_kernel.py": "cache/kernels attention/triton",
    "cache/kernels/evict_kernel.py": "",
    "calibration/file.py": "",
    "cli/main.py": "",
    "cli/launchers/units.py": "",
    "config/run_config.py": "config",
    "decoding/sampling.py": "decoding",
    "decoding/forced.py": "decoding",
    "decoding/rounds.py": "decoding/steps",
    "decoding/tables.py": "decoding/steps",
    "decoding/segments.py": "decoding/steps",
    "hub/transfer.py": "",
    "linear/int4.py": "linear",
    "linear/matvec_kernel.py": "decoding/steps",
    "linear/cuda/int4.cu": "linear/kernels",
    "lm_eval/model.py": "",
    "loggers/csv.py": "",
    "measure/meter.py": "runner/points",
    "methods/__init__.py": "method",
    "methods/base.py": "method",
    "methods/fp16.py": "method",
    "methods/kivi.py": "method",
    "methods/h2o.py": "",
    "metrics/text.py": "scorer",
    "metrics/longbench.py": "",
    "metrics/fidelity.py": "runner/fidelity",
    "models/gguf/convert.py": "model",
    "models/load.py": "model",
    "models/quantized/loading.py": "model",
    "page/data.py": "",
    "parallel/spread.py": "parallel",
    "profiling/timing.py": "",
    "publish/runs.py": "",
    "quantizers/affine.py": "quantizer",
    "quantizers/engine/build.py": "quantizer",
    "results/summary.py": "",
    "retrieval/chunks.py": "",
    "rotation/named.py": "rotation",
    "rotation/rotate_kernel.py": "rotation/kernels decoding/steps",
    "runner/prompting.py": "runner",
    "runner/run.py": "",
    "runner/shared_runs.py": "runner/shared_runs",
    "tasks/filled.py": "runner/points",
    "runner/scoring.py": "scorer",
    "runner/points.py": "runner/points",
    "runner/full_precision.py": "runner/fidelity",
    "tasks/base.py": "task runner/points runner/fidelity runner/shared_runs runner/served",
    "tasks/gsm8k.py": "",
    "tasks/mini/compose.py": "task",
    "tasks/ruler/task.py": "",
    "util/failures.py": "util",
}
#: rows of a CPU and of a GPU, by what they say of how they were made
ROWS = {
    False: {MEASURED: {"attention": {"path": "reference"}, "stepping": "eager"}},
    True: {MEASURED: {"attention": {"path": "cuda"}, "stepping": "graph"}},
}
#: parts that these rows do not have
UNUSED = {
    True: {
        "attention/codebook",
        "attention/triton",
        *("runner/points", "runner/fidelity", "runner/shared_runs", "runner/served"),
    }
}
UNUSED[False] = UNUSED[True] | {
    "attention/cuda",
    "cache/kernels",
    "decoding/steps",
    "linear/kernels",
    "rotation/kernels",
}

#: modules of packages that have parts which prepare a run or record it, and affect no output
BESIDE = {
    *(f"kvbench.config.{name}" for name in ("downloads", "prerequisites", "setting")),
    *("kvbench.metrics.intervals", "kvbench.models.by_name", "kvbench.parallel.crew", "kvbench.parallel.crew_worker"),
    *(f"kvbench.runner.{name}" for name in ("gate", "modules", "origins", "ranks", "remarks", "rerun", "resolve")),
    *(f"kvbench.runner.{name}" for name in ("run", "run_state", "sources", "steps", "stored", "workers")),
    *(f"kvbench.util.{name}" for name in ("door", "normal_form", "version")),
    *("kvbench.quantizers", "kvbench.quantizers.spec"),  # of a run without a quantizer
    *("kvbench.tasks", "kvbench.tasks.load"),
}


@pytest.fixture
def edited(monkeypatch: pytest.MonkeyPatch) -> Callable[[Path, Callable[[bytes], bytes]], None]:
    """Return a function after whose call a source file reads as an edit of it."""
    read_bytes, read = Path.read_bytes, modules._read

    def edited(path: Path, edit: Callable[[bytes], bytes]) -> None:
        def read_edited(self: Path) -> bytes:
            return edit(read_bytes(self)) if self == path else read_bytes(self)

        def unless_edited(name: str, place: Path, *stamp: int) -> modules.Module:
            return (read.__wrapped__ if place == path else read)(name, place, *stamp)

        monkeypatch.setattr(Path, "read_bytes", read_edited)
        monkeypatch.setattr(modules, "_read", unless_edited)

    return edited


def further(source: bytes) -> bytes:
    return source + b"\nFURTHER = 1\n"


def changed(before: Code, after: Code) -> set[str]:
    assert before.keys() == after.keys()
    return {part for part in before if before[part] != after[part]}


@pytest.mark.parametrize("name", TABLE)
def test_an_edit_changes_the_parts_of_what_it_affects(name: str, edited) -> None:
    before = sources.code(KIVI)
    edited(ROOT / name, further)
    after = sources.code(KIVI)
    parts = set(TABLE[name].split())
    assert changed(before, after) == parts
    for on_gpu, row in ROWS.items():
        older = codes.changed(codes.used(before, row, on_gpu=on_gpu), after)
        assert set(older) == parts - UNUSED[on_gpu] - {codes.SCORER}


def test_the_table_has_a_file_of_every_folder() -> None:
    """The kernels of attention are families, each a part by itself, and have a test of their own."""
    folders = {path.parent for path in modules.package_files("kvbench").values()}
    families = {ROOT / "attention" / path.parent.name for path in ROOT.glob("attention/*/decode.py")}
    wanted = folders - {ROOT} - families
    assert wanted <= {(ROOT / name).parent for name in TABLE}
    assert families and all((ROOT / name).is_file() for name in TABLE)
    assert set(modules.package_files("kvbench")) >= BESIDE


NATIVE = [path for path in modules.package_files("kvbench").values() if path.suffix in modules.NATIVE]
FAMILIES = list(ROOT.glob("attention/*/decode.py"))


@pytest.mark.parametrize("path", [*NATIVE, *FAMILIES], ids=lambda path: str(path.relative_to(ROOT)))
def test_every_native_source_and_every_family_counts_for_rows_that_used_it(path: Path, edited) -> None:
    before = sources.code(KIVI)
    edited(path, lambda source: source + b"\n#define FURTHER\n" if path.suffix != ".py" else further(source))
    parts = changed(before, sources.code(KIVI))
    package, folder, *_ = path.relative_to(ROOT).parts
    mine = f"{package}/{folder}" if package == "attention" else f"{package}/kernels"
    assert mine in parts and all("/" in part for part in parts)


def test_a_new_family_of_kernels_counts_by_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = {
        "decode.py": "from kvbench.attention.fresh import build\n",
        "build.py": "from kvbench.attention.merge import merged\n",
        "decode.cpp": "int x;\n",
        "lanes.hpp": "int y;\n",
    }
    known = modules.package_files
    written = {f"kvbench.attention.fresh.{name.removesuffix('.py')}": tmp_path / name for name in files}
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    before = sources.code(KIVI)
    monkeypatch.setattr(modules, "package_files", lambda package: {**known(package), **written})
    assert set(sources.parts(KIVI)["attention/fresh"]) == set(written)
    now = sources.code(KIVI)
    assert before == {part: digest for part, digest in now.items() if part != "attention/fresh"}
    for name, text in files.items():
        (tmp_path / name).write_text(text + ("Y = 1\n" if name.endswith("py") else "int z;\n"))
        assert changed(now, sources.code(KIVI)) == {"attention/fresh"}
        now = sources.code(KIVI)
    row = {MEASURED: {"attention": {"path": "fresh"}}}
    assert "attention/fresh" in codes.used(now, row, on_gpu=False)
    assert "attention/fresh" not in codes.used(now, ROWS[False], on_gpu=False)


@pytest.mark.parametrize(
    ("group", "options", "name", "part"),
    [
        ("dataset", {"_target_": "kvbench.tasks.fidelity.Fidelity", "over": "gsm8k"}, "tasks/gsm8k.py", "task"),
        ("dataset", {"_target_": "kvbench.tasks.fidelity.Fidelity", "over": None}, "tasks/gsm8k.py", ""),
        ("method", {"_target_": "kvbench.methods.quantspec.QuantSpec", "draft": "h2o"}, "methods/h2o.py", "method"),
        ("method", {"_target_": "kvbench.methods.quantspec.QuantSpec", "draft": "upper"}, "methods/h2o.py", ""),
    ],
)
def test_what_an_option_names_counts(group: str, options: dict[str, Any], name: str, part: str, edited) -> None:
    before = sources.code({**KIVI, group: options})
    edited(ROOT / name, further)
    assert changed(before, sources.code({**KIVI, group: options})) == set(part.split())


def test_the_quantizer_of_a_format_that_a_method_names_counts(edited) -> None:
    kvquant = {**KIVI, "method": {"_target_": "kvbench.methods.kvquant.KVQuant"}, "quantizer": {"name": "none"}}
    before = sources.code(kvquant)
    edited(ROOT / "quantizers/nuq.py", further)
    assert changed(before, sources.code(kvquant)) == {"quantizer"}


@pytest.mark.parametrize(
    ("target", "old", "new"),
    [
        ("mini.Mini", b"return _score_entry(", b"return dict() or _score_entry("),
        ("efficiency.Efficiency", b"scorer_version = 1", b"scorer_version = 2"),
        ("fidelity.Fidelity", b"return {}", b"return dict()"),
    ],
)
def test_only_what_scores_is_scored_again(target: str, old: bytes, new: bytes, edited) -> None:
    settings = {**KIVI, "dataset": {"_target_": f"kvbench.tasks.{target}"}}
    before = sources.code(settings)
    path = ROOT / "tasks" / ("mini/task.py" if target == "mini.Mini" else f"{target.partition('.')[0]}.py")
    assert old in path.read_bytes()
    edited(path, lambda source: source.replace(old, new))
    assert changed(before, sources.code(settings)) == {"scorer"}


def test_the_kernels_that_only_one_method_uses_count_for_it(edited) -> None:
    h2o = {**KIVI, "method": {"_target_": "kvbench.methods.h2o.H2O"}, "quantizer": {"name": "none"}}
    before = sources.code(h2o)
    edited(ROOT / "cache/kernels/evict_kernel.py", further)
    assert changed(before, sources.code(h2o)) == {"cache/kernels"}


def test_parts_that_all_share_are_those_of_every_method() -> None:
    own = {"method", "quantizer", "task", "scorer"}
    shared = {part: digest for part, digest in sources.shared_code().items() if part not in own}
    assert {"cache", "attention", "decoding", "runner", "model", "attention/cuda", "decoding/steps"} <= shared.keys()
    for method in ("kivi.Kivi", "kvquant.KVQuant", "h2o.H2O", "cocktail.Cocktail"):
        found = sources.code({**KIVI, "method": {"_target_": f"kvbench.methods.{method}"}})
        assert {part: digest for part, digest in found.items() if part in shared and part != "cache/kernels"} == {
            part: digest for part, digest in shared.items() if part != "cache/kernels"
        }


def uncovered(names: set[str], settings: dict[str, Any]) -> set[str]:
    """The modules of kvbench that no part of a run has, and that may affect its outputs."""
    covered = {name for found in sources.parts(settings).values() for name in found}
    return {
        name
        for name in names
        if name not in covered | {"kvbench", sources.SCORING} | BESIDE and not modules.below(name, sources.LEFT_OUT)
    }


@pytest.mark.parametrize("method", ["kivi", "fp16"])
def test_a_part_has_every_file_whose_functions_a_run_calls(method: str, tmp_path: Path) -> None:
    called: set[str] = set()
    settings = config(tmp_path, method, dataset={"limit": 2})

    def note(frame: FrameType, event: str, _: Any) -> None:
        if event == "call" and frame.f_code.co_flags & inspect.CO_OPTIMIZED:  # no body of a module or class
            called.add(frame.f_code.co_filename)

    sys.setprofile(note)
    try:
        assert answer_run(settings)["status"] == "ok"
    finally:
        sys.setprofile(None)
    names = {name for name, path in modules.package_files("kvbench").items() if str(path) in called}
    assert {"kvbench.cache.layer", "kvbench.runner.answers", f"kvbench.methods.{method}"} <= names
    assert not uncovered(names, settings)


CALLED = """
import inspect, pkgutil, runpy, sys, threading
import kvbench
for module in pkgutil.walk_packages(kvbench.__path__, "kvbench."):  # what imports call does not count
    try:
        __import__(module.name) if not module.name.endswith("__main__") else None
    except ImportError:  # triton, wandb, ...
        pass
called = set()
def note(frame, event, _):
    if event == "call" and frame.f_code.co_flags & inspect.CO_OPTIMIZED:
        called.add(frame.f_code.co_filename)
sys.argv = sys.argv[1:]
threading.setprofile(note)
sys.setprofile(note)
try:
    runpy.run_module("kvbench", run_name="__main__", alter_sys=True)
except SystemExit as end:
    assert not end.code, end.code
sys.setprofile(None)
print(*called, sep=chr(10))
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    "words",
    [
        "method=kivi dataset=mini/key_value_hex dataset.lengths=[512] dataset.limit=1",
        "method=kvquant dataset=mini/pairs dataset.lengths=[512] dataset.limit=1",
        "method=quantspec method.draft=h2o dataset=mini/many dataset.lengths=[512] dataset.limit=1",
        "method=h2o dataset=perplexity/mini_text dataset.limit=1 dataset.window=300",
        "method=kivi dataset=fidelity dataset.limit=1",
        "method=cocktail method.encoder=bm25 dataset=fidelity dataset.over=mini/key_value_hex dataset.limit=1",
        "method=kivi dataset=efficiency decoding.max_new_tokens=4",
    ],
)
def test_a_part_has_every_file_whose_functions_a_command_calls(words: str, tmp_path: Path) -> None:
    line = [*words.split(), "model=tiny", "runtime.device=cpu", "logger=none", "runtime.results_dir=runs"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT.parent)}
    command = [sys.executable, "-c", CALLED, "kvbench", *line]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    (path,) = tmp_path.glob("runs/*/config.yaml")
    called = set(done.stdout.splitlines())
    names = {name for name, path in modules.package_files("kvbench").items() if str(path) in called}
    assert "kvbench.cache.layer" in names
    assert not uncovered(names, yaml.safe_load(path.read_text()))
