"""Numbers of the documents: held to their files, outcome, compared and written as the document shows them."""

import subprocess
import sys
from pathlib import Path

import pytest

from experiments import check
from experiments.checks import all_rules
from experiments.checks.rules import Block, Text, agrees, check_documents, like, three
from experiments.stored import ROOT, grid, one

PAGE = """# Speed

Methods take 1.8 ms less
than fp16's 12.5 ms, over 1,319 samples.

| | kivi | atom |
|---|---|---|
| speed | 3.4 (+.120 ±.005) | −7.1 |
| bits | 2 | 4 |

## Later

| | kivi |
|---|---|
| speed | 9.9e-5 |
"""


def page(folder: Path, text: str = PAGE) -> Path:
    (folder / "page.md").write_text(text, encoding="utf-8")
    return folder


def text(*values, pattern="take {} ms less than fp16's {} ms, over {} samples"):
    return Text("page.md", "figures.json", pattern.format(*values))


def row(*values, pattern="| speed | {} ({} ±{}) | {} |"):
    return text(*values, pattern=pattern)


LATER = "| speed | {} |"


def test_the_documents_show_what_their_files_say():
    outcome = check_documents(all_rules())
    assert [str(difference) for difference in outcome.differences] == [], "python -m experiments --check --write"
    assert outcome.lost == []
    assert len(outcome.covered) > 12 and sum(map(len, outcome.covered.values())) > 5000
    missing = check.uncovered(outcome.covered, check.checked_documents(ROOT))
    assert [place for place in missing if place[0] == "README.md"] == []


def test_the_check_needs_no_torch():
    code = "import sys; from experiments.check import main; main([]); sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, stdout=subprocess.DEVNULL)


def test_numbers_are_compared_with_the_digits_that_are_shown(tmp_path):
    agreeing = [text(1.8499, 12.4501, 1319), row(3.35, 0.1204, 0.0051, -7.05), row(9.94e-5, pattern=LATER)]
    assert check_documents(agreeing, page(tmp_path)).differences == []
    outcome = check_documents([text(1.86, 12.5, 1320), row(3.4, 0.12, 0.0056, 7.1)], tmp_path).differences
    assert [(entry.line, entry.shown, entry.wanted) for entry in outcome] == [
        (3, "1.8", "1.9"),
        (4, "1,319", "1,320"),
        (8, ".005", ".006"),
        (8, "−7.1", "+7.1"),
    ]
    assert str(outcome[0]) == "page.md:3: shows 1.8, figures.json gives 1.9"


def test_writing_changes_the_numbers_and_nothing_else(tmp_path):
    wanted = [text(0.04, 12.5, 1_000_000), row(-3.41, -0.0004, 0.005, -0.04), row(2e-4, pattern=LATER)]
    assert len(check_documents(wanted, page(tmp_path), write=True).differences) == 6
    assert (tmp_path / "page.md").read_text() == PAGE.replace("1.8", "0.0").replace("1,319", "1,000,000").replace(
        "3.4 (+.120", "-3.4 (+.000"
    ).replace("−7.1", "+0.0").replace("9.9e-5", "2.0e-4")
    assert check_documents(wanted, tmp_path).differences == []


def test_whole_tables_are_the_program_s(tmp_path):
    lines = [line for line in PAGE.splitlines() if line.startswith("|")]
    assert check_documents([Block("page.md", "\n".join(lines), "x.json")], page(tmp_path)).differences == []
    lines[3] = "| bits | 2 | 8 |"
    check_documents([Block("page.md", "\n".join(lines), "x.json")], tmp_path, write=True)
    assert (tmp_path / "page.md").read_text() == PAGE.replace("| bits | 2 | 4 |", lines[3])


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        (text(1.0, pattern="takes {} ms"), "'takes 1.0 ms' occurs 0 times, whatever its numbers"),
        (text(1.0, pattern="take {} ms less than fp16's ms"), "occurs 0 times"),
        (row(1.0, pattern="| memory | {} |"), "'| memory | 1.0 |' occurs 0 times"),
        (row(1.0, pattern="| speed | {} "), "occurs 2 times"),
        (row(1.0, 2.0, pattern="| speed | {} | {} |"), "occurs 0 times"),
        (Block("page.md", "| a |", "x.json"), "7 lines in tables, x.json gives 1"),
        (Block("page.md", "| a |", "x.json", "table"), "no lines between table:begin and table:end"),
    ],
)
def test_a_rule_that_has_lost_its_place_is_an_error(tmp_path, rule, message):
    (lost,) = check_documents([rule], page(tmp_path)).lost
    assert message in lost


def test_figures_that_are_not_in_the_file_are_an_error(tmp_path):
    def wanted():
        yield text(1.8, 12.5, 1319)
        raise LookupError("0 rows have {'setting': 'kivi'}")

    assert check_documents(wanted(), page(tmp_path)).lost == ["LookupError: 0 rows have {'setting': 'kivi'}"]


def test_numbers_of_tables_without_a_rule_are_listed(tmp_path):
    covered = check_documents([row(3.4, 0.12, 0.005, -7.1)], page(tmp_path)).covered
    assert check.uncovered(covered, ["page.md"], tmp_path) == [
        ("page.md", 9, "2"),
        ("page.md", 9, "4"),
        ("page.md", 15, "9.9e-5"),
    ]


@pytest.mark.parametrize(
    ("shown", "value", "written"),
    [
        ("−.142", -0.1417, "−.142"),
        ("+.000", -0.0001, "+.000"),
        ("−0.1", 0.2, "+0.2"),
        ("8,756", 12345.6, "12,346"),
        ("3.34e-05", 1e-7, "1.00e-07"),
        ("3e-5", 1.2e-12, "1e-12"),
        ("97", 100.4, "100"),
    ],
)
def test_a_number_is_written_as_the_one_before_it(shown, value, written):
    assert like(shown, value) == written
    assert agrees(written, value)


#: numbers that once stood in the documents and not in the files: document, what it shows now, the wrong number
SLIPS = [
    ("docs/methods.md", "−5.6 ± 1.3", "−5.1 ± 1.3"),
    ("docs/methods.md", "| 3.18 |", "| 3.19 |"),
    ("README.md", "31 settings", "33 settings"),
    ("results/mini/README.md", "31 settings", "36 settings"),
    ("results/mini/search/table.md", "| - | 5.48 MiB", "| nan | 5.48 MiB"),
    ("docs/speed.md", "15.4 %", "15.5 %"),
    ("docs/speed.md", "15.0 (1.5x", "15.1 (1.5x"),
    ("results/h200/README.md", "29.1 and 47.3 ms", "29.1 and 48 ms"),
    ("results/tiny/perplexity.md", "20.513 against", "20.531 against"),
    ("results/quantspec/equality.md", "| 0.938 |", "| 0.983 |"),
]


def test_numbers_that_slipped_before_would_be_found(tmp_path):
    for name in {rule.document for rule in all_rules()}:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text((ROOT / name).read_text(encoding="utf-8"), encoding="utf-8")
    for name, right, wrong in SLIPS:
        shown = (tmp_path / name).read_text(encoding="utf-8")
        assert right in shown, (name, right)
        (tmp_path / name).write_text(shown.replace(right, wrong, 1), encoding="utf-8")
    outcome = check_documents(all_rules(), tmp_path)
    assert sorted(difference.document for difference in outcome.differences) == sorted(name for name, _, _ in SLIPS)
    assert outcome.lost == []


def test_a_block_is_the_program_s_line_by_line_and_whole_where_it_has_grown(tmp_path):
    marked = "Before.\n<!-- a:begin (make a) -->\n| x | 1 |\nSaid of 2.\n<!-- a:end -->\nAfter.\n"
    page(tmp_path, marked)
    assert check_documents([Block("page.md", "| x | 1 |\nSaid of 2.\n", "f", "a")], tmp_path).differences == []
    changed = check_documents([Block("page.md", "| x | 1 |\nSaid of 3.\n", "f", "a")], tmp_path).differences
    assert [(entry.line, entry.shown, entry.wanted) for entry in changed] == [(4, "Said of 2.", "Said of 3.")]
    longer = Block("page.md", "| x | 1 |\n| y | 4 |\n\nSaid of 3.\n", "f", "a")
    assert len(check_documents([longer], tmp_path, write=True).differences) == 1
    assert (tmp_path / "page.md").read_text() == marked.replace("Said of 2.", "| y | 4 |\n\nSaid of 3.")
    assert check_documents([longer], tmp_path).differences == []
    assert check_documents([Block("page.md", "", "f", "b")], tmp_path).lost == [
        "page.md: no lines between b:begin and b:end"
    ]


def test_numbers_with_a_unit_in_running_text_need_a_rule(tmp_path):
    page(tmp_path, "It takes 3.4 ms, or `5 ms` in 2 steps of 6 %.\n\n    run 7 ms\n\n| 8 ms |\n```\n9 s\n```\n")
    covered = check_documents([text(6, pattern="steps of {} %")], tmp_path).covered
    assert check.prose(covered, ["page.md"], tmp_path) == [("page.md", 1, "3.4")]


def test_a_literal_of_a_sentence_is_a_figure_too(tmp_path):
    page(tmp_path, "With 2 bits and groups of 64 it takes 1.24 ms.\n")
    places = check_documents([text(1.236, pattern="2 bits and groups of 32 it takes {} ms")], tmp_path).differences
    assert [(place.shown, place.wanted) for place in places] == [("64", "32")]


def test_tables_are_written_with_the_digits_of_their_columns():
    body = [["kivi", three(9.996), three(99.96)], ["atom", "", three(0.5)]]
    assert grid("| | a | b |", body) == "| | a | b |\n|:--|--:|--:|\n| kivi | 10.0 | 100 |\n| atom | | 0.50 |\n"
    assert grid("| a | b |", [], "-") == "| a | b |\n|---|---|\n"


def test_a_figure_is_that_of_one_measurement():
    measured = [{"setting": "kivi", "ms": 1}, {"setting": "kivi", "ms": 2}]
    assert one(measured, ms=2) == measured[1]
    with pytest.raises(LookupError, match=r"2 rows have \{'setting': 'kivi'\}"):
        one(measured, setting="kivi")
