"""The configuration group ``model`` for a model behind a server: where the server is, or how to start it."""

from __future__ import annotations

import re
import shlex
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit

from kvbench.endpoint.engines import SERVED, Engine
from kvbench.errors import ConfigError
from kvbench.models.by_name import SERVED as PRESET
from kvbench.models.by_name import labelled
from kvbench.models.spec import ModelConfig, without_secrets
from kvbench.util.confdir import read_choice
from kvbench.util.fingerprint import sha256
from kvbench.util.schema import bounded, build, field_names

_SECRET = "would put a secret into files and logs"
#: flags that kvbench does not pass on, with the reason
_REFUSED = {
    **dict.fromkeys(("--api-key", "--api_key", "--admin-api-key", "--ssl-keyfile-password"), _SECRET),
    **dict.fromkeys(("--hf-token", "--hf_token", "-hft"), f"{_SECRET}; set HF_TOKEN in the environment"),
    "--port": "is chosen by model.port",
    "--host": "is 127.0.0.1: the server is for this run alone",
}


@dataclass(frozen=True, kw_only=True)
class EndpointModel(ModelConfig):
    """A model behind an OpenAI-compatible server, whose tokenizer and sizes kvbench knows.

    `preset`, `path` or `hub_id` say which model it is: its tokenizer makes the token ids of prompts, and its sizes give
    the bytes of each cache format. The weights are the server's.

    Args:
        urls: base URLs of running servers, such as ``[http://localhost:8000]``; requests go to each in turn.
        serve: engine to start for this run, instead of `urls`: ``llamacpp`` (``llama-server``), ``llamacpp_python``
            (``llama_cpp.server``), ``vllm`` or ``sglang``.
        served: with `serve`, the file, folder or repository that the server loads (None: `path` or `hub_id`). With
            `urls`, the name under which the server knows the model (None: the only one it has).
        binary: program that starts the server, such as ``/opt/llama.cpp/llama-server``; None: the engine's own, in
            PATH, or this Python.
        args: further flags of the server.
        port: TCP port of the server; None: a free one.
        start_s: seconds that the server may take to load the model.
        concurrency: number of requests at once, over all URLs. Engines batch them, which can change answers.
        prefix_reuse: True if the server may reuse the cached prefix of an earlier request.
        logprobs: number of log-probabilities per token to store, for a bound of the KL divergence; 0: none. Only
            engines that return them with token ids are asked.
        retries: number of further attempts at a request after status 429, 5xx or a broken connection.
        timeout_s: seconds without any byte after which a request counts as broken.
    """

    urls: tuple[str, ...] = ()
    serve: Literal["llamacpp", "llamacpp_python", "vllm", "sglang"] | None = None
    served: str | None = None
    binary: str | None = None
    args: tuple[str, ...] = ()
    port: int | None = bounded(None, minimum=1, maximum=65535)
    start_s: float = bounded(600.0, above=0.0, maximum=1e5)
    concurrency: int = bounded(4, minimum=1, maximum=4096)
    prefix_reuse: bool = False
    logprobs: int = bounded(20, minimum=0, maximum=100)
    retries: int = bounded(8, minimum=0, maximum=100)
    timeout_s: float = bounded(600.0, above=0.0, maximum=1e5)

    @property
    def served_elsewhere(self) -> bool:
        """True: a server runs the model."""
        return True

    @property
    def engine(self) -> Engine | None:
        """The engine that is started; None for `urls`, whose servers say what they are."""
        return SERVED[self.serve] if self.serve else None

    @property
    def loads(self) -> str | None:
        """File, folder or repository that a started server loads."""
        folder = self.folder()
        if self.served and self.served.startswith("~"):
            return str(Path(self.served).expanduser())
        return self.served or (self.hub_id if folder is None else str(folder))

    def check(self) -> None:
        """Raise ConfigError for a missing or contradictory address or command, or a model that is not known."""
        if (self.serve is None) == (not self.urls):
            raise ConfigError(
                "model.urls",
                list(self.urls),
                "must name running servers, unless model.serve starts one" if not self.urls else "excludes model.serve",
                hint="model.urls=[http://localhost:8000], or model.serve=llamacpp",
            )
        if not (self.path or self.hub_id or self.package or self.architecture):
            raise ConfigError(
                "model.preset",
                None,
                "does not say which model the server has, whose tokenizer and sizes are needed",
                hint="model.preset=NAME, model.path=DIR or model.hub_id=OWNER/NAME",
            )
        super().check()
        for url in self.urls:
            if not re.fullmatch(r"https?://[^\s/?#@]+(/[^\s?#@]*)?", url) or not _has_port(url):
                raise ConfigError(
                    "model.urls",
                    without_secrets(re.sub(r"(?<=//).*(?=@)|(?<=#).*", "***", url)),
                    "is not the address of a server",
                    allowed="http(s)://HOST:PORT, without user, query or key",
                    hint="give a key as the environment variable KVBENCH_API_KEY",
                )
        try:
            program = [] if self.binary is None else shlex.split(self.binary)
        except ValueError as error:
            raise ConfigError("model.binary", self.binary, str(error), hint="quote it as in a shell") from None
        if self.binary is not None and not program:
            raise ConfigError("model.binary", self.binary, "names no program", hint="model.binary=null")
        for word in (*program, *self.args):
            flag = word.partition("=")[0]
            if flag in _REFUSED:
                raise ConfigError("model.args", flag, _REFUSED[flag])
        if self.weights != "pretrained":
            raise ConfigError("model.weights", self.weights, "is the server's choice", hint="model.weights=pretrained")

    def check_file(self) -> None:
        """Raise ConfigError if the server loads a GGUF file that is not on this machine."""
        gguf = self.serve is not None and self.serve.startswith("llamacpp")
        if gguf and not Path(str(self.loads)).expanduser().is_file():
            raise ConfigError("model.served", self.loads, "is not a GGUF file", hint="model.served=./FILE.gguf")

    def more_identity(self) -> dict[str, Any]:
        """Return what determines the server's answers: neither address nor port, program or time limits."""
        loads, content = self.loads if self.serve else self.served, None
        if self.serve and loads is not None and Path(loads).expanduser().is_file():
            loads, content = Path(loads).name, sha256(Path(loads).expanduser())
        about = {"engine": self.serve, "served": loads, "content": content, "args": list(self.args)}
        for key in ("concurrency", "prefix_reuse", "logprobs"):
            about[key] = getattr(self, key)
        return {"endpoint": about}


def _has_port(url: str) -> bool:
    """Return False if the port of an address is not a number of a port; no port is one."""
    try:
        return urlsplit(url).port != 0
    except ValueError:
        return False


#: keys of the group that only a model behind a server has
KEYS = frozenset(field_names(EndpointModel)) - frozenset(field_names(ModelConfig))


def model_of(group: Mapping[str, Any]) -> ModelConfig:
    """Return the configuration group ``model`` as typed data, unchecked; raise ConfigError for a wrong key or type."""
    return build(EndpointModel if KEYS & group.keys() else ModelConfig, group, "model")


def described(
    group: Mapping[str, Any], preset: Mapping[str, Any], presets: Mapping[str, Path], given: Collection[str]
) -> dict[str, Any]:
    """Return the group of ``model=endpoint`` with the model's description: that of ``model.preset``, or a checkpoint's.

    Args:
        preset: content of ``conf/model/endpoint.yaml``.
        presets: files of all models by name.
        given: keys that the user set, whose values are kept.

    Raises:
        ConfigError: there is no such preset, or the checkpoint cannot be read (:func:`labelled`).
    """
    name = group.get("preset")
    if name is None:
        return labelled(group, preset, given)
    known = sorted(other for other in presets if other != PRESET)
    if name not in known:
        raise ConfigError("model.preset", name, "is not a model of kvbench", allowed=known)
    own = {key: value for key, value in read_choice(presets[name]).items() if key not in given}
    return {**group, **own}
