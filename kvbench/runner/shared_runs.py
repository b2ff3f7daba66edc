"""Several runs side by side that differ only in the method: they ask for the same batches and share each prefill.

The prompts of a batch are read once, and each method answers in turn.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch

from kvbench.cache import KVCache
from kvbench.config.prerequisites import check_here
from kvbench.config.run_config import RunConfig, checked_config
from kvbench.decoding.shared_prefill import ReadPrompt, read_prompts, sharing_refusal
from kvbench.errors import ConfigError, KvbenchError
from kvbench.models import shared
from kvbench.profiling import roofline
from kvbench.profiling.memory import release
from kvbench.results.identity import run_id, short_name
from kvbench.results.samples import Row
from kvbench.results.store import RunStore
from kvbench.runner import ranks, resolve
from kvbench.runner.answers import Answers, PromptBatch
from kvbench.runner.run import RunSteps, answer_run
from kvbench.runner.session import Session
from kvbench.runner.span_likelihood import SHARE, free_bytes
from kvbench.runner.steps import Batch, Steps
from kvbench.tasks.base import Sample
from kvbench.tasks.work import Generate
from kvbench.util.failures import is_out_of_memory
from kvbench.util.processor import free_memory
from kvbench.util.progress import lines_instead_of_bars, say

#: a method's rows of a batch, or the error that it raised
Result = list[Row] | Exception


def shared_rows(sessions: Sequence[Session], samples: Sequence[Sample]) -> list[Result]:
    """Run a batch for several methods, and return for each its rows or its error.

    The sessions share a model and a data set, and their methods can share a prefill. Every session runs its first batch
    alone, to warm up and to measure the peak memory of prefill. It also runs alone samples without answers (perplexity,
    points of time and memory), and batches for which memory does not suffice. Only sessions that compute in the same
    dtype share a prefill.
    """
    ready: dict[str, list[int]] = {}
    for place, session in enumerate(sessions):
        if session.warm and isinstance(samples[0].work, Generate):
            ready.setdefault(session.machine.dtypes()["arithmetic"], []).append(place)
    results: dict[int, Result] = {}
    for places in ready.values():
        if len(places) > 1:
            results |= zip(places, _shared_results([sessions[i] for i in places], samples), strict=True)
    return [results[i] if i in results else _alone(session, samples) for i, session in enumerate(sessions)]


def _alone(session: Session, samples: Sequence[Sample]) -> Result:
    if not session.warm:
        release(session.device)  # what is left of other methods' caches would count in the peaks of this one
    try:
        return session.rows(samples)
    except Exception as error:
        return error


def _shared_results(sessions: Sequence[Session], samples: Sequence[Sample]) -> list[Result]:
    strategies = [session.answers() for session in sessions]
    try:
        batch = strategies[0].batch(samples)
    except Exception as error:
        return [error for _ in sessions]
    home, reason = choose_home(strategies, batch)
    if reason:
        say(f"{samples[0].id}: each method reads the prompt by itself: {reason}")
        return [_alone(session, samples) for session in sessions]
    caches: list[KVCache | Exception] = []
    for strategy in strategies:
        try:
            caches.append(strategy.cache(batch))
        except Exception as error:
            caches.append(error)
    prompt: ReadPrompt | None = None
    try:
        prompt = _read_shared(strategies[0], [cache for cache in caches if isinstance(cache, KVCache)], batch, home)
    except Exception as error:
        if not is_out_of_memory(error):
            return [cache if isinstance(cache, Exception) else error for cache in caches]
    if prompt is None:  # outside of the handler, whose traceback would keep the tensors alive
        caches.clear()
        release(strategies[0].loaded.device)
        say(f"{samples[0].id}: out of memory in the shared prefill; each method reads the prompt by itself")
        return [_alone(session, samples) for session in sessions]
    results: list[Result] = []
    for number, strategy in enumerate(strategies):
        cache = caches[number]
        if isinstance(cache, Exception):
            results.append(cache)
            continue
        try:
            results.append(strategy.answered(batch, cache, first=False, prompt=prompt))
        except Exception as error:
            results.append(error)
        # drop the last references to the cache, whose memory the next method needs
        prompt.forget(cache)
        caches[number] = RuntimeError("done")
        del cache
    return results


def _read_shared(
    strategy: Answers, caches: Sequence[KVCache], batch: PromptBatch, home: torch.device | None
) -> ReadPrompt:
    runtime = strategy.config.runtime
    return read_prompts(
        strategy.loaded.model,
        caches,
        batch.padded,
        batch.input_ids,
        batch.mask,
        chunk=runtime.prefill_chunk,
        rows=runtime.prefill_rows,
        home=home,
    )


def choose_home(strategies: Sequence[Answers], batch: PromptBatch) -> tuple[torch.device | None, str]:
    """Decide where to hold a batch's keys and values after prefill until each method has placed them.

    They stay on the model's device if its free memory is predicted to suffice for them together with the prefill's
    activations, or with the largest cache. Otherwise they go to the host, if its memory suffices.

    Returns:
        The device, None for that of the model; and an empty text, or the reason why neither has enough memory.
    """
    loaded = strategies[0].loaded
    shared_bytes, working = predicted_bytes(strategies, batch)
    on_device, on_host = unused_memory(loaded.device), unused_memory(torch.device("cpu"))
    if on_device is None or shared_bytes + working <= SHARE * on_device:
        return None, ""
    if loaded.device.type != "cpu" and (on_host is None or shared_bytes <= SHARE * on_host):
        return torch.device("cpu"), ""
    return None, (
        f"{shared_bytes / 2**30:.1f} GiB of keys and values would have to be kept for all methods, with "
        f"{on_device / 2**30:.1f} GiB free on {loaded.device}"
    )


def predicted_bytes(strategies: Sequence[Answers], batch: PromptBatch) -> tuple[int, int]:
    """Predict the bytes that a shared prefill takes in addition to the weights.

    Returns:
        The bytes of keys and values that are held for all methods; and the bytes of the prefill's activations or of the
        largest cache, whichever are more.
    """
    loaded, runtime = strategies[0].loaded, strategies[0].config.runtime
    shape, width = loaded.architecture, loaded.dtype.itemsize
    count, tokens = batch.input_ids.shape
    exact = 2 * shape.layers * count * shape.kv_heads * shape.head_dim * loaded.storage.itemsize
    observed = 0
    for strategy in strategies:
        queries = strategy.config.method.observe_prompt
        observed += shape.layers * count * shape.heads * tokens * 4 * (queries if queries > 0 else -queries)
    at_once = roofline.tokens_of_a_pass(count, tokens, runtime.prefill_chunk, runtime.prefill_rows)
    try:
        dimensions = roofline.Shape.of(loaded.model.config.get_text_config(decoder=True))
        alive = roofline.live_elements(dimensions, at_once, runtime.mlp_chunk) * width
    except ConfigError:  # a mixture of experts, ...
        alive = 20 * shape.hidden_size * at_once * width
    return exact * tokens + observed, max(alive, exact * (tokens + batch.new_tokens))


def unused_memory(device: torch.device) -> float | None:
    """Return the free bytes of a GPU's memory, or of the host's for a CPU; None if they are unknown."""
    if device.type == "cuda":
        return free_bytes(device, None)
    return free_memory()


#: a run's metrics, or the error with which it ended
Ended = dict[str, Any] | Exception


@dataclass
class _Member:
    """A run that shares its prefills, with its id and its index among all runs."""

    place: int
    checked: RunConfig
    name: str


def run_sharing_refusal(checked: RunConfig) -> str | None:
    """Return the reason why a run cannot share its prefills with others; None if it can."""
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
    ended: Callable[[int, Ended], None] = lambda place, result: None,
) -> list[Ended]:
    """Run several configurations that differ only in the method, and return the metrics or the error of each.

    Runs that cannot share a prefill (:func:`run_sharing_refusal`) run by themselves afterwards; a message says why.

    Args:
        begun: called with the index and the id of a run before it starts.
        ended: called with the index and the result of a run when it has ended.

    Raises:
        KeyboardInterrupt: Ctrl-C or SIGTERM; unfinished runs are recorded as ``interrupted``.
    """
    results: dict[int, Ended] = {}

    def end(place: int, result: Ended) -> None:
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
            metrics: Ended = answer_run(configs[place], lambda name, place=place: begun(place, name))  # type: ignore[misc]
        except Exception as error:
            metrics = error
        end(place, metrics)
    return [results[place] for place in range(len(configs))]


def _side_by_side(
    members: Sequence[_Member], begun: Callable[[int, str], None], end: Callable[[int, Ended], None]
) -> None:
    """Carry out runs in parallel steps: whenever several ask for the same batch, it is run once for all of them."""
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
                rows = shared_rows(sessions, waiting[first].samples)
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
