"""The trained network as files that `transformers` loads without any code of ours."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from experiments.tiny.config import ModelShape
from experiments.tiny.mix import BOS, EOS


def state_dict(shape: ModelShape, weights: dict[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
    """Return the parameters under transformers' names, joined matrices split, the tied head left out."""
    q, kv = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    tensors = {"model.embed_tokens.weight": weights["embedding"], "model.norm.weight": weights["norm"]}
    for i in range(shape.layers):
        own = {name.removeprefix(f"layers.{i}."): w for name, w in weights.items() if name.startswith(f"layers.{i}.")}
        query, key, value = own["qkv"].split([q, kv, kv])
        gate, up = own["gate_up"].chunk(2)
        for name, weight in {
            "input_layernorm": own["norm1"],
            "self_attn.q_proj": query,
            "self_attn.k_proj": key,
            "self_attn.v_proj": value,
            "self_attn.o_proj": own["out"],
            "post_attention_layernorm": own["norm2"],
            "mlp.gate_proj": gate,
            "mlp.up_proj": up,
            "mlp.down_proj": own["down"],
        }.items():
            tensors[f"model.layers.{i}.{name}.weight"] = weight
    return {name: w.detach().to("cpu", dtype).contiguous().clone() for name, w in tensors.items()}


def config(shape: ModelShape, dtype: torch.dtype) -> dict[str, object]:
    """Return the content of ``config.json``."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": shape.vocabulary,
        "hidden_size": shape.width,
        "intermediate_size": shape.hidden,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": shape.context,
        "rms_norm_eps": shape.eps,
        # read by transformers 5 and by 4; both say the same
        "rope_parameters": {"rope_type": "default", "rope_theta": shape.rope_theta},
        "rope_theta": shape.rope_theta,
        "tie_word_embeddings": True,
        "attention_bias": False,
        "mlp_bias": False,
        "initializer_range": 0.02,
        "use_cache": True,
        "pad_token_id": 0,
        "bos_token_id": BOS,
        "eos_token_id": EOS,
        "dtype": str(dtype).removeprefix("torch."),
    }


def export(
    shape: ModelShape, weights: dict[str, Tensor], tokenizer: Path, folder: Path, dtype: torch.dtype = torch.bfloat16
) -> None:
    """Write config, generation config, weights and the tokenizer's two files."""
    folder.mkdir(parents=True, exist_ok=True)
    save_file(state_dict(shape, weights, dtype), folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config(shape, dtype), indent=2) + "\n")
    generation = {"pad_token_id": 0, "bos_token_id": BOS, "eos_token_id": EOS, "do_sample": False}
    (folder / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        source = tokenizer.parent / name
        if source.exists() and source.resolve() != (folder / name).resolve():
            shutil.copy(source, folder / name)
