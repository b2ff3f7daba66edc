"""Choice of the next token from logits: greedy, or drawn with temperature, top-k and nucleus (top-p) sampling."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Sampling:
    """Settings for the choice of the next token.

    Args:
        temperature: 0: choose the most probable token (greedy); above 0: divide logits by the temperature and draw.
        top_p: draw only from the smallest set of most probable tokens whose total probability reaches `top_p`; 1.0: no
            restriction.
        seed: seed of the random draws: one number (row b then uses ``seed + b``), or a number for each row. With a
            number for each row, the answer to a sample does not depend on its batch.
        top_k: draw only from the `top_k` most probable tokens, and from tokens that are as probable as the last of
            them. Applied before `top_p`. None or 0: no restriction.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    seed: int | Sequence[int] = 0
    top_k: int | None = None

    def generators(self, batch: int) -> list[torch.Generator]:
        """Return one random generator per row, on the CPU, so that draws do not depend on the device.

        Raises:
            ValueError: the number of seeds differs from the number of rows.
        """
        seeds = [self.seed + row for row in range(batch)] if isinstance(self.seed, int) else list(self.seed)
        if len(seeds) != batch:
            raise ValueError(f"{len(seeds)} seeds were given for a batch of {batch}: give one seed, or one per row")
        return [torch.Generator().manual_seed(seed % 2**63) for seed in seeds]


def probabilities(logits: Tensor, sampling: Sampling) -> Tensor:
    """Return the distribution from which tokens are drawn, in fp32; if greedy, the best token has probability 1.

    Args:
        logits: ``[..., V]``; the result has the same shape.
        sampling: temperature, top-k and top-p.
    """
    if sampling.temperature == 0.0:
        return torch.nn.functional.one_hot(logits.argmax(-1), logits.shape[-1]).float()
    scaled = logits.float() / sampling.temperature
    if sampling.top_k:
        least = scaled.topk(min(sampling.top_k, scaled.shape[-1]), -1).values[..., -1:]
        scaled = scaled.masked_fill(scaled < least, float("-inf"))  # tokens as probable as the last one stay too
    probs = torch.softmax(scaled, -1)
    if sampling.top_p < 1.0:
        ordered, index = probs.sort(-1, descending=True)
        # a token stays while the mass before it is below top_p, so the one that crosses the border stays too
        ordered = ordered.masked_fill(ordered.cumsum(-1) - ordered >= sampling.top_p, 0.0)
        probs = torch.zeros_like(probs).scatter_(-1, index, ordered)
        probs = probs / probs.sum(-1, keepdim=True)
    return probs


def choose(logits: Tensor, sampling: Sampling, generators: Sequence[torch.Generator]) -> Tensor:
    """Choose the next token of each row, ``[B]``.

    Args:
        logits: logits of each row, ``[B, V]``.
        sampling: how tokens are chosen: temperature, top-k and top-p.
        generators: random generator of each row; not used if greedy.
    """
    if sampling.temperature == 0.0:
        return logits.argmax(-1)
    uniform = torch.cat([torch.rand(1, generator=generator) for generator in generators])
    return draw(probabilities(logits, sampling), uniform.to(logits.device))


def draw(probs: Tensor, uniform: Tensor) -> Tensor:
    """Draw one token per row, ``[B]``, using the given random numbers.

    The host never waits for the device, so captured steps can use this function too. A row of NaN gives token 0.

    Args:
        probs: distribution of each row, ``[B, V]``.
        uniform: uniform random number in [0, 1) for each row, ``[B]``.
    """
    # a GPU sums in blocks, and rounding can change the cumulative sum even where the probability is 0
    sums = probs.cumsum(-1).masked_fill(~(probs > 0), 0.0)
    total = sums.amax(-1, keepdim=True)
    wanted = torch.minimum(uniform[:, None] * total, torch.nextafter(total, torch.zeros_like(total)))
    return (sums > wanted).int().argmax(-1)  # the first
