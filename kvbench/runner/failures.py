"""Failures of a run: errors in single samples, and out-of-memory errors."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from kvbench.results import tables
from kvbench.results.code import Code
from kvbench.util.failures import bytes_asked, describe_error
from kvbench.util.progress import say

#: number of failed samples at which a run gives up: one bad record must not end it, a broken installation must
MAX_ERRORS = 3


@dataclass
class Failures:
    """Records of the errors and of the out-of-memory error that occurred in a run so far.

    Args:
        code: digests of the current code (:mod:`kvbench.runner.sources`).
        errors: ``{sample, type, message, traceback}`` of each error; ``sample`` is None for an error outside a sample.
        oom: ``{bytes_asked, sample, message, code}`` of the out-of-memory error; ``sample`` is None if memory ran out
            while the model was being loaded. None if memory sufficed.
    """

    label: str
    code: Code = field(default_factory=dict)
    errors: list[dict[str, Any]] = field(default_factory=list)
    oom: dict[str, Any] | None = None

    @property
    def status(self) -> str:
        """The run's status: ``oom`` if memory ran out, else ``error`` if there was an error, else ``ok``."""
        return "oom" if self.oom is not None else "error" if self.errors else "ok"

    def samples(self) -> set[str | None]:
        """Return the ids of the samples that raised errors, and None if there was an error outside a sample."""
        return {error["sample"] for error in self.errors}

    def add(self, sample: str, error: Exception, show: Callable[[str], None]) -> bool:
        """Record the error of a sample, and show it unless an earlier error had the same message.

        The result is True if the run can go on; False if :data:`MAX_ERRORS` samples have failed, at which the run must
        end.
        """
        shown = [entry["message"] for entry in self.errors]
        self.errors.append({"sample": sample, **describe_error(error)})
        if self.errors[-1]["message"] not in shown:
            show(f"{self.label}: {sample}: {error}")
        if len(self.errors) >= MAX_ERRORS:
            show(f"{self.label}: stopped, because {MAX_ERRORS} samples failed")
        return len(self.errors) < MAX_ERRORS

    def ran_out(self, error: BaseException, sample: str | None) -> None:
        """Record and show an out-of-memory error. It gives the run the status ``oom``, a result rather than a failure.

        `sample` is None if the model was being loaded.
        """
        asked = bytes_asked(error)
        self.oom = {"bytes_asked": asked, "sample": sample, "message": str(error)[:1000], "code": self.code}
        size = "an unknown amount" if asked is None else tables.size(asked)
        say(
            f"{self.label}: out of memory during {sample or 'loading the model'} (requested: {size}); "
            "recorded as a result"
        )

    def say_repeats(self) -> None:
        """Show which samples failed with the same message as an earlier sample.

        Their own errors were not shown, because :meth:`add` shows each message only once.
        """
        alike: dict[str, list[str]] = {}
        for error in self.errors:
            alike.setdefault(error["message"], []).append(str(error["sample"]))
        for first, *others in alike.values():
            if others:
                say(
                    f"{self.label}: {len(others)} more samples failed with the same error as {first}: "
                    f"{', '.join(others)}"
                )


def lost(failure: Mapping[str, Any]) -> tuple[str, dict[str, Any] | None, dict[str, Any] | None]:
    """Return how to record a run that ends because another rank failed.

    `failure` has ``rank``, ``kind`` (name of the exception's class), ``message``, and ``oom`` (True if memory ran out).

    Returns:
        The status of the run (``interrupted``, ``oom`` or ``error``), the record of the out-of-memory error or None,
        and the record of any other error or None. The records are those of :class:`Failures`, except that the first
        does not contain ``code``.
    """
    message = f"rank {failure['rank']}: {failure['message']}"
    if failure["kind"] == "KeyboardInterrupt":
        return "interrupted", None, None
    if failure["oom"]:
        return "oom", {"bytes_asked": bytes_asked(MemoryError(message)), "sample": None, "message": message}, None
    return "error", None, {"sample": None, "type": failure["kind"], "message": message, "traceback": ""}
