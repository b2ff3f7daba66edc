"""Sharing of one loaded model by successive runs of a process, so that a sweep loads it once for all methods.

Sharing must be switched on (:func:`sharing`). A model stays loaded until a run needs another one, or :func:`free` is
called. Every run must return it unchanged: if a run has changed anything about the model (a weight, a buffer, a hook, a
class, its configuration), the model is discarded, and the next run loads it anew.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Protocol

from kvbench.models.devices import Runtime
from kvbench.util.attachment import attached
from kvbench.util.fingerprint import fingerprint
from kvbench.util.progress import say

if TYPE_CHECKING:
    from torch import Tensor, nn

    from kvbench.models.load import LoadedModel
    from kvbench.models.spec import ModelConfig


class SharedRuntime(Runtime, Protocol):
    """Protocol of the configuration fields that decide where and how a model is loaded, and with how much memory."""

    @property
    def memory_limit_gb(self) -> float | None:
        """Memory in GiB that the process may use on each device; None for no limit."""

    @property
    def compile(self) -> bool:
        """True: everything except attention is compiled in captured steps."""


@dataclass
class _Shelf:
    """The shared model, with what identifies it and the number of its users.

    Args:
        key: what determines the model: its configuration, the content of its files, and its devices.
        state: values that its users must leave unchanged (:func:`model_state`).
        arithmetic, compile: values of ``runtime.arithmetic`` and ``runtime.compile`` with which it was loaded.
        users: number of runs that use it now.
    """

    key: str
    loaded: LoadedModel
    state: dict[str, Any]
    arithmetic: str
    compile: bool
    users: int = 0

    def serves(self, key: str, runtime: SharedRuntime) -> bool:
        """Return True if this model has the key, a run's dtype, and joined weights if the run compiles its steps.

        A run may also name the dtype that ``auto`` has chosen. Compiled steps change a model that was not loaded for
        them; one that was serves others, too.
        """
        dtypes = {"storage": self.loaded.storage, "float32": "torch.float32"}
        same = str(dtypes.get(runtime.arithmetic)) == str(self.loaded.dtype)
        computes = self.arithmetic == runtime.arithmetic or same
        return self.key == key and computes and (self.compile or not runtime.compile)


_shelf: _Shelf | None = None
_depth = 0


@contextmanager
def sharing() -> Iterator[None]:
    """Let the runs inside a ``with`` block share a model; it stays loaded after the block, until :func:`free`."""
    global _depth
    _depth += 1
    try:
        yield
    finally:
        _depth -= 1


def take(model: ModelConfig, runtime: SharedRuntime, load: Callable[[Any, Any], LoadedModel]) -> LoadedModel:
    """Return the shared model if it is the requested one, else a new one; the caller ends its use by :func:`give_back`.

    The function `load` (such as :func:`kvbench.models.load.load_model`) loads a new model. It becomes the shared model,
    unless a run still uses the previous one, which is otherwise freed first. Models are not shared outside of
    :func:`sharing`, with tensor parallelism, or on a CPU with a memory limit, which counts only models that are loaded
    under it (:func:`kvbench.profiling.device.limited`).
    """
    global _shelf
    if not _depth or _apart(runtime):
        if _shelf is not None and not _shelf.users:
            free()
        return load(model, runtime)
    key = _model_key(model, runtime)
    if _shelf is not None and not _shelf.serves(key, runtime):
        if _shelf.users:
            return load(model, runtime)
        free()
    if _shelf is None:
        loaded = load(model, runtime)
        _shelf = _Shelf(key, loaded, model_state(loaded.model), runtime.arithmetic, runtime.compile)
    _shelf.users += 1
    return _shelf.loaded


def _apart(runtime: SharedRuntime) -> bool:
    """Return True if a model cannot be shared: see :func:`take`. On a GPU, torch counts whatever the process holds."""
    from kvbench.models.devices import homes

    if runtime.tensor_parallel is not None or runtime.memory_limit_gb is None:
        return runtime.tensor_parallel is not None
    return any(device.type != "cuda" for device in homes(runtime))


def give_back(loaded: LoadedModel) -> None:
    """End the use of a model from :func:`take`; the caller must have undone all of kvbench's own changes to it.

    A model that has changed since it was loaded is freed as soon as no run uses it.
    """
    if _shelf is None or _shelf.loaded is not loaded:
        return
    _shelf.users -= 1
    if _shelf.users:
        return
    now = model_state(loaded.model)
    changed = sorted(name for name in {*now, *_shelf.state} if now.get(name) != _shelf.state.get(name))
    if changed:
        more = f" and {len(changed) - 3} more" if len(changed) > 3 else ""
        say(f"model {loaded.name}: a run has changed {', '.join(changed[:3])}{more}; the next run loads the model anew")
        free()


def free() -> None:
    """Free the memory of the shared model, unless a run still uses it."""
    global _shelf
    if _shelf is None or _shelf.users:
        return
    device, _shelf = _shelf.loaded.device, None
    from kvbench.profiling.memory import release

    release(device)


def model_state(model: nn.Module) -> dict[str, Any]:
    """Return what a run must not change about a model: a dict from names to values that can be compared.

    It covers the identity, the place and torch's count of changes of every parameter and buffer; the class, the hooks
    and the attributes of every module; and the configurations of the model and of its generation.
    """
    parts: dict[str, Any] = {}
    for name, module in model.named_modules():
        hooks = [len(entry) for key, entry in sorted(vars(module).items()) if key.endswith("_hooks") and entry]
        attributes = sorted(key for key in vars(module) if not key.startswith("_is_full_backward"))
        parts[f"module {name or 'model'}"] = (id(module), type(module), tuple(hooks), tuple(attributes))
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        parts[name] = (id(tensor), tensor.data_ptr(), _version(tensor), tensor.dtype, str(tensor.device))
    extra = attached(model)
    if extra is not None:
        parts["attachment"] = (extra.attention, extra.rotary is None, len(extra.key_hooks), extra.int4 is None)
    config = getattr(model, "config", None)
    if config is not None:
        parts["config"] = json.dumps(config.to_dict(), sort_keys=True, default=str)
        parts["attention"] = getattr(config.get_text_config(decoder=True), "_attn_implementation", None)
    generation = getattr(model, "generation_config", None)
    if generation is not None:
        parts["generation_config"] = json.dumps(generation.to_dict(), sort_keys=True, default=str)
    return parts


def _version(tensor: Tensor) -> int:
    """Return torch's count of in-place changes of a tensor; -1 for tensors of inference mode, which have none."""
    return -1 if tensor.is_inference() else int(tensor._version)


def _model_key(model: ModelConfig, runtime: SharedRuntime) -> str:
    from kvbench.models.devices import homes

    settings = {name: value for name, value in asdict(model).items() if not name.startswith("_")}
    files = None if model.random else fingerprint(model.folder())
    seed = runtime.seed if model.random else None
    return json.dumps([settings, files, seed, runtime.device_map, list(map(str, homes(runtime)))], default=str)
