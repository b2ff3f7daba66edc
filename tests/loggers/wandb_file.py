"""Reads a W&B offline file back: a LevelDB log of protocol-buffer records."""

from __future__ import annotations

import json
import struct
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_BLOCK = 32 * 1024


def records(path: Path) -> Iterator[bytes]:
    """Payloads of the records: after a 7-byte header, blocks of 32 KiB of (crc, length, type) and data."""
    data = path.read_bytes()
    assert data[:4] == b":W&B"
    place, parts = 7, b""
    while place + 7 <= len(data):
        left = _BLOCK - place % _BLOCK
        if left < 7:
            place += left
            continue
        _, length, kind = struct.unpack("<IHB", data[place : place + 7])
        place += 7
        if kind == 0:
            break
        parts += data[place : place + length]
        place += length
        if kind in (1, 4):  # a whole record, or the last part of one
            yield parts
            parts = b""


def read(path: Path, patience_s: float = 20.0) -> dict[str, Any]:
    """``{"config": {...}, "history": [...], "summary": {...}, "run_id": ..., "exit_code": ...}`` of a finished run.

    W&B's service writes on after `finish` has returned: the file is read again until its last record is there.
    """
    last = time.monotonic() + patience_s
    while True:
        try:
            found = _read(path)
        except Exception:  # a record that is half written
            found = {"exit": False}
        if found.pop("exit"):
            return found
        if time.monotonic() > last:
            raise TimeoutError(f"{path} has no end")
        time.sleep(0.05)


def _read(path: Path) -> dict[str, Any]:
    from wandb.proto import wandb_internal_pb2

    found: dict[str, Any] = {"config": {}, "history": [], "summary": {}, "run_id": None, "exit": False, "artifacts": {}}
    for payload in records(path):
        record = wandb_internal_pb2.Record()
        record.ParseFromString(payload)
        kind = record.WhichOneof("record_type")
        if kind == "run":
            found |= {name: getattr(record.run, name) for name in ("run_id", "display_name", "run_group", "job_type")}
            found["tags"] = list(record.run.tags)
            found["config"] |= _items(record.run.config.update)
        elif kind == "config":
            found["config"] |= _items(record.config.update)
        elif kind == "history":
            found["history"].append(_items(record.history.item))
        elif kind == "summary":
            found["summary"] |= _items(record.summary.update)
        elif kind == "artifact":
            entries = record.artifact.manifest.contents
            found["artifacts"][record.artifact.name] = {entry.path: Path(entry.local_path) for entry in entries}
        elif kind == "request" and record.request.WhichOneof("request_type") == "log_artifact":
            artifact = record.request.log_artifact.artifact
            found["artifacts"][artifact.name] = {
                entry.path: Path(entry.local_path) for entry in artifact.manifest.contents
            }
        elif kind == "exit":
            found["exit"], found["exit_code"] = True, record.exit.exit_code
    return found


def _items(items: Any) -> dict[str, Any]:
    return {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in items}
