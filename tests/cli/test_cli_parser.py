"""Hydra's flags on every Python: 3.14 looks into the help of each flag when it is added."""

from __future__ import annotations

import argparse
from typing import Any

import pytest

from kvbench.cli.hydra_options import hydra_parser
from kvbench.cli.main import main


@pytest.fixture
def strict(monkeypatch: pytest.MonkeyPatch) -> None:
    """argparse as in Python 3.14, whatever Python this is."""
    container: Any = argparse._ActionsContainer
    add = container.add_argument

    def check(self: Any, action: argparse.Action) -> None:
        if action.help is not None and "%" in action.help:
            raise ValueError("badly formed help string")

    def add_checked(self: Any, *names: str, **settings: Any) -> argparse.Action:
        action = add(self, *names, **settings)
        self._check_help(action)
        return action

    monkeypatch.setattr(container, "_check_help", check, raising=False)
    monkeypatch.setattr(container, "add_argument", add_checked)


def test_flags_are_those_of_hydra_where_help_is_checked(strict: None) -> None:
    check = argparse._ActionsContainer._check_help  # type: ignore[attr-defined]
    computed = hydra_parser().parse_args(["-m", "--config-dir", "x", "method=kivi"])
    assert (computed.multirun, computed.config_dir, computed.overrides) == (True, "x", ["method=kivi"])
    assert "shell completion" in hydra_parser().format_help()
    assert argparse._ActionsContainer._check_help is check  # type: ignore[attr-defined]


def test_flags_are_those_of_hydra() -> None:
    computed = hydra_parser().parse_args(["-m", "--cfg", "job", "a=1", "b=2"])
    assert (computed.multirun, computed.cfg, computed.overrides) == (True, "job", ["a=1", "b=2"])


def test_a_run_gets_past_the_check(strict: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Hydra makes its parser a second time when a run begins."""
    begun: list[str] = []
    monkeypatch.setattr("hydra.main", lambda **settings: lambda job: lambda: begun.append(hydra_flags()))

    def hydra_flags() -> str:
        from hydra._internal.utils import get_args_parser

        return str(get_args_parser().parse_args(["method=kivi"]).overrides)

    main(["--info", "config", "method=kivi"])
    assert begun == ["['method=kivi']"]
