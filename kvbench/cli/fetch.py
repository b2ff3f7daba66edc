"""``python -m kvbench.fetch dataset=longbench model=llama2-7b``: download files for a machine without network.

Accepts the same overrides as ``python -m kvbench``, including lists, and downloads into the hub's cache with progress
bars. An interrupted download is resumed. Copy the cache (``HF_HOME``) to the machine without network.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import yaml
from hydra import initialize_config_dir

from kvbench import tasks
from kvbench.cli.compose import Composer, run_config
from kvbench.config.prerequisites import check_path
from kvbench.errors import ConfigError, KvbenchError, ModelError
from kvbench.models.locate import is_cached, locate
from kvbench.models.spec import ModelConfig
from kvbench.tasks import data
from kvbench.util.confdir import conf_dir, options
from kvbench.util.schema import build

#: hint if the hub does not answer
REMEDY = (
    "this command needs the hub: give it network (and no HF_HUB_OFFLINE), or run it on a machine that has it and copy "
    "that machine's HF_HOME here; a copy of the files themselves is read by dataset.path=FILE_OR_FOLDER"
)

#: patterns of the files that are needed to load a model
MODEL_FILES = ("*.safetensors", "*.safetensors.index.json", "*.json", "*.model", "*.jinja", "*.txt", "*.py")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return the exit status; print errors to standard error."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if not arguments or {"-h", "--help"} & set(arguments):
        print(__doc__)
        print(
            "usage: python -m kvbench.fetch [dataset=NAME[,NAME]] [model=NAME[,OWNER/NAME]] [method=cocktail] "
            "[KEY=VALUE ...]"
        )
        return 0 if arguments else 2
    try:
        _check(arguments)
        done: set[str] = set()
        for config in configurations(arguments):
            for line in fetch(config, named(arguments)):
                if line not in done:
                    print(line)
                done.add(line)
    except KvbenchError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print("interrupted; run the same command again to resume", file=sys.stderr)
        return 130
    return 0


def _check(arguments: Sequence[str]) -> None:
    """Raise ConfigError if the command line has an option, or names nothing to fetch."""
    for text in arguments:
        if text.startswith("-"):
            raise ConfigError(text, None, "no such option: lists are swept without one", hint="dataset=NAME,NAME")
    if not named(arguments):
        raise ConfigError(
            " ".join(arguments), None, "names nothing to fetch", hint="dataset=NAME, model=NAME or method=cocktail"
        )


def named(overrides: Sequence[str]) -> set[str]:
    """Return the groups that the command line mentions (dataset, model, method); only these are fetched."""
    return {text.partition("=")[0].partition(".")[0] for text in overrides} & {"dataset", "model", "method"}


def configurations(overrides: Sequence[str]) -> Iterator[dict[str, Any]]:
    """Yield the configuration of each job that the overrides describe.

    Raises:
        ConfigError: a choice, key or value is wrong.
    """
    composer = Composer()
    jobs = composer.check(overrides, multirun=True)
    with initialize_config_dir(str(conf_dir()), version_base="1.3"):
        for job in jobs:
            yield run_config(composer.compose(job))


def fetch(config: Mapping[str, Any], groups: set[str]) -> Iterator[str]:
    """Fetch the files for the named groups of one configuration and yield lines about them.

    Raises:
        DataError: a data set is unavailable.
        ModelError: weights are unavailable.
    """
    if "dataset" in groups:
        yield from fetch_dataset(config["dataset"])
    if "model" in groups:
        yield fetch_model(build(ModelConfig, config["model"], "model"))
    if "method" in groups:
        for name in encoders(config["method"]):
            yield fetch_encoder(name)


def fetch_dataset(config: Mapping[str, Any]) -> Iterator[str]:
    """Fetch the files of a data set; yield a line for each file, then one with the checksum. Raises DataError."""
    task = tasks.load(config)
    name = config.get("name")
    if config.get("path") is not None:
        check_path(config["path"])
        yield f"dataset {name}: {config['path']} is local"
        return
    count = 0
    for source, part in task.files():
        file = data.find(source, part, None, f"dataset {name}", remedy=REMEDY)
        count += 1
        yield f"dataset {name}: {file}"
    if not count:
        yield f"dataset {name}: generated, nothing to fetch"
    else:
        yield f"dataset {name}: sha256 {task.identity().get('sha256')}"


def fetch_model(model: ModelConfig) -> str:
    """Fetch the weights and tokenizer of a model and return a line about them. Raises ModelError."""
    source = locate(model)
    if source.name is None or source.local:
        return f"model {model.name}: {'random weights' if source.name is None else 'already here'}"
    folder = _snapshot(source.name, model.revision, f"model {model.name}")
    if not is_cached(model):  # without a list of files from the hub, its client may return an incomplete folder
        raise ModelError(
            f"model {model.name}: the download of {source.name} is incomplete: weights are missing in {folder}.\n"
            "  hint: run the same command again; it resumes where it stopped"
        )
    return f"model {model.name}: {folder}"


def encoders(method: Mapping[str, Any]) -> list[str]:
    """Return the names of the encoders that a method, or the draft method of a speculative one, uses for retrieval."""
    names = [method.get("encoder")]
    draft = options("method").get(str(method.get("draft")))
    if draft is not None and method.get("gamma"):
        changed = method.get("draft_options") or {}
        names.append(changed.get("encoder", yaml.safe_load(draft.read_text(encoding="utf-8")).get("encoder")))
    return [str(name) for name in names if name]


def fetch_encoder(name: str) -> str:
    """Fetch the weights of an encoder and return a line about them. Raises ModelError."""
    from kvbench.retrieval.encoders import HUB, hub_answers

    if name in ("bm25", "openai"):
        return f"encoder {name}: nothing to fetch"
    hub_id = HUB.get(name, name)
    if not hub_answers():
        raise ModelError(f"encoder {name}: the hub cannot be reached.\n  hint: method.encoder=bm25 needs no weights")
    return f"encoder {name}: {_snapshot(hub_id, None, f'encoder {name}')}"


def _snapshot(hub_id: str, revision: str | None, what: str) -> str:
    from huggingface_hub import snapshot_download

    try:
        # some encoders have only pytorch_model.bin; for models, it would be a second copy of the weights
        patterns = [*MODEL_FILES, *(["*.bin"] if what.startswith("encoder") else [])]
        return str(snapshot_download(hub_id, revision=revision, allow_patterns=patterns))
    except OSError as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ModelError(f"{what}: {hub_id} cannot be fetched: {reason}") from error
