"""Origins of a run's model, encoder and data on the hub: repository, commit and checksums, stored with the run.

The run id covers the revision in the configuration, which may be a branch. A run therefore records the commit of its
first samples, and raises an error if it is resumed with the weights of another commit. Data need no such check, because
their content is part of the run id.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from kvbench.config.run_config import RunConfig
from kvbench.errors import ModelError
from kvbench.hub.repository import Repository, note
from kvbench.methods.base import Method
from kvbench.models.locate import is_cached, repository_of, wanted
from kvbench.models.spec import ModelConfig
from kvbench.results.store import RunStore
from kvbench.tasks.base import Task
from kvbench.tasks.hub_files import cached

#: endings of the files with weights
WEIGHTS = (".safetensors", ".bin")


def settle(store: RunStore, checked: RunConfig) -> None:
    """Check that the model's weights are those of the run's first samples; the first call records their origin instead.

    The origin (`origin.json`) is the repository, commit and checksums of the model, the encoder and the data, if they
    came from the hub (:func:`of`). Weights that are not in the hub's cache are neither compared nor recorded. This
    process must hold the lock of `store`.

    Raises:
        ModelError: the checksums of the model's weights differ from the recorded ones; the message names both commits.
        DiskError: the record cannot be written.
    """
    before = store.origin()
    now = of(checked)
    first, here = before.get("model"), now.get("model")
    if first and here and first["sha256"] != here["sha256"]:
        raise ModelError(
            f"model {checked.model.name}: run {store.run_id} has samples of {first['hub_id']} at commit "
            f"{first['revision']}, and this machine has commit {here['revision']}. A run must use a single commit.\n"
            f"  hint: set model.revision={here['revision']} to start a new run, or continue this run on a machine "
            "that has the first commit (or copy that machine's HF_HOME here)"
        )
    if {**now, **before} != before:
        store.write_origin({**now, **before})


def of(checked: RunConfig) -> dict[str, Any]:
    """Return repository, commit and checksums of those files of model, encoder and data that are in the hub's cache.

    Returns:
        ``model`` and ``encoder`` with ``hub_id``, ``revision`` and ``sha256``, and ``data`` with a list of the same
        entries. A key is absent if the files are local or not complete yet, and ``encoder`` if the method has none.
    """
    return {**_model(checked.model), **_encoder(checked.method), **_data(checked.task, checked.dataset.get("path"))}


def noted(store: RunStore) -> dict[str, Any]:
    """Return ``{"origin": ...}``, the recorded origin, for `metrics.json`; empty if nothing came from the hub."""
    origin = store.origin()
    return {"origin": origin} if origin else {}


def _model(model: ModelConfig) -> dict[str, Any]:
    """Return ``{"model": {...}}``: repository, commit and checksums of the weights; {} unless all are in the cache."""
    if model.random or model.folder() is not None or model.hub_id is None:
        return {}
    repository = repository_of(model)
    folder = repository.snapshot()
    if folder is None or not is_cached(model):
        return {}
    files = wanted([file.name for file in folder.iterdir() if file.is_file()])
    return {"model": _entry(repository, [(name, folder / name) for name in files if name.endswith(WEIGHTS)])}


def _encoder(method: Method) -> dict[str, Any]:
    """Return ``{"encoder": {...}}``: origin and checksums of a retrieval encoder's weights; {} if there is none."""
    from kvbench.retrieval.encoders import HUB, wanted
    from kvbench.retrieval.packaged import fetched, of_package

    name = str(getattr(method, "encoder", ""))
    if name not in HUB and ("/" not in name or Path(name).is_dir()):
        return {}
    repository = Repository(HUB.get(name, name))
    folder = repository.snapshot()
    if folder is None:
        return {} if fetched(name) is None else {"encoder": of_package(name)}
    files = wanted([file.name for file in folder.iterdir() if file.is_file()])
    return {"encoder": _entry(repository, [(name, folder / name) for name in files if name.endswith(WEIGHTS)])}


def _data(task: Task, path: str | None) -> dict[str, Any]:
    """Return ``{"data": [...]}``: repository, commit and checksums of the data files; empty if they are local."""
    entries: list[dict[str, Any]] = []
    for source, part in () if path is not None else task.files():
        name = source.file.replace("{task}", part).partition("!")[0]
        files = cached(source, name, "dataset") if source.hub_id else None
        if source.hub_id and files:
            repository = Repository(source.hub_id, "dataset", source.revision)
            folder = repository.snapshot()
            assert folder is not None
            entry = _entry(repository, [(str(file.relative_to(folder)), file) for file in files])
            if entry not in entries:
                entries.append(entry)
    return {"data": entries} if entries else {}


def _entry(repository: Repository, files: list[tuple[str, Path]]) -> dict[str, Any]:
    sums = {name: entry["sha256"] for name, entry in note(repository, files).items()}
    return {"hub_id": repository.hub_id, "revision": repository.commit(), "sha256": sums}
