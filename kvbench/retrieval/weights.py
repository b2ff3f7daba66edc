"""Download of an encoder's weights from the hub."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from fnmatch import fnmatch
from pathlib import Path

from kvbench.hub.repository import Repository
from kvbench.hub.transfer import Plan, fetch, plan

#: patterns of the files other than weights that sentence-transformers reads
_SMALL = ("*.json", "*.model", "*.jinja", "*.txt", "*.py")


def fetch_weights(hub_id: str, announce: Callable[[Plan], None] = lambda files: None) -> Path:
    """Download the files of an encoder that the hub's cache does not have, and return the encoder's folder there.

    If a file is missing, `announce` is called before, with the files and their sizes.

    Raises:
        HubError: the hub cannot be reached, or does not provide the encoder.
    """
    repository = Repository(hub_id)
    files = plan(repository, wanted, "config.json")
    if files.missing:
        announce(files)
    return fetch(repository, files)


def wanted(files: Sequence[str]) -> list[str]:
    """Return the paths of the files that sentence-transformers needs from a repository.

    These are the weights (.safetensors, or .bin if there are none), the folders of layers after the model, such as
    ``1_Pooling``, and all small files, such as the configuration and the tokenizer.
    """
    top = [name for name in files if "/" not in name]
    weights = [name for name in top if name.endswith(".safetensors")] or [n for n in top if n.endswith(".bin")]
    folders = [name for name in files if re.match(r"\d+_[^/]*/", name)]  # pooling and other layers behind the model
    return [*weights, *folders, *(name for name in top if any(fnmatch(name, pattern) for pattern in _SMALL))]
