"""kvbench: accuracy, memory and time of KV-cache methods, measured on the same model, data and machine.

>>> method = kvbench.load_method("kivi", quantizer="int2")
>>> cache = method.new_cache(model)
>>> model.generate(**inputs, past_key_values=cache); cache.bill()
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

if sys.argv[:1] == ["-m"]:  # so it is while `python -m kvbench...` imports this package
    from kvbench.util.door import guard

    guard()

from kvbench.util.version import __version__

if TYPE_CHECKING:
    from kvbench.methods.load import load_method

__all__ = ["__version__", "load_method"]


def __getattr__(name: str) -> Any:
    """Import an attribute of the package when it is first used, so that `import kvbench` is fast."""
    if name == "load_method":
        from kvbench.methods.load import load_method

        return load_method
    raise AttributeError(f"module 'kvbench' has no attribute {name!r}")
