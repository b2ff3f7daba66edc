"""The content of `metrics.json` as nested dataclasses.

Keys that an older version did not write get defaults when read, so that every run can be shown. To add a key, add a
field here, or in one of the modules of its parts (`record_scores`, `record_cost` and so on), then run
``python -m kvbench.results.record``, which writes `metrics.schema.json` next to this file.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from kvbench.results import typed
from kvbench.results.record_cost import InterToken, KvBytes, PeakBytes, Speculation, Times, Tpot, Ttft
from kvbench.results.record_cost import Parts as Parts
from kvbench.results.record_machine import Env, Failure, Oom
from kvbench.results.record_scores import Mean, Score
from kvbench.results.typed import ShapeError, typed_key

#: incremented when keys of metrics.json are added or change their meaning. Since version 2, rows record the code that
#: made them; since version 3, a run of points has the line of inter-token time over length; since
#: version 4, bytes have the part `state`.
SCHEMA_VERSION = 4
SCHEMA = Path(__file__).with_name("metrics.schema.json")

#: ``older``: all samples are done, but older code made some of them
Status = Literal["ok", "older", "oom", "error", "interrupted"]


@dataclass(frozen=True, kw_only=True)
class Config:
    """The options of a run that tables and reports show.

    `model`, `quantizer` and `dataset` are names. `formats` are the packed formats of keys and values; empty if nothing
    is packed. `batch_size` is the number of prompts that are processed together. `weights` is the value of
    ``model.weights`` if weights were rounded to 4 bits, for example ``int4``; else None.
    """

    model: str | None
    method: dict[str, Any]
    quantizer: str | None = None
    formats: dict[str, Any] = typed_key("packed formats of keys and values; empty if nothing is packed", factory=dict)
    dataset: str | None
    decoding: dict[str, Any]
    seed: int | None
    batch_size: int = typed_key(default=1, minimum=1)
    weights: str | None = typed_key(optional=True)


@dataclass(frozen=True, kw_only=True)
class PromptTokens:
    """Mean and maximum length of the prompts in tokens."""

    mean: float | None = typed_key(default=None, minimum=0)
    max: int | None = typed_key(default=None, minimum=0)


@dataclass(frozen=True, kw_only=True)
class Samples:
    """Counts of a run's samples; `requested` is the number that the configuration asks for.

    `truncated` is the number of samples whose prompts were shortened to the model's limit; `left_out` are the ids of
    stored results that no figure includes, because the number of samples was reduced after they were made; `too_long`
    those of samples that were never run, because the model does not hold them with their answers, by key of the score.
    """

    requested: int | None = typed_key(minimum=0)
    done: int = typed_key(minimum=0)
    truncated: int = typed_key(default=0, minimum=0)
    left_out: list[str] = typed_key(
        "ids of stored rows that no figure includes (after a limit was reduced)", factory=list
    )
    too_long: dict[str, list[str]] | None = typed_key(
        "ids of samples that do not fit into the model with their answers, by the key of their score", optional=True
    )
    prompt_tokens: PromptTokens = typed_key(factory=PromptTokens)


@dataclass(frozen=True, kw_only=True)
class Attention:
    """The attention implementations with which a run read its cache; `path` is their names, joined by ``+``.

    `reads_packed` is True if, for any sample, a kernel read packed codes without unpacking them to memory first; None
    if unknown.
    """

    reads_packed: bool | None = None
    path: str | None = None


@dataclass(frozen=True, kw_only=True)
class Untouched:
    """The option `key` that kept all tokens in full precision, so that a run's method neither packed nor dropped any.

    A sequence of up to `exact` tokens stays in full precision as a whole; the longest sample had `longest` in the
    cache.
    """

    key: str
    value: Any
    exact: int
    longest: int


@dataclass(frozen=True, kw_only=True)
class Older:
    """The number of samples that older code produced, and the names of the parts of the code that have changed since.

    The name is ``unknown`` if the samples do not record their code.
    """

    samples: int = typed_key(minimum=0)
    parts: list[str] = typed_key("parts of the code that have changed since; 'unknown' if the rows do not record it")


@dataclass(frozen=True, kw_only=True)
class Metrics:
    """Everything that `metrics.json` says about one run: its options, samples, scores, memory, times and errors.

    `older` is None if no samples were produced by older code. `untouched` is None if the method quantized or dropped a
    token.

    Args:
        run_id: id of the run; None if the run could not start.
        status: ``ok``; ``older`` if all samples are finished, but older code produced some of them; ``oom`` if memory
            ran out; ``error``; or ``interrupted``.
        data: identity of the data set and notes about it.
        code: number of samples by version of the code that produced them; a version is named by its digest.
        sources: for each of these versions, a dict from part of the code to the digest of that part.
        scores: scores by ``task`` or ``task@length``.
        baseline: id of the fp16 run with which this run is compared; None without one.
        baseline_differs: parts of the code that changed between this run and the fp16 run, so that comparing them may
            be misleading.
        ttft_s: time to first token on the device of the last command; if no sample was timed there, on the device with
            the most samples.
        tpot_s: time per output token on the same device.
        tokens_per_s: tokens generated per second of decoding on the same device.
        speculation: None without speculative decoding.
        oom: None unless memory ran out.
        error: message of the last error; None without errors.
        inter_token: for each batch size, the line fitted to the time per token over length.
    """

    schema_version: int = SCHEMA_VERSION
    run_id: str | None = typed_key(pattern="^[0-9a-f]{10}-[0-9a-f]{10}$")
    status: Status
    label: str
    config: Config
    data: dict[str, Any] | None = typed_key(
        "identity (checksums) and notes (scorers' back ends) of the data set", default=None
    )
    code: dict[str, int] = typed_key("digest of the code (or unknown) -> samples that it made", factory=dict, minimum=1)
    sources: dict[str, dict[str, str | None]] = typed_key("digest of the code -> digests of its parts", factory=dict)
    older: Older | None = typed_key("samples made by other code than that of the last command", default=None)
    samples: Samples
    scores: dict[str, Score] = typed_key(keys="^[^@]+(@[0-9][0-9k+-]*)?$")
    mean: Mean = typed_key("unweighted mean over the keys of scores")
    baseline: str | None = typed_key("id of the fp16 run that differences refer to", default=None)
    baseline_differs: list[str] = typed_key("parts of the code in which the fp16 run's rows differ", factory=list)
    kv_bytes: KvBytes
    peak_bytes: PeakBytes
    ttft_s: Ttft
    tpot_s: Tpot
    tokens_per_s: float | None = typed_key(minimum=0)
    timings: dict[str, Times] = typed_key("per device", factory=dict)
    attention: Attention = typed_key(factory=Attention)
    speculation: Speculation | None = None
    oom: Oom | None = None
    errors: list[Failure] = typed_key(factory=list)
    error: str | None = None
    env: Env = typed_key(factory=Env)
    untouched: Untouched | None = None
    inter_token: dict[str, InterToken] = typed_key(
        "batch size -> line of inter-token time over length, where points have two or more lengths",
        factory=dict,
        keys="^[0-9]+$",
    )


def read_metrics(content: Any) -> Metrics:
    """Validate the parsed content of a `metrics.json`, from any version of kvbench, and convert it to :class:`Metrics`.

    Raises:
        ShapeError: `content` is not valid; the message names the key.
    """
    metrics = typed.read_typed(Metrics, content)
    for name, entry in metrics.scores.items():
        if entry.points is None:
            continue
        if not name.rpartition("@")[2].isdigit():
            raise ShapeError(
                f"scores.{name} has points of time and memory, but its name does not end in the length of their "
                f"prompts, as in {name.partition('@')[0]}@4096"
            )
        for batch, point in entry.points.batches.items():
            if not batch.isdigit():
                raise ShapeError(f"scores.{name}.points.batches.{batch}: {batch} is not a batch size")
            if point.status == "ok" and point.tokens_per_s is None:
                raise ShapeError(f"scores.{name}.points.batches.{batch}.tokens_per_s is missing")
    if metrics.status == "oom" and metrics.oom is None:
        raise ShapeError("status is oom, but the key oom is missing")
    return metrics


def checked(content: Mapping[str, Any]) -> dict[str, Any]:
    """Validate the content of a `metrics.json` that is to be written; return it with its keys in a fixed order.

    Unlike :func:`read_metrics`, this rejects unknown keys. The order is that of :class:`Metrics`.

    Raises:
        ShapeError: a key is unknown, a required key is missing, or a value has the wrong type.
    """
    written: dict[str, Any] = typed.plain_tree(typed.read_typed(Metrics, content, strict=True))
    return written


def fill_defaults(content: Any) -> dict[str, Any]:
    """Return the parsed content of a `metrics.json` as a dict that has every key, missing ones with their defaults.

    Raises:
        ShapeError: `content` is not valid; the message names the key.
    """
    complete: dict[str, Any] = typed.plain_tree(read_metrics(content), complete=True)
    return complete


def problem(content: Any) -> str | None:
    """Return the error in the parsed content of a `metrics.json`, such as ``mean.score is missing``; None if valid."""
    try:
        read_metrics(content)
    except ShapeError as error:
        return str(error)
    return None


def metrics_schema() -> dict[str, Any]:
    """Return the JSON schema of the `metrics.json` files that this version of kvbench writes."""
    written = typed.typed_schema(Metrics, "metrics.json of a kvbench run")
    written["properties"]["schema_version"] = {"const": SCHEMA_VERSION}
    conditions = (
        ("oom", {"oom": {"type": "object"}}),
        ("older", {"older": {"type": "object"}}),
        ("error", {"errors": {"minItems": 1}, "error": {"type": "string"}}),
    )
    written["allOf"] = [
        {"if": {"properties": {"status": {"const": status}}}, "then": {"properties": properties}}
        for status, properties in conditions
    ]
    return written


def schema_text() -> str:
    """Return the JSON schema of `metrics.json` (:func:`metrics_schema`) as the text of `metrics.schema.json`."""
    return json.dumps(metrics_schema(), indent=1) + "\n"


if __name__ == "__main__":
    SCHEMA.write_text(schema_text(), encoding="utf-8")
