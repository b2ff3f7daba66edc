"""LongBench v1 (Bai et al., ACL 2024): 21 tasks, and the 13 of LongBench-E, as the official code runs them.

Templates, answer lengths, the tasks without chat wrapper, samsum's rule, truncation and scores are those of
THUDM/LongBench 2e00731 (LongBench/pred.py, eval.py, config); the templates with their typing errors lie in
longbench.json. What differs: kvbench scores on 0..1 (times 100 and rounded it is the published number), decodes
greedily in the model's own dtype, and writes one beginning-of-sequence token where a chat template brings its own.
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
from kvbench.tasks.base import PromptRules, Sample, Task
from kvbench.tasks.data import HubSource
from kvbench.tasks.records import COUNT, FILLED_TEXT, TEXT, TEXTS, TEXTS_OR_NULL
from kvbench.util.requirements import Package
from kvbench.util.schema import MOST_TOKENS, bounded

#: tasks that the official code runs without the chat wrapper
NO_CHAT = ("trec", "triviaqa", "samsum", "lsht", "lcc", "repobench-p")

#: tasks in Chinese (and the code tasks, which are in neither): the other 14 natural-language tasks are English
CHINESE = ("multifieldqa_zh", "dureader", "vcsum", "lsht", "passage_retrieval_zh")

#: tasks that end in code: where their `input` is empty, the end of the context says best what is asked for
_CODE = ("lcc", "repobench-p")

#: fields of a record that determine its sample
FIELDS = {"input": TEXT, "context": FILLED_TEXT, "answers": TEXTS, "length": COUNT, "all_classes": TEXTS_OR_NULL}


@cache
def templates() -> dict[str, dict[str, Any]]:
    """Return ``{"max_new_tokens", "prompt"}`` by task, in the official order."""
    path = Path(__file__).with_name("longbench.json")
    tasks: dict[str, dict[str, Any]] = json.loads(path.read_text(encoding="utf-8"))["tasks"]
    return tasks


def groups() -> dict[str, tuple[str, ...]]:
    """Return names of several tasks at once: ``all`` (21), ``en`` (16: no Chinese), ``e`` (the 13 of LongBench-E)."""
    names = tuple(templates())
    return {"all": names, "en": tuple(name for name in names if name not in CHINESE), "e": EXTENDED}


@dataclass(frozen=True, kw_only=True)
class LongBench(Task):
    """LongBench records as samples.

    Args:
        name: the data set's name in results.
        tasks: names, or ``all``, ``en``, ``e``.
        path: a folder with ``<task>.jsonl`` (.gz, .json, .parquet), the official data.zip, or one task's file; None:
            the hub.
        source: the files on the hub.
        limit: records a task, from the first; None: all.
        max_new_tokens: for every task; None: the official ones.
        prompt_limit: tokens of the raw prompt beyond which its middle is cut; None: ``model.prompt_limit``, which is
            LongBench's for the model; ``fill``: what the model's length leaves for it.
        prompt_limits: `prompt_limit` by name of the model, before it.
        system: text of a system turn where the model has a chat template; None: no such turn (official).
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
        """Raise ConfigError for tasks that do not exist."""
        allowed = (*groups(), *templates(), *EXTENDED)
        if not self.names:
            raise ConfigError("dataset.tasks", [], "must not be empty", allowed=allowed)
        for name in self.names:
            if name not in templates() and name not in EXTENDED:
                raise ConfigError("dataset.tasks", name, "unknown task of LongBench", allowed=allowed)
        if len(set(self.names)) < len(self.names):
            raise ConfigError("dataset.tasks", list(self.names), "names something twice")
        self.source.check()

    def packages(self) -> tuple[Package, ...]:
        """Return the package that finds words where a script has no spaces between them."""
        chinese = next((name for name in self.names if metric.base_name(name) in CHINESE), None)
        hint = "pip install 'kvbench[longbench]', or dataset=longbench_en"
        return () if chinese is None else (Package("jieba", "dataset.tasks", chinese, hint),)

    @property
    def names(self) -> tuple[str, ...]:
        """The tasks that are run, in order."""
        if isinstance(self.tasks, str):
            return groups().get(self.tasks, (self.tasks,))
        return self.tasks

    @cached_property
    def records(self) -> dict[str, list[data.Record]]:
        """Task -> its records. Raises DataError where they cannot be read."""
        if self.path is not None and len(self.names) > 1 and data.is_single(self.path):
            raise DataError(
                f"dataset {self.name}: dataset.path={self.path} is one task's file, not {len(self.names)}.\n"
                "  hint: dataset=longbench/TASK, or dataset.path=FOLDER"
            )
        return {name: self._records(name) for name in self.names}

    def _records(self, name: str) -> list[data.Record]:
        others = {
            **{other: f"it is the task '{other}' of LongBench; dataset=longbench reads it" for other in templates()},
            **{other: f"it is '{other}' of LongBench-E; dataset=longbench_e reads it" for other in EXTENDED},
        }
        file = data.find(self.source, name, self.path, f"dataset {self.name}", others=others)
        return data.read_records(
            file, FIELDS, lambda record: metric.unanswerable(name, record["answers"], record["all_classes"])
        )

    @cached_property
    def checksums(self) -> dict[str, str]:
        """Task -> sha256 of its records' fields."""
        return {name: data.fingerprint(records, tuple(FIELDS)) for name, records in self.records.items()}

    def files(self) -> Iterator[tuple[HubSource, str]]:
        """Yield what has to be fetched: a source and a task for each."""
        return ((self.source, name) for name in self.names)

    def samples(self) -> Iterator[Sample]:
        """Yield, for each task, its first `limit` records."""
        for name in self.names:
            for index, record in enumerate(self.records[name][: self.limit]):
                yield self.sample(name, index, record)

    def sample(self, task: str, index: int, record: Mapping[str, Any]) -> Sample:
        """Return one record of `task` with its prompt, spans and rules."""
        base = metric.base_name(task)
        template: str = templates()[base]["prompt"]
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
            max_new_tokens=self.max_new_tokens or templates()[base]["max_new_tokens"],
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
        """Return what determines the samples, except their number; the records by their checksum."""
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
        """Return facts about the data that a result records in addition to the identity."""
        count = {name: len(records) for name, records in self.records.items()}
        return {"tasks": len(self.names), "records": count, "code_similarity": metric.SIMILARITY, "rouge": "1.0.1"}

    def score(self, sample: Sample, prediction: str) -> dict[str, float]:
        """Return ``score``; for the tasks with ROUGE ``rouge_1_0_1`` too: with that package's recursion fault.

        Raises:
            DataError: the record lacks what it is scored by (classes, a paragraph's number).
        """
        dataset, classes = sample.meta["dataset"], sample.meta["all_classes"]
        try:
            scores = {"score": metric.score(dataset, prediction, sample.answers, classes)}
        except ValueError as error:
            raise DataError(f"record {sample.id}: {error}.") from error
        limited = metric.limited_rouge(dataset, prediction, sample.answers)
        return scores if limited is None else {**scores, "rouge_1_0_1": limited}


def _target(prompt: str, answers: Any) -> str:
    """Return the first answer as it follows the prompt: after a space, unless the prompt ends in one."""
    if not answers or not answers[0]:
        return ""
    return answers[0] if prompt[-1].isspace() or prompt[-1] in "：" else f" {answers[0]}"
