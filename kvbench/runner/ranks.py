"""Runs on several processes: every rank has a session and runs the same batches; their rows are merged into one.

Rank 0 acts like a single process: it locks the run, selects the samples, writes the files and calls the loggers. It
sends the other ranks the ids of the samples. They run the same batches in the same order, but write nothing. After each
batch the ranks exchange their rows and errors, so that an error on any rank is raised on all.
"""

from __future__ import annotations

import io
import signal
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, redirect_stderr
from typing import TYPE_CHECKING, Any

from kvbench.config.run_config import RunConfig
from kvbench.errors import CombinationError, KvbenchError
from kvbench.results.samples import MEASURED, Row
from kvbench.runner.fitting import Fitting
from kvbench.tasks.base import Sample
from kvbench.util.failures import is_out_of_memory
from kvbench.util.progress import say

if TYPE_CHECKING:
    from kvbench.parallel.team import Team
    from kvbench.runner.session import Session

#: seconds that a rank that failed to load waits for the others to finish loading or fail too
LOADING_S = 600.0


@contextmanager
def joined_ranks(checked: RunConfig) -> Iterator[Team | None]:
    """Join the other ranks of the run inside a ``with`` block; yields the team, or None for a single process.

    If an error ends the run on this rank, the other ranks are informed, so that they do not wait for this one.

    Raises:
        CombinationError: the run has several ranks, but the data set can only be measured on a single process.
    """
    if checked.runtime.tensor_parallel is None:
        yield None
        return
    if checked.task.single_process:
        raise CombinationError(
            "runtime.tensor_parallel",
            "auto",
            "this data set measures the memory and time of a single process",
            hint="set runtime.tensor_parallel=null, or run python -m experiments.multigpu",
        )
    from kvbench.models.devices import join_team

    team = join_team(checked.runtime)
    assert team is not None
    team.open()
    try:
        yield team
    except BaseException as error:
        silent = team.rank == 0 and not team.announced
        if error is not team.shared and not (silent and isinstance(error, Exception)):
            team.fail(error)  # the others may wait for this rank inside a collective
        raise
    finally:
        if team.rank == 0:
            team.tell([])  # nothing to do, in case they still wait for the samples


@contextmanager
def terminated_as_interrupt() -> Iterator[None]:
    """Raise KeyboardInterrupt if this process receives SIGTERM inside a ``with`` block.

    Schedulers send SIGTERM to end a job. The run is then recorded as interrupted, as after Ctrl-C, and the same command
    resumes it. In a thread other than the main one, this has no effect.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt("terminated")

    previous = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)


def follow(checked: RunConfig, team: Team) -> dict[str, Any]:
    """Run the batches that rank 0 has planned, on a rank other than 0, without writing results.

    The result is ``status`` and the number ``rank`` of this rank. The status is ``oom`` if a rank ran out of memory,
    else ``ok``, even if single samples failed; rank 0 records their errors.
    """
    wanted, task = team.hear(), checked.task
    if not wanted:
        return {"status": "ok", "rank": team.rank}
    if task.needs_tokenizer:
        from kvbench.models.load import load_tokenizer

        task.bind(load_tokenizer(checked.model))
    with redirect_stderr(io.StringIO()):  # rank 0 has read the data too, and said what is odd
        samples = {sample.id: sample for sample in task.samples()}
    try:
        with open_session(checked, team) as session:
            for planned in session.plan(Fitting(checked).chosen([samples[name] for name in wanted], ())):
                try:
                    batch(team, session, planned)
                except Exception as error:
                    if is_out_of_memory(error) or team.broken:
                        raise
    except Exception as error:
        if error is team.shared and is_out_of_memory(error):
            return {"status": "oom", "rank": team.rank}  # rank 0 records it
        raise
    return {"status": "ok", "rank": team.rank}


@contextmanager
def open_session(checked: RunConfig, team: Team | None) -> Iterator[Session]:
    """Load the model inside a ``with`` block, and free its memory at the end of the block; yields a session.

    The run may not use more memory than ``runtime.memory_limit_gb``, if that is set. The ranks of a team load the model
    at the same time. Torch is imported only here, so a run without missing samples never imports it.
    """
    from kvbench.models.devices import homes
    from kvbench.profiling import device
    from kvbench.profiling.device import limited
    from kvbench.profiling.memory import release
    from kvbench.runner.session import Session

    limit, devices = checked.runtime.memory_limit_gb, homes(checked.runtime)
    with ExitStack() as stack:
        stack.enter_context(device.kept(strict=False))  # the next run's times are not this one's lack of memory
        limits = [stack.enter_context(limited(device, limit)) for device in devices]
        if limit is not None and not all(limits):
            say(
                f"runtime.memory_limit_gb={limit}: the memory of {devices[0]} cannot be limited on this "
                "platform; the run continues without a limit"
            )
        session: Session | None = None
        try:
            session = on_every_rank(team, lambda: Session(checked))
            yield session
        finally:
            if session is not None:
                session.close()
            release(devices[0])


def on_every_rank(team: Team | None, act: Callable[[], Any]) -> Any:
    """Call a function on every rank, and return its value on this rank. If it fails on any rank, raise an error on all.

    All ranks of the team must call :func:`on_every_rank`; None stands for a single process.
    """
    if team is None:
        return act()
    value, failed = None, None
    try:
        value = act()
    except Exception as error:
        failed = error
    team.settle(None, failed, LOADING_S)
    return value


def batch(team: Team | None, session: Session, samples: list[Sample]) -> list[Row]:
    """Run a batch on every rank, and return its rows, with bytes summed over the ranks (:func:`merged`).

    All ranks must call this with the same batch, as for :func:`on_every_rank`.

    Raises:
        PeerError: another rank failed.
        KvbenchError: ranks generated different tokens.
        Exception: any error of :meth:`Session.rows`.
    """
    if team is None:
        return session.rows(samples)
    rows: list[Row] | None = None
    failed: Exception | None = None
    try:
        rows = session.rows(samples)
    except Exception as error:
        failed = error
    everyone = team.settle(rows, failed)
    assert rows is not None
    return [merged(row, [rows_of_rank[number] for rows_of_rank in everyone]) for number, row in enumerate(rows)]


def merged(own: Row, everyone: Sequence[Row]) -> Row:
    """Return a row with KV-cache bytes and peak memory summed over `everyone`, the rows of all ranks for its sample.

    Under ``measured``, the row also lists the bytes of each rank, as ``ranks``. All other entries are those of this
    rank's row, `own`.

    Raises:
        KvbenchError: the ranks did not generate the same tokens.
    """
    for rank, row in enumerate(everyone):
        if row["tokens"] != everyone[0]["tokens"]:
            raise KvbenchError(
                f"sample {own['id']}: rank {rank} generated different tokens than rank 0. This is a bug "
                "in kvbench; please report it"
            )
    row = dict(own)
    if own.get("kv_bytes"):
        row["kv_bytes"] = _sum([rank["kv_bytes"] for rank in everyone])
    if MEASURED in own:
        peaks = [rank[MEASURED]["peak_bytes"] for rank in everyone]
        row[MEASURED] = {
            **own[MEASURED],
            "peak_bytes": _sum(peaks),
            "ranks": [
                {"kv_bytes": rank["kv_bytes"] and rank["kv_bytes"]["used"]["total"], "peak_bytes": peak}
                for rank, peak in zip(everyone, peaks, strict=True)
            ],
        }
    return row


def _sum(values: Sequence[Any]) -> Any:
    """Return the sum of equally nested mappings of numbers, key by key.

    A key is None if it is None in any of them; values that are not numbers are taken from the first.
    """
    first = values[0]
    if isinstance(first, Mapping):
        return {key: _sum([value[key] for value in values]) for key in first}
    if any(value is None for value in values):
        return None
    return sum(values) if isinstance(first, (int, float)) else first
