"""Reading of a built page."""

from __future__ import annotations

import json
import re
from typing import Any


def data_of(page: str) -> dict[str, Any]:
    """Return the data in a page, found as a browser finds them: up to the first end of the element."""
    match = re.search(r'<script id="data" type="application/json">(.*?)</script', page, re.DOTALL | re.IGNORECASE)
    assert match is not None
    content: dict[str, Any] = json.loads(match[1])
    return content
