"""The figures of an analysis restated with whole matrices in double precision, and layers to try them on."""

import math

import torch

from kvbench.analysis.bins import Bins
from kvbench.attention import prefill
from kvbench.methods import load_method
from tests import zoo

BINS = Bins(sinks=2, doublings=6)
METHODS = {
    "fp16": ("fp16", {}),
    "kivi": ("kivi", {"quantizer": "int2", "residual": 32, "sinks": 3}),
    "kivi_evict": ("kivi", {"quantizer": "int2", "residual": 32, "evict": True}),
    "logquant": ("logquant", {"window": 12}),
    "partial_logquant": ("partial_logquant", {"window": 12}),
    "atom": ("atom", {}),
    "snapkv": ("snapkv", {"budget": 40, "window": 8}),
    "h2o": ("h2o", {"budget": 40, "evict": "prefill"}),
    "streamingllm": ("streamingllm", {"budget": 40, "position": "original"}),
}


def layer_of(name, keys, values, prompt, window=None):
    """A layer of one row that has received ``[1, H, T, D]``: a prompt, then one token at a time."""
    base, settings = METHODS[name]
    layer = zoo.new_layer(load_method(base, **settings), [0])
    layer.window = window
    for first, last in [(0, prompt), *((i, i + 1) for i in range(prompt, keys.shape[2]))]:
        k, v = keys[:, :, first:last], values[:, :, first:last]
        wanted = layer.method.observe_prompt if not first else 0
        if wanted:
            k, v = layer.update(k, v)[0].claim()
            queries = torch.randn(1, 2 * k.shape[1], prompt, k.shape[3], generator=torch.Generator().manual_seed(5))
            mask = prefill.rows_of(torch.ones(1, prompt, dtype=torch.bool), 0, prompt, prompt)
            scores = (queries @ k.repeat_interleave(2, 1).transpose(-1, -2)).masked_fill(~mask, -math.inf)
            seen = scores.softmax(-1)
            layer.observed = seen[:, :, -wanted:] if wanted > 0 else seen.sum(2, keepdim=True)
            layer.end_chunk(*layer.extend_prompt(k, v))
        else:
            zoo.feed(layer, k, v)
    return layer


def softmax(query, keys, visible, scaling, softcap=None, sinks=None):
    """Probabilities ``[Hq, q, n]`` in double precision; `visible` is ``[q, n]``, or ``[Hq, q, n]``."""
    scores = query.double() * scaling @ keys.double().transpose(-1, -2)
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(~visible, -math.inf)
    if sinks is None:
        return scores.softmax(-1)
    column = sinks.double()[:, None, None].expand(*scores.shape[:2], 1)
    return torch.cat([scores, column], -1).softmax(-1)[..., :-1]


def bin_of(token, query, bins):
    """The bin of a token, by the words of the docstring."""
    if token < bins.sinks:
        return token
    distance = query - token
    return bins.sinks + (0 if distance <= 0 else min(int(math.log2(distance)) + 1, bins.doublings))


def by_bin(x, columns, bins):
    """Sums ``[Hq, q, K]`` of ``x`` ``[Hq, q, n]`` over the tokens of each bin."""
    index = torch.tensor([[bin_of(token, query, bins) for token in range(x.shape[2])] for query in columns.tolist()])
    return x.new_zeros(*x.shape[:2], bins.count).scatter_add_(2, index.expand_as(x), x)


def visible(columns, tokens, window=None):
    """True where a query sees a token, ``[q, n]``."""
    distance = columns[:, None] - torch.arange(tokens)[None]
    return (distance >= 0) & (distance < (window or tokens + 1))


def restated(query, columns, keys, values, layer, bins, scaling, *, window=None, softcap=None, sinks=None):
    """All figures of :class:`Errors`, and p, from whole matrices; `query` is ``[Hq, q, D]``, keys ``[H, n, D]``."""
    group, n = len(query) // len(keys), keys.shape[1]
    keys, values = keys.repeat_interleave(group, 0), values.repeat_interleave(group, 0)
    sees = visible(columns, n, window)
    p = softmax(query, keys, sees, scaling, softcap, sinks)
    decoded = [
        torch.cat([s.read(slice(0, 1), 0, s.lengths[0], torch.float32) for s in store.segments], 2)[0].double()
        for store in layer.stores()
    ]
    held_keys, held_values = (x.repeat_interleave(group, 0) for x in decoded)
    slots = layer.positions(0).expand(layer.heads, -1).repeat_interleave(group, 0)
    over_slots = softmax(query, held_keys, sees[:, slots].transpose(0, 1), scaling, softcap, sinks)
    q = torch.zeros_like(p).scatter_(2, slots[:, None].expand_as(over_slots), over_slots)
    exact = torch.cat([torch.full((s.lengths[0],), not s.packed) for s in layer.stores()[0].segments])
    full = torch.zeros(len(query), n, dtype=torch.bool).scatter_(1, slots, exact.expand(len(query), -1))
    present = torch.zeros_like(full).scatter_(1, slots, torch.ones_like(slots, dtype=torch.bool))
    full, present = (x[:, None] & sees for x in (full, present))
    dense = torch.zeros(len(query), n, values.shape[-1], dtype=torch.float64)
    dense.scatter_(1, slots[..., None].expand(-1, -1, values.shape[-1]), held_values)
    norm = (p @ values.double()).norm(dim=-1)
    difference = q[..., None] * dense[:, None] - p[..., None] * values.double()[:, None]  # [Hq, q, n, Dv]
    parts = by_bin(difference.permute(0, 3, 1, 2).flatten(0, 1), columns, bins)
    parts = parts.unflatten(0, (len(query), -1)).permute(0, 2, 3, 1)  # [Hq, q, K, Dv]
    terms = torch.where(q > 0, q * (q.clamp(min=1e-300).log() - p.clamp(min=1e-300).log()), 0.0)
    return {
        "p": p,
        "mass": by_bin(q, columns, bins),
        "l1": by_bin((p - q).abs(), columns, bins),
        "kl": by_bin(terms, columns, bins),
        "lost": by_bin(p * ~present, columns, bins),
        "coverage": by_bin(p * full, columns, bins),
        "full": by_bin(full.double(), columns, bins),
        "output": (q @ dense - p @ values.double()).norm(dim=-1) / norm,
        "parts": parts.norm(dim=-1) / norm[..., None],
    }
