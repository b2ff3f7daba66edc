"""A model's weights split over the ranks of a team, by transformers' own plan for tensor parallelism.

The plan (``base_model_tp_plan`` of a config) names the linear layers: ``colwise`` ones keep a slice of their outputs
(whole heads of queries, keys and values), ``rowwise`` ones a slice of their inputs, and their partial products are
summed over the ranks (Shoeybi et al., "Megatron-LM", 2019, sec. 3). The layers are plain linear layers over plain
tensors, which 4-bit drafts, captured steps and any version of transformers accept; transformers' own are DTensors,
whose functions have changed with every release. Attention sees only the rank's own heads, and so does its cache.
"""

from __future__ import annotations

import re
from typing import Any

import torch
from torch import Tensor, nn

from kvbench.errors import ModelError
from kvbench.parallel.team import Team
from kvbench.util.attachment import Placement, record_placement

#: styles of layers that every rank keeps whole; the embedding is only looked up
WHOLE = ("replicated_with_grad_allreduce", "replicate", "embedding_rowwise", "embedding_colwise", "local_params")
#: styles of layers whose outputs are gathered over the ranks
GATHERED = ("colwise_gather_output", "colwise_rep")
#: names of the layers whose outputs hold the keys
KEYS = ("k_proj", "query_key_value", "qkv_proj")


class Summed(nn.Module):
    """A linear layer over a slice of its inputs, with the products summed over the ranks and the bias added once."""

    def __init__(self, local: nn.Linear, team: Team) -> None:
        super().__init__()
        self.bias, self.team = local.bias, team
        local.register_parameter("bias", None)
        self.local, self.in_features, self.out_features = local, local.in_features, local.out_features

    @property
    def weight(self) -> Tensor:
        """The slice of the weights (some models read their dtype)."""
        return self.local.weight

    def forward(self, x: Tensor) -> Tensor:
        """Return the product ``[..., out]`` for `x` ``[..., in / ranks]``, equal on all ranks."""
        out = self.team.sum(self.local(x))
        return out if self.bias is None else out + self.bias


class Gathered(nn.Module):
    """A linear layer over a slice of its outputs, with the slices concatenated over the ranks (logits)."""

    def __init__(self, local: nn.Linear, width: int, team: Team) -> None:
        super().__init__()
        self.local, self.width, self.team = local, width, team
        self.in_features, self.out_features = local.in_features, width

    @property
    def weight(self) -> Tensor:
        """The slice of the weights."""
        return self.local.weight

    def forward(self, x: Tensor) -> Tensor:
        """Return the product ``[..., out]`` for `x` ``[..., in]``, equal on all ranks to the last bit."""
        return self.team.gather(self.local(x), -1)[..., : self.width]


def shard(model: Any, team: Team) -> None:
    """Replace the layers of `model` by this rank's slices, on its device.

    Args:
        model: a causal LM of transformers with all its weights, on any device.

    Raises:
        ModelError: transformers has no plan for it, the plan does not split keys and values by heads, or the heads do
            not divide.
    """
    plan = check(model, team.size)
    record_placement(model, Placement(team, sum(p.numel() for p in model.parameters())))
    for name, module in list(model.named_modules()):
        style = plan.get(generic(name))
        if style is None or style in WHOLE:
            continue
        parent = model.get_submodule(name.rpartition(".")[0])
        setattr(parent, name.rpartition(".")[2], cut(module, style, team))
    model.to(team.device)


def cut(module: nn.Linear, style: str, team: Team) -> nn.Module:
    """Return the rank's slice of one linear layer, on its device."""
    if style == "rowwise":
        first, last = bounds(module.in_features, team.size, team.rank)
        _keep(module, module.weight[:, first:last], module.bias, team.device)
        return Summed(module, team)
    rows = module.out_features
    if style == "colwise":
        first, last = bounds(rows, team.size, team.rank)
        _keep(module, module.weight[first:last], None if module.bias is None else module.bias[first:last], team.device)
        return module
    height = -(-rows // team.size)  # gathered slices have one size; the last one is padded
    first, last = min(team.rank * height, rows), min((team.rank + 1) * height, rows)
    short = height - (last - first)
    weight = nn.functional.pad(module.weight[first:last], (0, 0, 0, short))
    bias = None if module.bias is None else nn.functional.pad(module.bias[first:last], (0, short))
    _keep(module, weight, bias, team.device)
    return Gathered(module, rows, team)


def _keep(module: nn.Linear, weight: Tensor, bias: Tensor | None, device: torch.device) -> None:
    """Replace the parameters by copies of the slices, so that the whole tensor is freed."""
    module.weight = nn.Parameter(weight.detach().to(device, copy=True).contiguous(), requires_grad=False)
    if bias is not None:
        module.bias = nn.Parameter(bias.detach().to(device, copy=True), requires_grad=False)
    module.out_features, module.in_features = module.weight.shape


def bounds(count: int, size: int, rank: int) -> tuple[int, int]:
    """Return the slice ``[first, last)`` of `count` for `rank`; slices differ by one at most."""
    return count * rank // size, count * (rank + 1) // size


def generic(name: str) -> str:
    """Return a module's name with ``*`` for its numbers, as plans write it."""
    return re.sub(r"(?<=\.)\d+(?=\.|$)", "*", name)


def check(model: Any, size: int) -> dict[str, str]:
    """Return the plan of `model`, after a check that each rank can have a cache of its own.

    Raises:
        ModelError: there is no such plan, or the ranks cannot share the heads.
    """
    name = type(model).__name__
    plan: dict[str, str] = dict(getattr(model, "_tp_plan", None) or {})
    hint = "\n  hint: runtime.device_map=auto spreads its layers over GPUs instead"
    if not plan:
        raise ModelError(f"transformers has no plan of tensor parallelism for {name}{hint}")
    config = model.config.get_text_config(decoder=True)
    heads = config.num_attention_heads
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    if heads % size or kv_heads % size:
        raise ModelError(
            f"{name} has {heads} query heads and {kv_heads} KV heads, which {size} processes cannot share evenly: "
            f"torchrun --nproc-per-node {_most(kv_heads, size)}"
        )
    keys = {path: plan.get(generic(path)) for path, _ in model.named_modules() if path.rpartition(".")[2] in KEYS}
    for path, style in keys.items():
        if style != "colwise":
            raise ModelError(
                f"transformers' plan for {name} gives every rank all keys ({path}: {style}), so that no cache "
                f"would get smaller{hint}"
            )
    if len(keys) != config.num_hidden_layers:
        raise ModelError(f"{name} has no projection named {' or '.join(KEYS)} in each layer{hint}")
    for path, module in model.named_modules():
        style = plan.get(generic(path))
        if style is None or style in WHOLE:
            continue
        if style not in ("colwise", "rowwise", *GATHERED) or not isinstance(module, nn.Linear):
            what = f"{path} ({type(module).__name__}) is to be cut '{style}'"
            raise ModelError(f"{name}: {what}, which kvbench does not{hint}")
    return plan


def _most(heads: int, size: int) -> int:
    return max(n for n in range(1, size + 1) if heads % n == 0)
