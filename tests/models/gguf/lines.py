"""Lines whose tokens are compared with llama.cpp's: of WikiText-2, of Python source, and generated ones.

Imports the standard library alone: the script that makes the golden file runs in another environment.
"""

from __future__ import annotations

import gzip
import hashlib
import random
from collections import Counter
from collections.abc import Sequence
from functools import cache
from itertools import pairwise
from pathlib import Path

#: lines of each kind
COUNT = 1000
#: pieces of generated lines: digits, spaces, letters of several scripts, signs, emoji with joiners, marks that combine
PIECES = (
    *"0123456789",
    *(" ", "  ", "   ", "\t", "\t\t", "\u00a0", "\u3000", "\u200b"),
    *("12", "2024", "3.14", "1,000", "0x1F", "10%", "½", "²", "٣", "४", "Ⅳ", "１２"),
    *("the", "The", " and", "it's", "I'LL", "we've", "naïve", "e\u0301", "Straße", "ß", "İ", "ﬁ"),
    *("мир", "Ελλάς", "שלום", "سلام", "हिन्दी", "ไทย", "日本語", "中文", "한국어", "ñandú"),
    *("!", "...", "—", "“", "”", "«", "(", ")", "[", "]", "{", "}", "->", "==", "//", "_", "#", "@", "\\"),
    *("🙂", "👩‍👩‍👧", "🇫🇷", "✓", "∑", "≤", "\ufeff", "~"),
)


def generated() -> list[str]:
    """Lines of digits, spaces and Unicode, the same on every machine and Python."""
    rng = random.Random(20)
    return [
        "".join(PIECES[int(rng.random() * len(PIECES))] for _ in range(1 + int(rng.random() * 24)))
        for _ in range(COUNT)
    ]


def alphabet() -> list[str]:
    """The 256 characters by which byte-level vocabularies write bytes: GPT-2's table."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    moved = iter(range(256, 512))
    return [chr(byte) if byte in plain else chr(next(moved)) for byte in range(256)]


@cache
def vocabulary() -> tuple[list[str], list[str]]:
    """Tokens and merges that join whatever often stands side by side in the generated lines, across every border.

    With the vocabulary of a trained model, rules that differ may give the same tokens: SmolLM's joins no digits.
    """
    letters = alphabet()
    pairs: Counter[tuple[str, str]] = Counter()
    for line in generated():
        written = [letters[byte] for byte in line.encode()]
        pairs.update(pairwise(written))
        pairs.update(("".join(written[place : place + 2]), third) for place, third in enumerate(written[2:]))
    often = sorted(pairs, key=lambda pair: (len(pair[0]), -pairs[pair], pair))
    two, three = (
        [pair for pair in often if len(pair[0]) == 1][:1500],
        [pair for pair in often if len(pair[0]) == 2][:1500],
    )
    known = set(map("".join, two))
    kept = [*two, *(pair for pair in three if pair[0] in known)]
    return [*letters, *dict.fromkeys(map("".join, kept))], [" ".join(pair) for pair in kept]


def real(data: str | Path) -> dict[str, list[str]]:
    """The first lines that are not blank of WikiText-2's raw test split, and of Python source, in a folder of data."""
    files = {"wikitext2": "wikitext2/test.raw.txt.gz", "python": "corpus/python_stdlib.txt.gz"}
    lines = {}
    for name, file in files.items():
        with gzip.open(Path(data) / file, "rt", encoding="utf-8", newline="\n") as handle:
            text = (line.rstrip("\n") for line in handle)
            lines[name] = [line for line, _ in zip((line for line in text if line.strip()), range(COUNT), strict=False)]
    return lines


def digest(ids: Sequence[int]) -> str:
    """SHA-256 of tokens."""
    return hashlib.sha256(" ".join(map(str, ids)).encode()).hexdigest()


def lines(kind: str) -> list[str]:
    """Lines of one kind; skips the test where they need a folder of data that is not there."""
    from tests.data_support import data_dir

    return generated() if kind == "generated" else real(data_dir())[kind]


def corpora(data: str | Path) -> dict[str, list[str]]:
    """All three kinds of lines."""
    return {"generated": generated(), **real(data)}
