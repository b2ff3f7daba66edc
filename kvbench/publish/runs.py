"""Sending of one stored run to Weights & Biases, as its logger would have sent it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal

from kvbench.errors import KvbenchError
from kvbench.loggers.wandb import WandbLogger
from kvbench.loggers.wandb_service import Service
from kvbench.results.identity import content_digest
from kvbench.results.samples import Row
from kvbench.results.store import RunStore
from kvbench.util.table import printable

#: ``known``: the destination has it already
Outcome = Literal["sent", "known", "failed"]


def send_run(
    store: RunStore, service: Service, sweep: str | None = None, *, again: bool = False, prompts: bool = False
) -> Outcome:
    """Send a run unless the destination has it already; print what was done, or why the run could not be sent.

    Args:
        sweep: id of the sweep whose group the run gets; None for a single run.
        again: True to send it even if the destination has it already.
        prompts: True to send excerpts of the prompts too, for which the data set is read.
    """
    try:
        return guarded(store.run_id, lambda: _send(store, service, sweep, again, prompts))
    except KvbenchError as error:
        print(f"error: {error}", file=sys.stderr)
        return "failed"


def as_asked(service: Service, prompts: bool = False) -> str:
    """Return the destination as text, with the options that change what W&B gets: prompts, group and tags.

    A run that was sent there with other options has to be sent again. Group and tags are in the settings of the
    service.
    """
    options = {"prompts": prompts, "group": service.settings.group, "tags": sorted(service.settings.tags)}
    asked = [f"{name}={option}" for name, option in options.items() if option]
    return " ".join([service.destination(), *asked])


def guarded(name: str, action: Callable[[], Outcome]) -> Outcome:
    """Return the result of an action that calls wandb.

    Raises:
        KvbenchError: wandb raised an exception; the message names `name`, the exception and what to do.
    """
    try:
        return action()
    except KvbenchError:
        raise
    except Exception as error:  # wandb raises many types, some of them of the network libraries below it
        reason = (str(error).strip().splitlines() or [""])[0].rstrip(".")
        raise KvbenchError(
            f"{name} could not be sent ({type(error).__name__}: {reason}).\n"
            "  hint: the results are still on disk; run the same command again, or use --mode offline"
        ) from error


def _send(store: RunStore, service: Service, sweep: str | None, again: bool, prompts: bool) -> Outcome:
    problem = store.problem()
    if problem:
        raise KvbenchError(problem)
    with store.hold(timeout_s=0, quiet=True):
        metrics, config = store.metrics(), store.config()
        if config is None:
            raise KvbenchError(
                f"{store.path / 'config.yaml'}: cannot be read.\n  hint: run the command of this run again to write it"
            )
        if metrics is None:
            count = len(store.samples().rows)
            raise KvbenchError(
                f"run {store.run_id} has not finished: it has {count} samples so far.\n"
                "  hint: run its command again; python -m kvbench.report --html shows it"
            )
        digest, label = content_digest(metrics), printable(metrics["label"])
        wanted = as_asked(service, prompts)
        if not again and store.deliveries().get(wanted) == digest:
            print(f"{store.run_id}  {label}: already sent")
            return "known"
        samples = store.samples()
        left_out = set(metrics["samples"]["left_out"])
        logger = WandbLogger(
            service.settings, store.run_id, config, metrics["label"], service.say, store.path, sweep, service
        )
        rows = [row for name, row in samples.rows.items() if name not in left_out]
        logger.begin(with_excerpts(config, rows, service.say) if prompts else rows)
        logger.finish(metrics)
        for place in {service.destination(), as_asked(service, prompts)}:
            store.record_delivery(place, digest, service.local)
    lost = f" ({len(samples.damaged)} damaged lines of samples.jsonl left out)" if samples.damaged else ""
    print(f"{store.run_id}  {label}: sent{lost}, {service.place}")
    return "sent"


def with_excerpts(config: Mapping[str, Any], rows: Iterable[Row], say: Callable[[str], None]) -> list[Row]:
    """Return rows with both ends of their prompts and a reference answer, as loggers get them while a run goes on.

    If the data set cannot be read, the rows are returned as they are, and the reason is reported.
    """
    from kvbench.config.run_config import checked_config
    from kvbench.models.load import load_tokenizer
    from kvbench.runner.remarks import shown_excerpts

    stored = list(rows)
    try:
        checked = checked_config(config)
        if checked.task.needs_tokenizer:
            checked.task.bind(load_tokenizer(checked.model))
        excerpts = {
            sample.id: shown_excerpts(sample)
            for sample in checked.task.next_samples({row["id"]: row for row in stored})
        }
    except KvbenchError as error:
        say(f"note: sent without prompts, because the data set cannot be read: {str(error).splitlines()[0]}")
        return stored
    return [{**row, **excerpts.get(row["id"], {})} for row in stored]
