"""A headless Chromium of this machine, driven by playwright (the extra ``browser``); nothing is downloaded."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

#: environment variable with the path of the browser, and names under which it is looked for without it
VARIABLE = "KVBENCH_CHROMIUM"
NAMES = ("chromium", "chromium-headless-shell", "chromium-browser", "google-chrome")
OPTIONS = ("--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking")


def missing() -> str:
    """Return why no browser can be started here; empty if one can."""
    try:
        import playwright.sync_api  # noqa: F401
    except ImportError:
        return "playwright is not installed: pip install 'kvbench[browser]'"
    named = os.environ.get(VARIABLE)
    if named and not os.access(named, os.X_OK):
        return f"{VARIABLE}={named} is not a program"
    if not _path():
        return f"there is no Chromium: install it (Debian: apt install chromium), or set {VARIABLE} to its file"
    return ""


@contextmanager
def chromium() -> Iterator[Any]:
    """Yield a running browser, a playwright ``Browser``, and close it at the end of the block."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=_path(), args=list(OPTIONS))
        try:
            yield browser
        finally:
            browser.close()


def _path() -> str | None:
    return os.environ.get(VARIABLE) or next(filter(None, map(shutil.which, NAMES)), None)
