"""The tokenizer of the bundled model, with which `mini` measures lengths, loaded on first use."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Sequence
from pathlib import Path

from kvbench.errors import DataError
from kvbench.tasks.mini.filler import Encode

#: file of the bundled model's tokenizer
TOKENIZER = Path(__file__).resolve().parents[2] / "models" / "tiny" / "tokenizer.json"


@functools.lru_cache(maxsize=4)
def encoder(path: Path = TOKENIZER) -> Encode:
    """Return a function that converts a list of texts into lists of token ids, without special tokens.

    Args:
        path: a ``tokenizer.json`` of the `tokenizers` library.

    Raises:
        DataError: the file is missing or does not hold a tokenizer.
    """
    from tokenizers import Tokenizer

    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises a bare Exception
        raise DataError(
            f"{path}: the bundled tokenizer cannot be read ({error}).\n  hint: install kvbench again"
        ) from error

    def encode(texts: Sequence[str]) -> list[list[int]]:
        return [encoding.ids for encoding in tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)]

    return encode


@functools.lru_cache(maxsize=4)
def fingerprint(path: Path = TOKENIZER) -> str:
    """Return the checksum of a tokenizer file: the first 16 hex digits of its SHA-256.

    The samples depend on the tokenizer, because it measures their lengths.

    Args:
        path: the tokenizer file.

    Raises:
        DataError: the file cannot be read.
    """
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()[:16]
    except OSError as error:
        raise DataError(
            f"{path}: the bundled tokenizer cannot be read ({error}).\n  hint: install kvbench again"
        ) from error
