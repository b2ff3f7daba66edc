"""A decode step of one token per row that a CUDA graph can record: pass, choice of the next token, next input."""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import PreTrainedModel

from kvbench.cache import KVCache
from kvbench.decoding.recordable import STATES
from kvbench.decoding.recorded import Recorded, settle
from kvbench.decoding.sampling import Sampling, draw, probabilities

__all__ = ["STATES", "Recorded", "Step", "settle"]


class Step(Recorded):
    """A decode step of one token per row that can be recorded; the tokens that it chooses are its next input.

    Args:
        token: last token of each row, not cached yet, ``[B]``.
        lengths: number of cached tokens of each row, ``[B]``; this is also the position of `token`.
        uniforms: random numbers with which to draw the tokens of all steps, fp32 ``[steps, B]``; None for greedy
            decoding.
    """

    observed = True

    def __init__(
        self,
        model: PreTrainedModel,
        cache: KVCache,
        token: Tensor,
        lengths: Tensor,
        sampling: Sampling,
        uniforms: Tensor | None = None,
    ) -> None:
        super().__init__(model, cache, len(token), 1, token.device)
        self.sampling = sampling
        with torch.inference_mode(False):
            self.number = torch.zeros(1, dtype=torch.long, device=self.device)
            self.uniforms = None if uniforms is None else uniforms.to(self.device)
        self.begin(token, lengths)

    def changed(self) -> list[Tensor]:
        """See :meth:`Recorded.changed`."""
        return [*super().changed(), self.number]

    def run(self) -> None:
        """Run the forward pass, choose the next token of each row, and make it the input of the next run."""
        logits = self.forward(logits_to_keep=1)[:, -1]
        if self.uniforms is None:
            token = logits.argmax(-1)
        else:
            uniform = self.uniforms.index_select(0, self.number)[0]
            token = draw(probabilities(logits, self.sampling), uniform)
        self.tokens.copy_(token[:, None])
        self.positions.add_(1)
        self.number.add_(1)
