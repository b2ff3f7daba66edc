"""Captured speculation: one recorded pass drafts, another verifies, whatever the method of target and draft.

A round of gamma drafts is gamma replays of one pass, each of whose outputs is the next one's input, and a replay of a
pass over gamma + 1 tokens. The rest of a round (:mod:`kvbench.decoding.speculative`) is the same as with eager passes,
but that gamma tokens are drafted also where fewer may be accepted, as at the end of an answer.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext

import torch
from torch import Tensor
from transformers import PreTrainedModel

from kvbench.cache import KVCache
from kvbench.decoding.drafting import Drafter, uniforms
from kvbench.decoding.graphs import Captured
from kvbench.decoding.sampling import Sampling, draw, probabilities
from kvbench.decoding.step import Recorded
from kvbench.methods.speculation import Speculation


class Draft(Recorded):
    """The recorded pass of the draft: one token a run.

    Args:
        cache: the one that the draft reads.
        batch, gamma: rows, and drafts of a round.
        how: settings of the sampling.
        vocabulary: vocabulary size.
        upper: as :class:`Recorded`.

    Attributes:
        drafts: of the round, ``[gamma, B]``.
        chances: what they were drawn from, ``[gamma, B, V]``; None where greedy.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        cache: KVCache,
        batch: int,
        gamma: int,
        how: Sampling,
        vocabulary: int,
        device: torch.device,
        upper: bool,
    ) -> None:
        super().__init__(model, cache, batch, 1, device, upper=upper)
        self.how, self.gamma = how, gamma
        with torch.inference_mode(False):
            self.number = torch.zeros(1, dtype=torch.long, device=device)
            self.drafts = torch.zeros(gamma, batch, dtype=torch.long, device=device)
            self.uniforms = torch.zeros(gamma, batch, device=device)
            self.wanted = torch.zeros(gamma, batch, dtype=torch.bool, device=device)
            self.chances = torch.zeros(gamma, batch, vocabulary, device=device) if how.temperature else None

    def changed(self) -> list[Tensor]:
        """Return also the number of the draft."""
        return [*super().changed(), self.number]

    def begin(self, token: Tensor, lengths: Tensor) -> None:
        """Begin a new round."""
        super().begin(token, lengths)
        self.number.zero_()

    def run(self) -> None:
        """Draft the next token."""
        logits = self.forward(logits_to_keep=1)[:, -1]
        token = logits.argmax(-1)
        if self.chances is not None:
            chances = probabilities(logits, self.how)
            self.chances.index_copy_(0, self.number, chances[None])
            drawn = draw(chances, self.uniforms.index_select(0, self.number)[0])
            token = torch.where(self.wanted.index_select(0, self.number)[0], drawn, token)
        self.drafts.index_copy_(0, self.number, token[None])
        self.tokens.copy_(token[:, None])
        self.positions.add_(1)
        self.number.add_(1)


class Verification(Recorded):
    """The target's pass over the pending token and its drafts; its logits are in `logits` ``[B, gamma + 1, V]``."""

    logits: Tensor

    def run(self) -> None:
        """Run the pass."""
        self.logits = self.forward()


class CapturedDrafter(Drafter):
    """A drafter that proposes and verifies by recorded passes.

    Args:
        how: settings of the sampling.
        batch: rows.
        compile: compile everything around attention, unless the draft has weights of its own.
        capture: as :class:`kvbench.decoding.graphs.Captured`.
        others: as :class:`Drafter` has them.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        cache: KVCache,
        speculation: Speculation,
        how: Sampling,
        batch: int,
        *,
        compile: bool = False,
        capture: bool = True,
    ) -> None:
        super().__init__(model, cache, speculation)
        device, gamma = model.get_input_embeddings().weight.device, speculation.gamma
        upper = speculation.draft == "upper"
        vocabulary = model.config.get_text_config(decoder=True).vocab_size
        draft = Draft(model, self.cache, batch, gamma, how, vocabulary, device, upper)
        target = Verification(model, cache, batch, gamma + 1, device)
        #: compiling was asked for, but code is compiled for one set of weights
        self.refused = compile and self.switch is not None
        compile = compile and self.switch is None
        self.draft = Captured(draft, compile=compile, capture=capture)
        self.target_pass = Captured(target, compile=compile, capture=capture)

    @property
    def stepping(self) -> str:
        """As :attr:`kvbench.decoding.graphs.Captured.stepping`."""
        return "graph (not compiled: the draft has weights of its own)" if self.refused else self.draft.stepping

    @property
    def seconds(self) -> float:
        """Spent on warm-ups and captures."""
        return self.draft.seconds + self.target_pass.seconds

    def prepare(self) -> None:
        """Record both passes; the caches are left as they were.

        Raises:
            NotCaptured: one of them cannot be.
        """
        for captured, tokens in ((self.draft, 1), (self.target_pass, self.speculation.gamma + 1)):
            step = captured.step
            step.cache.settle()
            starts = torch.tensor(step.cache.progress.padding.starts or [0] * len(step.tokens), device=step.device)
            step.begin(step.tokens[:, 0].clone(), step.cache.get_seq_length() - starts)
            with self.drafting() if captured is self.draft else nullcontext():
                captured.first()
            step.cache.take_back([tokens] * len(step.tokens))

    def drafts(self, limits: Sequence[int]) -> int:
        """Return the number of recorded drafts, whatever the limits."""
        return self.speculation.gamma

    def propose(
        self,
        pending: Tensor,
        mask: Tensor | None,
        lengths: Tensor,
        limits: Sequence[int],
        how: Sampling,
        generators: Sequence[torch.Generator],
    ) -> tuple[Tensor, Tensor | None]:
        """Propose as :meth:`Drafter.propose` does, from the recorded pass."""
        draft = self.draft.step
        assert isinstance(draft, Draft)
        draft.begin(pending, lengths)
        if draft.chances is not None:
            wanted = [[number < limit for limit in limits] for number in range(draft.gamma)]
            draft.uniforms.copy_(torch.stack([uniforms(generators, row) for row in wanted]))
            draft.wanted.copy_(torch.tensor(wanted))
        with self.drafting():
            for _ in range(draft.gamma):
                self.draft.next()
                self.draft.replay()
            self.cache.crop(-draft.gamma)
        return draft.drafts.T, None if draft.chances is None else draft.chances.transpose(0, 1)

    def verify(self, tokens: Tensor, lengths: Tensor, mask: Tensor | None) -> Tensor:
        """Verify as :meth:`Drafter.verify` does, from the recorded pass."""
        target = self.target_pass.step
        assert isinstance(target, Verification)
        target.begin(tokens[:, 0], lengths)
        target.tokens.copy_(tokens)
        self.target_pass.next()
        self.target_pass.replay()
        return target.logits


def captured_drafter(
    model: PreTrainedModel, cache: KVCache, speculation: Speculation, how: Sampling, batch: int, compile: bool
) -> CapturedDrafter:
    """Return a drafter whose passes are recorded.

    Raises:
        NotCaptured: they cannot be; the caches are as they were.
    """
    drafter = CapturedDrafter(model, cache, speculation, how, batch, compile=compile)
    drafter.prepare()
    return drafter
