"""Number of tokens up to which a method changes nothing."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from kvbench.errors import ConfigError


@dataclass(frozen=True)
class Reach:
    """Longest text that a method keeps exact as a whole.

    Args:
        key, value: the hyper-parameter that sets it; ``method`` and the method's name if it is not a single one.
        tokens: all tokens are exact as long as no more than these are cached.
        of_prompt: count the prompt's tokens alone.
    """

    key: str
    value: Any
    tokens: int
    of_prompt: bool = False

    def check(self, max_length: int) -> None:
        """Raise ConfigError if a model of `max_length` tokens never holds one that the method packs or drops."""
        if self.tokens >= max_length - 1:  # the last token is never cached
            raise ConfigError(
                self.key,
                self.value,
                f"nothing would be packed or dropped: up to {self.tokens} tokens all stay exact, and the model takes "
                f"model.max_length={max_length}",
                hint=f"a smaller {'window' if self.key == 'method' else self.key}, or method=fp16",
            )
