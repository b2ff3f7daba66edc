"""Sizes of the downloads that runs need, determined without downloading data or weights."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from kvbench import tasks
from kvbench.errors import DataError, ModelError
from kvbench.hub.package import PackagedFile
from kvbench.hub.transfer import amount
from kvbench.models import by_name
from kvbench.models.locate import is_cached, planned
from kvbench.models.spec import ModelConfig
from kvbench.tasks import hub_files
from kvbench.tasks.base import Task
from kvbench.util.confdir import group_options, read_choice
from kvbench.util.schema import build

#: bytes per parameter of the papers' checkpoints, which are stored in 16 bits
_BYTES = 2
#: names of repositories with quantized checkpoints
_QUANTIZED = re.compile(r"awq|gptq|bnb|fp8|[2348]-?bit", re.IGNORECASE)


@dataclass(frozen=True)
class Download:
    """The size of one download from the hub that a model or a data set needs.

    Args:
        what: name of the model or of the file, for messages.
        bytes: number of bytes still to download, 0 if everything is on this machine; None if unknown.
        basis: where this number comes from, such as ``the hub's list of its files``, or why it is unknown.
    """

    what: str
    bytes: int | None
    basis: str

    def __str__(self) -> str:
        if self.bytes == 0:
            return f"{self.what}: {self.basis}"
        return f"{self.what}: {'unknown size' if self.bytes is None else amount(self.bytes)} ({self.basis})"


def downloads(models: Iterable[str], datasets: Iterable[str]) -> list[Download]:
    """Return the downloads from the hub that values of ``model=`` and of ``dataset=`` (presets) need, each once.

    Local models and data, generated data and random weights are left out, because they are never downloaded.

    Raises:
        ConfigError: there is no such model.
    """
    entries = [model_download(build(ModelConfig, by_name.group(name), "model")) for name in dict.fromkeys(models)]
    for name in dict.fromkeys(datasets):
        group = read_choice(group_options("dataset")[name])
        entries += data_downloads(tasks.load(group), group)
    return list(dict.fromkeys(entry for entry in entries if entry is not None))


def model_download(model: ModelConfig) -> Download | None:
    """Return the size of a model's download; None if the model has random weights or is in a local folder.

    A model that has been downloaded already has a size of 0 bytes. If the hub does not answer, the size is estimated
    from the number of parameters, if that is known.
    """
    if model.random or model.path is not None:
        return None
    if model.hub_id is None:
        return None if model.package is None else _package_download(model, model.package)
    what = f"model {model.name} ({model.hub_id}{', gated' if model.gated else ''})"
    if is_cached(model):
        return Download(what, 0, "on this machine")
    try:
        return Download(what, planned(model).missing_bytes, "the hub's list of its files")
    except ModelError as error:
        reason = _reason(error)
    count = model.architecture.parameters if model.architecture else None
    if (
        count is None or model.requires or _QUANTIZED.search(model.hub_id)
    ):  # fewer bytes per parameter, so the size is unknown
        return Download(what, None, reason)
    return Download(what, _BYTES * count, f"about, {_BYTES} bytes for each of its parameters: {reason}")


def _package_download(model: ModelConfig, package: PackagedFile) -> Download:
    there = model.folder() is not None
    what = f"model {model.name} (package {package.requirement})"
    return Download(what, 0 if there else package.wheel_bytes, "on this machine" if there else "its preset")


def data_downloads(task: Task, group: dict[str, Any]) -> Iterator[Download]:
    """Yield the size of the download of each file that a data set needs; nothing for local and generated data.

    The data are local if the ``path`` of the group ``dataset`` is set, or that of the data set that it is over.
    """
    paths = (group.get("path"), (group.get("options") or {}).get("path"))
    for source, part in () if any(paths) else task.files():
        if source.hub_id is None:
            continue
        name = source.file.replace("{task}", part).partition("!")[0]
        what = f"data {source.hub_id}/{name}"
        try:
            missing = hub_files.sizes(source, name, what, "")[1]
        except DataError as error:
            yield Download(what, None, _reason(error))
        else:
            yield Download(what, missing, "on this machine" if missing == 0 else "the hub's list of its files")


def _reason(error: Exception) -> str:
    """Return why the hub gives no size, in short."""
    line = str(error).splitlines()[0].rstrip(".")
    return line.rpartition("not on this machine, and ")[2] or line
