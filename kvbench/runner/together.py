"""Several runs side by side that differ only in the method: they ask for the same batches and share each prefill."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from kvbench.config.prerequisites import check_here
from kvbench.config.run_config import RunConfig, checked_config
from kvbench.decoding.shared_prefill import sharing_refusal
from kvbench.errors import KvbenchError
from kvbench.models import shared
from kvbench.results.identity import run_id, short_name
from kvbench.results.store import RunStore
from kvbench.runner import ranks, resolve, shared_prefill
from kvbench.runner.run import RunSteps, answer_run
from kvbench.runner.session import Session
from kvbench.runner.steps import Batch, Steps
from kvbench.util.progress import lines_instead_of_bars, say

#: a run's metrics, or the error with which it ended
Result = dict[str, Any] | Exception


@dataclass
class _Member:
    """A run that shares its prefills, with its id and its index among all runs."""

    place: int
    checked: RunConfig
    name: str


def run_sharing_refusal(checked: RunConfig) -> str | None:
    """Return why a run cannot share its prefills with others; None if it can."""
    runtime = checked.runtime
    if checked.task.adaptive or checked.task.times_only or checked.task.single_process:
        return "its data set measures time and memory"
    if runtime.tensor_parallel is not None or runtime.workers != 1:
        return "it runs in several processes"
    if checked.logger.name == "wandb":
        return "logger=wandb follows one run at a time; python -m kvbench.publish sends runs afterwards"
    if runtime.memory_limit_gb is not None:
        return "its memory is limited (runtime.memory_limit_gb)"
    return sharing_refusal(checked.method)


def run_together(
    configs: Sequence[RunConfig | Mapping[str, Any]],
    begun: Callable[[int, str], None] = lambda place, name: None,
    ended: Callable[[int, Result], None] = lambda place, result: None,
) -> list[Result]:
    """Run several configurations that differ only in the method, and return the metrics or the error of each.

    Runs that cannot share a prefill (:func:`run_sharing_refusal`) run by themselves afterwards; a message says why.

    Args:
        begun: called with the index and the id of a run before it starts.
        ended: called with the index and the result of a run when it has ended.

    Raises:
        KeyboardInterrupt: Ctrl-C or SIGTERM; unfinished runs are recorded as ``interrupted``.
    """
    results: dict[int, Result] = {}

    def end(place: int, result: Result) -> None:
        results[place] = result
        ended(place, result)

    members: list[_Member] = []
    alone: list[int] = []
    for place, config in enumerate(configs):
        try:
            checked = config if isinstance(config, RunConfig) else checked_config(config)
            check_here(checked)
            member = _Member(place, checked, run_id(resolve.material(checked)))
        except Exception as error:
            end(place, error)
            continue
        reason = run_sharing_refusal(checked)
        if reason is None and members and member.name.split("-")[0] != members[0].name.split("-")[0]:
            reason = "its model, data or decoding options are others"
        if reason is None and member.name in [other.name for other in members]:
            reason = "the same run is among the others"
        if reason is None:
            members.append(member)
        else:
            say(f"{short_name(checked.plain)}: does not share a prefill: {reason}")
            alone.append(place)
    if len(members) == 1:
        alone = sorted([members.pop().place, *alone])
    if members:
        with ranks.terminated_as_interrupt(), shared.sharing(), lines_instead_of_bars():
            _side_by_side(members, begun, end)
    for place in alone:
        try:
            metrics: Result = answer_run(configs[place], lambda name, place=place: begun(place, name))  # type: ignore[misc]
        except Exception as error:
            metrics = error
        end(place, metrics)
    return [results[place] for place in range(len(configs))]


def _side_by_side(
    members: Sequence[_Member], begun: Callable[[int, str], None], end: Callable[[int, Result], None]
) -> None:
    """Carry out runs in step: whenever several ask for the same batch, they get it together."""
    with ExitStack() as stack:
        stores = {}
        for member in sorted(members, key=lambda one: one.name):  # the same order in every process: no deadlock
            store = RunStore(member.checked.runtime.results_dir, member.name, say)
            try:
                stack.enter_context(store.hold())
            except KvbenchError as error:  # its folder cannot be written, for example
                end(member.place, error)
            else:
                stores[member.name] = store
        under_way: dict[int, Steps] = {}
        waiting: dict[int, Batch] = {}

        def resume(place: int, act: Callable[[], Batch]) -> None:
            """Continue a run until it asks for its next batch, or ends."""
            waiting.pop(place, None)
            try:
                waiting[place] = act()
            except StopIteration as last:
                del under_way[place]
                end(place, last.value)
            except Exception as error:
                del under_way[place]
                end(place, error)

        try:
            for member in [member for member in members if member.name in stores]:
                begun(member.place, member.name)
                run_ = RunSteps(resolve.fitted(member.checked), stores[member.name], None).steps()
                under_way[member.place] = run_
                resume(member.place, run_.__next__)
            while waiting:
                # the run with most batches ahead: the others wait for it to come to theirs
                first = max(waiting, key=lambda place: waiting[place].left)
                ids = _ids(waiting[first])
                places = [place for place in waiting if _ids(waiting[place]) == ids]
                sessions = [session for place in places if isinstance(session := waiting[place].session, Session)]
                rows = shared_prefill.shared_rows(sessions, waiting[first].samples)
                for place, result in zip(places, rows, strict=True):
                    step = under_way[place]
                    if isinstance(result, Exception):
                        resume(place, lambda step=step, result=result: step.throw(result))  # type: ignore[misc]
                    else:
                        resume(place, lambda step=step, result=result: step.send(result))  # type: ignore[misc]
        except BaseException as error:
            for step in list(under_way.values()):
                try:
                    step.throw(error)
                except BaseException as raised:
                    if raised is not error and not isinstance(raised, StopIteration):
                        say(f"error: {raised}")
            raise


def _ids(batch: Batch) -> list[str]:
    return [sample.id for sample in batch.samples]
