"""Errors that name the thing, the value, what was expected and what to type instead.

Everything that kvbench raises on purpose derives from :class:`KvbenchError`; the command line prints such an error as
one message without a traceback and exits with :attr:`KvbenchError.exit_code`.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class KvbenchError(Exception):
    """Base of all errors that kvbench explains itself; ``str(error)`` is the whole message for the user."""

    exit_code = 1


class ConfigError(KvbenchError):
    """A wrong key, value or combination in the configuration; raised before weights or data are touched.

    Args:
        key: dotted key, for example ``method.residual``.
        value: what was given (``None`` where the key itself is wrong).
        problem: what is wrong, one clause.
        allowed: what may stand there (names, a range), listed in the message.
        hint: what to type instead; where absent, the nearest of `allowed` is proposed.
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
    ) -> None:
        self.key, self.value, self.problem = key, value, problem
        self.allowed = allowed if isinstance(allowed, str) else [str(a) for a in allowed]
        if not hint and not isinstance(self.allowed, str):
            near = nearest(str(value if value is not None else key.rsplit(".", 1)[-1]), self.allowed)
            hint = f"did you mean '{near}'?" if near else ""
        self.hint = hint
        shown = f"{key}={value}" if value is not None else key
        lines = [f"{shown}: {problem}."]
        if self.allowed:
            lines.append(f"  allowed: {self.allowed if isinstance(self.allowed, str) else ', '.join(self.allowed)}")
        if hint:
            lines.append(f"  hint: {hint}")
        super().__init__("\n".join(lines))


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
    match = difflib.get_close_matches(name, list(names), n=1, cutoff=0.5)
    return match[0] if match else None
