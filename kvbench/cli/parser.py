"""Hydra's parser of options, patched to work on all supported Python versions."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from hydra._internal.utils import get_args_parser


@contextmanager
def help_as_text() -> Iterator[None]:
    """Patch argparse inside a ``with`` block so that Hydra can create its parser.

    Python 3.14 checks the help text of each option when it is added. The help of ``--shell-completion`` in Hydra 1.3 is
    not a string and fails this check; it is replaced by one.
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
