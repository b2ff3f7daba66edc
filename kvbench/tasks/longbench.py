"""LongBench v1 (Bai et al., ACL 2024): 21 tasks, and the 13 of LongBench-E, as the official code runs them.

Templates, answer lengths, the tasks without chat wrapper, the rule for samsum's answers, truncation and scores follow
THUDM/LongBench 2e00731 (LongBench/pred.py, eval.py, config). longbench.json holds the templates, including their typing
errors. There are three differences. Scores are in 0..1; published scores are 100 times as large, and rounded. Decoding
is greedy in the model's own dtype. If a chat template adds a beginning-of-sequence token, the tokenizer does not add a
second one.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache, cached_property
from pathlib import Path
from typing import Any, Literal

from kvbench.errors import ConfigError, DataError
from kvbench.metrics import longbench as metric
from kvbench.metrics.longbench import EXTENDED
from kvbench.tasks import data
from kvbench.tasks.base import PromptRules, Sample, Task, check_list
from kvbench.tasks.data import HubSource
from kvbench.tasks.records import COUNT, FILLED_TEXT, TEXT, TEXTS, TEXTS_OR_NULL
from kvbench.util.requirements import Package
from kvbench.util.schema import MOST_TOKENS, bounded

#: tasks that the official code runs without the chat wrapper
NO_CHAT = ("trec", "triviaqa", "samsum", "lsht", "lcc", "repobench-p")

#: tasks in Chinese; the others are in English, except for the two code tasks
CHINESE = ("multifieldqa_zh", "dureader", "vcsum", "lsht", "passage_retrieval_zh")

#: tasks that ask for the next line of code: if `input` is empty, the end of the context is the best query
_CODE = ("lcc", "repobench-p")

#: fields of a record that determine its sample, with their kinds
FIELDS = {"input": TEXT, "context": FILLED_TEXT, "answers": TEXTS, "length": COUNT, "all_classes": TEXTS_OR_NULL}


@cache
def longbench_templates() -> dict[str, dict[str, Any]]:
    """Return LongBench's official ``prompt`` templates and answer lengths (``max_new_tokens``) by task, in order."""
    path = Path(__file__).with_name("longbench.json")
    tasks: dict[str, dict[str, Any]] = json.loads(path.read_text(encoding="utf-8"))["tasks"]
    return tasks


def task_groups() -> dict[str, tuple[str, ...]]:
    """Return the names that can stand for several tasks in ``dataset.tasks``, each with its task names.

    They are ``all`` (the 21 tasks of LongBench), ``en`` (the 16 that are not in Chinese) and ``e`` (the 13 of
    LongBench-E).
    """
    names = tuple(longbench_templates())
    return {"all": names, "en": tuple(name for name in names if name not in CHINESE), "e": EXTENDED}


@dataclass(frozen=True, kw_only=True)
class LongBench(Task):
    """The data set LongBench or LongBench-E, or a selection of their tasks.

    Args:
        tasks: names of tasks, or of one group of tasks: ``all``, ``en`` or ``e`` (:func:`task_groups`).
        path: a local copy: a folder with one file per task (``<task>.jsonl``, .jsonl.gz, .json or .parquet), the
            official data.zip, or the file of a single task. None downloads the files from the hub.
        limit: number of records per task, taken from the beginning of its file; None for all.
        max_new_tokens: maximum number of tokens to generate, for every task; None for each task's official number.
        prompt_limit: maximum number of tokens of a prompt before chat formatting is added. A longer prompt loses
            tokens from its middle, as in the official code. ``fill`` allows ``model.max_length`` minus the number of
            tokens to generate. None takes ``model.prompt_limit``, which is LongBench's own limit for that model.
        prompt_limits: limits for particular models, keyed by model name; they override `prompt_limit`.
        system: text of a system turn for models with a chat template; None for no system turn, as in the official code.
    """

    version = 1
    scorer_version = 1

    name: str = "longbench"
    tasks: tuple[str, ...] | str = "all"
    path: str | None = None
    source: HubSource = field(default_factory=HubSource)
    limit: int | None = bounded(None, minimum=1)
    max_new_tokens: int | None = bounded(None, minimum=1, maximum=MOST_TOKENS)
    prompt_limit: int | Literal["fill"] | None = bounded(None, minimum=16, maximum=MOST_TOKENS)
    prompt_limits: dict[str, int] = field(default_factory=dict, metadata={"minimum": 16, "maximum": MOST_TOKENS})
    system: str | None = None

    def check(self) -> None:
        """Raise ConfigError if the list of tasks is empty, has unknown or repeated names, or `source` is malformed."""
        allowed = (*task_groups(), *longbench_templates(), *EXTENDED)
        check_list("dataset.tasks", self.names, allowed)
        for name in self.names:
            if name not in longbench_templates() and name not in EXTENDED:
                raise ConfigError("dataset.tasks", name, "is not a task of LongBench", allowed=allowed)
        self.source.check()

    def packages(self) -> tuple[Package, ...]:
        """Return jieba, which splits Chinese text into words for scoring, if a Chinese task is selected."""
        chinese = next((name for name in self.names if metric.base_name(name) in CHINESE), None)
        hint = "run pip install 'kvbench[longbench]', or set dataset=longbench_en"
        return () if chinese is None else (Package("jieba", "dataset.tasks", chinese, hint),)

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the selected tasks, in the order in which they run; a group's name is replaced by its tasks."""
        if isinstance(self.tasks, str):
            return task_groups().get(self.tasks, (self.tasks,))
        return self.tasks

    @cached_property
    def records(self) -> dict[str, list[data.Record]]:
        """All records of the selected tasks, keyed by task; read on first use.

        Raises:
            DataError: a file is missing or damaged, a record is malformed, or `path` is one task's file but several
                tasks are selected.
        """
        if self.path is not None and len(self.names) > 1 and data.is_single(self.path):
            raise DataError(
                f"dataset {self.name}: dataset.path={self.path} is the file of a single task, but "
                f"{len(self.names)} tasks are selected.\n"
                "  hint: set dataset=longbench/TASK or dataset.path=FOLDER"
            )
        return {name: self._records(name) for name in self.names}

    def _records(self, name: str) -> list[data.Record]:
        others = {
            **{
                other: f"it is the task '{other}' of LongBench; set dataset=longbench to read it"
                for other in longbench_templates()
            },
            **{
                other: f"it is the task '{other}' of LongBench-E; set dataset=longbench_e to read it"
                for other in EXTENDED
            },
        }
        file = data.find_records(self.source, name, self.path, f"dataset {self.name}", others=others)
        return data.read_records(
            file, FIELDS, lambda record: metric.unanswerable(name, record["answers"], record["all_classes"])
        )

    @cached_property
    def checksums(self) -> dict[str, str]:
        """Checksum of each task's records, keyed by task (see :func:`kvbench.tasks.data.records_fingerprint`)."""
        return {name: data.records_fingerprint(records, tuple(FIELDS)) for name, records in self.records.items()}

    def files(self) -> Iterator[tuple[HubSource, str]]:
        """Yield the hub files of the selected tasks. See :meth:`Task.files`."""
        return ((self.source, name) for name in self.names)

    def samples(self) -> Iterator[Sample]:
        """Yield the first `limit` records of each selected task as samples."""
        for name in self.names:
            for index, record in enumerate(self.records[name][: self.limit]):
                yield self.sample(name, index, record)

    def sample(self, task: str, index: int, record: Mapping[str, Any]) -> Sample:
        """Make a sample of one record: fill the task's prompt template, and apply the task's official settings.

        Args:
            task: name of the task; the names of LongBench-E end in ``_e``.
            index: 0-based index of the record in the task's file.
            record: the record, with the fields of :data:`FIELDS`.
        """
        base = metric.base_name(task)
        template: str = longbench_templates()[base]["prompt"]
        prompt = template.format(**record)
        start = template.index("{context}")
        newline_ends = base == "samsum"
        return Sample(
            id=f"{task}/{index}",
            task=task if base == task else f"{task}@{metric.bucket(int(record['length']))}",
            prompt=prompt,
            context_span=(start, start + len(record["context"])),
            # templates without {input} get no query of their own: see `query_source`
            query=record["input"] if "{input}" in template else "",
            answers=tuple(record["answers"]),
            max_new_tokens=self.max_new_tokens or longbench_templates()[base]["max_new_tokens"],
            truncation="longbench",
            target=_target(prompt, record["answers"]),
            query_source="last_chunk" if base in _CODE else None,
            # samsum: a line feed ends the answer, but is not its first token
            end_text="\n" if newline_ends else None,
            say_something=newline_ends,
            rules=PromptRules(
                chat=base not in NO_CHAT,
                system=self.system,
                limit=self.prompt_limit,
                limits=dict(self.prompt_limits),
            ),
            meta={"dataset": base, "all_classes": record["all_classes"], "words": record["length"]},
        )

    def identity(self) -> dict[str, Any]:
        """Return each task's checksum, and the prompt's options."""
        return {
            "target": "longbench",
            "version": self.version,
            "sha256": self.checksums,
            "max_new_tokens": self.max_new_tokens,
            "prompt_limit": self.prompt_limit,
            "prompt_limits": dict(self.prompt_limits),
            "system": self.system,
        }

    def notes(self) -> dict[str, Any]:
        """Return facts to store with the results: the number of tasks, of records by task, and metric versions."""
        count = {name: len(records) for name, records in self.records.items()}
        return {"tasks": len(self.names), "records": count, "code_similarity": metric.SIMILARITY, "rouge": "1.0.1"}

    def score(self, sample: Sample, prediction: str) -> dict[str, float]:
        """Score a generated answer with the official metric of the sample's task.

        Returns:
            ``score``, between 0 and 1. Tasks scored by ROUGE add ``rouge_1_0_1``, the score that the official code
            would report. It differs from ``score`` only if a text is so long that the package rouge 1.0.1 exceeds
            Python's recursion limit: the official code then counts a 0.

        Raises:
            DataError: the metric needs a list of classes or a paragraph number in the answer, and the record lacks it.
        """
        dataset, classes = sample.meta["dataset"], sample.meta["all_classes"]
        try:
            scores = {"score": metric.score_longbench(dataset, prediction, sample.answers, classes)}
        except ValueError as error:
            raise DataError(f"record {sample.id}: {error}.") from error
        limited = metric.limited_rouge(dataset, prediction, sample.answers)
        return scores if limited is None else {**scores, "rouge_1_0_1": limited}


def _target(prompt: str, answers: Any) -> str:
    """Return the first answer as it would follow the prompt; empty if there is no answer.

    A space is put before it unless the prompt ends in whitespace or a full-width colon.
    """
    if not answers or not answers[0]:
        return ""
    return answers[0] if prompt[-1].isspace() or prompt[-1] in "：" else f" {answers[0]}"
