"""The KV cache: quantized stores of keys and values, and the transformers ``Cache`` that is built on them."""

from kvbench.cache.bill import Bill, Parts
from kvbench.cache.cache import KVCache
from kvbench.cache.prompts import Prompts

__all__ = ["Bill", "KVCache", "Parts", "Prompts"]
