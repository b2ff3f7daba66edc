"""``python -m experiments.page``: size and times of the report's page with made-up runs, in a headless Chromium.

The runs are written to a temporary folder, and the page is made of them by ``python -m kvbench.report --html``. Each
time is the median over several visits. Needs the extra ``browser`` and a Chromium of
this machine; nothing is downloaded.
"""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

from experiments.measured import command_line, keep_json
from experiments.page.made import many
from experiments.stored import as_json
from kvbench.results.environment import commit, cpu_name

#: seconds from the start of the navigation until the first row of the table is in the document
FIRST_ROW = "performance.getEntriesByName('first row')[0].startTime"
#: notes the moment at which the first row appears, before any script of the page runs
WATCH = """
new MutationObserver((_, observer) => {
  if (!document.querySelector('.runs tbody .name')) return;
  performance.mark('first row');
  observer.disconnect();
}).observe(document, { childList: true, subtree: true });
"""
#: milliseconds of an action until the next frame has been drawn
TIMED = """() => new Promise((done) => {
  const began = performance.now();
  %s;
  requestAnimationFrame(() => setTimeout(() => done(performance.now() - began)));
})"""
SORT = "document.querySelector('[data-key=\"%s\"]').click()"
FILTER = (
    "const b = document.querySelector('%s'); b.value = '%s'; b.dispatchEvent(new Event('input', { bubbles: true }))"
)
ACTIONS = {
    "sort by score": SORT % "score",
    "sort by name": SORT % "name",
    "sort by a setting": SORT % "method.residual",
    "filter by text": FILTER % ("#search", "kivi residual=64"),
    "filter a column": FILTER % ("[data-filter=ratio]", "2..4"),
    "clear the filters": "document.querySelector('#filters button').click()",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and write ``page.json``; return the exit status."""
    parser = command_line("experiments.page", __doc__, "results/report/page.json")
    parser.add_argument("--runs", type=int, default=2000, help="number of made-up runs (default: %(default)s)")
    parser.add_argument("--visits", type=int, default=5, help="visits to take the median of (default: %(default)s)")
    arguments = parser.parse_args(argv)
    reason = missing()
    if reason:
        print(f"error: {reason}", file=sys.stderr)
        return 1
    with TemporaryDirectory() as folder:
        many(Path(folder) / "runs", arguments.runs)
        page = Path(folder) / "report.html"
        command = [sys.executable, "-m", "kvbench.report", "--results", f"{folder}/runs", "--html", str(page)]
        seconds = timed(lambda: subprocess.run(command, check=True, stdout=subprocess.DEVNULL))
        outcome = {
            "runs": arguments.runs,
            "page_bytes": page.stat().st_size,
            "limit_bytes": 300_000 + 2_000 * arguments.runs,
            "written_s": round(seconds, 1),
            "commit": commit(),
            "machine": f"{os.cpu_count()} processors of {cpu_name()}, {platform.system()}",
            "load": [round(value, 1) for value in os.getloadavg()],
            **visits(page, arguments.visits),
        }
    print(as_json(outcome), end="")
    return keep_json(outcome, arguments, lambda content: {"runs": content["runs"], "visits": content["visits"]})


def visits(page: Path, count: int) -> dict[str, Any]:
    """Return the medians over several visits, each in a new context: milliseconds by what was done.

    ``median_ms`` are times as a reader sees them, which other work on the machine makes longer. ``median_cpu_ms`` is
    the processor time of the page's main thread.
    """
    times: dict[str, list[float]] = {}
    processors: dict[str, list[float]] = {}
    with chromium() as browser:
        version = browser.version
        for _ in range(count):
            context = browser.new_context(viewport={"width": 1280, "height": 860})
            tab = context.new_page()
            tab.add_init_script(WATCH)
            inspector = context.new_cdp_session(tab)
            inspector.send("Performance.enable", {"timeDomain": "threadTicks"})
            tab.goto(f"file://{page}")
            tab.wait_for_selector(".runs tbody .name")
            times.setdefault("first row", []).append(tab.evaluate(FIRST_ROW))
            processor = {"first row": busy(inspector)}
            for name, action in ACTIONS.items():
                before = busy(inspector)
                times.setdefault(name, []).append(tab.evaluate(TIMED % action))
                processor[name] = busy(inspector) - before
            for name, value in processor.items():
                processors.setdefault(name, []).append(value)
            context.close()
    return {
        "visits": count,
        "chromium": version,
        "median_ms": {name: round(median(values), 1) for name, values in times.items()},
        "median_cpu_ms": {name: round(median(values), 1) for name, values in processors.items()},
        "all_ms": {name: [round(value, 1) for value in values] for name, values in times.items()},
    }


def busy(inspector: Any) -> float:
    """Return the milliseconds of processor time that the page's main thread has taken so far."""
    metrics = {entry["name"]: entry["value"] for entry in inspector.send("Performance.getMetrics")["metrics"]}
    return 1000 * float(metrics["TaskDuration"])


def timed(action: Callable[[], Any]) -> float:
    """Return the seconds that an action takes."""
    began = time.monotonic()
    action()
    return time.monotonic() - began


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


if __name__ == "__main__":
    raise SystemExit(main())
