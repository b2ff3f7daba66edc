"""Options of multiple-choice questions, and the letter of the right one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from kvbench.errors import DataError
from kvbench.metrics.answers import LETTERS
from kvbench.tasks.records import FILLED_TEXT
from kvbench.tasks.template import text_of

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
