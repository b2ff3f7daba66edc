"""Caches of StreamingLLM without a model, and what their windows must hold: every token is kept, sinks are turned."""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import LlamaConfig
from transformers.models.llama import modeling_llama

from kvbench.attention.rope.rotary import Rotary
from kvbench.cache import KVCache
from kvbench.methods import load_method
from kvbench.methods.streamingllm import Turning

CHANNELS = 16
MODEL = modeling_llama.LlamaRotaryEmbedding(LlamaConfig(hidden_size=64, num_attention_heads=4, head_dim=CHANNELS))


def turned(keys: Tensor, by: int) -> Tensor:
    """Keys ``[H, n, D]`` moved on, one position at a time of the host's, queries and all."""
    x = keys[None].float()
    cos, sin = (each / 1.0 for each in MODEL(torch.zeros(1, device=x.device), torch.tensor([[by]], device=x.device)))
    return modeling_llama.apply_rotary_pos_emb(x, x, cos, sin)[1].to(keys.dtype)[0]


class Watched:
    """A cache, together with all tokens that it was given.

    Args:
        lengths: tokens of each row's prompt, padded on the left.
        together: settle as a captured step does; else layer by layer.
        options: of the method.
    """

    def __init__(
        self,
        lengths: list[int],
        *,
        layers: int = 2,
        heads: int = 2,
        dtype: torch.dtype = torch.bfloat16,
        device: str = "cpu",
        together: bool = True,
        **options: object,
    ) -> None:
        self.method = load_method("streamingllm", **options)
        self.heads, self.dtype, self.device, self.together = heads, dtype, device, together
        self.rng = torch.Generator().manual_seed(sum(lengths))
        self.cache = KVCache(self.method, layers)
        self.cache.progress.method_state = Turning(Rotary(MODEL.to(device), modeling_llama.apply_rotary_pos_emb).turn)
        width = max(lengths)
        self.cache.progress.padding.starts = [width - length for length in lengths]
        #: for each layer and side the tokens of each row ``[H, n, D]``
        self.given: list[tuple[list[Tensor], list[Tensor]]] = []
        for layer in self.cache.layers:
            keys, values = self.tokens(len(lengths), width), self.tokens(len(lengths), width)
            layer.lazy_initialization(keys, values)
            layer.seen = width
            layer.place(keys, values)
            sides = ([x[row, :, width - n :] for row, n in enumerate(lengths)] for x in (keys, values))
            self.given.append(tuple(sides))  # type: ignore[arg-type]

    def tokens(self, rows: int, count: int) -> Tensor:
        """Random ones, ``[rows, H, count, D]``."""
        return torch.randn(rows, self.heads, count, CHANNELS, generator=self.rng).to(self.device, self.dtype)

    def settle(self) -> None:
        """Before the next tokens."""
        if self.together:
            self.cache.settle_layers()
        else:
            for layer in self.cache.layers:
                layer.settle()

    def step(self, count: int = 1) -> None:
        """Settle, and take new tokens as a captured step does: at places that stand elsewhere."""
        self.settle()
        for layer, sides in zip(self.cache.layers, self.given, strict=True):
            places = layer.advance(count)
            for side, (store, rows) in enumerate(zip(layer.stores(), sides, strict=True)):
                new = self.tokens(len(rows), count)
                for row, place in enumerate(places):
                    store.tail.buffer[row, :, place[side] : place[side] + count] = new[row]
                    rows[row] = torch.cat([rows[row], new[row]], 1)

    def take_back(self, counts: list[int]) -> None:
        """The newest of each row, as speculation does."""
        self.cache.take_back(counts)
        for sides in self.given:
            for rows in sides:
                rows[:] = [x[:, : x.shape[1] - count] for x, count in zip(rows, counts, strict=True)]

    def select(self, order: list[int]) -> None:
        """Rows `order` become the batch."""
        self.cache.batch_select_indices(torch.tensor(order))
        for sides in self.given:
            for rows in sides:
                rows[:] = [rows[row] for row in order]

    def twin(self) -> Watched:
        """An independent copy, whose next tokens are others."""
        twin = object.__new__(type(self))
        twin.__dict__.update(self.__dict__)
        twin.cache, twin.rng = self.cache.clone(), torch.Generator().manual_seed(77)
        twin.given = [(list(keys), list(values)) for keys, values in self.given]
        return twin

    def check(self) -> None:
        """Settle, and compare every bit of every window."""
        self.settle()
        for layer, sides in zip(self.cache.layers, self.given, strict=True):
            for side, store, rows in zip(("key", "value"), layer.stores(), sides, strict=True):
                for row, x in enumerate(rows):
                    computed = store.tail.view(slice(row, row + 1))[0]
                    assert torch.equal(computed, self.wanted(side, x)), (layer.index, side, row, x.shape[1])

    def wanted(self, side: str, x: Tensor) -> Tensor:
        """Return the tokens of a row that the cache holds, of ``[H, n, D]``."""
        n = x.shape[1]
        held, sinks = self.method.held(n), min(self.method.sinks, n)
        if held == n:
            return x
        first = x[:, :sinks]
        if side == "key" and self.method.position == "cache" and sinks:
            first = turned(first, n - held)
        return torch.cat([first, x[:, n - (held - sinks) :]], 1)
