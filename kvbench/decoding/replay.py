"""The target alone, flushed when a speculative run was flushed: what greedy speculation must equal, token for token.

A method's state may depend on when tokens were demoted (QuantSpec's buffer is flushed between rounds, so later than
after single steps). Speculation is lossless against the target *in those states*.
"""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import Tensor
from transformers import PreTrainedModel

from kvbench.cache import KVCache
from kvbench.decoding.passes import forward, prefill


@torch.inference_mode()
def replay(
    model: PreTrainedModel, cache: KVCache, input_ids: Tensor, settled: Collection[int], max_new_tokens: int
) -> tuple[list[int], list[float]]:
    """Decode greedily with the target alone, one token a step.

    Args:
        cache: fresh.
        input_ids: one prompt, ``[1, T]``.
        settled: numbers of cached tokens at which a speculative run settled its cache (``Round.settled``).
        max_new_tokens: tokens wanted; nothing ends them earlier.

    Returns:
        The tokens, and how far each one's logit was above the next best: a gap below 1e-4 is a tie in fp32.
    """
    scores = prefill(model, cache, input_ids, None)[0]
    cache.progress.frozen = True
    tokens, gaps = [], []
    while True:
        best = scores.topk(2)
        tokens.append(int(best.indices[0]))
        gaps.append(float(best.values[0] - best.values[1]))
        if len(tokens) == max_new_tokens:
            return tokens, gaps
        seen = cache.get_seq_length()
        if seen in settled:
            cache.settle()
        position = torch.tensor([[seen]], device=input_ids.device)
        token = torch.tensor([[tokens[-1]]], device=input_ids.device)
        scores = forward(model, cache, token, None, position)[0, -1]
