"""The processes of a tensor-parallel run: sums and gathers on their devices, agreement and failure beside them.

Tensors go through torch.distributed (NCCL on GPUs, gloo on CPUs). What the ranks have to agree on (samples, rows,
errors) goes through torchrun's key-value store and never through a collective, because a rank that has run out of
memory cannot take part in one: it says so in the store, and a watching thread of each other rank, whose main thread may
wait for that collective for ever, ends its process.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from kvbench.errors import ConfigError, KvbenchError
from kvbench.parallel import launch
from kvbench.util.failures import is_out_of_memory

#: a collective that waits longer than this for another rank is an error
TIMEOUT = timedelta(minutes=10)
#: seconds that a rank that failed gives the others to have failed too, before it ends them
GRACE_S = 10.0
#: seconds that a rank whose peer has failed gives its own main thread to notice
NOTICE_S = 3.0
#: seconds that recording another rank's failure may take (a logger can hang) before this process ends all the same
RECORD_S = 60.0


class PeerError(KvbenchError):
    """Another rank failed."""


class PeerOutOfMemoryError(PeerError, MemoryError):
    """Another rank ran out of memory."""


class Team:
    """All ranks, as one of them sees them.

    Args:
        rank: this process among `size`.
        device: its device.
        store: torchrun's key-value store, for this class alone.
        watched: the same through a connection of its own, for the watching thread.

    Attributes:
        calls: collectives so far: after an error, ranks may go on together only where these agree.
        broken: the ranks cannot go on together.
        on_failure: called with ``{rank, kind, message}`` before this process is ended for another's failure.
    """

    def __init__(self, rank: int, size: int, device: torch.device, store: dist.Store, watched: dist.Store) -> None:
        self.rank, self.size, self.device = rank, size, device
        self.calls, self.broken = 0, False
        self.on_failure: Callable[[dict[str, Any]], None] | None = None
        self.shared: BaseException | None = None  # the error that all ranks know of
        self._store, self._watched = store, watched
        self._rounds = self._turns = self._plans = 0
        self.told = True  # rank 0 has said what there is to do
        self._noticed = False
        self._left = threading.Event()
        self._watcher = threading.Thread(target=self._watch, name="kvbench-team", daemon=True)
        self._watcher.start()

    # -- tensors ----------------------------------------------------------------------------------------------------

    def sum(self, x: Tensor) -> Tensor:
        """The sum over the ranks, in place."""
        self.calls += 1
        dist.all_reduce(x)
        return x

    def gather(self, x: Tensor, dim: int = -1) -> Tensor:
        """The ranks' tensors side by side along `dim`; all have the same shape."""
        self.calls += 1
        whole = x.new_empty(self.size * x.shape[0], *x.shape[1:])
        gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # its name since torch 2.13
        gather(whole, x.contiguous())
        return torch.cat(whole.chunk(self.size), dim)

    # -- agreement --------------------------------------------------------------------------------------------------

    def exchange(self, value: Any, patience_s: float | None = None) -> list[Any] | None:
        """The values (JSON data) of all ranks; every rank calls this in the same order.

        Args:
            patience_s: give up after so many seconds and return None.

        Raises:
            PeerError: another rank has failed.
        """
        number, self._rounds = self._rounds, self._rounds + 1
        self._store.set(f"round/{number}/{self.rank}", json.dumps(value))
        keys = [f"round/{number}/{rank}" for rank in range(self.size)]
        if not self._wait(keys, patience_s):
            return None
        return [json.loads(self._store.get(key)) for key in keys]

    def settle(self, value: Any, error: Exception | None, grace_s: float | None = None) -> list[Any]:
        """All ranks did the same work: their results, or the failure of any of them as everybody's.

        Args:
            value: this rank's result, JSON data.
            error: what this rank raised instead.
            grace_s: how long others may take to fail too; None: GRACE_S.

        Raises:
            PeerError: another rank failed; :class:`PeerOutOfMemoryError` where memory ran out.
            Exception: `error` itself.
        """
        said = None if error is None else _described(error)
        mine = {"value": value, "error": said, "calls": self.calls}
        everyone = self.exchange(mine, None if error is None else GRACE_S if grace_s is None else grace_s)
        if everyone is None:  # the others wait for this rank inside a collective
            assert error is not None
            self.fail(error)
            raise error
        failed = [(rank, each["error"]) for rank, each in enumerate(everyone) if each["error"]]
        if not failed:
            return [each["value"] for each in everyone]
        if len({each["calls"] for each in everyone}) > 1:
            self.broken = True
        failed.sort(key=lambda item: not item[1]["oom"])  # memory first: it is a result
        rank, first = failed[0]
        if error is None or (first["oom"] and said is not None and not said["oom"]):
            error = self._peer(rank, first)
        self.shared = error
        raise error

    @contextmanager
    def turns(self) -> Iterator[None]:
        """One rank after the other does the block."""
        number, self._turns = self._turns, self._turns + 1
        if self.rank:
            self._wait([f"turn/{number}/{self.rank - 1}"])
        try:
            yield
        finally:
            self._store.set(f"turn/{number}/{self.rank}", "done")

    # -- rank 0 says what is to be done -----------------------------------------------------------------------------

    def open(self) -> None:
        """A run begins."""
        if self.broken:
            raise KvbenchError("a rank failed before: the processes cannot go on together; start the command again")
        self.told, self._plans = False, self._plans + 1
        self.on_failure = self.shared = None

    def tell(self, plan: Any) -> None:
        """Rank 0: what this run has to do (JSON data), once; nothing is told twice."""
        if not self.told:
            self.told = True
            self._store.set(f"plan/{self._plans}", json.dumps(plan))

    def hear(self) -> Any:
        """The other ranks: what rank 0 tells."""
        self._wait([f"plan/{self._plans}"])
        return json.loads(self._store.get(f"plan/{self._plans}"))

    # -- failure ----------------------------------------------------------------------------------------------------

    def fail(self, error: BaseException) -> None:
        """This rank cannot go on, and the others cannot without it."""
        self.broken = True
        with suppress(Exception):  # the store is gone when all others are
            if not self._store.check(["failed"]):
                self._store.set("failed", json.dumps({"rank": self.rank, **_described(error)}))

    def close(self) -> None:
        """The process leaves, the watching thread first: a process that ends while one asks the store is aborted."""
        self._left.set()
        self._watcher.join(2.0)
        if not self.broken and dist.is_initialized():
            dist.destroy_process_group()

    def _wait(self, keys: Sequence[str], patience_s: float | None = None) -> bool:
        """Until `keys` are in the store; by looking again and again, so that Ctrl-C and failures are met."""
        began, pause = time.monotonic(), 0.0005
        while not self._store.check(list(keys)):
            self._look()
            if patience_s is not None and time.monotonic() - began > patience_s:
                return False
            time.sleep(pause)
            pause = min(pause * 1.5, 0.05)
        return True

    def _look(self) -> None:
        if self._store.check(["failed"]):
            found = json.loads(self._store.get("failed"))
            if found["rank"] != self.rank:
                self._noticed = self.broken = True
                if found["kind"] == "KeyboardInterrupt":
                    raise KeyboardInterrupt(f"rank {found['rank']} was interrupted")
                self.shared = self._peer(found["rank"], found)
                raise self.shared

    def _peer(self, rank: int, found: dict[str, Any]) -> PeerError:
        kind = PeerOutOfMemoryError if found["oom"] else PeerError
        return kind(f"rank {rank}: {found['kind']}: {found['message']}")

    def _watch(self) -> None:
        """End this process where another rank has failed and the main thread cannot see it."""
        while not self._left.wait(0.2):
            try:
                if not self._watched.check(["failed"]):
                    continue
                found = json.loads(self._watched.get("failed"))
            except Exception:  # the store has gone with the processes that held it
                return
            if found["rank"] == self.rank:
                return
            if self._left.wait(NOTICE_S) or self._noticed:
                return
            self.broken = True
            record = threading.Thread(target=self._record, args=(found,), name="kvbench-record", daemon=True)
            record.start()
            record.join(RECORD_S)
            if self.rank == 0:
                print(f"error: {self._peer(found['rank'], found)}", file=sys.__stderr__, flush=True)
            os._exit(130 if found["kind"] == "KeyboardInterrupt" else 1)

    def _record(self, found: dict[str, Any]) -> None:
        with suppress(Exception):
            if self.on_failure is not None:
                self.on_failure(found)


_team: list[Team] = []


def current() -> Team | None:
    """The team that this process has joined, or None."""
    return _team[0] if _team else None


def join(device: str = "auto") -> Team:
    """Meet the processes that torchrun started; repeating it gives the same team.

    Args:
        device: ``runtime.device``: ``auto``, ``cuda`` or ``cpu``; each rank takes the GPU of its local number.

    Raises:
        ConfigError: torchrun did not start this process, or started more processes than there are GPUs.
    """
    if _team:
        return _team[0]
    if not launch.launched():
        hint = "torchrun --nproc-per-node 2 -m kvbench ... runtime.tensor_parallel=auto"
        raise ConfigError("runtime.tensor_parallel", "auto", "needs torchrun's processes", hint=hint)
    gpus = torch.cuda.device_count() if torch.cuda.is_available() and device != "cpu" else 0
    if device == "cuda" or gpus:
        if launch.local_size() > gpus:
            raise ConfigError(
                "runtime.tensor_parallel",
                "auto",
                f"torchrun started {launch.local_size()} processes on a machine of {gpus} GPUs",
                hint=f"torchrun --nproc-per-node {max(gpus, 1)} ..., or runtime.device=cpu",
            )
        mine = torch.device("cuda", launch.local_rank())
        torch.cuda.set_device(mine)
    else:
        mine = torch.device("cpu")
    backend = "nccl" if mine.type == "cuda" else "gloo"
    if not dist.is_available() or not (dist.is_nccl_available() if backend == "nccl" else dist.is_gloo_available()):
        raise KvbenchError(f"this build of torch has no {backend}, which tensor parallelism on {mine.type} needs")
    if (
        sys.platform == "linux" and launch.local_size() == launch.size()
    ):  # all on this machine, whose own name need not be known to any network
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    from torch.distributed.rendezvous import rendezvous

    store, rank, size = next(rendezvous("env://", timeout=TIMEOUT))
    dist.init_process_group(
        backend,
        store=dist.PrefixStore("tensors", store),
        rank=rank,
        world_size=size,
        timeout=TIMEOUT,
        device_id=mine if backend == "nccl" else None,
    )
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    own = [dist.TCPStore(address, port, is_master=False, wait_for_workers=False, timeout=TIMEOUT) for _ in range(2)]
    prefixed = [dist.PrefixStore(f"kvbench/{os.environ.get('TORCHELASTIC_RESTART_COUNT', 0)}", each) for each in own]
    _team.append(Team(rank, size, mine, *prefixed))
    return _team[0]


def leave() -> None:
    """Let go of the other processes, at the end of this one."""
    if _team:
        _team.pop().close()


def _described(error: BaseException) -> dict[str, Any]:
    return {"kind": type(error).__name__, "message": str(error)[:2000], "oom": is_out_of_memory(error)}
