"""A user's data set without Python: a file of records, a template over their fields, and a metric.

For example::

    python -m kvbench dataset=records dataset.path=my.jsonl "dataset.template='Q: {question} A:'" dataset.metric=f1
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal

from kvbench.errors import ConfigError, DataError
from kvbench.metrics import answers, gsm8k, math_check
from kvbench.metrics.answers import LETTERS, Metric
from kvbench.metrics.reasoning import RULES, wanted_reference
from kvbench.tasks import data
from kvbench.tasks.base import PromptRules, Sample, Task, check_shots
from kvbench.tasks.data import HubSource, Record
from kvbench.tasks.records import FILLED_TEXT
from kvbench.tasks.template import Entry, Template, choice_options, correct, lettered_options, lookup, text_of
from kvbench.util.progress import say
from kvbench.util.requirements import Package
from kvbench.util.schema import MOST, MOST_TOKENS, bounded


@dataclass(frozen=True, kw_only=True)
class Records(Task):
    r"""Data set that a user defines without Python: a file of records, a prompt template and a metric.

    Args:
        path: a file of records (.jsonl, .json, .csv, .parquet, also .gz), or a folder or archive with one file per
            split; None reads from the hub.
        split: the split whose records become samples.
        template: the prompt, with names of the record's fields in braces: ``Question: {question}\nAnswer:``. A dot
            leads into a nested field, and ``|`` separates alternative names: ``{question.stem|question_stem}``.
        context: field or template of the context, which Cocktail quantizes chunk by chunk. `template` must contain it
            once, as ``{context}`` or under the field's own name. None if the prompt has no separate context.
        query: field or template of the question, with which Cocktail searches the context. `template` may contain it as
            ``{query}``. None if the prompt has no separate question.
        answer: field that holds the answer: a text, a number, or a list of these, each of which is accepted.
        metric: ``exact_match`` (ignoring case, quotes and final punctuation), ``f1`` (over words, as in SQuAD and
            LongBench), ``rouge`` (ROUGE-Lsum with stemming), ``regex`` (exact match of what `pattern` extracts),
            ``choice`` (the letter of an option), ``gsm8k`` (the number after ``####``, strict and flexible), or a rule
            for long answers (:mod:`kvbench.metrics.reasoning`): ``aime``, ``math``, ``gpqa``, ``longbench_v2`` or
            ``livecodebench``.
        pattern: regular expression with one group, for the metric ``regex``. The text that the group matches is
            compared, in the model's answer and in each reference answer that the pattern matches.
        choices: field that holds the options, for the metric ``choice``: a list of texts, or labels and texts in the
            form of ARC and OpenBookQA. `template` may contain ``{choices}``, one option per line with its letter. None
            if the prompt already contains the options; `answer` then holds a letter.
        shots: number of few-shot examples before the question.
        examples: split from which the examples are taken.
        order: ``first`` uses the first records of `examples` for all questions; ``sampled`` draws records at random for
            each question.
        shots_seed: seed of the random draws.
        separator: text after each example.
        limit: number of samples, taken from the beginning of the split; None for all.
        stop: strings at which an answer ends.
        chat: True to put the prompt into the model's chat wrapper.
        system: text of a system turn; None for no such turn.
        truncation: ``middle`` removes tokens from the middle of a prompt that is too long; ``refuse`` raises an error.
    """

    version = 1
    scorer_version = 1

    name: str = "records"
    path: str | None = None
    source: HubSource = field(default_factory=HubSource)
    split: str = "test"
    template: str = ""
    context: str | None = None
    query: str | None = None
    answer: str = "answer"
    metric: Metric = "exact_match"
    pattern: str | None = None
    choices: str | None = None
    shots: int = bounded(0, minimum=0, maximum=64)
    examples: str = "train"
    order: Literal["first", "sampled"] = "first"
    shots_seed: int = bounded(1234, minimum=0, maximum=MOST)
    separator: str = "\n\n"
    limit: int | None = bounded(None, minimum=1)
    max_new_tokens: int = bounded(64, minimum=1, maximum=MOST_TOKENS)
    stop: tuple[str, ...] = ("\n",)
    chat: bool = True
    system: str | None = None
    truncation: Literal["middle", "refuse"] = "middle"

    @property
    def removes_thinking(self) -> bool:  # type: ignore[override]
        """True if the metric leaves out a reasoning model's thinking (:attr:`Task.removes_thinking`)."""
        return self.metric in RULES

    # -- configuration -----------------------------------------------------------------------------------------------

    def check(self) -> None:
        """Raise ConfigError for an invalid template or pattern, a missing value, or incompatible options."""
        self.source.check()
        if self.path is None and self.source.hub_id is None:
            raise ConfigError("dataset.path", None, "no file with records is given", hint="dataset.path=FILE.jsonl")
        if not self.template.strip():
            raise ConfigError(
                "dataset.template",
                self.template,
                "is empty",
                hint="dataset.template=\"'Question: {question} Answer:'\"",
            )
        if not self._template.fields:
            raise ConfigError(
                "dataset.template",
                self.template,
                "contains no field, so all prompts would be identical",
                hint="add a field, such as {question}",
            )
        if self._context is not None and self._template.fields.count(self._place_of_context) != 1:
            raise ConfigError(
                "dataset.context",
                self.context,
                f"must occur exactly once in dataset.template, as {{{self._place_of_context}}}",
                allowed=[f"{{{name}}}" for name in self._template.fields],
            )
        if any(not stop for stop in self.stop):
            raise ConfigError(
                "dataset.stop", list(self.stop), "contains an empty string, which would end every answer immediately"
            )
        if not self.answer.strip():
            raise ConfigError("dataset.answer", self.answer, "must not be empty")
        for key in ("split", "examples"):
            data.check_split(f"dataset.{key}", getattr(self, key))
        self._check_metric()

    def _check_metric(self) -> None:
        if (self.metric == "regex") != (self.pattern is not None):
            raise ConfigError(
                "dataset.pattern",
                self.pattern,
                f"must be set if and only if dataset.metric=regex, but here dataset.metric={self.metric}",
                hint=r"set both, for example dataset.metric=regex dataset.pattern='#### (-?\d+)'",
            )
        if self.choices is not None and self.metric != "choice":
            raise ConfigError("dataset.choices", self.choices, f"has no effect with dataset.metric={self.metric}")
        if self.pattern is not None:
            try:
                groups = re.compile(self.pattern).groups
            except re.error as error:
                raise ConfigError(
                    "dataset.pattern", self.pattern, f"is not a valid regular expression: {error}"
                ) from error
            if groups != 1:
                raise ConfigError(
                    "dataset.pattern",
                    self.pattern,
                    f"has {groups} capturing groups",
                    allowed="exactly one group, around the part of the text to compare; write other groups as (?:...)",
                )

    def packages(self) -> tuple[Package, ...]:
        """Return the package that computes the metric, if it needs one."""
        needed = {"rouge": ("rouge_score", "rouge-score"), "math": ("math_verify", "'kvbench[math]'")}.get(self.metric)
        if needed is None:
            return ()
        module, wanted = needed
        return (Package(module, "dataset.metric", self.metric, f"run pip install {wanted}"),)

    @cached_property
    def _template(self) -> Template:
        return Template.parse(self.template, "dataset.template")

    @cached_property
    def _context(self) -> Template | None:
        return None if self.context is None else Template.of(self.context, "dataset.context")

    @cached_property
    def _query(self) -> Template | None:
        return None if self.query is None else Template.of(self.query, "dataset.query")

    @property
    def _place_of_context(self) -> str:
        """Name of the placeholder in `template` that stands for the context."""
        assert self._context is not None and self.context is not None
        return self.context if self.context in self._template.fields else "context"

    # -- records -----------------------------------------------------------------------------------------------------

    @cached_property
    def entries(self) -> dict[str, list[Entry]]:
        """The prompts of each split, without few-shot examples; the files are read on first use (:meth:`read`)."""
        return self.read()

    def read(self) -> dict[str, list[Entry]]:
        """Read the records of all needed splits, and return them as prompts without few-shot examples, by split.

        Raises:
            DataError: a file or a record cannot be read, or examples are wanted but `path` is a single file.
            ConfigError: the split with the examples has fewer records than `shots`.
        """
        what = f"dataset {self.name}"
        if self.shots and self.path is not None and data.is_single(self.path):
            raise DataError(
                f"{what}: dataset.shots={self.shots} takes examples from the split '{self.examples}', but "
                f"dataset.path={self.path} is a single file.\n"
                f"  hint: name a folder with files for {self.examples} and {self.split}, or set dataset.shots=0"
            )
        endings = (*data.ENDINGS, ".csv", ".csv.gz")
        files = {
            split: data.find_records(self.source, split, self.path, what, endings=endings) for split in self._splits
        }
        splits = {
            split: [self.entry(record, place) for place, record in data.placed_records(file)]
            for split, file in files.items()
        }
        if repeated := self._repeated(splits[self.split]):
            first, again = repeated[0]
            say(
                f"{what}: {len(repeated)} of {len(splits[self.split])} records of '{self.split}' repeat an earlier one "
                f"(record {again} is record {first}, counted from 0); each counts as a sample of its own"
            )
        if self.shots:
            check_shots(self.shots, splits[self.examples], files[self.examples])
        if self.metric == "choice" and self.choices is None:  # up to the last letter that occurs as an answer
            most = 1 + max(LETTERS.index(a) for entries in splits.values() for e in entries for a in e.answers)
            splits = {split: [replace(e, options=most) for e in entries] for split, entries in splits.items()}
        return splits

    def _repeated(self, entries: Sequence[Entry]) -> list[tuple[int, int]]:
        """Return ``(first, later)`` for each later record with the prompt and answers of an earlier one, as indices."""
        seen: dict[Any, int] = {}
        pairs = [
            (seen.setdefault((entry.prompt, entry.context, entry.answers), number), number)
            for number, entry in enumerate(entries)
        ]
        return [(first, number) for first, number in pairs if first != number]

    @property
    def _splits(self) -> tuple[str, ...]:
        """Names of the splits that are read, the one with the examples first."""
        return tuple(dict.fromkeys((*((self.examples,) if self.shots else ()), self.split)))

    def entry(self, record: Record, place: str) -> Entry:
        """Convert one record to a prompt without few-shot examples.

        Raises:
            DataError: a field is missing or has a value of the wrong kind.
        """
        given, offered = {}, []
        if self.choices is not None:
            offered = choice_options(lookup(record, self.choices, place), self.choices, place)
            given["choices"] = lettered_options(offered)
        if self._context is not None:
            context, _ = self._context.render(record, place, given)
            FILLED_TEXT.check(context, str(self.context), place)
            given[self._place_of_context] = context
        query = ""
        if self._query is not None:
            query, _ = self._query.render(record, place, given)
            given["query"] = query
        prompt, spans = self._template.render(record, place, given)
        span = spans[self._place_of_context] if self._context is not None else None
        return Entry(prompt, span, query, self._answers(record, place, offered), record, len(offered))

    def _answers(self, record: Record, place: str, offered: Sequence[tuple[str, str]]) -> tuple[str, ...]:
        value = lookup(record, self.answer, place)
        values = value if isinstance(value, list) else [value]
        if not values:
            raise DataError(f"{place}: field '{self.answer}' is an empty list; expected at least one answer.")
        if self.metric == "choice":
            return tuple(correct(answer, offered, self.answer, place) for answer in values)
        references = tuple(text_of(answer, self.answer, place) for answer in values)
        for reference in references:
            FILLED_TEXT.check(reference, self.answer, place)
            if self.metric == "gsm8k" and gsm8k.gold(reference) is None:
                raise DataError(f"{place}: field '{self.answer}' does not end with '#### NUMBER': {reference[-60:]!r}.")
            if (wanted := wanted_reference(self.metric, reference)) is not None:
                raise DataError(f"{place}: field '{self.answer}' is {reference[:60]!r}; expected {wanted}.")
        return references

    def files(self) -> Iterator[tuple[HubSource, str]]:
        """Yield which files of the hub the data set needs, as pairs of a source and a split (:meth:`Task.files`)."""
        return ((self.source, split) for split in self._splits)

    # -- samples -----------------------------------------------------------------------------------------------------

    def samples(self) -> Iterator[Sample]:
        """Yield one sample, with few-shot examples, for each of the first `limit` records of the split."""
        draw = random.Random(self.shots_seed)
        pool = self.entries[self.examples] if self.shots else []
        for index, entry in enumerate(self.entries[self.split][: self.limit]):
            examples = draw.sample(pool, self.shots) if self.order == "sampled" else pool[: self.shots]
            shown = "".join(f"{example.prompt}{example.target}{self.separator}" for example in examples)
            span = entry.context and (entry.context[0] + len(shown), entry.context[1] + len(shown))
            yield Sample(
                id=f"{self.name}/{index}",
                task=self.name,
                prompt=shown + entry.prompt,
                context_span=span,
                query=entry.query,
                answers=entry.answers,
                target=entry.target,
                max_new_tokens=self.max_new_tokens,
                stop=self.stop,
                truncation=self.truncation,
                rules=PromptRules(chat=self.chat, system=self.system),
                meta={"options": entry.options} if entry.options else {},
            )

    def identity(self) -> dict[str, Any]:
        """Return checksums of the records, and the prompt's options.

        Each split has one checksum, over the prompts, contexts, queries, answers and numbers of options made from its
        records.
        """
        keys = ("name", "metric", "pattern", "shots", "max_new_tokens", "chat", "system", "truncation")
        drawn = ("examples", "order", "shots_seed", "separator") if self.shots else ()
        return {
            "target": "records",
            "version": self.version,
            "sha256": {
                split: data.records_fingerprint(
                    map(vars, entries), ("prompt", "context", "query", "answers", "options")
                )
                for split, entries in self.entries.items()
            },
            "stop": list(self.stop),
            **{key: getattr(self, key) for key in (*keys, *drawn)},
        }

    def notes(self) -> dict[str, Any]:
        """Return facts for `metrics.json` outside the run's identity: numbers of records by split and of repeats.

        With the metric ``math`` they include the versions of the packages on which verdicts depend.
        """
        repeated = len(self._repeated(self.entries[self.split]))
        counts = {split: len(entries) for split, entries in self.entries.items()}
        versions = {"packages": math_check.math_versions()} if self.metric == "math" else {}
        return {"records": counts, **({"repeated": repeated} if repeated else {}), **versions}

    def score(self, sample: Sample, prediction: str) -> dict[str, float]:
        """Score an answer with the configured metric; ``rouge`` adds one score per kind of ROUGE.

        The metric ``gsm8k`` adds ``strict`` and ``flexible``.
        """
        options = sample.meta.get("options", 0)
        return answers.score_answers(self.metric, prediction, sample.answers, pattern=self.pattern, options=options)
