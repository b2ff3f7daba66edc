"""The content of `metrics.json` as nested dataclasses.

Keys that an older version did not write get defaults when read, so that every run can be shown. To add a key, add a
field here, then run ``python -m kvbench.results.record``, which writes `metrics.schema.json` next to this file.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from kvbench.results import typed
from kvbench.results.record_scores import Mean, RoundTimes, Score
from kvbench.results.typed import ShapeError, key

#: incremented when keys of metrics.json are added or change their meaning. Since version 2, rows record the code that
#: made them; since version 3, a run of points has the line of inter-token time over length; since
#: version 4, bytes have the part `state`.
SCHEMA_VERSION = 4
SCHEMA = Path(__file__).with_name("metrics.schema.json")

#: ``older``: all samples are done, but older code made some of them
Status = Literal["ok", "older", "oom", "error", "interrupted"]


@dataclass(frozen=True, kw_only=True)
class Parts:
    """Size of one sequence's cache in bytes, averaged over samples: the total and its parts.

    Args:
        total: sum of the parts.
        codes: packed codes.
        scales: scales, minima and zero points of the codes.
        window: tokens in full precision.
        index: bookkeeping, such as the positions of tokens.
        state: states of fixed size of a hybrid model's layers without attention.
    """

    total: int | None = key(default=None, minimum=0)
    codes: int | None = key(default=None, minimum=0)
    scales: int | None = key(default=None, minimum=0)
    window: int | None = key(default=None, minimum=0)
    index: int | None = key(default=None, minimum=0)
    state: int | None = key(default=None, minimum=0)


@dataclass(frozen=True, kw_only=True)
class KvBytes:
    """Size of one sequence's KV cache in bytes, averaged over samples.

    Args:
        used: bytes of the tokens that the cache holds.
        reserved: bytes of the buffers allocated for them, which may have room for more tokens.
        fp16_equivalent: bytes of the same tokens at 16 bits per element.
        ratio: bytes that method=fp16 needs for the same tokens in the model's dtype, divided by the total of `used`.
    """

    used: Parts
    reserved: Parts
    fp16_equivalent: int | None = key(default=None, minimum=0)
    ratio: float | None = key(
        "bytes that method=fp16 needs for the same tokens, divided by those used", default=None, minimum=0
    )


@dataclass(frozen=True, kw_only=True)
class PeakBytes:
    """Largest memory peaks that any sample of a run reached, in bytes.

    Args:
        prefill: peak during prefill.
        decode: peak during decoding.
        kind: how these peaks were measured: ``cuda_allocator``, or ``cpu_live_tensors``, the sizes of live tensors on a
            CPU.
        rss: peak of the process's resident memory.
        n: number of samples with a measured peak.
    """

    prefill: int | None = key(default=None, minimum=0)
    decode: int | None = key(default=None, minimum=0)
    kind: Literal["cuda_allocator", "cpu_live_tensors"] | None = None
    rss: int | None = key(default=None, minimum=0)
    n: int | None = key(default=0, minimum=0)


@dataclass(frozen=True, kw_only=True)
class Ttft:
    """Time to first token in seconds, from the start of prefill, without warm-up samples.

    Args:
        median: median over samples.
        n: number of samples.
        shared: number of these samples whose prompt was read once for several methods (``runtime.shared_prefill``);
            their time is that of the shared prefill and of the method's own placing.
    """

    median: float | None = key(default=None, minimum=0)
    n: int = key(default=1, minimum=0)
    shared: int = key(default=0, minimum=0)


@dataclass(frozen=True, kw_only=True)
class Tpot:
    """Time per output token in seconds, without warm-up samples.

    Args:
        median: median over decode steps, without the first step of each sample.
        p99: 99th percentile over the same steps.
        first_step: median of the samples' first steps.
        n: number of steps in `median`.
    """

    median: float | None = key(default=None, minimum=0)
    p99: float | None = key(default=None, minimum=0)
    first_step: float | None = key(default=None, minimum=0)
    n: int | None = key(default=0, minimum=0)


@dataclass(frozen=True, kw_only=True)
class Times:
    """Timings of the samples that a run generated on one device.

    Args:
        ttft_s: time to first token.
        tpot_s: time per output token.
        tokens_per_s: tokens generated per second of decoding.
        n: number of samples.
    """

    ttft_s: Ttft
    tpot_s: Tpot
    tokens_per_s: float | None = key(minimum=0)
    n: int | None = key(default=0, minimum=0)


@dataclass(frozen=True, kw_only=True)
class Config:
    """The options of a run that tables and reports show.

    Args:
        model: name of the model.
        method: options of the method.
        quantizer: name of the quantizer.
        formats: packed formats of keys and values; empty if nothing is packed.
        dataset: name of the data set.
        decoding: options of decoding.
        seed: seed of the run.
        batch_size: number of prompts that are processed together.
        weights: value of ``model.weights`` if weights were rounded to 4 bits, for example ``int4``; else None.
    """

    model: str | None
    method: dict[str, Any]
    quantizer: str | None = None
    formats: dict[str, Any] = key("packed formats of keys and values; empty if nothing is packed", factory=dict)
    dataset: str | None
    decoding: dict[str, Any]
    seed: int | None
    batch_size: int = key(default=1, minimum=1)
    weights: str | None = key(optional=True)


@dataclass(frozen=True, kw_only=True)
class PromptTokens:
    """Mean and maximum length of the prompts in tokens."""

    mean: float | None = key(default=None, minimum=0)
    max: int | None = key(default=None, minimum=0)


@dataclass(frozen=True, kw_only=True)
class Samples:
    """Counts of a run's samples: requested, finished, with a shortened prompt, and left out of all figures.

    Args:
        requested: number of samples that the configuration asks for.
        done: number of samples that are finished.
        truncated: number of samples whose prompts were shortened to the model's limit.
        left_out: ids of stored results that no figure includes, because the number of samples was reduced after they
            were made.
        prompt_tokens: lengths of the prompts.
    """

    requested: int | None = key(minimum=0)
    done: int = key(minimum=0)
    truncated: int = key(default=0, minimum=0)
    left_out: list[str] = key("ids of stored rows that no figure includes (after a limit was reduced)", factory=list)
    prompt_tokens: PromptTokens = key(factory=PromptTokens)


@dataclass(frozen=True, kw_only=True)
class Attention:
    """The attention implementations with which a run read its cache.

    Args:
        reads_packed: True if, for any sample, a kernel read packed codes without unpacking them to memory first; None
            if unknown.
        path: names of the attention implementations that ran, joined by ``+``.
    """

    reads_packed: bool | None = None
    path: str | None = None


@dataclass(frozen=True, kw_only=True)
class Oom:
    """The allocation with which a run ran out of memory.

    Args:
        bytes_asked: size of the allocation that failed.
        sample: id of the sample that was running.
        message: text of the error.
        code: digests of the code that was running, by part.
    """

    bytes_asked: int | None = key(minimum=0)
    sample: str | None = None
    message: str = ""
    code: dict[str, str | None] | None = key("digests of the code that ran out of memory", optional=True)


@dataclass(frozen=True, kw_only=True)
class Failure:
    """An error during a run.

    Args:
        sample: id of the sample that raised it; None if no sample was running.
        type: name of the exception's class.
        message: text of the error.
        traceback: Python's traceback.
    """

    sample: str | None = None
    type: str = ""
    message: str = ""
    traceback: str = ""


@dataclass(frozen=True, kw_only=True)
class Speculation:
    """Acceptance and speed of a run with speculative decoding.

    Args:
        gamma: number of tokens drafted per round; ``auto``: chosen for each round.
        draft: the cache that the draft reads, for example ``upper`` (QuantSpec's ``draft`` option).
        draft_weights: the weights that the draft uses, for example ``same`` (the target's).
        acceptance_rate: number of accepted tokens divided by the number of drafted ones.
        stderr: standard error of `acceptance_rate`.
        tokens_per_round: mean number of tokens that a round of drafting and verification produces.
        rounds: number of rounds.
        drafted: number of drafted tokens.
        accepted: number of accepted tokens.
        tokens: number of tokens that all rounds produced.
        n: number of samples.
        speedup: time per token of the fp16 run divided by this run's.
        expected_speedup: time per token of the fp16 run divided by that which `round_times` predicts.
        round_times: mean times of a round by part, and the time per token that they and the acceptance predict.
    """

    gamma: Any = None
    draft: str | None = None
    draft_weights: str | None = None
    acceptance_rate: float | None
    stderr: float | None = None
    tokens_per_round: float | None = None
    rounds: int | None = None
    drafted: int | None = None
    accepted: int | None = None
    tokens: int | None = None
    n: int | None = None
    speedup: float | None = None
    expected_speedup: float | None = None
    round_times: RoundTimes | None = None


@dataclass(frozen=True, kw_only=True)
class InterToken:
    """A line fitted to the time per token of decoding: ``slope_s * length + intercept_s`` seconds.

    ``length`` is the number of tokens in the cache; ``lengths`` is the number of different prompt lengths in the fit.
    """

    slope_s: float = key("seconds per token of length")
    intercept_s: float = key("seconds at length 0")
    lengths: int = key("number of lengths that the line is fitted to", minimum=2)


@dataclass(frozen=True, kw_only=True)
class Untouched:
    """The option that kept all tokens in full precision, so that a run's method neither quantized nor dropped any.

    Args:
        key: the option, for example ``residual``.
        value: value of the option.
        exact: number of tokens up to which a sequence stays in full precision as a whole.
        longest: number of tokens in the cache of the longest sample, which is not more than `exact`.
    """

    key: str
    value: Any
    exact: int
    longest: int


@dataclass(frozen=True, kw_only=True)
class Older:
    """The samples of a run that were produced by code that has changed since.

    Args:
        samples: number of these samples.
        parts: names of the changed parts of the code; ``unknown`` if the samples do not record their code.
    """

    samples: int = key(minimum=0)
    parts: list[str] = key("parts of the code that have changed since; 'unknown' if the rows do not record it")


@dataclass(frozen=True, kw_only=True)
class Load:
    """Load of the machine while the samples were run (:func:`kvbench.results.load.between`).

    Args:
        cpus: number of processors.
        average: load average at start and end.
        mhz: mean clock frequency of the processors in MHz, at start and end.
        own_cpus: how many processors this process kept busy on average.
        other_cpus: how many processors all other processes kept busy on average.
        held_back: fraction of the time for which the container's CPU limit throttled it.
    """

    cpus: int = key(minimum=1)
    average: list[float | None] = key(factory=list, minItems=2, maxItems=2, minimum=0)
    mhz: list[float | None] = key(factory=list, minItems=2, maxItems=2, minimum=0)
    own_cpus: float = key(default=0.0, minimum=0)
    other_cpus: float | None = key(default=None, minimum=0)
    held_back: float | None = key(default=None, minimum=0)


@dataclass(frozen=True, kw_only=True)
class Weights:
    """The model's weights of a run in which they have 4 bits.

    Args:
        source: ``awq`` or ``gptq`` if the checkpoint has 4 bits, ``rounded`` if ``model.weights`` asked for it.
        bits: bits per weight of linear layers, without scales and zero points.
        groups: numbers of input channels that share a scale and a zero point.
        head: True if the output head has 4 bits too.
        bytes: size of all weights of this process, including those with 16 bits.
    """

    source: Literal["rounded", "awq", "gptq"]
    bits: int = key(minimum=1)
    groups: list[int] = key(factory=list, minimum=1)
    head: bool
    bytes: int = key(minimum=0)


@dataclass(frozen=True, kw_only=True)
class Env:
    """Machine and software versions of a run, and how its model was loaded."""

    device: str | None = None
    device_name: str | None = None
    dtype: str | None = None
    cpu: str | None = None
    cpu_count: int | None = key(default=None, minimum=0)
    platform: str | None = None
    python: str | None = None
    kvbench: str | None = None
    commit: str | None = None
    torch: str | None = None
    transformers: str | None = None
    tokenizers: str | None = None
    numpy: str | None = None
    triton: str | None = None
    devices: list[str] | None = key(optional=True)
    layout: Literal["one device", "device_map", "tensor_parallel"] | None = key(optional=True)
    weights: Weights | None = key(optional=True)
    load: Load | None = key(optional=True)


@dataclass(frozen=True, kw_only=True)
class Metrics:
    """Everything that `metrics.json` says about one run: its options, samples, scores, memory, times and errors.

    Args:
        schema_version: version of the file's format.
        run_id: id of the run; None if the run could not start.
        status: ``ok``; ``older`` if all samples are finished, but older code produced some of them; ``oom`` if memory
            ran out; ``error``; or ``interrupted``.
        label: names of method and quantizer, for tables.
        config: the options that tables show.
        data: identity of the data set and notes about it.
        code: number of samples by version of the code that produced them; a version is named by its digest.
        sources: for each of these versions, a dict from part of the code to the digest of that part.
        older: the samples that were produced by older code; None if there are none.
        samples: counts of samples.
        scores: scores by ``task`` or ``task@length``.
        mean: mean over the entries of `scores`, each with the same weight.
        baseline: id of the fp16 run with which this run is compared; None without one.
        baseline_differs: parts of the code that changed between this run and the fp16 run, so that comparing them may
            be misleading.
        kv_bytes: size of one sequence's KV cache.
        peak_bytes: memory peaks.
        ttft_s: time to first token on the device of the last command; if no sample was timed there, on the device with
            the most samples.
        tpot_s: time per output token on the same device.
        tokens_per_s: tokens generated per second of decoding on the same device.
        timings: timings by name of the device.
        attention: the attention implementations with which the run read its cache.
        speculation: figures of speculative decoding; None without it.
        oom: details if memory ran out, else None.
        errors: all errors of samples and of the run as a whole.
        error: message of the last error; None without errors.
        env: machine and software versions.
        untouched: why the method neither quantized nor dropped a token; None unless that was so.
        inter_token: for each batch size, the line fitted to the time per token over length.
    """

    schema_version: int = SCHEMA_VERSION
    run_id: str | None = key(pattern="^[0-9a-f]{10}-[0-9a-f]{10}$")
    status: Status
    label: str
    config: Config
    data: dict[str, Any] | None = key(
        "identity (checksums) and notes (scorers' back ends) of the data set", default=None
    )
    code: dict[str, int] = key("digest of the code (or unknown) -> samples that it made", factory=dict, minimum=1)
    sources: dict[str, dict[str, str | None]] = key("digest of the code -> digests of its parts", factory=dict)
    older: Older | None = key("samples made by other code than that of the last command", default=None)
    samples: Samples
    scores: dict[str, Score] = key(keys="^[^@]+(@[0-9][0-9k+-]*)?$")
    mean: Mean = key("unweighted mean over the keys of scores")
    baseline: str | None = key("id of the fp16 run that differences refer to", default=None)
    baseline_differs: list[str] = key("parts of the code in which the fp16 run's rows differ", factory=list)
    kv_bytes: KvBytes
    peak_bytes: PeakBytes
    ttft_s: Ttft
    tpot_s: Tpot
    tokens_per_s: float | None = key(minimum=0)
    timings: dict[str, Times] = key("per device", factory=dict)
    attention: Attention = key(factory=Attention)
    speculation: Speculation | None = None
    oom: Oom | None = None
    errors: list[Failure] = key(factory=list)
    error: str | None = None
    env: Env = key(factory=Env)
    untouched: Untouched | None = None
    inter_token: dict[str, InterToken] = key(
        "batch size -> line of inter-token time over length, where points have two or more lengths",
        factory=dict,
        keys="^[0-9]+$",
    )


def read(content: Any) -> Metrics:
    """Validate the parsed content of a `metrics.json`, from any version of kvbench, and convert it to :class:`Metrics`.

    Args:
        content: the result of ``json.loads``.

    Raises:
        ShapeError: `content` is not valid; the message names the key.
    """
    metrics = typed.read(Metrics, content)
    for name, entry in metrics.scores.items():
        if entry.points is None:
            continue
        if not name.rpartition("@")[2].isdigit():
            raise ShapeError(f"scores.{name} contains points, but its name does not end in @LENGTH")
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

    Unlike :func:`read`, this rejects unknown keys. The order is that of :class:`Metrics`.

    Args:
        content: the content as a dict.

    Raises:
        ShapeError: a key is unknown, a required key is missing, or a value has the wrong type.
    """
    written: dict[str, Any] = typed.plain(typed.read(Metrics, content, strict=True))
    return written


def filled(content: Any) -> dict[str, Any]:
    """Return the content of a `metrics.json` as a dict that has every key, whatever version of kvbench wrote it.

    Args:
        content: the result of ``json.loads``; missing keys get their defaults.

    Raises:
        ShapeError: `content` is not valid; the message names the key.
    """
    complete: dict[str, Any] = typed.plain(read(content), complete=True)
    return complete


def problem(content: Any) -> str | None:
    """Say what is wrong with the content of a `metrics.json`, for example ``mean.score is missing``.

    Args:
        content: the result of ``json.loads``.

    Returns:
        The first defect that is found; None if `content` is valid.
    """
    try:
        read(content)
    except ShapeError as error:
        return str(error)
    return None


def schema() -> dict[str, Any]:
    """Return the JSON schema of the `metrics.json` files that this version of kvbench writes."""
    written = typed.schema(Metrics, "metrics.json of a kvbench run")
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
    """Return the JSON schema of `metrics.json` (:func:`schema`) as the text of the file `metrics.schema.json`."""
    return json.dumps(schema(), indent=1) + "\n"


if __name__ == "__main__":
    SCHEMA.write_text(schema_text(), encoding="utf-8")
