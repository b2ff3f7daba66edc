"""A run on a model behind a server: each sample is a request, and its row is stored as soon as it is answered."""

from __future__ import annotations

import asyncio
import queue
import secrets
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from kvbench.cache.bill import Bill, Parts
from kvbench.config.run_config import RunConfig
from kvbench.decoding.sampling import Stopping
from kvbench.endpoint import proof
from kvbench.endpoint.client import Client, Place, place_at
from kvbench.endpoint.engines import EXACT
from kvbench.endpoint.life import Server, free_port
from kvbench.endpoint.wire import Answer, Ask
from kvbench.errors import ConfigError
from kvbench.methods.byte_parts import KVBytes
from kvbench.methods.bytes import kv_bytes
from kvbench.models.endpoint_config import EndpointModel
from kvbench.models.load import load_tokenizer
from kvbench.profiling.shape import Shape
from kvbench.results.environment import cpu_name
from kvbench.results.identity import is_baseline
from kvbench.results.samples import MEASURED, Row
from kvbench.runner.prompting import (
    EncodedPrompt,
    encode_prompt,
    end_ids,
    own_limit,
    prompt_limit,
    sample_seed,
    system_turn,
)
from kvbench.runner.rows import Machine, head
from kvbench.runner.scoring import scored
from kvbench.runner.two_requests import answer_request, joined, reasoning_request
from kvbench.runner.workers import Elsewhere, Outcome
from kvbench.tasks.base import Sample
from kvbench.tasks.work import Generate, ReasonThenAnswer
from kvbench.util.progress import say

#: facts about the server in each row; `env.json` has the command and the URLs too
IN_ROWS = ("engine", "version", "concurrency", "prefix_reuse", "cache")
#: tokens over which the bytes per token of a format are averaged
TOKENS = 4096


def served_format(config: RunConfig) -> str:
    """Return the cache format that a run's method stands for: ``fp16``, ``FORMAT`` or ``KEY/VALUE``.

    Raises:
        ConfigError: the method is not one that servers have, or has options that they lack.
    """
    method = config.method
    if is_baseline(config.plain):
        return EXACT
    form = getattr(method, "format", None)
    if type(method).__name__ != "Engine" or not isinstance(form, str):
        raise ConfigError(
            "method",
            config.plain["method"].get("preset") or type(method).__name__.lower(),
            "is not a cache of a server",
            allowed="fp16, engine",
            hint="method=engine method.format=FORMAT, or another model",
        )
    usual = type(method)(format=form).hyperparameters()
    for name, value in method.hyperparameters().items():
        if value != usual[name]:
            raise ConfigError(
                f"method.{name}", value, "is not an option of a server", hint=f"method.{name}={usual[name]}"
            )
    return form


def decoder(config: RunConfig) -> Shape | None:
    """Return the sizes of a run's model; None for sliding windows, and for sizes that are not known."""
    try:
        shape = Shape.of(config.model.dimensions())
    except (ConfigError, KeyError, TypeError):
        return None
    return None if shape.windows and any(shape.windows) else shape


def bytes_at(config: RunConfig, shape: Shape, tokens: int) -> KVBytes:
    """Return the bytes of a cache of the run's format with `tokens` tokens."""
    return kv_bytes(
        config.method,
        tokens,
        layers=shape.layers,
        query_heads=shape.query_heads,
        heads=shape.heads,
        channels=shape.channels,
    )


@contextmanager
def open_served(
    config: RunConfig, missing: Sequence[Sample], folder: Path, rows: Sequence[Row] = ()
) -> Iterator[Requests]:
    """Start the server, or find the running ones, and yield the requests of a run to a ``with`` block.

    Everything that can be wrong before the first sample is refused here. The server's output goes to `server.log` in
    `folder`, which is removed at the end if a sample is private, because some servers write texts into it; `rows` are
    those that the run has already. At the end of the block the requests under way are dropped, and the server ends.

    Raises:
        ConfigError: the method, the samples' work, a name or a port do not fit a server.
        EndpointError: no server can be reached or started, or its cache has another format.
    """
    model, form = config.model, served_format(config)
    assert isinstance(model, EndpointModel)
    if any(not isinstance(sample.work, (Generate, ReasonThenAnswer)) for sample in missing):
        raise ConfigError(
            "dataset", config.dataset.get("name"), "needs more of a model than answers to prompts", hint="dataset=mini"
        )
    shape = decoder(config)
    expected = None if shape is None else bytes_at(config, shape, TOKENS).total / TOKENS
    with ExitStack() as stack:
        if model.engine is None:
            server, places = None, [place_at(url, model.served) for url in model.urls]
        else:
            log = folder / "server.log"
            if any(sample.private for sample in missing):
                stack.callback(log.unlink, missing_ok=True)
            server, places = _started(stack, model, form, expected, log)
        answers = [proof.facts(place, server.text() if server else "") for place in places]
        if len({(place.engine.name, one.version) for place, one in zip(places, answers, strict=True)}) > 1:
            names = ", ".join(f"{place.engine.name} {one.version}" for place, one in zip(places, answers, strict=True))
            raise ConfigError("model.urls", list(model.urls), f"are not the same engine: {names}", hint="one run each")
        # the identity of a run has no address, so that another engine may stand there now
        before = {row[MEASURED]["endpoint"]["engine"] for row in rows if "endpoint" in row.get(MEASURED, {})}
        if before - {places[0].engine.name}:
            problem = f"has the engine {places[0].engine.name}, but this run has rows of {', '.join(sorted(before))}"
            raise ConfigError("model.urls", list(model.urls), problem, hint="runtime.results_dir=DIR for each engine")
        verdicts = [
            proof.verdict(one, place.engine, form, expected, model.args)
            for one, place in zip(answers, places, strict=True)
        ]
        weakest = max(verdicts, key=lambda one: ("proven", "claimed", "unknown").index(one.proof))
        about = {
            "engine": places[0].engine.name,
            "version": answers[0].version,
            "command": server.command if server else None,
            "urls": list(model.urls) or None,
            "concurrency": model.concurrency,
            "prefix_reuse": model.prefix_reuse,
            "cache": weakest.as_dict(),
        }
        say(f"{about['engine']} {about['version'] or ''}: cache {weakest.word or form}, {weakest.proof}")
        requests = Requests(config, missing, places, server, about)
        stack.callback(requests.close)
        yield requests


def _started(
    stack: ExitStack, model: EndpointModel, form: str, expected: float | None, log: Path
) -> tuple[Server, list[Place]]:
    engine = model.engine
    assert engine is not None
    port, name = free_port(model.port), f"kvbench-{secrets.token_hex(4)}"  # no other server has that model
    keys, values = engine.flags(form)
    total = model.concurrency * model.max_length
    command = engine.words(
        model.binary,
        model.args,
        model.prefix_reuse,
        **{"model": model.loads, "port": port, "name": name, "keys": keys, "values": values},
        **{"slots": model.concurrency, "context": model.max_length, "total": total},
        bytes=round(total * (expected or 0)) or 2**32,
    )
    server = stack.enter_context(Server(command, f"http://127.0.0.1:{port}", log))
    server.await_health(engine.health, model.start_s)
    return server, [place_at(server.url, name, engine)]


class Requests(Elsewhere):
    """The requests of a run, sent by a thread of their own while the run stores rows.

    Args:
        about: what each row says of the server.
    """

    def __init__(
        self,
        config: RunConfig,
        missing: Sequence[Sample],
        places: Sequence[Place],
        server: Server | None,
        about: dict[str, Any],
    ) -> None:
        model = config.model
        assert isinstance(model, EndpointModel)
        self._config, self._model, self._samples, self._server = config, model, list(missing), server
        self._tokenizer, self._about = load_tokenizer(model), about
        self._eos = _end_of_answer(model, self._tokenizer)
        self._done: queue.Queue[Outcome | None] = queue.Queue()
        self._stopped = threading.Event()
        where = cpu_name() if server else "a URL"
        self.device = "endpoint"
        self.machine = Machine(
            f"{about['engine']} at {where}, {model.concurrency} requests at once",
            "float16" if model.dtype == "auto" else model.dtype,
        )
        self._client = Client(
            places,
            logprobs=model.logprobs,
            prefix_reuse=model.prefix_reuse,
            retries=model.retries,
            timeout_s=model.timeout_s,
            alive=server.check_running if server else lambda: None,
            private=any(sample.private for sample in missing),
        )
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=lambda: self._loop.run_until_complete(self._all()), daemon=True)

    def layout(self) -> dict[str, Any]:
        """Return what `env.json` holds of the server."""
        return {"endpoint": self._about}

    @property
    def pids(self) -> list[int]:
        """Process ids of a server that this run has started."""
        return self._server.pids if self._server else []

    def order(self) -> list[str]:
        """Return the ids of the samples in the order of the data set."""
        return [sample.id for sample in self._samples]

    def outcomes(self) -> Iterator[Outcome]:
        """Send all requests, at most `model.concurrency` at once, and yield each sample with its row or its error."""
        self._thread.start()
        while (outcome := self._done.get()) is not None:
            yield outcome

    def stop(self) -> None:
        """Send no more requests; :meth:`outcomes` ends with those that are under way."""
        self._stopped.set()

    def unseen(self) -> list[Outcome]:
        """Return the samples that were answered but not yet yielded when :meth:`outcomes` was interrupted."""
        left = []
        while not self._done.empty():
            outcome = self._done.get()
            if outcome is not None:
                left.append(outcome)
        return left

    def close(self) -> None:
        """Drop the requests that are under way, and close all connections."""
        self._stopped.set()
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(lambda: [task.cancel() for task in asyncio.all_tasks(self._loop)])
        if self._thread.ident is not None:
            self._thread.join()
        self._loop.close()

    async def _all(self) -> None:
        waiting = iter(enumerate(self._samples))

        async def one_after_another() -> None:
            for number, sample in waiting:
                if self._stopped.is_set():
                    return
                try:
                    self._done.put(([sample], [await self._row(number, sample)]))
                except Exception as error:
                    self._done.put(([sample], error))

        try:
            await asyncio.gather(*(one_after_another() for _ in range(self._model.concurrency)))
        except asyncio.CancelledError:
            pass
        finally:
            await self._client.close()
            self._done.put(None)

    async def _row(self, number: int, sample: Sample) -> Row:
        if not isinstance(sample.work, ReasonThenAnswer):
            return await self._answer(number, sample)
        reasoned = await self._answer(number, reasoning_request(sample))
        answered = await self._answer(number, answer_request(sample, reasoned))
        return joined(self._config.task, sample, reasoned, answered)

    async def _answer(self, number: int, sample: Sample) -> Row:
        decoding, tokenizer = self._config.decoding, self._tokenizer
        new_tokens = decoding.max_new_tokens or sample.max_new_tokens
        prompt = self._prompt(sample, new_tokens)
        ask = Ask(
            prompt.ids,
            as_text(tokenizer, prompt.ids),
            new_tokens,
            decoding.temperature,
            decoding.top_p,
            sample_seed(self._config.runtime.seed, sample),
            int(sample.say_something),
            decoding.top_k or 0,
        )
        stop = (*sample.stop, *decoding.stop)
        eos = (*self._eos, *end_ids(sample, tokenizer))
        end = Stopping(1, eos, stop, tokenizer)

        def over(answer: Answer, ids: list[int]) -> bool:
            nonlocal end
            if len(answer.ids) == len(ids):  # the first ids of an attempt: what an earlier one has sent is void
                end = Stopping(1, eos, stop, tokenizer)
            for one in ids:
                end.take_row(0, one)
            return end.all_ended or (not answer.ids and any(one in answer.text for one in stop))

        answer, began, attempts = await self._client.answer(number, ask, tokenizer, over)
        if answer.ids:
            tokens, text, finish = end.tokens[0], end.texts()[0], end.finish[0]
        else:
            cuts = [at for one in stop if (at := answer.text.find(one)) >= 0]
            text, finish = answer.text[: min(cuts)] if cuts else answer.text, "stop" if cuts else "length"
            tokens = list(tokenizer(text, add_special_tokens=False)["input_ids"])
        if finish == "length" and answer.finish == "stop":
            finish = "eos"
        steps = [round(step, 6) for step in answer.step_s(len(tokens))]
        ttft = round(answer.arrivals[0][0] - began, 6) if answer.arrivals else None
        seen = {"attempts": attempts + 1, "cached": answer.cached, "ids": "server" if answer.ids else "text"}
        begun = head(
            sample,
            len(prompt.ids),
            finish,
            truncated=prompt.removed,
            thinking=prompt.thinking,
            prediction=text,
            tokens=tokens,
        )
        row = {
            **begun,
            **scored(self._config.task, sample, text, begun),
            **decoding.named(system_turn(sample, self._model)),
            "nll": None,
            "kv_bytes": self._bill(len(prompt.ids) + len(tokens) - (finish == "length")),
            MEASURED: self.machine.measured(1, None, None, ttft_s=ttft, step_s=steps, decoded=len(steps))
            | {"endpoint": {**{key: self._about[key] for key in IN_ROWS}, **seen}},
        }
        if answer.tops:
            row["top_logprobs"] = [[[one, round(p, 5)] for one, p in place] for place in answer.tops[: len(tokens) + 1]]
        return row

    def _bill(self, tokens: int) -> dict[str, Any] | None:
        """Return the bytes of a cache with `tokens` tokens; None unless the server's format is proven."""
        shape = decoder(self._config)
        if self._about["cache"]["proof"] != "proven" or shape is None:
            return None
        used, room = (bytes_at(self._config, shape, count) for count in (tokens, self._model.max_length))
        plain = 4 * tokens * shape.layers * shape.heads * shape.channels
        return Bill(Parts(**asdict(used)), Parts(**asdict(room)), plain).as_dict()

    def _prompt(self, sample: Sample, new_tokens: int) -> EncodedPrompt:
        model = self._model
        limit = prompt_limit(own_limit(sample, model), model.max_length, new_tokens)
        room = prompt_limit(None, model.max_length, new_tokens)
        return encode_prompt(sample, self._tokenizer, chat=model.chat, limit=limit, room=room)


def as_text(tokenizer: Any, ids: Sequence[int]) -> str:
    """Return the text of a prompt for a server that takes no ids, without a first token that it adds by itself."""
    text: str = tokenizer.decode(ids)
    if list(tokenizer(text, verbose=False)["input_ids"]) != list(ids) and ids[0] == tokenizer.bos_token_id:
        return str(tokenizer.decode(ids[1:]))
    return text


def _end_of_answer(model: EndpointModel, tokenizer: Any) -> tuple[int, ...]:
    """Return the tokens that end an answer: the tokenizer's, and those of the checkpoint's generation_config.json."""
    from transformers import GenerationConfig

    ids = [tokenizer.eos_token_id]
    source = model.folder() or model.hub_id
    try:
        named = GenerationConfig.from_pretrained(source, revision=model.revision).eos_token_id if source else None
        ids += named if isinstance(named, list) else [named]
    except OSError:  # the checkpoint has no such file
        pass
    return tuple(dict.fromkeys(int(one) for one in ids if one is not None))
