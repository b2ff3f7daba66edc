"""A cache that holds random keys and values instead of a prompt's, so that long contexts are decoded without a prefill.

The time of a step depends on how much is stored and in which format, not on what it is. The method places the keys and
values as it would place a prompt's, layer by layer, so that formats, windows and bytes are those of a real prompt.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from transformers import PreTrainedModel

from kvbench.cache import KVCache
from kvbench.decoding import graphs as captured_decoding
from kvbench.decoding.autoregressive import Generation, Observer, continued, tell
from kvbench.decoding.drafting import prepare
from kvbench.decoding.sampling import Sampling
from kvbench.decoding.stopping import Stopping
from kvbench.errors import ConfigError
from kvbench.util.attachment import placement


def random_layers(
    model: PreTrainedModel, batch: int, tokens: int, seed: int, take: Callable[[int, Tensor, Tensor], None]
) -> None:
    """Make keys and values ``[B, H, tokens, D]`` of a normal distribution for one layer after the other.

    Args:
        model: its layers say how many heads, on which device.
        take: receives the layer's number, keys and values, and keeps what it wants.
    """
    config = model.config.get_text_config(decoder=True)
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    team = placement(model).team
    heads //= team.size if team is not None else 1  # a rank's own
    channels = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    for number, layer in enumerate(model.get_decoder().layers):
        device = next(layer.parameters()).device
        generator = torch.Generator(device).manual_seed(seed + number)
        shape = (batch, heads, tokens, channels)
        keys, values = (torch.randn(shape, generator=generator, dtype=model.dtype, device=device) for _ in range(2))
        take(number, keys, values)


def place(model: PreTrainedModel, cache: KVCache, batch: int, tokens: int, seed: int = 0) -> None:
    """Fill a fresh cache as if a prompt of `tokens` tokens had been run.

    Raises:
        ConfigError: the method watches the prompt's attention, or stores keys as they are before RoPE.
    """
    method = cache.method
    if method.observe_prompt or method.keys_before_rope:
        why = "watches the prompt's attention" if method.observe_prompt else "stores keys before RoPE"
        name = type(method).__name__.lower()
        raise ConfigError(
            "fill", "random", f"{name} {why}, which random keys lack", hint="dataset.fill=prefill, or --fill prefill"
        )
    cache.progress.see(None, batch, tokens)

    def take(number: int, keys: Tensor, values: Tensor) -> None:
        layer = cache.layers[number]
        layer.lazy_initialization(keys, values)
        layer.seen = tokens
        if cache.follower is not None and number == 0:
            cache.follower.progress.see(None, batch, tokens)
        layer.place(keys, values)

    random_layers(model, batch, tokens, seed, take)


@torch.inference_mode()
def go_on(
    model: PreTrainedModel,
    cache: KVCache,
    batch: int,
    tokens: int,
    *,
    max_new_tokens: int,
    sampling: Sampling,
    graphs: captured_decoding.Graphs = "never",
    compile: bool = False,
    observer: Observer | None = None,
    seed: int = 0,
) -> Generation:
    """Fill `cache` and decode, as :func:`kvbench.decoding.autoregressive.generate` would after its prefill.

    Args:
        batch, tokens: sequences, and what each of them holds.
        max_new_tokens: the first of them is what a prefill would have given: here a fixed one.

    Returns:
        A generation whose ``ttft_s`` is 0.
    """
    device = model.get_input_embeddings().weight.device
    prepare(model, cache.method.speculation)
    tell(observer, "prefill")
    place(model, cache, batch, tokens, seed)
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
    )
    tell(observer, "end")
    return Generation(stopping.tokens, [], stopping.finish, 0.0, prompt_tokens=[tokens] * batch, **decoded)
