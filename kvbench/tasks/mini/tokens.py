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
    """Load a tokenizer, and return a function from a list of texts to a list of token ids for each.

    No special tokens are added, and nothing is cut or padded. The file is a ``tokenizer.json`` of the library
    `tokenizers`.

    Raises:
        DataError: the file is missing, or is not a tokenizer.
    """
    from tokenizers import Tokenizer

    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises a bare Exception
        raise DataError(
            f"{path}: the bundled tokenizer cannot be read ({error}).\n  hint: install kvbench again"
        ) from error
    tokenizer.no_truncation()
    tokenizer.no_padding()

    def encode(texts: Sequence[str]) -> list[list[int]]:
        return [encoding.ids for encoding in tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)]

    return encode


@functools.lru_cache(maxsize=4)
def tokenizer_fingerprint(path: Path = TOKENIZER) -> str:
    """Return a checksum of a tokenizer file: the first 16 hexadecimal digits of its SHA-256.

    It is part of the identity of `mini`, because the tokenizer decides how much filler fits into a sample.

    Raises:
        DataError: the file cannot be read.
    """
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()[:16]
    except OSError as error:
        raise DataError(
            f"{path}: the bundled tokenizer cannot be read ({error}).\n  hint: install kvbench again"
        ) from error
