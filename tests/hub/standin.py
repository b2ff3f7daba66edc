"""A stand-in for the Hugging Face hub on a loopback port, as huggingface_hub asks it, with faults that tests plant.

Repositories have commits and branches; large files are redirected to another address with their SHA-256, small ones
have git's SHA-1, and downloads go on at a byte (``Range``), as on the hub.
"""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

#: endings of the files that the hub keeps in large-file storage
LARGE = (".safetensors", ".bin", ".zip", ".parquet", ".gz")


@dataclass
class Repository:
    """A repository: commits (hash to files by name), the commit of its main branch, and who may read it.

    Args:
        refuses: HTTP status for everybody, 401 or 403; None if the repository is open.
    """

    commits: dict[str, dict[str, bytes]]
    main: str
    refuses: int | None = None


@dataclass
class Faults:
    """Faults by name of file.

    Args:
        cut: how many answers end in the middle of the file.
        slow: seconds before each byte range of an answer.
        wrong: files whose content differs from the listed checksum.
        gone: HTTP status in place of the content.
    """

    cut: dict[str, int] = field(default_factory=dict)
    slow: dict[str, float] = field(default_factory=dict)
    wrong: set[str] = field(default_factory=set)
    gone: dict[str, int] = field(default_factory=dict)


class Hub:
    """A server with repositories; `asked` lists method, path and range of every request."""

    def __init__(self) -> None:
        self.repositories: dict[str, Repository] = {}
        self.faults = Faults()
        self.asked: list[tuple[str, str, str | None]] = []
        self.server = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self.address = f"http://127.0.0.1:{self.server.server_address[1]}"

    def add(self, name: str, files: Mapping[str, bytes], *, refuses: int | None = None) -> str:
        """Add a commit with `files` to the repository ``OWNER/NAME`` or ``datasets/OWNER/NAME``; return its hash."""
        listing = json.dumps({file: hashlib.sha1(content).hexdigest() for file, content in files.items()})
        commit = hashlib.sha1(f"{name} {listing}".encode()).hexdigest()
        repository = self.repositories.setdefault(name, Repository({}, commit))
        repository.commits[commit], repository.main, repository.refuses = dict(files), commit, refuses
        return commit

    def pin(self, name: str, commit: str) -> None:
        """Give the newest commit of a repository the hash that a configuration names."""
        repository = self.repositories[name]
        repository.commits[commit] = repository.commits.pop(repository.main)
        repository.main = commit

    def downloads(self) -> list[str]:
        """Return the names of the files whose content was asked for, in order."""
        return [
            path.rpartition("/")[2] for method, path, _ in self.asked if method == "GET" and not path.startswith("api/")
        ]

    def _handler(hub) -> type[BaseHTTPRequestHandler]:
        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_HEAD(self) -> None:
                hub.answer(self, body=False)

            def do_GET(self) -> None:
                hub.answer(self, body=True)

            def log_message(self, format: str, *args: object) -> None:
                pass

        return Handler

    # -- answers -----------------------------------------------------------------------------------------------------

    def answer(self, request: BaseHTTPRequestHandler, *, body: bool) -> None:
        """Answer one request."""
        path = unquote(urlsplit(request.path).path).lstrip("/")
        self.asked.append((request.command, path, request.headers.get("Range")))
        api = path.startswith("api/")
        path = path.removeprefix("api/").removeprefix("models/") if api else path
        large = path.startswith("large/")
        path = path.removeprefix("large/")
        name = next((name for name in self.repositories if path == name or path.startswith(f"{name}/")), None)
        if name is None:
            return _send(request, 404, {"X-Error-Code": "RepoNotFound"}, b"", body)
        repository, rest = self.repositories[name], path.removeprefix(name).lstrip("/")
        if repository.refuses is not None:
            return _send(request, repository.refuses, {"X-Error-Code": "GatedRepo"}, b"", body)
        action, _, rest = rest.partition("/")
        revision, _, file = rest.partition("/")
        commit = repository.main if revision in ("", "main") else revision
        if commit not in repository.commits:
            return _send(request, 404, {"X-Error-Code": "RevisionNotFound"}, b"", body)
        files = repository.commits[commit]
        if api:
            return _send(request, 200, {}, json.dumps(_listing(name, commit, files, action)).encode(), body)
        if file not in files:
            return _send(request, 404, {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": commit}, b"", body)
        return self._file(request, name, commit, file, files[file], large=large, body=body)

    def _file(
        self,
        request: BaseHTTPRequestHandler,
        name: str,
        commit: str,
        file: str,
        content: bytes,
        *,
        large: bool,
        body: bool,
    ) -> None:
        base = file.rpartition("/")[2]
        headers = {"X-Repo-Commit": commit, "ETag": f'"{_hash(file, content)}"', "Accept-Ranges": "bytes"}
        if file.endswith(LARGE) and not large:
            headers |= {"X-Linked-Size": str(len(content)), "X-Linked-ETag": headers["ETag"]}
            headers["Location"] = f"{self.address}/large/{name}/resolve/{commit}/{file}"
            return _send(request, 302, headers, b"", body)
        if body and base in self.faults.gone:
            return _send(request, self.faults.gone[base], {}, b"", body)
        if base in self.faults.wrong:
            content = content[:-1] + bytes([content[-1] ^ 1])
        status, size = 200, len(content)
        if start := request.headers.get("Range"):
            first = int(start.removeprefix("bytes=").partition("-")[0])
            status, content = 206, content[first:]
            headers["Content-Range"] = f"bytes {first}-{size - 1}/{size}"
        if body and base in self.faults.slow:
            threading.Event().wait(self.faults.slow[base])
        if body and self.faults.cut.get(base, 0) > 0:
            self.faults.cut[base] -= 1
            request.close_connection = True
            return _send(request, status, headers, content[: len(content) // 2], body, length=len(content))
        return _send(request, status, headers, content, body)


def _send(
    request: BaseHTTPRequestHandler,
    status: int,
    headers: Mapping[str, str],
    content: bytes,
    body: bool,
    length: int | None = None,
) -> None:
    request.send_response(status)
    for key, value in headers.items():
        request.send_header(key, value)
    request.send_header("Content-Length", str(len(content) if length is None else length))
    request.end_headers()
    if body:
        request.wfile.write(content)


@cache
def _hash(file: str, content: bytes) -> str:
    if file.endswith(LARGE):
        return hashlib.sha256(content).hexdigest()
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


def _listing(name: str, commit: str, files: Mapping[str, bytes], action: str) -> object:
    if action != "tree":
        siblings = [{"rfilename": file} for file in files]
        return {"id": name.removeprefix("datasets/"), "sha": commit, "siblings": siblings, "private": False, "tags": []}
    entries = []
    for file, content in files.items():
        entry: dict[str, object] = {"type": "file", "path": file, "size": len(content), "oid": "0" * 40}
        if file.endswith(LARGE):
            entry["lfs"] = {"oid": _hash(file, content), "size": len(content), "pointerSize": 100}
        else:
            entry["oid"] = _hash(file, content)
        entries.append(entry)
    return entries


@contextmanager
def serving() -> Iterator[Hub]:
    """Run a hub without repositories until the block ends."""
    hub = Hub()
    thread = threading.Thread(target=hub.server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        hub.server.shutdown()
        hub.server.server_close()
        thread.join()


@contextmanager
def reachable(monkeypatch: pytest.MonkeyPatch, cache: Path, address: str | None) -> Iterator[None]:
    """Let huggingface_hub ask `address`, as ``HF_ENDPOINT`` would (None: offline), and keep its files in `cache`."""
    from huggingface_hub import constants

    with monkeypatch.context() as patch:
        patch.setattr(constants, "HF_HUB_CACHE", str(cache))
        patch.setattr(constants, "HF_HUB_OFFLINE", address is None)
        patch.setattr(constants, "HF_HUB_DISABLE_XET", True)
        if address is not None:
            template = address + "/{repo_id}/resolve/{revision}/{filename}"
            patch.setattr(constants, "ENDPOINT", address)
            patch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        yield
