"""Errors that name the thing, the value, what was expected and what to type instead.

Everything that kvbench raises on purpose derives from :class:`KvbenchError`; the command line prints such an error as
one message without a traceback and exits with :attr:`KvbenchError.exit_code`.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence


class KvbenchError(Exception):
    """Base of all errors that kvbench explains itself; ``str(error)`` is the whole message for the user."""

    exit_code = 1


class ConfigError(KvbenchError):
    """A wrong key, value or combination in the configuration; raised before weights or data are touched.

    Args:
        key: dotted key, for example ``method.residual``.
        value: what was given (``None`` where the key itself is wrong).
        problem: what is wrong, one clause.
        allowed: what may stand there (names, a range), listed in the message; of many names the nearest few.
        hint: what to type instead; where absent, the nearest of `allowed` is proposed.
        listing: what shows all of `allowed` where the message shows a few, for example a command.
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
        shown = cut(f"{key}={value}" if value is not None else key)
        lines = [f"{shown}: {problem}."]
        if self.allowed:
            given = str(value) if value is not None else key.rsplit(".", 1)[-1]
            lines.append(f"  allowed: {few(self.allowed, given, listing)}")
        if hint:
            lines.append(f"  hint: {hint}")
        super().__init__("\n".join(lines))


#: names that a message lists in full; of more than these it shows the nearest few
LISTED = 20
FEW = 6
#: characters of a value that a message repeats
SHOWN = 200


def few(names: Sequence[str] | str, given: str, listing: str = "") -> str:
    """`names` for a message: all of a short list, of a long one those nearest to `given`, and how to see the others."""
    if isinstance(names, str) or len(names) <= LISTED:
        return names if isinstance(names, str) else ", ".join(names)
    near = difflib.get_close_matches(given, names, n=FEW, cutoff=0.4) or names[:FEW]
    return f"{', '.join(near)}, ... ({len(names)} in all{listing and f'; {listing} lists them'})"


def cut(text: str) -> str:
    """`text`, of which a message repeats the beginning where it is long."""
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}... ({len(text)} characters)"


class CombinationError(ConfigError):
    """Values that are right alone and cannot run together: in a sweep over them one failed job, not a wrong command."""


class NonFiniteError(KvbenchError):
    """NaN or Inf in keys or values: names layer, key or value, and the position in the sequence."""


class CacheError(KvbenchError):
    """A cache was used in a way that it cannot serve (rollback past what is exact, a foreign attention, ...)."""


class ModelError(KvbenchError):
    """A model cannot be had or used: no weights, no network, gated, unsupported architecture."""


class DataError(KvbenchError):
    """A data set cannot be had or read: no network, a damaged file, a missing field."""


def nearest(name: str, names: Iterable[str]) -> str | None:
    """The entry of `names` closest to `name` in spelling, or None when nothing is near."""
    match = difflib.get_close_matches(name[:SHOWN], list(names), n=1, cutoff=0.5)
    return match[0] if match else None
