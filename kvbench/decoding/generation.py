"""Result of a generation, and notifications of its phases."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

from kvbench.decoding.round_times import Round


class Observer(Protocol):
    """Object that is notified when a phase of a generation begins, for example a memory meter.

    The phases are, in order, ``prefill``, ``likelihood`` (only with reference answers), ``decode``, ``steps`` (the
    part of ``decode`` after a capture) and ``end``.
    """

    def phase(self, name: str) -> None:
        """Receive the notification that the phase `name` begins."""
        ...


@dataclass
class Generation:
    """Result of a generation for a batch: new tokens and texts, times, and the way decode steps were run.

    Args:
        tokens: new tokens of each row, without the end-of-sequence token.
        text: text of the new tokens of each row, up to the first stop string; empty without a tokenizer.
        finish: why each row ended: ``eos``, ``stop`` or ``length``.
        ttft_s: seconds from the start of the prefill to the first token.
        step_s: seconds of each decode step after the first token, or of each round of speculation. The first entry may
            include compilation and allocation, so results report it separately.
        prompt_tokens: number of prompt tokens of each row, without padding.
        answer_nll: for each row a pair: negative log-likelihood of its reference answer in nats, and number of tokens
            in this answer. Empty without reference answers.
        rounds: counts and time of each round of speculation; empty without speculation.
        stepping: how decode steps were run, by replays of a CUDA graph or eagerly: ``graph``, ``graph, compiled``,
            ``graph (not compiled: REASON)``, ``eager`` or ``eager (REASON)``.
        capture_s: seconds spent on warm-ups and on capturing CUDA graphs; not included in any other figure.
    """

    tokens: list[list[int]]
    text: list[str]
    finish: list[str]
    ttft_s: float
    step_s: list[float]
    prompt_tokens: list[int]
    answer_nll: list[tuple[float, int]] = field(default_factory=list)
    rounds: list[Round] = field(default_factory=list)
    stepping: str = "eager"
    capture_s: float = 0.0


def tell(observer: Observer | None, phase: str) -> None:
    """Notify `observer` that a phase begins; do nothing if `observer` is None."""
    if observer is not None:
        observer.phase(phase)
