"""Requests to a server and its streamed answers, in llama.cpp's own form and in that of ``/v1/completions``."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from kvbench.endpoint.engines import Engine

#: a log-probability and the id of its token
Top = list[tuple[int, float]]
#: beginning of a token for which vLLM returns the id
_ID = "token_id:"


@dataclass(frozen=True)
class Ask:
    """The content of a request, apart from its server.

    Args:
        ids: token ids of the prompt.
        text: the same as text, for servers that take no ids.
        new_tokens: maximum number of tokens of the answer.
        at_least: number of tokens before which the answer must not end; servers of llama.cpp ignore it.
        top_k: number of most probable tokens from which to draw; 0 for all.
    """

    ids: tuple[int, ...]
    text: str
    new_tokens: int
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0
    at_least: int = 0
    top_k: int = 0


class BrokenAnswer(Exception):
    """A stream that ended early or holds what no server sends; the request is sent again."""


class WrongAnswer(Exception):
    """An answer that contradicts its request or itself; sending the request again would not help."""


def request(engine: Engine, name: str | None, ask: Ask, logprobs: int, prefix_reuse: bool) -> tuple[str, dict]:
    """Return the path and the JSON body of a request; `name` is the model's name on the server."""
    prompt = list(ask.ids) if engine.ids_in else ask.text
    wanted = min(logprobs, engine.logprobs)
    body: dict[str, Any] = {
        "prompt": prompt,
        "stream": True,
        "temperature": ask.temperature,
        "top_p": ask.top_p,
        "top_k": ask.top_k,
        "min_p": 0.0,
        "seed": ask.seed,
    }
    if engine.dialect == "llamacpp":
        more = {"n_predict": ask.new_tokens, "return_tokens": True, "cache_prompt": prefix_reuse, "n_probs": wanted}
        return "/completion", body | more
    body |= {"max_tokens": ask.new_tokens, "stream_options": {"include_usage": True}}
    body |= {} if name is None else {"model": name}
    body |= {"logprobs": wanted, "return_tokens_as_token_ids": True} if wanted else {}
    # servers that are not known might refuse keys that are not OpenAI's
    if engine.ids_in:
        return "/v1/completions", body | {"return_token_ids": True, "min_tokens": ask.at_least}
    return "/v1/completions", {key: value for key, value in body.items() if value or key not in ("top_k", "min_p")}


@dataclass
class Answer:
    """An answer as it arrives.

    Attributes:
        text: its text so far, as the server decodes it.
        ids: its token ids, if the server sends them.
        tops: for each token the most probable tokens at its place with their log-probabilities, if asked for.
        arrivals: for each event with tokens the time of its arrival, and the number of tokens (1 if unknown).
        finish: the server's reason for the end: ``stop`` or ``length``; None before the end.
        prompt_tokens: number of prompt tokens that the server has counted; None if it does not say.
        cached: how many of them came from the cache of an earlier request; None if it does not say.
    """

    text: str = ""
    ids: list[int] = field(default_factory=list)
    tops: list[Top] = field(default_factory=list)
    arrivals: list[tuple[float, int]] = field(default_factory=list)
    finish: str | None = None
    prompt_tokens: int | None = None
    cached: int | None = None

    def take(self, line: str, now: float) -> list[int]:
        """Add a line of the stream that arrived at the time `now`, and return its token ids.

        Raises:
            BrokenAnswer: the line is not one that a server sends, or reports an error.
        """
        if not line.startswith("data:") or line[5:].strip() == "[DONE]":
            if line.startswith("error:"):
                raise BrokenAnswer(line)
            return []
        try:
            event = json.loads(line[5:])
            if event.get("error"):
                raise BrokenAnswer(str(event["error"].get("message", event["error"]))[:300])
            ids = self._native(event) if "content" in event else self._openai(event)
        except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
            raise BrokenAnswer(f"the stream holds {line[:80]!r} ({type(error).__name__})") from error
        if ids is None:
            return []
        self.ids += ids
        self.arrivals.append((now, len(ids) or 1))
        return ids

    def _native(self, event: Mapping[str, Any]) -> list[int] | None:
        """Take an event of llama.cpp's ``/completion``; return its token ids, or None without any answer."""
        self.prompt_tokens = event.get("tokens_evaluated", self.prompt_tokens)
        self.text += event["content"]
        for place in event.get("completion_probabilities") or ():
            self.tops.append([(int(one["id"]), float(one["logprob"])) for one in place["top_logprobs"]])
        if event.get("stop"):
            self.finish = "length" if event.get("stop_type") == "limit" else "stop"
            self.cached = (event.get("timings") or {}).get("cache_n")
        ids = [int(one) for one in event.get("tokens") or ()]
        return ids if ids or event["content"] else None

    def _openai(self, event: Mapping[str, Any]) -> list[int] | None:
        """Take an event of ``/v1/completions``; return its token ids, or None without any answer."""
        usage = event.get("usage") or {}
        self.prompt_tokens = usage.get("prompt_tokens", self.prompt_tokens)
        self.cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens", self.cached)
        if not event.get("choices"):
            return None
        choice = event["choices"][0]
        self.text += choice.get("text") or ""
        self.finish = choice.get("finish_reason") or self.finish
        if self.finish not in (None, "stop", "length"):
            raise BrokenAnswer(f"the server ended the answer with {self.finish!r}")
        for place in (choice.get("logprobs") or {}).get("top_logprobs") or ():
            self.tops.append([(int(name.removeprefix(_ID)), float(value)) for name, value in place.items()])
        ids = [int(one) for one in choice.get("token_ids") or ()]
        return ids if ids or choice.get("text") else None

    def check(self, ask: Ask, tokenizer: Any) -> None:
        """Raise WrongAnswer if the prompt or the answer is not what was asked for, or its ids are not its text."""
        if self.prompt_tokens is not None and self.prompt_tokens != len(ask.ids):
            raise WrongAnswer(
                f"the server read {self.prompt_tokens} prompt tokens where {len(ask.ids)} were sent: its tokenizer "
                "differs, or it adds a token of its own"
            )
        if len(self.ids) > ask.new_tokens:
            raise WrongAnswer(f"the server generated {len(self.ids)} tokens where {ask.new_tokens} were asked for")
        if self.ids and not same_text(tokenizer, self.ids, self.text):
            raise WrongAnswer("the token ids that the server returned are not those of the text that it returned")

    def step_s(self, count: int) -> list[float]:
        """Return the seconds between the first `count` tokens; those of one event share the time since the last one."""
        steps = [
            (now - before) / tokens
            for (before, _), (now, tokens) in zip(self.arrivals, self.arrivals[1:], strict=False)
            for _ in range(tokens)
        ]
        first = self.arrivals[0][1] if self.arrivals else 1
        return [0.0] * min(first - 1, max(count - 1, 0)) + steps[: max(count - first, 0)]


def same_text(tokenizer: Any, ids: Sequence[int], text: str) -> bool:
    """Return True if `ids` decode to `text`, apart from spaces, special tokens and parts of characters at its end."""

    def plain(one: str) -> str:
        return "".join(one.replace("\ufffd", "").split())

    if any(not 0 <= one < len(tokenizer) for one in ids):
        return False
    with_special, without = (plain(tokenizer.decode(ids, skip_special_tokens=skip)) for skip in (False, True))
    sent = plain(text)
    return sent in (with_special, without) or (bool(sent) and without.startswith(sent))
