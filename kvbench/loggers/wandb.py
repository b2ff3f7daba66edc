"""Logging to Weights & Biases: the configuration, a history row per sample, and scores, bytes and timings as summary.

This is the only module that imports wandb, and it does so only when the first row or the end of a run is logged.
"""

from __future__ import annotations

import netrc
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from kvbench.loggers.base import Logger
from kvbench.loggers.csv import flatten
from kvbench.results.store import DONE

#: seconds to wait for the service unless logger.mode=online
_PATIENCE_S = 20.0

_TABLE = (
    "id",
    "task",
    "length",
    "prompt_tokens",
    "truncated",
    "prompt_head",
    "prompt_tail",
    "prediction",
    "reference",
    "finish",
)


class WandbLogger(Logger):
    """Logger that sends one run to Weights & Biases (W&B).

    The run has the same id there as in kvbench. If kvbench resumes a run, W&B therefore resumes it too.

    Args:
        settings: the checked `logger` group (project, entity, group, tags, mode, dir).
        run_id: id of the run.
        config: the resolved configuration.
        label: method and quantizer, such as ``kivi int2``. In W&B the run is displayed as ``LABEL MODEL DATASET``.
        say: function that shows a line to the user.
    """

    def __init__(
        self, settings: Any, run_id: str, config: Mapping[str, Any], label: str, say: Callable[[str], None]
    ) -> None:
        self.settings, self.run_id, self.config, self.label, self.say = settings, run_id, config, label, say
        self._run: Any = None
        self._went: str | None = None
        self._rows: list[Mapping[str, Any]] = []

    def destination(self) -> str | None:
        """Return a string that identifies where the run is sent: mode, service and project.

        In offline mode it names the local folder instead of service and project.
        """
        mode = self._mode()
        if mode == "offline":
            return f"wandb offline {Path(self.settings.dir).absolute()}"
        service = os.environ.get("WANDB_BASE_URL") or "https://api.wandb.ai"
        return f"wandb {mode} {service} {self.settings.entity or ''}/{self.settings.project}"

    def begin(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Remember the rows that the run already has; nothing is sent yet.

        The connection is opened by the first :meth:`sample`, or by :meth:`finish` if there is none. The rows that W&B
        does not have are sent then.
        """
        self._rows = list(rows)

    def sample(self, row: Mapping[str, Any]) -> None:
        """Log the numbers of a row (score, KV bytes, times) as one step of the W&B history.

        The texts of the row are not sent here, but in the table that :meth:`finish` logs.
        """
        run = self._start()
        self._rows.append(row)
        run.log(_history(row), step=len(self._rows) - 1)

    def finish(self, metrics: Mapping[str, Any]) -> None:
        """Log a table of all samples, write the figures of `metrics.json` to the W&B summary, and end the W&B run.

        Keys of the summary have slashes, for example ``scores/needle/score``.
        """
        import wandb

        run = self._start()
        if self._rows:
            data = [[*(row.get(name) for name in _TABLE), row["scores"].get("score")] for row in self._rows]
            table = wandb.Table(columns=[*_TABLE, "score"], data=data)
            run.log({"samples": table}, step=len(self._rows) - 1)  # its own step would take the next row's number
        for name in ("scores", "mean", "samples", "kv_bytes", "peak_bytes", "ttft_s", "tpot_s", "attention", "env"):
            for key, value in flatten(metrics[name], name).items():
                if value is not None:
                    run.summary[key.replace(".", "/")] = value
        for name in ("status", "tokens_per_s", "error", "run_id", "baseline"):
            if metrics[name] is not None:
                run.summary[name] = metrics[name]
        run.finish(exit_code=0 if metrics["status"] in (*DONE, "oom") else 1)
        self._run = None

    def _start(self) -> Any:
        if self._run is None:
            import wandb

            mode = self._mode()
            if mode == "offline" and self.settings.mode == "auto":
                self.say(
                    "wandb: no API key is configured, so it runs offline; run `wandb sync "
                    f"{self.settings.dir}/wandb/offline-run-*` later"
                )
            try:
                self._run = self._init(wandb, mode)
            except wandb.errors.Error as error:
                if self.settings.mode != "auto" or mode != "online":
                    raise
                self.say(f"wandb: not reachable ({str(error).splitlines()[0]}), so it runs offline")
                self._went = "offline"
                self._run = self._init(wandb, "offline")
            # a resumed online run continues after its last step; an offline run starts with step 0
            for step, row in enumerate(self._rows):
                if step >= self._run.step:
                    self._run.log(_history(row), step=step)
        return self._run

    def _mode(self) -> str:
        """Return ``online``, ``offline`` or ``disabled``."""
        if self._went or self.settings.mode != "auto":
            return str(self._went or self.settings.mode)
        return os.environ.get("WANDB_MODE") or ("online" if has_key() else "offline")

    def _init(self, wandb: Any, mode: str) -> Any:
        Path(self.settings.dir).mkdir(parents=True, exist_ok=True)
        model, dataset = self.config["model"].get("name"), self.config["dataset"].get("name")
        quiet = {} if self.settings.mode == "online" else {"init_timeout": _PATIENCE_S}
        return wandb.init(
            project=self.settings.project,
            entity=self.settings.entity,
            group=self.settings.group or f"{model}/{dataset}",
            tags=list(self.settings.tags),
            name=f"{self.label} {model} {dataset}",
            id=self.run_id,
            dir=self.settings.dir,
            mode=mode,
            config=plain(self.config),
            reinit="finish_previous",
            resume="allow" if mode == "online" else None,
            settings=wandb.Settings(console="off", silent=True, x_disable_stats=True, **quiet),
        )


def _history(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return the history row of one sample."""
    measured = row["measured"]
    key = row["task"] if row["length"] is None else f"{row['task']}@{row['length']}"
    history = {
        f"sample/{key}/score": row["scores"].get("score"),
        f"sample/{key}/nll": (row.get("nll") or {}).get("sum"),
        "sample/kv_bytes_used": row["kv_bytes"]["used"]["total"] if row.get("kv_bytes") else None,
        "sample/prompt_tokens": row["prompt_tokens"],
    }
    for name, value in flatten(measured.get("point") or {}, f"sample/{key}").items():
        if isinstance(value, (int, float)):
            history[name.replace(".", "/")] = value
    if not measured["warm_up"] and measured["ttft_s"] is not None:
        history["sample/ttft_s"] = measured["ttft_s"]
    return {key: value for key, value in history.items() if value is not None}


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


def plain(value: Any) -> Any:
    """Return a copy of `value` in which all mappings are dicts with string keys, and all tuples are lists."""
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    return [plain(item) for item in value] if isinstance(value, (list, tuple)) else value
