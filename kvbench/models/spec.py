"""The `model` group as data: the place of the weights, and the architecture. Imports no torch."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from kvbench.errors import ConfigError
from kvbench.models import checkpoint
from kvbench.models.served import unserved
from kvbench.util.requirements import Package, exists
from kvbench.util.schema import MOST_TOKENS, bounded

#: a repository: an owner and a name, or a name alone, as the hub has them
_HUB_ID = re.compile(r"(?![.-])[\w.-]{1,96}(?:/(?![.-])[\w.-]{1,96})?")
#: `model.path=kvbench:NAME` is the folder NAME next to this file
BUNDLED = "kvbench:"


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """Numbers of a decoder, as in the checkpoint's ``config.json``; enough to build it with random weights.

    Args:
        model_type: transformers' name of the architecture (``llama``, ``mistral``, ``qwen2``, ``phi3``).
        head_dim: channels of a head; None: hidden_size / num_attention_heads.
        rope: ``rope_parameters`` of transformers 5: rope_type, rope_theta and what the type needs.
        sliding_window: tokens that a query sees; None: all.
        parameters: published number of parameters, for a test against these numbers; None: unknown.
    """

    model_type: str
    hidden_size: int = bounded(minimum=1, maximum=checkpoint.LIMITS["hidden_size"])
    intermediate_size: int = bounded(minimum=1, maximum=checkpoint.LIMITS["intermediate_size"])
    num_hidden_layers: int = bounded(minimum=1, maximum=checkpoint.LIMITS["num_hidden_layers"])
    num_attention_heads: int = bounded(minimum=1, maximum=checkpoint.LIMITS["num_attention_heads"])
    num_key_value_heads: int = bounded(minimum=1, maximum=checkpoint.LIMITS["num_key_value_heads"])
    vocab_size: int = bounded(minimum=1, maximum=checkpoint.LIMITS["vocab_size"])
    max_position_embeddings: int = bounded(minimum=1, maximum=MOST_TOKENS)
    rope: dict[str, Any]
    rms_norm_eps: float = bounded(1e-5, above=0.0, maximum=0.1)
    head_dim: int | None = bounded(None, minimum=1, maximum=4096)
    original_max_position_embeddings: int | None = bounded(None, minimum=1, maximum=MOST_TOKENS)
    sliding_window: int | None = bounded(None, minimum=1, maximum=MOST_TOKENS)
    tie_word_embeddings: bool = False
    parameters: int | None = bounded(None, minimum=1, maximum=2**50)

    def check(self) -> None:
        """Raise ConfigError for heads that do not divide, or RoPE parameters that are not numbers."""
        for name, value in self.rope.items():
            if name == "rope_type" or isinstance(value, (bool, list, tuple, type(None))):
                continue
            if not isinstance(value, (int, float)) or not 0 < value < 1e12:
                raise ConfigError(
                    f"model.architecture.rope.{name}", value, "must be a number above 0", allowed="below 1e12"
                )
        theta = self.rope.get("rope_theta", 1.0)
        if isinstance(theta, (bool, list, tuple, type(None))):
            raise ConfigError("model.architecture.rope.rope_theta", theta, "must be a number above 0", hint="10000.0")
        if self.num_attention_heads % self.num_key_value_heads:
            raise ConfigError(
                "model.architecture.num_key_value_heads",
                self.num_key_value_heads,
                f"does not divide num_attention_heads={self.num_attention_heads}",
            )
        if self.head_dim is None and self.hidden_size % self.num_attention_heads:
            raise ConfigError(
                "model.architecture.num_attention_heads",
                self.num_attention_heads,
                f"does not divide hidden_size={self.hidden_size}",
                hint="a number of heads that does, or set model.architecture.head_dim",
            )


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """One model.

    Args:
        name: the choice's name, shown in rows.
        hub_id: repository on the Hugging Face hub, or None.
        revision: commit or tag on the hub; None: its main branch.
        path: folder with config.json, weights and tokenizer, used in place of the hub; ``kvbench:NAME`` is bundled.
        weights: ``pretrained``, or ``random``: `architecture` without any download, seeded by ``runtime.seed``.
        dtype: ``auto`` is the checkpoint's own (on a CPU float32, where half precision is slow).
        max_length: tokens that the model takes, prompt and answer together.
        prompt_limit: longest prompt; longer ones are cut in their middle; None: what max_length leaves.
        chat: wrapper around a prompt: ``none``, ``template`` (the tokenizer's own), or a text with ``{prompt}`` in it.
        trust_remote_code: run code that the checkpoint brings along; only by name.
        architecture: numbers for random weights, and what groups must divide; None: read from the checkpoint.
        licence: licence of the weights.
        gated: how to get access to a gated model; None: not gated.
        requires: extra package that the checkpoint's format needs, or None.
        note: anything else that a user should know.
        preset: the choice that a checkpoint of another name stands for (``model=llama2-7b model.path=DIR``): data sets
            and calibrations that name the choice mean this model too; None: `name` is the only one.
    """

    name: str
    hub_id: str | None = None
    revision: str | None = None
    path: str | None = None
    weights: Literal["pretrained", "random"] = "pretrained"
    dtype: Literal["auto", "float32", "float16", "bfloat16"] = "auto"
    max_length: int = bounded(minimum=16, maximum=MOST_TOKENS)
    prompt_limit: int | None = bounded(None, minimum=16, maximum=MOST_TOKENS)
    chat: str = "none"
    trust_remote_code: bool = False
    architecture: Architecture | None = None
    licence: str = ""
    gated: str | None = None
    requires: str | None = None
    note: str = ""
    preset: str | None = None
    # filled by _numbers(): config.json of a folder is read once
    _read: dict[str, Any] = field(default_factory=dict, init=False, repr=False, compare=False)

    def check(self) -> None:
        """Raise ConfigError if no weights are named, or the folder is not a checkpoint."""
        if self.architecture:
            self.architecture.check()
        if self.prompt_limit and self.prompt_limit > self.max_length:
            raise ConfigError(
                "model.prompt_limit",
                self.prompt_limit,
                f"is more than the model takes (model.max_length={self.max_length})",
                allowed=f"at most {self.max_length}",
            )
        if self.chat not in ("none", "template") and self.chat.count("{prompt}") != 1:
            raise ConfigError(
                "model.chat",
                self.chat,
                "is not a wrapper",
                allowed=("none", "template", "text with {prompt} in it once"),
            )
        if self.path is not None:
            if not self.path.strip():
                raise ConfigError("model.path", "''", "must name a folder", hint="model.path=DIR, or null for the hub")
            if not self.path.startswith(BUNDLED):
                exists(self.path, "model.path")
        folder = self.folder()
        if folder is not None and not (folder / "config.json").is_file():
            missing = "has no config.json, so it is not a checkpoint" if folder.is_dir() else "is not a folder"
            raise ConfigError(
                "model.path",
                without_secrets(str(self.path)),
                missing,
                hint="a folder with config.json, *.safetensors and tokenizer files",
            )
        if self.hub_id is not None and not is_repository(self.hub_id):
            raise ConfigError(
                "model.hub_id",
                without_secrets(self.hub_id),
                "is not a repository of the hub",
                allowed="OWNER/NAME",
                hint="an address or a token has no place here: model.hub_id=Qwen/Qwen3-8B, and `hf auth login`",
            )
        reason = unserved(self._numbers()) if folder is not None or self.hub_id else ""
        if reason:
            key = "model.path" if folder is not None else "model.hub_id"
            raise ConfigError(key, self.path if folder is not None else self.hub_id, f"cannot be served: {reason}")
        if folder is None and self.weights == "pretrained" and not self.hub_id:
            raise ConfigError(
                "model.hub_id",
                None,
                "no weights are named",
                hint="model.path=DIR, model.hub_id=OWNER/NAME or model=tiny",
            )
        if folder is None and self.weights == "random" and self.architecture is None:
            raise ConfigError(
                "model.weights", "random", "needs model.architecture, or model.path=DIR with a config.json"
            )

    def packages(self) -> tuple[Package, ...]:
        """Return the packages that reading the checkpoint's format needs."""
        if self.requires is None or self.weights == "random":
            return ()
        hint = f"pip install {self.requires}, or model.weights=random for the plain architecture"
        return (Package(self.requires, "model", self.name, hint),)

    def folder(self) -> Path | None:
        """Return the local folder that `path` names, which need not exist, or None."""
        return local_folder(self.path)

    def head_dim(self) -> int | None:
        """Return the channels of a head by config.json or `architecture`; None if only loading can tell."""
        return _head_dim(self._numbers())

    def layers(self) -> int | None:
        """Return the layers of the decoder by config.json or `architecture`; None if only loading can tell."""
        count = self._numbers().get("num_hidden_layers")
        return None if count is None else int(count)

    def _numbers(self) -> Mapping[str, Any]:
        folder = self.folder()
        if folder is not None and (folder / "config.json").is_file():
            if not self._read:
                self._read.update(self._config(folder, "path"))
            return self._read
        if self.architecture is not None:
            return vars(self.architecture)
        if self.hub_id and not self._read:  # another repository than the preset's, where it is here already
            cached = checkpoint.snapshot(self.hub_id, self.revision)
            self._read.update({} if cached is None else self._config(cached, "hub_id"))
        return self._read

    def _config(self, folder: Path, key: str) -> dict[str, Any]:
        """Return the checkpoint's config.json; raise ConfigError if it is damaged."""
        try:
            return checkpoint.read_config(folder)
        except checkpoint.DamagedFile as damaged:
            raise ConfigError(
                f"model.{key}", getattr(self, key), f"its {damaged.file.name} {damaged.problem}"
            ) from damaged


def local_folder(path: str | None) -> Path | None:
    """Return the folder that ``model.path`` names (``kvbench:NAME`` is bundled), which need not exist, or None."""
    if path is None:
        return None
    if path.startswith(BUNDLED):
        return Path(__file__).resolve().parent / path.removeprefix(BUNDLED)
    return Path(path).expanduser()


def is_repository(text: str) -> bool:
    """Return True if `text` has the form of a repository of the hub: ``OWNER/NAME``, or a name alone."""
    return _HUB_ID.fullmatch(text) is not None


def without_secrets(text: str) -> str:
    """Return `text` with secrets starred out: credentials and queries of an address, and tokens of the hub."""
    return re.sub(r"hf_\w{8,}", "hf_***", re.sub(r"(?<=\?).*", "***", re.sub(r"(?<=//)[^/@\s]+(?=@)", "***", text)))


def _head_dim(numbers: Mapping[str, Any]) -> int | None:
    if numbers.get("head_dim"):
        return int(numbers["head_dim"])
    if numbers.get("hidden_size") and numbers.get("num_attention_heads"):
        return int(numbers["hidden_size"]) // int(numbers["num_attention_heads"])
    return None
