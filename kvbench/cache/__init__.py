"""The KV cache: quantized stores of keys and values, and the transformers ``Cache`` that is built on them."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvbench.cache.bill import Bill, Parts
    from kvbench.cache.cache import KVCache
    from kvbench.cache.prompts import Prompts

__all__ = ["Bill", "KVCache", "Parts", "Prompts"]

_HOMES = {"Bill": "bill", "Parts": "bill", "KVCache": "cache", "Prompts": "prompts"}


def __getattr__(name: str) -> Any:
    """Import a name on first use, so that methods, which derive from :class:`Policy`, are checked without torch."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
