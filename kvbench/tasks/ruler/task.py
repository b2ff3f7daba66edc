"""The data set RULER: 13 synthetic tasks at lengths from 4k to 128k tokens of the model's own tokenizer."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal, Protocol

from kvbench.errors import ConfigError
from kvbench.metrics import ruler as metric
from kvbench.tasks.base import PromptRules, Sample, Setup, TokenTask, check_list
from kvbench.tasks.data import HubSource
from kvbench.tasks.ruler import outside_texts
from kvbench.tasks.ruler.counting import CommonWords, FrequentWords, Tracking
from kvbench.tasks.ruler.frame import CHAT, KINDS
from kvbench.tasks.ruler.needles import Needles
from kvbench.tasks.ruler.outside_texts import Documents
from kvbench.tasks.ruler.stream import SEED, RulerPrompt, Stream
from kvbench.util.requirements import Package
from kvbench.util.schema import MOST, bounded

#: names for several tasks: all 13, and the six that need no text from elsewhere
GROUPS = {"all": tuple(KINDS), "offline": tuple(name for name, kind in KINDS.items() if not kind.needs_text)}
#: shortest length for which every generator finds a prompt
SHORTEST = 512


class Generator(Protocol):
    """A generator of one task's prompts at one length."""

    def next(self) -> tuple[RulerPrompt, int]:
        """Make the next sample's prompt; return it with its number of tokens, answer included."""
        ...


@dataclass(kw_only=True)
class Ruler(TokenTask):
    """The data set RULER (Hsieh et al. 2024), with the prompts of the authors' scripts.

    Prompts depend on the model's tokenizer: they are made as long as fits into `lengths`. For equal tokenizer, task,
    length, seed and texts they equal those of NVIDIA/RULER c3f5e3b, byte for byte (the tasks with essays if
    ``sentences=punkt`` and the essays are the same). Where the scripts behave oddly, so does this class: a prompt that
    turns out too long is shortened by a whole step, so at 4k some samples have 16 % fewer tokens than the nominal
    length.

    Args:
        tasks: names of tasks, ``all`` (13), or ``offline`` (the six that need neither essays nor questions).
        lengths: tokens of a prompt and its answer together; RULER has 4,096 to 131,072, doubled each time.
        limit: number of samples per task and length; RULER uses 500.
        seed: seed of all random numbers; RULER's is 42.
        template: chat format around the task: ``base`` for none. The answer prefix follows it, so it begins the model's
            turn.
        haystack: text file in which needles are hidden; None for the essays of `essays`.
        sentences: how that text is split into sentences, between which needles are put: ``punkt`` as in RULER (needs
            NLTK), or ``simple``.
        squad: local file of SQuAD 2.0's dev split (qa_1); None for the hub's.
        hotpotqa: local file of HotpotQA's dev split (qa_2); None for the hub's.
        english_words: RULER's english_words.json, which cwe needs at 128k tokens.
        essays, squad_source, hotpotqa_source: the texts on the hub.
    """

    version = 1
    scorer_version = 1

    name: str = "ruler"
    tasks: tuple[str, ...] | str = "all"
    lengths: tuple[int, ...] = (4096,)
    limit: int = bounded(500, minimum=1, maximum=10_000)
    seed: int = bounded(SEED, minimum=0, maximum=MOST)
    template: Literal["base", "llama2", "llama3", "phi3"] = "base"
    haystack: str | None = None
    sentences: Literal["simple", "punkt"] = "simple"
    squad: str | None = None
    hotpotqa: str | None = None
    english_words: str | None = None
    essays: HubSource = field(default_factory=lambda: HubSource(hub_id="baber/paul_graham_essays", file="@/{task}"))
    squad_source: HubSource = field(default_factory=lambda: HubSource(hub_id="rajpurkar/squad_v2", file="@/{task}"))
    hotpotqa_source: HubSource = field(
        default_factory=lambda: HubSource(hub_id="hotpotqa/hotpot_qa", file="@distractor/{task}")
    )

    def __post_init__(self) -> None:
        self._drafts: dict[tuple[str, int], tuple[Generator, list[tuple[RulerPrompt, int]]]] = {}

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the selected tasks, in the order in which they run."""
        if isinstance(self.tasks, str):
            return GROUPS.get(self.tasks, (self.tasks,))
        return self.tasks

    def check(self) -> None:
        """Raise ConfigError if the list of tasks or of lengths is empty, or has unknown or repeated entries."""
        allowed = (*GROUPS, *KINDS)
        check_list("dataset.tasks", self.names, allowed)
        check_list("dataset.lengths", self.lengths, ())
        for name in self.names:
            if name in GROUPS:
                raise ConfigError(
                    "dataset.tasks",
                    name,
                    "stands for several tasks, so it cannot be an item of a list",
                    hint=f"dataset.tasks={name}",
                )
            if name not in KINDS:
                raise ConfigError("dataset.tasks", name, "is not a task of RULER", allowed=allowed)
        for length in self.lengths:
            if length < SHORTEST:
                raise ConfigError("dataset.lengths", length, f"is too short: the minimum is {SHORTEST} tokens")
        for key in ("essays", "squad_source", "hotpotqa_source"):
            getattr(self, key).check(f"dataset.{key}")

    def packages(self) -> tuple[Package, ...]:
        """Return wonderwords, from whose words keys and lists are drawn, if a selected task draws words."""
        name = next((name for name in self.names if KINDS[name].generator in ("niah", "cwe")), None)
        if name is None or (KINDS[name].key == "uuids" and len(self.names) == 1):
            return ()
        hint = f"pip install 'kvbench[ruler]' (wonderwords=={outside_texts.VERSION})"
        return (Package("wonderwords", "dataset.tasks", name, hint),)

    def fits(self, config: Setup) -> None:
        """Raise ConfigError if a length exceeds ``model.max_length``."""
        if max(self.lengths) > config.model.max_length:
            fitting = [length for length in self.lengths if length <= config.model.max_length]
            raise ConfigError(
                "dataset.lengths",
                max(self.lengths),
                f"exceeds the model's limit (model.max_length={config.model.max_length})",
                hint=f"dataset.lengths=[{','.join(map(str, fitting or [config.model.max_length]))}]",
            )

    def files(self) -> Iterator[tuple[HubSource, str]]:
        """Yield the hub files of the selected tasks: essays and questions, unless local files are given."""
        kinds = [KINDS[name] for name in self.names]
        if self.haystack is None and any(kind.generator == "niah" and kind.needs_text for kind in kinds):
            yield self.essays, "train"
        if self.squad is None and any(kind.questions == "squad" for kind in kinds):
            yield self.squad_source, "validation"
        if self.hotpotqa is None and any(kind.questions == "hotpotqa" for kind in kinds):
            yield self.hotpotqa_source, "validation"

    def samples(self) -> Iterator[Sample]:
        """Yield `limit` samples for each task and length."""
        for name in self.names:
            for length in self.lengths:
                for index in range(self.limit):
                    yield self.sample(name, length, index)

    def sample(self, name: str, length: int, index: int) -> Sample:
        """Make one sample, and all samples before it, because they draw from the same random numbers.

        `length` counts tokens of prompt and answer together, and `index` from 0.

        Raises:
            DataError: a text that the task needs is missing, or the length is too short for the task.
        """
        generator, drafts = self._drafts.setdefault((name, length), (self._generator(name, length), []))
        while len(drafts) <= index:
            drafts.append(generator.next())
        draft, tokens = drafts[index]
        end = len(draft.prompt) - len(draft.prefix)
        return Sample(
            id=f"{name}@{length}/{index}",
            task=name,
            length=length,
            prompt=draft.prompt,
            context_span=(0, draft.prompt.rfind("\n", 0, end) + 1),
            query=draft.question,
            answers=draft.answers,
            max_new_tokens=KINDS[name].budget,
            truncation="refuse",
            target=" " + ", ".join(draft.answers if KINDS[name].generator != "qa" else draft.answers[:1]),
            rules=PromptRules(chat=False),
            meta={"tokens": tokens},
        )

    def _generator(self, name: str, length: int) -> Generator:
        kind, chat = KINDS[name], CHAT[self.template]
        stream = Stream(lambda text: len(self.tokenizer.tokenize(text)), length, self.seed)
        if kind.generator == "niah":
            pairs = outside_texts.word_pairs() if kind.key == "words" else ()
            if kind.haystack != "essay":
                return Needles(kind, stream, chat, pairs)
            return Needles(kind, stream, chat, pairs, self._text, outside_texts.splitter(self.sentences))
        if kind.generator == "vt":
            return Tracking(kind, stream, chat)
        if kind.generator == "cwe":
            more = outside_texts.english_words(self.english_words) if self.english_words else ()
            return CommonWords(kind, stream, chat, outside_texts.shuffled_words(stream), more)
        if kind.generator == "fwe":
            return FrequentWords(kind, stream, chat)
        return Documents(kind, stream, chat, *(self._squad if kind.questions == "squad" else self._hotpotqa))

    @cached_property
    def _text(self) -> str:
        return outside_texts.essays(self.haystack, self.essays)

    @cached_property
    def _squad(self) -> tuple[list[str], list[outside_texts.RulerQuestion]]:
        return outside_texts.squad(self.squad, self.squad_source)

    @cached_property
    def _hotpotqa(self) -> tuple[list[str], list[outside_texts.RulerQuestion]]:
        return outside_texts.hotpotqa(self.hotpotqa, self.hotpotqa_source)

    def _checksums(self) -> dict[str, str]:
        """Return the SHA-256 of each text from elsewhere that the selected tasks use."""
        kinds = [KINDS[name] for name in self.names]
        sums = {}
        if any(kind.generator == "niah" and kind.needs_text for kind in kinds):
            sums["haystack"] = hashlib.sha256(self._text.encode()).hexdigest()
        for key, loaded in (("squad", "_squad"), ("hotpotqa", "_hotpotqa")):
            if any(kind.questions == key for kind in kinds):
                documents, questions = getattr(self, loaded)
                sums[key] = hashlib.sha256(repr((documents, questions)).encode()).hexdigest()
        if self.english_words and "cwe" in self.names:
            sums["english_words"] = outside_texts.words_checksum(outside_texts.english_words(self.english_words))
        return sums

    def identity(self) -> dict[str, Any]:
        """Return tasks, lengths, seed, format and texts."""
        return {
            "target": "ruler",
            "version": self.version,
            "tasks": list(self.names),
            "lengths": list(self.lengths),
            "seed": self.seed,
            "template": self.template,
            "sentences": self.sentences,
            "sha256": self._checksums(),
        }

    def notes(self) -> dict[str, Any]:
        """Return facts to store with the results: checksums of prompts and texts, and mean lengths in tokens.

        The checksum of a task at a length is the SHA-256 of all its prompts, joined by line feeds. Two machines with
        equal checksums ran the same prompts.
        """
        prompts, tokens = {}, {}
        for (name, length), (_, drafts) in self._drafts.items():
            chosen = drafts[: self.limit]
            if len(chosen) == self.limit:
                prompts[f"{name}@{length}"] = prompts_checksum([draft.prompt for draft, _ in chosen])
                tokens[f"{name}@{length}"] = sum(count for _, count in chosen) / len(chosen)
        return {
            "prompts_sha256": prompts,
            "tokens": tokens,
            "template": self.template,
            "sentences": self.sentences,
            "texts_sha256": self._checksums(),
        }

    def score(self, sample: Sample, prediction: str) -> dict[str, float]:
        """Return as ``score`` the share of references in an answer; for qa tasks, 1 if it contains any, else 0."""
        match = metric.match_part if KINDS[sample.task].generator == "qa" else metric.match_all
        return {"score": match(prediction, sample.answers)}


def prompts_checksum(prompts: list[str]) -> str:
    """Return the SHA-256 of prompts, joined by line feeds."""
    return hashlib.sha256("\n".join(prompts).encode()).hexdigest()
