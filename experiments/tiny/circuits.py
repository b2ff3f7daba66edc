"""First weights for tiny-reason: heads that look words up, which random weights take long to become.

A look-up takes two layers (Elhage et al. 2021, "A mathematical framework for transformer circuits", induction heads).
Heads of the first layer copy the words one and two places back, and those of the second find the places whose copies
equal a query. Training does the rest: which of the places counts, the parity of numbers, sums, and what noise asks for.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from experiments.tiny.config import ModelShape
from experiments.tiny.model import Network
from kvbench.errors import ConfigError

#: speeds of RoPE, in radians a token, that tell places apart
FAST = 0.05
#: radians over the whole context of those that hardly turn, whose channels compare words
STILL = 0.4
#: deviation of an embedding's channels, and the channel that is equal for all words, in units of it
SIZE, SAME = 0.02, 5.0
#: logits by which the place one back, and an equal word, are ahead
NEAR, EQUAL = 8.0, 14.0


def speeds_and_channels(shape: ModelShape) -> tuple[Tensor, Tensor]:
    """Return the speed of each pair of a head's channels [D / 2], and the channels that compare words.

    Raises:
        ConfigError: the shape lacks what the heads need.
    """
    speeds = shape.rope_theta ** -(torch.arange(shape.head_dim // 2) * 2 / shape.head_dim)
    still = (speeds * shape.context < STILL).nonzero().flatten()
    still = torch.cat([still, still + shape.head_dim // 2])[: shape.width // 4]
    if (shape.heads, shape.kv_heads) != (4, 2) or shape.layers < 2 or len(still) == 0:
        raise ConfigError(
            "reason.circuits",
            True,
            "needs 4 heads over 2 of keys and values, 2 layers and a rope_theta far above the context",
            hint="reason.circuits=false",
        )
    return speeds, still


@torch.no_grad()
def draw_circuits(network: Network, generator: torch.Generator) -> None:
    """Put the heads into the first two layers of a network that is initialised.

    Channel 0 of the residual stream is equal for all words; the rest of its first half is the word's own; its third
    quarter holds a copy of the word before, and its last quarter one of the word before that.
    """
    shape = network.shape
    width, dim = shape.width, shape.head_dim
    speeds, still = speeds_and_channels(shape)
    half, compared = width // 2, len(still)
    sizes = [shape.heads * dim, shape.kv_heads * dim, shape.kv_heads * dim]

    own = torch.randn(shape.vocabulary, half - 1, generator=generator)
    network.embedding.zero_()
    network.embedding[:, 0] = SAME * SIZE
    # all of one length: RMSNorm divides channel 0 by it too, and heads that look back see only that one
    network.embedding[:, 1:half] = SIZE * math.sqrt(half - 1) * own / own.norm(dim=1, keepdim=True)
    words = torch.zeros(compared, width)  # what reads a word in its own channels
    words[:, 1:half] = torch.linalg.qr(torch.randn(half - 1, compared, generator=generator))[0].T
    copies = torch.zeros(2, compared, width)  # what reads the copies of the words one and two places back
    for back in range(2):
        copies[back, :, half + back * (width // 4) :][:, :compared] = torch.eye(compared)

    layer = network.layers[0]
    q, k, v = (part.view(-1, dim, width) for part in layer.qkv.split(sizes))
    norm = math.sqrt((half - 1 + SAME**2) / width)  # RMS of the residual stream, in units of SIZE
    fast = torch.where(speeds > FAST, 1.0, 0.0)
    gap = (fast * (1 - torch.cos(speeds))).sum()  # between neighbouring places
    gain = torch.sqrt(NEAR * math.sqrt(dim) / gap) * norm / SAME
    q.zero_()
    k.zero_()
    for head in range(shape.heads):
        back = 1 + head % 2
        q[head, :, 0] = gain * torch.cat([fast * torch.cos(speeds * back), -fast * torch.sin(speeds * back)])
    k[:, :, 0] = gain * torch.cat([fast, torch.zeros_like(fast)])
    v[0] = 0.0
    v[0, still] = words
    layer.out *= 0.3
    layer.out[:, : 2 * dim] = 0.0
    for head in range(2):
        layer.out[:, head * dim + still] = SIZE * norm * copies[head].T

    layer = network.layers[1]
    q, k, v = (part.view(-1, dim, width) for part in layer.qkv.split(sizes))
    norm = math.sqrt((half - 1 + SAME**2 + 2 * compared) / width)
    gain = math.sqrt(EQUAL * math.sqrt(dim) / compared) * norm
    # an amount stands behind its label; a jump two behind it, and is asked for by the register, one behind the label
    for head, query in ((1, words), (2, copies[0]), (3, copies[0])):
        q[head, still] = gain * query
    for head in range(2):
        k[head, still] = gain * copies[head]
    size = min(dim, half - 1)
    v[:, :size, 1 : 1 + size] = torch.eye(size)
    for head in range(1, shape.heads):
        layer.out[:, head * dim : (head + 1) * dim] = 0.0
        layer.out[1 : 1 + size, head * dim : head * dim + size] = SIZE * torch.eye(size)
