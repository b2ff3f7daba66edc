"""Decoding without a draft that packs tokens at the same points as a speculative run, to check its output.

The contents of a cache may depend on when tokens were packed: QuantSpec's buffer is flushed between rounds, hence later
than with single steps. If the target packs tokens at the same points, greedy speculation must give the same tokens.
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
    """Decode greedily without a draft, one token per step, settling the cache at the same points as a speculative run.

    To settle a cache means to let its method pack or drop tokens.

    Args:
        model: causal language model that runs kvbench's attention.
        cache: an empty cache.
        input_ids: one prompt, ``[1, T]``.
        settled: numbers of cached tokens at which the speculative run settled its cache (``Round.settled``); this run
            settles its cache only at the same numbers.
        max_new_tokens: number of tokens to generate; end-of-sequence tokens do not end the run.

    Returns:
        The tokens, and for each token the difference between the largest and the second largest logit. A difference
        below 1e-4 should be considered a tie in fp32.
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
