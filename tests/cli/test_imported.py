"""What each command imports: an upper list, so that the first answer comes at once."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.refusing import LIGHT

ROOT = Path(__file__).resolve().parents[2]
#: what asks the hub by HTTP
HTTP = {"anyio", "h11", "httpcore2", "httpx2", "idna", "sniffio", "tqdm", "truststore", "typing_extensions"}
HTTP |= {"certifi", "fsspec", "hf_xet", "httpcore", "httpx"}
FILES = {"filelock", "rich", "yaml"}
#: large packages that a run imports only where it uses them; transformers imports accelerate wherever it is installed
UNUSED = set("bm25s datasets IPython jieba lm_eval matplotlib nltk pandas pyarrow ray rouge_score".split())
UNUSED |= {"gguf", "sentence_transformers", "sklearn", "submitit", "wandb"}

_CODE = """
import runpy, sys
given = set(sys.modules)
sys.argv = sys.argv[1:]
try:
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
    status = 0
except SystemExit as end:
    status = end.code
new = {name.partition(".")[0] for name in set(sys.modules) - given} - sys.stdlib_module_names - {"kvbench"}
print(status or 0, *[name for name in sorted(new) if "cython" not in name and name != "__mp_main__"])
"""


def imported(line: str, folder: Path, **variables: str) -> tuple[int, set[str], str]:
    """Run ``python -m`` in a process: its exit status, the packages from elsewhere, and what it said."""
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": path, **variables}
    command = [sys.executable, "-c", _CODE, *line.split()]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=250)
    assert done.returncode == 0 and "Traceback" not in done.stderr, done.stderr
    status, *names = done.stdout.splitlines()[-1].split()
    return int(status), set(names), done.stdout + done.stderr


@pytest.mark.parametrize(
    ("line", "most"),
    [
        ("kvbench --help", LIGHT),
        ("kvbench --cfg job method=kivi", LIGHT),
        ("kvbench.report", FILES),
        ("kvbench.report --html", FILES),
        ("kvbench.publish --help", FILES),
        ("kvbench.submit --help", FILES),
        ("kvbench.score --help", FILES),
        ("kvbench.fetch --help", LIGHT),
        ("kvbench.calibrate --help", FILES),
        ("kvbench.bench predict --model llama2-7b", FILES),
        ("kvbench.bench tpot --help", FILES),
    ],
)
def test_commands_that_compute_nothing_import_little(line: str, most: set[str], tmp_path: Path) -> None:
    _, names, _ = imported(line, tmp_path)
    assert names <= most


def test_a_model_that_is_not_here_is_refused_without_torch(tmp_path: Path) -> None:
    """Interpreter, Hydra, the check of the configuration and a question to a hub that nobody reaches."""
    hub = {"HF_ENDPOINT": "http://127.0.0.1:9", "HF_HOME": str(tmp_path / "hub"), "HF_HUB_OFFLINE": "0"}
    status, names, said = imported("kvbench method=kivi model=llama2-7b", tmp_path, **hub)
    assert status == 1 and names <= LIGHT | HTTP
    assert "meta-llama/Llama-2-7b-hf" in said and "model.weights=random" in said and said.count("error: ") == 1


def test_an_encoder_that_is_not_here_is_refused_without_torch(tmp_path: Path) -> None:
    hub = {"HF_ENDPOINT": "http://127.0.0.1:9", "HF_HOME": str(tmp_path / "hub"), "HF_HUB_OFFLINE": "0"}
    status, names, said = imported("kvbench method=cocktail dataset=mini/key_value logger=none", tmp_path, **hub)
    assert status == 1 and names <= LIGHT | HTTP | {"tokenizers"}
    assert "method.encoder=bm25" in said and said.count("error: ") == 1


def test_a_run_imports_no_large_package_that_it_does_not_use(tmp_path: Path) -> None:
    data = "dataset=mini/key_value_hex dataset.lengths=[512] dataset.limit=1 decoding.max_new_tokens=1"
    status, names, _ = imported(f"kvbench method=fp16 runtime.device=cpu logger=none {data}", tmp_path)
    assert status == 0 and names >= {"torch", "transformers"}
    assert not names & UNUSED
