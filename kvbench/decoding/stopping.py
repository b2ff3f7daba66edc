"""Stopping criteria: when each row of a batch ends."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


class Stopping:
    """Collector of the new tokens of a batch, which decides when a row ends: at an EOS token or a stop string.

    Args:
        tokenizer: the model's tokenizer; None if neither `stop` nor :meth:`texts` is needed.

    Attributes:
        tokens: new tokens of each row, without the end-of-sequence token.
        ended: for each row, True if it has ended.
        finish: why each row ended: ``eos``, ``stop``, or ``length`` if it did not end by itself.

    Raises:
        ValueError: there are stop strings but no tokenizer.
    """

    def __init__(self, batch: int, eos_token_ids: Sequence[int], stop: Sequence[str], tokenizer: Any) -> None:
        if stop and tokenizer is None:
            raise ValueError("stop strings require a tokenizer, but tokenizer is None")
        self.eos, self.stop, self.tokenizer = frozenset(eos_token_ids), tuple(stop), tokenizer
        self.tokens: list[list[int]] = [[] for _ in range(batch)]
        self.finish = ["length"] * batch
        self.ended = [False] * batch
        # a stop string has at most as many tokens as bytes; a few more, as decoding may trim the text's start
        self._tail = max((len(s.encode()) for s in self.stop), default=0) + 8

    @property
    def all_ended(self) -> bool:
        """True if every row has ended."""
        return all(self.ended)

    def take(self, tokens: Sequence[int]) -> None:
        """Add one new token to each row; tokens of rows that have ended are ignored."""
        for row, token in enumerate(tokens):
            self.take_row(row, token)

    def take_row(self, row: int, token: int) -> None:
        """Add one new token to a row, unless the row has ended."""
        if self.ended[row]:
            return
        if token in self.eos:
            self._end(row, "eos")
            return
        self.tokens[row].append(token)
        if self.stop:
            tail = self.tokenizer.decode(self.tokens[row][-self._tail :], skip_special_tokens=True)
            if any(s in tail for s in self.stop):
                self._end(row, "stop")

    def _end(self, row: int, why: str) -> None:
        self.ended[row], self.finish[row] = True, why

    def texts(self) -> list[str]:
        """Return the text of each row up to its first stop string; texts are empty if there is no tokenizer."""
        if self.tokenizer is None:
            return [""] * len(self.tokens)
        texts = []
        for tokens in self.tokens:
            text = self.tokenizer.decode(tokens, skip_special_tokens=True)
            cuts = [at for s in self.stop if (at := text.find(s)) >= 0]
            texts.append(text[: min(cuts)] if cuts else text)
        return texts
