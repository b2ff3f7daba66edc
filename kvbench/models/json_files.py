"""Reading of a checkpoint's JSON files; a damaged file is an error that names it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from kvbench.errors import ModelError

#: largest JSON file in bytes; the largest vocabularies have tens of MB
JSON_LIMIT = 1 << 30


class DamagedFile(ModelError):
    """Error for a file of a checkpoint that cannot be read or contains impossible values.

    The problem is a verb phrase, for example ``is a folder, not a file``; the hint, advice, ends the message.
    """

    def __init__(self, file: Path, problem: str, hint: str = "copy or download the checkpoint's file again") -> None:
        self.file, self.problem, self.hint = file, problem, hint
        super().__init__(f"{file} cannot be loaded: it {problem}.\n  hint: {hint}")


def read_object(file: Path) -> dict[str, Any]:
    """Return the JSON object in a file.

    Raises:
        DamagedFile: the file cannot be read, is larger than 1 GiB, or is not a JSON object.
    """
    try:
        if file.stat().st_size > JSON_LIMIT:
            raise DamagedFile(file, f"has {file.stat().st_size} bytes, which is too large for a file of this kind")
        data = json.loads(file.read_text(encoding="utf-8-sig"))
    except RecursionError:
        raise DamagedFile(file, "is nested too deeply to be read") from None
    except (OSError, ValueError) as error:
        raise DamagedFile(file, f"cannot be read ({first_line(error)})") from error
    if not isinstance(data, dict):
        raise DamagedFile(file, f"contains {json_kind(data)} instead of a JSON object")
    return data


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message without its full stop, or the error's type if there is no message."""
    lines = str(error).strip().splitlines()
    return lines[0].rstrip(".")[:300] if lines else type(error).__name__


def json_kind(value: Any) -> str:
    """Return what a JSON value is, in words: ``an object``, ``a list``, ``text``, ..., ``null``."""
    kinds = {dict: "an object", list: "a list", str: "text", bool: "true or false", int: "a number", float: "a number"}
    return kinds.get(type(value), "null")
