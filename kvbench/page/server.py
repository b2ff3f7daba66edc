"""The page as one HTML file that loads nothing from elsewhere, and a web server that shows it and follows runs."""

from __future__ import annotations

import base64
import hashlib
import re
import threading
from collections.abc import Mapping
from contextlib import suppress
from functools import cache
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

from kvbench.errors import KvbenchError
from kvbench.page.data import Report
from kvbench.page.numbers import encoded

_ASSETS = Path(__file__).with_name("assets")
#: files of the style and of the script, in the order in which they are joined
STYLES = ("base.css", "table.css", "plots.css")
SCRIPTS = (
    "dom.js",
    "controls.js",
    "format.js",
    "data.js",
    "filter.js",
    "columns.js",
    "table.js",
    "details.js",
    "plot.js",
    "scatter.js",
    "bars.js",
    "points.js",
    "heat.js",
    "papers.js",
    "leaderboard.js",
    "recipe.js",
    "samples.js",
    "jobs.js",
    "views.js",
    "address.js",
    "live.js",
    "main.js",
)


def html(data: Mapping[str, Any], live: bool = False) -> str:
    """Return the page as text. With `live`, the page asks its server for new data.

    A content security policy with the digests of the style and the script keeps everything else from running or
    loading, whatever a run's texts contain.
    """
    style, script = _joined_assets(STYLES), f'"use strict";\n(() => {{\n{_joined_assets(SCRIPTS)}\n}})();\n'
    sources = "'self'" if live else "'none'"
    policy = (
        f"default-src 'none'; img-src data:; style-src '{_source_hash(style)}'; script-src '{_source_hash(script)}'; "
        f"connect-src {sources}; base-uri 'none'; form-action 'none'"
    )
    places = {"policy": policy, "live": str(live).lower(), "style": style, "data": encoded(data), "script": script}
    # in one pass, so that no text of the data is taken for a place
    return re.sub(r"\{\{(\w+)\}\}", lambda match: places[match[1]], _asset_text("page.html"))


def _source_hash(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def _joined_assets(names: tuple[str, ...]) -> str:
    return "\n".join(_asset_text(name).rstrip() for name in names)


@cache
def _asset_text(name: str) -> str:
    return (_ASSETS / name).read_text(encoding="utf-8")


#: the only address at which the server answers
HOST = "127.0.0.1"
#: default port
PORT = 8765


class Server(ThreadingHTTPServer):
    """HTTP server of a report, reachable from this machine only.

    ``/`` is the page, ``/data.json`` its data. ``/data.json?mark=MARK`` answers 204 as long as the data are unchanged
    since the answer whose header ``X-Mark`` was MARK. The files of the runs are read again when they change. Port 0
    stands for any free port.

    Raises:
        KvbenchError: the port cannot be used.
    """

    daemon_threads = True

    def __init__(self, report: Report, port: int = PORT) -> None:
        self.report = report
        self._lock = threading.Lock()
        self._known: tuple[Any, dict[str, Any], str] | None = None
        try:
            super().__init__((HOST, port), _Handler)
        except (OSError, OverflowError) as error:
            reason = str(getattr(error, "strerror", None) or error).rstrip(".")
            raise KvbenchError(
                f"port {port} cannot be used: {reason}.\n  hint: name another port: --serve PORT (0: any free one)"
            ) from error

    @property
    def address(self) -> str:
        """The page's address."""
        return f"http://{HOST}:{self.server_port}/"

    def current(self) -> tuple[dict[str, Any], str]:
        """Return the current data, computed again if a file has changed, and their mark, which changes with them."""
        with self._lock:
            signature = self.report.signature()
            if self._known is None or self._known[0] != signature:
                data = self.report.data()
                text = encoded({key: value for key, value in data.items() if key != "made"})
                self._known = signature, data, hashlib.sha256(text.encode()).hexdigest()[:16]
            return self._known[1:]


class _Handler(BaseHTTPRequestHandler):
    server: Server

    def do_GET(self) -> None:
        port = self.server.server_port
        names = {f"{host}:{port}" for host in (HOST, "localhost")}
        if port == 80:  # browsers leave it out
            names |= {HOST, "localhost"}
        if self.headers.get("Host") not in names:  # a name of another site that leads here could read the runs
            return self._answer(403, "text/plain", b"This server answers to 127.0.0.1 only.\n")
        address = urlsplit(self.path)
        if address.path not in ("/", "/data.json"):
            return self._answer(404, "text/plain", b"There is only / and /data.json.\n")
        try:
            data, mark = self.server.current()
        except Exception as error:
            self._answer(500, "text/plain", f"{type(error).__name__}: {error}\n".encode("utf-8", "replace"))
            raise
        if address.path == "/":
            return self._answer(200, "text/html", html(data, live=True).encode(), mark)
        if parse_qs(address.query).get("mark") == [mark]:
            return self._answer(204, "application/json", b"", mark)
        return self._answer(200, "application/json", encoded(data).encode(), mark)

    def _answer(self, status: int, kind: str, body: bytes, mark: str = "") -> None:
        self.send_response(status)
        self.send_header("Content-Type", f"{kind}; charset=utf-8")
        if status != 204:
            self.send_header("Content-Length", str(len(body)))
        self.send_header("Cache-Control", "no-store")
        self.send_header("X-Content-Type-Options", "nosniff")
        if mark:
            self.send_header("X-Mark", mark)
        self.end_headers()
        self.wfile.write(body)

    def handle(self) -> None:
        """Answer a client; ignore the error of a client that has closed its connection early."""
        with suppress(ConnectionError):
            super().handle()

    def finish(self) -> None:
        """Close the connection; ignore errors as :meth:`handle` does."""
        with suppress(ConnectionError):
            super().finish()

    def log_message(self, format: str, *args: Any) -> None:
        """Print no log line, because the page asks for new data every two seconds."""
