"""A real llama.cpp server on an F32 file of SmolLM2: proven formats, and kvbench's own greedy texts.

KVBENCH_F32_GGUF names the file (``python -m experiments.engines`` says how to make one), KVBENCH_LLAMA_SERVER the
program ``llama-server``; without the latter, ``llama_cpp.server`` of the extra `engines` serves.
"""

from __future__ import annotations

import os
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from experiments.engines import TIE, differing
from kvbench.cli.compose import Composer
from kvbench.results.store import RunStore
from kvbench.runner.run import answer_run

FILE, PROGRAM = os.environ.get("KVBENCH_F32_GGUF"), os.environ.get("KVBENCH_LLAMA_SERVER")
MODEL = "smollm2-135m-q4_1"
LIMIT = int(os.environ.get("KVBENCH_ENGINE_PROMPTS", "8"))

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(FILE is None, reason="KVBENCH_F32_GGUF names no file"),
    pytest.mark.skipif(PROGRAM is None and find_spec("llama_cpp") is None, reason="no server of llama.cpp"),
]


def run(folder: Path, *overrides: str) -> dict[str, Any]:
    data = ["dataset=mini_text", "dataset.lengths=[256]", "dataset.warm_up=0", f"dataset.limit={LIMIT}"]
    data += ["dataset.max_new_tokens=32", f"runtime.results_dir={folder}", "logger=none"]
    return answer_run(Composer().plain([*overrides, *data]))


def served(folder: Path, *overrides: str) -> dict[str, Any]:
    engine = ["model.serve=llamacpp", f"model.binary={PROGRAM}"] if PROGRAM else ["model.serve=llamacpp_python"]
    model = ["model=endpoint", f"model.preset={MODEL}", f"model.served={FILE}", *engine, "model.concurrency=2"]
    return run(folder, *model, *overrides)


def test_greedy_texts_are_kvbenchs_and_formats_are_proven(tmp_path: Path) -> None:
    # without flash attention, which adds values up in 16 bits on a CPU
    plain = served(tmp_path, "method=fp16", *(["model.args=[--flash-attn,off]"] if PROGRAM else []))
    assert (plain["status"], plain["env"]["endpoint"]["cache"]["proof"]) == ("ok", "proven")
    own = run(tmp_path, f"model={MODEL}", "model.dtype=float16", "method=fp16", "runtime.device=cpu")
    engine, mine = (RunStore(tmp_path, one["run_id"]).samples().rows for one in (plain, own))
    parts = [differing(name, engine[name], mine[name]) for name in mine]
    other = [part for part in parts if part["at"] is not None]
    assert len(other) <= max(1, LIMIT // 20), other
    assert all(part["gap"] is None or part["gap"] <= TIE for part in other), other
    packed = served(tmp_path, "method=engine", "method.format=q8_0/q4_0")
    cache = packed["env"]["endpoint"]["cache"]
    assert (cache["proof"], cache["word"]) == ("proven", "q8_0/q4_0")
    assert packed["kv_bytes"]["ratio"] == pytest.approx(2 * 64 / (34 + 18))
    served(tmp_path, "method=fp16")
    if PROGRAM:
        packed = served(tmp_path, "method=engine", "method.format=q8_0/q4_0")
        bound = packed["scores"]["mini_text@256"]["kl_bound"]
        assert 0 < bound["mean"] < 0.5
        assert bound["top"] == 20
