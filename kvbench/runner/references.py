"""fp16's own predictions, stored once for all methods: final hidden states in fp16, one file per sample.

A file holds the decoded tokens and the final hidden state at each position. Logits need not be stored, because every
later run has the output head too: with a vocabulary of 128,256 tokens and 4096 channels, states take 31 times less
space than log-probabilities in 16 bits. Files are written atomically, and an interrupted run keeps those that it has
written.
"""

from __future__ import annotations

import hashlib
import json
import re
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.numpy
from numpy.typing import NDArray

from kvbench.errors import NonFiniteError
from kvbench.results.samples import DiskError, write_atomically

#: incremented when the content of the files changes its meaning
FORMAT = 1
#: folder in ``runtime.results_dir``
FOLDER = "references"

_META = "kvbench"
#: what the keys of a stamp are in a message
_NAMES = {
    "format": "another version of the file format",
    "head": "another output head",
    "norm": "another last norm",
    "dtype": "another dtype",
    "arithmetic": "another arithmetic",
    "device": "another device",
    "code": "older code",
    "prompt": "another prompt or other tokens",
}


@dataclass(frozen=True)
class Reference:
    """fp16's predictions for one sample.

    Args:
        tokens: the token that follows at each position, ``[n]``: the decoded tokens.
        states: final hidden state at each position, fp16 ``[n, d]``; position 0 is the last token of the prompt.
        batch_rows: number of samples in the batch in which the predictions were computed.
        how: the other settings that 16-bit rounding depends on: ``compile`` and ``prefill_chunk`` of the run that made
            the predictions. They are stored beside the predictions; predictions computed in another way still serve.
    """

    tokens: NDArray[np.int64]
    states: NDArray[np.float16]
    batch_rows: int
    how: Mapping[str, Any] = field(default_factory=dict)


class References:
    """The stored predictions of fp16 for one model and data set.

    Each file has a stamp of what its predictions depend on: digests of head and norm, dtype, device, digest of the
    code. A file with another stamp is stale.
    """

    def __init__(self, folder: Path, stamp: Mapping[str, Any], say: Callable[[str], None]) -> None:
        self.folder = folder
        self.stamp = {"format": FORMAT, **stamp}
        self.say = say
        self._said: set[str] = set()

    def path(self, sample: str) -> Path:
        """Return the file of a sample."""
        plain = re.sub(r"[^\w@.-]+", "_", sample)[:80]
        return self.folder / f"{plain}-{zlib.crc32(sample.encode()):08x}.safetensors"

    def read(self, sample: str, prompt: str) -> Reference | None:
        """Return the stored predictions of a sample; None, after a message, if they are stale or damaged.

        `prompt` is the digest of the prompt, and of the tokens after it if these are given (:func:`token_digest`).
        """
        path = self.path(sample)
        try:
            content = path.read_bytes()
        except FileNotFoundError:
            return None
        except OSError as error:
            raise DiskError(path, error) from error
        try:
            arrays = safetensors.numpy.load(content)
            meta = json.loads(_metadata(content)[_META])
            whole = meta["sha256"] == _checksum(arrays["tokens"], arrays["states"])
        except Exception:  # safetensors has errors of its own for each kind of damage
            whole = False
        if not whole:
            self._tell(f"{path}: the file is damaged; making fp16's predictions of {sample} again")
            return None
        wanted = {**self.stamp, "prompt": prompt}
        differing = [key for key, value in wanted.items() if meta.get(key) != value]
        if differing:
            reasons = ", ".join(_NAMES.get(key, key) for key in differing)
            self._tell(f"{self.folder}: fp16's predictions were made with {reasons}; making them again", reasons)
            return None
        return Reference(arrays["tokens"], arrays["states"], int(meta["batch_rows"]), meta.get("how") or {})

    def write(self, sample: str, prompt: str, reference: Reference) -> None:
        """Store the predictions of a sample, with the digest `prompt` of :meth:`read`.

        Raises:
            DiskError: the file cannot be written.
            NonFiniteError: a state exceeds the range of fp16.
        """
        if not np.isfinite(reference.states).all():
            raise NonFiniteError(
                f"{sample}: a final hidden state is NaN or exceeds the range of fp16 (65504), in which references are "
                "stored.\n  hint: dataset.reference=live"
            )
        meta = {
            **self.stamp,
            "prompt": prompt,
            "sample": sample,
            "batch_rows": reference.batch_rows,
            "how": dict(reference.how),
            "sha256": _checksum(reference.tokens, reference.states),
        }
        arrays: dict[str, NDArray[Any]] = {"tokens": reference.tokens, "states": reference.states}
        path = self.path(sample)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise DiskError(path, error) from error
        write_atomically(path, safetensors.numpy.save(arrays, {_META: json.dumps(meta)}))

    def _tell(self, line: str, kind: str | None = None) -> None:
        """Show a line, but each kind of message only once."""
        if (kind or line) not in self._said:
            self._said.add(kind or line)
            self.say(line)


def token_digest(*tokens: Sequence[int]) -> str:
    """Return a digest of lists of token ids, for example of a prompt and of the tokens after it."""
    return hashlib.sha256("|".join(",".join(map(str, part)) for part in tokens).encode()).hexdigest()[:16]


def _checksum(*arrays: NDArray[Any]) -> str:
    content = hashlib.sha256()
    for array in arrays:
        content.update(f"{array.dtype} {array.shape}".encode())
        content.update(np.ascontiguousarray(array).tobytes())
    return content.hexdigest()


def _metadata(content: bytes) -> dict[str, str]:
    """Return the metadata in the header of a safetensors file."""
    # a file begins with the length of its JSON header, in 8 bytes
    size = int.from_bytes(content[:8], "little")
    header: dict[str, Any] = json.loads(content[8 : 8 + size])
    return dict(header["__metadata__"])
