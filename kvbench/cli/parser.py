"""Hydra's parser of flags, made to work on every supported Python."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from hydra._internal.utils import get_args_parser


@contextmanager
def help_as_text() -> Iterator[None]:
    """Let Hydra make its parser inside the block.

    Python 3.14 looks into each flag's help when it is added, and that of Hydra 1.3's ``--shell-completion`` is an
    object that only prints itself: there it gets a text instead.
    """
    container: Any = argparse._ActionsContainer
    check = getattr(container, "_check_help", None)
    if check is None:
        yield
        return

    def checked(self: Any, action: argparse.Action) -> None:
        if action.help is not None and not isinstance(action.help, str):
            action.help = "Install or uninstall shell completion"
        check(self, action)

    container._check_help = checked
    try:
        yield
    finally:
        container._check_help = check


def hydra_parser() -> argparse.ArgumentParser:
    """Make the parser of Hydra's own flags."""
    with help_as_text():
        return get_args_parser()
