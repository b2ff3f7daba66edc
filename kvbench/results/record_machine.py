"""Records of the machine and of failures in `metrics.json`: software, load, form of the weights, lack of memory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from kvbench.results.typed import typed_key


@dataclass(frozen=True, kw_only=True)
class Load:
    """Load of the machine while the samples were run (:func:`kvbench.results.load.between`).

    Args:
        average: load average at start and end.
        mhz: mean clock frequency of the processors in MHz, at start and end.
        own_cpus: how many processors this process kept busy on average.
        other_cpus: how many processors all other processes kept busy on average.
        held_back: fraction of the time for which the container's CPU limit throttled it.
    """

    cpus: int = typed_key(minimum=1)
    average: list[float | None] = typed_key(factory=list, minItems=2, maxItems=2, minimum=0)
    mhz: list[float | None] = typed_key(factory=list, minItems=2, maxItems=2, minimum=0)
    own_cpus: float = typed_key(default=0.0, minimum=0)
    other_cpus: float | None = typed_key(default=None, minimum=0)
    held_back: float | None = typed_key(default=None, minimum=0)


@dataclass(frozen=True, kw_only=True)
class Weights:
    """Description of a model's 4-bit weights.

    Args:
        source: ``awq`` or ``gptq`` if the checkpoint has 4 bits, ``rounded`` if ``model.weights`` asked for it.
        bits: bits per weight of linear layers, without scales and zero points.
        groups: numbers of input channels that share a scale and a zero point.
        bytes: size of all weights of this process, including those with 16 bits.
    """

    source: Literal["rounded", "awq", "gptq"]
    bits: int = typed_key(minimum=1)
    groups: list[int] = typed_key(factory=list, minimum=1)
    head: bool
    bytes: int = typed_key(minimum=0)


@dataclass(frozen=True, kw_only=True)
class ServedCache:
    """Format of a server's cache, and how well it is known (:class:`kvbench.endpoint.proof.Verdict`)."""

    proof: Literal["proven", "claimed", "unknown"]
    word: str | None = None
    bytes_per_token: float | None = typed_key(default=None, minimum=0)
    expected: float | None = typed_key(default=None, minimum=0)


@dataclass(frozen=True, kw_only=True)
class Endpoint:
    """The server that ran the model: its engine, the command that started it or its URLs, and its cache.

    ``concurrency`` is the number of requests at once, ``prefix_reuse`` whether cached prefixes might be reused.
    """

    engine: str
    version: str | None = None
    command: list[str] | None = None
    urls: list[str] | None = None
    concurrency: int = typed_key(default=1, minimum=1)
    prefix_reuse: bool = False
    cache: ServedCache | None = None


@dataclass(frozen=True, kw_only=True)
class Env:
    """Machine and software versions of a run, and how its model was loaded.

    ``dtype`` is the dtype of what the cache stores in full precision, ``usual_dtype`` that of ``model.dtype=auto``, and
    ``arithmetic`` that of weights and activations. ``slower`` says why the arithmetic has 16 bits although float32
    would be faster. Records without ``arithmetic`` are from versions in which it was always ``dtype``. ``dequantized``
    is the format that the checkpoint's weights had before they were converted to float32, such as ``gguf q4_1``.
    """

    device: str | None = None
    device_name: str | None = None
    dtype: str | None = None
    arithmetic: str | None = typed_key(optional=True)
    usual_dtype: str | None = typed_key(optional=True)
    slower: str | None = typed_key(optional=True)
    cpu: str | None = None
    cpu_count: int | None = typed_key(default=None, minimum=0)
    platform: str | None = None
    python: str | None = None
    kvbench: str | None = None
    commit: str | None = None
    torch: str | None = None
    transformers: str | None = None
    tokenizers: str | None = None
    numpy: str | None = None
    triton: str | None = None
    devices: list[str] | None = typed_key(optional=True)
    layout: Literal["one device", "device_map", "tensor_parallel"] | None = typed_key(optional=True)
    weights: Weights | None = typed_key(optional=True)
    dequantized: str | None = typed_key(optional=True)
    endpoint: Endpoint | None = typed_key(optional=True)
    load: Load | None = typed_key(optional=True)


@dataclass(frozen=True, kw_only=True)
class Oom:
    """The allocation that failed for lack of memory: its size, the sample that was running, and digests of the code."""

    bytes_asked: int | None = typed_key(minimum=0)
    sample: str | None = None
    message: str = ""
    code: dict[str, str | None] | None = typed_key("digests of the code that ran out of memory", optional=True)


@dataclass(frozen=True, kw_only=True)
class Failure:
    """An error during a run; `type` is the exception's class, and `sample` None if no sample was running."""

    sample: str | None = None
    type: str = ""
    message: str = ""
    traceback: str = ""
