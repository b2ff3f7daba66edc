"""Types of a model's layers, read from config.json as transformers and older checkpoints write them."""

from typing import Any

import pytest

from kvbench.models.layer_types import attention_layers, layer_types


@pytest.mark.parametrize(
    ("numbers", "count"),
    [
        ({}, None),
        ({"num_hidden_layers": 3}, 3),
        ({"num_hidden_layers": 3, "layer_types": ["conv", "full_attention", "hybrid_sliding"]}, 2),
        ({"layers_block_type": ["mamba", "attention", "moe"]}, 1),
        ({"hybrid_override_pattern": "M*-E*"}, 2),
        ({"model_type": "bamba", "num_hidden_layers": 4}, 0),
        ({"model_type": "bamba", "num_hidden_layers": 4, "attn_layer_indices": [1, 3]}, 2),
        ({"num_hidden_layers": 6, "full_attn_idxs": [2]}, 1),
        ({"num_hidden_layers": 16, "attn_layer_period": 8, "attn_layer_offset": 4}, 2),
        ({"num_hidden_layers": 16, "full_attention_interval": 4}, 4),
    ],
)
def test_layers_with_keys_and_values_are_counted(numbers: dict[str, Any], count: int | None) -> None:
    assert attention_layers(numbers) == count


def test_implied_types_are_in_order() -> None:
    assert layer_types({"num_hidden_layers": 4, "full_attention_interval": 4}) == ["linear_attention"] * 3 + [
        "full_attention"
    ]
    assert layer_types({"num_hidden_layers": 3, "attn_layer_period": 2, "attn_layer_offset": 1}) == [
        "mamba",
        "attention",
        "mamba",
    ]
    assert layer_types({"num_hidden_layers": 3}) is None
