"""Composition of prompts of a given length: records between filler, with instructions around both.

A draft is a sample before filler is added: the records to hide, and the questions about them.

A text is composed of pieces that are tokenized separately. Every piece except the first begins with whitespace, and
none ends with it. A byte-level pre-tokenizer never joins a non-space character with a space after it, so the tokens of
all pieces together are those of the complete text.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

from kvbench.errors import DataError
from kvbench.tasks.mini.filler import Encode, Filler, Piece
from kvbench.tasks.mini.rng import Rng


@dataclass(frozen=True)
class DraftQuestion:
    """One question about a sample's context, with its answer and where the context gives it.

    Args:
        prompt: the question as it stands after the context. It begins with whitespace and does not end with it.
        query: the bare question, without a label such as ``Question:``, as input for methods that search the context
            for relevant passages.
        answer: the right answer, without the space that separates it from `prompt` (but see `glued`).
        evidence: the places of the answer in the context. Each is a triple: the index of a record, and the beginning
            and end of a half-open character range in that record.
        glued: True if `answer` follows `prompt` directly, without a space in between, as in code. `answer` then begins
            with whatever whitespace it needs.
        parts: the single values in the answer if each is scored by itself, else empty.
    """

    prompt: str
    query: str
    answer: str
    evidence: tuple[tuple[int, int, int], ...]
    glued: bool = False
    parts: tuple[str, ...] = ()

    @property
    def continuation(self) -> str:
        """The answer with any space before it, so that ``prompt + continuation`` is the complete text."""
        return self.answer if self.glued else f" {self.answer}"


@dataclass
class Draft:
    """Content of a sample without its filler: texts with the answers (records), and questions about them.

    The first question ends the sample's own prompt. `meta` is added to the `meta` of the finished sample.

    Args:
        style: key in :data:`kvbench.tasks.mini.compose.WRAPPERS` of the instructions around the context.
        records: texts to scatter among the filler. Each begins on a new line, and has no whitespace at either end.
        ordered: True to keep the records in this order in the context, False to shuffle them.
        closing: text at the end of the context, after all records and filler. It is empty or begins with whitespace.
        code: True for generated code as filler, False for prose.
    """

    style: str
    records: list[str]
    questions: list[DraftQuestion]
    ordered: bool = False
    closing: str = ""
    code: bool = False
    meta: dict[str, object] = field(default_factory=dict)


class Writer(Protocol):
    """Interface of the generator from which tasks take sentences (:class:`kvbench.tasks.mini.prose.Prose`)."""

    def sentence(self) -> str:
        """Return one sentence, without line breaks."""
        ...

    def passage(self, n_words: int) -> str:
        """Return whole sentences, without line breaks, until they have at least `n_words` words in total."""
        ...


@dataclass
class Setting:
    """Input from which a task generates one sample: its random numbers, its length, and whether it is for training.

    Args:
        length: the sample's length in tokens, which bounds the number of records.
        vary: True for training samples, whose records vary in number and size at random. False for evaluation samples,
            where both are fixed.
        questions: number of questions to ask; fewer in a sample with too few records.
    """

    rng: Rng
    writer: Writer
    length: int
    vary: bool = False
    questions: int = 1

    def count(self, most: int, tokens_each: int, least: int = 1) -> int:
        """Return how many records the sample should have.

        An evaluation sample gets `most` records, or as many as fit into its length at `tokens_each` tokens each if
        these are fewer, but at least `least`. A training sample gets a random number between a third of that number
        (but at least `least`) and the whole.
        """
        n = max(least, min(most, self.length // tokens_each))
        return self.rng.between(max(least, n // 3), n) if self.vary else n

    def size(self, usual: int, low: int, high: int) -> int:
        """Return a parameter of a task: `usual` for evaluation, a random integer in [`low`, `high`] for training."""
        return self.rng.between(low, high) if self.vary else usual

    def pick(self, n_records: int) -> list[int]:
        """Choose at random which records to ask about, and return their indices; none is chosen twice.

        There are :attr:`questions` of them, or `n_records` if that is smaller.
        """
        return self.rng.sample(range(n_records), min(self.questions, n_records))


@dataclass(frozen=True)
class Wrapper:
    """The instructions that a prompt puts before and after its context, without whitespace at their ends.

    `head` stands before the context, `tail` between the context and the question; `tail` may be empty.
    """

    head: str
    tail: str = ""


#: the wrappers of `mini`'s samples, by style of task
WRAPPERS = {
    "qa": Wrapper(
        "Read the text below and answer the question about it. Give only the answer.",
        "Answer the question from the text above. Give only the answer and no other words.",
    ),
    "few_shot": Wrapper("Find the label of the last text. Here are some examples of texts and their labels."),
    "problems": Wrapper("Read the text below, then solve the last problem step by step, as the examples do."),
    "code": Wrapper("Complete the line of code as it stands in the code below."),
}

#: other wordings, also used in the bundled model's training data, so that the model does not depend on one
VARIANTS = {
    "qa": (
        Wrapper(
            "Answer the question based on the given passages. Only give me the answer and do not output any other"
            " words.\n\nThe following are given passages.",
            "Answer the question based on the given passages. Only give me the answer and do not output any other"
            " words.",
        ),
        Wrapper(
            "Read the following text and answer briefly.",
            "Now, answer the following question based on the above text, only give me the answer and do not output"
            " any other words.",
        ),
        Wrapper("Some special information is hidden in the text. Memorize it. I will ask about it afterwards."),
        Wrapper("Text:"),
    ),
    "few_shot": (
        Wrapper("Please determine the type of the text below. Here are some examples."),
        Wrapper("Texts and labels:"),
    ),
    "problems": (
        Wrapper("Answer the last problem after the examples."),
        Wrapper("Text and problems:"),
    ),
    "code": (
        Wrapper("Please complete the code given below."),
        Wrapper("# a module"),
    ),
}


class TooShort(DataError):
    """Error for a sample whose nominal length cannot hold even its instruction and records, without any filler."""


@dataclass(frozen=True)
class ComposedPrompts:
    """The finished prompts of a sample: the part that all its questions share, and the rest of each question's prompt.

    The shared part is an instruction and the context. The context is the filler with the task's records (the texts that
    hold the answers) in it.

    Args:
        pieces: the shared part, in order, as separately tokenized pieces of text.
        context_span: half-open character range of the context in :attr:`text`.
        places: for each record, the index in :attr:`text` of its first character.
        tails: for each question, the text that follows the shared part: a second instruction, if any, and the question.
    """

    pieces: list[Piece]
    context_span: tuple[int, int]
    places: list[int]
    tails: list[str]

    @property
    def text(self) -> str:
        """The part that all prompts of the sample share, the instruction and the context, as one string."""
        return "".join(piece.text for piece in self.pieces)


def tails(draft: Draft, wrapper: Wrapper) -> list[str]:
    """Return, for each question, the text that follows the context: a second instruction, if any, and the question."""
    tail = f"\n\n{wrapper.tail}" if wrapper.tail else ""
    return [tail + question.prompt for question in draft.questions]


def compose(draft: Draft, wrapper: Wrapper, filler: Filler, encode: Encode, rng: Rng, room: int) -> ComposedPrompts:
    """Build a sample's prompts of a given length by inserting its records between paragraphs of filler.

    Every place between two paragraphs, and before the first and after the last, is equally likely for a record. Unless
    the draft fixes the order of the records, it is random as well. The first instruction and the context may take
    `room` tokens together, measured with `encode`.

    Raises:
        TooShort: the first instruction and the records alone exceed `room` tokens.
    """
    gap = "\n\n" if draft.code else "\n"
    fixed = [wrapper.head, *(gap + record for record in draft.records), *([draft.closing] if draft.closing else [])]
    ids = encode(fixed)
    left = room - sum(map(len, ids))
    if left < 0:
        raise TooShort(
            f"a sample of {room} tokens is too short for its {len(draft.records)} records, which take "
            f"{room - left} tokens"
        )
    head = Piece(fixed[0], ids[0], "fixed")
    records = [Piece(text, i, "record") for text, i in zip(fixed[1:], ids[1:], strict=True)][: len(draft.records)]
    # many records need short paragraphs, or several of them would be adjacent
    sentences = max(1, min(4, left // (20 * (len(records) + 6))))
    paragraphs = filler.paragraphs(left, sentences)
    order = list(range(len(records)))
    if not draft.ordered:
        rng.shuffle(order)
    gaps = sorted(rng.below(len(paragraphs) + 1) for _ in records)
    pieces = [head]
    at = len(head.text)
    places = [0] * len(records)
    for i in range(len(paragraphs) + 1):
        while gaps and gaps[0] == i:
            gaps.pop(0)
            which = order.pop(0)
            places[which] = at + len(gap)
            pieces.append(records[which])
            at += len(records[which].text)
        if i < len(paragraphs):
            pieces += paragraphs[i]
            at += sum(len(piece.text) for piece in paragraphs[i])
    if draft.closing:
        pieces.append(Piece(draft.closing, ids[-1], "record"))
        at += len(draft.closing)
    first = pieces[1].text if len(pieces) > 1 else ""
    start = len(head.text) + len(first) - len(first.lstrip())
    return ComposedPrompts(pieces, (start, at), places, tails(draft, wrapper))
