"""Splitting of a model's weights over the ranks of a team, by transformers' plan for tensor parallelism.

The plan (``base_model_tp_plan`` of a config) gives a style for each linear layer. ``colwise`` layers keep a slice of
their outputs (whole heads of queries, keys and values). ``rowwise`` layers keep a slice of their inputs, and their
partial products are summed over the ranks (Shoeybi et al., "Megatron-LM", 2019, sec. 3). The slices are ordinary linear
layers with ordinary tensors, which work with 4-bit drafts, CUDA graphs and every version of transformers.
transformers itself uses DTensors, whose interface has changed with every release. Attention and its cache get only the
heads of the rank.
"""

from __future__ import annotations

import re
from typing import Any

import torch
from torch import Tensor, nn

from kvbench.errors import ModelError
from kvbench.parallel.team import Team
from kvbench.util.attachment import Placement, record_placement

#: styles of layers that every rank keeps whole
WHOLE = ("replicated_with_grad_allreduce", "replicate", "embedding_rowwise", "embedding_colwise", "local_params")
#: styles of layers whose outputs are gathered from all ranks
GATHERED = ("colwise_gather_output", "colwise_rep")
#: names of the layers that compute keys
KEYS = ("k_proj", "query_key_value", "qkv_proj")


class Summed(nn.Module):
    """A row-parallel linear layer: each rank holds the weights of some inputs.

    Each rank multiplies its inputs; the products are summed over all ranks, and then the bias is added. `local` is this
    rank's slice of the layer, with the bias of the whole layer.
    """

    def __init__(self, local: nn.Linear, team: Team) -> None:
        super().__init__()
        self.bias, self.team = local.bias, team
        local.register_parameter("bias", None)
        self.local, self.in_features, self.out_features = local, local.in_features, local.out_features

    @property
    def weight(self) -> Tensor:
        """This rank's slice of the weights. Some models read its dtype."""
        return self.local.weight

    def forward(self, x: Tensor) -> Tensor:
        """Return the output of the whole layer, ``[..., out]``, equal on all ranks.

        `x` is this rank's slice of the inputs, ``[..., in / ranks]``.
        """
        out = self.team.sum(self.local(x))
        return out if self.bias is None else out + self.bias


class Gathered(nn.Module):
    """A column-parallel linear layer with gathered outputs, such as lm_head.

    Each rank computes some of the outputs. They are then gathered, so that every rank has all of them. `local` is this
    rank's slice of the layer, `width` the number of outputs of the whole layer.
    """

    def __init__(self, local: nn.Linear, width: int, team: Team) -> None:
        super().__init__()
        self.local, self.width, self.team = local, width, team
        self.in_features, self.out_features = local.in_features, width

    @property
    def weight(self) -> Tensor:
        """This rank's slice of the weights. Some models read its dtype."""
        return self.local.weight

    def forward(self, x: Tensor) -> Tensor:
        """Return the output of the whole layer for inputs ``[..., in]``: ``[..., out]``, bitwise equal on all ranks."""
        return self.team.gather(self.local(x), -1)[..., : self.width]


def shard(model: Any, team: Team) -> None:
    """Replace the linear layers of a model by this rank's slices, and move the model to this rank's device.

    `model` is a causal LM of transformers with all its weights, on any device.

    Raises:
        ModelError: the model cannot be divided between this number of ranks (:func:`check_tensor_plan`).
    """
    plan = check_tensor_plan(model, team.size)
    record_placement(model, Placement(team, sum(p.numel() for p in model.parameters())))
    for name, module in list(model.named_modules()):
        style = plan.get(generic(name))
        if style is None or style in WHOLE:
            continue
        parent = model.get_submodule(name.rpartition(".")[0])
        setattr(parent, name.rpartition(".")[2], cut_linear(module, style, team))
    model.to(team.device)


def cut_linear(module: nn.Linear, style: str, team: Team) -> nn.Module:
    """Reduce a linear layer to this rank's slice, on this rank's device, and return a module to use in its place.

    The parameters of `module` are replaced by the slice. `style` says how transformers' plan divides it: ``rowwise`` by
    inputs, which returns :class:`Summed`; ``colwise`` by outputs, which returns the reduced layer itself; the styles in
    :data:`GATHERED` by outputs that are then gathered, which returns :class:`Gathered`.
    """
    if style == "rowwise":
        first, last = bounds(module.in_features, team.size, team.rank)
        _keep_slices(module, module.weight[:, first:last], module.bias, team.device)
        return Summed(module, team)
    rows = module.out_features
    if style == "colwise":
        first, last = bounds(rows, team.size, team.rank)
        _keep_slices(
            module, module.weight[first:last], None if module.bias is None else module.bias[first:last], team.device
        )
        return module
    height = -(-rows // team.size)  # slices to be gathered must have equal sizes, so the last ones are padded
    first, last = min(team.rank * height, rows), min((team.rank + 1) * height, rows)
    short = height - (last - first)
    weight = nn.functional.pad(module.weight[first:last], (0, 0, 0, short))
    bias = None if module.bias is None else nn.functional.pad(module.bias[first:last], (0, short))
    _keep_slices(module, weight, bias, team.device)
    return Gathered(module, rows, team)


def _keep_slices(module: nn.Linear, weight: Tensor, bias: Tensor | None, device: torch.device) -> None:
    """Replace the parameters of `module` by copies of slices on `device`, so that the whole tensors can be freed."""
    module.weight = nn.Parameter(weight.detach().to(device, copy=True).contiguous(), requires_grad=False)
    if bias is not None:
        module.bias = nn.Parameter(bias.detach().to(device, copy=True), requires_grad=False)
    module.out_features, module.in_features = module.weight.shape


def bounds(count: int, size: int, rank: int) -> tuple[int, int]:
    """Return the range ``(first, end)`` of a rank's items if `count` items are divided between `size` ranks.

    The numbers of items of two ranks differ by at most one.
    """
    return count * rank // size, count * (rank + 1) // size


def generic(name: str) -> str:
    """Return a module's name with ``*`` in place of layer numbers, as transformers' plans write it.

    For example, ``model.layers.3.mlp.up_proj`` becomes ``model.layers.*.mlp.up_proj``.
    """
    return re.sub(r"(?<=\.)\d+(?=\.|$)", "*", name)


def check_tensor_plan(model: Any, size: int) -> dict[str, str]:
    """Return transformers' tensor-parallel plan for a model, after checking that `size` ranks can follow it.

    Returns:
        For each module name, with ``*`` in place of layer numbers, the style in which it is divided.

    Raises:
        ModelError: transformers has no plan for the model, `size` does not divide the numbers of heads, the plan would
            give all keys to every rank, or the plan has a style that kvbench does not support.
    """
    name = type(model).__name__
    plan: dict[str, str] = dict(getattr(model, "_tp_plan", None) or {})
    hint = "\n  hint: set runtime.device_map=auto to spread its layers over GPUs instead"
    if not plan:
        raise ModelError(f"transformers has no tensor-parallel plan for {name}{hint}")
    config = model.config.get_text_config(decoder=True)
    heads = config.num_attention_heads
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    if heads % size or kv_heads % size:
        raise ModelError(
            f"{name} has {heads} query heads and {kv_heads} KV heads, which {size} processes cannot share evenly.\n"
            f"  hint: run torchrun --nproc-per-node {_most(kv_heads, size)}"
        )
    keys = {path: plan.get(generic(path)) for path, _ in model.named_modules() if path.rpartition(".")[2] in KEYS}
    for path, style in keys.items():
        if style != "colwise":
            raise ModelError(
                f"transformers' plan for {name} gives every rank all keys ({path}: {style}), so the cache "
                f"would not become smaller{hint}"
            )
    if len(keys) != config.num_hidden_layers:
        raise ModelError(f"{name} does not have a projection named {' or '.join(KEYS)} in each layer{hint}")
    for path, module in model.named_modules():
        style = plan.get(generic(path))
        if style is None or style in WHOLE:
            continue
        if style not in ("colwise", "rowwise", *GATHERED) or not isinstance(module, nn.Linear):
            what = f"transformers' plan splits {path} ({type(module).__name__}) as '{style}'"
            raise ModelError(f"{name}: {what}, which kvbench does not support{hint}")
    return plan


def _most(heads: int, size: int) -> int:
    return max(n for n in range(1, size + 1) if heads % n == 0)
