"""Comparison of a cache's predictions with those of the full-precision cache, for samples of ``dataset=fidelity``."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kvbench.cache.options import Options
from kvbench.cache.prompts import Prompts
from kvbench.config.run_config import RunConfig
from kvbench.decoding.autoregressive import generate
from kvbench.decoding.fidelity import follow, simulate
from kvbench.decoding.head import Comparison, Head, digests
from kvbench.decoding.probe import layer_errors
from kvbench.errors import ConfigError, NonFiniteError
from kvbench.methods.base import QUERY_TOKENS, Method
from kvbench.methods.fp16 import FP16
from kvbench.models.load import LoadedModel
from kvbench.profiling.memory import PhasePeaks
from kvbench.results import code as codes
from kvbench.results.identity import content_digest, identity
from kvbench.results.samples import MEASURED, Row
from kvbench.runner import sources
from kvbench.runner.prompting import answer_ids, encode, end_ids, own_limit, pad, prompt_limit
from kvbench.runner.references import FOLDER, Reference, References, digest
from kvbench.runner.rows import Machine, head, row_bill
from kvbench.runner.scoring import scored
from kvbench.runner.strategy import Report
from kvbench.tasks.base import Sample, Task
from kvbench.tasks.fidelity import Fidelity
from kvbench.tasks.work import CompareTokens
from kvbench.util.progress import say

#: windows of a text that are decoded together, and the tokens that they may have together
WINDOWS, TOGETHER = 8, 16384
#: significant digits of the figures of a position in a row
DIGITS = 9


@dataclass(frozen=True)
class _Batch:
    """Prompts of a batch, and the tokens that are decoded after them.

    Args:
        input_ids: prompts ``[B, T]``, padded on the left.
        mask: attention mask ``[B, T]``; None: no padding.
        prompts: facts about the prompts, for the method; None for a text without a prompt.
        tokens: for each row, the given tokens after the prompt; None: fp16's own greedy answer.
        new_tokens: largest number of tokens after a prompt.
    """

    input_ids: Tensor
    mask: Tensor | None
    prompts: Prompts | None
    tokens: list[list[int]] | None
    new_tokens: int


@dataclass
class Comparisons:
    """Strategy that compares predictions, for samples whose work is :class:`kvbench.tasks.work.CompareTokens`.

    fp16's predictions are read from a file if they have been stored before; otherwise fp16 decodes the batch first.

    Args:
        config: configuration of the run. If the method is speculative, its cache is used without drafting.
        loaded: the loaded model.
        task: the data set. Its scorer is called with empty predictions.
        machine: names of the device and the dtype, which are copied into each row.
        options: kernels and back ends that the caches use.
    """

    config: RunConfig
    loaded: LoadedModel
    task: Task
    machine: Machine
    options: Options
    _checked: bool = field(default=False, init=False)

    def size(self, samples: Sequence[Sample]) -> int:
        """Return the number of samples per batch.

        Prompts run ``runtime.batch_size`` at a time. Windows of a text all have the same length, so more of them run
        together, because a step takes hardly longer: ``runtime.span_rows``, or :data:`WINDOWS` for ``auto``.

        Args:
            samples: the samples that are going to run.
        """
        runtime = self.config.runtime
        works = [sample.work for sample in samples if isinstance(sample.work, CompareTokens)]
        longest = max((len(work.ids) for work in works if work.ids is not None), default=0)
        if not longest:
            return runtime.batch_size
        if runtime.span_rows != "auto":
            return runtime.span_rows
        return max(runtime.batch_size, min(WINDOWS, TOGETHER // longest))

    def rows(self, samples: Sequence[Sample], *, first: bool, report: Report | None) -> list[Row]:
        """Compare the predictions for a batch; arguments as for :meth:`kvbench.runner.strategy.Strategy.rows`.

        Raises:
            ConfigError: a window of text is longer than the model's limit.
            ModelError: the model's final hidden states, or its output head, cannot be used.
            NonFiniteError: a final hidden state contains NaN or Inf.
        """
        groups = [list(group) for _, group in groupby(samples, key=_kind)]
        if len(groups) > 1:
            return [row for group in groups for row in self.rows(group, first=first, report=report)]
        work = work_of(samples[0])
        batch = self._batch(samples)
        references = self._references(samples, batch, report)
        tokens = [[int(token) for token in reference[0]] for reference in references]
        peaks = PhasePeaks(self.loaded.device, census=False)
        with peaks.run():
            states, cache = self._states(self.config.method.alone(), batch, tokens, work, report, samples[0].id)
        rows = []
        for index, sample in enumerate(samples):
            target, base, reference = references[index]
            count = len(target)
            _check_finite(sample.id, states[index][:count], base)
            compared = self.head.compare(
                base.to(self.loaded.device),
                states[index][:count],
                torch.as_tensor(target, device=self.loaded.device),
                work.statistics,
            )
            length = int(batch.input_ids.shape[1] if batch.mask is None else batch.mask[index].sum())
            row = {
                **head(sample, length, "window"),
                **scored(self.task, sample, ""),
                "nll": None,
                "fidelity": figures(compared, work, length) | {"reference": reference},
                "kv_bytes": row_bill(cache, index, len(samples)),
                MEASURED: self.machine.measured(
                    len(samples),
                    peaks.row(),
                    {"reads_packed": bool(cache.reads_packed), "path": str(cache.path)},
                    decoded=0,
                ),
            }
            if cache.notes:
                row["method"] = cache.notes[index]
            rows.append(row)
        del cache, states
        for index, (sample, row) in enumerate(zip(samples, rows, strict=True)):
            if work_of(sample).probe:
                row["fidelity"]["layers"] = self._probe(batch, index, tokens[index])
        return rows

    @cached_property
    def head(self) -> Head:
        """The model's output head in fp32."""
        return Head(self.loaded.model)

    # -- prompts ------------------------------------------------------------------------------------------------------

    def _batch(self, samples: Sequence[Sample]) -> _Batch:
        work = work_of(samples[0])
        return self._windows(samples) if work.ids is not None else self._prompts(samples, work)

    def _windows(self, samples: Sequence[Sample]) -> _Batch:
        works = [work_of(sample) for sample in samples]
        ids = torch.tensor([work.ids for work in works], device=self.loaded.device)
        width, longest = ids.shape[1], self.loaded.max_length
        if width > longest:
            raise ConfigError("dataset.window", width, f"exceeds the model's limit (model.max_length={longest})")
        prompt, count, decode = works[0].prefill, len(samples), self.loaded.tokenizer.decode
        # the text after the prompt takes the place of the question
        queries = [decode(row[prompt : prompt + QUERY_TOKENS].tolist()) for row in ids]
        prompts = Prompts([0] * count, [prompt] * count, [(0, prompt)] * count, queries, ids[:, :prompt], decode)
        if works[0].mode == "simulated":
            return _Batch(ids, None, None, ids[:, prompt + 1 :].tolist(), width - prompt)
        return _Batch(ids[:, :prompt], None, prompts, ids[:, prompt:].tolist(), width - prompt)

    def _prompts(self, samples: Sequence[Sample], work: CompareTokens) -> _Batch:
        model, longest, tokenizer = self.config.model, self.loaded.max_length, self.loaded.tokenizer
        new_tokens = self.config.decoding.max_new_tokens or samples[0].max_new_tokens
        room = prompt_limit(None, longest, new_tokens)
        encoded = [
            encode(
                sample,
                tokenizer,
                chat=model.chat,
                limit=prompt_limit(own_limit(sample, model), longest, new_tokens),
                room=room,
            )
            for sample in samples
        ]
        queries, sources_ = [sample.query for sample in samples], [sample.query_source for sample in samples]
        input_ids, mask, prompts = pad(
            encoded, queries, tokenizer.pad_token_id or 0, self.loaded.device, tokenizer.decode, sources_
        )
        tokens = None
        if work.answers == "task":
            tokens = [answer_ids(sample, tokenizer)[:new_tokens] for sample in samples]
        return _Batch(input_ids, mask, prompts, tokens, new_tokens)

    # -- fp16's predictions -------------------------------------------------------------------------------------------

    def _references(
        self, samples: Sequence[Sample], batch: _Batch, report: Report | None
    ) -> list[tuple[Any, Tensor, dict[str, Any]]]:
        """Return for each sample the tokens at its positions, fp16's states there, and where these come from."""
        work = work_of(samples[0])
        names = [self._name(batch, index, work) for index in range(len(samples))]
        stored: list[Reference | None] = [None] * len(samples)
        if work.reference == "stored":
            stored = [self.store.read(sample.id, name) for sample, name in zip(samples, names, strict=True)]
        source: dict[str, Any] = {"kind": work.reference, "device": self.machine.device, "dtype": self.machine.dtype}
        how = {key: getattr(self.config.runtime, key) for key in ("compile", "prefill_chunk")}
        if any(reference is None for reference in stored):
            # all rows of the batch, so that states of one batch have been made in one batch
            tokens, states = self._full_precision(samples, batch, work, report)
            for index, (sample, name) in enumerate(zip(samples, names, strict=True)):
                half = states[index].to(torch.float16).cpu().numpy()
                stored[index] = Reference(np.asarray(tokens[index], dtype=np.int64), half, len(samples), how)
                if work.reference == "stored":
                    self.store.write(sample.id, name, stored[index])  # type: ignore[arg-type]
            if work.reference == "live":
                source |= {"batch_rows": len(samples), **how}
                return [(tokens[index], states[index], source) for index in range(len(samples))]
        return [
            (
                reference.tokens,
                torch.from_numpy(reference.states),
                {**source, "batch_rows": reference.batch_rows, **reference.how},
            )
            for reference in stored
            if reference is not None
        ]

    def _full_precision(
        self, samples: Sequence[Sample], batch: _Batch, work: CompareTokens, report: Report | None
    ) -> tuple[list[list[int]], list[Tensor]]:
        """Decode with the full-precision cache; return the tokens at the positions of each row, and its states."""
        fp16, name = FP16(), f"{samples[0].id}, fp16"
        if batch.tokens is not None:
            tokens = batch.tokens
            states, _ = self._states(fp16, batch, tokens, work, report, name)
            return tokens, [row[: len(own)] for row, own in zip(states, tokens, strict=True)]
        answers, ended = self._answers(fp16, samples, batch)
        # one more step, whose prediction is the end of the answer
        fed = [[*own, 0] if end else own for own, end in zip(answers, ended, strict=True)]
        states, _ = self._states(fp16, batch, fed, work, report, name)
        own_states = []
        for own, end, row in zip(answers, ended, states, strict=True):
            if end:
                own.append(int(self.head.logits(row[len(own) : len(own) + 1]).argmax()))
            own_states.append(row[: len(own)].clone())
        return answers, own_states

    def _answers(self, fp16: Method, samples: Sequence[Sample], batch: _Batch) -> tuple[list[list[int]], list[bool]]:
        """Return fp16's greedy answer to each prompt, and whether it ended with an end-of-sequence token."""
        cache = self._new_cache(fp16, batch, batch.new_tokens)
        tokenizer, runtime, sample = self.loaded.tokenizer, self.config.runtime, samples[0]
        generation = generate(
            self.loaded.model,
            cache,
            batch.input_ids,
            batch.mask,
            max_new_tokens=batch.new_tokens,
            eos_token_ids=(*self.loaded.eos_token_ids, *end_ids(sample, tokenizer)),
            say_something=sample.say_something,
            stop=(*sample.stop, *self.config.decoding.stop),
            tokenizer=tokenizer,
            prefill_chunk=runtime.prefill_chunk,
            pad_token_id=tokenizer.pad_token_id or 0,
            graphs=runtime.graphs,
            compile=runtime.compile,
            prefill_rows=runtime.prefill_rows,
        )
        return [list(own) for own in generation.tokens], [finish == "eos" for finish in generation.finish]

    @cached_property
    def store(self) -> References:
        """The stored predictions of fp16 for this model, data set, device and dtype."""
        assert isinstance(self.task, Fidelity)
        model = dataclasses.asdict(self.config.model)
        data = {"identity": self.task.reference_identity()}
        plain = {"model": model, "method": {}, "decoding": self._decoding(), "runtime": {}}
        setting = identity(plain, data, self.config.model.folder(), say)["setting"]
        key = content_digest({"setting": setting, "device": self.machine.device, "dtype": self.machine.dtype})
        on_gpu = self.loaded.device.type == "cuda"
        stamp = {
            **digests(self.loaded.model),
            "dtype": self.machine.dtype,
            "device": self.machine.device,
            "code": codes.digest(codes.used(sources.shared(), on_gpu=on_gpu)),
        }
        return References(Path(self.config.runtime.results_dir) / FOLDER / key, stamp, say)

    def _decoding(self) -> dict[str, Any]:
        """Return the options of decoding on which fp16's answers depend."""
        return {"max_new_tokens": self.config.decoding.max_new_tokens, "stop": list(self.config.decoding.stop)}

    @staticmethod
    def _name(batch: _Batch, index: int, work: CompareTokens) -> str:
        """Return the digest of a row's prompt, and of the tokens after it if these are given."""
        start = 0 if batch.mask is None else int((batch.mask[index] == 0).sum())
        given = batch.tokens[index] if batch.tokens is not None else []
        return digest(batch.input_ids[index, start:].tolist(), given)

    # -- passes -------------------------------------------------------------------------------------------------------

    def _states(
        self,
        method: Method,
        batch: _Batch,
        tokens: Sequence[Sequence[int]],
        work: CompareTokens,
        report: Report | None,
        name: str,
    ) -> tuple[Tensor, Any]:
        """Return the final hidden states at all positions of a batch, ``[B, n, d]``, and the method's cache."""
        model, runtime = self.loaded.model, self.config.runtime
        if work.mode == "simulated":
            cache = self._new_cache(method, batch, 0)
            states, logits = simulate(model, cache, batch.input_ids)
            self._check(states[:, 0], logits)
            return states[:, work.prefill : -1], cache
        fed = max(0, max(map(len, tokens)) - 1)  # the last token is predicted, not decoded
        cache = self._new_cache(method, batch, fed)
        rows = [[*own[:fed], *[0] * (fed - len(own[:fed]))] for own in tokens]
        given = torch.tensor(rows, dtype=torch.long, device=self.loaded.device).view(len(rows), fed)

        def progress(done: int) -> None:
            if report is not None:
                report(len(rows) * done / max(1, fed), f"{name}: {done} of {fed} tokens")

        states, logits = follow(
            model,
            cache,
            batch.input_ids,
            batch.mask,
            given,
            prefill_chunk=runtime.prefill_chunk,
            prefill_rows=runtime.prefill_rows,
            graphs=runtime.graphs,
            compile=runtime.compile,
            report=progress,
        )
        self._check(states[:, 0], logits)
        return states, cache

    def _new_cache(self, method: Method, batch: _Batch, new_tokens: int) -> Any:
        length = batch.input_ids.shape[1] + new_tokens
        cache = method.new_cache(self.loaded.model, batch.prompts, max_length=length)
        cache.options = self.options
        return cache

    def _check(self, states: Tensor, logits: Tensor) -> None:
        """Check once that the head gives the logits that the model gave."""
        if not self._checked:
            self.head.check(states, logits)
            self._checked = True

    def _probe(self, batch: _Batch, index: int, tokens: Sequence[int]) -> dict[str, list[float]]:
        """Return the errors of each layer's attention for one row of a batch."""
        start = 0 if batch.mask is None else int((batch.mask[index] == 0).sum())
        ids = batch.input_ids[index : index + 1, start:]
        given = torch.tensor([list(tokens[:-1])], dtype=torch.long, device=ids.device)
        if not given.shape[1]:
            return {"own": [], "total": []}
        own = one_prompt(batch.prompts, index, ids)
        alone = _Batch(ids, None, own, None, given.shape[1])
        method = self.config.method.alone()
        errors = layer_errors(
            self.loaded.model,
            lambda: self._new_cache(FP16(), alone, given.shape[1]),
            lambda: self._new_cache(method, alone, given.shape[1]),
            ids,
            given,
        )
        return {name: [_short(x) for x in getattr(errors, name)] for name in ("own", "total")}


def one_prompt(prompts: Prompts | None, index: int, ids: Tensor) -> Prompts | None:
    """Return the facts about one prompt of a batch.

    Args:
        prompts: the batch's prompts; None without prompts.
        index: row of the prompt.
        ids: the prompt without padding, ``[1, T]``.
    """
    if prompts is None:
        return None

    def part(values: Any) -> Any:
        return None if values is None else [values[index]]

    return Prompts(
        [0],
        [prompts.lengths[index]],
        part(prompts.context_spans),
        part(prompts.queries),
        ids,
        prompts.decode,
        part(prompts.query_sources),
    )


def figures(compared: Comparison, work: CompareTokens, prompt: int) -> dict[str, Any]:
    """Return what a row holds under the key ``fidelity`` (:mod:`kvbench.results.fidelity` folds it).

    Args:
        compared: the comparison at all positions of a sample.
        work: the sample's work.
        prompt: number of tokens of the exact prefill.
    """
    positions, decoded = compared.positions, work.mode == "decode"
    begin = 1 if decoded else 0  # position 0 was predicted by the prefill
    row: dict[str, Any] = {
        "mode": work.mode,
        "statistics": work.statistics,
        "prefill": prompt if decoded else work.prefill,
        "answers": None if work.ids is not None else work.answers,
        "first": None,
        "left": None,
        "other_top": [int(k) for k in np.flatnonzero(~positions.same_top) if k >= begin],
    }
    for name in ("kld", "change", "nll_base", "nll"):
        row[name] = [_short(x) for x in getattr(positions, name)[begin:]]
    if decoded and len(positions.kld):
        row["first"] = {
            "kld": _short(positions.kld[0]),
            "change": _short(positions.change[0]),
            "same_top": bool(positions.same_top[0]),
        }
    if work.ids is None and work.answers == "fp16":
        changed = np.flatnonzero(~positions.same_top)
        at = int(changed[0]) if len(changed) else None
        row["left"] = {
            "at": at,
            "compared": len(positions.kld),
            "gap": None if at is None else _short(compared.gap[at]),
        }
    return row


def work_of(sample: Sample) -> CompareTokens:
    """Return the work of a sample: the tokens to decode, and how to compare the predictions."""
    assert isinstance(sample.work, CompareTokens)
    return sample.work


def _kind(sample: Sample) -> tuple[object, ...]:
    """Return what the samples of a batch have in common."""
    work = work_of(sample)
    return None if work.ids is None else len(work.ids), work.prefill, work.mode


def _check_finite(name: str, *states: Tensor) -> None:
    """Raise NonFiniteError if a final hidden state contains NaN or Inf; a divergence would be no number then."""
    if not all(bool(torch.isfinite(part).all()) for part in states):
        raise NonFiniteError(
            f"{name}: a final hidden state of the model contains NaN or Inf.\n"
            "  hint: set model.dtype=float32; if the error remains, the weights are damaged"
        )


def _short(number: Any) -> float:
    return float(f"{float(number):.{DIGITS}g}")
