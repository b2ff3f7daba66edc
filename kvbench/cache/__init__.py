"""Stores of keys and values, and the transformers cache over them."""

from kvbench.cache.bill import Bill, Parts
from kvbench.cache.cache import KVCache
from kvbench.cache.prompts import Prompts

__all__ = ["Bill", "KVCache", "Parts", "Prompts"]
