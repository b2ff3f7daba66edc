"""The largest number of tokens of which a method packs and drops none."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from kvbench.errors import ConfigError


@dataclass(frozen=True)
class Reach:
    """Largest number of tokens that all stay exact, and the hyper-parameter that decides it.

    Args:
        key, value: configuration key and value of that hyper-parameter; ``method`` and the name of the method's class
            if no single one decides.
        tokens: everything is exact as long as at most this many tokens are cached.
        of_prompt: `tokens` counts only the prompt's tokens.
    """

    key: str
    value: Any
    tokens: int
    of_prompt: bool = False

    def check(self, max_length: int) -> None:
        """Raise ConfigError if the method would pack or drop nothing in sequences of up to `max_length` tokens."""
        if self.tokens >= max_length - 1:  # the last token is never cached
            raise ConfigError(
                self.key,
                self.value,
                f"nothing would be packed or dropped, because the first {self.tokens} tokens all stay "
                "in full precision, and "
                f"the model is limited to model.max_length={max_length}",
                hint=f"reduce {'the window' if self.key == 'method' else self.key}, or set method=fp16",
            )
