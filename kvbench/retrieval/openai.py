"""The encoder ``openai``."""

from __future__ import annotations

import os
from collections.abc import Sequence

from kvbench.errors import ModelError
from kvbench.retrieval.embedding import Embedding
from kvbench.retrieval.store import EmbeddingStore

NO_KEY = "method.encoder=openai needs an API key.\n  hint: export OPENAI_API_KEY=KEY, or set method.encoder=bm25"
#: the endpoint of ``encoder=openai`` unless the environment names another
OPENAI_MODEL, OPENAI_URL = "text-embedding-ada-002", "https://api.openai.com/v1"


class OpenAI(Embedding):
    """Encoder that gets embedding vectors from OpenAI's API or a compatible server.

    Environment variables configure it: ``OPENAI_API_KEY``, which is never logged, ``OPENAI_BASE_URL`` for another
    server, and ``OPENAI_EMBEDDING_MODEL`` for a model other than ``text-embedding-ada-002``.
    """

    def __init__(self, store: EmbeddingStore) -> None:
        self.model, base = openai_endpoint()
        self.url = base + "/embeddings"
        super().__init__(f"openai/{self.model}" + ("" if base == OPENAI_URL else f" {base}"), store)

    def load(self) -> None:
        """Raise ModelError unless ``OPENAI_API_KEY`` is set. There are no weights to load."""
        if not os.environ.get("OPENAI_API_KEY"):
            raise ModelError(NO_KEY)

    def ready(self) -> None:
        """Raise ModelError if ``OPENAI_API_KEY`` is not set and no vectors of this encoder are stored."""
        if not os.environ.get("OPENAI_API_KEY") and not self.store.knows(self.name):
            raise ModelError(NO_KEY)

    def embed(self, texts: Sequence[str]) -> list[list[float]]:
        """Return the embedding vector of each text, in order.

        Raises:
            ModelError: no API key is set, or the endpoint does not return the vectors.
        """
        import httpx

        key = os.environ.get("OPENAI_API_KEY")
        if not key:
            raise ModelError(NO_KEY)
        try:
            answer = httpx.post(
                self.url,
                json={"model": self.model, "input": list(texts)},
                headers={"Authorization": f"Bearer {key}"},
                timeout=60,
            )
            answer.raise_for_status()
        except httpx.HTTPError as error:  # its text may hold the request's headers: name the kind alone
            status = getattr(getattr(error, "response", None), "status_code", "no answer")
            raise ModelError(
                f"the embeddings endpoint {self.url} failed ({type(error).__name__}, {status}).\n"
                "  hint: check OPENAI_BASE_URL and OPENAI_API_KEY, or set method.encoder=bm25"
            ) from None
        return [item["embedding"] for item in sorted(answer.json()["data"], key=lambda item: item["index"])]


def openai_endpoint() -> tuple[str, str]:
    """Return the model name and the base URL for ``encoder=openai``, from environment variables or the defaults."""
    model = os.environ.get("OPENAI_EMBEDDING_MODEL") or OPENAI_MODEL
    return model, (os.environ.get("OPENAI_BASE_URL") or OPENAI_URL).rstrip("/")
