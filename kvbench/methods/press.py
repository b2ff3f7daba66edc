"""Eviction by a press of kvpress, or by any object with its method ``score``; the remaining tokens are packed.

kvpress 0.5.5 (NVIDIA, Apache-2.0) evicts but does not pack, and requires transformers below 5.3, so it cannot be
installed next to kvbench; importing it also wraps every attention function of transformers. This class therefore takes
any object with kvpress's method ``score(module, hidden_states, keys, values, attentions, kwargs)``, such as a copy of a
press. The press sees the keys after RoPE, the values, and, with ``attentions=true``, the attention of the prompt. It
gets None for the module and for the hidden states.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

from kvbench.errors import CacheError, ConfigError, ModelError
from kvbench.methods.keep import KeepMethod

if TYPE_CHECKING:
    import torch


@dataclass(kw_only=True)
class Press(KeepMethod):
    """Method that keeps prompt tokens by the score of a press, and packs them in the format of any quantizer.

    The press's own ``compression_ratio`` has no effect: `keep` says how many tokens remain. Unlike in kvpress, the kept
    tokens are stored in the order of their positions.

    Args:
        press: class of the press as ``MODULE.CLASS``; the module must be importable.
        options: arguments of the class.
        attentions: True to hand the press the attention of the prompt, summed over all queries, ``[B, Hq, 1, n]``.
        newest: number of newest prompt tokens that are kept whatever their scores.
    """

    press: str = "kvpress.KnormPress"
    options: dict[str, Any] = field(default_factory=dict)
    attentions: bool = False
    newest: int = 0

    @property
    def observe_prompt(self) -> int:  # type: ignore[override]
        """-1 with `attentions`: attention summed over all queries of the prompt is observed; else 0, none is."""
        return -1 if self.attentions and self.drops_tokens else 0

    def check(self, head_dim: int | None = None, max_length: int | None = None) -> None:
        """Raise ConfigError if `press` is not of the form MODULE.CLASS, or if :meth:`KeepMethod.check` fails."""
        if not all(part.isidentifier() for part in self.press.split(".")) or "." not in self.press:
            raise ConfigError(
                "method.press", self.press, "is not a class as MODULE.CLASS", hint="method.press=mine.Press"
            )
        super().check(head_dim, max_length)

    def ready(self) -> None:
        """Raise ModelError if the press cannot be imported or made."""
        _ = self.scorer

    @cached_property
    def scorer(self) -> Any:
        """The press.

        Raises:
            ModelError: the class does not exist, does not accept the options, or has no method ``score``.
        """
        module, _, name = self.press.rpartition(".")
        try:
            press = getattr(importlib.import_module(module), name)(**self.options)
        except (ImportError, AttributeError, TypeError) as error:
            raise ModelError(
                f"method.press={self.press} cannot be made ({type(error).__name__}: {error}).\n"
                "  hint: name a class in a module that Python finds; kvpress itself requires transformers below 5.3"
            ) from error
        if not callable(getattr(press, "score", None)):
            raise ModelError(
                f"method.press={self.press} has no method score; only presses that score tokens can be used"
            )
        return press

    def score(self, keys: torch.Tensor, values: torch.Tensor, attention: torch.Tensor | None) -> torch.Tensor:
        """Return the scores of the press, ``[B, H, n]``; arguments as for :meth:`Scorer.score`.

        Raises:
            CacheError: the press failed, for example because it reads the module or the hidden states.
        """
        try:
            scores: torch.Tensor = self.scorer.score(None, None, keys, values, attention, {})
        except (AttributeError, TypeError, KeyError) as error:
            raise CacheError(
                f"{self.press}.score failed ({type(error).__name__}: {error}).\n  hint: a press can read keys and "
                "values here, and with method.attentions=true the attention, but not the module or its hidden states"
            ) from error
        return scores
