"""Options of decoding and of execution: the groups ``decoding`` and ``runtime``, with their own constraints."""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass
from typing import Any, Literal

from kvbench.errors import ConfigError
from kvbench.parallel import launch
from kvbench.util.requirements import check_writable
from kvbench.util.schema import MOST_GIB, MOST_ROWS, MOST_TOKENS, bounded

#: upper bound of the number of worker processes of a run
MOST_WORKERS = 256

#: lowest temperature above 0; below it, sampling would always draw the most likely token
COLDEST = 0.01


@dataclass(frozen=True, kw_only=True)
class DecodingConfig:
    """Options of decoding, all of which are part of the run id.

    Args:
        max_new_tokens: maximum number of tokens in an answer, for every task; None for each task's own limit.
        temperature: sampling temperature; 0 for greedy decoding. Random numbers are seeded by ``runtime.seed``.
        top_p: nucleus sampling: tokens are drawn from the smallest set of most probable tokens whose total probability
            reaches `top_p`; 1.0 draws from all tokens.
        top_k: tokens are drawn from the `top_k` most probable ones, before `top_p` applies; None for no such limit.
        stop: strings that end an answer, in addition to the task's own.
    """

    max_new_tokens: int | None = bounded(None, minimum=1, maximum=MOST_TOKENS)
    temperature: float = bounded(0.0, minimum=0.0, maximum=10.0)
    top_p: float = bounded(1.0, minimum=0.001, maximum=1.0)
    top_k: int | None = bounded(None, minimum=1, maximum=MOST_TOKENS)
    stop: tuple[str, ...] = ()

    def check(self) -> None:
        """Raise ConfigError if the temperature, `top_p` or `top_k` would have no effect, or a stop string is empty."""
        if 0.0 < self.temperature < COLDEST:
            raise ConfigError(
                "decoding.temperature",
                self.temperature,
                "is so low that only the likeliest token is ever drawn",
                allowed=f"0 (greedy), or {COLDEST} to 10",
                hint="decoding.temperature=0",
            )
        for key, usual in (("top_p", 1.0), ("top_k", None)):
            if self.temperature == 0.0 and getattr(self, key) != usual:
                raise ConfigError(
                    f"decoding.{key}",
                    getattr(self, key),
                    "has no effect because decoding is greedy (decoding.temperature=0)",
                    hint=f"add decoding.temperature=1.0, or remove decoding.{key}",
                )
        if any(not stop for stop in self.stop):
            raise ConfigError(
                "decoding.stop", list(self.stop), "contains an empty string, which would end every answer immediately"
            )

    def named(self, system: str | None) -> dict[str, Any]:
        """Return the entry ``sampler`` of a row: how its tokens were drawn, and the system turn; empty if greedy."""
        if not self.temperature:
            return {}
        drawn = {"temperature": self.temperature, "top_p": self.top_p, "top_k": self.top_k}
        return {"sampler": {**drawn, "system": system}}


@dataclass(frozen=True, kw_only=True)
class RuntimeConfig:
    """Options that determine how a run is executed; only `seed` is part of the run id.

    Args:
        device: ``auto``, ``cpu``, ``cuda``, ``cuda:N`` or ``mps``.
        batch_size: prompts per batch.
        seed: seed for sampling, shuffling and random weights.
        prefill_chunk: tokens per prefill call; None prefills the whole prompt in one call.
        mlp_chunk: number of prompt tokens that feed-forward layers and RoPE process at a time; fewer need less memory.
            ``auto`` is 8192 if a forward pass has more than 16384 tokens, and all tokens otherwise; None is always all
            tokens. Results differ at most by rounding.
        prefill_rows: prompts per prefill call: ``auto`` (as many as have about 16k tokens together), a number, or None
            (all prompts of the batch).
        span_rows: spans of a text (perplexity) per batch: ``auto`` (on a GPU as many as fit into its memory, unless
            fewer are as fast; on a CPU `batch_size`) or a number.
        memory_limit_gb: memory in GiB that the process may use on each device; None for no limit.
        device_map: ``auto`` spreads the model's layers evenly over all GPUs; None uses one device.
        tensor_parallel: ``auto`` splits every layer over the processes that torchrun started, so that each holds some
            of the heads and their cache; None for one process.
        workers: number of processes that share the samples of a run, each with the whole model: one per GPU, or several
            on a CPU. ``auto`` is one per GPU, and 1 without a GPU. The rows are as one process would have written them.
        retry: ``oom`` also repeats runs that ran out of memory; None repeats only failed and interrupted ones.
        rerun: True to repeat samples whose stored results were made by older code; ``times`` to repeat all stored
            samples, keep their answers and scores, and replace times and memory peaks; ``all`` to make everything anew.
        mix_code: what to do if samples are missing, other stored samples were made by older code, and `rerun` does not
            repeat them: True adds the missing samples and marks the run in tables; False raises an error.
        arithmetic: dtype of weights, activations and queries: ``storage`` (``model.dtype``, in which the cache stores
            what is in full precision), ``float32``, or ``auto``: float32 on a CPU that a trial has shown to be slower
            in 16 bits, else ``storage``. A run with stored samples keeps the arithmetic of these, and a run that is
            compared with an fp16 run takes the arithmetic of that run. The arithmetic changes neither what the cache
            stores nor its bytes. Each row records it.
        kernels: implementation of decode attention: ``auto`` (the fastest that supports the case), ``cuda`` or
            ``triton`` on a GPU, ``cpu``, or ``reference`` (plain torch).
        graphs: whether decode steps are replayed as CUDA graphs: ``auto`` (if a step can be captured and the answer is
            long enough to repay the capture), ``always`` (whenever a step can be captured) or ``never``. Each row
            records whether graphs were used.
        compile: True to compile everything around attention (norms, RoPE, activations) with torch.compile, in decode
            steps that run as CUDA graphs.
        shared_prefill: True: jobs of a sweep that differ only in the method share one prefill of each prompt, if their
            methods attend to prompts in full precision; each row says so. It has no effect on a single run.
        results_dir: folder in which each run has its own folder.
    """

    device: str = "auto"
    batch_size: int = bounded(1, minimum=1, maximum=MOST_ROWS)
    seed: int = bounded(0, minimum=0, maximum=2**32 - 1)
    prefill_chunk: int | None = bounded(None, minimum=2, maximum=MOST_TOKENS)
    mlp_chunk: int | Literal["auto"] | None = bounded("auto", minimum=1, maximum=MOST_TOKENS)
    prefill_rows: Literal["auto"] | int | None = bounded("auto", minimum=1, maximum=MOST_ROWS)
    span_rows: Literal["auto"] | int = bounded("auto", minimum=1, maximum=MOST_ROWS)
    memory_limit_gb: float | None = bounded(None, minimum=0.01, maximum=MOST_GIB)
    device_map: Literal["auto"] | None = None
    tensor_parallel: Literal["auto"] | None = None
    workers: Literal["auto"] | int = bounded(1, minimum=1, maximum=MOST_WORKERS)
    retry: Literal["oom"] | None = None
    rerun: bool | Literal["times", "all"] = False
    mix_code: bool = False
    arithmetic: Literal["auto", "storage", "float32"] = "auto"
    kernels: Literal["auto", "cuda", "triton", "cpu", "reference"] = "auto"
    graphs: Literal["auto", "always", "never"] = "auto"
    compile: bool = False
    shared_prefill: bool = False
    results_dir: str = "results/runs"

    def check(self) -> None:
        """Raise ConfigError for an unknown device, contradictory multi-GPU settings, or an unusable results folder."""
        if not re.fullmatch(r"auto|cpu|mps|cuda(:\d+)?", self.device):
            raise ConfigError(
                "runtime.device", self.device, "is not a known device", allowed=("auto", "cpu", "cuda", "cuda:0", "mps")
            )
        if self.device_map and self.device not in ("auto", "cuda"):
            raise ConfigError(
                "runtime.device_map",
                self.device_map,
                f"spreads a model over GPUs, but runtime.device={self.device} names one device",
                hint="set runtime.device=auto or runtime.device_map=null",
            )
        self._check_processes()
        self._check_workers()
        check_writable(self.results_dir, "runtime.results_dir")

    def _check_processes(self) -> None:
        """Raise ConfigError if `tensor_parallel` contradicts torchrun's processes, `device_map` or `device`."""
        key, value, start = (
            "runtime.tensor_parallel",
            self.tensor_parallel,
            "torchrun --nproc-per-node 2 -m kvbench ...",
        )
        if value is None:
            if launch.size() > 1:
                raise ConfigError(
                    key,
                    "null",
                    f"torchrun started {launch.size()} processes, but without tensor parallelism they "
                    "would all do the same work",
                    hint=f"{key}=auto",
                )
            return
        if not launch.launched():
            raise ConfigError(key, value, "needs several processes, which torchrun starts", hint=f"{start} {key}=auto")
        if self.device_map:
            raise ConfigError(
                key,
                value,
                "splits every layer over the GPUs, whereas runtime.device_map places whole layers on "
                "them; choose one of the two",
                hint="runtime.device_map=null",
            )
        if self.device not in ("auto", "cuda", "cpu"):
            raise ConfigError(
                key,
                value,
                f"gives each process its own GPU, but runtime.device={self.device} names a single device",
                hint="runtime.device=auto",
            )

    def _check_workers(self) -> None:
        """Raise ConfigError if `workers` contradicts `device_map`, `tensor_parallel` or `device`."""
        if self.workers == 1:
            return
        key = "runtime.workers"
        for other in ("device_map", "tensor_parallel"):
            if getattr(self, other):
                raise ConfigError(
                    key,
                    self.workers,
                    f"gives each worker a whole model, whereas runtime.{other} divides one model",
                    hint=f"{key}=1, or runtime.{other}=null",
                )
        if self.device.startswith("cuda:"):
            raise ConfigError(
                key,
                self.workers,
                f"gives each worker its own GPU, but runtime.device={self.device} names a single one",
                hint="runtime.device=auto",
            )
        if sys.platform == "win32":
            raise ConfigError(key, self.workers, "is not supported on Windows", allowed="1")
