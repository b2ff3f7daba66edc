"""Download of a model's weights and tokenizer from the hub, and the choice of the files that are needed."""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatch

from kvbench.errors import ModelError
from kvbench.hub.repository import HubError
from kvbench.hub.transfer import Plan, amount, fetch, plan
from kvbench.models.locate import Source, is_cached, locate, missing_weights_error, repository_of
from kvbench.models.spec import ModelConfig
from kvbench.util.progress import say

#: patterns of the files other than weights that are needed to load a model
SMALL = ("*.json", "*.model", "*.jinja", "*.txt", "*.py")


def wanted(files: Sequence[str]) -> list[str]:
    """Return the files of a repository that are needed to load a model: one copy of the weights, and all small files.

    Weights in safetensors take precedence over pickled ones (``*.bin``). Files in subfolders, and the second copy of
    the weights in files named ``consolidated*``, are left out, because only other libraries read them.
    """
    top = [name for name in files if "/" not in name]
    weights = [name for name in top if name.endswith(".safetensors") and not name.startswith("consolidated")]
    weights = weights or [name for name in top if fnmatch(name, "pytorch_model*.bin")]
    return weights + [name for name in top if any(fnmatch(name, pattern) for pattern in SMALL)]


def planned(model: ModelConfig) -> Plan:
    """Return the files to download for a model, with their sizes on the hub.

    Raises:
        ModelError: the hub cannot be reached, or does not provide the repository.
    """
    try:
        return plan(repository_of(model), wanted, "config.json")
    except HubError as error:
        raise missing_weights_error(model, error) from error


def fetched(model: ModelConfig) -> Source:
    """Download a model's weights unless they are on this machine already, and return where to load them from.

    Raises:
        ModelError: the weights are unavailable, or the download is incomplete.
    """
    source = locate(model)
    if source.local:
        return source
    files = planned(model)
    say(announcement(f"model {model.name}", files))
    try:
        folder = fetch(repository_of(model), files)
    except HubError as error:
        raise missing_weights_error(model, error) from error
    if not is_cached(model):
        raise ModelError(
            f"model {model.name}: the download of {model.hub_id} is incomplete: weights are missing in {folder}.\n"
            "  hint: run the same command again; it resumes where it stopped"
        )
    return Source(source.name, local=True, revision=source.revision)


def announcement(what: str, files: Plan) -> str:
    """Return the line that announces a download, for example of ``model llama2-7b``, and its size."""
    count, here = len(files.missing), len(files.files) - len(files.missing)
    already = f" ({here} of {len(files.files)} files are already on this machine)" if here else ""
    return f"{what}: {count} file{'s' * (count != 1)}, {amount(files.missing_bytes)} to download{already}"
