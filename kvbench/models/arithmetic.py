"""The two dtypes of a model: the one in which its caches store, and the one in which the machine computes.

Storage (``model.dtype``) decides what full-precision keys and values, scales and the bill are, so it must not depend on
the machine. The dtype of the arithmetic (``runtime.arithmetic``) may depend on the machine. On a CPU without
instructions for 16-bit products, these take three to six times as long as products in float32. There, weights,
activations and queries are in float32, and only what the cache stores is rounded to 16 bits.
"""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from filelock import FileLock, Timeout

from kvbench.errors import ConfigError
from kvbench.models.devices import Runtime
from kvbench.models.layers import layer_kinds
from kvbench.util import atomic
from kvbench.util.fingerprint import cache_folder
from kvbench.util.processor import cpu_name, free_memory

#: values of ``runtime.arithmetic``
Arithmetic = Literal["auto", "storage", "float32"]
#: environment variable that takes the place of ``runtime.arithmetic=auto``
VARIABLE = "KVBENCH_ARITHMETIC"
#: environment variables that take instructions away from torch
_INSTRUCTIONS = ("ATEN_CPU_CAPABILITY", "ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA")
#: how many times faster float32 must be before it is chosen: it takes twice the memory
_WORTH = 1.15
#: rows, input and output channels of the probed product
_PROBED = (512, 512, 1536)
#: share of the free memory that weights in float32 may take
_SHARE = 0.8


def dtype_name(dtype: torch.dtype | str) -> str:
    """Return torch's name of a dtype without the module, for example ``bfloat16``."""
    return str(dtype).removeprefix("torch.")


@dataclass(frozen=True)
class Dtypes:
    """The dtypes of a model.

    Args:
        storage: dtype of what its caches store in full precision.
        usual: the storage of ``model.dtype=auto``: the checkpoint's own dtype if it has 16 bits, else bfloat16.
        arithmetic: dtype of weights and activations.
        slower: why the model computes in 16 bits although float32 would be faster; empty if float32 is not faster.
    """

    storage: torch.dtype
    usual: torch.dtype
    arithmetic: torch.dtype
    slower: str = ""

    def names(self) -> dict[str, str]:
        """Return the dtypes as rows and ``env.json`` record them (:class:`kvbench.results.record_machine.Env`)."""
        named = {
            "dtype": dtype_name(self.storage),
            "usual_dtype": dtype_name(self.usual),
            "arithmetic": dtype_name(self.arithmetic),
        }
        return named | ({"slower": self.slower} if self.slower else {})


def dtypes(
    name: str,
    runtime: Runtime,
    device: torch.device,
    config: Any,
    files: Sequence[Path] = (),
    drawn: bool = False,
    exact: bool = False,
) -> Dtypes:
    """Choose the dtypes of a model that is about to be loaded, for the value `name` of ``model.dtype``.

    Args:
        files: safetensors files of its weights; they tell the checkpoint's dtype if its config does not.
        drawn: True for random weights, which have no dtype of their own.
        exact: True for dequantized weights: 16 bits would change most of them, so on a CPU they are in float32 even
            where that is slower.
    """
    usual = torch.bfloat16 if drawn else usual_storage(config, files)
    storage: torch.dtype = usual if name == "auto" else getattr(torch, name)
    wanted = getattr(runtime, "arithmetic", "auto")
    if wanted == "auto" and (wanted := os.environ.get(VARIABLE) or "auto") not in get_args(Arithmetic):
        raise ConfigError(VARIABLE, wanted, "is not an arithmetic", allowed=get_args(Arithmetic))
    if wanted == "float32" or storage == torch.float32:
        return Dtypes(storage, usual, torch.float32)
    if wanted == "storage" or device.type != "cpu" or not (exact or faster_in_float32(storage)):
        return Dtypes(storage, usual, storage)
    slower = ""
    if getattr(runtime, "tensor_parallel", None) is not None:
        slower = "ranks on several machines might choose differently"
    elif any(kind.states for kind in layer_kinds(config)):
        # the states of hybrids are transformers' own, so they would take twice the bytes on such a machine
        slower = "the model's states would take the bytes of float32"
    else:
        count = _drawn(config) if drawn else sum(math.prod(shape) for _, shape in _tensors(files))
        slower = _too_large(count, getattr(runtime, "memory_limit_gb", None))
    return Dtypes(storage, usual, storage if slower else torch.float32, slower)


def usual_storage(config: Any, files: Sequence[Path] = ()) -> torch.dtype:
    """Return the storage dtype of ``model.dtype=auto``; arguments as for :func:`dtypes`."""
    text = config.get_text_config(decoder=True)
    named = getattr(config, "dtype", None) or getattr(text, "dtype", None)
    if named is None:
        known = {"F16": "float16", "BF16": "bfloat16", "F32": "float32"}
        named = next((known[kind] for kind, _ in _tensors(files[:1]) if kind in known), "bfloat16")
    return torch.float16 if dtype_name(named) == "float16" else torch.bfloat16


def _drawn(config: Any) -> int:
    """Return how many parameters a model with random weights has."""
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        return int(AutoModelForCausalLM.from_config(config).num_parameters())


def _too_large(count: int, limit_gb: float | None) -> str:
    """Return why weights stay in 16 bits although float32 would be faster; empty if they fit in float32.

    A `count` of 0 means that the number of weights is unknown; they are then assumed to fit. The limit is in GiB; None
    for no limit.
    """
    needed = 4 * count
    rooms = [free_memory(), None if limit_gb is None else limit_gb * 2**30]
    room = min((room for room in rooms if room is not None), default=math.inf)
    if needed <= _SHARE * room:
        return ""
    return f"weights in float32 would take {needed / 2**30:.3g} GiB, with {room / 2**30:.3g} GiB free"


def _tensors(files: Sequence[Path]) -> Iterator[tuple[str, list[int]]]:
    """Yield the type and the shape of each tensor in safetensors files, of which only the headers are read."""
    from safetensors import safe_open

    for file in files:
        with safe_open(file, framework="pt") as opened:
            for name in opened.keys():  # noqa: SIM118 - it is no mapping
                entry = opened.get_slice(name)
                yield entry.get_dtype(), entry.get_shape()


@cache
def faster_in_float32(storage: torch.dtype) -> bool:
    """Return True if products in float32 are faster than in a 16-bit dtype on this CPU.

    A product of 512 rows is timed in both dtypes, once for each CPU, version of torch and set of instructions; the
    user's cache folder keeps the result, so all processes of a sweep decide alike.
    """
    key = " | ".join(
        [cpu_name(), torch.__version__, torch.backends.cpu.get_cpu_capability(), dtype_name(storage)]
        + [f"{name}={os.environ[name]}" for name in _INSTRUCTIONS if os.environ.get(name)]
    )
    file = cache_folder() / "arithmetic.json"
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(f"{file}.lock", timeout=30):
            known = _read_speeds(file)
            if key not in known:
                known[key] = _float32_speed_up(storage)
                atomic.replace_file(file, json.dumps(known, indent=1).encode())
    except (OSError, Timeout):  # a folder that cannot be written: every process probes
        known = {key: _float32_speed_up(storage)}
    return known[key] > _WORTH


def _float32_speed_up(storage: torch.dtype) -> float:
    """Return how many times faster a product is in float32 than in a 16-bit dtype."""
    rows, channels, columns = _PROBED
    seconds = {}
    for dtype in (storage, torch.float32):
        x, weight = torch.ones(rows, channels, dtype=dtype), torch.ones(columns, channels, dtype=dtype)
        times = []
        for _ in range(7):
            start = time.perf_counter()
            torch.nn.functional.linear(x, weight)
            times.append(time.perf_counter() - start)
        seconds[dtype] = min(times[1:])
    return round(seconds[storage] / seconds[torch.float32], 2)


def _read_speeds(file: Path) -> dict[str, float]:
    """Return the speed-ups stored by :func:`faster_in_float32`; empty if the file is missing or damaged."""
    try:
        known = json.loads(file.read_text(encoding="utf-8"))
        return {key: float(ratio) for key, ratio in known.items()}
    except (OSError, ValueError, TypeError, AttributeError):
        return {}
