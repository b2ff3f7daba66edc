"""The network as it is trained: a Llama whose compiled parts see flat tokens, so that row lengths cost no recompiling.

Only attention sees rows. Master weights are fp32; `compute` is the dtype of activations and of the weights' copies.
Parameter layout and arithmetic are those of transformers' Llama (half-rotated RoPE, RMSNorm in fp32).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from experiments.tiny.config import ModelShape

#: fastest first where there is a GPU; the last works everywhere
BACKENDS = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return RMSNorm of x [N, d], computed in fp32, in x's dtype."""
    wide = x.float()
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return weight.to(x.dtype) * wide.to(x.dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Return RoPE of x [N, H, D] with cos and sin [N, D / 2]; the halves of D are the pairs."""
    first, second = x.float().chunk(2, -1)
    cos, sin = cos[:, None], sin[:, None]
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1).to(x.dtype)


def before_attention(
    x: Tensor, norm: Tensor, qkv: Tensor, cos: Tensor, sin: Tensor, heads: int, kv_heads: int, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Return, for `x` [N, d], rotated queries [N, Hq, D], rotated keys [N, Hkv, D] and values [N, Hkv, D]."""
    dim = qkv.shape[0] // (heads + 2 * kv_heads)
    joined = functional.linear(rms_norm(x, norm, eps), qkv.to(x.dtype)).view(x.shape[0], -1, dim)
    q, k, v = joined.split([heads, kv_heads, kv_heads], 1)
    return rotate(q, cos, sin), rotate(k, cos, sin), v.contiguous()


def after_attention(
    x: Tensor, mixed: Tensor, out: Tensor, norm: Tensor, gate_up: Tensor, down: Tensor, eps: float
) -> Tensor:
    """Return the residual x [N, d] plus attention's output [N, Hq * D] and the feed-forward block."""
    x = x + functional.linear(mixed, out.to(x.dtype))
    gate, up = functional.linear(rms_norm(x, norm, eps), gate_up.to(x.dtype)).chunk(2, -1)
    return x + functional.linear(functional.silu(gate) * up, down.to(x.dtype))


def losses(x: Tensor, norm: Tensor, embedding: Tensor, targets: Tensor, eps: float) -> Tensor:
    """Return the cross entropy in nats [N] of the targets [N] given the last layer's x [N, d]."""
    logits = functional.linear(rms_norm(x, norm, eps), embedding.to(x.dtype)).float()
    return functional.cross_entropy(logits, targets, reduction="none")


class Layer(nn.Module):
    """One layer's parameters."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        rows = (shape.heads + 2 * shape.kv_heads) * shape.head_dim
        self.norm1 = nn.Parameter(torch.ones(shape.width))
        self.qkv = nn.Parameter(torch.empty(rows, shape.width))
        self.out = nn.Parameter(torch.empty(shape.width, shape.heads * shape.head_dim))
        self.norm2 = nn.Parameter(torch.ones(shape.width))
        self.gate_up = nn.Parameter(torch.empty(2 * shape.hidden, shape.width))
        self.down = nn.Parameter(torch.empty(shape.width, shape.hidden))


class Network(nn.Module):
    """The whole model.

    `compute` is the dtype of the activations; `compiled`: the three parts are compiled (worth it on a GPU only).
    """

    def __init__(self, shape: ModelShape, compute: torch.dtype = torch.bfloat16, compiled: bool = False) -> None:
        super().__init__()
        self.shape, self.compute = shape, compute
        #: of keys and values where there are gradients, in standard deviations of each channel: the most of a row
        self.noise = 0.0
        self.embedding = nn.Parameter(torch.empty(shape.vocabulary, shape.width))
        self.layers = nn.ModuleList(Layer(shape) for _ in range(shape.layers))
        self.norm = nn.Parameter(torch.ones(shape.width))

        def compile_(function: Any) -> Callable[..., Any]:
            return torch.compile(function, dynamic=False) if compiled else function

        self._before, self._after, self._losses = (compile_(f) for f in (before_attention, after_attention, losses))
        inverse = 1.0 / shape.rope_theta ** (torch.arange(0, shape.head_dim, 2).float() / shape.head_dim)
        angles = torch.outer(torch.arange(shape.context).float(), inverse)
        self.cos: Tensor
        self.sin: Tensor
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)

    @torch.no_grad()
    def initialise(self, generator: torch.Generator) -> None:
        """Draw normal weights of deviation 0.02, divided by sqrt(2 layers) if they add to the residual stream."""
        for name, parameter in self.named_parameters():
            if parameter.dim() < 2:
                parameter.fill_(1.0)
                continue
            deviation = 0.02
            if name.endswith((".out", ".down")):
                deviation /= (2 * self.shape.layers) ** 0.5
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * deviation)

    def hidden(self, ids: Tensor) -> Tensor:
        """Return, for tokens `ids` [B, T], the last layer's residual stream [B * T, d]."""
        shape, (rows, length) = self.shape, ids.shape
        x = self.embedding[ids.flatten()].to(self.compute)
        cos, sin = self.cos[:length].repeat(rows, 1), self.sin[:length].repeat(rows, 1)
        for layer in self.layers:
            q, k, v = self._before(x, layer.norm1, layer.qkv, cos, sin, shape.heads, shape.kv_heads, shape.eps)
            q, k, v = (part.view(rows, length, -1, shape.head_dim).transpose(1, 2) for part in (q, k, v))
            if self.noise and torch.is_grad_enabled():
                # rows with little of it keep teaching what rows with much of it still miss
                level = self.noise * torch.rand(rows, 1, 1, 1, device=k.device, dtype=k.dtype)
                k, v = (x + level * x.detach().std(2, keepdim=True) * torch.randn_like(x) for x in (k, v))
            with sdpa_kernel(BACKENDS, set_priority=True):
                mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
            mixed = mixed.transpose(1, 2).reshape(rows * length, -1)
            x = self._after(x, mixed, layer.out, layer.norm2, layer.gate_up, layer.down, shape.eps)
        return x

    def losses(self, ids: Tensor) -> Tensor:
        """Return the cross entropy [B, T] of predicting the next token; the last of a row predicts nothing (0)."""
        targets = torch.roll(ids, -1, 1)
        nll = self._losses(self.hidden(ids), self.norm, self.embedding, targets.flatten(), self.shape.eps)
        nll = nll.view(ids.shape)
        return torch.cat([nll[:, :-1], torch.zeros_like(nll[:, :1])], 1)

    def logits(self, ids: Tensor) -> Tensor:
        """Return logits [B, T, V] in fp32."""
        x = rms_norm(self.hidden(ids), self.norm, self.shape.eps)
        return functional.linear(x, self.embedding.to(x.dtype)).float().view(*ids.shape, -1)
