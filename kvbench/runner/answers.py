"""Answers to prompts: batches of samples, generated with a method's cache and scored."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kvbench.cache import KVCache
from kvbench.cache.progress import Options
from kvbench.cache.prompts import Prompts
from kvbench.config.run_config import RunConfig
from kvbench.decoding.autoregressive import Generation, generate
from kvbench.decoding.round_times import row_totals, token_seconds, totals
from kvbench.decoding.sampling import Sampling
from kvbench.decoding.shared_prefill import ReadPrompt
from kvbench.models.load import LoadedModel
from kvbench.profiling.memory import PhasePeaks
from kvbench.results.samples import MEASURED, Row
from kvbench.runner.prompting import EncodedPrompt, answer_ids, encode_batch, end_ids, sample_seed, system_turn
from kvbench.runner.rows import Machine, Report, head, row_bill
from kvbench.runner.scoring import finite, scored
from kvbench.tasks.base import Sample, Task


@dataclass(frozen=True)
class PromptBatch:
    """The prompts of a batch of samples.

    Args:
        input_ids: the prompts' token ids, padded on the left, ``[B, T]``.
        mask: attention mask ``[B, T]``; None if no row is padded.
        padded: what methods may need to know about the prompts.
        new_tokens: maximum number of tokens of an answer.
    """

    samples: list[Sample]
    prompts: list[EncodedPrompt]
    input_ids: Tensor
    mask: Tensor | None
    padded: Prompts
    new_tokens: int
    pad_id: int


@dataclass(frozen=True)
class Answers:
    """Strategy that generates and scores answers, for samples whose work is :class:`kvbench.tasks.work.Generate`."""

    config: RunConfig
    loaded: LoadedModel
    task: Task
    machine: Machine
    options: Options

    def rows(self, samples: Sequence[Sample], *, first: bool, report: Report | None) -> list[Row]:
        """Generate and score the answers of a batch; arguments as for :meth:`kvbench.runner.rows.Strategy.rows`."""
        batch = self.batch(samples)
        return self.answered(batch, self.cache(batch), first=first)

    def batch(self, samples: Sequence[Sample]) -> PromptBatch:
        """Return the prompts of a batch of samples as token ids, padded on the left."""
        new_tokens = self.config.decoding.max_new_tokens or samples[0].max_new_tokens
        encoded = encode_batch(samples, self.config.model, self.loaded, new_tokens)
        return PromptBatch(list(samples), *encoded, new_tokens, self.loaded.tokenizer.pad_token_id or 0)

    def cache(self, batch: PromptBatch) -> KVCache:
        """Return an empty cache of the run's method for a batch. A method that searches the context does so now."""
        cache = self.config.method.new_cache(
            self.loaded.model, batch.padded, max_length=batch.input_ids.shape[1] + batch.new_tokens
        )
        cache.options = self.options
        return cache

    def answered(
        self, batch: PromptBatch, cache: KVCache, *, first: bool, prompt: ReadPrompt | None = None
    ) -> list[Row]:
        """Generate and score the answers of a batch, and return its rows.

        Args:
            cache: an empty cache for the prompts (:meth:`cache`).
            first: True for the first batch of the session (:meth:`kvbench.runner.rows.Strategy.rows`).
            prompt: the prompts, if they were read for several methods at once; None to read them now.
        """
        decoding, runtime, tokenizer = self.config.decoding, self.config.runtime, self.loaded.tokenizer
        samples, new_tokens = batch.samples, batch.new_tokens
        peaks = PhasePeaks(self.loaded.device, census=first)
        with peaks.run():
            generation = generate(
                self.loaded.model,
                cache,
                batch.input_ids,
                batch.mask,
                max_new_tokens=new_tokens,
                sampling=Sampling(
                    temperature=decoding.temperature,
                    top_p=decoding.top_p,
                    seed=[sample_seed(runtime.seed, sample) for sample in samples],
                    top_k=decoding.top_k,
                ),
                eos_token_ids=(*self.loaded.eos_token_ids, *end_ids(samples[0], tokenizer)),
                say_something=samples[0].say_something,
                stop=(*samples[0].stop, *decoding.stop),
                tokenizer=tokenizer,
                prefill_chunk=runtime.prefill_chunk,
                pad_token_id=batch.pad_id,
                observer=peaks,
                answer_ids=[answer_ids(sample, tokenizer)[:new_tokens] for sample in samples],
                graphs=runtime.graphs,
                compile=runtime.compile,
                prefill_rows=runtime.prefill_rows,
                prompt=prompt,
            )
        warm_up = first or samples[0].warm_up
        measured = generation_figures(self.machine, cache, peaks, warm_up, len(samples), generation)
        if prompt is not None:
            measured |= shared_figures(prompt, measured["peak_bytes"], self.loaded.device)
        bills = [row_bill(cache, index, len(samples)) for index in range(len(samples))]
        rows = [
            answer_row(self.task, sample, batch.prompts[index], generation, index, bills[index], measured)
            | decoding.named(system_turn(sample, self.config.model))
            for index, sample in enumerate(samples)
        ]
        for row, note in zip(rows, cache.notes or (), strict=False):
            row["method"] = note
        return rows


def generation_figures(
    machine: Machine, cache: Any, peaks: PhasePeaks, warm_up: bool, rows: int, generation: Generation
) -> dict[str, Any]:
    """Return the figures that are measured once per batch and copied into each row: times, memory, attention path.

    `cache` is the batch's after generation. The times of a warm-up batch are left out of all results.
    """
    return machine.measured(
        rows,
        peaks.row(),
        {
            "reads_packed": bool(cache.reads_packed),
            "path": str(cache.path),
            "prefill": cache.progress.prefill.path,
        },
        warm_up=warm_up,
        # TTFT includes the method's search; if the time of that is unknown, so is the sum
        ttft_s=None if cache.search_s is None else round(generation.ttft_s + cache.search_s, 6),
        step_s=[round(step, 6) for step in generation.step_s],
        stepping=generation.stepping,
        capture_s=round(generation.capture_s, 6),
    )


def shared_figures(prompt: ReadPrompt, peaks: dict[str, Any], device: torch.device) -> dict[str, Any]:
    """Return the measured figures that replace others in a row whose prompt was read for several methods at once.

    The key ``shared_prefill`` has the number of methods and the seconds of the prefill, which are part of the row's
    time to first token. The memory peak of prefill is None, because no single method caused it. The peak of decoding
    does not count the prompt that stays in memory for the other methods.
    """
    decode = peaks["decode"]
    return {
        "shared_prefill": {"methods": prompt.methods, "prefill_s": round(prompt.seconds, 6)},
        "peak_bytes": {
            **peaks,
            "prefill": None,
            "decode": None if decode is None else decode - prompt.nbytes(device),
        },
    }


def answer_row(
    task: Task,
    sample: Sample,
    prompt: EncodedPrompt,
    generation: Generation,
    index: int,
    bill: dict[str, Any],
    measured: dict[str, Any],
) -> Row:
    """Return the result row of one sample: its answer, scores, KV-cache bytes and measured figures.

    Args:
        generation: the generated tokens of the whole batch, with times.
        index: index of the sample in the batch.
        bill: bytes of the cache that belong to the sample (:func:`kvbench.runner.rows.row_bill`).
        measured: measured figures of the batch (:func:`generation_figures`).
    """
    tokens, finish = generation.tokens[index], generation.finish[index]
    nll = generation.answer_nll[index] if generation.answer_nll else None
    prediction = generation.text[index]
    speculated = {}
    # the first token comes from the prefill; each other token, and the EOS, took a decode step or came from a round
    measured = {**measured, "decoded": min(len(generation.step_s), len(tokens) - (finish != "eos"))}
    if generation.rounds:
        speculated = {"speculation": row_totals(generation.rounds, index)}
        times = [round(seconds, 6) for seconds in token_seconds(generation.rounds, index)]
        # times of the row's own tokens; `decode_s` is the whole batch's time, for throughput
        measured |= {"step_s": times, "decoded": len(times), "decode_s": round(sum(generation.step_s), 6)}
        summed = totals(generation.rounds, [index])
        if summed is not None and summed["draft_s"] is not None:
            measured["rounds"] = summed
    begun = head(
        sample,
        len(prompt.ids),
        finish,
        truncated=prompt.removed,
        thinking=prompt.thinking,
        prediction=prediction,
        tokens=tokens,
    )
    return {
        **begun,
        **scored(task, sample, prediction, begun),
        "nll": {"sum": finite(nll[0]), "n": int(nll[1])} if nll and nll[1] else None,
        "kv_bytes": bill,
        **speculated,
        **({"warm_up": True} if sample.warm_up else {}),
        MEASURED: measured,
    }
