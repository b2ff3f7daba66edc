"""Two processes that share a model over gloo: tokens and bytes of one process, and one's failure is both's."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from kvbench.results import samples
from kvbench.results.samples import outputs
from kvbench.runner.run import answer_run
from tests import run_support
from tests.marks import fast
from tests.parallel.tp_driver import METHODS

FILE = Path(__file__)
ROOT = FILE.parent.parent.parent

pytestmark = pytest.mark.skipif(
    not (dist.is_available() and dist.is_gloo_available()),
    reason="this build of torch has no gloo, through which processes without GPUs share a model",
)


@pytest.fixture(scope="module")
def done(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Return what two processes printed, with the folder of their runs; they run the methods of the chosen tests."""
    folder = tmp_path_factory.mktemp("shared")
    cases = [item.callspec.params for item in request.session.items if hasattr(item, "callspec") and item.path == FILE]
    names = [name for name in METHODS if name == "fp16" or {"name": name} in cases]
    # held here, as torchrun holds it: a port that is looked for and let go may be taken before rank 0 listens on it
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    common = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "PYTHONPATH": str(ROOT),
        "WORLD_SIZE": "2",
        "LOCAL_WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }
    driver = subprocess.Popen(
        [sys.executable, "-m", "tests.parallel.tp_driver", str(folder), *names],
        cwd=ROOT,
        env=common,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,  # so that both ranks can be ended with it
    )
    try:
        codes = json.loads(driver.communicate(timeout=120)[0])
    finally:
        with suppress(ProcessLookupError):
            os.killpg(driver.pid, signal.SIGKILL)
        del store
    said = [[(folder / f"rank{rank}.{name}").read_text() for name in ("out", "err")] for rank in range(2)]
    lines = said[0][0].splitlines()
    assert len(lines) == 1, said[0][1] + said[1][1]
    return {**json.loads(lines[0]), "folder": folder, "said": said, "codes": codes}


@pytest.mark.parametrize("name", fast(METHODS, ["fp16", "kvquant", "snapkv", "rotated"]))
def test_same_tokens_and_the_same_bytes_in_all(done: dict[str, Any], name: str) -> None:
    computed = done[name]
    assert computed["shared"] == [computed["whole"]] * 2
    assert len(set(map(tuple, computed["whole"]))) == 2, "two prompts, two answers"
    whole, parts = computed["bill"], computed["bills"]
    assert parts[0]["fp16_equivalent"] * 2 == whole["fp16_equivalent"]
    for part, count in whole["used"].items():
        together = sum(each["used"][part] for each in parts)
        if name == "kvquant":  # codebooks, and ranges that all heads of a token share, are held by each rank
            assert count <= together <= 2 * count, part
        else:
            assert together == count, part


def test_draws_agree(done: dict[str, Any]) -> None:
    assert done["sampled"]["shared"] == [done["sampled"]["whole"]] * 2
    assert done["sampled"]["whole"] != done["fp16"]["whole"]


def test_biases_are_added_once_and_heads_are_cut(done: dict[str, Any]) -> None:
    assert done["qwen2"] < 1e-4
    assert done["heads"] == 64, "one of two KV heads of 64 channels"


def test_a_model_whose_plan_keeps_all_keys_on_every_rank_is_refused(done: dict[str, Any]) -> None:
    assert "qkv_proj" in done["phi3"]
    assert "runtime.device_map=auto" in done["phi3"]


def test_a_run_is_written_once_and_says_what_each_rank_holds(done: dict[str, Any], tmp_path: Path) -> None:
    (shared,) = [path for path in (done["folder"] / "good").iterdir() if path.is_dir()]
    wide = {"architecture": {**run_support.ARCHITECTURE, "num_key_value_heads": 2}}
    alone = answer_run(run_support.config(tmp_path, model=wide))
    assert Path(alone["run_dir"]).name == shared.name, "the number of processes is not part of a run's identity"
    theirs, mine = (samples.read_samples(Path(path) / "samples.jsonl").rows for path in (shared, alone["run_dir"]))
    for name, row in theirs.items():
        assert {k: v for k, v in outputs(row).items() if k != "nll"} == {
            k: v for k, v in outputs(mine[name]).items() if k != "nll"
        }
        assert row["nll"]["sum"] == pytest.approx(mine[name]["nll"]["sum"], rel=1e-4)
        ranks = row["measured"]["ranks"]
        assert [each["kv_bytes"] * 2 for each in ranks] == [row["kv_bytes"]["used"]["total"]] * 2
    assert json.loads((shared / "env.json").read_text())["layout"] == "tensor_parallel"


def test_memory_that_one_rank_lacks_ends_the_run_on_both_as_a_result(done: dict[str, Any]) -> None:
    assert done["codes"] == [1, 1]
    assert "rank 1" in done["said"][0][1]
    (folder,) = [path for path in (done["folder"] / "oom").iterdir() if path.is_dir()]
    metrics = json.loads((folder / "metrics.json").read_text())
    assert metrics["status"] == "oom"
    assert "rank 1" in metrics["oom"]["message"]
    assert metrics["oom"]["bytes_asked"] == 20 * 2**30
