"""JSON files of results, as the items and the documents read them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from kvbench.errors import DataError


def content(path: Path) -> Any:
    """Return the content of a JSON file.

    Raises:
        DataError: the file is damaged.
    """
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:  # no JSON, or no UTF-8
        raise DataError(
            f"{path} is damaged: {error}.\n  hint: restore it (git checkout), or delete it and make it again"
        ) from None
