"""The connection to Weights & Biases: choice of online or offline mode, with the reason, and the start of runs."""

from __future__ import annotations

import netrc
import os
import shutil
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

#: seconds to wait for the service unless logger.mode=online
_PATIENCE_S = 20.0
#: longest tag and longest group that W&B accepts, in characters
LONGEST_TAG, LONGEST_GROUP = 64, 128


class Service:
    """Connection to Weights & Biases (W&B), with the settings of the `logger` group.

    One instance may start many runs. If the service cannot be reached, only the first run waits for it: with
    ``logger.mode=auto``, this and all later runs are written offline; with ``online``, all later ones fail at once.
    """

    def __init__(self, settings: Any, say: Callable[[str], None]) -> None:
        self.settings, self.say = settings, say
        self._went: str | None = None
        self._told = False
        self._failure: Exception | None = None
        #: address of the run that was started last, or its local folder
        self.place = ""
        #: folder of that run, if it was written offline, where it waits for ``wandb sync``; else None
        self.local: Path | None = None

    def mode(self) -> str:
        """Return ``online``, ``offline`` or ``disabled``."""
        if self._went or self.settings.mode != "auto":
            return str(self._went or self.settings.mode)
        return os.environ.get("WANDB_MODE") or ("online" if has_key() else "offline")

    def destination(self) -> str:
        """Return where runs are sent: mode, service (the local folder in offline mode), entity and project."""
        mode = self.mode()
        service = os.environ.get("WANDB_BASE_URL") or "https://api.wandb.ai"
        place = Path(self.settings.dir).absolute() if mode == "offline" else service
        return f"wandb {mode} {place} {self.settings.entity or ''}/{self.settings.project}"

    def start(
        self, run_id: str, *, name: str, group: str, tags: Iterable[str], config: Mapping[str, Any], kind: str
    ) -> Any:
        """Start a run in W&B, or resume the one with this id, and return it.

        `group` is used unless ``logger.group`` names another; `tags` are added to those of ``logger.tags``. `kind` is
        W&B's type of job: the method of a run, or ``sweep``.

        Raises:
            wandb.errors.Error: the service cannot be reached, or refuses the run, and ``logger.mode`` is not ``auto``.
        """
        import wandb

        fixed = plain_data(
            {
                "id": run_id,
                "name": name,
                "group": (self.settings.group or group)[:LONGEST_GROUP],
                "job_type": kind[:LONGEST_TAG],
                "tags": distinct([*self.settings.tags, *tags]),
                "config": config,
            }
        )
        if self._failure is not None:
            raise self._failure
        mode = self.mode()
        if mode == "offline" and self.settings.mode == "auto" and not self._told and self._went is None:
            self._told = True
            self.say(
                "wandb: no API key is configured, so it runs offline; run `wandb sync "
                f"{self.settings.dir}/wandb/offline-run-*` later"
            )
        try:
            run = self._init(wandb, mode, fixed)
        except wandb.errors.Error as error:
            if self.settings.mode != "auto" or mode != "online":
                self._failure = error
                raise
            self.say(f"wandb: not reachable ({str(error).splitlines()[0]}), so it runs offline")
            mode = self._went = "offline"
            run = self._init(wandb, mode, fixed)
        folder = Path(run.dir).parent
        self.place = (run.url if mode == "online" else None) or str(folder)
        self.local = folder if mode == "offline" else None
        return run

    def _init(self, wandb: Any, mode: str, fixed: Mapping[str, Any]) -> Any:
        Path(self.settings.dir).mkdir(parents=True, exist_ok=True)
        quiet = {} if self.settings.mode == "online" else {"init_timeout": _PATIENCE_S}
        return wandb.init(
            project=self.settings.project,
            entity=self.settings.entity,
            dir=str(Path(self.settings.dir).absolute()),  # W&B's own process may have started in another folder
            mode=mode,
            reinit="finish_previous",
            resume="allow" if mode == "online" else None,
            settings=wandb.Settings(console="off", silent=True, x_disable_stats=True, **quiet),
            **fixed,
        )


def log_files(run: Any, name: str, kind: str, files: Iterable[Path]) -> None:
    """Log files as an artifact of a run; those that do not exist are left out.

    The files are copied into W&B's folder of the run first, because ``wandb sync`` reads them later, when the originals
    may have changed.
    """
    import wandb

    artifact = wandb.Artifact(name, type=kind)
    folder = Path(run.dir).parent / "artifact"
    folder.mkdir(parents=True, exist_ok=True)
    for file in files:
        if file.is_file():
            copied = Path(shutil.copyfile(file, folder / file.name))
            artifact.add_file(str(copied), name=file.name, policy="immutable", skip_cache=True)
    run.log_artifact(artifact)


def has_key() -> bool:
    """Return True if credentials for W&B are configured, in the environment or in netrc.

    Without them, ``wandb`` would ask for a key in the middle of a run.
    """
    if os.environ.get("WANDB_API_KEY") or os.environ.get("WANDB_IDENTITY_TOKEN_FILE"):
        return True
    host = urlsplit(os.environ.get("WANDB_BASE_URL") or "https://api.wandb.ai").netloc
    try:
        return netrc.netrc(os.environ.get("NETRC")).authenticators(host) is not None
    except (OSError, netrc.NetrcParseError):
        return False


def distinct(tags: Iterable[str]) -> list[str]:
    """Return tags that W&B accepts: each once, none empty, cut to :data:`LONGEST_TAG` characters."""
    return list(dict.fromkeys(str(tag)[:LONGEST_TAG] for tag in tags if str(tag)))


def plain_data(value: Any) -> Any:
    """Return a copy of data that W&B takes: dicts with string keys, lists instead of tuples, texts that can be encoded.

    A lone surrogate, half of an emoji in an answer, becomes an escape.
    """
    if isinstance(value, Mapping):
        return {plain_data(str(key)): plain_data(item) for key, item in value.items()}
    if isinstance(value, str):
        return value.encode("utf-8", "backslashreplace").decode()
    return [plain_data(item) for item in value] if isinstance(value, (list, tuple)) else value
