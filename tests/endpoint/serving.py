"""Fake servers for tests: in a thread of this process, or in a process of their own; and runs of theirs."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import yaml

from kvbench.util.confdir import group_options
from tests.endpoint.fake_server import Options, made
from tests.run_support import config

SERVER = Path(__file__).with_name("fake_server.py")
ENGINE = {
    "_target_": "kvbench.methods.engine.Engine",
    "takes": ["none"],
    "rotation": {"key": "engine", "value": "engine"},
}
#: bytes per token of tiny's cache in full precision: 8 layers, keys and values of 2 heads of 64 channels
F16 = 8 * 2 * 2 * 64 * 2


@contextmanager
def serving(**options: Any) -> Iterator[str]:
    """Serve from a thread inside a ``with`` block; yields the URL."""
    server = made(0, Options(**options))
    thread = threading.Thread(target=lambda: server.serve_forever(0.01), daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()


def process(port: int, **options: Any) -> subprocess.Popen[bytes]:
    """Start a server in a process of its own, and return it once it answers."""
    words = [f"{name}={value}" for name, value in options.items()]
    started = subprocess.Popen([sys.executable, str(SERVER), str(port), *words], stdout=subprocess.DEVNULL)
    for _ in range(400):
        try:
            httpx.get(f"http://127.0.0.1:{port}/health", trust_env=False)
            return started
        except httpx.TransportError:
            time.sleep(0.05)
    raise AssertionError("the fake server does not answer")


def of_endpoint(results: Any, *, form: str | None = None, limit: int = 6, **model: Any) -> dict[str, Any]:
    """A run of tiny behind a server; `form` is a format of method=engine, None for fp16; `model` are further keys."""
    preset = {name: yaml.safe_load(group_options("model")[name].read_text()) for name in ("endpoint", "tiny")}
    made = config(results, "fp16", dataset={"limit": limit, "new_tokens": 8})
    made["model"] = {**preset["endpoint"], **preset["tiny"], "preset": "tiny", "retries": 6, **model}
    if form is not None:
        made["method"] = {**ENGINE, "format": form}
    return made
