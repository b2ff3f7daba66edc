"""Engines that can be served or found behind a URL: command, flags of each cache format, and what their servers tell.

Sources: llama.cpp's `tools/server` (as bundled with llama-cpp-python 0.3.36), `llama_cpp.server` of that package,
vLLM's `vllm/config/cache.py` and `vllm/entrypoints/openai/completion/protocol.py`, and SGLang's
`python/sglang/srt/server_args.py` and `entrypoints/openai/serving_completions.py` (all read in November 2026).
"""

from __future__ import annotations

import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from kvbench.errors import ConfigError

#: form of requests and answers: llama.cpp's own ``/completion``, or ``/v1/completions``
Dialect = Literal["llamacpp", "openai"]
#: the format of a cache that is not quantized
EXACT = "fp16"


@dataclass(frozen=True)
class Engine:
    """An inference engine with a server.

    Args:
        command: words that start the server. ``{model}``, ``{port}``, ``{name}`` (name of the served model),
            ``{keys}`` and ``{values}`` (the engine's names of the formats), ``{slots}`` (requests at once),
            ``{context}`` (tokens per request), ``{total}`` (of all requests) and ``{bytes}`` (of their cache) are
            filled in.
        reuse: flags without and with reuse of cached prefixes.
        formats: kvbench's names of cache formats, and the engine's.
        dialect: form of requests.
        ids_in: True if prompts can be sent as token ids.
        logprobs: most log-probabilities per token that come with token ids; 0 for none.
        health: path that answers with status 200 once the model is loaded.
        pairs: True if keys and values can have different formats.
        probe: path by which a server of this engine is recognized, and the key that its answer has.
    """

    name: str
    command: tuple[str, ...] = ()
    reuse: tuple[tuple[str, ...], tuple[str, ...]] = ((), ())
    formats: Mapping[str, str] = field(default_factory=dict)
    dialect: Dialect = "openai"
    ids_in: bool = True
    logprobs: int = 0
    health: str = "/health"
    pairs: bool = False
    probe: tuple[str, str] | None = None

    def flags(self, form: str) -> tuple[str, str]:
        """Return the engine's names for the formats of keys and of values; `form` is ``FORMAT`` or ``KEY/VALUE``.

        Raises:
            ConfigError: the engine lacks a format, or cannot have two.
        """
        sides = form.split("/") if "/" in form else [form, form]
        for side in sides:
            if side not in self.formats:
                raise ConfigError(
                    "method.format", side, f"is not a cache format of {self.name}", allowed=list(self.formats)
                )
        if sides[0] != sides[1] and not self.pairs:
            raise ConfigError(
                "method.format", form, f"differs for keys and values, which {self.name} does not support", hint=sides[0]
            )
        return self.formats[sides[0]], self.formats[sides[1]]

    def words(self, binary: str | None, args: Sequence[str], prefix_reuse: bool, **values: object) -> list[str]:
        """Return the command that starts the server.

        Args:
            binary: program in place of the command's first word, quoted as in a shell if it has several words; None
                for the engine's own, which is looked up in PATH.
            args: further flags, which come last.
            prefix_reuse: True to reuse cached prefixes.
            values: what is filled in (:class:`Engine`).
        """
        words = [word.format_map(values) for word in (*self.command[1:], *self.reuse[prefix_reuse])]
        first = [self.command[0]] if binary is None else shlex.split(binary)
        return [*first, *words, *args]


_PYTHON = sys.executable
_LLAMA_FORMATS = {EXACT: "f16", **{name: name for name in ("q8_0", "q5_1", "q5_0", "q4_1", "q4_0", "iq4_nl")}}
#: numbers of ggml's types, which llama_cpp.server takes in place of names (`ggml.h`)
_GGML = {"f16": "1", "q4_0": "2", "q4_1": "3", "q5_0": "6", "q5_1": "7", "q8_0": "8", "iq4_nl": "20"}

LLAMACPP = Engine(
    "llamacpp",
    (
        *("llama-server", "--model", "{model}", "--alias", "{name}", "--host", "127.0.0.1", "--port", "{port}"),
        *("--cache-type-k", "{keys}", "--cache-type-v", "{values}", "--flash-attn", "on"),
        *("--parallel", "{slots}", "--ctx-size", "{total}", "--no-kv-unified", "--log-verbosity", "4"),
    ),
    (("--no-cache-prompt", "--cache-ram", "0"), ("--cache-prompt",)),
    {**_LLAMA_FORMATS, "q8_0_cpu": "q8_0"},
    dialect="llamacpp",
    logprobs=100,
    pairs=True,
    probe=("/props", "build_info"),
)

LLAMACPP_PYTHON = Engine(
    "llamacpp_python",
    (
        *(_PYTHON, "-m", "llama_cpp.server", "--model", "{model}", "--model_alias", "{name}"),
        *("--host", "127.0.0.1", "--port", "{port}", "--type_k", "{keys}", "--type_v", "{values}"),
        *("--flash_attn", "true", "--n_ctx", "{context}", "--interrupt_requests", "false", "--verbose", "true"),
    ),
    ((), ("--cache", "true")),
    {name: _GGML[form] for name, form in LLAMACPP.formats.items()},
    ids_in=False,
    health="/v1/models",
    pairs=True,
)

VLLM = Engine(
    "vllm",
    (
        *("vllm", "serve", "{model}", "--served-model-name", "{name}", "--host", "127.0.0.1", "--port", "{port}"),
        *("--kv-cache-dtype", "{keys}", "--kv-cache-memory-bytes", "{bytes}", "--max-model-len", "{context}"),
        *("--max-num-seqs", "{slots}", "--generation-config", "vllm", "--enable-prompt-tokens-details"),
    ),
    (("--no-enable-prefix-caching",), ("--enable-prefix-caching",)),
    {
        EXACT: "auto",
        "fp8": "fp8",
        **{
            name: name
            for name in (
                *("fp8_per_token_head", "int8_per_token_head", "int4_per_token_head", "nvfp4", "nvfp4_4over6"),
            )
        },
    },
    logprobs=20,
    probe=("/version", "version"),
)

SGLANG = Engine(
    "sglang",
    (
        *(_PYTHON, "-m", "sglang.launch_server", "--model-path", "{model}", "--served-model-name", "{name}"),
        *("--host", "127.0.0.1", "--port", "{port}", "--kv-cache-dtype", "{keys}", "--context-length", "{context}"),
        *("--max-running-requests", "{slots}", "--enable-cache-report"),
    ),
    (("--disable-radix-cache",), ()),
    {EXACT: "auto", "fp8": "fp8_e4m3", "fp4_mx_block16": "fp4_e2m1"},
    probe=("/get_server_info", "max_total_num_tokens"),
)

#: engines that kvbench can start, by their name in ``model.serve``
SERVED = {engine.name: engine for engine in (LLAMACPP, LLAMACPP_PYTHON, VLLM, SGLANG)}
#: a server of an engine that is not recognized; the user answers for its cache format
UNKNOWN = Engine("openai", ids_in=False)
