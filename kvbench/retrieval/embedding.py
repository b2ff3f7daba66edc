"""Base classes of encoders, which score the similarity of a context's chunks to a query."""

from __future__ import annotations

import math
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from functools import lru_cache
from typing import ClassVar

from kvbench.errors import ModelError
from kvbench.retrieval.store import EmbeddingStore


class Encoder(ABC):
    """Base class of encoders. An encoder scores how similar texts are to a query."""

    #: seconds that the searches so far would have taken in addition, had no vector been stored, less those that only
    #: the first search of a process takes (loading of weights)
    unspent_s: float = 0.0
    #: stored vectors used so far without a known encoding time on this machine
    uncharged: int = 0
    #: True if a text's first and last word must be whole: to a comparison of words, half a word is another word
    whole_words: ClassVar[bool] = False

    @abstractmethod
    def scores(self, query: str, texts: Sequence[str]) -> list[float]:
        """Return the similarity of each text to the query, in the order of the texts; larger means more similar."""

    @abstractmethod
    def ready(self) -> None:
        """Raise ModelError if the encoder lacks what it needs: weights, an API key or a package. Nothing is loaded."""


class Embedding(Encoder):
    """Base class of encoders that score a text by the cosine similarity of embedding vectors (Cocktail, eq. 1).

    Vectors are stored under the encoder's name and used again, by later processes too.
    """

    batch = 64

    def __init__(self, name: str, store: EmbeddingStore) -> None:
        self.name, self.store = name, store

    @abstractmethod
    def embed(self, texts: Sequence[str]) -> list[list[float]]:
        """Return the embedding vector of each text, in order. Raises ModelError if the texts cannot be encoded."""

    def prepare(self, query: str, texts: Sequence[str]) -> list[str]:
        """Return the strings to encode, the query first, with the instructions that the encoder expects before them."""
        return [query, *texts]

    def load(self) -> None:
        """Prepare for :meth:`embed`: load the weights, or check the API key. Raises ModelError if they are missing."""

    def machine(self) -> str:
        """Return a description of this machine; encoding times are stored under it (:meth:`EmbeddingStore.costs`)."""
        return machine()

    def scores(self, query: str, texts: Sequence[str]) -> list[float]:
        """Return the cosine similarity of each text to the query, in the order of the texts, in double precision.

        Texts without a stored vector are encoded. A text with a stored vector is encoded again only if its encoding
        time on this machine is unknown, because the reported time of a search includes it; the stored vector is used
        even then.

        Raises:
            ModelError: a vector is not stored, and the text cannot be encoded.
        """
        wanted = self.prepare(query, texts)
        by_text = self.store.get(self.name, wanted)
        here = self.machine()
        costs = self.store.costs(self.name, list(by_text), here)
        unknown, missing = sorted(by_text.keys() - costs), sorted(set(wanted) - by_text.keys())
        if unknown or missing:
            started = time.perf_counter()
            try:
                self.load()
            except ModelError:
                if missing:
                    raise
                self.uncharged, unknown = self.uncharged + len(unknown), []
            self.unspent_s -= time.perf_counter() - started
        left = sorted([*unknown, *missing])
        for first in range(0, len(left), self.batch):
            part = left[first : first + self.batch]
            started = time.perf_counter()
            encoded = dict(zip(part, self.embed(part), strict=True))
            by_text = {**encoded, **by_text}  # stored vectors win, so that searches repeat to the bit
            self.store.put(self.name, {text: by_text[text] for text in part}, here, time.perf_counter() - started)
        self.unspent_s += sum(costs.values())
        vectors = [by_text[text] for text in wanted]
        return [cosine(vectors[0], vector) for vector in vectors[1:]]


@lru_cache(maxsize=1)
def machine() -> str:
    """Return the hardware that decides an encoder's speed, as text: processor, number of torch threads, and GPU."""
    import torch

    from kvbench.profiling.device import device_name
    from kvbench.results.environment import cpu_name

    gpu = device_name("cuda:0") if torch.cuda.is_available() else "no GPU"
    return f"{cpu_name()}, {torch.get_num_threads()} threads, {gpu}"


def cosine(a: Sequence[float], b: Sequence[float]) -> float:
    """Return the cosine similarity of two vectors in double precision; 0 if one of them is zero."""
    norm = math.sqrt(math.fsum(x * x for x in a)) * math.sqrt(math.fsum(x * x for x in b))
    return math.fsum(x * y for x, y in zip(a, b, strict=True)) / norm if norm else 0.0
