"""A hub of one repository on a loopback port, as huggingface_hub asks it for files."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@contextmanager
def serving(repository: str, files: Mapping[str, bytes]) -> Iterator[tuple[str, list[str]]]:
    """Serve `files` (by name) as a model repository; gives the address and the list of paths that were asked for."""
    asked: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            self._answer(body=False)

        def do_GET(self) -> None:
            self._answer(body=True)

        def _answer(self, *, body: bool) -> None:
            asked.append(self.path)
            name = self.path.removeprefix(f"/{repository}/resolve/").partition("/")[2]
            content = files.get(name) if self.path.startswith(f"/{repository}/resolve/") else None
            if self.path.startswith(f"/api/models/{repository}/"):  # what snapshot_download asks for, by its version
                tree = [{"type": "file", "path": file, "size": len(files[file]), "oid": "0" * 40} for file in files]
                siblings = [{"rfilename": file} for file in files]
                answer = tree if "/tree/" in self.path else {"id": repository, "sha": COMMIT, "siblings": siblings}
                content = json.dumps(answer).encode()
            self.send_response(404 if content is None else 200)
            self.send_header("X-Repo-Commit", COMMIT)
            if content is None:
                self.send_header("X-Error-Code", "EntryNotFound")
                self.send_header("Content-Length", "0")
            else:
                self.send_header("ETag", f'"{hashlib.sha1(content).hexdigest()}"')
                self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            if body and content is not None:
                self.wfile.write(content)

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}", asked
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


@contextmanager
def reachable(monkeypatch: pytest.MonkeyPatch, cache: Path, address: str | None) -> Iterator[None]:
    """Let huggingface_hub ask `address` (None: offline) and keep its files in `cache`."""
    from huggingface_hub import constants

    with monkeypatch.context() as patch:
        patch.setattr(constants, "HF_HUB_CACHE", str(cache))
        patch.setattr(constants, "HF_HUB_OFFLINE", address is None)
        if address is not None:
            template = address + "/{repo_id}/resolve/{revision}/{filename}"
            patch.setattr(constants, "ENDPOINT", address)
            patch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        yield
