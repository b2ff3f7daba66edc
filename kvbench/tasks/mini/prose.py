"""A small English grammar that generates any amount of filler: fluent, meaningless sentences that rarely repeat."""

from __future__ import annotations

from kvbench.tasks.mini import vocabulary as words
from kvbench.tasks.mini.rng import Rng

_OBJECTS = words.TOOLS + words.FOODS + words.ANIMALS
_SUBJECTS = words.PEOPLE + words.PEOPLE + words.ANIMALS
_PREPOSITIONS = ("in", "near", "behind", "beside", "outside", "above", "opposite", "beyond", "inside", "under")
_TIMES = (
    "in the morning",
    "at noon",
    "before dawn",
    "after supper",
    "in the evening",
    "at midnight",
    "last winter",
    "that summer",
    "on Sunday",
    "on Monday",
    "on Friday",
    "years ago",
    "the day before",
    "towards autumn",
)
_LINKS = ("because", "although", "while", "before", "after", "until", "as soon as", "since", "unless", "so that")
_STARTS = (
    "However",
    "Meanwhile",
    "Of course",
    "In those days",
    "At last",
    "For once",
    "To everyone's surprise",
    "As a rule",
    "Long ago",
    "On the way home",
    "By and by",
    "In the end",
    "Now and then",
    "Even so",
)
_SAYINGS = ("said", "thought", "believed", "wrote", "claimed", "admitted", "remembered", "feared", "knew", "declared")
_VERDICTS = (
    "it was too late",
    "nothing could be done",
    "there was no reason to hurry",
    "the matter was settled",
    "everything would be all right",
    "somebody had to pay",
    "it made no difference",
    "no one would notice",
)


def article(text: str) -> str:
    """Return `text` with ``a`` or ``an`` in front of it, for example ``an old anchor``."""
    return ("an " if text[0] in "aeiou" else "a ") + text


def noun_phrase(rng: Rng, nouns: list[str]) -> str:
    """Return a random noun phrase, for example ``the old, rusty lantern``.

    It has an article, one of `nouns`, and in five cases of eight one or two adjectives or a colour.
    """
    noun = rng.choice(nouns)
    kind = rng.below(8)
    if kind < 3:
        noun = f"{rng.choice(words.ADJECTIVES)} {noun}"
    elif kind == 3:
        noun = f"{rng.choice(words.COLOURS)} {noun}"
    elif kind == 4:
        noun = f"{rng.choice(words.ADJECTIVES)}, {rng.choice(words.ADJECTIVES)} {noun}"
    return f"the {noun}" if rng.below(5) < 3 else article(noun)


def subject(rng: Rng) -> str:
    """Return a random subject for a sentence, for example ``Clara``, ``the old baker`` or ``Clara and the baker``."""
    kind = rng.below(8)
    if kind < 2:
        return rng.choice(words.FIRST_NAMES)
    if kind == 2:
        return f"{rng.choice(words.FIRST_NAMES)} and {noun_phrase(rng, words.PEOPLE)}"
    return noun_phrase(rng, _SUBJECTS)


def place_phrase(rng: Rng) -> str:
    """Return a random prepositional phrase of place, for example ``near the old bridge``."""
    return f"{rng.choice(_PREPOSITIONS)} {noun_phrase(rng, words.PLACES)}"


def clause(rng: Rng) -> str:
    """Return a random main clause in the past tense, without an initial capital or a final full stop."""
    kind = rng.below(9)
    who = subject(rng)
    if kind < 4:
        adverb = f"{rng.choice(words.ADVERBS)} " if rng.below(4) == 0 else ""
        tail = f" {place_phrase(rng)}" if rng.below(3) == 0 else ""
        return f"{who} {adverb}{rng.choice(words.TRANSITIVE)} {noun_phrase(rng, _OBJECTS)}{tail}"
    if kind < 6:
        return f"{who} {rng.choice(words.INTRANSITIVE)} {rng.choice(words.ADVERBS)} {place_phrase(rng)}"
    if kind == 6:
        return f"{who} {rng.choice(_SAYINGS)} that {rng.choice(_VERDICTS)}"
    if kind == 7:
        return f"{who} {rng.choice(words.TRANSITIVE)} {noun_phrase(rng, words.THINGS)} of {subject(rng)}"
    return (
        f"there was {article(rng.choice(words.ADJECTIVES))} {rng.choice(words.TOOLS)} of "
        f"{rng.choice(words.MATERIALS)} {place_phrase(rng)}"
    )


def sentence(rng: Rng) -> str:
    """Return a random sentence of 4 to about 35 words, with an initial capital and a final full stop.

    Sentences rarely repeat, but nothing prevents it (see :class:`Prose`).
    """
    kind = rng.below(12)
    if kind < 5:
        text = clause(rng)
    elif kind < 7:
        text = f"{clause(rng)} {rng.choice(_LINKS)} {clause(rng)}"
    elif kind == 7:
        text = f"{rng.choice(_STARTS)}, {clause(rng)}"
    elif kind == 8:
        text = f"{rng.choice(_TIMES)}, {clause(rng)}"
    elif kind == 9:
        text = f"{clause(rng)}, and {clause(rng)} {rng.choice(_TIMES)}"
    elif kind == 10:
        text = f"{noun_phrase(rng, words.THINGS)} was {rng.choice(words.ADJECTIVES)}, but {clause(rng)}"
    else:
        text = f"{clause(rng)}; {clause(rng)}"
    return f"{text[0].upper()}{text[1:]}."


class Prose:
    """Generator of a sample's sentences; it remembers those that it has returned, and never returns one twice."""

    def __init__(self, rng: Rng) -> None:
        self.rng = rng
        self._seen: set[str] = set()

    def sentence(self) -> str:
        """Return a sentence that this object has not returned before."""
        while True:
            text = sentence(self.rng)
            if text not in self._seen:
                self._seen.add(text)
                return text

    def passage(self, n_words: int) -> str:
        """Return whole sentences, without line breaks, until they have at least `n_words` words in total."""
        parts: list[str] = []
        count = 0
        while count < n_words:
            text = self.sentence()
            parts.append(text)
            count += text.count(" ") + 1
        return " ".join(parts)
