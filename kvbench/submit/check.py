"""The bytes of a row, recomputed from its settings: a row whose bytes do not follow from them is refused."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import asdict
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
from kvbench.results.identity import content_digest, short_name
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
#: bytes of a full-precision number by dtype
WIDTHS: Mapping[str, int] = {"bfloat16": 2, "float16": 2, "float32": 4}
#: longest sequence, and most layers, heads and channels, that are counted
MOST_TOKENS, MOST_SIZE = 1 << 24, 1 << 10
#: what code that reads settings raises for those that no configuration has
_NONSENSE = (KvbenchError, TypeError, ValueError, LookupError, AttributeError, ArithmeticError, AssertionError)


def check_bytes(row: BoardRow) -> None:
    """Raise RowError, which names the file, if the bytes of a row do not follow from its model, method and tokens."""
    try:
        for problem in _wrong_bytes(row):
            raise RowError(problem)
    except RowError as error:
        raise RowError(f"{row.file}: {error}") from None
    except _NONSENSE as error:  # settings of unknown people, read by code that expects those of a configuration
        raise RowError(f"{row.file}: its settings make no sense: {str(error).partition(chr(10))[0][:200]}") from None


def _wrong_bytes(row: BoardRow) -> Iterator[str]:
    shape, method = row_shape(row), row_method(row)
    named = {"method": {**row.identity["method"]["method"], "layers": row.layers}, "quantizer": {"name": row.quantizer}}
    if row.name not in (short_name(named), f"{short_name(named)} dtype={row.dtype}"):
        yield f"name={row.name}: its settings are {short_name(named)}"
    counted, width = not unpredicted(method), row.cache.width
    samples = [sample for group in row.samples.values() for sample in group]
    bills: dict[tuple[int, int], KVBytes] = {}
    for name, _, prompt, tokens, stored in samples:
        if not 0 < tokens <= MOST_TOKENS:
            yield f"sample {name}: {tokens} tokens; expected 1 to {MOST_TOKENS:,}"
        elif counted and (prompt, tokens) not in bills:
            bills[prompt, tokens] = shape.bytes(method, tokens, prompt, width=width)
        if counted and bills[prompt, tokens].total != stored:
            where = f"{tokens} tokens, {prompt} of them in the prompt"
            yield (
                f"sample {name}: {stored:,} bytes for {where}; {row.name} on {row.model} takes "
                f"{bills[prompt, tokens].total:,}"
            )
    tokens = fmean(sample[3] for sample in samples)
    halves = {count: half_bytes(shape, count, width) for count in {sample[3] for sample in samples}}
    expected = {"fp16": fmean(halves[sample[3]] for sample in samples), "total": fmean(sample[4] for sample in samples)}
    if counted:
        expected |= {part: fmean(getattr(bills[s[2], s[3]], part) for s in samples) for part in PARTS}
    expected |= {"bits": 16 * expected["total"] / expected["fp16"], "per_token": expected["total"] / tokens}
    for part, number in expected.items():  # parts are rounded one by one
        slack = 1e-3 * number if part in ("bits", "per_token") else len(PARTS)
        if abs(getattr(row.bytes, part) - number) > slack:
            yield f"bytes.{part}: {getattr(row.bytes, part):,}; its samples and settings give {number:,.8g}"
    parts = [getattr(row.bytes, part) for part in PARTS]
    if min(parts) < 0 or abs(sum(parts) - row.bytes.total) > len(PARTS):
        yield f"bytes: parts of {', '.join(f'{part:,}' for part in parts)} are not those of {row.bytes.total:,}"


@cache
def _exact() -> Method:
    return load_method("fp16")


def half_bytes(shape: CacheShape, tokens: int, width: int) -> int:
    """Return the bytes of a sequence's keys, values and states in 16 bits; `width` is that of the model's numbers."""
    return shape.bytes(_exact(), tokens, tokens).total - shape.state + shape.state * 2 // width


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
    own, name = row.cache, base_name(row.model)
    sizes = (own.layers, own.query_heads, own.heads, own.channels)
    windows = all(window is None or window > 0 for window in own.windows)
    if min(sizes) < 1 or max(sizes) > MOST_SIZE or not windows or own.state < 0:
        raise RowError(f"cache: {own} makes no sense")
    if own.width != WIDTHS.get(row.dtype):
        raise RowError(f"cache.width={own.width}, dtype={row.dtype}: expected one of {dict(WIDTHS)}")
    if len(own.windows) != own.layers:
        raise RowError("cache.windows: expected a number of tokens or null for each layer")
    if name in group_options("model") and own != (known := cache_of(numbers_of(name), own.width)):
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
    given, formats = row.identity["method"]["method"], row.identity["method"]["quantizer"] or {}
    target = given["_target_"]
    if target not in methods():
        raise RowError(f"identity.method: {str(target)[:80]} is no method of conf/method")
    options = {key: value for key, value in given.items() if key not in HASHED}
    if _FILE.search(json.dumps([options, formats, row.quantizer])):
        raise RowError("identity.method: names a file; expected names of presets")
    shared = {"_target_": target, "takes": methods()[target].get("takes", ["none"]), "layers": row.layers}
    quantizer = {"name": row.quantizer, **{key: value for key, value in formats.items() if key != "version"}}
    method = method_from_config({**options, **shared}, quantizer)
    method.check(row.cache.channels)
    if content_digest(method.layer_identity()) != content_digest(given.get("layers") or []):
        raise RowError(f"layers={row.layers}: not the formats by layer of its settings")
    return method
