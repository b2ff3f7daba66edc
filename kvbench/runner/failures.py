"""Failures of a run: errors in single samples, and out-of-memory errors."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from kvbench.results import tables
from kvbench.results.code import Code
from kvbench.util.failures import bytes_asked, describe
from kvbench.util.progress import say

#: number of failed samples at which a run gives up: one bad record must not end it, a broken installation must
MAX_ERRORS = 3


@dataclass
class Failures:
    """The failures of a run so far.

    Args:
        label: short name of the run, for messages.
        code: digests of the current code (:mod:`kvbench.runner.sources`).
        errors: one record per error; ``sample`` in a record is None if no sample caused the error.
        oom: record of the out-of-memory error, in a sample or while the model was being loaded; None without one.
    """

    label: str
    code: Code = field(default_factory=dict)
    errors: list[dict[str, Any]] = field(default_factory=list)
    oom: dict[str, Any] | None = None

    @property
    def status(self) -> str:
        """The run's status: ``ok``, ``error`` or ``oom``."""
        return "oom" if self.oom is not None else "error" if self.errors else "ok"

    def samples(self) -> set[str | None]:
        """Return the ids of the samples that failed."""
        return {error["sample"] for error in self.errors}

    def add(self, sample: str, error: Exception, show: Callable[[str], None]) -> bool:
        """Record the error of a sample, and show it unless an earlier error had the same message.

        Args:
            sample: id of the sample.
            error: the error.
            show: function that shows a message to the user.

        Returns:
            False if :data:`MAX_ERRORS` samples have failed and the run must end, else True.
        """
        shown = [entry["message"] for entry in self.errors]
        self.errors.append({"sample": sample, **describe(error)})
        if self.errors[-1]["message"] not in shown:
            show(f"{self.label}: {sample}: {error}")
        if len(self.errors) >= MAX_ERRORS:
            show(f"{self.label}: stopped, because {MAX_ERRORS} samples failed")
        return len(self.errors) < MAX_ERRORS

    def ran_out(self, error: BaseException, sample: str | None) -> None:
        """Record an out-of-memory error, which counts as a result of the run rather than a failure.

        Args:
            error: the out-of-memory error.
            sample: id of the sample; None if the model was being loaded.
        """
        asked = bytes_asked(error)
        self.oom = {"bytes_asked": asked, "sample": sample, "message": str(error)[:1000], "code": self.code}
        size = "an unknown amount" if asked is None else tables.size(asked)
        say(
            f"{self.label}: out of memory during {sample or 'loading the model'} (requested: {size}); "
            "recorded as a result"
        )

    def say_repeats(self) -> None:
        """Show which samples failed with a message that had already been shown for another sample."""
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
    """Return the status and the errors to record for a run that ends because another rank failed.

    Args:
        failure: the failure: ``rank``, ``kind`` (name of the exception's class), ``message``, and ``oom`` (True if
            memory ran out).

    Returns:
        The status of the run (``interrupted``, ``oom`` or ``error``), the record for ``oom`` or None, and the record
        for an error or None.
    """
    message = f"rank {failure['rank']}: {failure['message']}"
    if failure["kind"] == "KeyboardInterrupt":
        return "interrupted", None, None
    if failure["oom"]:
        return "oom", {"bytes_asked": bytes_asked(MemoryError(message)), "sample": None, "message": message}, None
    return "error", None, {"sample": None, "type": failure["kind"], "message": message, "traceback": ""}
