"""The directions in which modules may import each other, and what the core can do without."""

from __future__ import annotations

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
        "from kvbench.util.confdir import options\n"
        "from kvbench.methods.load import load_method\n"
        "for name in options('method'):\n"
        "    load_method(name)\n"
    )
    done = _run(code, "torch,transformers,hydra,omegaconf")
    assert done.returncode == 0, done.stderr
