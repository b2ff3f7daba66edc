"""Hydra's parser of options, patched to work on all supported Python versions."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from hydra._internal.utils import get_args_parser


@contextmanager
def help_as_text() -> Iterator[None]:
    """Make it possible to create Hydra's argument parser on Python 3.14, inside a ``with`` block.

    Python 3.14 requires the help of every option to be a string. In Hydra 1.3, the help of ``--shell-completion`` is
    another object. Inside the block, argparse is patched to replace such an object by a string.
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
    """Return the parser of Hydra's own options."""
    with help_as_text():
        return get_args_parser()
