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
    """Repeat a greedy speculative run on one prompt ``[1, T]`` without a draft, token by token.

    Args:
        settled: numbers of cached tokens at which the method packed or dropped tokens in the speculative run
            (``Round.settled``); it does so here at the same numbers only.
        max_new_tokens: number of tokens to generate; end-of-sequence tokens do not end the run.

    Returns:
        The tokens, and for each token the difference between the largest and the second largest logit. If a difference
        is below 1e-4 in fp32, the two tokens are tied, and the speculative run may have chosen the other one.
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
