"""Every command of README.md and the documents is taken by its program: parsed, and composed where it starts a run."""

from __future__ import annotations

import argparse
import contextlib
import importlib
import importlib.util
import io
import re
import shlex
import sys
from functools import cache

import pytest

from experiments.registry import chosen_items
from kvbench.cli.arguments import parse_arguments
from kvbench.cli.choice import choice_help
from kvbench.cli.compose import Composer
from kvbench.cli.fetch import configurations
from kvbench.cli.overrides import template
from kvbench.errors import ConfigError
from tests.docs.commands import NEEDS, ROOT, Command, _blocks, _needs, all_commands

COMMANDS = all_commands()
#: a word that a reader replaces
PLACEHOLDER = re.compile(r"\b(?:foo|NAME|FILES|RUN|DIR|N|FILE_OR_FOLDER|REPOSITORY)\b|[<>|]")
#: a model that is on the hub, or in a reader's own folder
NAMED_MODEL = re.compile(r"model=(?:\./)?[\w.-]*/?[\w.-]+")


class Taken(Exception):
    """Raised when a program has parsed its command line."""


@pytest.mark.parametrize("command", {command.text: command for command in COMMANDS}.values(), ids=str)
def test_commands_are_taken(command: Command, monkeypatch: pytest.MonkeyPatch, pytestconfig: pytest.Config) -> None:
    monkeypatch.chdir(ROOT)
    monkeypatch.syspath_prepend(str(ROOT / "examples" / "configs"))  # as --config-dir has it
    words = shlex.split(re.sub(r"^(?:[A-Z_]+=\S+ +)*", "", command.text))
    if words[0] == "torchrun":
        for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
            monkeypatch.setenv(name, "2" if name == "WORLD_SIZE" else "0")
    if words[0] == "make":
        return check_make(words[1:])
    words = words[words.index("-m") + 1 :]
    module, words = words[0], words[1:]
    if module == "pytest":
        options = [word.partition("=")[0] for word in words if word.startswith("-")]
        assert all(pytestconfig.getoption(option, "unknown") != "unknown" for option in options), options
        return None
    if module == "kvbench":
        return check_run(words, command.needs == "files")
    check_program(module, words, monkeypatch)
    if module == "kvbench.fetch":
        assert list(configurations([word for word in words if "=" in word]))
    if module == "experiments":
        chosen_items([word for word in words if "/" in word and "=" not in word])


def check_make(words: list[str]) -> None:
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    assert all(word in targets for word in words if "=" not in word), words


@cache
def composer(folder: str | None) -> Composer:
    return Composer(ROOT / folder if folder else None)


def check_run(words: list[str], own_files: bool) -> None:
    """An override that names a placeholder is left out; a sweep's values are those that a reader would sweep over."""
    arguments = parse_arguments(words)
    overrides = [word for word in arguments.overrides if of_this_machine(word)]
    folder = arguments.config_dir
    if folder and (PLACEHOLDER.search(folder) or own_files):
        return
    try:
        if arguments.help:
            choice_help(overrides, ROOT / folder if folder else None)
        else:
            composer(folder).check([template(text) for text in overrides], multirun=arguments.multirun)
    except ConfigError as error:
        raise AssertionError(f"{' '.join(words)}: {error}") from error


def of_this_machine(word: str) -> bool:
    """Return False for an override that needs the hub or a reader's own files."""
    return not PLACEHOLDER.search(word) and ("/" not in word or not NAMED_MODEL.fullmatch(word))


def check_program(module: str, words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a program parse its command line, and no more: the parser raises :class:`Taken` when it has."""
    spec = importlib.util.find_spec(module)
    assert spec is not None, module
    name = f"{module}.__main__" if spec.submodule_search_locations else module
    assert importlib.util.find_spec(name), module
    if not words or module == "kvbench.fetch":
        return
    if module == "kvbench.lm_eval":  # whose command line is lm-eval's
        pytest.importorskip("lm_eval", reason="needs the package lm-eval: pip install 'kvbench[lm-eval]'")
    original = argparse.ArgumentParser.parse_known_args

    def parsed(self: argparse.ArgumentParser, *args: object, **kwargs: object) -> None:
        _, unknown = original(self, *args, **kwargs)  # type: ignore[call-overload]
        if unknown:
            self.error(f"unknown arguments: {' '.join(unknown)}")
        raise Taken

    monkeypatch.setattr(argparse.ArgumentParser, "parse_known_args", parsed)
    monkeypatch.setattr(sys, "argv", [module, *words])
    errors = io.StringIO()
    try:
        with contextlib.redirect_stderr(errors), pytest.raises(Taken):
            importlib.import_module(name).main()
    except SystemExit as end:
        raise AssertionError(f"{module} {' '.join(words)}: {end.code}: {errors.getvalue()}") from end


def test_there_are_commands_to_check() -> None:
    assert len(COMMANDS) > 100
    documents = {command.document for command in COMMANDS}
    assert documents >= {"README.md", "CONTRIBUTING.md", "docs/architecture.md", "docs/running.md"}
    run = [command for command in COMMANDS if not command.inline and command.needs is None]
    assert len(run) > 25
    assert {command.needs for command in COMMANDS} - {None} <= set(NEEDS)


@pytest.mark.parametrize("command", [command for command in COMMANDS if not command.inline], ids=str)
def test_marks_are_about_their_commands(command: Command) -> None:
    """A line that is added to a block moves the others: its mark must still name the right ones."""
    model = re.search(r"\bmodel=(?!tiny\b)", command.text) is not None and "fetch" not in command.text
    if command.needs is None:
        assert not model or "bench predict" in command.text, f"{command}: no mark"
        assert not re.search(r"runtime=fast|device_map=|device cuda|torchrun", command.text), f"{command}: no mark"
    elif command.needs == "weights":
        assert model or "experiments " in command.text, f"{command} needs no weights"
    elif command.needs == "gpu":
        gpu = r"WORKERS_PER_GPU|runtime=fast|device_map=|cuda|torchrun|weights=random|kvbench\.bench|multigpu"
        assert re.search(gpu + r"|experiments\.cells measure", command.text), f"{command} needs no GPU"


def test_blocks_and_their_marks() -> None:
    text = (
        "Words:\n\n    a 1\n\n    a 2\n\n<!-- needs: gpu -->\n    b 1\n\nmore\n\n<!-- needs: weights 2 -->\n\n"
        "```sh\nc 1\nc 2\n```\n\n```python\nd\n```\n- an item:\n\n      e\n"
    )
    assert [(mark, [line.strip() for line in block if line.strip()]) for mark, block in _blocks(text)] == [
        ("", ["a 1", "a 2"]),
        ("gpu", ["b 1"]),
        ("weights 2", ["c 1", "c 2"]),
        ("", ["e"]),
    ]
    assert _needs("gpu", 2, "x.md") == {1: "gpu", 2: "gpu"}
    assert _needs("weights 2-3, network 5", 5, "x.md") == {2: "weights", 3: "weights", 5: "network"}
    for wrong in ("gpus", "gpu 3", "gpu two"):
        with pytest.raises(ValueError, match=r"x\.md"):
            _needs(wrong, 2, "x.md")
