"""Bytes of every method's cache from its hyper-parameters and token counts alone: no model, no torch.

This states storage a second time, as formulas, for predictions; what a cache really holds is its bill
(:meth:`kvbench.cache.KVCache.bill`), and tests hold both equal to the byte. Three things depend on the text: how many
elements of a key pass KVQuant's calibrated thresholds (the calibrated share is assumed), and on layers with a sliding
window which of Cocktail's chunks are seen (the window is assumed to have the prompt's mix of widths) and in how many
heads a token that SnapKV, or an H2O that chooses once, has kept is hidden (all that are kept are assumed to be seen, up
to as many as the window shows).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from functools import singledispatch

from kvbench.errors import ConfigError
from kvbench.methods.atom import Atom
from kvbench.methods.base import Method, Side
from kvbench.methods.byte_parts import KVBytes, Setting, View
from kvbench.methods.cocktail import Cocktail
from kvbench.methods.eviction import tokens as allowed
from kvbench.methods.fp16 import FP16
from kvbench.methods.h2o import H2O
from kvbench.methods.hf_quantized import HFQuantized
from kvbench.methods.kivi import Kivi
from kvbench.methods.kvquant import KVQuant
from kvbench.methods.logquant import LogQuant, flushes
from kvbench.methods.partial_logquant import PartialLogQuant
from kvbench.methods.quantspec import QuantSpec
from kvbench.methods.sliding import CHUNK, whole
from kvbench.methods.snapkv import SnapKV
from kvbench.methods.streamingllm import StreamingLLM
from kvbench.quantizers.spec import FormatSpec


def kv_bytes(
    method: Method,
    tokens: int,
    *,
    layers: int,
    query_heads: int,
    heads: int,
    channels: int,
    prompt: int | None = None,
    width: int = 2,
    view: View = "all",
    chunks: tuple[int, int] | None = None,
    windows: Sequence[int | None] | None = None,
) -> KVBytes:
    """Bytes of one sequence's keys and values, all layers, after `tokens` tokens.

    Args:
        method: :func:`kvbench.load_method`.
        tokens: seen so far, the prompt included.
        layers, query_heads, heads, channels: of the model.
        prompt: tokens of the prompt; None: all of `tokens`. Some methods act on the prompt alone.
        width: bytes of an element in full precision.
        view: ``all`` is the bill; ``draft`` what QuantSpec's draft reads (the upper nibbles, or its own cache);
            ``target`` what its verification reads.
        chunks: Cocktail's INT2 and INT4 chunks; None: by its `split`, over the whole prompt.
        windows: for each layer its sliding window, or None; None: no layer has one.

    Raises:
        ConfigError: a method from outside this package, or a Cocktail of which nothing says how many chunks are INT2.
    """
    at = Setting(tokens, tokens if prompt is None else prompt, query_heads, heads, channels, width, 0, view, chunks)
    # layers are alike but for their windows, and for the first few of a QuantSpec that is told to keep them
    first = min(method.sensitive_layers, layers - 1) if isinstance(method, QuantSpec) else 0
    kinds = Counter((min(layer, first), windows[layer] if windows else None) for layer in range(layers))
    found = KVBytes()
    for (layer, window), count in kinds.items():
        found += layer_bytes(method, replace(at, layer=layer, window=window)) * count
    return found


@singledispatch
def layer_bytes(method: Method, at: Setting) -> KVBytes:
    """Bytes of one layer of one sequence."""
    raise ConfigError(
        "method",
        type(method).__name__,
        "has no formula for its bytes",
        allowed="the methods of conf/method",
        hint="run it and read cache.bill()",
    )


@layer_bytes.register
def _(method: FP16, at: Setting) -> KVBytes:
    return at.both(at.tokens - at.hidden)


@layer_bytes.register
def _(method: Kivi, at: Setting) -> KVBytes:
    here, found = at.tokens - whole(at.hidden, method.unit(), method.sinks), KVBytes()
    sinks = min(method.sinks, at.tokens) if here == at.tokens else 0
    for form, window in zip(method.formats(), method.windows(at.tokens), strict=True):
        exact = min(window, here - sinks)
        found += at.exact(sinks + exact)
        if not method.evict:
            found += at.packed(here - sinks - exact, form)
    return found


@layer_bytes.register
def _(method: Atom, at: Setting) -> KVBytes:
    assert method.quantizer is not None
    here = at.tokens - whole(at.hidden, CHUNK)
    return at.packed(here, method.quantizer.key) + at.packed(here, method.quantizer.value)


@layer_bytes.register
def _(method: LogQuant, at: Setting) -> KVBytes:
    assert method.quantizer is not None
    sinks = min(method.sinks, at.tokens)
    n = at.tokens - sinks
    demoted = flushes(n, method.W) * method.W
    if method.whole_window(at.window):
        return at.both(at.tokens - at.hidden)
    found = at.both(sinks + n - demoted)
    if method.evict:
        return found
    demoted -= method.passed(at.hidden)
    return (
        found
        + _demoted(method, method.key_format(), demoted, at)
        + _demoted(method, method.quantizer.value, demoted, at)
    )


@layer_bytes.register
def _(method: PartialLogQuant, at: Setting) -> KVBytes:
    assert method.quantizer is not None
    sinks = min(method.sinks, at.tokens)
    n = at.tokens - sinks
    if method.whole_window(at.window):
        return at.both(at.tokens - at.hidden)
    demoted, exact, gone = flushes(n, method.W) * method.W, method.exact_values(n), method.passed(at.hidden)
    found = at.exact(sinks + n - demoted) + at.exact(sinks + exact)
    found += at.packed(n - exact - gone, method.quantizer.value)
    return found + _demoted(method, method.key_format(), demoted - gone, at)


def _demoted(method: LogQuant, form: FormatSpec, count: int, at: Setting) -> KVBytes:
    """Tokens that left the window W at a time."""
    return at.packed(count, form, method.W if form.axis == "channel" else None)


@layer_bytes.register
def _(method: Cocktail, at: Setting) -> KVBytes:
    found, gone = KVBytes(), whole(at.hidden, CHUNK)
    share = max(at.prompt - gone, 0) / at.prompt  # of the chunks that are seen
    rest = at.tokens - gone
    for bits, chunks in zip((2, 4), chunk_counts(method, at), strict=True):
        count = (round(chunks * share) if gone else chunks) * method.chunk_size
        value = FormatSpec(bits=bits, group_size=method.value_group(at.channels), axis="token")
        key = FormatSpec(bits=bits, group_size=method.key_group, axis="channel")
        found += at.packed(count, key if method.key_axis == "channel" else value) + at.packed(count, value)
        rest -= count
    if rest < 0:
        raise ConfigError("chunks", at.chunks, f"hold more than {at.tokens} tokens")
    return found + at.both(rest)


def chunk_counts(method: Cocktail, at: Setting) -> tuple[int, int]:
    """INT2 and INT4 chunks: given, or by the shares of ``split`` over the chunks of the whole prompt."""
    if at.chunks is not None:
        return at.chunks
    if method.split is None:
        raise ConfigError(
            "method.split",
            None,
            "cocktail's bytes follow from its search in a text, unless shares are given",
            hint="FP16, INT4 and INT2 shares: split=[10,30,60]",
        )
    from kvbench.retrieval.search import by_rank

    widths = by_rank([0.0] * (at.prompt // method.chunk_size), method.split)
    return widths.count(2), widths.count(4)


@layer_bytes.register
def _(method: QuantSpec, at: Setting) -> KVBytes:
    own = layer_bytes(method.draft_method(), at) if method.own_cache and at.view != "target" else KVBytes()
    if method.own_cache and at.view == "draft":
        return own
    exact = method.target == "fp16" or at.layer < method.sensitive_layers
    gone = whole(at.hidden, method.unit(at.window, exact))
    if exact:
        return at.both(at.tokens - gone) + own
    assert method.quantizer is not None
    count = max(max(0, at.tokens // method.G - 1) * method.G - gone, 0)
    found = at.packed(count, method.quantizer.key) + at.packed(count, method.quantizer.value)
    if at.view == "draft" and method.draft == "upper" and method.gamma:
        found = KVBytes(codes=found.codes // 2, scales=found.scales)  # a byte has the upper and the lower nibble
    return found + at.both(at.tokens - gone - count) + own


@layer_bytes.register
def _(method: KVQuant, at: Setting) -> KVBytes:
    wide = at.heads * at.channels
    here = at.tokens - whole(at.hidden, method.unit(wide), method.first_tokens)
    first = min(method.first_tokens, at.tokens) if here == at.tokens else 0
    n, tables = here - first, 4 * 2**method.bits * (2 if method.q_norm else 1)
    codes = -(-n * wide * method.bits // 8)
    # thresholds are fp16 in every model; a value's range and offset are of a token, not of a head
    found = at.both(first) + KVBytes(2 * codes, 2 * tables + 2 * 2 * wide + 2 * n * at.param)
    if not method.outliers:
        return found
    # of the values of a token those outside of two quantiles (interpolated between order statistics)
    values = 2 * (int((wide - 1) * method.outliers / 2 + 1e-9) + 1)
    entries = n * values + round(n * wide * method.outliers)
    return found + KVBytes(window=entries * at.width, index=entries * 2)


@layer_bytes.register
def _(method: SnapKV, at: Setting) -> KVBytes:
    return at.both(min(allowed(method.budget, at.shown, method.window + 1) + at.generated, at.tokens - at.hidden))


@layer_bytes.register
def _(method: StreamingLLM, at: Setting) -> KVBytes:
    if method.evict == "steps":
        return at.both(method.held(at.tokens, at.window))
    grown = method.held(at.prompt, at.window) + at.generated
    return at.both(min(grown, method.most(at.tokens, at.window)))


@layer_bytes.register
def _(method: H2O, at: Setting) -> KVBytes:
    if method.evict == "prefill":
        return at.both(min(sum(method.split(at.shown)) + at.generated, at.tokens - at.hidden))
    held = sum(method.split(at.tokens - at.hidden))
    scores = at.query_heads // at.heads if method.group == "max" else 1
    return at.both(held) + KVBytes(index=4 * held * at.heads * scores)


@layer_bytes.register
def _(method: HFQuantized, at: Setting) -> KVBytes:
    found = KVBytes()
    sides: tuple[tuple[Side, int], ...] = (("key", method.axis_key), ("value", method.axis_value))
    for side, axis in sides:
        residual, recent = method.window(side)
        sinks, begun = min(method.sinks, at.tokens), min(method.sinks, at.prompt)
        tail = min(at.prompt - begun, recent) + at.tokens - sinks - (at.prompt - begun)
        if tail >= residual:  # quantized but for `recent`, whenever it is full
            tail = recent + (tail - residual) % (residual - recent)
        found += at.exact(sinks + tail) + _foreign(method, axis, at.tokens - sinks - tail, at)
    return found


def _foreign(method: HFQuantized, axis: int, count: int, at: Setting) -> KVBytes:
    """Whole tensors as quanto and hqq pack them: rows of groups, several rows to a byte (hqq's 3 bits: ten to 4)."""
    if not count:
        return KVBytes()
    if method.backend == "hqq" and axis == 1:
        count = -(-count // 8) * 8
    groups = at.heads * count * at.channels // method.group_size
    # axis 0 of quanto, axis 1 of hqq: a row is a group; else a column is
    by_row = axis == (0 if method.backend == "quanto" else 1)
    rows, columns = (groups, method.group_size) if by_row else (method.group_size, groups)
    if method.bits == 3:
        codes = -(-rows // 10) * 4 * columns
    else:
        codes = -(-rows * method.bits // 8) * columns
    return KVBytes(codes=codes, scales=2 * groups * at.width)
