"""A batch of samples for several methods at once: the prompts are read once, and each method answers in turn."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from kvbench.cache import KVCache
from kvbench.decoding.shared_prefill import ReadPrompt, read_prompts
from kvbench.errors import ConfigError
from kvbench.profiling import roofline
from kvbench.profiling.memory import release
from kvbench.results.samples import Row
from kvbench.runner.answers import Answers, PromptBatch
from kvbench.runner.perplexity import SHARE, free_bytes
from kvbench.tasks.base import Sample
from kvbench.tasks.work import Generate
from kvbench.util.failures import is_out_of_memory
from kvbench.util.processor import free_memory
from kvbench.util.progress import say

if TYPE_CHECKING:
    from kvbench.runner.session import Session

#: a method's rows of a batch, or the error that it raised
Result = list[Row] | Exception


def shared_rows(sessions: Sequence[Session], samples: Sequence[Sample]) -> list[Result]:
    """Run a batch for several methods, and return for each its rows or its error.

    The sessions share a model and a data set, and their methods can share a prefill. Every session runs its first batch
    by itself, which warms up and measures the peak memory of prefill. So do samples that are not answered (perplexity,
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
    """Decide where to keep a batch's keys and values between prefill and the methods' placing.

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
        The bytes of what is kept for all methods; and those of either the prefill's activations or the largest cache,
        whichever takes more.
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
    """Return the free bytes of a GPU or of the host; None if they are unknown."""
    if device.type == "cuda":
        return free_bytes(device, None)
    return free_memory()
