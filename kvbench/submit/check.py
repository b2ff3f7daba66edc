"""The bytes of a row, recomputed from its settings: a row whose bytes do not follow from them is refused."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import asdict, fields
from functools import cache
from statistics import fmean
from typing import Any

from kvbench.bench.choices import numbers_of
from kvbench.bench.prediction import CacheShape
from kvbench.errors import KvbenchError
from kvbench.methods.base import Method
from kvbench.methods.byte_parts import KVBytes
from kvbench.methods.load import load_method, method_from_config
from kvbench.models.outliers import base_name
from kvbench.results.aggregate import PARTS
from kvbench.results.board import BoardCache, BoardRow, RowError
from kvbench.results.identity import short_name
from kvbench.util.confdir import group_options, read_choice

#: hyper-parameters that an identity holds as a digest of a file, or in another form than the class takes
HASHED = ("calibration", "encoder", "layers", "rotation", "version", "_target_")
#: methods whose bytes depend on the text, by the name of their class, with the reason
MEASURED = {
    "KVQuant": "the number of outliers depends on the text",
    "Cocktail": "the bits of each chunk depend on the text",
}
#: what a name of a preset never has: a folder, or the ending of a file that can be loaded
_FILE = re.compile(r"[/\\]|\.(py|ya?ml|safetensors)\b")
#: longest sequence and most layers that are counted
MOST_TOKENS, MOST_LAYERS = 1 << 24, 1000


def check_bytes(row: BoardRow) -> None:
    """Raise RowError if the bytes of a row do not follow from its model, its method and its tokens."""
    shape, method = row_shape(row), row_method(row)
    named = {"method": {**row.identity["method"]["method"], "layers": row.layers}, "quantizer": {"name": row.quantizer}}
    if not f"{row.name} ".startswith(f"{short_name(named)} "):
        raise RowError(f"name={row.name}: its settings are {short_name(named)}")
    reason = unpredicted(method)
    totals, halves = list[KVBytes](), list[int]()
    known: dict[tuple[int, int], tuple[KVBytes, int]] = {}
    for key, group in row.samples.items():
        for name, _, prompt, tokens, stored in group:
            if not 0 < tokens <= MOST_TOKENS:
                raise RowError(f"samples.{key}.{name}: {tokens} tokens; expected 1 to {MOST_TOKENS:,}")
            if (prompt, tokens) not in known:
                mine = KVBytes() if reason else shape.bytes(method, tokens, prompt, width=row.cache.width)
                known[prompt, tokens] = mine, half_bytes(shape, tokens, row.cache.width)
            mine, half = known[prompt, tokens]
            if reason is None and mine.total != stored:
                raise RowError(
                    f"samples.{key}.{name}: {stored:,} bytes for {tokens} tokens, {prompt} of them in the prompt; "
                    f"{row.name} on {row.model} takes {mine.total:,}"
                )
            totals.append(mine)
            halves.append(half)
    stored_bytes = [sample[4] for group in row.samples.values() for sample in group]
    expected = {"fp16": round(fmean(halves)), "total": round(fmean(stored_bytes))}
    if reason is None:
        expected |= {part: round(fmean(getattr(one, part) for one in totals)) for part in PARTS}
    for part, number in expected.items():
        if abs(getattr(row.bytes, part) - number) > len(PARTS):  # parts are rounded one by one
            raise RowError(f"bytes.{part}: {getattr(row.bytes, part):,}; its samples and settings give {number:,}")
    tokens = sum(sample[3] for group in row.samples.values() for sample in group) / len(totals)
    for name, ratio in (("bits", 16 * row.bytes.total / row.bytes.fp16), ("per_token", row.bytes.total / tokens)):
        if abs(getattr(row.bytes, name) - ratio) > 1e-3 * ratio:
            raise RowError(f"bytes.{name}: {getattr(row.bytes, name):g}; its bytes and tokens give {ratio:g}")


def half_bytes(shape: CacheShape, tokens: int, width: int) -> int:
    """Return the bytes of a sequence's keys, values and states in 16 bits; `width` is that of the model's numbers."""
    return shape.bytes(load_method("fp16"), tokens, tokens).total - shape.state + shape.state * 2 // width


def cached_tokens(shape: CacheShape, prompt: int, halves: int, width: int) -> int:
    """Return the number of tokens, at least those of the prompt, whose keys and values take `halves` bytes in 16 bits.

    Raises:
        KvbenchError: there is no such number.
    """
    low, high = prompt, MOST_TOKENS
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if half_bytes(shape, middle, width) >= halves else (middle + 1, high)
    if half_bytes(shape, low, width) != halves:
        raise KvbenchError(f"no number of tokens after {prompt} takes {halves:,} bytes in 16 bits on this model")
    return low


def unpredicted(method: Method) -> str | None:
    """Return why the bytes of a method are taken as they were measured; None if they are recomputed."""
    name = type(method).__name__
    if name in MEASURED:
        return MEASURED[name]
    return None if type(method).layer_bytes is not Method.layer_bytes else "the method has no formula"


def cache_of(numbers: Mapping[str, Any], width: int) -> BoardCache:
    """Return the dimensions of a cache from a model's configuration; `width` is the bytes of a full-precision number.

    Raises:
        ConfigError: kvbench does not support the model, or a dimension is missing.
    """
    shape = asdict(CacheShape.of(numbers, width))
    return BoardCache(width=width, **{**shape, "windows": list(shape["windows"])})


def row_shape(row: BoardRow) -> CacheShape:
    """Return the dimensions of a row's cache; for a model of conf/model they must be those of its description.

    Raises:
        RowError: they are not, or make no sense.
    """
    own = row.cache
    sizes = (own.layers, own.query_heads, own.heads, own.channels)
    if not (min(sizes) > 0 and max(sizes) <= MOST_LAYERS * 64 and own.layers <= MOST_LAYERS):
        raise RowError(f"cache: {own.layers} layers, {own.heads} heads of {own.channels} channels make no sense")
    if len(own.windows) != own.layers or any(window is not None and window < 1 for window in own.windows):
        raise RowError("cache.windows: expected a number of tokens or null for each layer")
    if own.width not in (2, 4) or own.state < 0:
        raise RowError(f"cache: width={own.width}, state={own.state}; expected 2 or 4, and 0 or more")
    name = base_name(row.model)
    if name in group_options("model"):
        known = cache_of(numbers_of(name), own.width)
        if own != known:
            raise RowError(f"cache: {own}; {name} has {known}")
    return cache_shape(own)


def cache_shape(cache: BoardCache) -> CacheShape:
    """Return the dimensions of a row's cache as the predictor takes them."""
    sizes = {name: value for name, value in asdict(cache).items() if name != "width"}
    return CacheShape(**{**sizes, "windows": tuple(cache.windows)})


@cache
def methods() -> Mapping[str, Mapping[str, Any]]:
    """Return the presets of conf/method by the name of their class."""
    presets = map(read_choice, group_options("method").values())
    return {str(preset["_target_"]): preset for preset in presets}


def row_method(row: BoardRow) -> Method:
    """Return the method of a row, from its identity; only classes of conf/method are loaded.

    Raises:
        RowError: the settings are not those of a method.
    """
    given = row.identity["method"].get("method")
    target = given.get("_target_") if isinstance(given, dict) else None
    if not isinstance(given, dict) or not isinstance(target, str) or target not in methods():
        raise RowError(f"identity.method: {str(target)[:80]} is no method of conf/method")
    formats = row.identity["method"].get("quantizer") or {}
    options = {key: value for key, value in given.items() if key not in HASHED}
    if _FILE.search(json.dumps([options, formats, row.quantizer])):
        raise RowError("identity.method: names a file; expected names of presets")
    shared = {"_target_": target, "takes": methods()[target].get("takes", ["none"]), "layers": row.layers}
    quantizer = {"name": row.quantizer, **{key: value for key, value in formats.items() if key != "version"}}
    try:
        method = method_from_config({**options, **shared}, quantizer)
        method.check(row.cache.channels)
        method.by_layer(row.cache.layers)
    except (KvbenchError, TypeError, ValueError) as error:
        raise RowError(f"identity.method: {str(error).partition(chr(10))[0]}") from None
    own = method.hyperparameters() | {"layers": method.layer_identity()}
    other = sorted(key for key, value in options.items() if key in own and _plain(own[key]) != _plain(value))
    if other or _plain(method.layer_identity()) != _plain(given.get("layers") or []):
        raise RowError(f"identity.method: {', '.join(other) or 'layers'} cannot be read again")
    unknown = options.keys() - {field.name for field in fields(method)}
    if unknown:
        raise RowError(f"identity.method: {', '.join(sorted(unknown))}: {target} has no such key")
    return method


def _plain(value: Any) -> Any:
    return [_plain(item) for item in value] if isinstance(value, (list, tuple)) else value
