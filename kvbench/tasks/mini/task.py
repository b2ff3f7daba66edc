"""`mini`: generated long-context tasks that need no download and are identical on every machine.

The catalogue :data:`TASKS` lists each task's generator, length of the answer, and scorer by the task's name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvbench.errors import ConfigError
from kvbench.metrics.text import contains, exact_match, last_number, marked_number, prefix_share, recall
from kvbench.models.spec import BUNDLED
from kvbench.tasks.base import Sample, Setup, Task, check_list
from kvbench.tasks.mini import copying, reasoning, retrieval
from kvbench.tasks.mini.compose import WRAPPERS, ComposedPrompts, Draft, DraftQuestion, Setting, compose, tails
from kvbench.tasks.mini.filler import CodeFiller, ProseFiller
from kvbench.tasks.mini.prose import Prose
from kvbench.tasks.mini.rng import Rng
from kvbench.tasks.mini.tokens import encoder, tokenizer_fingerprint
from kvbench.tasks.work import AskQuestions, Generate, History, Turns, Work
from kvbench.tasks.work import Question as Asked
from kvbench.util.schema import MOST, bounded

Scorer = Callable[[str, str, Mapping[str, Any]], dict[str, float]]


def exact(prediction: str, answer: str, meta: Mapping[str, Any]) -> dict[str, float]:
    """Score a short answer: ``score`` is 1 if the prediction equals `answer`, ``contained`` if it contains `answer`."""
    return {"score": exact_match(prediction, [answer]), "contained": contains(prediction, [answer])}


def score_words(prediction: str, answer: str, meta: Mapping[str, Any]) -> dict[str, float]:
    """Score a copied text: ``score`` is 1 if the prediction equals `answer`, else 0.

    ``words`` is the share of the text's words that the prediction copies before its first wrong word.
    """
    return {"score": exact_match(prediction, [answer]), "words": prefix_share(prediction, answer)}


def values(prediction: str, answer: str, meta: Mapping[str, Any]) -> dict[str, float]:
    """Score a list of values.

    ``score`` is RULER's recall, the share of the values in ``meta["parts"]`` that the prediction contains; ``exact`` is
    1 if the prediction equals the whole answer, else 0.
    """
    return {"score": recall(prediction, meta["parts"]), "exact": exact_match(prediction, [answer])}


def score_number(prediction: str, answer: str, meta: Mapping[str, Any]) -> dict[str, float]:
    """Score the solution of a word problem, which should end with ``####`` and the result.

    Of three scores, each 1 if right and 0 if wrong, ``score`` judges the number after ``####``, ``flexible`` the last
    number of the prediction, and ``steps`` whether the whole solution matches exactly.
    """
    wanted = marked_number(answer)
    return {
        "score": float(marked_number(prediction) == wanted),
        "steps": exact_match(prediction, [answer]),
        "flexible": float(last_number(prediction) == wanted),
    }


SCORERS: dict[str, Scorer] = {"exact": exact, "words": score_words, "values": values, "number": score_number}


@dataclass(frozen=True)
class MiniTask:
    """Generator and scores of one task of `mini`.

    Args:
        make: generates the task's part of a sample (a draft): the texts that hold the answers, and the questions.
            Filler is added later, by :func:`kvbench.tasks.mini.compose.compose`.
        max_new_tokens: number of tokens that the longest answer and the line break after it may take, counted with the
            bundled model's tokenizer.
        shortest: shortest sample, in tokens, at which the task still makes sense.
        all_right: True if a sample with several questions scores 1 only if every answer is right, and 0 otherwise;
            False if its score is the mean over its questions.
    """

    make: Callable[[Setting], Draft]
    max_new_tokens: int
    scorer: str = "exact"
    shortest: int = 256
    all_right: bool = False


#: tasks that separate formats of 4 bits: many answers from one cache, right only if all of them are. The bundled model
#: was not trained on them as such, but on single questions of the same kinds
HARD = ("pairs", "lists", "many", "strings", "copies")

TASKS: dict[str, MiniTask] = {
    "passkey": MiniTask(retrieval.passkey, 12),
    "needle": MiniTask(retrieval.needle, 16),
    "needle_words": MiniTask(retrieval.needle_words, 16),
    "key_value": MiniTask(retrieval.key_value, 16),
    "key_value_hex": MiniTask(retrieval.key_value_hex, 24),
    "multi_value": MiniTask(retrieval.multi_value, 48, "values"),
    "variable_tracking": MiniTask(reasoning.variable_tracking, 40),
    "two_hop": MiniTask(reasoning.two_hop, 40),
    "facts": MiniTask(retrieval.facts, 24),
    "few_shot": MiniTask(reasoning.few_shot, 16),
    "copy": MiniTask(copying.copy, 56, "words"),
    "copy_long": MiniTask(copying.copy_long, 144, "words", shortest=512),
    "repeat": MiniTask(copying.repeat, 80, "words"),
    "passage": MiniTask(retrieval.passage, 12),
    "arithmetic": MiniTask(reasoning.arithmetic, 64, "number"),
    "code_line": MiniTask(copying.code_line, 48),
    "several": MiniTask(retrieval.several, 24),
    "pairs": MiniTask(retrieval.pairs, 16, all_right=True),
    "lists": MiniTask(retrieval.lists, 48, "values", all_right=True),
    "many": MiniTask(retrieval.many, 24, all_right=True),
    "strings": MiniTask(copying.strings, 100, "words", all_right=True),
    "copies": MiniTask(copying.copies, 144, "words", shortest=512, all_right=True),
}


#: groups of tasks by name: all but the hard ones, and these (:data:`kvbench.tasks.mini.task.HARD`)
SEVERAL = ("several", *HARD)  # the tasks with several questions about one context
#: tasks with one question that can ask more
ASKING = (
    *("needle", "needle_words", "key_value", "key_value_hex", "multi_value"),
    *("variable_tracking", "two_hop", "facts", "few_shot", "passage"),
)
GROUPS = {"all": tuple(name for name in TASKS if name not in HARD), "hard": HARD}
LENGTHS = (512, 1024, 2048, 4096, 8192, 16384, 32768)


@dataclass(frozen=True, kw_only=True)
class Mini(Task):
    """The data set `mini`: generated long-context tasks (:data:`TASKS`) at several lengths.

    The length of a sample is nominal. It is counted with the bundled model's tokenizer, and covers the
    beginning-of-sequence token, the prompt and the longest answer that the task allows. A sample may be up to 24 tokens
    shorter. Its text depends only on the task, the length, the seed and its index, so a larger `limit` adds samples and
    changes none.

    Args:
        tasks: names of tasks; or one of :data:`GROUPS`, ``all`` or ``hard``.
        lengths: nominal lengths in tokens, chosen from :data:`LENGTHS`.
        limit: number of samples for each task and length.
        seed: random seed of the samples.
        questions: number of questions about one context, for the tasks in :data:`ASKING`; fewer where a context has
            fewer records. Tasks that always ask several have their own number.
        turns: relation of several questions about one context: ``separate``, each on its own copy of the cache; or
            turns of a conversation, whose cache is kept (``stored``) or made ``anew`` for each turn
            (:class:`kvbench.tasks.work.AskQuestions`).
        history: answers of the earlier turns of a conversation: ``reference`` or the model's ``own``.
    """

    version = 1
    scorer_version = 1

    name: str = "mini"
    tasks: tuple[str, ...] | str = "all"
    lengths: tuple[int, ...] = (1024, 2048, 4096)
    limit: int = bounded(100, minimum=1, maximum=10_000)
    seed: int = bounded(0, minimum=0, maximum=MOST)
    questions: int = bounded(1, minimum=1, maximum=64)
    turns: Turns = "separate"
    history: History = "reference"

    def check(self) -> None:
        """Raise ConfigError if the list of tasks or of lengths is empty, or has unknown or repeated entries.

        `turns` and `history` are also refused for a task that has only one question, and `questions` for one that
        cannot ask several.
        """
        check_list("dataset.tasks", self.names, TASKS)
        check_list("dataset.lengths", self.lengths, LENGTHS)
        for task in self.names:
            if task not in TASKS:
                raise ConfigError("dataset.tasks", task, "is not a task of dataset=mini", allowed=(*GROUPS, *TASKS))
        for length in self.lengths:
            if length not in LENGTHS:
                raise ConfigError("dataset.lengths", length, "is not a length of dataset=mini", allowed=LENGTHS)
        single = [task for task in self.names if task not in SEVERAL and (self.questions == 1 or task not in ASKING)]
        for key, usual in (("questions", 1), ("turns", "separate")):
            if (value := getattr(self, key)) != usual and single:
                allowed = (*SEVERAL, *ASKING) if self.questions > 1 else SEVERAL
                raise ConfigError(
                    f"dataset.{key}", value, f"has no effect on {single[0]}, which asks one question", allowed=allowed
                )
        if self.history != "reference" and self.turns == "separate":
            raise ConfigError(
                "dataset.history",
                self.history,
                "has no effect on questions that see no other",
                hint="dataset.turns=stored",
            )

    def fits(self, config: Setup) -> None:
        """Raise ConfigError if a length cannot fit into ``model.max_length``.

        The limit is exact for the bundled model, whose tokenizer counts the lengths. Other tokenizers may need fewer
        tokens for the same text, so for other models only lengths above twice ``model.max_length`` are refused here.
        Nothing is checked if the model has random weights.
        """
        model = config.model
        if model.random:
            return  # its tokenizer is not known yet
        most = model.max_length if str(model.path).startswith(BUNDLED) else 2 * model.max_length
        if max(self.lengths) > most:
            allowed = [length for length in LENGTHS if length <= most]
            raise ConfigError(
                "dataset.lengths",
                max(self.lengths),
                f"exceeds the model's limit (model.max_length={model.max_length})",
                allowed=allowed or "no length, because the model's context is too short for dataset=mini",
                hint=f"dataset.lengths=[{allowed[-1]}]" if allowed else "choose another model",
            )

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the selected tasks, in the order in which they run."""
        if isinstance(self.tasks, str):
            return GROUPS.get(self.tasks, (self.tasks,))
        return self.tasks

    def samples(self) -> Iterator[Sample]:
        """Yield `limit` samples for each task and length."""
        for task in self.names:
            for length in self.lengths:
                for index in range(self.limit):
                    yield self.sample(task, length, index)

    def sample(self, task: str, length: int, index: int) -> Sample:
        """Generate one sample, always the same for the same arguments and seed.

        `length` is nominal, and `index` counts from 0 among the samples of this task and length.

        Raises:
            TooShort: `length` cannot hold the task's records.
        """
        entry = TASKS[task]
        encode = encoder()
        rng = Rng("kvbench mini", self.version, task, length, self.seed, index)
        prose = Prose(rng)
        draft = entry.make(Setting(rng, prose, length, questions=self.questions))
        wrapper = WRAPPERS[draft.style]
        longest = max(len(ids) for ids in encode(tails(draft, wrapper)))
        room = length - 1 - entry.max_new_tokens - longest
        filler = CodeFiller(rng, encode) if draft.code else ProseFiller(prose, encode)
        document = compose(draft, wrapper, filler, encode, rng, room)
        question = draft.questions[0]
        return Sample(
            id=f"{task}@{length}/{index}",
            task=task,
            length=length,
            prompt=document.text + document.tails[0],
            context_span=document.context_span,
            query=question.query,
            answers=(question.answer.strip(),),
            max_new_tokens=entry.max_new_tokens,
            stop=("\n",),
            truncation="refuse",
            target=question.continuation,
            work=_work(draft, document, self.turns, self.history),
            meta={**_asked(question, document), **draft.meta},
        )

    def identity(self) -> dict[str, Any]:
        """Return tasks, lengths, seed and the tokenizer's checksum."""
        return {
            "target": "mini",
            "version": self.version,
            "tasks": list(self.names),
            "lengths": list(self.lengths),
            "seed": self.seed,
            "tokenizer": tokenizer_fingerprint(),
            **({} if self.questions == 1 else {"questions": self.questions}),
            **({} if self.turns == "separate" else {"turns": self.turns}),
            **({} if self.history == "reference" else {"history": self.history}),
        }

    def score(self, sample: Sample, prediction: str) -> dict[str, float]:
        """Score the first line of an answer with the scorer of its task (:data:`TASKS`)."""
        return _score_entry(sample.task, prediction, sample.answers[0], sample.meta)

    def score_questions(self, sample: Sample, predictions: Sequence[str]) -> dict[str, float]:
        """See :meth:`Task.score_questions`.

        For tasks with :attr:`kvbench.tasks.mini.task.MiniTask.all_right`, ``score`` is ``all``, and ``questions``
        is the mean. In a conversation ``score`` is always the mean, and ``turn01``, ``turn02``, ... are the scores of
        its turns.
        """
        scores = super().score_questions(sample, predictions)
        if self.turns != "separate":
            assert isinstance(sample.work, AskQuestions)
            turns = enumerate(zip(sample.work.questions, predictions, strict=True), 1)
            return scores | {
                f"turn{number:02}": _score_entry(sample.task, text, turn.answer, turn.meta)["score"]
                for number, (turn, text) in turns
            }
        if not TASKS[sample.task].all_right:
            return scores
        return {"score": scores["all"], "questions": scores["score"], "all": scores["all"]}


def _score_entry(task: str, prediction: str, answer: str, meta: Mapping[str, Any]) -> dict[str, float]:
    lines = prediction.strip().split("\n")
    return SCORERS[TASKS[task].scorer](lines[0], answer, meta)


def _work(draft: Draft, document: ComposedPrompts, turns: Turns, history: History) -> Work:
    """Return the kind of work: several questions on one cache if the sample has several, else plain generation."""
    if len(draft.questions) == 1:
        return Generate()
    questions = (
        Asked(tail, question.answer.strip(), question.query, question.continuation, _asked(question, document))
        for question, tail in zip(draft.questions, document.tails, strict=True)
    )
    return AskQuestions(len(document.text), tuple(questions), turns, history)


def _asked(question: DraftQuestion, document: ComposedPrompts) -> dict[str, Any]:
    """Return a question's `meta`, for scorers and analyses.

    ``answer_spans`` are character ranges of the prompt, ``depth`` is the place of the first range in the context
    (0..1), and ``parts`` are the values that are scored separately, if any.
    """
    spans = [[document.places[i] + start, document.places[i] + end] for i, start, end in question.evidence]
    start, end = document.context_span
    asked: dict[str, Any] = {
        "answer_spans": spans,
        "depth": round((spans[0][0] - start) / max(1, end - start), 4) if spans else None,
    }
    if question.parts:
        asked["parts"] = list(question.parts)
    return asked
