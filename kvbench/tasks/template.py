r"""Templates with fields of a record in braces, ``Question: {question}\nAnswer:``, and options of multiple choice.

The answer to a question with options is the letter of the right option.

Fields that a record lacks, and values that are neither strings nor finite numbers, raise DataError.
"""

from __future__ import annotations

import math
import string
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvbench.errors import ConfigError, DataError
from kvbench.metrics.answers import LETTERS
from kvbench.tasks.records import FILLED_TEXT, Kind, Record, is_text

Span = tuple[int, int]

_ABSENT = object()


@dataclass(frozen=True)
class Template:
    """A text with placeholders, ``{field}``, that are filled with the fields of a record.

    In a placeholder, a dot leads into a nested field (``{question.stem}``), and ``|`` separates alternatives, of which
    the first that the record has is used (``{question.stem|question_stem}``). Literal braces are doubled: ``{{`` and
    ``}}``. `parts` are pairs of a literal text and the name of the field after it; the last name is None if the
    template ends with literal text.
    """

    key: str
    parts: tuple[tuple[str, str | None], ...]

    @classmethod
    def parse(cls, text: str, key: str) -> Template:
        r"""Parse a template as written in a configuration or on the command line.

        A backslash followed by ``n`` or ``t`` becomes a line break or a tab, because Hydra's command line leaves them
        as two characters.

        Raises:
            ConfigError: braces are unbalanced or empty, or a placeholder has a conversion or a format, as in ``{x!r}``
                or ``{x:d}``.
        """
        try:
            pieces = list(string.Formatter().parse(text.replace("\\n", "\n").replace("\\t", "\t")))
        except ValueError as error:
            raise ConfigError(
                key, text, f"is not a template: {error}", hint="write fields as {field}, and braces as {{ and }}"
            ) from error
        for _, field, form, conversion in pieces:
            if field is not None and (form or conversion or not all(part.strip() for part in field.split("|"))):
                wrong = field + (f"!{conversion}" if conversion else "") + (f":{form}" if form else "")
                raise ConfigError(
                    key,
                    text,
                    f"{{{wrong}}} is not the name of a field",
                    hint="write only a name in braces, such as {question}",
                )
        return cls(key, tuple((literal, field) for literal, field, _, _ in pieces))

    @classmethod
    def of(cls, text: str, key: str) -> Template:
        """Parse a template (:meth:`parse`); a text without braces is the name of a field: ``name`` means ``{name}``."""
        return cls.parse(text if "{" in text or "}" in text else f"{{{text}}}", key)

    @property
    def fields(self) -> list[str]:
        """Names in the placeholders, in their order in the template, including dots and alternatives."""
        return [field for _, field in self.parts if field is not None]

    def render(self, record: Record, place: str, given: Mapping[str, str]) -> tuple[str, dict[str, Span]]:
        """Fill the template with the fields of one record, which must be strings or numbers.

        `given` has texts to use instead of the record's values, keyed by the name in the placeholder.

        Returns:
            The filled text, and a dict from the name in each placeholder to the half-open character range of its value
            in that text.
        """
        text, spans = "", {}
        for literal, field in self.parts:
            text += literal
            if field is not None:
                filling = given[field] if field in given else text_of(lookup(record, field, place), field, place)
                spans[field] = len(text), len(text) + len(filling)
                text += filling
        return text, spans


def lookup(record: Record, field: str, place: str) -> Any:
    """Return the value of a record's field, which may be nested or have alternative names.

    ``a.b`` is the field b inside the field a; ``a|b`` is a, or b if the record has no a.
    """
    for name in field.split("|"):
        value = _inside(record, name.strip())
        if value is not _ABSENT:
            return value
    raise DataError(f"{place}: the record has no field '{field}'; its fields are {', '.join(map(str, record))}.")


def _inside(record: Any, name: str) -> Any:
    if not isinstance(record, Mapping):
        return _ABSENT
    if name in record:
        return record[name]
    outer, dot, inner = name.partition(".")
    return _inside(record[outer], inner) if dot and outer in record else _ABSENT


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


TEXT_OR_NUMBER = Kind("a string or a number", lambda value: is_text(value) or _is_number(value))


def text_of(value: Any, field: str, place: str) -> str:
    """Convert a field's value, which must be a string or a finite number, to a string."""
    TEXT_OR_NUMBER.check(value, field, place)
    if isinstance(value, float) and not math.isfinite(value):
        raise DataError(f"{place}: field '{field}' is {value}; expected a string or a finite number.")
    return str(value)


@dataclass(frozen=True)
class Entry:
    """One record converted to a prompt, to which few-shot examples can still be added.

    Args:
        context: half-open character range of the context in `prompt`; None if the data set does not define a context.
        query: the question, with which a retriever searches the context; may be empty.
        options: number of options of a multiple-choice question (metric ``choice``); 0 for other metrics.
    """

    prompt: str
    context: Span | None
    query: str
    answers: tuple[str, ...]
    record: Record
    options: int = 0

    @property
    def target(self) -> str:
        """The first answer as it would follow the prompt: after a space, unless the prompt ends in whitespace."""
        return self.answers[0] if self.prompt[-1:].isspace() else f" {self.answers[0]}"


Option = tuple[str, str]


def choice_options(value: Any, field: str, place: str) -> list[Option]:
    """Return the options of a multiple-choice question, each as a pair of its label and its text.

    Args:
        value: a list of texts, which get the labels A, B, ...; a list of ``{"label", "text"}``; or
            ``{"label": [...], "text": [...]}``, the form of ARC and OpenBookQA.

    Raises:
        DataError: `value` does not have one of these forms, has fewer than 2 or more than 26 options, or has an option
            without text.
    """
    pairs: list[tuple[Any, Any]]
    if isinstance(value, Mapping) and isinstance(value.get("label"), list) and isinstance(value.get("text"), list):
        if len(value["label"]) != len(value["text"]):
            raise DataError(
                f"{place}: field '{field}' has {len(value['label'])} labels for {len(value['text'])} texts."
            )
        pairs = list(zip(value["label"], value["text"], strict=True))
    elif isinstance(value, list) and all(
        isinstance(option, Mapping) and {"label", "text"} <= set(option) for option in value
    ):
        pairs = [(option["label"], option["text"]) for option in value]
    elif isinstance(value, list):
        pairs = list(zip(LETTERS, value, strict=False)) if len(value) <= len(LETTERS) else [("", "")] * len(value)
    else:
        raise DataError(
            f"{place}: field '{field}' is not a list of options: expected texts, or labels and texts"
            " ({'label': [...], 'text': [...]})."
        )
    if not 2 <= len(pairs) <= len(LETTERS):
        raise DataError(f"{place}: field '{field}' has {len(pairs)} options; expected 2 to {len(LETTERS)}.")
    for _, text in pairs:
        FILLED_TEXT.check(text, field, place)
    return [(text_of(label, field, place), text) for label, text in pairs]


def lettered_options(offered: Sequence[Option]) -> str:
    """Return the options as text for a prompt: one line per option, lettered in order, as ``A. text``."""
    return "\n".join(f"{letter}. {text}" for letter, (_, text) in zip(LETTERS, offered, strict=False))


def correct(value: Any, offered: Sequence[Option], field: str, place: str) -> str:
    """Return the letter of the right option, A for the first.

    Args:
        value: the right option as the record gives it: its label, its text, or its index from 0 (an integer). If
            `offered` is empty, it must be the letter itself.
        offered: label and text of each option; empty if the record's prompt already contains the options.

    Raises:
        DataError: `value` does not identify exactly one option.
    """
    if not offered:
        if isinstance(value, str) and len(value.strip()) == 1 and value.strip() in LETTERS:
            return value.strip()
        raise DataError(
            f"{place}: field '{field}' is {value!r}; expected a letter A to Z (or set dataset.choices "
            "to the field of the options)."
        )
    if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < len(offered):
        return LETTERS[value]
    if isinstance(value, str):
        for column in (0, 1):
            places = [index for index, option in enumerate(offered) if option[column].strip() == value.strip()]
            if len(places) == 1:
                return LETTERS[places[0]]
    labels = ", ".join(label for label, _ in offered)
    raise DataError(
        f"{place}: field '{field}' is {value!r}; expected one of {labels}, the text of one option, or its index from 0."
    )
