"""RULER's question answering (qa), and the outside texts that it uses: essays, SQuAD 2.0 and HotpotQA.

A qa prompt hides the documents of a question of SQuAD or HotpotQA among other documents.

A `path` of None takes the data from the hub. All functions raise DataError if a file is missing or damaged.

Source: NVIDIA/RULER c3f5e3b, scripts/data/synthetic/qa.py.
"""

from __future__ import annotations

import hashlib
import re
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from importlib.metadata import version
from importlib.resources import files
from itertools import accumulate
from pathlib import Path
from typing import Any, overload

from kvbench.errors import DataError
from kvbench.tasks import data
from kvbench.tasks.data import HubSource
from kvbench.tasks.files import Found
from kvbench.tasks.ruler.frame import QA, QA_PREFIX, RulerKind
from kvbench.tasks.ruler.stream import RulerPrompt, Stream, fitting, largest

#: the version whose lists RULER's published prompts use; another version changes every key
VERSION = "3.0.1"


@cache
def word_list(kind: str) -> tuple[str, ...]:
    """Return the words of one list of wonderwords: ``noun``, ``adjective`` or ``verb``.

    Raises:
        DataError: another version of wonderwords is installed.
    """
    if version("wonderwords") != VERSION:
        raise DataError(
            f"dataset ruler needs wonderwords {VERSION}, but {version('wonderwords')} is installed; with its words, "
            f"all prompts would differ from RULER's.\n  hint: pip install wonderwords=={VERSION}"
        )
    text = (files("wonderwords") / "assets" / f"{kind}list.txt").read_text(encoding="utf-8")
    return tuple(line.rstrip() for line in text.splitlines())  # as wonderwords itself reads them


class Pairs(Sequence[str]):
    """All distinct pairs ``adjective-noun``, sorted; there are millions, so a pair is made only when it is indexed.

    The pairs of one adjective are consecutive. Only if a second adjective continues the first after a hyphen (``well``
    and ``well-known``) are the pairs of both sorted together.
    """

    def __init__(self, adjectives: Iterable[str], nouns: Iterable[str]) -> None:
        self._nouns = sorted(set(nouns))
        groups: list[list[str]] = []
        for first in sorted(f"{adjective}-" for adjective in set(adjectives)):
            if groups and first.startswith(groups[-1][0]):
                groups[-1].append(first)
            else:
                groups.append([first])
        self._groups: list[str | list[str]] = [
            group[0] if len(group) == 1 else sorted({first + noun for first in group for noun in self._nouns})
            for group in groups
        ]
        sizes = (len(self._nouns) if isinstance(group, str) else len(group) for group in self._groups)
        self._ends = list(accumulate(sizes))

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    @overload
    def __getitem__(self, place: int) -> str: ...

    @overload
    def __getitem__(self, place: slice) -> Sequence[str]: ...

    def __getitem__(self, place: int | slice) -> str | Sequence[str]:
        if isinstance(place, slice):
            return [self[number] for number in range(*place.indices(len(self)))]
        number = range(len(self))[place]
        at = bisect_right(self._ends, number)
        group, number = self._groups[at], number - (self._ends[at - 1] if at else 0)
        return group + self._nouns[number] if isinstance(group, str) else group[number]


@cache
def word_pairs() -> Pairs:
    """Return all pairs ``adjective-noun`` of wonderwords, sorted, each once: about 6.2 million."""
    return Pairs(word_list("adjective"), word_list("noun"))


def shuffled_words(stream: Stream) -> list[str]:
    """Return all nouns, adjectives and verbs, each once, shuffled."""
    every = sorted({*word_list("noun"), *word_list("adjective"), *word_list("verb")})
    stream.shuffle(every)
    return every


def words_checksum(lines: Sequence[str]) -> str:
    """Return the SHA-256 of a list of words, joined by line feeds."""
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


#: a sentence's end: closing punctuation, perhaps a closing quote or bracket, then white space
_END = re.compile(r"""(?<=[.!?])["'”’)\]]*\s+""")


@dataclass(frozen=True)
class RulerQuestion:
    """One question with its documents.

    Args:
        answers: accepted answers, repeats included.
        own: indices of the documents that answer the question, among all documents of the data set.
        more: indices of related documents, which are taken first when a prompt needs more documents.
    """

    text: str
    answers: tuple[str, ...]
    own: tuple[int, ...]
    more: tuple[int, ...] = ()


def essays(path: str | None, source: HubSource) -> str:
    """Return the text in which needles are hidden. Raises DataError if it has no words.

    `path` is a text file, or a JSON file with the field ``text``, as RULER's own script writes it. Essays from the hub
    are the field ``text`` of its records, joined by blanks.
    """
    if path is None:
        file = data.find_records(source, "train", None, "dataset ruler", remedy=_remedy("haystack", "TEXT_FILE"))
        text = " ".join(str(record["text"]) for record in data.read_records(file, ("text",)))
    else:
        found = Found(_file(path, "dataset.haystack"))
        if found.ending == ".json":
            content = data.read_json(found)
            text = str(content.get("text", "")) if isinstance(content, Mapping) else ""
        else:
            text = data.read_text(found)
    if not text.strip():
        raise DataError(f"dataset ruler: {path or source.hub_id} holds no text for the haystack.")
    return text


def squad(path: str | None, source: HubSource) -> tuple[list[str], list[RulerQuestion]]:
    """Return the documents and the answerable questions of SQuAD 2.0's dev split, in the order of the file.

    The file is the authors' dev-v2.0.json, or has records with the fields of the hub's file.
    """
    with _laid_out(path or str(source.hub_id), "SQuAD 2.0's dev split"):
        rows = _squad_rows(path, source)
    documents = sorted({context for context, *_ in rows})
    index = {context: i for i, context in enumerate(documents)}
    articles: dict[str, list[int]] = {}
    for context, title, *_ in rows:
        contexts = articles.setdefault(title, [])
        if index[context] not in contexts:
            contexts.append(index[context])
    questions = [
        RulerQuestion(text, answers, (index[context],), tuple(i for i in articles[title] if i != index[context]))
        for context, title, text, answers in rows
        if answers
    ]
    if not questions:
        raise DataError(f"dataset ruler: {path or source.hub_id} has no question that can be answered.")
    return documents, questions


def _squad_rows(path: str | None, source: HubSource) -> list[tuple[str, str, str, tuple[str, ...]]]:
    """Return all questions as tuples (context, title of the article, question, answers; none if it has none)."""
    if path is not None:
        place = _file(path, "dataset.squad")
        if place.suffix == ".json":
            content = data.read_json(Found(place))
            if isinstance(content, Mapping) and "data" in content:
                return [
                    (
                        paragraph["context"],
                        f"{number}",
                        question["question"],
                        () if question["is_impossible"] else tuple(answer["text"] for answer in question["answers"]),
                    )
                    for number, article in enumerate(content["data"])
                    for paragraph in article["paragraphs"]
                    for question in paragraph["qas"]
                ]
        file = Found(place)
    else:
        file = data.find_records(source, "validation", None, "dataset ruler", remedy=_remedy("squad", "dev-v2.0.json"))
    fields = ("context", "title", "question", "answers")
    return [
        (record["context"], record["title"], record["question"], tuple(record["answers"]["text"]))
        for record in data.read_records(file, fields)
    ]


def hotpotqa(path: str | None, source: HubSource) -> tuple[list[str], list[RulerQuestion]]:
    """Return the documents and the questions of HotpotQA's dev split (distractor), in the order of the file.

    The file is the authors' hotpot_dev_distractor_v1.json, or has records with the fields of the hub's file.
    """
    if path is not None:
        file = Found(_file(path, "dataset.hotpotqa"))
    else:
        remedy = _remedy("hotpotqa", "hotpot_dev_distractor_v1.json")
        file = data.find_records(source, "validation", None, "dataset ruler", remedy=remedy)
    rows: list[tuple[str, str, list[str]]] = []
    with _laid_out(path or str(source.hub_id), "HotpotQA's dev split (distractor)"):
        for record in data.read_records(file, ("question", "answer", "context")):
            given = record["context"]
            parts = zip(given["title"], given["sentences"], strict=True) if isinstance(given, Mapping) else given
            own = [f"{title}\n{''.join(lines)}" for title, lines in parts]
            rows.append((record["question"], record["answer"], own))
    if not rows:
        raise DataError(f"dataset ruler: {path or source.hub_id} has no questions.")
    documents = sorted({document for *_, own in rows for document in own})
    index = {document: i for i, document in enumerate(documents)}
    questions = [
        RulerQuestion(text, (answer,), tuple(index[document] for document in own)) for text, answer, own in rows
    ]
    return documents, questions


def splitter(kind: str) -> Callable[[str], list[str]]:
    """Return the function that splits a text into sentences.

    It is NLTK's model for ``punkt``, as in RULER, or a split after closing punctuation for ``simple``. The two place
    needles at slightly different words.

    Raises:
        DataError: NLTK or its model is not installed.
    """
    if kind == "simple":
        return lambda text: [part for part in _END.split(text) if part]
    try:
        from nltk.tokenize import sent_tokenize

        sent_tokenize("One. Two.")
    except (ImportError, LookupError) as error:
        raise DataError(
            "dataset.sentences=punkt needs NLTK and its model punkt_tab, which are not on this machine.\n"
            "  hint: pip install 'kvbench[punkt]' && python -m nltk.downloader punkt_tab; or set "
            "dataset.sentences=simple"
        ) from error
    return lambda text: list(sent_tokenize(text))


def english_words(path: str) -> Sequence[str]:
    """Return the words of RULER's english_words.json, a JSON object or list of words, in the order of its file."""
    place = _file(path, "dataset.english_words")
    content: Any = data.read_json(Found(place))
    words = list(content.values()) if isinstance(content, Mapping) else content
    if not isinstance(words, list) or not all(isinstance(word, str) for word in words):
        raise DataError(f"dataset ruler: dataset.english_words={path} is not a JSON list or object of words.")
    return words


@contextmanager
def _laid_out(name: str, layout: str) -> Iterator[None]:
    """Raise DataError if records with an unexpected layout cause another error inside a ``with`` block."""
    try:
        yield
    except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
        raise DataError(
            f"dataset ruler: {name} does not have the layout of {layout} ({type(error).__name__}: {error}).\n"
            "  hint: download the file again"
        ) from error


def _file(path: str, key: str) -> Path:
    place, single = data.local(path, "dataset ruler", key)
    if not single:
        raise DataError(f"dataset ruler: {key}={path} is a folder.\n  hint: name a file")
    return place


def _remedy(key: str, file: str) -> str:
    return (
        f"set dataset.{key}={file}, or run `python -m kvbench.fetch dataset=ruler` on a machine with network and copy "
        "its HF_HOME here"
    )


#: number of documents by which prompts are made longer and shorter
STEP = 10


class Documents:
    """Generator of one qa task at one length; sample i asks question i.

    `documents` and `questions` are all those of the data set.
    """

    def __init__(
        self, kind: RulerKind, stream: Stream, chat: str, documents: Sequence[str], questions: Sequence[RulerQuestion]
    ) -> None:
        self.kind, self.stream, self.documents, self.questions = kind, stream, documents, questions
        self.before, _, self.after = chat.partition("{task}")
        self.index = 0
        self.units = largest(self.make, stream, STEP, kind.budget)

    def next(self) -> tuple[RulerPrompt, int]:
        """See :meth:`kvbench.tasks.ruler.task.Generator.next`.

        Raises:
            DataError: the data set has no further question.
        """
        if self.index >= len(self.questions):
            raise DataError(
                f"dataset ruler: the questions end after {len(self.questions)}.\n"
                f"  hint: set dataset.limit={len(self.questions)}"
            )
        drafted = fitting(self.make, self.stream, self.units, STEP, self.kind.budget)
        self.index += 1
        return drafted

    def make(self, units: int) -> RulerPrompt:
        """Make a prompt of `units` documents for the current question."""
        question = self.questions[self.index]
        chosen = [self.documents[i] for i in self._chosen(question, units)]
        self.stream.shuffle(chosen)
        context = "\n\n".join(f"Document {i}:\n{document}" for i, document in enumerate(chosen, 1))
        task = QA.format(context=context, query=question.text)
        return RulerPrompt(f"{self.before}{task}{self.after}{QA_PREFIX}", QA_PREFIX, question.answers, question.text)

    def _chosen(self, question: RulerQuestion, units: int) -> list[int]:
        """Return the indices of a prompt's documents, before they are shuffled."""
        every = range(len(self.documents))
        if units >= len(every):
            repeats = -(-units // len(every))
            return (list(every) * repeats)[:units]
        missing = max(0, units - len(question.own))
        if missing <= len(question.more):
            return [*question.own, *self.stream.random.sample(question.more, missing)]
        near = {*question.own, *question.more}
        others = [i for i in every if i not in near]
        rest = max(0, missing - len(question.more))
        return [*question.own, *question.more, *self.stream.random.sample(others, rest)]
