"""Choice of the next token from logits, greedy or drawn with temperature and top-p, and when a row of a batch ends."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

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
    return pick_tokens(probabilities(logits, sampling), uniform.to(logits.device))


def pick_tokens(probs: Tensor, uniform: Tensor) -> Tensor:
    """Choose one token per row with given uniform random numbers in [0, 1), ``[B]``, and return the tokens, ``[B]``.

    The function can be captured in a CUDA graph, because the host never waits for the device. For a row of NaN the
    result is token 0.
    """
    # a GPU sums in blocks, and rounding can change the cumulative sum even where the probability is 0
    sums = probs.cumsum(-1).masked_fill(~(probs > 0), 0.0)
    total = sums.amax(-1, keepdim=True)
    wanted = torch.minimum(uniform[:, None] * total, torch.nextafter(total, torch.zeros_like(total)))
    return (sums > wanted).int().argmax(-1)  # the first


class Stopping:
    """Collector of the new tokens of a batch, which decides when a row ends: at an EOS token or a stop string.

    Args:
        tokenizer: the model's tokenizer; None if neither `stop` nor :meth:`texts` is needed.

    Attributes:
        tokens: new tokens of each row, without the end-of-sequence token.
        ended: for each row, True if it has ended.
        finish: why each row ended: ``eos``, ``stop``, or ``length`` if it did not end by itself.

    Raises:
        ValueError: there are stop strings but no tokenizer.
    """

    def __init__(self, batch: int, eos_token_ids: Sequence[int], stop: Sequence[str], tokenizer: Any) -> None:
        if stop and tokenizer is None:
            raise ValueError("stop strings require a tokenizer, but tokenizer is None")
        self.eos, self.stop, self.tokenizer = frozenset(eos_token_ids), tuple(stop), tokenizer
        self.tokens: list[list[int]] = [[] for _ in range(batch)]
        self.finish = ["length"] * batch
        self.ended = [False] * batch
        # a stop string has at most as many tokens as bytes; a few more, as decoding may trim the text's start
        self._tail = max((len(s.encode()) for s in self.stop), default=0) + 8

    @property
    def all_ended(self) -> bool:
        """True if every row has ended."""
        return all(self.ended)

    def take(self, tokens: Sequence[int]) -> None:
        """Add one new token to each row; tokens of rows that have ended are ignored."""
        for row, token in enumerate(tokens):
            self.take_row(row, token)

    def take_row(self, row: int, token: int) -> None:
        """Add one new token to a row, unless the row has ended."""
        if self.ended[row]:
            return
        if token in self.eos:
            self._end(row, "eos")
            return
        self.tokens[row].append(token)
        if self.stop:
            tail = self.tokenizer.decode(self.tokens[row][-self._tail :], skip_special_tokens=True)
            if any(s in tail for s in self.stop):
                self._end(row, "stop")

    def _end(self, row: int, why: str) -> None:
        self.ended[row], self.finish[row] = True, why

    def texts(self) -> list[str]:
        """Return the text of each row up to its first stop string; texts are empty if there is no tokenizer."""
        if self.tokenizer is None:
            return [""] * len(self.tokens)
        texts = []
        for tokens in self.tokens:
            text = self.tokenizer.decode(tokens, skip_special_tokens=True)
            cuts = [at for s in self.stop if (at := text.find(s)) >= 0]
            texts.append(text[: min(cuts)] if cuts else text)
        return texts
