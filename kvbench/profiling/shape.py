"""Dimensions of a model, with the numbers of elements and bytes that follow from them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from kvbench.errors import ConfigError

#: configuration keys of models that :class:`Shape` does not describe: mixtures of experts, latent keys and values
OTHERS = (
    "num_local_experts",
    "num_experts",
    "n_routed_experts",
    "kv_lora_rank",
    # hybrids: Qwen3-Next, Qwen3.5 and OLMo hybrid; Jamba, Bamba, Zamba2, Falcon-H1; Nemotron-H; LFM2
    "linear_conv_kernel_dim",
    "mamba_d_state",
    "ssm_state_size",
    "conv_L_cache",
)


@dataclass(frozen=True)
class Shape:
    """Dimensions of a decoder with gated feed-forward layers and RMSNorm (Llama, Mistral, Qwen2, Phi-3).

    Args:
        hidden: hidden size, channels of the residual stream.
        intermediate: channels inside the feed-forward layer.
        query_heads: number of query heads, Hq.
        heads: number of KV heads, H.
        channels: channels of a head, D.
        tied: True if lm_head and the embedding table share their weights.
        qkv_bias: True if the projections to queries, keys and values have biases (Qwen2).
        windows: size in tokens of each layer's sliding window, None for a layer without one; None if no layer has one.
    """

    hidden: int
    intermediate: int
    layers: int
    query_heads: int
    heads: int
    channels: int
    vocabulary: int
    tied: bool = False
    qkv_bias: bool = False
    windows: tuple[int | None, ...] | None = None

    @classmethod
    def of(cls, config: Any) -> Shape:
        """Return the dimensions of a model, read from a configuration that uses transformers' names.

        Args:
            config: a model's ``config``, a ``config.json`` as a dict, or the ``architecture`` of a model's YAML
                (:class:`kvbench.models.spec.Architecture`).

        Raises:
            ConfigError: a dimension is missing or not a positive whole number, or the model is a mixture of experts or
                a hybrid, or has multi-head latent attention (:data:`OTHERS`).
        """
        numbers = config if isinstance(config, Mapping) else None

        def get(name: str, default: Any = None) -> Any:
            return numbers.get(name, default) if numbers is not None else getattr(config, name, default)

        for name in filter(get, OTHERS):
            raise ConfigError(
                f"model.{name}",
                get(name),
                "is not supported by the roofline, whose formulas for bytes and FLOPs do not hold for it",
            )
        for name in ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "vocab_size"):
            if not isinstance(get(name), int) or get(name) < 1:
                raise ConfigError(
                    f"model.{name}",
                    get(name),
                    "must be a whole number, 1 or greater (the roofline expects the key names of Llama's config.json)",
                )
        heads = get("num_attention_heads")
        return cls(
            hidden=get("hidden_size"),
            intermediate=get("intermediate_size"),
            layers=get("num_hidden_layers"),
            query_heads=heads,
            heads=get("num_key_value_heads") or heads,
            channels=get("head_dim") or get("hidden_size") // heads,
            vocabulary=get("vocab_size"),
            tied=bool(get("tie_word_embeddings", False)),
            qkv_bias=get("model_type") == "qwen2" or bool(get("attention_bias", False)),
            windows=sliding_windows(get),
        )

    @property
    def linear_elements(self) -> int:
        """Number of weights in the linear layers of all decoder layers, without lm_head."""
        attention = self.hidden * self.channels * (2 * self.query_heads + 2 * self.heads)
        return self.layers * (attention + 3 * self.hidden * self.intermediate)

    @property
    def head_elements(self) -> int:
        """Number of weights in lm_head; the embedding table has the same number."""
        return self.vocabulary * self.hidden

    @property
    def other_elements(self) -> int:
        """Number of parameters in the norms and, if the model has them, in the biases."""
        bias = (self.query_heads + 2 * self.heads) * self.channels if self.qkv_bias else 0
        return self.layers * (2 * self.hidden + bias) + self.hidden

    @property
    def parameters(self) -> int:
        """Total number of parameters. Weights that lm_head shares with the embedding table count once."""
        return self.linear_elements + self.other_elements + self.head_elements * (1 if self.tied else 2)

    def weight_bytes(self, bits: int = 16, group: int | None = None, head_bits: int | None = None) -> int:
        """Return how many bytes the weights take on the device, unquantized or with weight-only quantization.

        Args:
            bits: bits per weight of the linear layers. Norms, biases and the embedding table always have 16 bits.
            group: for `bits` below 16, the number of weights that share a scale and a zero point (4 bytes for both);
                None for no scales.
            head_bits: bits per weight of lm_head, 16 or `bits`; None: `bits`. An lm_head that shares the weights of
                the embedding table has 16 bits anyway.
        """
        head = 0 if self.tied else self.head_elements
        packed = self.linear_elements + (head if head_bits in (None, bits) else 0)
        exact = self.other_elements + self.head_elements + self.linear_elements + head - packed
        return packed * bits // 8 + (4 * packed // group if group else 0) + 2 * exact

    def bytes_read(self, weight_bytes: float, width: int = 2) -> float:
        """Return how many bytes of weights a decode step reads: all of them except the embedding table.

        If lm_head shares the table's weights, the step reads these too.

        The given `weight_bytes` are those of all weights; `width` is the bytes per element of the embedding table.
        """
        return weight_bytes - (0 if self.tied else width * self.head_elements)

    def kv_bytes(self, tokens: int, width: int = 2) -> int:
        """Return how many bytes an unquantized KV cache takes for one sequence, over all layers.

        A layer with a sliding window keeps only the tokens that the next token can attend to.
        """
        windows = self.windows or (None,) * self.layers
        visible = sum(tokens if window is None else min(tokens, window - 1) for window in windows)
        return 2 * self.heads * self.channels * visible * width


def sliding_windows(get: Callable[..., Any]) -> tuple[int | None, ...] | None:
    """Return the sliding window of each layer, or None if no layer has one.

    Newer models list the kind of each layer (``layer_types``); for older ones a rule per model family decides.

    `get` returns the value of a configuration key, or a default for a missing key.
    """
    window, layers = get("sliding_window"), get("num_hidden_layers")
    if not window or get("use_sliding_window", True) is False:
        return None
    kinds = get("layer_types")
    if kinds:
        sliding = [kind == "sliding_attention" for kind in kinds]
    elif get("use_sliding_window"):
        sliding = [layer >= (get("max_window_layers") or 0) for layer in range(layers)]
    elif str(get("model_type", "")).startswith(("gemma2", "gemma3")):
        pattern = get("sliding_window_pattern") or (2 if get("model_type") == "gemma2" else 6)
        sliding = [bool((layer + 1) % pattern) for layer in range(layers)]
    else:
        sliding = [True] * layers
    return tuple(window if slides else None for slides in sliding)
