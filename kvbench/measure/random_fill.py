"""Caches filled with random keys and values, to time decoding after long contexts without running the prefill.

The time of a step depends on how much is stored and in which format, not on the values. The method stores the random
keys and values layer by layer in the same way as those of a prompt, so formats, windows and bytes are realistic.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from kvbench.cache import KVCache
from kvbench.decoding.autoregressive import Generation, Observer, continued, tell
from kvbench.decoding.drafting import prepare_draft
from kvbench.decoding.recordable import Graphs
from kvbench.decoding.sampling import Sampling, Stopping
from kvbench.models.layers import attending
from kvbench.models.projections import head_dim, kv_heads
from kvbench.util.attachment import placement, storage_of


def random_layers(
    model: PreTrainedModel, batch: int, tokens: int, seed: int, take: Callable[[int, Tensor, Tensor], None]
) -> None:
    """Draw normally distributed keys and values for every attention layer of a model, and pass them to `take`.

    Only one layer's tensors ``[B, H, tokens, D]`` need to exist at a time. `take` gets the layer's index in the model,
    its keys and its values.
    """
    shape = (batch, kv_heads(model) // head_ranks(model), tokens, head_dim(model))
    layers = model.get_decoder().layers
    for number, index in enumerate(attending(model.config)):
        device = next(layers[index].parameters()).device
        generator = torch.Generator(device).manual_seed(seed + number)
        keys, values = (
            torch.randn(shape, generator=generator, dtype=storage_of(model), device=device) for _ in range(2)
        )
        take(index, keys, values)


def head_ranks(model: PreTrainedModel) -> int:
    """Return the number of GPUs between which the heads of a model are divided."""
    team = placement(model).team
    return 1 if team is None else team.size


def fill_at_random(model: PreTrainedModel, cache: KVCache, batch: int, tokens: int, seed: int = 0) -> None:
    """Fill an empty cache with random keys and values, as if a prefill of `tokens` tokens had been run.

    The states of a hybrid model (of linear attention, Mamba or convolutions) start empty.
    """
    method = cache.method
    if method.keys_before_rope:  # the random keys are stored as keys before RoPE, whose positions attention needs
        cache.progress.positions.see(torch.arange(tokens)[None], 0, [0] * batch)
    cache.progress.see(None, batch, tokens)
    query_heads = model.config.get_text_config(decoder=True).num_attention_heads // head_ranks(model)

    def take(index: int, keys: Tensor, values: Tensor) -> None:
        layer = cache.layers[index]
        layer.lazy_initialization(keys, values)
        layer.seen = tokens
        for member in layer.chain():
            generator = torch.Generator(keys.device).manual_seed(seed + index)
            observe_at_random(member, keys, query_heads, generator)
        if cache.follower is not None and index == 0:
            cache.follower.progress.see(None, batch, tokens)
        layer.place(keys, values)

    random_layers(model, batch, tokens, seed, take)


def observe_at_random(layer: Any, keys: Tensor, query_heads: int, generator: torch.Generator) -> None:
    """Give a layer random attention over the prompt, if its method observes the prompt's attention.

    Which tokens such a method keeps is then random; how many, and in which format, is not. The keys are
    ``[B, H, tokens, D]``.
    """
    queries, (batch, _, tokens) = layer.method.observe_prompt, keys.shape[:3]
    if queries:
        shape = (batch, query_heads, min(max(queries, 1), tokens), tokens)
        layer.observed = torch.rand(shape, generator=generator, device=keys.device)


@torch.inference_mode()
def go_on(
    model: PreTrainedModel,
    cache: KVCache,
    batch: int,
    tokens: int,
    *,
    max_new_tokens: int,
    sampling: Sampling,
    graphs: Graphs = "never",
    compile: bool = False,
    observer: Observer | None = None,
    seed: int = 0,
) -> Generation:
    """Fill a cache with random keys and values in place of a prefill, then decode as ``generate`` does.

    Arguments are those of :func:`kvbench.decoding.autoregressive.generate`, with `tokens` tokens for each sequence in
    place of prompts. The first new token is an arbitrary one, because there are no logits of a prompt from which to
    choose it. The result has a ``ttft_s`` of 0.
    """
    device = model.get_input_embeddings().weight.device
    prepare_draft(model, cache.method.speculation)
    tell(observer, "prefill")
    fill_at_random(model, cache, batch, tokens, seed)
    tell(observer, "decode")
    vocabulary = model.config.get_text_config(decoder=True).vocab_size
    token = (torch.arange(batch, device=device) * 17 + 3) % vocabulary
    lengths = torch.full((batch,), tokens, device=device)
    stopping, generators = Stopping(batch, (), (), None), sampling.generators(batch)
    decoded = continued(
        model,
        cache,
        token,
        None,
        lengths,
        stopping,
        sampling,
        generators,
        max_new_tokens,
        speculation=cache.method.speculation,
        graphs=graphs,
        compile=compile,
        observer=observer,
    )
    tell(observer, "end")
    return Generation(stopping.tokens, [], stopping.finish, 0.0, prompt_tokens=[tokens] * batch, **decoded)
