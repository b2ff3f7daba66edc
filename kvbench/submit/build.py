"""A row of the leaderboard from a finished run."""

from __future__ import annotations

import getpass
import json
import math
import socket
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from statistics import fmean
from typing import Any

from kvbench.cli.report_runs import marked
from kvbench.config.run_config import RunConfig, checked_config
from kvbench.errors import KvbenchError
from kvbench.methods.layer_map import written
from kvbench.results.aggregate import kv_bytes, nll_per_token, score_key
from kvbench.results.board import KIND, VERSION, BoardCache, BoardRow, Measure, board_figures
from kvbench.results.board_file import LONGEST_NAME, is_path, leaves, parse_row, row_text
from kvbench.results.code import Code
from kvbench.results.identity import full_digest, run_id
from kvbench.results.labels import run_label
from kvbench.results.samples import Row, outputs
from kvbench.results.store import RunStore
from kvbench.results.summary import counted_rows
from kvbench.runner import sources
from kvbench.runner.resolve import material
from kvbench.submit.check import WIDTHS, cache_of, cache_shape, cached_tokens

#: packages whose versions a row names
VERSIONS = ("kvbench", "python", "torch", "transformers", "tokenizers", "numpy", "triton")
#: shortest name of a user or machine that is looked for in a row: shorter ones stand in words
SHORTEST = 4


def row_content(
    store: RunStore,
    who: str,
    link: str | None,
    date: str,
    again: str | None = None,
    code: Callable[[Mapping[str, Any]], Code] = sources.code,
) -> dict[str, Any]:
    """Return the content of a row's file for a finished run, without its digest.

    Args:
        who: the name that its author chooses; `link` is an address of theirs.
        date: the day of the submission, ``2026-11-24``.
        again: digest of the row that it repeats.
        code: as for :func:`kvbench.cli.report_runs.marked`.

    Raises:
        KvbenchError: the run is not finished, is of a kind without a score, or would tell a path or a name of this
            machine.
    """
    config, metrics = store.config(), store.metrics()
    if config is None or metrics is None:
        problem = store.problem() or f"run {store.run_id}: is not finished"
        raise KvbenchError(f"{problem}.\n  hint: start its command again; it runs what is missing")
    metrics = marked(store, metrics, config, code)
    if metrics["status"] != "ok":
        raise KvbenchError(
            f"run {store.run_id}: its status is {metrics['status']}, and only whole runs of the present code are "
            "taken.\n  hint: start its command again; with runtime.rerun=true samples of older code are made anew"
        )
    if config["model"].get("serve") or config["model"].get("urls"):
        raise KvbenchError(
            f"run {store.run_id}: its model is behind a server, whose bytes cannot be recomputed.\n"
            "  hint: submit a run of the model in process"
        )
    checked = checked_config(config)
    identity = material(checked)
    if run_id(identity) != store.run_id:
        raise KvbenchError(
            f"run {store.run_id}: its model, data or settings are not what they were: their id is now "
            f"{run_id(identity)}.\n  hint: start its command again, and submit that run"
        )
    counted = counted_rows(store, metrics)
    if counted is None:
        raise KvbenchError(
            f"run {store.run_id}: its scores do not cover its present samples: it goes on, was interrupted, or its "
            "samples.jsonl was changed.\n  hint: start its command again; it runs what is missing"
        )
    rows = sorted(counted, key=lambda row: str(row["id"]))
    cache = cache_of(checked.model.dimensions(), WIDTHS.get(str((metrics["env"] or {}).get("dtype")), 2))
    measure, samples = board_samples(store, rows, cache)
    scores, mean = board_figures(measure, samples)
    env, held = metrics["env"] or {}, kv_bytes(rows)
    tokens = fmean(sample[3] for group in samples.values() for sample in group)
    sizes = {**held["used"], "fp16": held["fp16_equivalent"]}
    content = {
        "kvbench": VERSION,
        "kind": KIND,
        "run": store.run_id,
        "name": run_label(metrics),
        "model": checked.model.name,
        "identity": identity,
        "quantizer": str((config.get("quantizer") or {}).get("name", "none")),
        "layers": _layers(checked),
        "cache": asdict(cache),
        "measure": measure,
        "samples": samples,
        "scores": {key: asdict(one) for key, one in scores.items()},
        "mean": asdict(mean),
        "bytes": {**sizes, "bits": 16 * sizes["total"] / sizes["fp16"], "per_token": sizes["total"] / tokens},
        "outputs": full_digest([outputs(row) for row in rows]),
        "device": str(env.get("device_name")),
        "dtype": str(env.get("dtype")),
        "attention": (metrics.get("attention") or {}).get("path"),
        "versions": {name: env.get(name) for name in VERSIONS},
        "commit": env.get("commit"),
        "code": next(iter(metrics["sources"].values()), {}),
        "who": who,
        "link": link,
        "date": date,
        "again": again,
    }
    _check_private(content)
    return content


def board_samples(
    store: RunStore, rows: Sequence[Row], cache: BoardCache
) -> tuple[Measure, dict[str, list[list[Any]]]]:
    """Return what a run measures, and by task a list for each sample (:data:`kvbench.results.board.Sample`)."""
    kinds: list[tuple[Measure, Callable[[Row], bool], Callable[[Row], float | None]]] = [
        ("kl", lambda row: bool((row.get("fidelity") or {}).get("kld")), lambda row: fmean(row["fidelity"]["kld"])),
        ("score", lambda row: row["scores"].get("score") is not None, lambda row: row["scores"]["score"]),
        ("perplexity", lambda row: nll_per_token(row) is not None, nll_per_token),
    ]
    for measure, has, value in kinds:
        if not rows or not all(map(has, rows)):
            continue
        if missing := [row["id"] for row in rows if not row.get("kv_bytes") or "prompt_tokens" not in row]:
            raise KvbenchError(f"run {store.run_id}: {len(missing)} samples have no bytes, such as {missing[0]}")
        shape, samples = cache_shape(cache), dict[str, list[list[Any]]]()
        for row in rows:
            number = value(row)
            if number is None or not math.isfinite(number):
                raise KvbenchError(f"run {store.run_id}: sample {row['id']} has no finite {measure}")
            problem, answer = row.get("problem", row["id"]), row["id"].removeprefix(row.get("problem", row["id"]))
            name = full_digest(problem)[:12] + answer  # ~K for the K-th of several answers to a problem
            held, window = row["kv_bytes"], row.get("window")
            prompt = window["prefill"] if window else row["prompt_tokens"]  # a window is no prompt, but for its start
            tokens = cached_tokens(shape, prompt, held["fp16_equivalent"], cache.width)
            samples.setdefault(score_key(row), []).append([name, number, prompt, tokens, held["used"]["total"]])
        return measure, samples
    raise KvbenchError(
        f"run {store.run_id}: has no score, perplexity or KL divergence of all its samples, which a row needs.\n"
        "  hint: submit runs of dataset=mini, ruler, longbench, fidelity, perplexity and the like"
    )


def _layers(checked: RunConfig) -> str | None:
    layers = checked.method.layers
    return str(written(layers)) if layers else None


def _check_private(content: Mapping[str, Any]) -> None:
    """Raise KvbenchError if a row has a path of this machine, its name or its user's, or a text of a prompt."""
    names = [socket.gethostname()]
    with suppress(OSError, KeyError, ImportError):
        names.append(getpass.getuser())
    named = {name.lower() for name in names if len(name) >= SHORTEST}
    home = str(Path.home())  # "/" for users without one, as in containers
    problem, setting = "", content["identity"]["setting"]
    chosen, data = {*_texts([setting, content.get("device")])}, setting.get("data", {}).get("identity", {})
    turns = {one["system"] for one in (data, data.get("over") or {}) if one.get("system")}
    for part in _texts({key: value for key, value in content.items() if key not in ("who", "link")}):
        if is_path(part) or (len(home) > 1 and home in part):
            problem = "a path"
        elif part in chosen and named & {*part.lower().split()}:
            problem = "the name of a machine or user"
        elif part in turns or (part in chosen and len(part) > LONGEST_NAME):
            problem = "a text that may be a prompt"
        if problem:
            raise KvbenchError(
                f"a row must not tell {problem}: {json.dumps(part[:LONGEST_NAME])}.\n"
                "  hint: run the setting again with presets in place of what is your own, and submit that run"
            )


def _texts(value: Any) -> list[str]:
    return [text for _, text, _ in leaves(value) if isinstance(text, str)]


def finished_row(content: Mapping[str, Any]) -> tuple[str, BoardRow]:
    """Return the text of a row's file and the row, read from that text as everybody reads it."""
    text = row_text(content)
    return text, parse_row(json.loads(text))
