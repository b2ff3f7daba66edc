"""The likelihood of the reference answer, given the cached prompt: a finer measure than exact match."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import PreTrainedModel

from kvbench.cache import KVCache
from kvbench.decoding.passes import forward


@torch.inference_mode()
def answer_nll(
    model: PreTrainedModel,
    cache: KVCache,
    logits: Tensor,
    answer_ids: Sequence[Sequence[int]],
    mask: Tensor | None = None,
    pad_token_id: int = 0,
) -> list[tuple[float, int]]:
    """Return the negative log-likelihood of each row's reference answer, given the cached prompt.

    Answers are teacher-forced on a copy of the cache. One forward pass processes all tokens of an answer, so they
    attend to each other in full precision.

    Args:
        cache: the cache after the prefill; it is not changed.
        logits: logits of the prompt's last token, ``[B, V]``.
        answer_ids: tokens of each row's answer (may be empty).
        mask: attention mask of the prompts, ``[B, T]``; None: no padding.

    Returns:
        For each row, the negative log-likelihood of its answer in nats, summed over its tokens, and their number.
    """
    longest = max((len(a) for a in answer_ids), default=0)
    if longest == 0:
        return [(0.0, 0) for _ in answer_ids]
    rows = [list(a) + [pad_token_id] * (longest - len(a)) for a in answer_ids]
    target = torch.tensor(rows, device=logits.device)
    scores = logits.float()[:, None]
    if longest > 1:
        width, count = cache.get_seq_length(), longest - 1
        start = torch.full((len(rows),), width, device=logits.device) if mask is None else mask.sum(-1)
        positions = start[:, None] + torch.arange(count, device=logits.device)
        longer = None if mask is None else torch.nn.functional.pad(mask, (0, count), value=1)
        rest = forward(model, cache.clone(), target[:, :-1], longer, positions, all_logits=True)
        scores = torch.cat([scores, rest.float()], 1)
    losses = -torch.log_softmax(scores, -1).gather(-1, target[..., None]).squeeze(-1)
    return [(float(losses[row, : len(a)].sum()), len(a)) for row, a in enumerate(answer_ids)]
