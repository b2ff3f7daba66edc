"""Batches of a text's windows into rows: perplexity through a session's model and method."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from kvbench.cache.prompts import Prompts
from kvbench.decoding.perplexity import decode_nll, forward_nll, pass_tokens, simulated_nll
from kvbench.errors import ConfigError, NonFiniteError
from kvbench.methods.base import QUERY_TOKENS, Method
from kvbench.profiling.memory import PhasePeaks
from kvbench.results.samples import MEASURED, Row
from kvbench.runner.scoring import finite, scored
from kvbench.tasks.base import Sample

if TYPE_CHECKING:
    from kvbench.runner.session import Session


def window_rows(session: Session, samples: Sequence[Sample], bill: Any) -> list[Row]:
    """Rows of one batch of windows; all have the same settings.

    Args:
        session: its model, method and device.
        samples: of :class:`kvbench.tasks.perplexity.Perplexity`.
        bill: bytes of one row of a cache, ``(cache, row, rows) -> dict``.

    Raises:
        ConfigError: a mode that the method cannot serve, or on which it has no effect.
        CacheError: the model did not use the method's cache.
    """
    windows = [sample.meta["window"] for sample in samples]
    mode, prompt, method = windows[0]["mode"], windows[0]["prefill"], session.config.method.alone()
    check_mode(method, mode, prompt)
    longest = session.loaded.max_length
    if len(windows[0]["ids"]) > longest:
        raise ConfigError(
            "dataset.window", len(windows[0]["ids"]), f"is longer than the model takes (model.max_length={longest})"
        )
    ids = torch.tensor([window["ids"] for window in windows], device=session.device)
    # a batch whose windows begin to count at different tokens (the first one of sliding windows) is run row by row
    firsts = [window["first"] for window in windows]
    if len(set(firsts)) > 1:
        return [row for sample in samples for row in window_rows(session, [sample], bill)]
    chunk = pass_tokens(windows[0]["chunk"])

    def report(tokens: int) -> None:
        if session.report is not None:
            share = len(samples) * tokens / ids.shape[1]
            session.report(share, f"{samples[0].id}: {tokens} of {ids.shape[1]} tokens")

    cache, model = None, session.loaded.model
    peaks = PhasePeaks(session.device, census=False)
    with peaks.run():
        if mode == "fp16":
            method.detach(model)
            sums = forward_nll(model, ids, firsts[0])
        else:
            cache = method.new_cache(model, _told(session, ids, prompt, mode), max_length=ids.shape[1])
            cache.options = session.options
            if mode == "simulated":
                sums = simulated_nll(model, cache, ids, firsts[0])
            else:
                sums = decode_nll(model, cache, ids, firsts[0], prompt=prompt, chunk=chunk, report=report)
    if not bool(torch.isfinite(sums).all()):
        raise NonFiniteError(
            f"{samples[0].id}: the likelihood of the text is not a number: the model's logits hold NaN or Inf.\n"
            "  hint: model.dtype=float32 tells whether the range of the dtype is passed; else its weights are damaged"
        )
    count = ids.shape[1] - firsts[0]
    return [
        {
            "id": sample.id,
            "task": sample.task,
            "length": sample.length,
            "prompt_tokens": ids.shape[1],
            "truncated": 0,
            "prediction": "",
            "tokens": [],
            "finish": "window",
            **scored(session.task, sample, ""),
            "nll": {"sum": finite(nats), "n": count},
            "window": {
                "mode": mode,
                "prefill": prompt,
                "chunk": chunk if mode == "decode" else None,
                "bytes": window["bytes"],
                "document": window["document"],
            },
            "kv_bytes": bill(cache, index, len(samples)) if cache is not None else None,
            MEASURED: {
                "device": session.device_name,
                "dtype": session.dtype,
                "warm_up": False,
                "batch_rows": len(samples),
                "ttft_s": None,
                "step_s": [],
                "decoded": 0,
                "peak_bytes": peaks.row(),
                "attention": _attention(cache),
            },
        }
        for index, (sample, window, nats) in enumerate(zip(samples, windows, sums.tolist(), strict=True))
    ]


def check_mode(method: Method, mode: str, prompt: int) -> None:
    """Raise ConfigError where `mode` would not measure `method`."""
    method.check_windows(mode, prompt)


def _told(session: Session, ids: torch.Tensor, prompt: int, mode: str) -> Prompts | None:
    """What the cache is told: the prompt is context, the tokens after it are the question (as far as any asks)."""
    if mode != "decode" or not prompt:
        return None
    rows, decode = ids.shape[0], session.loaded.tokenizer.decode
    queries = [decode(row[prompt : prompt + QUERY_TOKENS].tolist()) for row in ids]
    return Prompts([0] * rows, [prompt] * rows, [(0, prompt)] * rows, queries, ids[:, :prompt], decode)


def _attention(cache: Any) -> dict[str, Any]:
    if cache is None:
        return {"reads_packed": False, "path": "none"}
    return {"reads_packed": bool(cache.reads_packed), "path": str(cache.path)}
