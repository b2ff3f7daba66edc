"""Teacher-forced steps as replays of a CUDA graph: the likelihood of a text that must be read token by token.

Each step gets the text's next token, and adds the negative log-likelihood of the one after it to a sum in device
memory. The host never waits for a step, and no logits are kept.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from transformers import PreTrainedModel

from kvbench.cache import KVCache
from kvbench.decoding.graphs import Captured
from kvbench.decoding.recordable import Graphs, NotCaptured, eager_reason
from kvbench.decoding.recorded import Recorded

#: number of steps between two reports of progress, each of which waits for the device
REPORTED = 256


class Forced(Recorded):
    """A step of one given token per row that can be recorded as a CUDA graph.

    Args:
        cache: the cache, which already contains the first tokens of the text.
        ids: token ids of the text, ``[B, T]``.
        firsts: for each row, the index of the first token whose likelihood counts.

    Attributes:
        number: column of the next token that the model gets, ``[1]``.
        total: negative log-likelihood of each row so far, in nats, fp64 ``[B]``.
    """

    observed = True

    def __init__(
        self, model: PreTrainedModel, cache: KVCache, ids: Tensor, firsts: Sequence[int], lengths: Tensor
    ) -> None:
        super().__init__(model, cache, len(ids), 1, ids.device)
        place = cache.get_seq_length()
        with torch.inference_mode(False):
            self.ids = ids.clone()
            self.firsts = torch.tensor(list(firsts), device=ids.device)
            self.number = torch.full((1,), place, dtype=torch.long, device=ids.device)
            self.total = torch.zeros(len(ids), dtype=torch.float64, device=ids.device)
        self.begin(self.ids[:, place], lengths)

    def changed(self) -> list[Tensor]:
        """See :meth:`Recorded.changed`."""
        return [*super().changed(), self.number, self.total]

    def run(self) -> None:
        """Run the forward pass, add the next token's negative log-likelihood, and make that token the next input."""
        scores = self.forward(logits_to_keep=1)[:, -1].float()
        self.number.add_(1)
        token = self.ids.index_select(1, self.number)
        loss = torch.logsumexp(scores, -1) - scores.gather(1, token)[:, 0]
        self.total.add_(torch.where(self.number >= self.firsts, loss.double(), 0.0))
        self.tokens.copy_(token)
        self.positions.add_(1)


def forced_nll(
    model: PreTrainedModel,
    cache: KVCache,
    ids: Tensor,
    firsts: Sequence[int],
    lengths: Tensor,
    report: Callable[[int], None] | None = None,
    graphs: Graphs = "auto",
    compile: bool = False,
    *,
    capture: bool = True,
) -> Tensor | None:
    """Return the summed negative log-likelihood of a text's tokens in nats, computed by replays of a captured step.

    Args:
        ids: token ids of the text, ``[B, T]``; the cache contains its first tokens. The likelihood of the cached
            tokens, and of the first token after them, is not computed.
        firsts: for each row, the index of the first token whose likelihood counts.
        lengths: number of cached tokens of each row, without padding, ``[B]``.
        report: called from time to time with the number of tokens processed so far.
        capture: True: capture a CUDA graph; False: run the code of a step at each replay (for tests on a CPU).

    Returns:
        fp64 ``[B]``; None if a step cannot or should not be captured. The cache is then as before.
    """
    place, steps = cache.get_seq_length(), ids.shape[1] - 1 - cache.get_seq_length()
    if steps < 1 or (capture and eager_reason(model, cache, graphs, steps, ids.device) is not None):
        return None
    step = Forced(model, cache, ids, firsts, lengths)
    captured = Captured(step, compile=compile, capture=capture)
    try:
        captured.first()
    except NotCaptured:
        return None
    for number in range(steps):
        if number:
            captured.next()
        captured.replay()
        if report is not None and (number % REPORTED == REPORTED - 1 or number == steps - 1):
            report(place + number + 2)
    return step.total
