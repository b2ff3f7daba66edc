"""The sizes of a decoder, from which it can be built with random weights. Does not import torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from kvbench.errors import ConfigError
from kvbench.models import checkpoint
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
