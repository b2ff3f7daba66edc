"""The largest number of tokens that a method stores without packing or dropping any of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from kvbench.errors import ConfigError


@dataclass(frozen=True)
class Reach:
    """Number of tokens up to which a method packs and drops none, and the hyper-parameter that decides this number.

    Args:
        key: configuration key of that hyper-parameter; ``method`` if no single one decides.
        value: value of that hyper-parameter; the name of the method's class if no single one decides.
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
