"""GSM8K: extraction and scoring of the final number, as in lm-evaluation-harness and as in LogQuant's script.

Source: lm-evaluation-harness, tasks/gsm8k/gsm8k.yaml (version 3.0): the filters strict-match and flexible-extract, and
exact_match with its regexes_to_ignore. Responses must already be cut at the stop strings.
"""

from __future__ import annotations

import re

#: result of an extraction that found no number
INVALID = "[invalid]"

_STRICT = re.compile(r"#### (\-?[0-9\.\,]+)")
_GOLD = re.compile(r"(?s).*#### *(-?[$0-9.,]*[0-9])")
_FLEXIBLE = re.compile(r"(-?[$0-9.,]{2,})|(-?[0-9]+)")


def strict(response: str) -> str:
    """Return the number after the first ``#### ``, or ``[invalid]``: lm-evaluation-harness's filter strict-match."""
    match = _STRICT.search(response)
    return match[1].strip() if match else INVALID


def gold(answer: str) -> str | None:
    """Return the number after the last ``####`` of a reference answer, or None if there is no such number."""
    match = _GOLD.search(answer)
    return match[1] if match else None


def flexible(response: str) -> str:
    """Return the last number in a response, or ``[invalid]``: lm-evaluation-harness's filter flexible-extract.

    Its pattern for numbers is loose: the full stop that ends a sentence, for example, stays with the number ("7.").
    """
    numbers = _FLEXIBLE.findall(response)
    return next((part for part in numbers[-1] if part), INVALID).strip() if numbers else INVALID


def digits(response: str) -> str:
    """Return all digits after the last ``####`` of a response, joined into one string, as LogQuant's script does.

    The faults of the script are reproduced. It drops signs and decimal points ("-5" gives "5", "10.50" gives "1050"),
    and it also collects digits from the text after the answer ("#### 18 in 2 days" gives "182"). No response can match
    the 14 reference answers with a comma and the 2 negative ones, because only responses are reduced to digits. Without
    ``####``, the result is the string ``None``.
    """
    if "####" not in response:
        return "None"
    return "".join(filter(str.isdigit, response.split("####")[-1].strip()))


def matches(extracted: str, answer: str) -> bool:
    """Return True if a number from :func:`strict` or :func:`flexible` equals that of a GSM8K answer.

    The answer may be whole or only its number. Commas, dollar signs, everything up to the last ``#### ``, and a final
    full stop are removed from both. They are then compared as strings, ignoring case, so 18 and 18.0 differ.
    """
    return _without_ignored(extracted) == _without_ignored(answer)


def score_gsm8k(response: str, answer: str) -> dict[str, float]:
    """Score a response as lm-evaluation-harness does: ``strict``, ``flexible``, and ``score``, equal to ``strict``."""
    exact = float(matches(strict(response), answer))
    return {"score": exact, "strict": exact, "flexible": float(matches(flexible(response), answer))}


def score_digits(response: str, answer: str) -> float:
    """Return LogQuant's score: 1.0 if :func:`digits` equals the text after the answer's last ``####``, else 0.0."""
    return float(digits(response) == answer.split("####")[-1].strip())


def _without_ignored(text: str) -> str:
    r"""Return a text without what the patterns ``,``, ``\$``, ``(?s).*#### `` and ``\.$`` match, in lower case."""
    plain = text.replace(",", "").replace("$", "")
    # the third pattern itself would take quadratic time on a long text without ####
    return re.sub(r"\.$", "", plain.rpartition("#### ")[2]).lower()
