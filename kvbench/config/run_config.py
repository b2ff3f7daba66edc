"""The schema of a run's configuration: one dataclass per group, and the constraints between groups.

:func:`check` takes the composed configuration as plain data. For a wrong key, value or combination it raises an error
that names the key, the value, what is allowed and the closest valid name. It imports neither torch nor transformers and
runs before weights or data are touched.
"""

from __future__ import annotations

import re
import sys
import traceback
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from kvbench import tasks
from kvbench.config.logger_config import AnyLogger, NoLogger, logger_of
from kvbench.errors import CombinationError, ConfigError, KvbenchError, cut
from kvbench.models.quantized.plan import check_whole
from kvbench.models.spec import ModelConfig
from kvbench.parallel import launch
from kvbench.tasks.base import Task
from kvbench.util.requirements import check_writable
from kvbench.util.schema import MOST_GIB, MOST_ROWS, MOST_TOKENS, bounded, build, unknown

#: groups of a run's configuration, in the order in which they are checked and shown
GROUPS = ("model", "quantizer", "method", "dataset", "decoding", "runtime", "logger")

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
        stop: strings that end an answer, in addition to the task's own.
    """

    max_new_tokens: int | None = bounded(None, minimum=1, maximum=MOST_TOKENS)
    temperature: float = bounded(0.0, minimum=0.0, maximum=10.0)
    top_p: float = bounded(1.0, minimum=0.001, maximum=1.0)
    stop: tuple[str, ...] = ()

    def check(self) -> None:
        """Raise ConfigError if the temperature or `top_p` would have no effect, or a stop string is empty."""
        if 0.0 < self.temperature < COLDEST:
            raise ConfigError(
                "decoding.temperature",
                self.temperature,
                "is so low that only the likeliest token is ever drawn",
                allowed=f"0 (greedy), or {COLDEST} to 10",
                hint="decoding.temperature=0",
            )
        if self.temperature == 0.0 and self.top_p < 1.0:
            raise ConfigError(
                "decoding.top_p",
                self.top_p,
                "has no effect because decoding is greedy (decoding.temperature=0)",
                hint="add decoding.temperature=1.0, or remove decoding.top_p",
            )
        if any(not stop for stop in self.stop):
            raise ConfigError(
                "decoding.stop", list(self.stop), "contains an empty string, which would end every answer immediately"
            )


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
        span_rows: spans of a text (perplexity) per batch: ``auto`` (on a GPU as many as its memory holds and make it
            faster; on a CPU `batch_size`) or a number.
        memory_limit_gb: memory in GiB that the process may use on each device; None for no limit.
        device_map: ``auto`` spreads the model's layers evenly over all GPUs; None uses one device.
        tensor_parallel: ``auto`` splits every layer over the processes that torchrun started, so that each holds some
            of the heads and their cache; None for one process.
        workers: number of processes that share the samples of a run, each with the whole model: one per GPU, or several
            on a CPU. ``auto`` is one per GPU, and 1 without a GPU. The rows are those of a single process.
        retry: ``oom`` also repeats runs that ran out of memory; None repeats only failed and interrupted ones.
        rerun: True to repeat samples whose stored results were made by older code.
        mix_code: what to do if samples are missing, other stored samples were made by older code, and `rerun` is False:
            True adds the missing samples and marks the run in tables; False raises an error.
        kernels: implementation of decode attention on a GPU: ``auto`` (the fastest that supports the case), ``cuda``,
            ``triton`` or ``reference`` (plain torch).
        graphs: whether decode steps are replayed as CUDA graphs: ``auto`` (if a step can be captured and the answer is
            long enough to repay the capture), ``always`` (whenever a step can be captured) or ``never``. Each row
            records whether graphs were used.
        compile: True to compile everything around attention (norms, RoPE, activations) with torch.compile, in decode
            steps that run as CUDA graphs.
        shared_prefill: True to let the jobs of a sweep that differ only in the method read each prompt once, if their
            methods attend to it in full precision; each row says so. It has no effect on a single run.
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
    rerun: bool = False
    mix_code: bool = False
    kernels: Literal["auto", "cuda", "triton", "reference"] = "auto"
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


@dataclass(frozen=True)
class RunConfig:
    """The complete configuration of a run as typed and checked data.

    Args:
        model: the model.
        method: instance of the method's class, which also holds the quantizer.
        dataset: the group ``dataset`` as plain data.
        decoding: options of decoding.
        runtime: options of execution.
        logger: settings of the logger.
        task: the data set as an object, built from the group ``dataset``.
    """

    model: ModelConfig
    method: Any
    dataset: Mapping[str, Any]
    decoding: DecodingConfig = field(default_factory=DecodingConfig)
    runtime: RuntimeConfig = field(default_factory=RuntimeConfig)
    logger: AnyLogger = field(default_factory=lambda: NoLogger(name="none"))
    task: Task = field(default_factory=Task)


def check(config: Mapping[str, Any]) -> RunConfig:
    """Check a composed configuration, and return it as typed data.

    Args:
        config: the configuration as plain data: the keys of each group, by the group's name.

    Raises:
        ConfigError: a key, value or combination is wrong; the error describes the first one found.
    """
    for group in config:
        if group not in GROUPS:
            raise unknown(str(group), None, "no such group", GROUPS)
    for group in GROUPS:
        if not isinstance(config.get(group), Mapping):
            raise ConfigError(
                group,
                config.get(group),
                "must be a group of keys",
                hint=f"choose one with {group}=NAME; --help lists the names",
            )
    model = build(ModelConfig, config["model"], "model")
    model.check()
    decoding = build(DecodingConfig, config["decoding"], "decoding")
    decoding.check()
    runtime = build(RuntimeConfig, config["runtime"], "runtime")
    runtime.check()
    logger = logger_of(config["logger"])
    method = _method(config["method"], config["quantizer"], model)
    task = tasks.load(config["dataset"])
    checked = RunConfig(model, method, dict(config["dataset"]), decoding, runtime, logger, task)
    _combinations(checked)
    task.fits(checked)
    return checked


def _method(method: Mapping[str, Any], quantizer: Mapping[str, Any], model: ModelConfig) -> Any:
    from kvbench.methods.load import method_from_config

    checked = method_from_config(method, quantizer)
    try:
        checked.check(head_dim=model.head_dim(), max_length=model.max_length)
        checked.check_reach(model.max_length)
    except KvbenchError:
        raise
    except Exception as error:
        if type(checked).__module__.startswith("kvbench."):
            raise
        last = traceback.extract_tb(error.__traceback__)[-1]
        raise ConfigError(
            "method._target_",
            method.get("_target_"),
            f"its check() raised {type(error).__name__}: {cut(str(error))} ({last.filename}, line {last.lineno})",
        ) from error
    layers = model.layers()
    if layers is not None:
        checked.by_layer(layers)
    checked.prepare(model)
    return checked


def _combinations(checked: RunConfig) -> None:
    """Raise ConfigError for values of different groups that contradict each other."""
    model, decoding, method = checked.model, checked.decoding, checked.method
    if method.meaningless is not None and not checked.task.times_only:
        raise ConfigError(
            method.meaningless,
            getattr(method, method.meaningless.rpartition(".")[2]),
            f"makes the text meaningless, so that nothing can be scored on dataset={checked.dataset.get('name')}",
            allowed="null, or a data set on which only times and memory are measured",
            hint="add dataset=efficiency/tpot model.weights=random",
        )
    if model.rounding:
        check_whole(model, checked.runtime.tensor_parallel is not None)
        drafts = method.speculation.weights if method.speculation is not None else "same"
        if drafts == model.rounding or drafts == "int4":
            raise CombinationError(
                "method.draft_weights",
                drafts,
                f"asks for additional weights in 4 bits, but with model.weights={model.weights} all these weights have "
                "4 bits already, and the draft uses them",
                hint="method.draft_weights=same",
            )
    if checked.runtime.workers != 1 and (checked.task.single_process or checked.task.adaptive):
        raise CombinationError(
            "runtime.workers",
            checked.runtime.workers,
            f"cannot be used with dataset={checked.dataset.get('name')}, which measures a single process",
            hint="runtime.workers=1",
        )
    for key, new in (
        ("decoding.max_new_tokens", decoding.max_new_tokens),
        ("dataset.max_new_tokens", getattr(checked.task, "max_new_tokens", None)),
    ):
        if key.startswith("dataset") and decoding.max_new_tokens:
            continue  # overridden by decoding.max_new_tokens
        if isinstance(new, int) and new >= model.max_length:
            raise ConfigError(
                key,
                new,
                f"leaves no room for a prompt, because model.max_length={model.max_length}",
                allowed=f"at most {model.max_length - 1}",
            )
