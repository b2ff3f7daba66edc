"""The two forward passes of a captured round of speculation: drafting one token, and verifying all drafts.

Each pass leaves the device ready for the next one. A draft is the input of the next draft. The verification accepts
drafts, chooses the token after them, adds the accepted tokens to the lengths, and prepares the first draft of the next
round. The host only tells the passes what it knows before the round: how many drafts each row may accept, and random
numbers (:class:`Shared`).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from kvbench.attention.logits import PLAIN, Logits
from kvbench.cache.kernels.at_once import append
from kvbench.decoding.recorded import Recorded
from kvbench.decoding.sampling import Sampling, pick_tokens, probabilities
from kvbench.decoding.segments import Twins
from kvbench.decoding.speculative import accept_greedy, accept_sampled, chance
from kvbench.decoding.tables import Layout, Ledger, Numbers, Upload


class Shared:
    """Tensors at fixed addresses through which the passes of a round and the host exchange tokens and numbers.

    Args:
        most: largest number of drafts per round, G.
        forced: probability with which each draft is accepted by chance, whatever its token; None: drafts are accepted
            by comparison with the target.
        vocabulary: vocabulary size, V.

    Attributes:
        pending: last confirmed token of each row, not cached yet, ``[B]``.
        lengths: number of cached tokens of each row, without padding, ``[B]``.
        given: what the host provides for a round, fp32 ``[2 G + 2, B]``: G random numbers for drawing drafts, G for
            accepting them, one for drawing the token after them, and the number of drafts that the row may accept, or
            -1 if it has ended.
        number: index of the next draft in the round, ``[1]``.
        drafts: tokens drafted in this round, ``[G, B]``.
        chances: the distribution from which each draft is drawn, ``[G, B, V]``; None for greedy decoding.
        outcome: result of a round for the host, ``[B, G + 2]``: number of accepted drafts, the token after them, and
            the drafts.
    """

    def __init__(
        self, batch: int, most: int, how: Sampling, forced: float | None, vocabulary: int, device: torch.device
    ) -> None:
        self.most, self.how, self.forced, self.device = most, how, forced, device
        with torch.inference_mode(False):
            self.pending = torch.zeros(batch, dtype=torch.long, device=device)
            self.lengths = torch.zeros_like(self.pending)
            self.given = torch.zeros(2 * most + 2, batch, device=device)
            self.number = torch.zeros(1, dtype=torch.long, device=device)
            self.drafts = torch.zeros(most, batch, dtype=torch.long, device=device)
            self.chances = torch.zeros(most, batch, vocabulary, device=device) if how.temperature else None
            self.outcome = torch.zeros(batch, most + 2, dtype=torch.long, device=device)
        self._upload = Upload(self.given)
        self._sent: Numbers | None = None

    @property
    def limits(self) -> Tensor:
        """Largest number of drafts that each row may accept, -1 if the row has ended, ``[B]``."""
        return self.given[-1].long()

    def draws(self, active: Sequence[bool], limits: Sequence[int], generators: Sequence[torch.Generator]) -> Numbers:
        """Draw the random numbers of a round in the order in which eager rounds draw them, and return :attr:`given`.

        Generators of rows that have ended are not used. `limits` are the numbers of drafts that each row may accept.
        """
        most, sampled = self.most, self.chances is not None
        given = np.zeros(tuple(self.given.shape), dtype=np.float32)
        given[most : 2 * most] = 1.0
        for row, (on, limit, generator) in enumerate(zip(active, limits, generators, strict=True)):
            given[-1, row] = limit if on else -1
            # sampled: one number per draft to draw it, one to accept it, and one for the token after them
            count = (2 * limit + 1 if sampled else limit if self.forced is not None else 0) if on else 0
            if not count:
                continue
            numbers = torch.rand(count, generator=generator).numpy()
            if sampled:
                given[:limit, row], given[2 * most, row] = numbers[:limit], numbers[-1]
                numbers = numbers[limit:-1]
            given[most : most + limit, row] = numbers
        return given

    def give(self, given: Numbers) -> None:
        """Queue the copy of :attr:`given` to the device, unless it is there already."""
        if self._sent is None or not np.array_equal(given, self._sent):
            self._upload.send(given)
            self._sent = given


class Draft(Recorded):
    """The draft's forward pass over one token per row, in a form that can be captured as a CUDA graph."""

    def __init__(self, model: PreTrainedModel, ledger: Ledger, shared: Shared, upper: bool) -> None:
        super().__init__(model, ledger.cache, len(shared.pending), 1, shared.device, upper=upper)
        self.ledger, self.shared = ledger, shared

    def changed(self) -> list[Tensor]:
        """See :meth:`Recorded.changed`."""
        return [*super().changed(), self.shared.number, self.state]

    def restart(self) -> None:
        """Make the last confirmed tokens the input of the next run, which drafts the first token of a round."""
        self.tokens.copy_(self.shared.pending[:, None])
        self.positions.copy_(self.shared.lengths[:, None])
        self.shared.number.zero_()
        self.state.copy_(self.ledger.tables)

    def run(self) -> None:
        """Draft the next token of each row, and make it the input of the next run."""
        shared = self.shared
        logits = self.forward(logits_to_keep=1)[:, -1]
        token = logits.argmax(-1)
        if shared.chances is not None:
            chances = probabilities(logits, shared.how)
            shared.chances.index_copy_(0, shared.number, chances[None])
            drawn = pick_tokens(chances, shared.given.index_select(0, shared.number)[0])
            token = torch.where(shared.number < shared.limits, drawn, token)
        shared.drafts.index_copy_(0, shared.number, token[None])
        self.tokens.copy_(token[:, None])
        self.positions.add_(1)
        shared.number.add_(1)
        # one token longer: the newest phase's length and the places of new tokens grow by 1
        self.state.add_(self.ledger.growth)


class Verification(Recorded):
    """The target's forward pass over the last confirmed token and all drafts, and the preparation of the next round.

    `draft` is the draft's pass, whose input for the next round this pass sets.
    """

    def __init__(self, model: PreTrainedModel, ledger: Ledger, draft: Draft, gamma: int) -> None:
        shared = draft.shared
        super().__init__(model, ledger.cache, len(shared.pending), gamma + 1, shared.device)
        self.ledger, self.draft, self.shared, self.gamma = ledger, draft, shared, gamma
        with torch.inference_mode(False):
            self.steps = torch.arange(gamma + 1, device=shared.device)

    def changed(self) -> list[Tensor]:
        """See :meth:`Recorded.changed`."""
        shared = self.shared
        lengths = {id(ledger): ledger.tables for ledger in (self.ledger, self.draft.ledger)}
        return [shared.pending, shared.lengths, *lengths.values(), *self.draft.changed()]

    def run(self) -> None:
        """Verify the drafts, accept some, choose the token after them, and prepare the next round."""
        shared, gamma = self.shared, self.gamma
        # the tables are those with one new token: gamma more lengthen the newest phase, from the same place on
        torch.add(self.ledger.tables, self.ledger.last, alpha=gamma, out=self.state)
        drafts = shared.drafts[:gamma].T
        self.tokens.copy_(torch.cat([shared.pending[:, None], drafts], 1))
        torch.add(shared.lengths[:, None], self.steps, out=self.positions)
        accepted, following = self.accept(drafts, self.forward())
        # a row gains its accepted drafts and the token after them; one that has ended (-1) nothing
        counts = torch.where(shared.limits < 0, 0, accepted + 1)
        shared.outcome[:, : gamma + 2].copy_(torch.cat([accepted[:, None], following[:, None], drafts], 1))
        shared.pending.copy_(following)
        shared.lengths.add_(counts)
        counts = counts.int()
        self.ledger.add(counts)
        if self.draft.ledger is not self.ledger:
            self.draft.ledger.add(counts)
        self.draft.restart()

    def accept(self, drafts: Tensor, logits: Tensor) -> tuple[Tensor, Tensor]:
        """Return how many drafts ``[B, gamma]`` each row accepts, and the token after them, ``[B]`` each.

        `logits` are the target's after the last confirmed token and each draft, ``[B, gamma + 1, V]``.
        """
        shared, gamma = self.shared, self.gamma
        limits, numbers = shared.limits, shared.given[shared.most : shared.most + gamma].T
        bounds, good = limits.clamp(min=0), chance(numbers, shared.forced)
        if shared.chances is None:
            return accept_greedy(drafts, logits.argmax(-1), bounds, good)
        proposed, target = shared.chances[:gamma].transpose(0, 1), probabilities(logits, shared.how)
        accepted, rest = accept_sampled(drafts, proposed, target, numbers, bounds, good)
        drawn = pick_tokens(rest, shared.given[2 * shared.most])
        return accepted, torch.where(limits < 0, rest.argmax(-1), drawn)

    def build(self, layout: Layout) -> None:
        """Allocate the state as :meth:`Recorded.build` does, and find the places of new tokens in the draft's cache."""
        super().build(layout)
        ledger, batch = self.draft.ledger, len(self.tokens)
        assert ledger.layout is not None
        spans = ledger.layout.spans(batch)
        tables = Twins(ledger.tables, ledger.cache.kv_layers if ledger is not self.ledger else ())
        self.twins.append(tables)
        self.following = [
            tables.on(layer.device)[middle:last].view(batch, 2)
            for layer, (_, middle, last) in zip(ledger.cache.kv_layers, spans, strict=True)
        ]

    def serve(self, query: Tensor, key: Tensor, value: Tensor, scaling: float, logits: Logits = PLAIN) -> Tensor:
        """Compute a layer's attention as :meth:`Recorded.serve` does, and give a draft's own cache the same tokens.

        The target's keys and values replace those that drafting wrote there. The next round overwrites those of
        rejected drafts, as in the target's cache.
        """
        turn = self._turn
        output = super().serve(query, key, value, scaling, logits)
        if self.draft.ledger is not self.ledger:
            layer = self.draft.cache.kv_layers[turn]
            keys, values = layer.stores()
            append(*layer.rotated(key, value), keys.tail.buffer, values.tail.buffer, self.following[turn])
        return output
