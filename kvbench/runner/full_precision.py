"""fp16's predictions for samples of ``dataset=fidelity``."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kvbench.config.run_config import RunConfig
from kvbench.decoding.autoregressive import generate
from kvbench.decoding.head import digests
from kvbench.methods.base import Method
from kvbench.methods.fp16 import FP16
from kvbench.models.load import LoadedModel
from kvbench.results import code as codes
from kvbench.results.identity import content_digest, identity
from kvbench.runner import sources
from kvbench.runner.fidelity_batch import FidelityBatch, Passes, work_of
from kvbench.runner.prompting import end_ids
from kvbench.runner.references import FOLDER, Reference, References
from kvbench.runner.rows import Machine, Report
from kvbench.tasks.base import Sample, Task
from kvbench.tasks.fidelity import Fidelity
from kvbench.tasks.work import CompareTokens
from kvbench.util.progress import say


@dataclass
class FullPrecision:
    """fp16's predictions: read from files if they have been stored before, otherwise decoded with the exact cache."""

    config: RunConfig
    loaded: LoadedModel
    task: Task
    machine: Machine
    passes: Passes

    def references(
        self, samples: Sequence[Sample], batch: FidelityBatch, report: Report | None
    ) -> list[tuple[Any, Tensor, dict[str, Any]]]:
        """Return for each sample the next token and fp16's final hidden state at each position, and their origin.

        The origin records how the states were made (:class:`kvbench.results.record_scores.Source`). The samples are all
        windows of a text or all prompts; `batch` is made from them. `report` shows the progress, or is None.
        """
        work = work_of(samples[0])
        names = [batch.name(index) for index in range(len(samples))]
        stored: list[Reference | None] = [None] * len(samples)
        if work.reference == "stored":
            stored = [self.store.read(sample.id, name) for sample, name in zip(samples, names, strict=True)]
        source: dict[str, Any] = {"kind": work.reference, "device": self.machine.device, **self._dtypes()}
        how = {key: getattr(self.config.runtime, key) for key in ("compile", "prefill_chunk")}
        if any(reference is None for reference in stored):
            # all rows of the batch, so that states of one batch have been made in one batch
            tokens, states = self._decoded(samples, batch, work, report)
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

    def _decoded(
        self, samples: Sequence[Sample], batch: FidelityBatch, work: CompareTokens, report: Report | None
    ) -> tuple[list[list[int]], list[Tensor]]:
        """Decode with the full-precision cache; return next tokens and final hidden states at each row's positions."""
        fp16, name = FP16(), f"{samples[0].id}, fp16"
        if batch.tokens is not None:
            tokens = batch.tokens
            states, _ = self.passes.states(fp16, batch, tokens, work, report, name)
            return tokens, [row[: len(own)] for row, own in zip(states, tokens, strict=True)]
        answers, ended = self._answers(fp16, samples, batch)
        # one more step, whose prediction is the end of the answer
        fed = [[*own, 0] if end else own for own, end in zip(answers, ended, strict=True)]
        states, _ = self.passes.states(fp16, batch, fed, work, report, name)
        own_states = []
        for own, end, row in zip(answers, ended, states, strict=True):
            if end:
                own.append(int(self.passes.head.logits(row[len(own) : len(own) + 1]).argmax()))
            own_states.append(row[: len(own)].clone())
        return answers, own_states

    def _answers(
        self, fp16: Method, samples: Sequence[Sample], batch: FidelityBatch
    ) -> tuple[list[list[int]], list[bool]]:
        """Return fp16's greedy answer to each prompt, and whether it ended with an end-of-sequence token."""
        cache = self.passes.new_cache(fp16, batch, batch.new_tokens)
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
        key = content_digest({"setting": setting, "device": self.machine.device, **self._dtypes()})
        on_gpu = self.loaded.device.type == "cuda"
        stamp = {
            **digests(self.loaded.model),
            **self._dtypes(),
            "device": self.machine.device,
            "code": codes.code_digest(codes.used(sources.shared_code(), None, on_gpu=on_gpu)),
        }
        return References(Path(self.config.runtime.results_dir) / FOLDER / key, stamp, say)

    def _dtypes(self) -> dict[str, str]:
        """Return the dtypes on which the predictions depend: storage, and arithmetic if it differs from storage."""
        named = self.machine.dtypes()
        differs = named["arithmetic"] != named["dtype"]
        return {key: named[key] for key in ("dtype", *(["arithmetic"] if differs else []))}

    def _decoding(self) -> dict[str, Any]:
        """Return the options of decoding on which fp16's answers depend."""
        return {"max_new_tokens": self.config.decoding.max_new_tokens, "stop": list(self.config.decoding.stop)}
