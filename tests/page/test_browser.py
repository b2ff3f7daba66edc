"""The page in a headless Chromium: what a reader does with it, without an error in its console."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest

from experiments.page.__main__ import chromium, missing
from experiments.page.made import made_point, many, row, run_id, write_made_run
from kvbench.cli import report
from kvbench.cli.report_page import reader
from kvbench.fit.command import main as fit
from kvbench.page.data import FollowedSweep, Report
from kvbench.page.server import html
from kvbench.results.store import find_runs
from kvbench.results.sweeps import Sweep
from tests.page.test_papers import item
from tests.page.test_papers import write as write_item
from tests.page.test_server import serving
from tests.page.test_server_page import NASTY, compared
from tests.page.test_shared import RECIPE
from tests.publish.sweep_support import put, write_sweep

pytestmark = [pytest.mark.slow, pytest.mark.skipif(bool(missing()), reason=missing() or "a browser")]
VIEWS = ("runs", "quality", "fidelity", "differences", "memory", "times", "points", "papers", "samples", "leaderboard")
RUNS = 65
RESULTS = Path(__file__).resolve().parents[2] / "results"
LONG = "a very long name of a setting " * 20


@pytest.fixture(scope="module")
def browser():
    with chromium() as running:
        yield running


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    """The page of 60 made-up runs, two of time and memory and three of fidelity, with a pair and an item of a paper."""
    folder = tmp_path_factory.mktemp("results")
    ids = many(folder / "runs", 60)
    for number, method in enumerate(("fp16", "kivi")):
        pace = 0.01 * (2 - number)
        rows = [
            made_point(n, batch, pace * n / 4096, 100 * n, fits=n * batch < 32768)
            for n in (4096, 16384)
            for batch in (1, 4)
        ]
        write_made_run(
            folder / "runs", number, method, setting=99, rows=rows, groups={"dataset": {"name": "efficiency"}}
        )
    for number, (method, spread) in enumerate((("fp16", 0.0), ("kivi", 0.01), ("atom", 0.001))):
        write_made_run(
            folder / "runs", number, method, setting=98, rows=compared(spread), groups={"dataset": {"name": "fidelity"}}
        )
    write_item(folder, item(ids[1]))
    arguments = ["--results", str(folder / "runs"), "--html", str(folder / "report.html"), "--pair", ids[0], ids[1]]
    assert report.main(arguments) == 0
    return folder / "report.html"


@pytest.fixture
def visit(browser):
    """Function that opens an address and returns the page; no test may leave an error in a console."""
    errors, contexts = [], []

    def open_page(address, width=1280, **options):
        contexts.append(browser.new_context(viewport={"width": width, "height": 800}, **options))
        page = contexts[-1].new_page()
        page.on("console", lambda message: message.type in ("error", "warning") and errors.append(message.text))
        page.on("pageerror", lambda error: errors.append(str(error)))
        page.on("dialog", lambda dialog: errors.append(f"dialog: {dialog.message}"))
        page.on("request", lambda request: request.url.startswith(("file:", "data:", "http://127.0.0.1"))
                or errors.append(f"request: {request.url}"))  # fmt: skip
        page.goto(str(address))
        return page

    yield open_page
    for context in contexts:
        context.close()
    assert errors == []


def unnamed(page):
    """Elements that take the keyboard and have no name for a screen reader, and marks without a role."""
    return page.evaluate("""() => {
      const all = 'button, a[href], select, input, summary, [role=button], [role=tab], svg[role], table';
      const named = (node) => node.getAttribute('aria-label') || node.textContent.trim() || node.title
        || node.labels?.length || node.querySelector('caption');
      const shown = (node) => node.offsetParent !== null || node.ownerSVGElement;
      return [...document.querySelectorAll(all)].filter((node) => shown(node) && !named(node))
        .map((node) => node.outerHTML.slice(0, 200));
    }""")


def names(page):
    return page.locator(".runs .name").all_text_contents()


def numbers(page, column):
    """The numbers in a column of the table, by its title."""
    titles = [text.strip("▼▲ ") for text in page.locator(".runs .sort").all_text_contents()]
    cells = page.locator(f".runs tbody tr:not(.spacer) > :nth-child({titles.index(column) + 1})").all_text_contents()
    return [float(text.split()[0].replace("−", "-").strip("×")) for text in cells if text != "–"]


def test_the_table_sorts_filters_and_hides_columns(visit, file):
    page = visit(f"file://{file}")
    assert page.locator("#count").text_content() == f"{RUNS} runs"
    scores = numbers(page, "score")
    assert len(scores) > 10 and scores == sorted(scores, reverse=True)
    page.locator(".sort", has_text="ratio").click()
    ratios = numbers(page, "ratio")
    assert ratios == sorted(ratios, reverse=True)
    assert page.locator("th[aria-sort=descending]").text_content().startswith("ratio")
    page.locator(".sort", has_text="ratio").click()
    assert numbers(page, "ratio") == sorted(numbers(page, "ratio"))
    page.locator("[data-filter=ratio]").fill("2..4")
    assert all(2 <= ratio <= 4 for ratio in numbers(page, "ratio"))
    page.locator("[data-filter=ratio]").fill("")
    page.locator("#search").fill("kivi residual=64")
    assert names(page) and all("kivi" in name and "residual=64" in name for name in names(page))
    page.locator("#search").fill("nothing like this")
    assert page.locator(".runs .empty").text_content() == "No run passes the filters."
    page.locator("#search").fill("")
    page.locator(".chooser summary").click()
    page.locator(".chooser label", has_text="perplexity").locator("input").set_checked(False)
    page.locator(".chooser label", has_text="copy_long@2048").locator("input").first.set_checked(True)
    titles = page.locator(".runs .sort").all_text_contents()
    assert "copy_long@2048" in titles and "perplexity" not in titles


def test_only_the_rows_in_sight_are_in_the_document(visit, file):
    page = visit(f"file://{file}")
    assert page.locator(".runs tbody tr").count() < 60
    last = page.evaluate("() => { const b = document.querySelector('.scroll'); b.scrollTop = b.scrollHeight; }")
    page.wait_for_function("document.querySelector('.runs tbody tr[aria-rowindex=\"%s\"]')" % (RUNS + 2))
    assert last is None and page.locator(".runs").get_attribute("aria-rowcount") == str(RUNS + 2)


def test_the_keyboard_is_enough(visit, file):
    page = visit(f"file://{file}", permissions=["clipboard-read", "clipboard-write"])
    page.locator("#tab-runs").focus()
    page.keyboard.press("ArrowRight")
    assert page.locator("#tab-quality").get_attribute("aria-selected") == "true"
    marks = page.locator("figure").first.locator(".nameable")
    assert marks.count() > 50 and page.locator("figure").first.locator(".nameable[tabindex='0']").count() == 1
    page.locator("figure").first.locator(".nameable[tabindex='0']").focus()
    page.keyboard.press("ArrowRight")
    focused = page.evaluate("document.activeElement.getAttribute('aria-label')")
    assert page.locator("#tip").is_visible() and page.locator("#tip strong").text_content() in focused
    page.keyboard.press("Enter")
    assert page.locator("dialog h2").text_content() in focused and page.locator("#tip").is_hidden()
    page.keyboard.press("Escape")
    page.wait_for_selector("dialog", state="detached")
    assert page.evaluate("document.activeElement.getAttribute('aria-label')") == focused
    page.keyboard.press("Escape")
    assert page.locator("#tip").is_hidden()
    page.locator("#tab-quality").focus()
    page.keyboard.press("ArrowLeft")
    page.locator(".runs .name").first.focus()
    page.keyboard.press("ArrowDown")
    page.keyboard.press("Enter")
    assert page.locator("dialog").is_visible()
    assert page.locator("dialog h2").text_content() == names(page)[1]
    page.keyboard.press("Escape")
    page.wait_for_selector("dialog", state="detached")


@pytest.mark.parametrize("width", [390, 1280])
def test_hover_names_the_run_and_a_click_shows_its_details(visit, file, width):
    page = visit(f"file://{file}#quality", width, permissions=["clipboard-read", "clipboard-write"])
    point = page.locator("figure").first.locator(".nameable").last  # the front is on top
    point.hover()
    assert page.locator("#tip").is_visible() and "score" in page.locator("#tip").text_content()
    name = page.locator("#tip strong").text_content()
    point.click()
    assert page.locator("dialog h2").text_content() == name
    assert page.locator("dialog .figures dt").first.text_content() == "score"
    assert "device_name" in page.locator("dialog .facts").last.text_content()
    page.locator("dialog button", has_text="Copy").click()
    page.wait_for_selector("#toast.shown")
    assert f"method={name.split()[0]}" in page.evaluate("navigator.clipboard.readText()")
    page.locator("dialog .close").click()
    page.wait_for_selector("dialog", state="detached")
    page.locator("#tab-runs").click()
    page.locator(".runs tbody td").nth(3).click()
    assert page.locator("dialog h2").text_content() == names(page)[0]
    page.keyboard.press("Escape")
    page.wait_for_url(lambda url: "run=" not in url)
    page.locator(".scroll").evaluate("(box) => { box.scrollTop = 500; }")
    page.wait_for_selector(".runs tbody tr[aria-rowindex='20']")
    for close in (lambda: page.keyboard.press("Escape"), page.go_back):  # both leave the table where it was
        page.locator(".runs tbody tr[aria-rowindex='20'] .name").click()
        assert "run=" in page.url
        close()
        page.wait_for_url(lambda url: "run=" not in url)
        page.wait_for_selector("dialog", state="detached")
        assert page.locator(".scroll").evaluate("(box) => box.scrollTop") >= 400


def test_a_narrow_screen_shows_the_score_first(visit, file):
    page = visit(f"file://{file}", 390)
    titles = [text.strip("▼▲ ") for text in page.locator(".runs .sort").all_text_contents()]
    assert titles[:3] == ["score", "KL", "run"] and "± error" not in titles
    assert re.fullmatch(r"1\.000 ±0\.\d{3}", page.locator(".runs tbody td").nth(1).text_content())
    assert titles.index("data") > titles.index("KV bytes")
    for column in ("score", "KL", "run"):
        box = page.locator(".runs thead th", has_text=column).first.bounding_box()
        assert box["x"] >= 0 and box["x"] + box["width"] <= 390, column
    page.set_viewport_size({"width": 1280, "height": 800})
    page.wait_for_selector(".runs thead th:first-child [data-key=name]")


def test_the_address_holds_the_choices(visit, file):
    page = visit(f"file://{file}")
    page.locator("#search").press_sequentially("kivi sinks=4")
    page.locator("[data-filter=ratio]").press_sequentially("2..4")
    page.locator(".sort", has_text="ratio").click()
    page.locator(".chooser summary").click()
    page.locator(".chooser label", has_text="perplexity").locator("input").set_checked(True)
    seen, address = names(page), page.url
    assert 0 < len(seen) < 20 and numbers(page, "ratio") == sorted(numbers(page, "ratio"), reverse=True)
    page.go_back()  # the column
    assert "perplexity" not in page.locator(".runs thead").text_content() and names(page) == seen
    page.go_back()  # the order
    assert numbers(page, "ratio") != sorted(numbers(page, "ratio"), reverse=True) and set(names(page)) == set(seen)
    page.go_back()  # all letters of one field
    assert page.locator("[data-filter=ratio]").input_value() == "" and len(names(page)) > len(seen)
    page.go_forward()
    assert page.locator("[data-filter=ratio]").input_value() == "2..4"
    page.locator(".runs .name").first.click()
    details = page.url
    page.go_back()
    page.wait_for_selector("dialog", state="detached")
    other = visit(address)
    assert names(other) == seen and other.locator("#search").input_value() == "kivi sinks=4"
    assert "perplexity" in other.locator(".runs thead").text_content()
    third = visit(details)
    assert third.locator("dialog h2").text_content() in seen
    third.keyboard.press("Escape")
    third.wait_for_url(lambda url: "run=" not in url)
    page.locator("#filters button", has_text="Clear").click()
    page.locator("#tab-points").click()
    page.locator("#main [data-key=rate]").click()
    fourth = visit(page.url)
    assert fourth.locator("[data-key=rate]").get_attribute("aria-pressed") == "true"


@pytest.mark.parametrize(
    "address",
    ["__proto__?metric=__proto__&point=constructor&axis=toString", "points?fixed=1e9&pair=-1&budget=7&sort=-nope",
     "leaderboard?model=nope&group=nope&budget=99", "times?metric=<img src=x>&hide=name&show=%ff&run=nope", "?&&=%"],
)  # fmt: skip
def test_an_odd_address_breaks_nothing(visit, file, address):
    page = visit(f"file://{file}#{address}")
    assert page.locator("#main").text_content().strip() and page.locator("#main .empty").count() == 0
    assert page.locator("img").count() == 0


@pytest.mark.parametrize("width", [390, 1280])
def test_a_wrong_filter_says_what_is_wrong(visit, file, width):
    page = visit(f"file://{file}#runs?filter.nothing=3", width)
    said = page.locator("#problems")
    assert "nothing: the filter 3 is not applied: the table has no such column" in said.text_content()
    for typed, why in (
        (">>3", ">3 is not a number. Type for example >=0.8"), ("4..2", "its first number is the larger one"),
        (">", "it has no number"), ("<2 MiB", "2 MiB is not a number with a unit of this column"),
    ):  # fmt: skip
        page.locator("[data-filter=ratio]").fill(typed)
        assert f"ratio: the filter {typed} is not applied: {why}" in said.text_content()
        assert page.locator("[data-filter=ratio]").get_attribute("aria-invalid") == "true"
        assert page.locator("#count").text_content() == f"{RUNS} runs"
    page.locator("[data-filter=ratio]").fill("")
    page.locator("[data-filter=kv]").fill("<10ms")
    assert "KV bytes: the filter <10ms is not applied" in said.text_content() and "MiB" in said.text_content()
    page.locator("#tab-memory").click()
    assert "<10ms is not applied" in said.text_content()
    page.locator("#filters button", has_text="Clear").click()
    assert said.text_content() == ""
    page.locator("#tab-runs").click()
    for typed, fits in (("!=1", lambda ratio: abs(ratio - 1) > 0.005), ("<=2x", lambda ratio: ratio <= 2.005)):
        page.locator("[data-filter=ratio]").fill(typed)
        assert numbers(page, "ratio") and all(map(fits, numbers(page, "ratio"))) and said.text_content() == ""
    page.locator("[data-filter=name]").fill("!")
    assert "run: the filter ! is not applied: it has no text" in said.text_content()


@pytest.mark.parametrize("width", [390, 1280])
def test_fidelity_has_its_columns_and_plots(visit, file, width):
    page = visit(f"file://{file}#fidelity", width)
    captions = page.locator("figcaption").all_text_contents()
    assert captions == ["KL divergence against bytes", "same top token against bytes"]
    titles = page.locator("figure").first.locator(".title").all_text_contents()
    assert titles == ["KV bytes of a sequence", "KL divergence from fp16 (nats per token)"]
    marks = page.locator("figure").first.locator(".nameable")
    assert marks.count() == 2 and "fp16" not in page.locator(".legend").first.text_content()
    label = marks.first.get_attribute("aria-label")
    assert "KL divergence 0.105 (" in label and page.locator("figure").first.locator(".error").count() == 2
    page.locator("#filters select").last.select_option(f"{0:010x}")
    assert page.locator("figcaption").all_text_contents() == ["flips against bytes"]
    flips = page.locator(".nameable[data-id]").first.get_attribute("aria-label")
    assert " lost and " in flips and " of 20" in flips
    page.locator("#tab-runs").click()
    assert max(numbers(page, "flips")) > 10
    page.locator("[data-filter=same]").fill(">50%")
    assert numbers(page, "same top") == [90, 90, 90] and numbers(page, "KL")[0] == 0


@pytest.mark.parametrize("width", [390, 1280])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_every_view_fits(visit, file, scheme, width):
    page = visit(f"file://{file}", width, color_scheme=scheme)
    red, green, blue = page.evaluate("getComputedStyle(document.body).backgroundColor.match(/\\d+/g).map(Number)")
    assert (red + green + blue < 200) == (scheme == "dark")
    for view in VIEWS:
        page.locator(f"#tab-{view}").click()
        assert page.locator("#main").text_content().strip()
        assert page.locator("#main .empty").count() == 0, view
        assert unnamed(page) == [], view
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth"), view


def test_points_are_lines_over_the_prompt_or_the_batch(visit, file):
    page = visit(f"file://{file}#points", permissions=["clipboard-read", "clipboard-write"])
    page.locator("#main [data-key=rate]").click()
    assert page.locator("figcaption").text_content() == "tokens/s by prompt length"
    page.locator("#main label select").select_option("4")
    assert page.locator(".plot .line").count() == 2 and page.locator(".plot .lost").count() == 2
    assert "Crosses at the top: 2 points that ran out of memory" in page.locator("figure .note").text_content()
    page.locator("#main [data-key=batch]").click()
    assert page.locator("figcaption").text_content() == "tokens/s by batch size"
    assert page.evaluate("document.activeElement.dataset.key") == "batch"
    page.locator(".plot .nameable").first.focus()
    tip = page.locator("#tip").text_content()
    assert "4k tokens, batch 1" in tip and "tokens/s" in tip
    page.keyboard.press("Enter")
    assert "dataset=efficiency" in page.locator("dialog .command").text_content()
    page.keyboard.press("Escape")
    page.locator("#tab-quality").click()
    page.locator("#filters select").last.select_option(f"{99:010x}")
    page.locator("#main button", has_text="Show points").click()
    assert page.locator("#tab-points").get_attribute("aria-selected") == "true"


def test_the_repository_s_own_results(visit, tmp_path):
    """All items of the papers and the measured leaderboard, without a single run."""
    file = tmp_path / "report.html"
    assert report.main(["--results", str(RESULTS / "runs-of-nobody"), "--html", str(file)]) == 0
    assert file.stat().st_size < 300_000
    for width in (1280, 390):
        page = visit(f"file://{file}", width)
        assert page.locator("#tab-papers").get_attribute("aria-selected") == "true"
        items = page.locator("details.paper")
        assert items.count() == len([*RESULTS.glob("*/*/cells.json"), *RESULTS.glob("*/*/*/cells.json")])
        for i in range(items.count()):
            if items.nth(i).get_attribute("open") is None:
                items.nth(i).locator("summary").first.click()
        page.wait_for_function(
            "[...document.querySelectorAll('details.paper > div')].every((box) => box.childNodes.length)"
        )
        assert page.locator(".plot .theirs").count() > 20 and page.locator("td", has_text="(").count() > 10
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth") and unnamed(page) == []
        page.locator("#main select").first.select_option("quantspec")
        assert all("quantspec" in text for text in page.locator("details.paper h2").all_text_contents())
        page.locator("#tab-leaderboard").click()
        assert page.locator(".board tbody tr").count() > 4
        page.locator(".board .name").first.click()
        assert "python -m kvbench method=" in page.locator("dialog .command").text_content()
        page.keyboard.press("Escape")
        for view in VIEWS:
            page.locator(f"#tab-{view}").click()


def test_the_jobs_of_a_sweep(visit, tmp_path):
    results = tmp_path / "results"
    stores = [write_made_run(results / "runs", number) for number in range(3)]
    write_sweep(results, stores)
    file = results / "report.html"
    assert report.main(["--results", str(results / "runs"), "--sweep", "today", "--html", str(file)]) == 0
    page = visit(f"file://{file}", permissions=["clipboard-read", "clipboard-write"])
    assert page.locator("#tab-sweep").get_attribute("aria-selected") == "true"
    assert page.locator(".jobs tbody tr").count() == 5 and "3 done" in page.locator("#main .count").text_content()
    page.locator(".jobs .copy").nth(4).click()
    page.wait_for_selector("#toast.shown")
    assert page.evaluate("navigator.clipboard.readText()") == "python -m kvbench method=kivi method.residual=160"
    page.locator("#main select").select_option("failed")
    assert page.locator(".jobs tbody tr").count() == 1 and "a bad value" in page.locator("table.jobs").text_content()
    page.locator("#main select").select_option("done")
    page.locator(".jobs .name").first.click()
    assert page.locator("dialog .facts").first.is_visible()
    page.keyboard.press("Escape")
    assert unnamed(page) == []
    for view in ("sweep", *VIEWS):
        page.locator(f"#tab-{view}").click()


def test_the_page_follows_a_sweep(visit, tmp_path):
    results = tmp_path / "results"
    folder = write_sweep(results, [write_made_run(results / "runs", 0)])
    with serving(results / "runs", sweep=FollowedSweep(Sweep.open(folder))) as server:
        page = visit(server.address)
        page.wait_for_selector("text=1 done, 1 failed, 1 not started")
        put(folder, 2, metrics=write_made_run(results / "runs", 2).metrics())
        page.wait_for_selector("text=2 done, 1 failed", timeout=15_000)
        page.goto("about:blank")


def odd(folder, name):
    """Write runs that are unusual in one way."""
    if name == "nothing":
        folder.mkdir(parents=True)
    elif name == "one":
        write_made_run(folder, 1)
    elif name == "unfinished":
        write_made_run(folder, 1, unfinished=True, rows=[])
        write_made_run(folder, 2, unfinished=True)
    elif name == "nan":
        for number, value in enumerate((float("nan"), float("inf"), None)):
            write_made_run(folder, number, groups={"method": {"alpha": value}}, rows=[row(0, 1.0)] if number else [])
    elif name == "models":
        for number in range(9):
            write_made_run(folder, number, setting=number % 3, groups={"model": {"name": f"model {number % 3}"}})
    elif name == "long":
        write_made_run(folder, 1, "fp16", label=LONG, rows=[row(0, 1.0, LONG * 9, task=LONG[:200])])
        write_made_run(
            folder, 2, label=LONG, groups={"model": {"name": LONG}, "dataset": {"name": LONG}, "method": {LONG: LONG}}
        )
    elif name == "methods":
        for number in range(60):
            write_made_run(folder, number, label=f"method{number} int2")
    elif name == "same":
        for number in range(5):
            write_made_run(folder, number, rows=[row(0, 0.0), row(1, 0.0)])


@pytest.mark.parametrize("name", ["nothing", "one", "unfinished", "nan", "models", "long", "methods", "same"])
def test_unusual_runs_break_no_view(visit, tmp_path, name):
    folder = tmp_path / "results" / "runs"
    odd(folder, name)
    shown = Report(lambda: find_runs(folder), reader(), folder, folder.parent)
    file = tmp_path / "report.html"
    file.write_text(html(shown.data()), encoding="utf-8")
    for width in (1280, 390):
        page = visit(f"file://{file}", width)
        for view in VIEWS:
            page.locator(f"#tab-{view}").click()
            assert page.locator("#main").text_content().strip(), view
            assert page.evaluate("document.documentElement.scrollWidth <= innerWidth"), view
            assert (
                "NaN" not in page.locator("#main").inner_html()
                and "undefined" not in page.locator("#main").inner_html()
            ), view


def test_the_switch_of_the_theme_wins_over_the_system(visit, file):
    page = visit(f"file://{file}", color_scheme="dark")
    dark = page.evaluate("getComputedStyle(document.body).backgroundColor")
    page.locator("#theme").click()
    assert page.locator("#theme").text_content() == "Theme: light"
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") != dark
    page.locator("#theme").click()
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == dark


def test_samples_of_a_pair_stand_side_by_side(visit, file):
    page = visit(f"file://{file}#samples")
    assert page.locator(".sides dd").first.text_content() == "fp16"
    first = page.locator(".samples li").first
    assert first.locator(".side").count() == 2 and first.locator("mark").count() >= 1
    page.locator("[aria-label='Which samples']").select_option("A")
    for scores in page.locator(".samples h4 span").all_text_contents()[::2]:
        assert scores == "1.000"


@pytest.mark.parametrize("width", [390, 1280])
def test_the_leaderboard_keeps_to_the_bytes(visit, file, width):
    page = visit(f"file://{file}#leaderboard", width)
    rows = page.locator(".board tbody tr")
    assert rows.count() > 1  # without any choice
    page.locator("#main select").last.select_option("3")
    ratios = [float(text.strip("×")) for text in rows.locator("td:nth-child(7)").all_text_contents()]
    methods = [text.split()[0] for text in rows.locator("th").all_text_contents()]
    assert ratios and all(ratio >= 2.98 for ratio in ratios) and len(set(methods)) == len(methods)
    assert rows.locator("code").first.text_content().startswith("python -m kvbench model=tiny")


def test_texts_of_runs_do_not_run(visit, tmp_path):
    for number, nasty in enumerate(NASTY):
        note = nasty.replace("\x00", "").encode("utf-8", "replace").decode()
        groups = {"method": {"note": note}, "dataset": {"name": note}}
        write_made_run(
            tmp_path / "runs", number, rows=[row(0, number / 10, nasty)], label=nasty, error=nasty, groups=groups
        )
    pairs = [text for number in range(1, len(NASTY)) for text in ("--pair", run_id(0), run_id(number))]
    arguments = ["--results", str(tmp_path / "runs"), "--html", str(tmp_path / "report.html"), *pairs]
    assert report.main(arguments) == 0
    page = visit(f"file://{tmp_path / 'report.html'}")
    assert NASTY[0] in " ".join(names(page))
    for view in VIEWS:
        page.locator(f"#tab-{view}").click()
    page.locator("#tab-samples").click()
    page.locator("#main select").first.select_option("2")
    assert NASTY[3] in page.locator(".samples").text_content()
    assert page.locator("img").count() == 0


def test_the_page_of_the_server_follows_a_run(visit, tmp_path):
    rows = [row(index, 1.0) for index in range(6)]
    store = write_made_run(tmp_path, 1, rows=rows[:2], unfinished=True)
    with serving(tmp_path) as server:
        page = visit(server.address)
        page.wait_for_selector("text=unfinished, 2 samples")
        page.locator("#search").fill("kivi")
        store.append(rows[2:])
        page.wait_for_selector("text=unfinished, 6 samples", timeout=15_000)
        assert page.locator("#search").input_value() == "kivi"
        write_made_run(tmp_path, 2)
        page.wait_for_selector("text=2 runs", timeout=15_000)
        page.goto("about:blank")


def test_the_data_of_the_page_are_the_report_s(visit, file):
    page = visit(f"file://{file}")
    data = json.loads(page.locator("#data").text_content())
    assert len(data["runs"]) == RUNS and data["papers"] and data["pairs"]


@pytest.mark.parametrize("width", [1280, 380])
def test_recipes_answers_and_shared_rows_have_views(visit, tmp_path, capsys, width):
    """Texts stay texts, the map has a table, and the rows of leaderboard/ say whose they are."""
    capsys.readouterr()
    assert fit(["tiny", "--gpu", "l4", "--json", "--formats", "fp16", "fp8"]) == 0
    answer, recipe = tmp_path / "fit.json", tmp_path / "recipe.json"
    answer.write_text(capsys.readouterr().out)
    recipe.write_text(json.dumps({**RECIPE, "model": NASTY[0], "layers": RECIPE["layers"] * 20}))
    shutil.copytree(RESULTS.parent / "leaderboard", tmp_path / "leaderboard")
    runs, file = tmp_path / "results" / "runs", tmp_path / "page.html"
    write_made_run(runs, 0, "kivi")
    files = ["--add", str(recipe), "--add", str(answer)]
    assert report.main(["--results", str(runs), "--html", str(file), *files]) == 0
    page = visit(f"file://{file}#recipes", width=width)
    assert page.locator("h2").first.text_content() == NASTY[0]
    assert page.locator(".cell.b16").count() == 20 + 1 and page.locator("svg .bits").nth(0).text_content() == "16"
    page.locator(".recipe summary").click()
    assert page.locator(".recipe tbody tr").nth(1).text_content() == "1q5_1nvfp4"
    assert unnamed(page) == []
    page.locator("#tab-fit").click()
    assert page.locator("tr.best th").text_content() == "fp16 (recommended)" and unnamed(page) == []
    page.locator("#tab-leaderboard").click()
    page.get_by_label("Data").select_option(label="leaderboard/: fidelity over mini_text, 10 runs")
    assert page.locator(".board tbody tr").count() == 10
    assert page.locator(".board tbody tr").first.locator("td").last.text_content() == "kvbench, self-reported"
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
