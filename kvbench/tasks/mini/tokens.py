"""The tokenizer that measures `mini`: the one of the bundled model, loaded when it is first needed."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Sequence
from pathlib import Path

from kvbench.errors import DataError
from kvbench.tasks.mini.filler import Encode

#: the bundled model's tokenizer
TOKENIZER = Path(__file__).resolve().parents[2] / "models" / "tiny" / "tokenizer.json"


@functools.lru_cache(maxsize=4)
def encoder(path: Path = TOKENIZER) -> Encode:
    """A function that turns texts into token ids without special tokens.

    Args:
        path: a ``tokenizer.json`` of the `tokenizers` library.

    Raises:
        DataError: the file is missing or no tokenizer.
    """
    from tokenizers import Tokenizer

    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises a bare Exception
        raise DataError(f"{path}: no tokenizer can be read ({error}); is kvbench installed whole?") from error

    def encode(texts: Sequence[str]) -> list[list[int]]:
        return [encoding.ids for encoding in tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)]

    return encode


@functools.lru_cache(maxsize=4)
def fingerprint(path: Path = TOKENIZER) -> str:
    """The first 16 hexadecimal digits of the tokenizer file's SHA-256: lengths depend on it."""
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()[:16]
    except OSError as error:
        raise DataError(f"{path}: the bundled tokenizer cannot be read ({error})") from error
