"""Speculative decoding with two passes captured as CUDA graphs, one for drafting and one for verifying.

A round consists of gamma replays of a pass over one token, whose output is the input of the next replay, and one replay
of a pass over gamma + 1 tokens. Draft and target may use the caches of any methods. Everything else
(:mod:`kvbench.decoding.speculative`) is the same as with eager passes, except that gamma tokens are drafted even if
fewer can be accepted, as at the end of an answer.
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
    """The draft's forward pass over one token per row, in a form that can be captured as a CUDA graph.

    Args:
        model: model of both draft and target.
        cache: the cache that the draft reads.
        batch: number of rows.
        gamma: number of tokens that are drafted in a round.
        how: how drafts are chosen: temperature, top-k and top-p.
        vocabulary: vocabulary size.
        device: device of tokens and positions.
        upper: True: attention reads only the upper nibble of codes with two nibbles (QuantSpec's draft).

    Attributes:
        number: index of the next draft in the round, ``[1]``.
        drafts: tokens drafted in this round, ``[gamma, B]``.
        uniforms: random numbers for drawing the drafts, ``[gamma, B]``.
        wanted: for each draft, True to draw it at random, False to choose it greedily, ``[gamma, B]``.
        chances: the distribution from which each draft is drawn, ``[gamma, B, V]``; None for greedy decoding.
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
        """Return the input tensors that :meth:`run` changes: tokens, positions, and the index of the next draft."""
        return [*super().changed(), self.number]

    def begin(self, token: Tensor, lengths: Tensor) -> None:
        """Prepare for the first draft of a new round.

        Args:
            token: last confirmed token of each row, not cached yet, ``[B]``.
            lengths: number of cached tokens of each row, ``[B]``.
        """
        super().begin(token, lengths)
        self.number.zero_()

    def run(self) -> None:
        """Draft the next token of each row, store it in :attr:`drafts`, and make it the input of the next run."""
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
    """The target's forward pass over the last confirmed token and the drafts, which can be captured as a CUDA graph.

    Attributes:
        logits: logits after each of these tokens, computed by the latest :meth:`run`, ``[B, gamma + 1, V]``.
    """

    logits: Tensor

    def run(self) -> None:
        """Compute the logits after each input token, and store them in :attr:`logits`."""
        self.logits = self.forward()


class CapturedDrafter(Drafter):
    """Drafter whose forward passes, one for drafting and one for verification, are replays of CUDA graphs.

    Args:
        model: model of both draft and target.
        cache: the target's cache, which already contains the prompts.
        speculation: settings of the draft.
        how: how tokens are chosen: temperature, top-k and top-p.
        batch: number of rows.
        compile: True: compile everything except attention. Without effect if the draft has its own weights.
        capture: True: capture CUDA graphs; False: run the code of the passes at each replay (for tests on a CPU).
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
        device, gamma = model.get_input_embeddings().weight.device, speculation.most
        upper = speculation.draft == "upper"
        vocabulary = model.config.get_text_config(decoder=True).vocab_size
        draft = Draft(model, self.cache, batch, gamma, how, vocabulary, device, upper)
        target = Verification(model, cache, batch, gamma + 1, device)
        #: compilation was requested but is not possible: compiled code uses one set of weights
        self.refused = compile and self.switch is not None
        compile = compile and self.switch is None
        self.draft = Captured(draft, compile=compile, capture=capture)
        self.target_pass = Captured(target, compile=compile, capture=capture)

    @property
    def stepping(self) -> str:
        """Text for results on how passes run: ``graph``, ``graph, compiled`` or ``graph (not compiled: REASON)``."""
        return "graph (not compiled: the draft has weights of its own)" if self.refused else self.draft.stepping

    @property
    def seconds(self) -> float:
        """Seconds spent so far on warm-ups and on capturing both passes."""
        return self.draft.seconds + self.target_pass.seconds

    def prepare(self) -> None:
        """Capture the draft's and the target's forward pass; call this once, before the first round.

        The caches contain the same tokens afterwards.

        Raises:
            NotCaptured: one of the passes cannot be captured.
        """
        for captured, tokens in ((self.draft, 1), (self.target_pass, self.speculation.most + 1)):
            step = captured.step
            step.cache.settle()
            starts = torch.tensor(step.cache.progress.padding.starts or [0] * len(step.tokens), device=step.device)
            step.begin(step.tokens[:, 0].clone(), step.cache.get_seq_length() - starts)
            with self.drafting() if captured is self.draft else nullcontext():
                captured.first()
            step.cache.take_back([tokens] * len(step.tokens))

    def drafts(self, limits: Sequence[int]) -> int:
        """Return the number of tokens to draft in a round, which is always gamma.

        Args:
            limits: maximum number of drafts to accept in each row; not used.
        """
        return self.speculation.most

    def propose(
        self,
        pending: Tensor,
        mask: Tensor | None,
        lengths: Tensor,
        limits: Sequence[int],
        how: Sampling,
        generators: Sequence[torch.Generator],
    ) -> tuple[Tensor, Tensor | None]:
        """Draft gamma tokens per row by replaying a CUDA graph; arguments and results: see :meth:`Drafter.propose`."""
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
        """Run the target on the drafts by replaying a CUDA graph; arguments and result: see :meth:`Drafter.verify`."""
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
    """Create a :class:`CapturedDrafter`, capture its forward passes, and return it.

    The arguments are those of the class.

    Raises:
        NotCaptured: the passes cannot be captured. The caches contain the same tokens as before.
    """
    drafter = CapturedDrafter(model, cache, speculation, how, batch, compile=compile)
    drafter.prepare()
    return drafter
