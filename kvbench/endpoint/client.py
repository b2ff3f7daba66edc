"""The client of servers: checks before the first sample, requests with retries, and errors that name the remedy."""

from __future__ import annotations

import asyncio
import os
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import httpx

from kvbench.endpoint.engines import SERVED, UNKNOWN, Engine
from kvbench.endpoint.life import KEY, EndpointError
from kvbench.endpoint.wire import Answer, Ask, BrokenAnswer, WrongAnswer, request
from kvbench.errors import ConfigError

#: statuses after which a request is sent again
AGAIN = (408, 425, 429, 500, 502, 503, 504, 529)
#: seconds before the first further attempt at a request, doubled for each one after it, and their upper bound
FIRST_S, MOST_S = 0.5, 60.0
#: seconds for the questions before the first sample
ASK_S = 10.0


@dataclass(frozen=True)
class Place:
    """A server that has been asked what it is: its base URL, its engine, and its name of the model."""

    url: str
    engine: Engine
    name: str | None


def key() -> str | None:
    """Return the key for servers from the environment, without spaces around it; None without one.

    Raises:
        EndpointError: it cannot stand in a header, whose error would show it.
    """
    secret = os.environ.get(KEY, "").strip()
    if not (secret.isascii() and secret.isprintable()):
        raise EndpointError(f"{KEY}: the key has characters that no key has.\n  hint: set it again, on one line")
    return secret or None


def without_key(text: str) -> str:
    """Return `text` without the key, which a server may repeat in a message."""
    secret = key()
    return text if secret is None else text.replace(secret, "***")


def withheld(text: str) -> str:
    """Return a remark in place of a server's text, which may repeat a prompt that must not be shown."""
    return "(what the server says is not shown, because the data set is private)" if text else text


def headers() -> dict[str, str]:
    """Return the headers of every request."""
    secret = key()
    return {} if secret is None else {"Authorization": f"Bearer {secret}"}


def get(url: str, path: str, timeout_s: float = ASK_S) -> Any:
    """Return the JSON (or else the text) that a server has at a path; None if it has none.

    Raises:
        EndpointError: it cannot be reached, or refuses the key; the message names the remedy.
    """
    try:
        answer = httpx.get(
            f"{url}{path}",
            headers=headers(),
            timeout=timeout_s,
            verify=httpx.create_ssl_context(),  # SSL_CERT_FILE counts for local servers too
            trust_env=not _local(url),
        )
    except httpx.HTTPError as error:
        raise EndpointError(unreachable(url, error)) from None
    if answer.status_code in (401, 403):
        raise EndpointError(
            f"{url}: the server refuses {'requests without a key' if key() is None else 'the key'} "
            f"(status {answer.status_code}).\n  hint: set the environment variable {KEY}"
        )
    if answer.status_code == 503:
        raise EndpointError(f"{url}: it is not ready (status 503).\n  hint: wait until its model is loaded")
    if answer.status_code != 200:
        return None
    try:
        return answer.json()
    except ValueError:
        return answer.text


def unreachable(url: str, error: Exception) -> str:
    """Return a message about a server that cannot be reached."""
    text = without_key(str(error)) or type(error).__name__
    if "CERTIFICATE" in text.upper():
        return (
            f"{url}: its TLS certificate is not trusted ({text}).\n"
            "  hint: set the environment variable SSL_CERT_FILE to the authority's certificate"
        )
    if "SSL" in text.upper() or "RECORD LAYER" in text.upper():
        return f"{url}: it does not speak TLS ({text}).\n  hint: write http:// in model.urls"
    if isinstance(error, httpx.TimeoutException):
        return f"{url}: no answer within {ASK_S:.0f} s.\n  hint: check the address, or wait until the model is loaded"
    return f"{url}: no server can be reached ({text}).\n  hint: start it, or correct model.urls"


def place_at(url: str, served: str | None, engine: Engine | None = None) -> Place:
    """Ask a server what it is, and return it; `engine` is None for a server that kvbench has not started.

    Raises:
        EndpointError: it cannot be reached, or is not an OpenAI-compatible server.
        ConfigError: it does not serve the model.
    """
    url = url.rstrip("/").removesuffix("/v1")
    listed = get(url, "/v1/models")
    try:
        names = [str(model["id"]) for model in listed["data"]]
    except (TypeError, KeyError):
        raise EndpointError(
            f"{url}: it does not list its models at /v1/models, so it is not an OpenAI-compatible server.\n"
            "  hint: correct model.urls"
        ) from None
    if served is not None and served not in names:
        raise ConfigError("model.served", served, f"is not a model of {url}", allowed=names)
    if served is None and len(names) != 1:
        raise ConfigError("model.served", None, f"must name one of the models of {url}", allowed=names)
    return Place(url, engine or recognized(url), served or names[0])


def recognized(url: str) -> Engine:
    """Return the engine of a server, by a path that only its servers have; else :data:`UNKNOWN`."""
    for engine in reversed(SERVED.values()):
        if engine.probe is not None:
            facts = get(url, engine.probe[0])
            if isinstance(facts, dict) and engine.probe[1] in facts:
                return engine
    return UNKNOWN


class Client:
    """The client of one or more servers with the same model.

    Args:
        retries: further attempts at a request.
        timeout_s: seconds without a byte after which a request counts as broken.
        alive: function that raises if a server that this run has started is no longer there.
    """

    def __init__(
        self,
        places: Sequence[Place],
        *,
        logprobs: int = 0,
        prefix_reuse: bool = False,
        retries: int = 8,
        timeout_s: float = 600.0,
        alive: Callable[[], None] = lambda: None,
        private: bool = False,
    ) -> None:
        self.places, self._logprobs, self._reuse = list(places), logprobs, prefix_reuse
        self._retries, self._alive = retries, alive
        self._shown = withheld if private else without_key
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
        trust = not all(_local(place.url) for place in places)
        self._http = httpx.AsyncClient(
            headers=headers(),
            timeout=timeout_s,
            limits=limits,
            verify=httpx.create_ssl_context(),
            trust_env=trust,
        )
        self.sent = 0

    async def close(self) -> None:
        """Close all connections."""
        await self._http.aclose()

    async def answer(
        self, number: int, ask: Ask, tokenizer: Any, over: Callable[[Answer, list[int]], bool]
    ) -> tuple[Answer, float, int]:
        """Send a request until it is answered, and return the answer, when it was sent, and how often it was before.

        The servers take turns, by `number` and attempt. Nothing of a broken answer is kept.

        Args:
            over: function of the answer so far and the ids that have just come; True if the rest is not wanted.

        Raises:
            EndpointError: the attempts are used up, or the server refuses the request.
        """
        for attempt in range(self._retries + 1):
            place = self.places[(number + attempt) % len(self.places)]
            pause = min(MOST_S, FIRST_S * 2**attempt) * (0.5 + random.random() / 2)
            self._alive()
            try:
                began, answer = await self._once(place, ask, over)
                answer.check(ask, tokenizer)
                return answer, began, attempt
            except WrongAnswer as wrong:
                raise EndpointError(
                    f"{place.url}: {wrong}.\n"
                    "  hint: name the model it serves by model.preset, model.path or model.hub_id"
                ) from None
            except _Again as again:
                reason, pause = str(again), max(pause, again.pause_s)
            except BrokenAnswer as broken:
                reason = self._shown(str(broken))
            except httpx.RequestError as error:
                reason = str(error) or type(error).__name__
            if attempt < self._retries:
                await asyncio.sleep(pause)
        self._alive()
        raise EndpointError(
            f"{place.url}: the request failed {self._retries + 1} times: {without_key(reason)}\n"
            "  hint: run the same command again once the server is well; it sends only the missing requests"
        )

    async def _once(self, place: Place, ask: Ask, over: Callable[[Answer, list[int]], bool]) -> tuple[float, Answer]:
        path, body = request(place.engine, place.name, ask, self._logprobs, self._reuse)
        answer, began = Answer(), time.perf_counter()
        self.sent += 1
        async with self._http.stream("POST", f"{place.url}{path}", json=body) as response:
            if response.status_code != 200:
                await response.aread()
                raise _refusal(place.url, response, self._shown)
            async for line in response.aiter_lines():
                ids = answer.take(line, time.perf_counter())
                if over(answer, ids):  # leaving closes the connection, and the server drops the request
                    return began, answer
        if answer.finish is None:
            raise BrokenAnswer("the stream ended before the answer did")
        return began, answer


class _Again(Exception):
    """A status after which the request is sent again, at the earliest after `pause_s` seconds."""

    def __init__(self, text: str, pause_s: float) -> None:
        super().__init__(text)
        self.pause_s = pause_s


def _refusal(url: str, response: httpx.Response, shown: Callable[[str], str]) -> Exception:
    text = shown(" ".join(response.text.split()))[:300]
    if response.status_code in AGAIN:
        wanted = response.headers.get("Retry-After", "")
        pause = min(float(wanted), MOST_S) if wanted.isdigit() else 0.0
        return _Again(f"status {response.status_code}: {text}", pause)
    if response.status_code in (401, 403):
        return EndpointError(f"{url}: the server refuses the key.\n  hint: set the environment variable {KEY}")
    return EndpointError(
        f"{url}: the server refuses the request with status {response.status_code}: {text}\n"
        "  hint: if its context is shorter than model.max_length, set model.max_length=TOKENS"
    )


def _local(url: str) -> bool:
    """Return True for an address of this machine, which is never asked by way of a proxy."""
    return httpx.URL(url).host in ("localhost", "127.0.0.1", "::1")
