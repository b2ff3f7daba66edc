"""Weights of a model, counted from its ``config.json``: attention, feed-forward layers, experts and what they take.

Dense decoders, mixtures of experts, multi-head latent attention (DeepSeek) and the gated delta rule (Qwen3-Next) are
counted to within norms and biases. Vision towers are not counted.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kvbench.errors import ConfigError
from kvbench.models.checkpoint import longest
from kvbench.models.layer_types import ATTENDING, layer_types
from kvbench.models.quantized.formats import KEY, stored

#: model types with two matrices in a feed-forward layer; all others have a third, the gate
UNGATED = ("gpt_neox", "gpt2", "gptj", "opt", "phi", "falcon", "bloom", "starcoder2", "nemotron", "mpt")
#: model types whose output head shares the weights of the embedding unless their configuration says otherwise
TIED = ("gemma", "cohere", "gpt2", "bloom", "falcon", "opt")
#: bytes of the scale and the zero point of a group
GROUP_BYTES = 4
#: keys with the number of routed experts of a layer
EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts")
#: sizes that a configuration may leave out, and must give as whole numbers
SIZES = (
    *("hidden_size", "num_attention_heads", "sliding_window"),
    *("intermediate_size", "num_key_value_heads", "head_dim", "vocab_size", *EXPERTS, "num_experts_per_tok"),
    *("kv_lora_rank", "q_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim", "n_shared_experts"),
    *("moe_intermediate_size", "shared_expert_intermediate_size", "first_k_dense_replace", "decoder_sparse_step"),
)
#: largest number of layers, and of anything else
MOST_LAYERS, MOST_SIZE = 1 << 12, 1 << 40
#: what to type where the weights of a model cannot be counted
INSTEAD = "--weights-gb 12.5, the size of its files"


@dataclass(frozen=True)
class Precision:
    """Bits of the weights in linear layers; embedding, output head and norms keep 16 bits.

    Args:
        name: how tables call it.
        bits: bits per weight, with the scales where those of a format are fixed.
        group: weights that share a scale and a zero point of :data:`GROUP_BYTES` bytes; None: none do.
        routed: True if only the routed experts are packed.
    """

    name: str
    bits: float = 16
    group: int | None = None
    routed: bool = False

    def bytes(self, elements: float) -> float:
        """Return the bytes of packed weights."""
        return elements * self.bits / 8 + (GROUP_BYTES * elements / self.group if self.group else 0)


#: values of ``--weights``
PRECISIONS = {
    "bf16": Precision("bf16"),
    "fp8": Precision("fp8", 8),
    "int8": Precision("int8", 8),
    "int4": Precision("int4", 4, 128),
}


def checkpoint_precision(numbers: Mapping[str, Any], name: str = "") -> Precision:
    """Return the precision of a checkpoint's weights, from its ``quantization_config``; bf16 if it has none.

    A preset describes the unquantized architecture; there its name tells AWQ and GPTQ, both of 4 bits.

    Raises:
        ConfigError: the description's method is not known.
    """
    given = stored(numbers)
    if not isinstance(given, Mapping):
        by_name = re.search(r"\b(awq|gptq)\b", name.lower())
        return Precision(f"{by_name[1]} 4 bits", 4, 128) if by_name else PRECISIONS["bf16"]
    method = str(given.get("quant_method") or given.get("quant_algo") or "").lower()
    if method == "compressed-tensors":
        groups: Mapping[str, Any] = given.get("config_groups") or {"": {}}
        first: Mapping[str, Any] = next(iter(groups.values()), {})
        group = first.get("weights") or {}
        given = {"bits": group.get("num_bits"), "group_size": group.get("group_size")}
    if method in ("awq", "gptq", "compressed-tensors", "auto-round"):
        bits, size = given.get("bits") or given.get("w_bit") or 4, given.get("group_size")
        if not isinstance(bits, int | float) or not 0 < bits <= 32:
            raise ConfigError(f"model.{KEY}.bits", bits, "must be a number above 0, and at most 32", hint=INSTEAD)
        return Precision(f"{method} {bits} bits", bits, size if isinstance(size, int) and size > 0 else None)
    if method == "modelopt":
        method = str(given.get("quant_algo") or (given.get("quantization") or {}).get("quant_algo") or "").lower()
    # mxfp4 has a scale of a byte per 32 weights, NVFP4 one per 16
    known = {
        "fp8": Precision("fp8", 8),
        "fbgemm_fp8": Precision("fp8", 8),
        "nvfp4": Precision("nvfp4", 4.5),
        "mxfp4": Precision("mxfp4 experts", 4.25, routed=True),
    }
    if method == "bitsandbytes":
        return Precision("nf4", 4, 64) if given.get("load_in_4bit") else PRECISIONS["int8"]
    if method not in known:
        raise ConfigError(f"model.{KEY}", method or given, "is not a known way of storing weights", hint=INSTEAD)
    return known[method]


@dataclass(frozen=True)
class Weights:
    """Numbers of weights of a model, by what quantization does with them and what a step reads of them.

    Args:
        dense: weights of linear layers that every token uses.
        routed: weights of the experts among which a router chooses.
        share: share of the experts that a token uses; 1 without experts.
        head: weights of the output head, and of the embedding.
        other: norms and biases.
        tied: True if head and embedding are one.
    """

    dense: int
    head: int
    other: int
    tied: bool
    routed: int = 0
    share: float = 1.0

    @property
    def total(self) -> int:
        """Number of parameters."""
        return self.dense + self.routed + self.other + self.head * (1 if self.tied else 2)

    def bytes(self, precision: Precision) -> float:
        """Return the bytes of all weights."""
        dense = PRECISIONS["bf16"] if precision.routed else precision
        return dense.bytes(self.dense) + precision.bytes(self.routed) + 2 * (self.total - self.dense - self.routed)

    def read(self, precision: Precision, batch: int) -> float:
        """Return the bytes that a step of `batch` tokens reads: of the experts, those that some token chooses."""
        idle = precision.bytes(self.routed) * (1 - self.share) ** batch
        return self.bytes(precision) - idle - (0 if self.tied else 2 * self.head)

    @classmethod
    def of(cls, numbers: Mapping[str, Any]) -> Weights:
        """Count the weights of a model from its ``config.json``.

        Raises:
            ConfigError: a size is missing, or layers have states whose weights are not counted.
        """
        hidden, layers = _whole(numbers, "hidden_size"), _whole(numbers, "num_hidden_layers")
        kinds = layer_types(numbers) or ["attention"] * layers
        attending = sum(kind in ATTENDING for kind in kinds)
        dense = attending * _attention(numbers, hidden) + _recurrent(numbers, hidden, kinds)
        matrices = 2 if str(numbers.get("model_type")) in UNGATED else 3
        count = next((numbers[key] for key in EXPERTS if numbers.get(key)), 0)
        sparse = sum(_sparse(numbers, layer) for layer in range(layers)) if count else 0
        if layers - sparse:
            dense += (layers - sparse) * matrices * hidden * _whole(numbers, "intermediate_size")
        width = numbers.get("moe_intermediate_size") or numbers.get("intermediate_size") or 0
        shared = numbers.get("shared_expert_intermediate_size") or (numbers.get("n_shared_experts") or 0) * width
        dense += sparse * hidden * (matrices * shared + count)
        chosen = numbers.get("num_experts_per_tok") or numbers.get("num_experts_per_token") or 1
        biases = numbers.get("model_type") in ("qwen2", "qwen2_moe") or bool(numbers.get("attention_bias"))
        bias = sum(_heads(numbers)[:2]) + _heads(numbers)[1] if biases and "kv_lora_rank" not in numbers else 0
        return cls(
            dense=dense,
            routed=sparse * count * matrices * hidden * width,
            share=min(1.0, chosen / count) if count else 1.0,
            head=_whole(numbers, "vocab_size") * hidden,
            other=layers * (2 * hidden + bias) + hidden,
            tied=bool(numbers.get("tie_word_embeddings", str(numbers.get("model_type")).startswith(TIED))),
        )


def check_sizes(numbers: Mapping[str, Any]) -> None:
    """Raise ConfigError for a size of a ``config.json`` that is no number, out of range, or missing beside another."""
    hint, length, layers = "correct its config.json", longest(numbers), numbers.get("num_hidden_layers")
    if not isinstance(kind := numbers.get("model_type") or "", str):
        raise ConfigError("model.model_type", kind, "must be a text", hint=hint)
    for key in SIZES:
        value = numbers.get(key)
        if value is not None and (type(value) is not int or value < 0):
            raise ConfigError(f"model.{key}", value, "must be a whole number", hint=hint)
        if value is not None and value > MOST_SIZE:
            raise ConfigError(f"model.{key}", value, f"is larger than {MOST_SIZE}", hint=hint)
    heads, groups = numbers.get("num_attention_heads"), numbers.get("num_key_value_heads")
    if heads and groups and heads % groups:
        problem = f"does not divide num_attention_heads={heads}"
        raise ConfigError("model.num_key_value_heads", groups, problem, hint=hint)
    if numbers.get("kv_lora_rank"):
        _whole(numbers, "qk_rope_head_dim")
    if length is not None and length < 1:
        raise ConfigError("model.max_position_embeddings", length, "must be 1 or greater", hint=hint)
    if layers is not None and _whole(numbers, "num_hidden_layers") > MOST_LAYERS:
        raise ConfigError("model.num_hidden_layers", layers, f"is larger than {MOST_LAYERS}", hint=hint)
    kinds = layer_types(numbers)
    if kinds is not None and len(kinds) != layers:
        problem = f"lists the kinds of {len(kinds)} layers, but num_hidden_layers is {layers}"
        raise ConfigError("model.layer_types", None, problem, hint=hint)


def _whole(numbers: Mapping[str, Any], key: str) -> int:
    value = numbers.get(key)
    if type(value) is not int or value < 1:
        raise ConfigError(
            f"model.{key}", value, "must be a whole number, 1 or greater", hint="complete its config.json"
        )
    return value


def _heads(numbers: Mapping[str, Any]) -> tuple[int, int, int]:
    """Return the channels of all queries, of all keys, and of a head."""
    heads = _whole(numbers, "num_attention_heads")
    channels = numbers.get("head_dim") or _whole(numbers, "hidden_size") // heads
    return heads * channels, (numbers.get("num_key_value_heads") or heads) * channels, channels


def _attention(numbers: Mapping[str, Any], hidden: int) -> int:
    """Return the weights of a layer's attention."""
    rank = numbers.get("kv_lora_rank")
    if not rank:
        queries, keys, _ = _heads(numbers)
        gate = queries if numbers.get("attn_output_gate") or numbers.get("model_type") == "qwen3_next" else 0
        return hidden * (2 * queries + 2 * keys + gate)
    heads, rope = _whole(numbers, "num_attention_heads"), _whole(numbers, "qk_rope_head_dim")
    plain, value = _whole(numbers, "qk_nope_head_dim"), _whole(numbers, "v_head_dim")
    low = numbers.get("q_lora_rank")
    queries = heads * (plain + rope)
    queries = low * (hidden + queries) if low else hidden * queries
    return int(queries + hidden * (rank + rope) + rank * heads * (plain + value) + heads * value * hidden)


def _recurrent(numbers: Mapping[str, Any], hidden: int, kinds: list[str]) -> int:
    """Return the weights of all layers with linear attention."""
    count = sum(kind not in ATTENDING for kind in kinds)
    if not count:
        return 0
    if "linear_num_value_heads" not in numbers or {*kinds} - ATTENDING - {"linear_attention"}:
        names = ", ".join(sorted({*kinds} - ATTENDING))
        raise ConfigError("model", numbers.get("model_type"), f"has layers ({names}) not counted here", hint=INSTEAD)
    values = _whole(numbers, "linear_num_value_heads") * _whole(numbers, "linear_value_head_dim")
    keys = _whole(numbers, "linear_num_key_heads") * _whole(numbers, "linear_key_head_dim")
    return count * hidden * (2 * keys + 3 * values + 2 * numbers["linear_num_value_heads"])


def _sparse(numbers: Mapping[str, Any], layer: int) -> bool:
    """Return True if a layer has experts in place of a feed-forward layer."""
    if layer < (numbers.get("first_k_dense_replace") or 0) or layer in (numbers.get("mlp_only_layers") or ()):
        return False
    return (layer + 1) % (numbers.get("decoder_sparse_step") or 1) == 0
