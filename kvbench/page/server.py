"""A web server on this machine that shows the page and follows runs as they go."""

from __future__ import annotations

import hashlib
import threading
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

from kvbench.errors import KvbenchError
from kvbench.page.data import Report
from kvbench.page.numbers import encoded
from kvbench.page.page import html

#: the only address at which the server answers
HOST = "127.0.0.1"
#: default port
PORT = 8765


class Server(ThreadingHTTPServer):
    """HTTP server of a report, reachable from this machine only.

    ``/`` is the page, ``/data.json`` its data. ``/data.json?mark=MARK`` answers 204 as long as the data have the mark
    that the header ``X-Mark`` named. The files of the runs are read again when they change. Port 0 is any free one.

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
        """Return the present data and their mark, which changes with them; computed anew only if a file has changed."""
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
        """Answer a client; one that has closed its connection early is no error."""
        with suppress(ConnectionError):
            super().handle()

    def finish(self) -> None:
        """Close the connection, as :meth:`handle`."""
        with suppress(ConnectionError):
            super().finish()

    def log_message(self, format: str, *args: Any) -> None:
        """Show nothing: the page asks for new data every two seconds."""
