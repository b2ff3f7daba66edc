"""Hydra's own options: their parser, patched to work on all supported Python versions, and those of ``launcher=ray``.

Hydra knows the options of other launchers from their plugins.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from hydra._internal.utils import get_args_parser
from hydra.core.config_store import ConfigStore


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


@dataclass
class RayOptions:
    """Options of ``launcher=ray``, ``hydra.launcher.KEY``; conf/launcher/ray.yaml explains them."""

    _target_: str = "hydra_plugins.kvbench.RayLauncher"
    address: str | None = None
    n_jobs: int = -1
    cpus: float = 1.0
    gpus: Any = "auto"
    shared_folder: Any = "auto"
    retries: int = 3


def store() -> None:
    """Make the options known to Hydra as ``hydra/launcher=ray``."""
    ConfigStore.instance().store(group="hydra/launcher", name="ray", node=RayOptions, provider="kvbench")
