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
        seed: seed of the random draws: one number, from which row b gets ``seed + b``, or a list with a number for each
            row. With such a list, the answer to a sample need not depend on the batch that contains it.
        top_k: draw only from the `top_k` most probable tokens, including all that are tied with the last of them.
            Applied before `top_p`. None or 0: no restriction.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    seed: int | Sequence[int] = 0
    top_k: int | None = None

    def generators(self, batch: int) -> list[torch.Generator]:
        """Return a seeded random generator for each of `batch` rows.

        The generators are on the CPU, so that draws do not depend on the device of the model.

        Raises:
            ValueError: the number of seeds differs from the number of rows.
        """
        seeds = [self.seed + row for row in range(batch)] if isinstance(self.seed, int) else list(self.seed)
        if len(seeds) != batch:
            raise ValueError(f"{len(seeds)} seeds were given for a batch of {batch}: give one seed, or one per row")
        return [torch.Generator().manual_seed(seed % 2**63) for seed in seeds]


def probabilities(logits: Tensor, sampling: Sampling) -> Tensor:
    """Return the distribution ``[..., V]`` from which the next token is drawn, in fp32.

    For greedy decoding, the most probable token has probability 1.
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
    """Choose the next token of each row from logits ``[B, V]``, and return the tokens, ``[B]``.

    Generators are not used for greedy decoding.
    """
    if sampling.temperature == 0.0:
        return logits.argmax(-1)
    uniform = torch.cat([torch.rand(1, generator=generator) for generator in generators])
    return draw(probabilities(logits, sampling), uniform.to(logits.device))


def draw(probs: Tensor, uniform: Tensor) -> Tensor:
    """Choose one token per row with given uniform random numbers in [0, 1), ``[B]``, and return the tokens, ``[B]``.

    The function can be captured in a CUDA graph, because the host never waits for the device. For a row of NaN the
    result is token 0.
    """
    # a GPU sums in blocks, and rounding can change the cumulative sum even where the probability is 0
    sums = probs.cumsum(-1).masked_fill(~(probs > 0), 0.0)
    total = sums.amax(-1, keepdim=True)
    wanted = torch.minimum(uniform[:, None] * total, torch.nextafter(total, torch.zeros_like(total)))
    return (sums > wanted).int().argmax(-1)  # the first
