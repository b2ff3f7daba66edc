"""Data sets of long answers and long contexts: AIME, MATH-500, GPQA-diamond, LongBench v2, LiveCodeBench and MRCR.

Prompts and scores are those of the data sets' authors, or of the harness whose numbers are cited
(:mod:`kvbench.metrics.reasoning` names versions). Temperature, top-p and the number of tokens of the studies that use
them are presets in conf/experiment/long.

Each problem can be answered several times, with tokens drawn anew: :attr:`LongAnswers.repeats`. Each answer is a
sample, so that a run resumes at the answer, and its seed follows from its name. The score is then avg@n, and its error
is by problem.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, ClassVar, Literal

from kvbench.errors import ConfigError, DataError
from kvbench.metrics.answers import LETTERS, Metric
from kvbench.metrics.reasoning import without_thinking
from kvbench.tasks import data
from kvbench.tasks.base import Sample, Setup
from kvbench.tasks.from_records import Records
from kvbench.tasks.records import FILLED_TEXT, Record, check_record, is_text
from kvbench.tasks.template import Entry, Template
from kvbench.tasks.work import ReasonThenAnswer
from kvbench.util.schema import MOST_TOKENS, bounded


@dataclass(frozen=True, kw_only=True)
class LongAnswers(Records):
    """A data set of problems with long answers, described by a YAML file: AIME (metric ``aime``), MATH-500 (``math``).

    Other fields are those of :class:`Records`.

    Args:
        repeats: number of answers to each problem; several need a temperature above 0.
    """

    long_answers: ClassVar[bool] = True
    removes_thinking: ClassVar[bool] = True

    metric: Metric = "aime"
    repeats: int = bounded(1, minimum=1, maximum=1024)
    stop: tuple[str, ...] = ()
    truncation: Literal["middle", "refuse"] = "refuse"
    max_new_tokens: int = bounded(32_768, minimum=1, maximum=MOST_TOKENS)

    def check(self) -> None:
        """Raise ConfigError as :meth:`Records.check`, and if few-shot examples are asked for."""
        super().check()
        if self.shots:
            raise ConfigError("dataset.shots", self.shots, "these problems are given without examples", allowed="0")

    def fits(self, config: Setup) -> None:
        """Raise ConfigError if several answers to a problem would be equal, because decoding is greedy."""
        if self.repeats > 1 and not config.decoding.temperature:
            raise ConfigError(
                "dataset.repeats",
                self.repeats,
                "would repeat the same answer, because decoding is greedy (decoding.temperature=0)",
                hint="decoding.temperature=0.6 decoding.top_p=0.95 decoding.top_k=20, or dataset.repeats=1",
            )

    def samples(self) -> Iterator[Sample]:
        """Yield the first answers to all problems, then the second ones, and so on; `limit` counts problems."""
        for repeat in range(self.repeats):
            for index, sample in enumerate(super().samples()):
                entry = self.entries[self.split][index]
                name, sample = sample.id, self.finished(sample, entry, index, repeat)
                yield sample if self.repeats == 1 else replace(sample, id=f"{name}~{repeat}", problem=name)

    def finished(self, sample: Sample, entry: Entry, index: int, repeat: int) -> Sample:
        """Return a sample with what the data set adds to it; `index` is the problem, `repeat` the answer, from 0."""
        return sample

    def score(self, sample: Sample, prediction: str) -> dict[str, float]:
        """Score an answer without its thinking (:func:`kvbench.metrics.reasoning.without_thinking`), by any metric."""
        return super().score(sample, without_thinking(prediction))

    def identity(self) -> dict[str, Any]:
        """Return the identity of :meth:`Records.identity`, with the number of answers to each problem."""
        return {**super().identity(), "target": "reasoning", "repeats": self.repeats}


#: the prompt of simple-evals for multiple choice
_CHOICES = """Answer the following multiple choice question. The last line of your response should be of the following \
format: 'Answer: $LETTER' (without quotes) where LETTER is one of ABCD. Think step by step before answering.

{question}

A) {options[0]}
B) {options[1]}
C) {options[2]}
D) {options[3]}"""


@dataclass(frozen=True, kw_only=True)
class GPQA(LongAnswers):
    """GPQA-diamond (Rein et al. 2023): 198 questions by experts, with four options in simple-evals' order.

    The data set is gated, and its authors ask that no example be shown in plain text. All samples are private: results
    hold sealed answers (:func:`kvbench.results.samples.sealed`) and no prompts, and errors quote no field.
    """

    FIELDS: ClassVar[tuple[str, ...]] = (
        "Question",
        "Correct Answer",
        *(f"Incorrect Answer {n}" for n in (1, 2, 3)),
    )

    name: str = "gpqa_diamond"
    template: str = "{Question}"
    answer: str = "Correct Answer"
    metric: Metric = "gpqa"
    split: str = "gpqa_diamond"

    def entry(self, record: Record, place: str) -> Entry:
        """Return a question with its options in the order of the file, the right one first."""
        for name in self.FIELDS:
            if not is_text(record.get(name)) or not record[name].strip():
                raise DataError(f"{place}: the record has no text in the field '{name}'.")
        return Entry(record["Question"], None, "", ("A",), {name: record[name] for name in self.FIELDS}, 4)

    def finished(self, sample: Sample, entry: Entry, index: int, repeat: int) -> Sample:
        """See :meth:`LongAnswers.finished`: each answer to a question sees its options in an order of its own."""
        order = self._orders[repeat * len(self.entries[self.split]) + index]
        options = [entry.record[self.FIELDS[1 + place]] for place in order]
        prompt = _CHOICES.format(question=entry.record["Question"], options=options)
        letter = LETTERS[order.index(0)]
        return replace(sample, prompt=prompt, answers=(letter,), target=f"Answer: {letter}", private=True)

    @cached_property
    def _orders(self) -> list[list[int]]:
        draw = random.Random(0)
        return [draw.sample(range(4), 4) for _ in range(self.repeats * len(self.entries[self.split]))]

    def identity(self) -> dict[str, Any]:
        """Return the identity of :meth:`LongAnswers.identity`, with a checksum of questions and options."""
        records = [entry.record for entry in self.entries[self.split]]
        return {**super().identity(), "options": data.records_fingerprint(records, self.FIELDS)}


@dataclass(frozen=True, kw_only=True)
class LongBenchV2(LongAnswers):
    """LongBench v2 (Bai et al. 2024): 503 questions with four options about texts of 8k to 2M words.

    Scores are given for all questions and, as variants, by difficulty (``easy``, ``hard``) and by length (``short``,
    ``medium``, ``long``).

    Args:
        prompt_limit: maximum number of tokens of a prompt before chat formatting is added; a longer one loses tokens
            from its middle, as in the official code. ``fill`` allows what the model holds.
        answer_template: template of a second prompt, which asks for the answer after reasoning (`template`); its
            ``{reasoning}`` is the model's answer to the first one. The official code leaves the text out of it. None:
            one prompt, without reasoning.
        answer_tokens: maximum number of tokens of the answer to the second prompt.
    """

    COUNTS: ClassVar[dict[str, int]] = {"easy": 192, "hard": 311, "short": 180, "medium": 215, "long": 108}

    name: str = "longbench_v2"
    metric: Metric = "longbench_v2"
    context: str | None = "context"
    query: str | None = "question"
    split: str = "train"
    prompt_limit: int | Literal["fill"] = bounded(120_000, minimum=16, maximum=MOST_TOKENS)
    max_new_tokens: int = bounded(128, minimum=1, maximum=MOST_TOKENS)
    answer_template: str | None = None
    answer_tokens: int = bounded(128, minimum=1, maximum=MOST_TOKENS)

    def check(self) -> None:
        """Raise ConfigError as :meth:`LongAnswers.check`, and if the second prompt does not quote the reasoning."""
        super().check()
        second = self._second
        if second is not None and second.fields.count("reasoning") != 1:
            raise ConfigError(
                "dataset.answer_template",
                self.answer_template,
                "must contain {reasoning} exactly once",
                hint="write {reasoning} where the model's reasoning is to stand",
            )

    @cached_property
    def _second(self) -> Template | None:
        return None if self.answer_template is None else Template.parse(self.answer_template, "dataset.answer_template")

    def fits(self, config: Setup) -> None:
        """Raise ConfigError if the model holds less than the official prompts, and the limit was not changed.

        Also if the answer to a second prompt would leave no room for it.
        """
        super().fits(config)
        check_context(config, self.prompt_limit, self.max_new_tokens, "dataset.prompt_limit", "fill")
        most, fixed = config.model.max_length, config.decoding.max_new_tokens
        if self._second is not None and not fixed and self.answer_tokens >= most:
            problem = f"leaves no room for a prompt, because model.max_length={most}"
            raise ConfigError("dataset.answer_tokens", self.answer_tokens, problem, allowed=f"at most {most - 1}")

    def read(self) -> dict[str, list[Entry]]:
        """See :meth:`Records.read`. Raises DataError if a file of the hub has other numbers of questions by kind."""
        entries = super().read()
        records = [entry.record for entry in entries[self.split]]
        counts = {kind: sum(kind in (r["difficulty"], r["length"]) for r in records) for kind in self.COUNTS}
        if self.path is None and counts != self.COUNTS:
            raise DataError(
                f"dataset {self.name}: the numbers of questions are {counts}; expected {self.COUNTS}.\n"
                "  hint: set dataset.source.revision to a commit with the original questions"
            )
        return entries

    def entry(self, record: Record, place: str) -> Entry:
        """See :meth:`Records.entry`; texts are stripped, as in the official code."""
        check_record(record, dict.fromkeys(("difficulty", "length", "context"), FILLED_TEXT), place)
        stripped = {name: value.strip() if isinstance(value, str) else value for name, value in record.items()}
        for name, allowed in (("difficulty", ("easy", "hard")), ("length", ("short", "medium", "long"))):
            if stripped[name] not in allowed:
                raise DataError(f"{place}: field '{name}' is {stripped[name]!r}; expected {' or '.join(allowed)}.")
        return super().entry(stripped, place)

    def finished(self, sample: Sample, entry: Entry, index: int, repeat: int) -> Sample:
        """See :meth:`LongAnswers.finished`."""
        kinds = [entry.record["difficulty"], entry.record["length"]]
        rules = replace(sample.rules, limit=self.prompt_limit)
        if self._second is not None:
            text, spans = self._second.render(entry.record, sample.id, {"reasoning": ""})
            start = spans["reasoning"][0]
            sample = replace(sample, work=ReasonThenAnswer(text[:start], text[start:], self.answer_tokens))
        return replace(sample, rules=rules, truncation="longbench", meta={"kinds": kinds})

    def identity(self) -> dict[str, Any]:
        """Return the identity of :meth:`LongAnswers.identity`, with the limit of prompts and the second prompt."""
        names = () if self.answer_template is None else ("answer_template", "answer_tokens")
        second_prompt = {name: getattr(self, name) for name in names}
        return {**super().identity(), "prompt_limit": self.prompt_limit, **second_prompt}

    def score(self, sample: Sample, prediction: str) -> dict[str, float]:
        """Return ``score``, ``compensated``, and the score again under the question's difficulty and length."""
        scores = super().score(sample, prediction)
        return scores | dict.fromkeys(sample.meta["kinds"], scores["score"])


@dataclass(frozen=True, kw_only=True)
class LiveCodeBench(LongAnswers):
    """LiveCodeBench's output prediction (Jain et al. 2024): complete the assertion of a test case; no code is run.

    The prompt is that of the authors' code at 99affe60, for chat models.
    """

    FIELDS: ClassVar[tuple[str, ...]] = ("question_content", "starter_code", "function_name", "test")

    name: str = "livecodebench"
    template: str = "{question_content}"
    answer: str = "test"
    metric: Metric = "livecodebench"
    max_new_tokens: int = bounded(1200, minimum=1, maximum=MOST_TOKENS)

    def entry(self, record: Record, place: str) -> Entry:
        """Return the prompt of a record, and its expected output as JSON.

        Raises:
            DataError: a field is missing or empty, or ``test`` is not a JSON list with an input and a JSON output.
        """
        check_record(record, dict.fromkeys(self.FIELDS, FILLED_TEXT), place)
        try:
            case = json.loads(record["test"])[0]
            given, expected = case["input"], case["output"]
            if not (is_text(given) and is_text(expected)):
                raise ValueError("no text that UTF-8 can hold")
            json.loads(expected)
            call = f"assert {record['function_name']}({', '.join(given.split(chr(10)))}) == # TODO"
        except (ValueError, TypeError, LookupError, AttributeError, RecursionError) as error:
            raise DataError(
                f"{place}: field 'test' is not a JSON list that begins with an input and an output ({error})."
            ) from error
        prompt = (
            f"Problem:\n{record['question_content']}Function:\n```\n{record['starter_code']}\n```\n"
            f"Please complete the following test case:\n\n```\n{call}\n```\n"
        )
        return Entry(prompt, None, "", (expected,), record)


def check_context(config: Setup, wanted: int | str, new: int, key: str, instead: str | None) -> None:
    """Raise ConfigError if the model holds less than `wanted` tokens of a prompt and `new` ones of the answer."""
    if isinstance(wanted, str) or wanted + new <= config.model.max_length:
        return
    hint = "choose a model with a longer context" + ("" if instead is None else f", or set {key}={instead}")
    problem = f"exceeds what the model holds (model.max_length={config.model.max_length})"
    raise ConfigError(key, wanted, problem, hint=hint)
