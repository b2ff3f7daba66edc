"""A sweep on the page: all its jobs with their states, whether or not they have a run yet."""

from __future__ import annotations

import os
import shlex
from collections.abc import Sequence
from typing import Any

from kvbench.page.numbers import shorten_middle, trimmed, whole_or_empty
from kvbench.results.sweeps import Progress, Sweep

#: maximum length of the sweep's command, of a job's, and of its message, in characters; a longer command is left out
LONGEST_SWEEP, LONGEST_COMMAND, LONGEST_MESSAGE = 20_000, 1200, 200


_PROGRAM = ("python", "-m", "kvbench")


class FollowedSweep:
    """A sweep whose files are read again only after they have changed."""

    def __init__(self, sweep: Sweep) -> None:
        self.sweep = sweep
        self._known: tuple[Any, list[Progress]] | None = None

    def signature(self) -> Any:
        """Return a value that changes when a file of the sweep does, or when the process that drives it ends."""
        stamps = []
        with os.scandir(self.sweep.folder) as entries:
            for entry in entries:
                try:
                    status = entry.stat()
                except OSError:  # removed meanwhile
                    continue
                stamps.append((entry.name, status.st_mtime_ns, status.st_size))
        return sorted(stamps), self.sweep.driven()

    def progress(self) -> Sequence[Progress]:
        """Return how far each job is."""
        signature = self.signature()
        if self._known is None or self._known[0] != signature:
            self._known = signature, self.sweep.progress()
        return self._known[1]

    def run_ids(self) -> set[str]:
        """Return the ids of the runs of all jobs, as far as they are known."""
        return {entry.run_id for entry in self.progress() if entry.run_id is not None}

    def data(self) -> dict[str, Any]:
        """Return the sweep for the page.

        ``driven`` says whether the process that starts its jobs still runs. ``jobs`` has for each job ``[number from 1,
        label, state, run id, status, command, message]`` without the unknown values at the end. Further keys are
        ``id``, ``command``, ``created`` and ``launcher``.
        """
        manifest = self.sweep.manifest
        return {
            "id": shorten_middle(manifest.id, 120),
            "command": whole_or_empty(shlex.join([*_PROGRAM, *manifest.command]), LONGEST_SWEEP),
            "created": shorten_middle(manifest.created, 40),
            "launcher": shorten_middle(manifest.launcher, 40),
            "driven": self.sweep.driven(),
            "jobs": [
                trimmed(
                    [
                        entry.job.number + 1,
                        shorten_middle(entry.job.label, 160),
                        entry.state,
                        entry.run_id,
                        entry.status,
                        whole_or_empty(shlex.join([*_PROGRAM, *entry.job.overrides]), LONGEST_COMMAND) or None,
                        shorten_middle((entry.message.splitlines() or [""])[0], LONGEST_MESSAGE) or None,
                    ]
                )
                for entry in self.progress()
            ],
        }
