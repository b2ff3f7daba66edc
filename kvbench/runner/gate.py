"""Prediction of the memory that a run takes, and a gate for each GPU that admits runs as long as they fit.

The prediction uses only the configuration and imports no torch.

Processes of one user share a ledger, a locked file per device, which lists the admitted and the waiting runs, with the
predicted bytes of each. Waiting runs enter in the order in which they came, so that small runs do not overtake a
large one for ever. Entries of processes that have ended are dropped.
"""

from __future__ import annotations

import json
import math
import os
import re
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from filelock import FileLock

from kvbench.config.run_config import RunConfig
from kvbench.errors import ConfigError
from kvbench.profiling import roofline
from kvbench.util import atomic
from kvbench.util.processor import began
from kvbench.util.table import size as in_words

#: bytes of a CUDA context with the kernels' code
CONTEXT = 600 << 20
#: tokens of an answer if neither the configuration nor the data set says how many
ANSWER = 128


def peak_bytes(checked: RunConfig) -> int | None:
    """Predict the largest number of bytes of GPU memory that a run takes; None if its model is not known.

    They are those of the weights, the keys and values of the longest possible prompt with its answer, the activations
    of the largest forward pass (:mod:`kvbench.profiling.roofline`), and the CUDA context. The cache of a method without
    a formula for its bytes counts as one in full precision.
    """
    shape = _shape(checked)
    if shape is None:
        return None
    runtime, width, stored = checked.runtime, _width(checked), 4 if checked.model.dtype == "float32" else 2
    prompt, new, batch = longest(checked)
    weights = _weights(checked, shape)
    at_once = roofline.tokens_of_a_pass(batch, prompt, runtime.prefill_chunk, runtime.prefill_rows)
    alive = roofline.live_elements(shape, at_once, runtime.mlp_chunk) * width
    logits = batch * shape.vocabulary * (width + 4)
    return round(weights + batch * _cache_bytes(checked, shape, prompt, new, stored) + max(alive, logits) + CONTEXT)


def check_fits(checked: RunConfig) -> None:
    """Raise ConfigError if the weights alone take more than ``runtime.memory_limit_gb``.

    Nothing is checked if the size of the weights on a device is unknown: if the model's dimensions are not known yet,
    the checkpoint is quantized, or the weights are spread over several devices.
    """
    limit, model, runtime = checked.runtime.memory_limit_gb, checked.model, checked.runtime
    if limit is None or runtime.device_map is not None or runtime.tensor_parallel is not None:
        return
    shape = _shape(checked)
    if shape is None or not (model.random or (model.folder() and not model.dimensions().get("quantization_config"))):
        return
    needed = _weights(checked, shape) / 2**30
    if needed <= limit:
        return
    smaller = "" if model.rounding else f", or model.weights={'random_int4' if model.random else 'int4'}"
    raise ConfigError(
        "runtime.memory_limit_gb",
        limit,
        f"the weights of {model.name} alone take {needed:.1f} GiB, before any keys, values or activations",
        allowed=f"more than {needed:.1f}",
        hint=f"runtime.memory_limit_gb={math.ceil(1.2 * needed)}{smaller}, or choose a smaller model",
    )


def _shape(checked: RunConfig) -> roofline.Shape | None:
    try:
        return roofline.Shape.of(checked.model.dimensions())
    except (ConfigError, KeyError, TypeError):
        return None


def _width(checked: RunConfig) -> int:
    """Return the bytes of a weight or an activation; assumes that ``runtime.arithmetic=auto`` is the storage dtype."""
    return 4 if "float32" in (checked.model.dtype, checked.runtime.arithmetic) else 2


def _weights(checked: RunConfig, shape: roofline.Shape) -> int:
    """Return the bytes of the weights on the device; with ``model.dtype=auto`` they have 16 bits."""
    if not checked.model.rounding:
        return shape.weight_bytes() * (_width(checked) // 2)
    return shape.weight_bytes(4, 128, 16 if checked.model.rounding == "int4" else None)


def longest(checked: RunConfig) -> tuple[int, int, int]:
    """Return the largest number of tokens of a prompt, of tokens of an answer, and of rows of a batch in a run."""
    data, most = checked.dataset, checked.model.max_length
    new = checked.decoding.max_new_tokens or _largest(data, ("max_new_tokens", "new_tokens")) or ANSWER
    wanted = _largest(data, ("lengths", "prompts", "window", "length"))
    limits = [limit for limit in (checked.model.prompt_limit, wanted, most - new) if limit]
    prompt = max(1, min(limits, default=1)) if wanted is None or wanted <= most else wanted
    return prompt, new, _largest(data, ("batches",)) or checked.runtime.batch_size


def _cache_bytes(checked: RunConfig, shape: roofline.Shape, prompt: int, new: int, width: int) -> int:
    from kvbench.methods.bytes import kv_bytes

    try:
        predicted = kv_bytes(
            checked.method,
            prompt + new,
            prompt=prompt,
            layers=shape.layers,
            query_heads=shape.query_heads,
            heads=shape.heads,
            channels=shape.channels,
            width=width,
            windows=shape.windows,
        )
    except (ConfigError, NotImplementedError):  # a method without a formula: as in full precision
        return shape.kv_bytes(prompt + new, width)
    return int(predicted.total)


def _largest(data: Any, keys: Iterable[str]) -> int | None:
    """Return the largest whole number among the values of some keys, which may be lists; None if there is none."""
    numbers: list[int] = []
    for key in keys:
        value = data.get(key)
        numbers += [one for one in (value if isinstance(value, (list, tuple)) else [value]) if isinstance(one, int)]
    return max(numbers, default=None)


#: environment variable with the number of workers per GPU; the gate is in use if it is more than 1
PER_GPU = "KVBENCH_WORKERS_PER_GPU"
#: part of a device's memory that may be promised; the rest is for fragmentation and for what predictions leave out
SHARE = 0.92
#: seconds between two looks at the ledger
POLL_S = 0.5


def per_gpu() -> int:
    """Return the number of workers that a launcher runs per GPU, from the environment variable :data:`PER_GPU`.

    Raises:
        ConfigError: the variable is not a whole number of at least 1.
    """
    text = os.environ.get(PER_GPU, "").strip() or "1"
    if not text.isdecimal() or not int(text):
        raise ConfigError(PER_GPU, text, "must be a whole number, 1 or greater", hint=f"{PER_GPU}=2, or unset it")
    return int(text)


def ledger_folder() -> Path:
    """Return the folder of this user's ledgers."""
    user = os.getuid() if hasattr(os, "getuid") else 0
    return Path(tempfile.gettempdir()) / f"kvbench-gate-{user}"


@contextmanager
def entered(
    device: str,
    capacity: int,
    needed: int,
    say: Callable[[str], None] = lambda line: None,
    ledgers: Path | None = None,
    poll_s: float = POLL_S,
) -> Iterator[None]:
    """Wait until a device has room for a run, and reserve that room inside a ``with`` block.

    A run that needs more than the whole device enters once it would be alone there.

    Args:
        device: name of the device, the same in all processes that use it; `capacity` is its memory in bytes.
        needed: predicted bytes of the run.
        say: function that is called with a line for the user if the run has to wait.
        ledgers: folder of the ledgers; None for :func:`ledger_folder`.
    """
    ledger = _Ledger(ledgers or ledger_folder(), device)
    mark, announced = ledger.join(needed), False
    try:
        while not ledger.enter(mark, capacity):
            if not announced:
                announced = True
                say(f"waiting for {in_words(needed)} of {in_words(capacity)} on {device}, which other runs use")
            time.sleep(poll_s)
        yield
    finally:
        ledger.leave(mark)


class _Ledger:
    """The ledger of one device: entries of processes, in the order in which they came."""

    def __init__(self, place: Path, device: str) -> None:
        place.mkdir(parents=True, exist_ok=True, mode=0o700)
        name = re.sub(r"[^\w.-]", "-", device)
        self._path, self._lock = place / f"{name}.json", FileLock(place / f"{name}.lock")

    def join(self, needed: int) -> str:
        """Add a waiting entry for this process, and return the entry's mark."""
        mark = f"{os.getpid()}-{time.monotonic_ns()}"
        entry = {"mark": mark, "pid": os.getpid(), "began": began(os.getpid()), "bytes": int(needed), "in": False}
        with self._lock:
            self._write([*self._entries(), entry])
        return mark

    def enter(self, mark: str, capacity: int) -> bool:
        """Admit an entry if no earlier one waits and there is room; return True if it is admitted."""
        with self._lock:
            entries = self._entries()
            inside = sum(entry["bytes"] for entry in entries if entry["in"])
            first = next((entry for entry in entries if not entry["in"]), None)
            if first is None or first["mark"] != mark:
                return False
            if inside and inside + first["bytes"] > SHARE * capacity:
                return False
            first["in"] = True
            self._write(entries)
            return True

    def leave(self, mark: str) -> None:
        """Remove an entry."""
        with self._lock:
            self._write([entry for entry in self._entries() if entry["mark"] != mark])

    def _entries(self) -> list[dict[str, Any]]:
        """Return the entries of processes that still run."""
        try:
            entries = json.loads(self._path.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return []
        # the time of its start tells a process from a later one with the same number; None: there is no such process
        return [entry for entry in entries if began(entry["pid"]) == entry["began"] is not None]

    def _write(self, entries: list[dict[str, Any]]) -> None:
        atomic.replace_file(self._path, json.dumps(entries, indent=1).encode())
