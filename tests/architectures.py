"""Tiny random models of many architectures, for tests that compare kvbench with stock transformers."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import transformers
from transformers import PreTrainedModel

VOCABULARY = 97
BASE = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
SLIDING = ["sliding_attention", "full_attention"]
EXPERTS = {"num_experts_per_tok": 1, "moe_intermediate_size": 32}
#: name -> prefix of transformers' classes, and what its configuration needs beyond :data:`BASE`
ATTENTION: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "mistral": ("Mistral", {"sliding_window": 24}),
    "qwen2": ("Qwen2", {"use_sliding_window": True, "sliding_window": 24, "max_window_layers": 1}),
    "qwen3": ("Qwen3", {"head_dim": 64}),
    "qwen3_moe": ("Qwen3Moe", {"head_dim": 32, "num_experts": 2, **EXPERTS}),
    "gemma": ("Gemma", {"head_dim": 64}),
    "gemma2": ("Gemma2", {"head_dim": 32, "sliding_window": 24, "attn_logit_softcapping": 3.0}),
    "gemma3": (
        "Gemma3",
        {"head_dim": 32, "sliding_window": 24, "layer_types": SLIDING},
    ),
    "phi": ("Phi", {"num_key_value_heads": 2}),
    "phi, head size 80": ("Phi", {"hidden_size": 160, "num_key_value_heads": 2}),
    "phi3": ("Phi3", {"sliding_window": None}),
    "gpt_neox": ("GPTNeoX", {"num_key_value_heads": 2}),
    "gpt_oss": ("GptOss", {"head_dim": 32, "sliding_window": 24, "num_local_experts": 2, "num_experts_per_tok": 1}),
    "opt": ("OPT", {"num_key_value_heads": 2, "ffn_dim": 64, "word_embed_proj_dim": 64}),
    "gpt2": ("GPT2", {"num_key_value_heads": 2, "n_embd": 64, "n_layer": 2, "n_head": 2, "n_positions": 512}),
    "mixtral": ("Mixtral", {"num_local_experts": 2, "num_experts_per_tok": 1}),
    "starcoder2": ("Starcoder2", {"sliding_window": 24}),
    "cohere": ("Cohere", {}),
    "cohere2": ("Cohere2", {"sliding_window": 24, "layer_types": SLIDING}),
    "olmo2": ("Olmo2", {}),
    "granite": ("Granite", {"attention_multiplier": 0.2}),
    "glm4": ("Glm4", {"head_dim": 32}),
    "smollm3": ("SmolLM3", {"no_rope_layers": [1, 0]}),
    "ministral": ("Ministral", {"head_dim": 32, "sliding_window": 24}),
}
LINEAR = {
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_num_key_heads": 1,
    "linear_num_value_heads": 2,
}
MAMBA = {"mamba_n_heads": 4, "mamba_d_head": 32, "mamba_d_state": 16, "mamba_n_groups": 1, "mamba_chunk_size": 32}
TYPES = ["linear_attention", "full_attention"]
#: the same for hybrids; their first layer has linear attention, Mamba or a convolution, the second has attention
HYBRID: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3_next": (
        "Qwen3Next",
        {**LINEAR, "head_dim": 32, "layer_types": TYPES, "num_experts": 2, "shared_expert_intermediate_size": 32}
        | EXPERTS,
    ),
    "qwen3_5": ("Qwen3_5", {**LINEAR, "head_dim": 32, "layer_types": TYPES}),
    "olmo_hybrid": ("OlmoHybrid", {**LINEAR, "layer_types": TYPES}),
    "nemotron_h": (
        "NemotronH",
        {
            "head_dim": 32,
            "layers_block_type": [*TYPES, "mlp"],
            "ssm_state_size": 16,
            "mamba_num_heads": 4,
            "mamba_head_dim": 32,
            "n_groups": 1,
            "chunk_size": 32,
        },
    ),
    "bamba": ("Bamba", {**MAMBA, "attn_layer_indices": [1]}),
    "granitemoehybrid": (
        "GraniteMoeHybrid",
        {
            **MAMBA,
            "layer_types": TYPES,
            "num_local_experts": 2,
            "num_experts_per_tok": 1,
            "shared_intermediate_size": 32,
        },
    ),
    "falcon_h1": ("FalconH1", {**MAMBA, "mamba_d_ssm": 128}),
    "zamba2": (
        "Zamba2",
        {
            "n_mamba_heads": 4,
            "mamba_d_state": 16,
            "chunk_size": 32,
            "layers_block_type": ["mamba", "hybrid"],
            "num_key_value_heads": 2,
            "use_mem_rope": True,
        },
    ),
    "jamba": (
        "Jamba",
        {
            "attn_layer_period": 2,
            "attn_layer_offset": 1,
            "num_experts": 2,
            "num_experts_per_tok": 1,
            "mamba_d_state": 8,
            "mamba_dt_rank": 8,
        },
    ),
    "lfm2": ("Lfm2", {"layer_types": ["conv", "full_attention"]}),
}
#: reason why kvbench refuses an architecture: part of the message, and the model's configuration
REFUSED: dict[str, tuple[str, str, dict[str, Any]]] = {
    "minimax": (
        "a cache class of its own",
        "MiniMax",
        {"layer_types": TYPES, "head_dim": 32, "num_local_experts": 2, "num_experts_per_tok": 1, "block_size": 16},
    ),
    "mamba2": ("has no softmax attention", "Mamba2", {"num_heads": 8, "head_dim": 16, "state_size": 8, "n_groups": 1}),
}


@cache
def model(name: str) -> PreTrainedModel:
    """A random model of an architecture, in fp32: two layers with at most two query heads of 32 to 80 channels."""
    return built(*{**ATTENTION, **HYBRID}[name])


def built(stem: str, options: dict[str, Any]) -> PreTrainedModel:
    """A random model of ``STEMForCausalLM`` (or ``STEMLMHeadModel``) with a ``STEMTextConfig`` (or ``STEMConfig``)."""
    config = getattr(transformers, f"{stem}TextConfig", None) or getattr(transformers, f"{stem}Config")
    torch.manual_seed(0)
    with torch.inference_mode(False):
        kind = getattr(transformers, f"{stem}ForCausalLM", None) or getattr(transformers, f"{stem}LMHeadModel")
        return kind(config(**{**BASE, **options})).eval()
