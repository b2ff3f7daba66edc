"""The processes of a tensor-parallel run: collectives on tensors, exchange of results, and handling of failures.

Tensors go through torch.distributed (NCCL on GPUs, gloo on CPUs). Samples, rows and errors, on which the ranks have to
agree, go through torchrun's key-value store, not through collectives, because a rank that has run out of memory cannot
take part in a collective. It reports its failure in the store; a watching thread in each other process then ends that
process, because its main thread may be waiting in a collective.
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

#: maximum time that a collective waits for another rank
TIMEOUT = timedelta(minutes=10)
#: seconds that a failed rank waits for the others to report their results, before it has them ended
GRACE_S = 10.0
#: seconds for which the watching thread lets the main thread react to another rank's failure
NOTICE_S = 3.0
#: maximum time in seconds for recording another rank's failure (a logger may hang) before this process ends
RECORD_S = 60.0


class PeerError(KvbenchError):
    """Error raised on this rank because another rank failed."""


class PeerOutOfMemoryError(PeerError, MemoryError):
    """Error raised on this rank because another rank ran out of memory."""


class Team:
    """One process (rank) of a tensor-parallel run: its collectives, and the detection of failures on other ranks.

    Args:
        size: number of ranks.
        store: torchrun's key-value store, with a prefix that only this class uses.
        watched: a second connection to the same store. A background thread uses it to detect failures of other ranks
            while the main thread waits in a collective.

    Attributes:
        calls: number of collectives that this rank has called. After an error, the ranks can continue only if this
            number is the same on all of them.
        broken: True if the ranks cannot run anything more together, for example because one of them has ended.
        on_failure: function that the background thread calls before it ends this process because of another rank's
            failure, for example to record the failure. Its argument is a dict with the keys ``rank``, ``kind`` (name of
            the exception class), ``message`` and ``oom`` (True if out of memory). None: nothing is called.
        shared: the last exception of this run that this rank raised because of a failure known to the other ranks; they
            need not be told about it again. None if there was none.
        announced: on rank 0, True once it has sent the sample ids of this run to the other ranks (:meth:`tell`).
    """

    def __init__(self, rank: int, size: int, device: torch.device, store: dist.Store, watched: dist.Store) -> None:
        self.rank, self.size, self.device = rank, size, device
        self.calls, self.broken = 0, False
        self.on_failure: Callable[[dict[str, Any]], None] | None = None
        self.shared: BaseException | None = None  # the error that all ranks know of
        self._store, self._watched = store, watched
        self._rounds = self._turns = self._plans = 0
        self.announced = True  # rank 0 has published the plan
        self._noticed = False
        self._left = threading.Event()
        self._watcher = threading.Thread(target=self._watch, name="kvbench-team", daemon=True)
        self._watcher.start()

    # -- tensors ----------------------------------------------------------------------------------------------------

    def sum(self, x: Tensor) -> Tensor:
        """Replace a tensor, of the same shape on all ranks, by its sum over all ranks, in place, and return it."""
        self.calls += 1
        dist.all_reduce(x)
        return x

    def gather(self, x: Tensor, dim: int = -1) -> Tensor:
        """Concatenate the tensors of all ranks, of the same shape, in rank order along a dimension (an all-gather)."""
        self.calls += 1
        whole = x.new_empty(self.size * x.shape[0], *x.shape[1:])
        gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # its name since torch 2.13
        gather(whole, x.contiguous())
        return torch.cat(whole.chunk(self.size), dim)

    # -- agreement --------------------------------------------------------------------------------------------------

    def exchange(self, value: Any, patience_s: float | None = None) -> list[Any] | None:
        """Send a value to all other ranks, and return the values of all ranks (an all-gather of JSON data).

        The n-th call on this rank receives the values of the n-th call on every other rank; calls of :meth:`settle`
        count too. All ranks must therefore make the same sequence of these calls.

        Returns:
            The values in rank order; None if another rank did not send its value within `patience_s` seconds (None: no
            limit).

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
        """Exchange the results of all ranks, and raise an error on every rank if any of them has failed.

        Args:
            value: this rank's result, JSON data.
            error: the exception, if this rank has failed; else None.
            grace_s: used only if this rank has failed: seconds to wait for the other ranks to call this method. If one
                of them does not, because it waits in a collective that this rank will never enter, all other processes
                are made to end (:meth:`fail`). None for :data:`GRACE_S`.

        Returns:
            The results in rank order, if no rank has failed.

        Raises:
            PeerError: another rank has failed and this one has not, or another rank ran out of memory and this one
                failed for a different reason. If the other rank ran out of memory, the class is
                :class:`PeerOutOfMemoryError`.
            Exception: `error`, in all other cases in which this rank has failed.
        """
        own = None if error is None else _error_record(error)
        mine = {"value": value, "error": own, "calls": self.calls}
        everyone = self.exchange(mine, None if error is None else GRACE_S if grace_s is None else grace_s)
        if everyone is None:  # the others are waiting for this rank in a collective
            assert error is not None
            self.fail(error)
            raise error
        failed = [(rank, answer["error"]) for rank, answer in enumerate(everyone) if answer["error"]]
        if not failed:
            return [answer["value"] for answer in everyone]
        if len({answer["calls"] for answer in everyone}) > 1:
            self.broken = True
        failed.sort(key=lambda failure: not failure[1]["oom"])  # out of memory first, because it is a result
        rank, first = failed[0]
        if error is None or (first["oom"] and own is not None and not own["oom"]):
            error = self._peer(rank, first)
        self.shared = error
        raise error

    @contextmanager
    def turns(self) -> Iterator[None]:
        """Let the ranks run the body of a ``with`` block one at a time, in rank order.

        This limits the peak memory of the machine, for example while every rank loads a checkpoint. All ranks must
        enter the block.
        """
        number, self._turns = self._turns, self._turns + 1
        if self.rank:
            self._wait([f"turn/{number}/{self.rank - 1}"])
        try:
            yield
        finally:
            self._store.set(f"turn/{number}/{self.rank}", "done")

    # -- the plan of rank 0 -----------------------------------------------------------------------------------------

    def open(self) -> None:
        """Prepare the team for the next run: clear the error, the callback and the sample ids of the previous one.

        Raises:
            KvbenchError: the ranks cannot continue, because a rank failed in an earlier run.
        """
        if self.broken:
            raise KvbenchError(
                "the processes cannot continue, because a rank has failed.\n  hint: run the command again"
            )
        self.announced, self._plans = False, self._plans + 1
        self.on_failure = self.shared = None

    def tell(self, plan: Any) -> None:
        """Send the plan of the run from rank 0 to all other ranks: the ids of the samples that they have to run.

        The plan is JSON data. Only rank 0 may call this. In each run, the first call counts and later ones do nothing.
        """
        if not self.announced:
            self.announced = True
            self._store.set(f"plan/{self._plans}", json.dumps(plan))

    def hear(self) -> Any:
        """Wait for the data that rank 0 sends with :meth:`tell`, and return it. Called on every rank except rank 0.

        Raises:
            PeerError: another rank has failed.
        """
        self._wait([f"plan/{self._plans}"])
        return json.loads(self._store.get(f"plan/{self._plans}"))

    # -- failure ----------------------------------------------------------------------------------------------------

    def fail(self, error: BaseException) -> None:
        """Tell the other ranks that this rank cannot continue, so that their processes end too.

        They report the class and the message of `error`, the exception that ended this rank.
        """
        self.broken = True
        with suppress(Exception):  # the store disappears with the other processes
            if not self._store.check(["failed"]):
                self._store.set("failed", json.dumps({"rank": self.rank, **_error_record(error)}))

    def close(self) -> None:
        """Stop watching the other ranks, and destroy torch's process group. Call this before this process ends."""
        self._left.set()
        self._watcher.join(2.0)
        if not self.broken and dist.is_initialized():
            dist.destroy_process_group()

    def _wait(self, keys: Sequence[str], patience_s: float | None = None) -> bool:
        """Return True once all `keys` are in the store, False after `patience_s`; raise if another rank failed."""
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
            failure = json.loads(self._store.get("failed"))
            if failure["rank"] != self.rank:
                self._noticed = self.broken = True
                if failure["kind"] == "KeyboardInterrupt":
                    raise KeyboardInterrupt(f"rank {failure['rank']} was interrupted")
                self.shared = self._peer(failure["rank"], failure)
                raise self.shared

    def _peer(self, rank: int, failure: dict[str, Any]) -> PeerError:
        kind = PeerOutOfMemoryError if failure["oom"] else PeerError
        return kind(f"rank {rank}: {failure['kind']}: {failure['message']}")

    def _watch(self) -> None:
        """End this process if another rank has failed and the main thread does not react (the watching thread)."""
        while not self._left.wait(0.2):
            try:
                if not self._watched.check(["failed"]):
                    continue
                failure = json.loads(self._watched.get("failed"))
            except Exception:  # the store disappears with its process
                return
            if failure["rank"] == self.rank:
                return
            if self._left.wait(NOTICE_S) or self._noticed:
                return
            self.broken = True
            record = threading.Thread(target=self._record, args=(failure,), name="kvbench-record", daemon=True)
            record.start()
            record.join(RECORD_S)
            if self.rank == 0:
                print(f"error: {self._peer(failure['rank'], failure)}", file=sys.__stderr__, flush=True)
            os._exit(130 if failure["kind"] == "KeyboardInterrupt" else 1)

    def _record(self, failure: dict[str, Any]) -> None:
        with suppress(Exception):
            if self.on_failure is not None:
                self.on_failure(failure)


_team: list[Team] = []


def current() -> Team | None:
    """Return the tensor-parallel team that this process has joined (:func:`join`); None if there is none."""
    return _team[0] if _team else None


def join(device: str = "auto") -> Team:
    """Join the other processes that torchrun started, and return the team that they form.

    If this process has already joined, the existing team is returned and `device` is ignored. `device` is
    ``runtime.device``: ``auto``, ``cuda`` or ``cpu``. On CUDA, each process uses the GPU whose index is its local rank.

    Raises:
        ConfigError: torchrun did not start this process, or started more processes than this machine has GPUs.
        KvbenchError: this build of torch lacks the library for collectives on this device (NCCL or gloo).
    """
    if _team:
        return _team[0]
    if not launch.launched():
        hint = "torchrun --nproc-per-node 2 -m kvbench ... runtime.tensor_parallel=auto"
        raise ConfigError(
            "runtime.tensor_parallel", "auto", "needs several processes, which torchrun starts", hint=hint
        )
    gpus = torch.cuda.device_count() if torch.cuda.is_available() and device != "cpu" else 0
    if device == "cuda" or gpus:
        if launch.local_size() > gpus:
            raise ConfigError(
                "runtime.tensor_parallel",
                "auto",
                f"torchrun started {launch.local_size()} processes on a machine with {gpus} GPUs",
                hint=f"run torchrun --nproc-per-node {max(gpus, 1)} ..., or set runtime.device=cpu",
            )
        mine = torch.device("cuda", launch.local_rank())
        torch.cuda.set_device(mine)
    else:
        mine = torch.device("cpu")
    backend = "nccl" if mine.type == "cuda" else "gloo"
    if not dist.is_available() or not (dist.is_nccl_available() if backend == "nccl" else dist.is_gloo_available()):
        raise KvbenchError(
            f"tensor parallelism on {mine.type} needs {backend}, which this build of torch does not include.\n"
            f"  hint: install a build of torch with {backend}, or run one process with runtime.tensor_parallel=null"
        )
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
    connections = [
        dist.TCPStore(address, port, is_master=False, wait_for_workers=False, timeout=TIMEOUT) for _ in range(2)
    ]
    prefix = f"kvbench/{os.environ.get('TORCHELASTIC_RESTART_COUNT', 0)}"
    prefixed = [dist.PrefixStore(prefix, connection) for connection in connections]
    _team.append(Team(rank, size, mine, *prefixed))
    return _team[0]


def leave() -> None:
    """Leave the team (:meth:`Team.close`), if this process has joined one. Call this before the process ends."""
    if _team:
        _team.pop().close()


def _error_record(error: BaseException) -> dict[str, Any]:
    return {"kind": type(error).__name__, "message": str(error)[:2000], "oom": is_out_of_memory(error)}
