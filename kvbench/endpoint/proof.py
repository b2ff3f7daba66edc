"""Proof of a server's cache format: its word, held against the bytes that its cache takes per token.

A server's word alone is a claim: vLLM may say ``auto`` for a checkpoint that sets FP8, and a flag may be ignored. Where
the server says how many bytes hold how many tokens, their quotient must be the bill of the format.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from kvbench.endpoint.client import Place, get
from kvbench.endpoint.engines import EXACT, LLAMACPP, LLAMACPP_PYTHON, Engine
from kvbench.endpoint.life import EndpointError

#: largest relative difference of the quotient from the bill: blocks are not split, and servers round sizes
TOLERANCE = 0.01
#: words that leave the format to the checkpoint
_OPEN = ("auto", "none", "")
#: words for a cache that is not quantized
_EXACT = ("f16", "bf16", "f32", "float16", "bfloat16", "float32", "half")
#: a line of llama.cpp's log: MiB of keys and values, cells of a stream, streams, and the types
_LLAMA = re.compile(
    r"size =\s*(?P<mib>[\d.]+) MiB \(\s*(?P<cells>\d+) cells,.*?/\s*(?P<streams>\d+) seqs\), "
    r"K \((?P<key>\w+)\).*?V \((?P<value>\w+)\)"
)


@dataclass(frozen=True)
class Facts:
    """A server's own account of itself.

    Args:
        version: of the engine; None if it does not say.
        word: its names for the formats of keys and values, ``KEY/VALUE`` if they differ; None if it does not say.
        bytes_per_token: bytes of its cache divided by the tokens that fit into it; None if unknown.
    """

    version: str | None = None
    word: str | None = None
    bytes_per_token: float | None = None


@dataclass(frozen=True)
class Verdict:
    """Comparison of a server's cache with the format that the run is about.

    Args:
        proof: ``proven``: the bytes are those of the format, and the server does not say otherwise; ``claimed``: only
            the server's word; ``unknown``: not even that.
        expected: bytes per token of the format; None if they are not known.
    """

    proof: Literal["proven", "claimed", "unknown"]
    word: str | None
    bytes_per_token: float | None
    expected: float | None

    def as_dict(self) -> dict[str, Any]:
        """Return the fields as plain data."""
        return asdict(self)


def facts(place: Place, log: str = "") -> Facts:
    """Ask a server about its version and its cache; `log` is the output of a server that this run has started."""
    name, url = place.engine.name, place.url
    if name == "vllm":
        about, metrics = get(url, "/version"), str(get(url, "/metrics") or "")
        return Facts((about or {}).get("version"), *_of_vllm(metrics))
    if name == "sglang":
        about = get(url, "/get_server_info") or get(url, "/server_info") or {}
        return Facts(about.get("version"), about.get("kv_cache_dtype"), _of_sglang(about, log))
    if name == "llamacpp":
        return Facts((get(url, "/props") or {}).get("build_info"), *_of_llama(log))
    if name == "llamacpp_python":
        about = get(url, "/openapi.json") or {}
        return Facts((about.get("info") or {}).get("version"), *_of_llama(log))
    return Facts()


def _of_llama(log: str) -> tuple[str | None, float | None]:
    """Return llama.cpp's word and bytes per token; models with sliding windows have several caches of other lengths."""
    lines = [match.groupdict() for match in _LLAMA.finditer(log)]
    if not lines:
        return None, None
    words = [line["key"] if line["key"] == line["value"] else f"{line['key']}/{line['value']}" for line in lines]
    sizes = [float(line["mib"]) * 2**20 / (int(line["cells"]) * int(line["streams"])) for line in lines]
    return words[0], sum(sizes) if len(lines) == 1 else None


def _of_vllm(metrics: str) -> tuple[str | None, float | None]:
    gauge = re.search(r"^vllm:cache_config_info\{(.*)\}", metrics, re.MULTILINE)
    if gauge is None:
        return None, None
    labels = dict(re.findall(r'(\w+)="([^"]*)"', gauge.group(1)))
    size, tokens = labels.get("kv_cache_memory_bytes", ""), labels.get("kv_cache_size_tokens", "")
    both = size.isdigit() and tokens.isdigit() and int(size) and int(tokens)
    return labels.get("cache_dtype"), int(size) / int(tokens) if both else None


def _of_sglang(about: Mapping[str, Any], log: str) -> float | None:
    """Return SGLang's bytes per token: from the log's sizes of keys and values, or else from the server's own size."""
    line = re.search(r"KV Cache is allocated.*?#tokens: (\d+), K size: ([\d.]+) GB, V size: ([\d.]+) GB", log)
    if line is not None:
        return (float(line[2]) + float(line[3])) * 2**30 / int(line[1])
    tokens = about.get("max_total_num_tokens")
    states = about.get("internal_states") or [{}]
    gib = (states[0].get("memory_usage") or {}).get("kvcache")
    return float(gib) * 2**30 / int(tokens) if gib and tokens else None


def verdict(server: Facts, engine: Engine, form: str, expected: float | None, args: Sequence[str] = ()) -> Verdict:
    """Return whether a server's cache has the format `form`.

    Args:
        expected: bytes per token of the format; None if they are not known.
        args: the user's flags of the server; with any kind of parallelism, its bytes are those of one part.

    Raises:
        EndpointError: the bytes or the word are those of another format.
    """
    split = any("parallel" in word or word == "--tp" for word in args)
    measured = None if expected is None or split else server.bytes_per_token
    if measured is not None and expected is not None and abs(measured / expected - 1) > TOLERANCE:
        raise EndpointError(
            f"the server's cache takes {measured:.0f} bytes per token (it says {server.word}), but {form} takes "
            f"{expected:.0f}: it has another format.\n  hint: correct the server's flags, or method.format"
        )
    word = (server.word or "").lower()
    if word not in _OPEN and word not in _words(engine, form):
        raise EndpointError(
            f"the server says that its cache has the format {server.word}, but this run is about {form}.\n"
            "  hint: correct the server's flags, or method.format"
        )
    if measured is not None:
        return Verdict("proven", server.word, server.bytes_per_token, expected)
    return Verdict("unknown" if word in _OPEN else "claimed", server.word, server.bytes_per_token, expected)


def _words(engine: Engine, form: str) -> tuple[str, ...]:
    """Return the words with which an engine's server may name a format."""
    if form == EXACT:
        return _EXACT
    named = LLAMACPP if engine is LLAMACPP_PYTHON else engine  # its flags are numbers, but its log has names
    key, value = named.flags(form) if named.formats else (form, form)
    return ("fp8", "fp8_e4m3") if key == value == "fp8" else (key if key == value else f"{key}/{value}",)
