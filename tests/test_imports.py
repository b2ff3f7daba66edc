"""The directions in which modules may import each other, and what the core can do without."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

#: `import hydra` fails, and whoever asks whether there is a hydra hears no
BLOCKER = "import sys\nfor name in sys.argv[1].split(','):\n    sys.modules[name] = None\n"


def _run(code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    command = [sys.executable, "-c", code, *arguments]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120)


def test_imports_go_one_way() -> None:
    """The contracts stand in pyproject.toml; `make lint` runs them too."""
    pytest.importorskip("importlinter")
    done = _run("from importlinter.cli import lint_imports; raise SystemExit(lint_imports(no_cache=True))")
    assert done.returncode == 0, done.stdout
    assert "0 broken" in done.stdout


def test_the_core_needs_torch_and_transformers_alone() -> None:
    """A GPU machine has neither Hydra nor any logger, fetcher or table drawer."""
    code = BLOCKER + (
        "import kvbench, kvbench.methods, kvbench.cache, kvbench.attention.register, kvbench.quantizers\n"
        "import kvbench.decoding.autoregressive, kvbench.models.load, kvbench.config.run_config\n"
        "assert kvbench.load_method('kivi', quantizer='int4').residual == 128\n"
    )
    done = _run(code, "hydra,omegaconf,wandb,datasets,sentence_transformers,rouge_score,pandas,matplotlib")
    assert done.returncode == 0, done.stderr


def test_a_configuration_is_checked_without_torch() -> None:
    code = BLOCKER + (
        "from kvbench.util.confdir import group_options\n"
        "from kvbench.methods.load import load_method\n"
        "for name in group_options('method'):\n"
        "    load_method(name)\n"
    )
    done = _run(code, "torch,transformers,hydra,omegaconf")
    assert done.returncode == 0, done.stderr


# -- circles and the top floor ---------------------------------------------------------------------------------------

#: modules on the top floor of the package; all but the first three are doors: a few lines that open a package
DOORS = {"report", "score", "fetch", "calibrate", "tune", "publish"}
TOP = {"__init__", "__main__", "errors"} | DOORS


def _modules() -> dict[str, Path]:
    paths = (ROOT / "kvbench").rglob("*.py")
    return {".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path for path in paths}


def _imports(modules: dict[str, Path]) -> dict[str, set[str]]:
    """Modules of the package that each module imports: anywhere in it, for types alone too."""
    edges: dict[str, set[str]] = {name: set() for name in modules}
    for name, path in modules.items():
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                edges[name] |= {alias.name for alias in node.names if alias.name in modules}
            elif isinstance(node, ast.ImportFrom) and (node.module or "") in modules:
                inner = (f"{node.module}.{alias.name}" for alias in node.names)
                edges[name] |= {module if module in modules else str(node.module) for module in inner}
    return edges


def _circles(edges: dict[str, set[str]]) -> list[set[str]]:
    """Sets of nodes of which each reaches all others."""

    def reached(start: str) -> set[str]:
        seen: set[str] = set()
        waiting = [start]
        while waiting:
            fresh = edges[waiting.pop()] - seen
            seen |= fresh
            waiting.extend(fresh)
        return seen

    reach = {name: reached(name) for name in edges}
    circles = ({other for other in reach[name] if name in reach[other]} for name in edges if name in reach[name])
    return [set(circle) for circle in {frozenset(circle) for circle in circles}]


def test_circles_are_found() -> None:
    edges = {"a": {"b"}, "b": {"c"}, "c": {"a", "d"}, "d": set(), "e": {"f"}, "f": {"e"}, "g": {"a"}}
    assert sorted(map(sorted, _circles(edges))) == [["a", "b", "c"], ["e", "f"]]


def test_no_modules_import_each_other_in_a_circle() -> None:
    edges = _imports(_modules())
    assert edges["kvbench.cache.layer"] >= {"kvbench.cache.nonfinite", "kvbench.cache.policy"}
    assert [sorted(circle) for circle in _circles(edges)] == []


def test_the_top_floor_holds_doors_alone() -> None:
    files = {path.stem: path for path in (ROOT / "kvbench").glob("*.py")}
    assert set(files) <= TOP
    lines = {name: len(files[name].read_text(encoding="utf-8").splitlines()) for name in DOORS & set(files)}
    assert max(lines.values()) <= 10, lines
