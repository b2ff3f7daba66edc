"""One session of a run: the loaded model and the method, turning batches of samples into rows."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from kvbench.cache.options import Options
from kvbench.config.run_config import RunConfig
from kvbench.decoding.autoregressive import Generation, generate
from kvbench.decoding.drafting import prepare
from kvbench.decoding.questions import ask
from kvbench.decoding.sampling import Sampling
from kvbench.decoding.speculative import figures, token_seconds
from kvbench.measure.meter import Meter
from kvbench.models.load import load
from kvbench.models.spec import ModelConfig
from kvbench.profiling.device import device_name
from kvbench.profiling.memory import PhasePeaks
from kvbench.results.environment import cpu_name
from kvbench.results.samples import MEASURED, Row
from kvbench.runner.perplexity import window_rows
from kvbench.runner.points import point_rows
from kvbench.runner.prompting import EncodedPrompt, encode, pad, prompt_limit
from kvbench.runner.scoring import finite, scored
from kvbench.tasks.base import Sample, Task


class Session:
    """Loads the model and generates.

    Args:
        config: the checked configuration.
        task: scores the predictions.

    Raises:
        ModelError: the model cannot be had.
    """

    def __init__(self, config: RunConfig, task: Task) -> None:
        self.config, self.task = config, task
        self.options = Options(kernels=config.runtime.kernels, mlp_chunk=config.runtime.mlp_chunk)
        self.loaded: Any = load(config.model, config.runtime)
        prepare(self.loaded.model, config.method.speculation)
        self.device = self.loaded.device
        self.device_name = device_name(self.device) or cpu_name()
        if len(self.loaded.devices) > 1:  # times of one device and of several are kept apart by this name
            self.device_name = f"{len(self.loaded.devices)} x {self.device_name} ({self.loaded.layout})"
        self.dtype = str(self.loaded.dtype).removeprefix("torch.")
        self._warm = False
        #: told while a long sample runs: how many samples' worth of its batch is done, and of which
        self.report: Callable[[float, str], None] | None = None
        #: measures points of dataset=efficiency; made with the first one
        self.meter: Meter | None = None

    def plan(self, samples: Sequence[Sample]) -> list[list[Sample]]:
        """Batches of the samples in their order, but for the one with the longest prompt, which comes first.

        The first batch warms up and carries the memory census, so it should be the one that needs most. Where the task
        has samples to warm up with, those come before.
        """
        planned = list(batches(samples, self.config.runtime.batch_size))
        warming = [batch for batch in planned if batch[0].meta.get("warm_up")]
        planned = [batch for batch in planned if not batch[0].meta.get("warm_up")]
        if warming or not planned:
            return [*warming, *planned]
        longest = max(range(len(planned)), key=lambda i: max(len(sample.prompt) for sample in planned[i]))
        return [planned[longest], *planned[:longest], *planned[longest + 1 :]]

    def layout(self) -> dict[str, Any]:
        """Where the model lies: all devices by torch's names (those of other ranks too), and how it is spread."""
        return {"devices": list(self.loaded.devices), "layout": self.loaded.layout}

    def close(self) -> None:
        """Let go of the model, so that its memory is free for the next run of a sweep."""
        if self.loaded is not None:
            self.config.method.detach(self.loaded.model)
        self.loaded = self.meter = None

    def rows(self, samples: Sequence[Sample]) -> list[Row]:
        """Generate and score one batch; all samples share `max_new_tokens` and `stop`.

        The session's first batch is its warm-up: its times are left out of every figure (its rows say so), and on a
        CPU the live tensors are counted while it runs, which slows it.

        Raises:
            CacheError: the model did not use the method's cache.
            DataError: a prompt is too long and its task refuses truncation.
            torch.OutOfMemoryError: memory ran out.
        """
        if "window" in samples[0].meta:
            return window_rows(self, samples, row_bill)
        if "point" in samples[0].meta:
            return [row for sample in samples for row in point_rows(self, sample)]
        if "questions" in samples[0].meta:
            return [self._several(sample) for sample in samples]
        census = not self._warm
        warm_up = census or bool(samples[0].meta.get("warm_up"))
        decoding, runtime, tokenizer = self.config.decoding, self.config.runtime, self.loaded.tokenizer
        new_tokens = decoding.max_new_tokens or samples[0].max_new_tokens
        room = prompt_limit(None, self.loaded.max_length, new_tokens)
        prompts = [
            encode(
                sample,
                tokenizer,
                chat=self.config.model.chat,
                limit=prompt_limit(own_limit(sample, self.config.model), self.loaded.max_length, new_tokens),
                room=room,
            )
            for sample in samples
        ]
        queries, pad_id = [sample.query for sample in samples], tokenizer.pad_token_id or 0
        sources = [sample.meta.get("query_source") for sample in samples]
        input_ids, mask, told = pad(prompts, queries, pad_id, self.device, tokenizer.decode, sources)
        cache = self.config.method.new_cache(self.loaded.model, told, max_length=input_ids.shape[1] + new_tokens)
        cache.options = self.options
        peaks = PhasePeaks(self.device, census=census)
        with peaks.run():
            generation = generate(
                self.loaded.model,
                cache,
                input_ids,
                mask,
                max_new_tokens=new_tokens,
                sampling=Sampling(
                    temperature=decoding.temperature,
                    top_p=decoding.top_p,
                    seed=[sample_seed(runtime.seed, sample) for sample in samples],
                ),
                eos_token_ids=(*self.loaded.eos_token_ids, *end_ids(samples[0], tokenizer)),
                say_something=bool(samples[0].meta.get("say_something")),
                stop=(*samples[0].stop, *decoding.stop),
                tokenizer=tokenizer,
                prefill_chunk=runtime.prefill_chunk,
                pad_token_id=pad_id,
                observer=peaks,
                answer_ids=[answer_ids(sample, tokenizer)[:new_tokens] for sample in samples],
                graphs=runtime.graphs,
                compile=runtime.compile,
                prefill_rows=runtime.prefill_rows,
            )
        measured = self._measured(cache, peaks, warm_up, len(samples), generation)
        bills = [row_bill(cache, index, len(samples)) for index in range(len(samples))]
        rows = [
            self._row(sample, prompts[index], generation, index, bills[index], measured)
            for index, sample in enumerate(samples)
        ]
        for row, note in zip(rows, cache.notes or (), strict=False):
            row["method"] = note
        return rows

    def _several(self, sample: Sample) -> Row:
        """A sample with several questions on one cache: the shared text is cached before any question is read."""
        warm_up = not self._warm
        decoding, runtime, tokenizer = self.config.decoding, self.config.runtime, self.loaded.tokenizer
        new_tokens = decoding.max_new_tokens or sample.max_new_tokens
        questions = sample.meta["questions"]
        asked = [tokenizer(question["prompt"], add_special_tokens=False)["input_ids"] for question in questions]
        room = prompt_limit(self.config.model.prompt_limit, self.loaded.max_length, new_tokens)
        limit = None if room is None else room - max(map(len, asked))
        shared = replace(sample, prompt=sample.prompt[: sample.meta["shared"]], meta={**sample.meta, "chat": False})
        prompt = encode(shared, tokenizer, limit=limit)
        input_ids, _, told = pad([prompt], [sample.query], 0, self.device, tokenizer.decode)
        length = input_ids.shape[1] + max(map(len, asked)) + new_tokens
        cache = self.config.method.new_cache(self.loaded.model, told, max_length=length)
        cache.options = self.options
        peaks = PhasePeaks(self.device, census=warm_up)
        with peaks.run():
            results = ask(
                self.loaded.model,
                cache,
                input_ids,
                asked,
                answers=[
                    tokenizer(q.get("target", q["answer"]), add_special_tokens=False)["input_ids"] for q in questions
                ],
                max_new_tokens=new_tokens,
                sampling=Sampling(decoding.temperature, decoding.top_p, [sample_seed(runtime.seed, sample)]),
                eos_token_ids=self.loaded.eos_token_ids,
                stop=(*sample.stop, *decoding.stop),
                tokenizer=tokenizer,
                prefill_chunk=runtime.prefill_chunk,
                observer=peaks,
            )
        whole = Generation(
            tokens=[[token for result in results for token in result.tokens[0]]],
            text=["\n".join(result.text[0] for result in results)],
            finish=["length" if any(result.finish[0] == "length" for result in results) else results[0].finish[0]],
            ttft_s=results[0].ttft_s,
            step_s=[step for result in results for step in result.step_s],
            prompt_tokens=results[0].prompt_tokens,
            answer_nll=[tuple(map(sum, zip(*(result.answer_nll[0] for result in results), strict=True)))],  # type: ignore[list-item]
            rounds=[each for result in results for each in result.rounds],
            stepping="eager (several questions on one cache)",
        )
        measured = self._measured(cache, peaks, warm_up, 1, whole)
        row = self._row(sample, prompt, whole, 0, row_bill(cache, 0, 1), measured)
        if not whole.rounds:
            row[MEASURED]["decoded"] = len(whole.step_s)
        return {**row, "method": cache.notes[0]} if cache.notes else row

    def _measured(
        self, cache: Any, peaks: PhasePeaks, warm_up: bool, rows: int, generation: Generation
    ) -> dict[str, Any]:
        self._warm = True
        return {
            "device": self.device_name,
            "dtype": self.dtype,
            "warm_up": warm_up,
            "batch_rows": rows,
            # a method's search is part of it; where nobody knows how long that takes, no more is known of the sum
            "ttft_s": None if cache.search_s is None else round(generation.ttft_s + cache.search_s, 6),
            "step_s": [round(step, 6) for step in generation.step_s],
            "stepping": generation.stepping,
            "capture_s": round(generation.capture_s, 6),
            "peak_bytes": peaks.row(),
            "attention": {
                "reads_packed": bool(cache.reads_packed),
                "path": str(cache.path),
                "prefill": str(cache.progress.prefill),
            },
        }

    def _row(
        self,
        sample: Sample,
        prompt: EncodedPrompt,
        generation: Generation,
        index: int,
        bill: dict[str, Any],
        measured: dict[str, Any],
    ) -> Row:
        tokens, finish = generation.tokens[index], generation.finish[index]
        nll = generation.answer_nll[index] if generation.answer_nll else None
        prediction = generation.text[index]
        speculated = {}
        measured = {**measured, "decoded": min(len(generation.step_s), len(tokens) - (finish != "eos"))}
        if generation.rounds:
            speculated = {"speculation": figures(generation.rounds, index)}
            times = [round(each, 6) for each in token_seconds(generation.rounds, index)]
            # a row's own tokens and their mean time; the batch's whole decode time is what throughput divides by
            measured |= {"step_s": times, "decoded": len(times), "decode_s": round(sum(generation.step_s), 6)}
        return {
            "id": sample.id,
            "task": sample.task,
            "length": sample.length,
            "prompt_tokens": len(prompt.ids),
            "truncated": prompt.removed,
            "prediction": prediction,
            "tokens": tokens,
            "finish": finish,
            **scored(self.task, sample, prediction),
            "nll": {"sum": finite(nll[0]), "n": int(nll[1])} if nll and nll[1] else None,
            "kv_bytes": bill,
            **speculated,
            **({"warm_up": True} if sample.meta.get("warm_up") else {}),
            # the first token comes from the prefill; the rest, and the EOS, took a decode step each or came of a round
            MEASURED: measured,
        }


def batches(samples: Iterable[Sample], size: int) -> Iterator[list[Sample]]:
    """Consecutive samples that share `max_new_tokens` and what ends them, at most `size` together."""
    batch: list[Sample] = []
    for sample in samples:
        alike = batch and _ending(sample) == _ending(batch[0])
        if batch and (not alike or len(batch) == size):
            yield batch
            batch = []
        batch.append(sample)
    if batch:
        yield batch


def _ending(sample: Sample) -> tuple[Any, ...]:
    return (
        sample.max_new_tokens,
        sample.stop,
        *(sample.meta.get(key) for key in ("end_text", "say_something", "warm_up")),
    )


def end_ids(sample: Sample, tokenizer: Any) -> list[int]:
    """Tokens that end the sample's answer beside the model's own: the last one of ``meta["end_text"]``."""
    text = sample.meta.get("end_text")
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])[-1:] if text else []


def own_limit(sample: Sample, model: ModelConfig) -> int | None:
    """Most prompt tokens: the data set's number for this model, else the model's; None: all there is room for."""
    by_model = sample.meta.get("prompt_limits") or {}
    limit = by_model.get(model.name, by_model.get(model.preset or "", sample.meta.get("prompt_limit")))
    return None if limit == "fill" else limit or model.prompt_limit


def sample_seed(seed: int, sample: Sample) -> int:
    """The seed of one sample's draws: the same whichever samples a session has left to do."""
    return zlib.crc32(f"{seed}/{sample.id}".encode())


def answer_ids(sample: Sample, tokenizer: Any) -> list[int]:
    """Token ids of the first reference answer as it follows the prompt; empty where there is none.

    ``meta["target"]`` is the exact continuation where the answer needs a leading space or a line break,
    ``meta["answer_ids"]`` the token ids themselves.
    """
    if "answer_ids" in sample.meta:
        return list(sample.meta["answer_ids"])
    text = sample.meta.get("target", sample.answers[0] if sample.answers else "")
    return list(tokenizer(text, add_special_tokens=False)["input_ids"]) if text else []


def row_bill(cache: Any, row: int, rows: int) -> dict[str, Any]:
    """Bytes of one sequence: those in use are its own, those reserved its part of the batch's buffers."""
    bill = cache.bill(row).as_dict()
    return {**bill, "reserved": {part: count // rows for part, count in bill["reserved"].items()}}
