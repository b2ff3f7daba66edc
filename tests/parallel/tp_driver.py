"""Two processes that share models, forked after one import of torch; rank 0 prints what came out as JSON.

Started by test_tensor_parallel.py, which reads ``rank0.out``, ``rank0.err``, ``rank1.out`` and ``rank1.err`` and what
this process prints: the exit codes of both. Its arguments are a folder and the names of methods.
"""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
from contextlib import suppress
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

import kvbench
from kvbench.cache import Prompts
from kvbench.decoding import Sampling, generate
from kvbench.errors import KvbenchError
from kvbench.parallel import team as teams
from kvbench.parallel.shard import shard
from kvbench.runner.run import answer_run
from kvbench.runner.session import Session
from tests import run_support, zoo

METHODS: dict[str, dict[str, Any]] = {
    "fp16": {},
    "kivi": {"residual": 32},
    "quantspec": {"gamma": 3, "draft_weights": "same"},
    "kvquant": {"outliers": 0.05},
    "h2o": {},
    "snapkv": {"budget": 0.25},
    "rotated": {"residual": 32},  # KIVI, with a matrix per KV head from a file
}
NEW_TOKENS = 16


def rotation(layers: int) -> str:
    """A file with an orthogonal matrix for each layer, side and KV head, the same for both processes."""
    torch.manual_seed(4)
    matrices = {
        f"{side}.{layer}": torch.linalg.qr(torch.randn(2, 64, 64))[0].contiguous()
        for side in ("key", "value")
        for layer in range(layers)
    }
    path = Path(sys.argv[1]) / f"rotation{os.getpid()}.safetensors"
    save_file(matrices, path)
    return str(path)


def decoded(model: Any, name: str, sampling: Sampling | None = None) -> tuple[Any, Any]:
    """A padded batch answered with a method: tokens, and the whole bill."""
    options = METHODS[name]
    if name == "kvquant":
        options = {**options, "calibration": zoo.calibrations("llama")}
    if name == "rotated":
        file = rotation(model.config.get_text_config().num_hidden_layers)
        name, options = "kivi", {**options, "rotation": {"key": file, "value": file}}
    ids, mask = zoo.padded_batch([70, 45])
    method = kvbench.load_method(name, **options)
    cache = method.new_cache(model, Prompts.from_batch(ids, mask), max_length=ids.shape[1] + NEW_TOKENS)
    generation = generate(model, cache, ids, mask, max_new_tokens=NEW_TOKENS, sampling=sampling)
    bill = cache.bill().as_dict()
    method.detach(model)
    return generation.tokens, bill


def models(team: teams.Team, names: list[str]) -> dict[str, Any]:
    """Methods by name on a model in one piece, which rank 0 does, and on its slices."""
    found: dict[str, Any] = {}
    pairs = {"kvquant": (zoo.model("llama"), deepcopy(zoo.model("llama")))}
    whole, sharded = zoo.restless(), deepcopy(zoo.restless())
    shard(sharded, team)
    shard(pairs["kvquant"][1], team)
    for name in names:
        one, mine = pairs.get(name, (whole, sharded))
        tokens, bill = decoded(one, name) if team.rank == 0 else (None, None)
        shared, part = decoded(mine, name)
        bills = team.exchange(part)
        found[name] = {"whole": tokens, "shared": team.exchange(shared), "bill": bill, "bills": bills}
    sampling = Sampling(temperature=1.0, seed=3)
    found["sampled"] = {
        "whole": decoded(whole, "fp16", sampling)[0] if team.rank == 0 else None,
        "shared": team.exchange(decoded(sharded, "fp16", sampling)[0]),
    }
    biased = deepcopy(zoo.model("qwen2"))
    whole_logits = biased(torch.arange(1, 50)[None]).logits
    shard(biased, team)
    found["qwen2"] = float((biased(torch.arange(1, 50)[None]).logits - whole_logits).abs().max())
    found["heads"] = sharded.model.layers[0].self_attn.k_proj.weight.shape[0]
    try:
        shard(deepcopy(zoo.model("phi3")), team)
    except KvbenchError as error:
        found["phi3"] = str(error)
    return found


def outlive(process: int) -> None:
    """Wait until another process has ended (a minute at most)."""
    with suppress(ProcessLookupError):
        for _ in range(1200):
            os.kill(process, 0)
            time.sleep(0.05)


def runs(folder: Path, team: teams.Team) -> None:
    """A run that both do, then one on which rank 1 runs out of memory while rank 0 waits for it.

    Rank 1 stays until rank 0 has gone: a connection that breaks would wake rank 0's main thread too, and which of its
    threads came first would be chance (test_run_lost.py has the two of them meet).
    """
    shared = {
        "runtime": {"tensor_parallel": "auto"},
        "model": {"architecture": {**run_support.ARCHITECTURE, "num_key_value_heads": 2}},
    }
    answer_run(run_support.config(folder / "good", **shared))
    teams.GRACE_S, teams.NOTICE_S = 0.5, 0.5
    first = (team.exchange(os.getpid()) or [0])[0]
    if team.rank == 1:

        def full(self: Session, samples: Any) -> Any:
            raise MemoryError("tried to allocate 20.00 GiB")

        Session.rows = full  # type: ignore[method-assign]
    try:
        answer_run(run_support.config(folder / "oom", **shared))
    finally:
        if team.rank == 1:
            outlive(first)


def one_rank(folder: Path, names: list[str]) -> None:
    """Do what a rank does."""
    team = teams.join("cpu")
    with torch.inference_mode():
        computed = models(team, names)
    if team.rank == 0:
        print(json.dumps(computed), flush=True)
    try:
        runs(folder, team)
    finally:
        teams.leave()


def started(rank: int, folder: Path, names: list[str]) -> int:
    """Fork a rank whose output goes to files, and return its process id."""
    process = os.fork()
    if process:
        return process
    code = 1
    try:
        for stream, name in ((1, "out"), (2, "err")):
            os.dup2(os.open(folder / f"rank{rank}.{name}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC), stream)
        os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank))
        one_rank(folder, names)
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def main() -> None:
    """Start both ranks and print how they ended."""
    torch.set_num_threads(1)
    folder, names = Path(sys.argv[1]), sys.argv[2:]
    zoo.calibrations("llama")  # both ranks read it
    processes = [started(rank, folder, names) for rank in range(2)]
    # rank 0 first: rank 1 stays until it has gone
    print(json.dumps([os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) for process in processes]))


if __name__ == "__main__":
    main()
