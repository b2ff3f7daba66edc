"""Exceptions of kvbench. Their messages name the setting, its value, what is allowed, and what to type instead.

Everything that kvbench raises on purpose derives from :class:`KvbenchError`; the command line prints such an error as
one message without a traceback and exits with :attr:`KvbenchError.exit_code`.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Sequence


class KvbenchError(Exception):
    """Base of all errors that kvbench raises on purpose; ``str(error)`` is the complete message for the user."""

    exit_code = 1


class ConfigError(KvbenchError):
    """A wrong key, value or combination in the configuration; raised before weights or data are loaded.

    Args:
        key: dotted key, for example ``method.residual``.
        value: the value that was given; None if the key itself is wrong.
        problem: what is wrong, as one clause that follows ``KEY=VALUE:``.
        allowed: valid names, or a description of the valid range. The message lists at most 20 names; of a longer list
            it shows the few that are closest in spelling.
        hint: what the user should do, as an imperative phrase ("name a draft method"). It may also consist only of what
            to type (``KEY=VALUE``, ``--option``, ``python -m ...``); the message then shows "set", "use" or "run" in
            front (:func:`imperative`). If empty, the message proposes the name in `allowed` that is closest in
            spelling.
        listing: a command that lists all of `allowed`, named in the message if it shows only a few.
    """

    exit_code = 2

    def __init__(
        self,
        key: str,
        value: object = None,
        problem: str = "is not allowed",
        *,
        allowed: Iterable[object] | str = (),
        hint: str = "",
        listing: str = "",
    ) -> None:
        self.key, self.value, self.problem = key, value, problem
        self.allowed = allowed if isinstance(allowed, str) else [str(a) for a in allowed]
        if not hint and not isinstance(self.allowed, str):
            near = nearest(str(value if value is not None else key.rsplit(".", 1)[-1]), self.allowed)
            hint = f"did you mean '{near}'?" if near else ""
        self.hint = hint
        typed = str(value).lower() if isinstance(value, bool) else value
        shown = cut_text(f"{key}={typed}" if value is not None else key)
        lines = [f"{shown}: {problem}."]
        if self.allowed:
            given = str(value) if value is not None else key.rsplit(".", 1)[-1]
            lines.append(f"  allowed: {few(self.allowed, given, listing)}")
        if hint:
            lines.append(f"  hint: {imperative(hint)}")
        super().__init__("\n".join(lines))


#: longest list of names that a message shows in full, and how many names it shows of a longer one
LISTED = 20
FEW = 6
#: longest value, in characters, that a message shows in full
SHOWN = 200


#: beginnings of hints that consist of what to type, and the verb that belongs in front of them
VERBS = {r"[A-Za-z_][\w./]*=": "set", r"--[a-z]": "use", r"(pip|python|torchrun) ": "run"}


def imperative(hint: str) -> str:
    """Return a hint with the verb "set", "use" or "run" in front if it begins with something to type.

    Args:
        hint: an imperative phrase, which is returned unchanged, or an override (``KEY=VALUE``), an option
            (``--option``) or a command (``python -m ...``).
    """
    for beginning, verb in VERBS.items():
        if re.match(beginning, hint):
            return f"{verb} {hint}"
    return hint


def few(names: Sequence[str] | str, given: str, listing: str = "") -> str:
    """Return names as text for a message, shortened if there are more than :data:`LISTED`.

    Args:
        names: the names; or a text, which is returned unchanged.
        given: the name that the user typed. A shortened list contains only the names most similar to it.
        listing: command that lists all names, which a shortened list mentions; empty if there is none.
    """
    if isinstance(names, str) or len(names) <= LISTED:
        return names if isinstance(names, str) else ", ".join(names)
    near = difflib.get_close_matches(given, names, n=FEW, cutoff=0.4) or names[:FEW]
    return f"{', '.join(near)}, ... ({len(names)} in all{listing and f'; {listing} lists them'})"


def cut_text(text: str) -> str:
    """Return `text`; if it is longer than :data:`SHOWN` characters, only its beginning, followed by its length."""
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}... ({len(text)} characters)"


class CombinationError(ConfigError):
    """Values that are valid individually but not together.

    In a sweep, this error does not stop the other jobs: only the job with the combination fails.
    """


class RangeError(ConfigError):
    """A number of the right type outside its bounds (:func:`kvbench.util.schema.bounded`)."""


class NonFiniteError(KvbenchError):
    """NaN or Inf in keys, values, hidden states or logits, or a state too large for fp16; the message says where."""


class CacheError(KvbenchError):
    """An operation that a cache does not support, for example a rollback of tokens that are already packed."""


class ModelError(KvbenchError):
    """A model that cannot be loaded or used: no weights, no network, gated access, or an unsupported architecture."""


class DataError(KvbenchError):
    """A data set that cannot be fetched or read: no network, a damaged file, or a missing field."""


class LengthError(DataError):
    """A data set of which no text is long enough for a prompt of the length that is asked for."""


def disk_message(error: OSError) -> str:
    """Return what a command prints if the system refuses a file: its name, the reason, and what to check."""
    place = f"{error.filename}: " if error.filename else ""
    hint = "check the folder's permissions, the free disk space and the length of the name"
    return f"{place}{error.strerror or error}.\n  hint: {hint}"


def nearest(name: str, names: Iterable[str]) -> str | None:
    """Return the name in `names` that is spelled most like `name`; None if none is similar.

    Of numbers, return the one that is nearest in size.
    """
    names = list(names)
    try:
        return min(names, key=lambda number: abs(float(number) - float(name)), default=None)
    except ValueError:  # not all are numbers
        pass
    match = difflib.get_close_matches(name[:SHOWN], names, n=1, cutoff=0.5)
    return match[0] if match else None
