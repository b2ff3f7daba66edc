"""The methods: which token is stored in which format, and when it moves. One file each."""

from kvbench.methods.base import Method
from kvbench.methods.load import load_method, method_from_config

__all__ = ["Method", "load_method", "method_from_config"]
