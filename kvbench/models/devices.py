"""Choice of a model's devices: one, several in this process, or one per process of a tensor-parallel team."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, Protocol

from kvbench.errors import ConfigError

if TYPE_CHECKING:
    import torch

    from kvbench.parallel.team import Team


class Runtime(Protocol):
    """The fields of `kvbench.config.run_config.RuntimeConfig` that decide where a model is loaded."""

    @property
    def device(self) -> str:
        """Device of the run, such as ``cuda`` or ``cpu``."""

    @property
    def device_map(self) -> str | None:
        """``auto`` spreads the layers over all GPUs of this process; None puts all of them on one device."""

    @property
    def tensor_parallel(self) -> str | None:
        """``auto`` splits every layer over the processes that torchrun started; None uses a single process."""

    @property
    def seed(self) -> int:
        """Seed of random weights."""

    @property
    def arithmetic(self) -> Literal["auto", "storage", "float32"]:
        """Dtype in which the model computes (:mod:`kvbench.models.arithmetic`)."""


def join_team(runtime: Runtime) -> Team | None:
    """Join the processes that each hold a part of the model, and return their team; None without ``tensor_parallel``.

    Raises:
        ConfigError: torchrun did not start this process, or there are fewer GPUs than processes.
    """
    if getattr(runtime, "tensor_parallel", None) is None:
        return None
    from kvbench.parallel.team import join

    return join(runtime.device)


def homes(runtime: Runtime) -> list[torch.device]:
    """Return the devices onto which this process loads the model, or its part of the model.

    There is one device, or all GPUs of the process with ``device_map``. The model takes its inputs on the first one.

    Raises:
        ConfigError: this machine has no such device, or has no GPU for ``device_map``.
    """
    import torch

    team = join_team(runtime)
    if team is not None:
        return [team.device]
    device = resolve_device(runtime.device)
    if not runtime.device_map:
        return [device]
    if device.type != "cuda":
        raise ConfigError(
            "runtime.device_map",
            runtime.device_map,
            "spreads a model over GPUs, but no GPU is visible on this machine",
            hint="runtime.device_map=null",
        )
    return [torch.device("cuda", index) for index in range(torch.cuda.device_count())]


def resolve_device(name: str) -> torch.device:
    """Return the device for a value of ``runtime.device``; raise ConfigError if this machine has no such device.

    The value is torch's name of a device. ``auto`` is the first CUDA device, or the CPU if there is none; ``cuda`` is
    the first CUDA device.
    """
    import torch

    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if name == "auto":
        return torch.device("cuda", 0) if count else torch.device("cpu")
    device = torch.device(name)
    if device.type == "cuda" and (device.index or 0) >= count:
        devices = [f"cuda:{index}" for index in range(count)]
        raise ConfigError("runtime.device", name, "does not exist on this machine", allowed=["auto", "cpu", *devices])
    if device.type == "mps" and not torch.backends.mps.is_available():
        raise ConfigError("runtime.device", name, "does not exist on this machine", allowed=["auto", "cpu"])
    return torch.device("cuda", 0) if name == "cuda" else device
