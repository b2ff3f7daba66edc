r"""Templates with fields of a record in braces: ``Question: {question}\nAnswer:``."""

from __future__ import annotations

import string
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kvbench.errors import ConfigError, DataError
from kvbench.tasks.records import Kind, Record, is_text

Span = tuple[int, int]

_ABSENT = object()


@dataclass(frozen=True)
class Template:
    """A text with fields of a record in braces.

    A field may be nested (``question.stem``) and have alternatives (``question.stem|question_stem``), of which the
    first that a record has is used. A literal brace is written twice.

    Args:
        key: option that holds the template, for messages.
        parts: literal texts, each with the field that follows it; the field is None after the last text.
    """

    key: str
    parts: tuple[tuple[str, str | None], ...]

    @classmethod
    def parse(cls, text: str, key: str) -> Template:
        """Return the template written as `text`; `key` is the option that holds it.

        A backslash and an n is a line break, a backslash and a t a tab: Hydra's command line hands them on as they are.

        Raises:
            ConfigError: braces are unbalanced, or a field is empty or has a conversion or a format.
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
        """Return the template written as `text`; a text without braces is the name of a single field."""
        return cls.parse(text if "{" in text or "}" in text else f"{{{text}}}", key)

    @property
    def fields(self) -> list[str]:
        """Names of the fields, in order."""
        return [field for _, field in self.parts if field is not None]

    def render(self, record: Record, place: str, given: Mapping[str, str]) -> tuple[str, dict[str, Span]]:
        """Return the template filled with one record, and the half-open character range of each field in it.

        Args:
            record: a record whose values for these fields are texts or numbers.
            place: file and line of the record, for messages.
            given: texts by field, used in place of the record's own fields.

        Raises:
            DataError: the record lacks a field, or its value is neither a text nor a number.
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
    """Return a record's value for a field, which may be nested or list alternatives (see :class:`Template`).

    Raises:
        DataError: the record has none of the alternatives; the message begins with `place`.
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
    """Return a text or a number as text. Raises DataError, which names `place` and `field`, for any other value."""
    TEXT_OR_NUMBER.check(value, field, place)
    return str(value)
