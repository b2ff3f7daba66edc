"""Answers to several questions about one text, which is cached once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from kvbench.cache.progress import Options
from kvbench.config.run_config import RunConfig
from kvbench.decoding.autoregressive import Generation
from kvbench.decoding.questions import ask, spoken
from kvbench.decoding.sampling import Sampling
from kvbench.models.load import LoadedModel
from kvbench.profiling.memory import PhasePeaks
from kvbench.results.samples import MEASURED, Row
from kvbench.runner.answers import answer_row, generation_figures
from kvbench.runner.prompting import encode_prompt, pad, prompt_limit, sample_seed
from kvbench.runner.rows import Machine, Report, row_bill
from kvbench.tasks.base import PromptRules, Sample, Task
from kvbench.tasks.work import AskQuestions


@dataclass(frozen=True)
class SharedTexts:
    """Strategy that asks several questions about one text, for samples with :class:`kvbench.tasks.work.AskQuestions`.

    The text is cached once, and each question is answered on a copy of this cache, unless the sample asks for turns of
    a conversation or for a new cache for each question. The bytes of a row are those of the last cache.
    """

    config: RunConfig
    loaded: LoadedModel
    task: Task
    machine: Machine
    options: Options

    def rows(self, samples: Sequence[Sample], *, first: bool, report: Report | None) -> list[Row]:
        """Answer all questions of each sample; arguments as for :meth:`kvbench.runner.rows.Strategy.rows`."""
        return [self._row(sample, first and not index) for index, sample in enumerate(samples)]

    def _row(self, sample: Sample, first: bool) -> Row:
        work = sample.work
        assert isinstance(work, AskQuestions)
        decoding, runtime, tokenizer = self.config.decoding, self.config.runtime, self.loaded.tokenizer
        new_tokens = decoding.max_new_tokens or sample.max_new_tokens

        def tokens(text: str) -> list[int]:
            return list(tokenizer(text, add_special_tokens=False)["input_ids"])

        asked = [tokens(question.prompt) for question in work.questions]
        answers = [tokens(question.continuation) for question in work.questions]
        answer_lengths = [new_tokens if work.history == "own" else len(answer) for answer in answers]
        # tokens after the shared text: of the longest question, or of all turns
        longest = max(map(len, asked)) if work.turns == "separate" else sum(map(len, asked)) + sum(answer_lengths)
        room = prompt_limit(self.config.model.prompt_limit, self.loaded.max_length, new_tokens)
        limit = None if room is None else room - longest
        shared = replace(sample, prompt=sample.prompt[: work.shared], rules=PromptRules(chat=False))
        prompt = encode_prompt(shared, tokenizer, limit=limit)
        parts, begun = [slice(None)], prompt
        if work.turns == "anew":  # each question on a cache of its own, with the turns before it in the prompt
            parts = [slice(index, index + 1) for index in range(len(asked))]
        peaks = PhasePeaks(self.loaded.device, census=first)
        generations: list[Generation] = []
        with peaks.run():
            for chosen in parts:
                input_ids, _, prompts = pad([begun], [sample.query], 0, self.loaded.device, tokenizer.decode)
                length = len(prompt.ids) + longest + new_tokens
                cache = self.config.method.new_cache(self.loaded.model, prompts, max_length=length)
                cache.options = self.options
                generations += ask(
                    self.loaded.model,
                    cache,
                    input_ids,
                    asked[chosen],
                    answers=answers[chosen],
                    max_new_tokens=new_tokens,
                    sampling=Sampling(
                        decoding.temperature, decoding.top_p, [sample_seed(runtime.seed, sample)], decoding.top_k
                    ),
                    eos_token_ids=self.loaded.eos_token_ids,
                    stop=(*sample.stop, *decoding.stop),
                    tokenizer=tokenizer,
                    prefill_chunk=runtime.prefill_chunk,
                    observer=peaks,
                    turns=work.history if work.turns == "stored" else None,
                )
                if work.turns == "anew":
                    own = work.history == "own"
                    answer = spoken(generations[-1], tokenizer) if own else answers[chosen.start]
                    begun = replace(begun, ids=(*begun.ids, *asked[chosen.start], *answer))
        whole = join_generations(generations)
        measured = generation_figures(self.machine, cache, peaks, first, 1, whole)
        row = answer_row(self.task, sample, prompt, whole, 0, row_bill(cache, 0, 1), measured)
        if not whole.rounds:
            row[MEASURED]["decoded"] = len(whole.step_s)
        return {**row, "method": cache.notes[0]} if cache.notes else row


def join_generations(generations: Sequence[Generation]) -> Generation:
    """Join the answers to all questions about one text into a single :class:`Generation` with one row.

    Tokens and step times are concatenated, negative log-likelihoods are summed, and texts are joined by line feeds. The
    time to first token and the number of prompt tokens are those of the first question. `finish` is ``length`` if any
    answer reached the maximum length.
    """
    first = generations[0]
    return Generation(
        tokens=[[token for generation in generations for token in generation.tokens[0]]],
        text=["\n".join(generation.text[0] for generation in generations)],
        finish=["length" if any(generation.finish[0] == "length" for generation in generations) else first.finish[0]],
        ttft_s=first.ttft_s,
        step_s=[step for generation in generations for step in generation.step_s],
        prompt_tokens=first.prompt_tokens,
        answer_nll=[tuple(map(sum, zip(*(g.answer_nll[0] for g in generations), strict=True)))],  # type: ignore[list-item]
        rounds=[speculation for generation in generations for speculation in generation.rounds],
        stepping="eager (several questions on one cache)",
    )
