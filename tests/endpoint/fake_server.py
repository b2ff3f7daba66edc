"""A server with faults, in a process of its own: answers like llama.cpp, vLLM or any other, by the standard library.

The answer to a prompt is a function of its token ids alone. ``python fake_server.py PORT [OPTION=VALUE...]``; the
options are the fields of :class:`Options`. A fault is drawn for every request with a seeded generator.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import random
import sys
import threading
import time
from dataclasses import dataclass
from functools import cache
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

TOKENIZER = Path(__file__).parents[2] / "kvbench/models/tiny/tokenizer.json"


@dataclass
class Options:
    """Behaviour of the server: its engine, its cache, its key, and faults that happen with the probability `rate`."""

    engine: str = "llamacpp"
    name: str = "fake"
    word: str = "f16"
    mib: float = 6.0
    cells: int = 4096
    held: int = 0
    key: str = ""
    faults: str = ""
    rate: float = 0.5
    seed: int = 0
    step_s: float = 0.0
    tokens: int = 12
    exits: int = -1
    shift: int = 0
    log: str = ""


def numbers(ids: list[int] | str, count: int, size: int) -> list[int]:
    """Return the ids of the answer to a prompt."""
    digest = hashlib.sha256(json.dumps(ids).encode()).digest()
    return [300 + (digest[place % 32] * 7 + place) % (size - 300) for place in range(count)]


class Handler(BaseHTTPRequestHandler):
    """One connection."""

    options: Options
    tokenizer: Tokenizer
    draw: random.Random
    lock: threading.Lock

    def log_message(self, *_: Any) -> None:
        """Write nothing."""

    def reply(self, content: Any, status: int = 200, **headers: str) -> None:
        """Send JSON, or a text."""
        body = content.encode() if isinstance(content, str) else json.dumps(content).encode()
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(body))}.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        self.wfile.write(body)

    def refused(self) -> bool:
        """Refuse a request without the key, and repeat what it has in its place, as some servers do."""
        given = self.headers.get("Authorization", "")
        if self.options.key and given != f"Bearer {self.options.key}":
            self.reply({"error": {"message": f"Incorrect API key provided: {given}"}}, 401)
            return True
        return False

    def do_GET(self) -> None:
        """Answer questions about the server."""
        o = self.options
        if self.refused():
            return
        answers: dict[str, Any] = {"/health": {"status": "ok"}, "/v1/models": {"data": [{"id": o.name}]}}
        if o.engine == "llamacpp":
            answers["/props"] = {"build_info": "b1-fake"}
        if o.engine == "vllm":
            labels = f'cache_dtype="{o.word}",kv_cache_memory_bytes="{o.held}",kv_cache_size_tokens="{o.cells}"'
            answers["/version"] = {"version": "0.0-fake"}
            answers["/metrics"] = f"# HELP\nvllm:cache_config_info{{{labels}}} 1.0\n"
        if o.engine == "sglang":
            answers["/get_server_info"] = {
                "version": "0.0-fake",
                "kv_cache_dtype": o.word,
                "max_total_num_tokens": o.cells,
                "internal_states": [{"memory_usage": {"kvcache": o.held / 2**30}}],
            }
        if self.path in answers:
            self.reply(answers[self.path])
        else:
            self.reply({"error": "not found"}, 404)

    def do_POST(self) -> None:
        """Answer a prompt, unless a fault is drawn."""
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.refused():
            return
        o, native = self.options, self.path == "/completion"
        with self.lock:
            struck = bool(o.faults) and self.draw.random() < o.rate
            fault = self.draw.choice(o.faults.split(",")) if struck else ""
        if o.log:
            with self.lock, open(o.log, "a", encoding="utf-8") as log:
                log.write(json.dumps({"path": self.path, **asked}) + "\n")
        if fault in ("429", "500", "503"):
            self.reply({"error": {"message": f"fault {fault}"}}, int(fault), **({"Retry_After": "0"}))
            return
        prompt = asked["prompt"]
        if fault == "echo":
            text = prompt if isinstance(prompt, str) else self.tokenizer.decode(prompt)
            self.reply({"error": {"message": f"cannot read {text[-40:]}"}}, 400)
            return
        count = min(o.tokens, asked["n_predict" if native else "max_tokens"])
        ids = [one + o.shift for one in numbers(prompt, count, self.tokenizer.get_vocab_size())]
        length = len(prompt) if isinstance(prompt, list) else len(self.tokenizer.encode(prompt).ids)
        finish = "limit" if count < o.tokens else "eos"
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.end_headers()
        sent = ""
        for place in range(count):
            if fault == "cut" and place == count // 2:
                return
            if fault == "hang" and place == count // 2:
                time.sleep(30)
            if fault == "junk" and place == count // 2:
                self.wfile.write(b"data: {not json\n\n")
            text = self.tokenizer.decode(ids[: place + 1], skip_special_tokens=True)
            delta, sent = text[len(sent) :], text
            one = ids[place] + (1 if fault == "ids" else 0)
            top = [(one, -0.25), (one + 1, -1.75 + o.shift)]
            self.event(self.native(one, delta, top, length) if native else self.openai(one, delta, top, asked))
            time.sleep(o.step_s)
        self.end(native, finish, length, fault)

    def event(self, content: Any) -> None:
        """Send one event of the stream."""
        self.wfile.write(b"data: " + json.dumps(content).encode() + b"\n\n")
        self.wfile.flush()

    @staticmethod
    def native(one: int, delta: str, top: list[tuple[int, float]], length: int) -> dict[str, Any]:
        """Return an event of llama.cpp's."""
        tops = [{"id": token, "logprob": p} for token, p in top]
        places = [{"id": one, "logprob": top[0][1], "top_logprobs": tops}]
        return {"content": delta, "tokens": [one], "stop": False, "tokens_evaluated": length} | {
            "completion_probabilities": places
        }

    def openai(self, one: int, delta: str, top: list[tuple[int, float]], asked: dict[str, Any]) -> dict[str, Any]:
        """Return an event of ``/v1/completions``; only servers that know the keys send token ids."""
        choice: dict[str, Any] = {"index": 0, "text": delta, "finish_reason": None}
        if asked.get("return_token_ids"):
            choice["token_ids"] = [one]
        if asked.get("logprobs"):
            choice["logprobs"] = {"top_logprobs": [{f"token_id:{token}": p for token, p in top}]}
        return {"choices": [choice]}

    def end(self, native: bool, finish: str, length: int, fault: str) -> None:
        """End the stream."""
        length += 1 if fault == "length" else 0
        if native:
            last = {"content": "", "tokens": [], "stop": True, "stop_type": finish, "tokens_evaluated": length}
            self.event({**last, "timings": {"cache_n": 0}})
            return
        reason = "length" if finish == "limit" else "stop"
        self.event({"choices": [{"index": 0, "text": "", "finish_reason": reason}]})
        details = {"cached_tokens": 0}
        self.event({"choices": [], "usage": {"prompt_tokens": length, "prompt_tokens_details": details}})
        self.wfile.write(b"data: [DONE]\n\n")


class Quiet(ThreadingHTTPServer):
    """A server that says nothing of connections that break."""

    daemon_threads = True
    request_queue_size = 128

    def handle_error(self, *_: Any) -> None:
        """Write nothing."""


@cache
def tokenizer() -> Tokenizer:
    """Return the tokenizer of the bundled model."""
    return Tokenizer.from_file(str(TOKENIZER))


def made(port: int, options: Options) -> Quiet:
    """Return a server at a port, 0 for a free one."""
    own = {"options": options, "draw": random.Random(options.seed), "tokenizer": tokenizer(), "lock": threading.Lock()}
    return Quiet(("127.0.0.1", port), type("Served", (Handler,), own))


def main(words: list[str]) -> None:
    """Serve until the process is ended."""
    port = int(words[0])
    options = Options()
    for word in words[1:]:
        name, _, value = word.partition("=")
        kind = type(getattr(options, name))
        options = dataclasses.replace(options, **{name: kind(value)})
    if options.exits >= 0:
        print("error: cannot load the model", flush=True)
        sys.exit(options.exits)
    server, o = made(port, options), options
    print(
        f"llama_kv_cache: size = {o.mib:7.2f} MiB ({o.cells:6d} cells,   6 layers,  1/1 seqs), "
        f"K ({o.word}): {o.mib / 2:7.2f} MiB, V ({o.word}): {o.mib / 2:7.2f} MiB",
        flush=True,
    )
    server.serve_forever()


if __name__ == "__main__":
    main(sys.argv[1:])
