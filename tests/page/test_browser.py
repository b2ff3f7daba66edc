"""The page in a headless Chromium: what a reader does with it, without an error in its console."""

from __future__ import annotations

import json

import pytest

from experiments.page.browser import chromium, missing
from experiments.page.made import many, row, run_id, write
from kvbench.cli import report
from tests.page.test_page import NASTY
from tests.page.test_papers import item
from tests.page.test_papers import write as write_item
from tests.page.test_server import serving

pytestmark = [pytest.mark.slow, pytest.mark.skipif(bool(missing()), reason=missing() or "a browser")]
VIEWS = ("runs", "quality", "differences", "memory", "times", "papers", "samples", "leaderboard")


@pytest.fixture(scope="module")
def browser():
    with chromium() as running:
        yield running


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    """The page of 60 made-up runs, with a pair of runs and an item of a paper."""
    folder = tmp_path_factory.mktemp("results")
    ids = many(folder / "runs", 60)
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


def names(page):
    return page.locator(".runs .name").all_text_contents()


def numbers(page, column):
    """The numbers in a column of the table, by its title."""
    titles = [text.strip("▼▲ ") for text in page.locator(".runs .sort").all_text_contents()]
    cells = page.locator(f".runs tbody tr:not(.spacer) > :nth-child({titles.index(column) + 1})").all_text_contents()
    return [float(text.split()[0].replace("−", "-").strip("×")) for text in cells if text != "–"]


def test_the_table_sorts_filters_and_hides_columns(visit, file):
    page = visit(f"file://{file}")
    assert page.locator("#count").text_content() == "60 runs"
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
    page.wait_for_function("document.querySelector('.runs tbody tr[aria-rowindex=\"62\"]')")
    assert last is None and page.locator(".runs").get_attribute("aria-rowcount") == "62"


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
    page.wait_for_selector("#toast.shown")
    assert page.evaluate("navigator.clipboard.readText()").startswith("python -m kvbench model=tiny method=")
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


def test_hover_names_the_run_and_a_click_copies_its_command(visit, file):
    page = visit(f"file://{file}#quality", permissions=["clipboard-read", "clipboard-write"])
    point = page.locator("figure").first.locator(".nameable").last  # the front is on top
    point.hover()
    assert page.locator("#tip").is_visible() and "score" in page.locator("#tip").text_content()
    point.click()
    page.wait_for_selector("#toast.shown")
    name = page.locator("#tip strong").text_content()
    assert f"method={name.split()[0]}" in page.evaluate("navigator.clipboard.readText()")


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
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth"), view


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


def test_the_leaderboard_keeps_to_the_bytes(visit, file):
    page = visit(f"file://{file}#leaderboard")
    rows = page.locator(".board tbody tr")
    ratios = [float(text.strip("×")) for text in rows.locator("td:nth-child(7)").all_text_contents()]
    methods = [text.split()[0] for text in rows.locator("th").all_text_contents()]
    assert ratios and all(ratio >= 3.97 for ratio in ratios) and len(set(methods)) == len(methods)
    assert rows.locator("code").first.text_content().startswith("python -m kvbench model=tiny")


def test_texts_of_runs_do_not_run(visit, tmp_path):
    for number, nasty in enumerate(NASTY):
        note = nasty.replace("\x00", "").encode("utf-8", "replace").decode()
        groups = {"method": {"note": note}, "dataset": {"name": note}}
        write(tmp_path / "runs", number, rows=[row(0, number / 10, nasty)], label=nasty, error=nasty, groups=groups)
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
    store = write(tmp_path, 1, rows=rows[:2], unfinished=True)
    with serving(tmp_path) as server:
        page = visit(server.address)
        page.wait_for_selector("text=unfinished, 2 samples")
        page.locator("#search").fill("kivi")
        store.append(rows[2:])
        page.wait_for_selector("text=unfinished, 6 samples", timeout=15_000)
        assert page.locator("#search").input_value() == "kivi"
        write(tmp_path, 2)
        page.wait_for_selector("text=2 runs", timeout=15_000)
        page.goto("about:blank")


def test_the_data_of_the_page_are_the_report_s(visit, file):
    page = visit(f"file://{file}")
    data = json.loads(page.locator("#data").text_content())
    assert len(data["runs"]) == 60 and data["papers"] and data["pairs"]
