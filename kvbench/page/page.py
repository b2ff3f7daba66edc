"""Assembly of the page: one HTML file with its style, its script and its data, which loads nothing from elsewhere."""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

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
    "samples.js",
    "jobs.js",
    "views.js",
    "address.js",
    "live.js",
    "main.js",
)


def html(data: Mapping[str, Any], live: bool = False) -> str:
    """Return the page as text; a `live` one asks its server for new data.

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
