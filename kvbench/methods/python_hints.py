"""Configuration errors for users of the Python API, whose hints are Python arguments, not command-line overrides."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from kvbench.errors import ConfigError

if TYPE_CHECKING:
    from kvbench.quantizers.spec import QuantizerSpec


def for_python(error: ConfigError, quantizer: QuantizerSpec | None) -> ConfigError:
    """Return a copy of a configuration error with a hint for Python: arguments of ``kvbench.load_method``.

    Args:
        error: an error whose keys are those of the command line (``method.KEY``, ``quantizer.SIDE.KEY``).
        quantizer: the quantizer in use, or None. If the error is about one of its group sizes, the hint shows a dict to
            pass as ``quantizer``, with all of its formats and a group size that works.
    """
    side, _, last = error.key.removeprefix("quantizer.").partition(".")
    group = error.hint.partition("=")[2]
    if not error.key.startswith("quantizer.") or last != "group_size" or quantizer is None or not group:
        hint = re.sub(r"\b(?:method|quantizer)\.(\w+=)", r"\1", error.hint)
    else:
        forms = {}
        for name, form in (("key", quantizer.key), ("value", quantizer.value)):
            size = (int(group) if group.isdecimal() else group) if name == side else form.group_size
            forms[name] = {"bits": form.bits, "group_size": size, "axis": form.axis}
            if form.kind != "affine":
                forms[name]["kind"] = form.kind
        hint = f"{error.hint}; in Python, pass quantizer={forms}"
    return ConfigError(error.key, error.value, error.problem, allowed=error.allowed, hint=hint)
