"""The largest number of tokens that a method stores without packing or dropping any of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from kvbench.errors import ConfigError


@dataclass(frozen=True)
class Reach:
    """The largest number of tokens that a method stores exactly, and the hyper-parameter that determines it.

    A run on shorter texts would not measure the method.

    Args:
        key: configuration key of that hyper-parameter, such as ``method.residual``; ``method`` if no single one
            determines the number.
        value: value of that hyper-parameter; the name of the method's class if `key` is ``method``.
        tokens: nothing is packed or dropped as long as at most this many tokens are cached.
        of_prompt: True if `tokens` counts only the tokens of the prompt.
    """

    key: str
    value: Any
    tokens: int
    of_prompt: bool = False

    def check(self, max_length: int) -> None:
        """Raise ConfigError if a sequence of `max_length` tokens is too short for any token to be packed or dropped."""
        if self.tokens >= max_length - 1:  # the last token is never cached
            raise ConfigError(
                self.key,
                self.value,
                f"nothing would be packed or dropped, because the first {self.tokens} tokens all stay "
                "in full precision, and "
                f"the model is limited to model.max_length={max_length}",
                hint=f"reduce {'the window' if self.key == 'method' else self.key}, or set method=fp16",
            )
