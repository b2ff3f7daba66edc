"""Tables of two compared runs: answers whose correctness changed, where answers part, and fidelity to fp16."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

#: headings of the table of answers
ANSWERS = ("answers", "flips", "lost", "won", "McNemar p", "B leaves A at", "never", "n")
#: headings of the table of fidelity
FIDELITY = ("fidelity to fp16", "A", "B", "B - A", "95 % (prompts drawn)", "n")
_NAMES = {
    "kld_mean": "KL mean, nats",
    "kld_median": "KL median, nats",
    "kld_p99_9": "KL 99.9 %, nats",
    "same_top": "same top",
}


def answer_lines(answers: Mapping[str, Mapping[str, Any]]) -> list[tuple[str, ...]]:
    """Return the cells of the table of answers as text, one line per task, or per task and length.

    An answer is correct if its score is 1. "B leaves A at" is the median, over the answers, of the first token that
    differs; if more than half of them never differ, it is more than their median length.
    """
    lines = []
    for key, entry in answers.items():
        flips, left = entry["flips"], entry["left"]
        counted: tuple[str, ...] = ("-", "-", "-", "-")  # answers without scores, such as continuations of a text
        if flips is not None:
            counted = (
                f"{100 * flips['flips']:.1f} %",
                str(flips["lost"]),
                str(flips["won"]),
                f"{flips['p']:.3g}",
            )
        parting = ("-", "-")
        if left is not None:
            middle = f"> {left['compared']:g}" if left["median"] is None else f"{left['median']:g}"
            parting = (middle, f"{100 * left['never']:.0f} %")
        count = flips["n"] if flips else left["n"]
        lines.append((key, *counted, *parting, str(count)))
    return lines


def fidelity_lines(fidelity: Mapping[str, Mapping[str, Mapping[str, float]]]) -> list[tuple[str, ...]]:
    """Return the cells of the table of fidelity as text, one line per measure of each task, or task and length."""
    lines = []
    for key, figures in fidelity.items():
        for name, entry in figures.items():
            numbers = (f"{entry[side]:.4g}" for side in ("a", "b"))
            interval = f"{entry['low']:+.3g} to {entry['high']:+.3g}"
            lines.append((f"{key} {_NAMES[name]}", *numbers, f"{entry['diff']:+.3g}", interval, str(entry["n"])))
    return lines
