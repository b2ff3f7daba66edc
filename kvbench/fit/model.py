"""A model as ``fit`` sees it: its name, the bytes of its weights and of its cache, from a configuration alone."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from kvbench.bench.choices import numbers_of
from kvbench.bench.prediction import CacheShape, flat_numbers
from kvbench.errors import ConfigError
from kvbench.fit.weights import PRECISIONS, Precision, Weights, check_sizes, checkpoint_precision
from kvbench.methods.base import Method
from kvbench.models.checkpoint import longest
from kvbench.models.gguf.convert import SAME
from kvbench.models.gguf.header import Array, read_header
from kvbench.models.gguf.place import is_gguf
from kvbench.profiling.shape import Shape
from kvbench.util.confdir import group_options, read_choice
from kvbench.util.requirements import exists

#: sizes that Gemma 3's configurations leave to transformers
DEFAULTS: Mapping[str, Mapping[str, int]] = {
    "gemma3_text": {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256, "vocab_size": 262208},
}
#: every how many layers llama.cpp attends to all tokens, by architecture; other architectures have no sliding window
PATTERNS = {"gemma2": 2, "gemma3": 6, "gpt-oss": 2, "cohere2": 4}
#: more keys of a GGUF header, as :data:`kvbench.models.gguf.convert.SAME`
LATENT = {
    "attention.kv_lora_rank": "kv_lora_rank",
    "attention.q_lora_rank": "q_lora_rank",
    "rope.dimension_count": "qk_rope_head_dim",
    "expert_count": "n_routed_experts",
    "expert_shared_count": "n_shared_experts",
    "leading_dense_block_count": "first_k_dense_replace",
}


@dataclass(frozen=True)
class FitModel:
    """A model's weights and cache.

    Args:
        name: what the user typed.
        numbers: its configuration, by transformers' names.
        precision: how its weights are stored.
        weights: its weights by kind; None if `size` is all that is known of them.
        size: bytes of its weights where a file or the user says so; None: counted.
        cache: dimensions of its keys and values; None for latent attention.
        latent: numbers that a token and layer keep with latent attention (MLA); 0 for keys and values.
        gguf: True for a GGUF file.
    """

    name: str
    numbers: Mapping[str, Any]
    precision: Precision
    weights: Weights | None
    size: float | None
    cache: CacheShape | None
    latent: int = 0
    gguf: bool = False

    @property
    def served(self) -> str:
        """Name by which engines find it: a preset's repository of the hub, else what the user typed."""
        preset = group_options("model").get(self.name)
        return str((read_choice(preset).get("hub_id") if preset else None) or self.name)

    @property
    def layers(self) -> int:
        """Number of layers."""
        return int(self.numbers["num_hidden_layers"])

    @property
    def longest(self) -> int | None:
        """Longest sequence that the model was made for; None if its configuration does not say."""
        return longest(self.numbers)

    @property
    def plain(self) -> bool:
        """True for a dense decoder whose layers all keep keys and values: what times were measured with."""
        return bool(self.cache and not self.cache.state and self.weights and not self.weights.routed)

    @property
    def weight_bytes(self) -> float:
        """Bytes of all weights."""
        return self.size if self.size is not None else self._counted().bytes(self.precision)

    def read_bytes(self, batch: int) -> float:
        """Return the bytes of weights that a step of `batch` tokens reads."""
        if self.weights is None:
            return self.weight_bytes
        part = self.weights.read(self.precision, batch) / self.weights.bytes(self.precision)
        return self.weight_bytes * part

    def cache_bytes(self, method: Method, tokens: int, gpus: int = 1) -> int:
        """Return the bytes that a sequence's cache takes on each of `gpus` GPUs that share the heads."""
        if self.cache is None:  # every GPU has the whole latent vector
            width = 1 if getattr(method, "format", "") == "fp8" else 2
            return self.layers * self.latent * tokens * width
        heads = -(-self.cache.heads // gpus), max(1, self.cache.query_heads // gpus)
        part = replace(self.cache, heads=heads[0], query_heads=heads[1])
        return part.bytes(method, tokens, tokens).total

    def gpu_counts(self) -> list[int]:
        """Return the numbers of GPUs among which vLLM and SGLang can divide the heads of each layer."""
        heads, keys = self.shape().query_heads, self.cache.heads if self.cache else 1
        return [n for n in range(1, heads + 1) if heads % n == 0 and (keys % n == 0 or n % keys == 0)]

    def check_gpus(self, gpus: int) -> None:
        """Raise ConfigError if vLLM and SGLang cannot divide the heads of each layer among `gpus` GPUs."""
        heads, keys = self.shape().query_heads, self.cache.heads if self.cache else 1
        allowed = self.gpu_counts()
        if gpus not in allowed:
            problem = f"{self.name} has {heads} query heads and {keys} for keys, which so many GPUs cannot share"
            hint = f"--gpus {max(n for n in allowed if n < gpus)}, or --engine llama.cpp, which splits layers"
            raise ConfigError("--gpus", gpus, problem, allowed=allowed, hint=hint)

    def shape(self) -> Shape:
        """Return the dimensions that activations depend on."""
        get = self.numbers.get
        experts = (get("moe_intermediate_size") or 0) * (get("num_experts_per_tok") or 1)
        heads = self.numbers["num_attention_heads"]
        channels = get("head_dim") or get("qk_nope_head_dim") or self.numbers["hidden_size"] // heads
        return Shape(
            hidden=self.numbers["hidden_size"],
            intermediate=max(get("intermediate_size") or 0, experts),
            layers=self.layers,
            query_heads=heads,
            heads=get("num_key_value_heads") or heads,
            channels=channels,
            vocabulary=get("vocab_size") or 0,
        )

    def _counted(self) -> Weights:
        assert self.weights is not None
        return self.weights


def read_model(name: str, weights: str | None = None, size_gib: float | None = None) -> FitModel:
    """Read a model from a hub id, a folder, a preset or a GGUF file.

    Args:
        weights: a key of :data:`kvbench.fit.weights.PRECISIONS`; None: as the checkpoint stores them.
        size_gib: size of its weights in GiB; None: counted, or the GGUF file's.

    Raises:
        ConfigError: there is no such model, or its configuration lacks what is needed.
    """
    size = None if size_gib is None else size_gib * 2**30
    if not is_gguf(name):
        try:
            numbers = numbers_of(name)
        except ConfigError as error:  # the bench names its own option
            hint = error.hint.replace("--model ", "").replace("--model=NAME", "name another model")
            raise ConfigError("MODEL", error.value, error.problem, allowed=error.allowed, hint=hint) from None
        with _typed(name):
            return model_of(name, numbers, size_gib, weights)
    if weights is not None:
        problem = "cannot change the weights of a GGUF file"
        raise ConfigError("--weights", weights, problem, hint="leave it out, or name the original checkpoint")
    with _typed(name):
        numbers, size = _gguf_numbers(name, size)
        return replace(model_of(name, numbers, size / 2**30), precision=Precision("the file"), gguf=True)


@contextmanager
def _typed(name: str) -> Iterator[None]:
    """Raise ConfigError where the code inside finds a value of another type than a model's configuration has."""
    try:
        yield
    except (TypeError, ValueError, AttributeError, LookupError) as error:
        problem = f"has a configuration that makes no sense ({type(error).__name__}: {str(error)[:80]})"
        raise ConfigError("MODEL", name, problem, hint="correct its config.json, or name another model") from None


def model_of(
    name: str, numbers: Mapping[str, Any], size_gib: float | None = None, weights: str | None = None
) -> FitModel:
    """Return the model with a configuration; the other arguments are as for :func:`read_model`.

    Raises:
        ConfigError: the configuration lacks what is needed.
    """
    flat = dict(flat_numbers(numbers))
    flat = {**DEFAULTS.get(str(flat.get("model_type")), {}), **flat}
    check_sizes(flat)
    latent = flat["kv_lora_rank"] + flat["qk_rope_head_dim"] if flat.get("kv_lora_rank") else 0
    cache = None if latent else CacheShape.of(flat)
    try:
        precision = PRECISIONS[weights] if weights else checkpoint_precision(flat, name)
    except ConfigError:
        if size_gib is None:
            raise
        precision = Precision("an unknown form")
    try:
        counted = Weights.of(flat)
    except ConfigError:
        if size_gib is None:
            raise
        counted = None
    size = None if size_gib is None else size_gib * 2**30
    return FitModel(name, flat, precision, counted, size, cache, latent)


def _gguf_numbers(name: str, size: float | None) -> tuple[dict[str, Any], float]:
    """Return the configuration in the header of a GGUF file, by transformers' names, and the bytes of its tensors."""
    file = Path(name).expanduser()
    if not exists(name, "MODEL"):
        raise ConfigError("MODEL", name, "does not exist", hint="name a GGUF file on this machine")
    header = read_header(file)
    kind, tensors = header.architecture, header.tensors
    if any(key.startswith(f"{kind}.ssm.") for key in header.keys):
        problem = f"is a {kind} model, whose layers with states are not read from GGUF files"
        raise ConfigError("MODEL", name, problem, hint="name its hub id or a folder with its config.json")
    given = {ours: header.keys.get(f"{kind}.{theirs}") for theirs, ours in {**SAME, **LATENT}.items()}
    several = [key for key, value in given.items() if isinstance(value, Array)]
    if several:
        problem = f"gives its layers different sizes ({several[0]}), which are not read from GGUF files"
        raise ConfigError("MODEL", name, problem, hint="name its hub id or a folder with its config.json")
    window = given.pop("sliding_window")
    skipped = ("experts", "rope_theta")
    numbers: dict[str, Any] = {key: value for key, value in given.items() if not (value is None or key in skipped)}
    head: Any = header.keys.get(f"{kind}.attention.key_length")
    numbers |= {"model_type": kind, "tie_word_embeddings": "output.weight" not in tensors}
    numbers |= {"vocab_size": tensors["token_embd.weight"].shape[1]} if "token_embd.weight" in tensors else {}
    check_sizes(numbers)
    if "kv_lora_rank" in numbers:
        rope = int(numbers["qk_rope_head_dim"])
        wide: Any = header.keys.get(f"{kind}.attention.key_length_mla") or head
        value = header.keys.get(f"{kind}.attention.value_length_mla") or header.keys.get(
            f"{kind}.attention.value_length"
        )
        numbers |= {"qk_nope_head_dim": int(wide or 0) - rope, "v_head_dim": value}
        numbers.pop("head_dim", None)
    else:
        numbers.pop("qk_rope_head_dim", None)
        numbers |= {"head_dim": head} if head else {}
    if window and kind in PATTERNS:
        kinds = ["full_attention" if (layer + 1) % PATTERNS[kind] == 0 else "sliding_attention"
                 for layer in range(int(numbers["num_hidden_layers"]))]  # fmt: skip
        numbers |= {"sliding_window": window, "layer_types": kinds}
    return numbers, size if size is not None else file.stat().st_size - header.start
