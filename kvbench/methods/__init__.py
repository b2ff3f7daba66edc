"""Methods: each decides which token is stored in which format, and when the format changes. One file each."""

from kvbench.methods.base import Method
from kvbench.methods.keep import KeepMethod
from kvbench.methods.load import load_method, method_from_config
from kvbench.methods.recency import RecencyMethod
from kvbench.methods.scored import ScoredMethod

__all__ = ["KeepMethod", "Method", "RecencyMethod", "ScoredMethod", "load_method", "method_from_config"]
