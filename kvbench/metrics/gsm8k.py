"""GSM8K: the number that an answer gives, as lm-evaluation-harness reads it, and as LogQuant's script does.

Source: lm-evaluation-harness, tasks/gsm8k/gsm8k.yaml (version 3.0): filters strict-match and flexible-extract, and
exact_match with its regexes to ignore. Stop strings act before.
"""

from __future__ import annotations

import re

#: what stands where no number was found
INVALID = "[invalid]"

_STRICT = re.compile(r"#### (\-?[0-9\.\,]+)")
_GOLD = re.compile(r"(?s).*#### *(-?[$0-9.,]*[0-9])")
_FLEXIBLE = re.compile(r"(-?[$0-9.,]{2,})|(-?[0-9]+)")
_IGNORED = tuple(re.compile(pattern) for pattern in (r",", r"\$", r"(?s).*#### ", r"\.$"))


def strict(response: str) -> str:
    """Return the number after the first ``#### `` (strict-match), or ``[invalid]``."""
    match = _STRICT.search(response)
    return match[1].strip() if match else INVALID


def gold(answer: str) -> str | None:
    """Return the number after the last ``#### `` of a reference, or None where there is none."""
    match = _GOLD.search(answer)
    return match[1] if match else None


def flexible(response: str) -> str:
    """Return the last thing that looks like a number (flexible-extract), or ``[invalid]``.

    One digit alone is taken too ("7"), with its full stop where that makes two characters ("7.").
    """
    numbers = _FLEXIBLE.findall(response)
    return next((part for part in numbers[-1] if part), INVALID).strip() if numbers else INVALID


def digits(response: str) -> str:
    """Return the digits after the last ``####``, or the word ``None``, as LogQuant's script does.

    Its faults are kept: it drops signs and points ("-5" is "5", "10.50" is "1050") and takes digits of whatever follows
    the answer ("#### 18 in 2 days" is "182"); 14 gold answers hold a comma and 2 are negative, so they are never right.
    """
    if "####" not in response:
        return "None"
    return "".join(filter(str.isdigit, response.split("####")[-1].strip()))


def matches(extracted: str, answer: str) -> bool:
    """Return True if an extracted number equals a GSM8K answer (its whole text, or the number alone).

    On both sides commas, dollar signs, everything up to ``#### `` and one full stop at the end are removed; the strings
    are compared without case, so 18 and 18.0 differ.
    """
    return _plain(extracted) == _plain(answer)


def score(response: str, answer: str) -> dict[str, float]:
    """Score one response against a GSM8K answer.

    Returns:
        ``score``, ``strict`` and ``flexible``, 0.0 or 1.0 each; ``score`` is the strict one, the harness's first.
    """
    exact = float(matches(strict(response), answer))
    return {"score": exact, "strict": exact, "flexible": float(matches(flexible(response), answer))}


def score_digits(response: str, answer: str) -> float:
    """Return LogQuant's score: :func:`digits` against the text after the answer's last ``####``."""
    return float(digits(response) == answer.split("####")[-1].strip())


def _plain(text: str) -> str:
    for pattern in _IGNORED:
        text = pattern.sub("", text)
    return text.lower()
