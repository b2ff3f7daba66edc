"""Commands that made results/: those in its pages and those in its files are still taken by their programs."""

from __future__ import annotations

import importlib.util
import json
import re
import shlex
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest

from experiments.cells.keep import COMMAND as CELLS
from experiments.mini.__main__ import parse_mini_options
from kvbench.bench.__main__ import bench_parser
from kvbench.cli.arguments import parse_arguments
from kvbench.cli.compose import Composer
from kvbench.config import setting

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted((ROOT / "results").rglob("*.md"))  # tests/docs has those of README.md and docs/
#: what a reader replaces
PLACEHOLDERS = re.compile(r"\b(?:FOLDER|FILES|DIR|RUN|NAME|N)\b|<|\.\.\.")


def commands(path: Path) -> list[str]:
    """Lines that begin with ``python -m kvbench`` or ``experiments``, indented or in backquotes, in one piece each."""
    text = re.sub(r"\\\n\s*", "", path.read_text(encoding="utf-8"))
    typed = re.findall(r"(?:^ {4,}|`)(python -m (?:kvbench|experiments)[^`\n]*)", text, re.MULTILINE)
    return list(dict.fromkeys(command.partition(" #")[0].partition(" | ")[0].strip() for command in typed))


def words(command: str) -> list[str]:
    """The words of a command without placeholders, nor an option whose values they were."""
    kept: list[str] = []
    for word in shlex.split(command):
        if not PLACEHOLDERS.search(word):
            kept.append(word)
        elif kept[-1].startswith("--"):
            kept.pop()
    return kept


@cache
def composer() -> Composer:
    return Composer()


CASES = [(path, command) for path in PAGES for command in commands(path)]


@pytest.mark.parametrize(
    ("path", "command"), CASES, ids=[f"{path.relative_to(ROOT)}: {command}"[:110] for path, command in CASES]
)
def test_commands_of_the_pages_are_taken(path: Path, command: str) -> None:
    _, _, module, *given = words(command)
    assert importlib.util.find_spec(module) is not None
    if module == "kvbench":
        arguments = parse_arguments(given)
        jobs = composer().check(arguments.overrides, multirun=arguments.multirun) if arguments.overrides else []
        assert jobs or not arguments.overrides
    elif module == "kvbench.bench" and given:
        args = bench_parser(given[0]).parse_args(given)
        for text in getattr(args, "settings", []):
            setting.parse_setting(text).load()
    elif module == "experiments.mini":
        assert parse_mini_options(given).limit


def test_pages_hold_commands() -> None:
    assert len(CASES) > 8
    assert any("experiments.tiny.perplexity" in command for _, command in CASES)


FILES = {
    path: json.loads(path.read_text(encoding="utf-8")).get("command")
    for path in sorted((ROOT / "results").glob("h200*/**/*.json"))
    if path.read_text(encoding="utf-8").lstrip().startswith("{")
}


@pytest.mark.parametrize("path", [path for path, command in FILES.items() if command], ids=lambda path: path.name)
def test_commands_of_the_files_are_taken(path: Path) -> None:
    given = str(FILES[path]).split()
    if str(FILES[path]) == CELLS:  # many calls of kvbench.bench, which the rows' settings, prompts and batches name
        rows = json.loads(path.read_text(encoding="utf-8"))["rows"]
        assert rows and all({"prompt", "batch"} <= row.keys() for row in rows)
        for row in rows:
            each = setting.parse_setting(row["setting"])
            assert str(each) == row["setting"]
            each.load()
        return
    args = bench_parser(given[0]).parse_args(given)
    assert args.command == given[0]
    settings = [setting.parse_setting(text) for text in getattr(args, "settings", [])]
    if args.command in ("tpot", "prefill", "memory"):
        assert [str(each) for each in settings] == args.settings
        for each in settings:  # a calibration lay on the machine that measured
            fields = {key: value for key, value in each.fields.items() if key != "calibration"}
            replace(each, fields=fields).load()


def test_files_hold_commands_of_whole_models() -> None:
    assert {str(command).split()[0] for command in FILES.values() if command} >= {"tpot", "memory", "prefill"}
