"""Checkpoints with 4-bit weights in the formats AWQ and GPTQ, packed code by code.

A slow restatement of what AutoAWQ and AutoGPTQ write, by which the readers are checked.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from kvbench.models.load import byte_tokenizer
from tests import zoo

#: output channels, of eight, in the order in which AWQ stores their codes
AWQ = (0, 2, 4, 6, 1, 3, 5, 7)
DESCRIPTION = {
    "awq": {"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm", "zero_point": True},
    "gptq": {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False, "sym": False},
    "gptq_v2": {
        "quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False, "checkpoint_format": "gptq_v2"
    },
}  # fmt: skip


def signed(word: int) -> int:
    """Return 32 bits as the int32 with the same bits."""
    return word - 2**32 if word >= 2**31 else word


def word(codes: list[int], order: tuple[int, ...]) -> int:
    """Pack eight codes into an int32; nibble i, the lowest first, holds the code at position ``order[i]``."""
    return signed(sum(int(codes[position]) << (4 * nibble) for nibble, position in enumerate(order)))


def packed_rows(codes: Tensor, order: tuple[int, ...]) -> Tensor:
    """Pack eight consecutive columns of a matrix of codes into each int32."""
    rows = codes.tolist()
    return torch.tensor([[word(row[i : i + 8], order) for i in range(0, len(row), 8)] for row in rows]).int()


def layer(kind: str, rows: int, columns: int, group: int, seed: int, dtype: torch.dtype) -> tuple[dict, Tensor]:
    """Return the tensors of a random layer in a checkpoint, and its weights ``[out, in]`` in float32."""
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 16, (columns, rows), generator=generator)
    low, high = (1, 17) if kind == "gptq" else (0, 16)
    zeros = torch.randint(low, high, (columns // group, rows), generator=generator)
    zeros[0, 0], codes[0, 0] = high - 1, 15  # the highest bits of a word
    scales = (torch.rand(columns // group, rows, generator=generator) * 0.01 + 0.002).to(dtype)
    factors, offsets = (x.repeat_interleave(group, dim=0) for x in (scales.float(), zeros))
    weights = ((codes - offsets) * factors).T.contiguous()
    plain = tuple(range(8))
    if kind == "awq":
        tensors = {"qweight": packed_rows(codes, AWQ), "qzeros": packed_rows(zeros, AWQ), "scales": scales}
    else:
        tensors = {
            "qweight": packed_rows(codes.T, plain).T.contiguous(),
            "qzeros": packed_rows(zeros - 1 if kind == "gptq" else zeros, plain),
            "scales": scales,
            "g_idx": torch.arange(columns, dtype=torch.int32) // group,
        }
    return tensors, weights


def architecture(**changes: Any) -> dict[str, Any]:
    """Return the sizes of a model of one layer, small enough to be packed code by code."""
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1, "num_key_value_heads": 4}
    return {**zoo.ARCHITECTURE, **sizes, "vocab_size": 272, **changes}


def checkpoint(
    folder: Path,
    kind: str = "awq",
    shards: int = 1,
    dtype: torch.dtype = torch.float16,
    family: str = "qwen2",
    group: int = 32,
    **sizes: int,
) -> dict[str, Tensor]:
    """Write a checkpoint with random 4-bit weights in all linear layers but the head.

    Args:
        folder: where to write it.
        kind: ``awq``, ``gptq`` or ``gptq_v2``.
        shards: number of safetensors files.
        dtype: dtype of the model and of the scales.
        family: architecture, a key of ``zoo.MODELS``.
        group: number of input channels per group.
        **sizes: sizes of the model other than those of :func:`architecture`.

    Returns:
        The weights of the linear layers by name, in float32.
    """
    config_class, model_class, extra = zoo.MODELS[family]
    torch.manual_seed(0)
    model = model_class(config_class(**architecture(**sizes), **extra)).to(dtype)
    tensors = dict(model.state_dict())
    weights: dict[str, Tensor] = {}
    for seed, (name, module) in enumerate(list(model.named_modules())):
        if not isinstance(module, nn.Linear) or name == "lm_head":
            continue
        del tensors[f"{name}.weight"]
        parts, weights[name] = layer(kind, module.out_features, module.in_features, group, seed, dtype)
        tensors |= {f"{name}.{part}": tensor for part, tensor in parts.items()}
    folder.mkdir(exist_ok=True)
    numbers = json.loads(model.config.to_json_string(use_diff=False))
    numbers |= {"quantization_config": {**DESCRIPTION[kind], "group_size": group}}
    numbers |= {"dtype": str(dtype).removeprefix("torch."), "architectures": [model_class.__name__]}
    (folder / "config.json").write_text(json.dumps(numbers))
    byte_tokenizer().save_pretrained(folder)
    names = sorted(tensors)
    files = {name: f"model-{names.index(name) % shards + 1:05}-of-{shards:05}.safetensors" for name in names}
    if shards == 1:
        save_file({name: tensors[name].contiguous() for name in names}, folder / "model.safetensors")
        return weights
    for file in set(files.values()):
        save_file({name: tensors[name].contiguous() for name in names if files[name] == file}, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": files}))
    return weights
