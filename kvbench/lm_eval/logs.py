"""The files that lm-eval writes for an evaluation: one JSON line per sample and filter, and a file of results."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvbench.errors import DataError


@dataclass
class Logs:
    """The files below lm-eval's ``--output_path`` (a folder, or a .json file in one) that it writes from now on."""

    place: Path
    _before: dict[Path, int] = field(init=False)

    def __post_init__(self) -> None:
        self._before = dict(self._files())

    def samples(self) -> dict[str, list[dict[str, Any]]]:
        """Return the new sample logs by task, the lines in order; a task's name is that in the results.

        Raises:
            DataError: a line is no JSON object.
        """
        tasks = self.results().get("configs") or {}
        logs: dict[str, list[dict[str, Any]]] = {}
        for path in self._new("samples_"):
            name = next(
                (task for task in sorted(tasks, key=len, reverse=True) if path.name.startswith(f"samples_{task}_")),
                None,
            )
            if name is not None:
                logs[name] = list(_json_lines(path))
        return logs

    def results(self) -> dict[str, Any]:
        """Return the new file of results: metrics, versions and configurations of tasks; empty if there is none."""
        for path in self._new(""):
            if path.suffix == ".json":
                content = json.loads(path.read_text(encoding="utf-8"))
                if isinstance(content, Mapping) and "configs" in content:
                    return dict(content)
        return {}

    def _files(self) -> Iterator[tuple[Path, int]]:
        folder = self.place.parent if self.place.suffix == ".json" else self.place
        for path in sorted(folder.rglob("*")) if folder.is_dir() else []:
            if path.suffix in (".json", ".jsonl"):
                yield path, path.stat().st_mtime_ns

    def _new(self, prefix: str) -> list[Path]:
        """Return the files that were written since this object was made, the newest last."""
        new = [(time, path) for path, time in self._files() if self._before.get(path) != time]
        return [path for _, path in sorted(new) if path.name.startswith(prefix)]


def _json_lines(path: Path) -> Iterator[dict[str, Any]]:
    for number, line in enumerate(path.read_text(encoding="utf-8").split("\n"), 1):
        if not line.strip():
            continue
        try:
            content = json.loads(line)
        except ValueError as error:
            raise DataError(
                f"{path}, line {number}: is no JSON ({error}).\n  hint: run the evaluation again"
            ) from error
        if not isinstance(content, dict):
            raise DataError(f"{path}, line {number}: is no JSON object.\n  hint: run the evaluation again")
        yield content
