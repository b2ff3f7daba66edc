"""StreamingLLM on a model against the paper's statement: keys before RoPE are cached, and rotated inside the cache."""

import pytest
import torch

from kvbench.errors import CacheError
from kvbench.methods import load_method
from tests import zoo
from tests.zoo import feed, new_layer, random_kv

SINKS = 4


class Paper:
    """A Llama run token by token; every layer holds keys before RoPE and rotates them by their place in the cache."""

    def __init__(self, model, budget: int, evict: str) -> None:
        self.model, self.budget, self.evict = model, budget, evict
        self.past = [None] * len(model.model.layers)

    def rotate(self, x: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        cos, sin = self.model.model.rotary_emb(x, places[None])
        left, right = x.chunk(2, -1)
        return x * cos[:, None] + torch.cat([-right, left], -1) * sin[:, None]

    def step(self, ids: torch.Tensor) -> torch.Tensor:
        """Logits of new tokens ``[1, q]``; what is too much is dropped after them."""
        x, count = self.model.model.embed_tokens(ids), ids.shape[1]
        for number, block in enumerate(self.model.model.layers):
            inner, attention = block.input_layernorm(x), block.self_attn
            q, k, v = (
                projection(inner).unflatten(-1, (-1, 64)).transpose(1, 2)
                for projection in (attention.q_proj, attention.k_proj, attention.v_proj)
            )
            if self.past[number] is not None:
                k, v = (torch.cat([old, new], 2) for old, new in zip(self.past[number], (k, v), strict=True))
            slots = k.shape[2]
            turned = self.rotate(k, torch.arange(slots)).repeat_interleave(2, 1)
            scores = self.rotate(q, torch.arange(slots - count, slots)) @ turned.transpose(-1, -2) / 8
            scores[..., -count:] += torch.full((count, count), -torch.inf).triu(1)
            out = torch.softmax(scores, -1) @ v.repeat_interleave(2, 1)
            x = x + attention.o_proj(out.transpose(1, 2).flatten(-2))
            x = x + block.mlp(block.post_attention_layernorm(x))
            first = number not in self.__dict__.setdefault("done", set())
            self.done.add(number)
            if slots > self.budget and (self.evict == "steps" or first):
                newest = slots - (self.budget - SINKS)
                k, v = (torch.cat([t[:, :, :SINKS], t[:, :, newest:]], 2) for t in (k, v))
            self.past[number] = (k, v)
        return self.model.lm_head(self.model.model.norm(x))


@pytest.mark.parametrize(
    ("budget", "evict", "prompt"), [(48, "steps", 100), (48, "steps", 30), (5, "steps", 100), (48, "prefill", 100)]
)
@torch.no_grad()
def test_logits_are_those_of_the_papers_cache(budget, evict, prompt):
    model = zoo.model("llama")
    method = load_method("streamingllm", budget=budget, evict=evict)
    ids = torch.randint(3, zoo.VOCABULARY, (1, 200), generator=torch.Generator().manual_seed(3))
    paper, cache = Paper(model, budget, evict), method.new_cache(model)
    sizes, place = [prompt, 1, 1, 3, *[1] * 24, 9, 1, 1], 0
    for size in sizes:
        part = ids[:, place : place + size]
        place += size
        ours = model(input_ids=part, past_key_values=cache, use_cache=True).logits
        torch.testing.assert_close(ours, paper.step(part), rtol=1e-3, atol=2e-4)
    stored = paper.past[0][0].shape[2]
    assert cache.bill().used.window == 2 * 2 * 2 * stored * 64 * 4  # layers, K and V, heads, tokens, channels, bytes
    method.detach(model)


@torch.no_grad()
def test_positions_matter_and_sinks_stay_visible_to_a_sliding_window():
    """Mistral sees 40 tokens back: sinks at their original places are out of sight, re-assigned ones are in."""
    ids = torch.randint(3, zoo.VOCABULARY, (1, 120), generator=torch.Generator().manual_seed(4))

    def last(name: str, **settings) -> torch.Tensor:
        model = zoo.model(name)
        method = load_method("streamingllm", budget=32, **settings)
        cache = method.new_cache(model)
        for part in (ids[:, :100], *ids[:, 100:].split(1, 1)):
            out = model(input_ids=part, past_key_values=cache, use_cache=True).logits[:, -1]
        method.detach(model)
        return out

    assert not torch.allclose(last("llama"), last("llama", position="original"), atol=1e-3)
    assert not torch.allclose(last("mistral"), last("mistral", position="original"), atol=1e-3)
    torch.testing.assert_close(last("mistral", sinks=0), last("mistral", sinks=0, position="original"))


def test_rotating_needs_the_models_rotation():
    with pytest.raises(CacheError, match="position=cache needs the model's rotary embedding"):
        feed(new_layer(load_method("streamingllm")), *random_kv(8))


@pytest.mark.parametrize(("position", "counts"), [("original", [8, 14, 15, 15]), ("cache", [8, 11, 11, 11])])
def test_sinks_beside_a_sliding_window_are_held_only_where_positions_stay(position, counts):
    method = load_method("streamingllm", budget=20, sinks=4, position=position)
    assert [method.held(n, 12) for n in (8, 14, 40, 100)] == counts
