"""What the page holds of long or many things, and what its parts are where a run lacks them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from experiments.page.made import config, metrics, row, run_id, write_made_run
from kvbench.cli import report
from kvbench.page import data, papers, runs
from kvbench.page.numbers import spread
from tests.page import test_papers
from tests.page.report_support import data_of


@pytest.fixture
def page(tmp_path):
    """Function that returns the data of the page of the runs in `tmp_path`."""

    def build(*arguments: str) -> dict[str, Any]:
        file = tmp_path / "r.html"
        assert report.main(["--results", str(tmp_path / "runs"), "--html", str(file), *arguments]) == 0
        return data_of(file.read_text(encoding="utf-8"))

    return build


def group(*entries: tuple[str, dict[str, Any], list[str]]) -> dict[str, str]:
    return data._group_titles(
        [
            SimpleNamespace(
                store=SimpleNamespace(run_id=name), metrics={"config": chosen, "scores": dict.fromkeys(keys)}
            )
            for name, chosen, keys in entries
        ]
    )


TINY = {"model": "tiny", "dataset": "mini"}


@pytest.mark.parametrize(
    ("keys", "title"),
    [
        ([], "tiny, mini"),
        (["a"], "tiny, mini (a)"),
        (["a@1", "a@2"], "tiny, mini (a at 1, 2)"),
        (["a@1", "b@1", "c"], "tiny, mini (3 tasks at 1)"),
        (["a@1", "a@2", "a@3", "a@4", "a@5"], "tiny, mini (a at 1, 2, 3, 4)"),
        (["a" * 120], "tiny, mini (" + "a" * 45 + " ... " + "a" * 56 + ")"),
    ],
)
def test_a_group_is_titled_by_model_data_tasks_and_lengths(keys, title):
    assert group(("g-1", TINY, keys)) == {"g": title}


def test_the_title_of_a_group_is_that_of_a_run_with_scores():
    assert group(("g-1", {}, []), ("g-2", TINY, ["a"]), ("g-3", TINY, ["b"])) == {"g": "tiny, mini (a)"}
    assert group(("g-1", {}, [])) == {"g": "?, ?"}


def test_groups_of_one_title_are_told_apart_by_their_ids():
    titles = group(("0123456789-1", TINY, ["a"]), ("abcdefghij-1", TINY, ["a"]), ("other-1", TINY, ["b"]))
    wanted = {"0123456789": " (a) [012345]", "abcdefghij": " (a) [abcdef]", "other": " (b)"}
    assert titles == {name: f"tiny, mini{rest}" for name, rest in wanted.items()}


def test_at_most_20_damaged_runs_are_named(tmp_path, page):
    write_made_run(tmp_path / "runs", 99)
    for number in range(21):
        (write_made_run(tmp_path / "runs", number).path / "metrics.json").write_text("{}")
    shown = page()
    assert len(shown["skipped"]) == 20 and len(shown["runs"]) == 1


def test_long_texts_of_a_run_are_cut_and_its_facts_counted(tmp_path, page):
    write_made_run(
        tmp_path / "runs",
        1,
        error="e" * 601,
        status="error",
        code={"abc": 3},
        attention={"path": "packed", "reads_packed": True},
        groups={"model": {"name": "m" * 121}, "dataset": {"name": "d" * 121}},
    )
    write_made_run(tmp_path / "runs", 2, label="l" * 121, code={"abc": 1, "def": 2}, error="e" * 600)
    shown = page()
    one, two = shown["runs"]
    assert (one["model"], one["data"]) == ("m" * 57 + " ... " + "m" * 57, "d" * 57 + " ... " + "d" * 57)
    assert two["label"] == "l" * 57 + " ... " + "l" * 57
    assert (one["error"], two["error"]) == ("e" * 297 + " ... " + "e" * 297, "e" * 600)
    assert (one["code"], one["path"], one["device"]) == ("abc", "packed", "a processor")
    assert "code" not in two and "path" not in two and "fp16" not in two


def test_at_most_32_facts_of_a_machine_are_shown_each_of_at_most_100_characters():
    known = {"cpu": "x" * 100, "gpu": "y" * 101, "none": None, "load": {"cpus": 2, "mhz": None}}
    facts = {"cpu": "x" * 100, "gpu": "y" * 47 + " ... " + "y" * 47, "load.cpus": 2}
    assert runs._environment(known) == facts
    assert list(runs._environment({f"k{n:02}": n for n in range(33)})) == [f"k{n:02}" for n in range(32)]


def test_a_command_of_more_than_1200_characters_is_left_out(tmp_path, page):
    for number in range(3):
        write_made_run(tmp_path / "runs", number, groups={"method": {"note": "x" * (1100 + 150 * (number > 1))}})
    shown = page()["runs"]
    assert [len(run.get("command", "")) > 1100 for run in shown] == [True, True, False]


def test_the_end_of_an_interval_that_is_farther_is_the_reach():
    entry = {"score": 0.5, "low": 0.25, "high": 0.625, "n": 8}
    pair = {"diff": -0.25, "stderr": 0.1, "n": 8, "low": -0.375, "high": 0.125}
    assert runs._score_figures(entry) == (0.5, 0.25, 8, None, None)
    assert runs._score_figures({**entry, "vs_fp16": pair}) == (0.5, 0.25, 8, -0.25, 0.375)


def test_scores_of_texts_are_perplexities_with_their_differences():
    """A single text's perplexity is the run's; a task shows the difference of perplexities, not that of scores."""
    pair = {"diff": 0.5, "stderr": 0.1, "n": 2, "low": 0.25, "high": 1.0}
    text = {"ppl": 6.0, "stderr": None, "windows": 4, "vs_fp16": pair}
    scores = {"wiki": {"score": None, "n": 4, "perplexity": text}}
    known = runs._scores({"scores": scores, "mean": {"score": None}})
    assert (known["ppl"], known["score"], known["kl"]) == ([6, None, 0.5], None, [])
    assert known["tasks"] == [["wiki", None, None, 4, 0.5, 0.5, 6]]
    bare = {"score": None, "n": 4, "perplexity": {**text, "vs_fp16": None}}
    both = runs._scores({"scores": {**scores, "c4": bare}, "mean": {"score": None}})
    assert both["ppl"] == [] and both["tasks"][1] == ["c4", None, None, 4, None, None, 6]


def test_the_reach_of_a_perplexity_needs_an_error_and_two_windows():
    """Student's interval: of 4 windows 3.1824 standard errors."""
    assert runs._of_perplexity({"ppl": 6.0, "stderr": 0.5, "windows": 4}) == pytest.approx(3.1824 * 0.5, rel=2e-3)
    for text in ({}, {"ppl": 6.0}, {"ppl": 6.0, "stderr": 0.5}, {"ppl": 6.0, "stderr": 0.5, "windows": 1}):
        assert runs._of_perplexity(text) is None


def test_a_run_has_at_most_40_tasks_and_no_task_of_points():
    entry = {"score": 0.5, "low": 0.25, "high": 0.75, "n": 4}
    for count, more in ((40, None), (41, 1)):
        scores = {f"t{n:02}": entry for n in range(count)} | {"times": {"points": {"batches": []}}}
        known = runs._scores({"scores": scores, "mean": entry})
        assert [task[0] for task in known["tasks"]] == [f"t{n:02}" for n in range(40)] and known["more_tasks"] == more
        assert known["score"] == [0.5, 0.25, 4, None, None, 0.25, 0.75]


def compared(mean: float, share: float, **ends: float) -> dict[str, Any]:
    kld = {"mean": mean, "p99_9": 8 * mean, "median": mean / 2}
    return {"kld": {**kld, **ends}, "same_top": {"share": share, **{key: value / 2 for key, value in ends.items()}}}


def test_divergences_are_means_over_tasks_and_have_an_interval_if_it_is_one():
    one, two = compared(0.5, 0.75, low=0.25, high=1.0), compared(0.25, 0.25, low=0.0, high=1.0)
    assert runs._fidelity([one]) == [0.5, 4, 0.75, 0.25, 0.25, 1, 0.125, 0.5]
    assert runs._fidelity([one, two]) == [0.375, 3, 0.5, 0.1875]
    del two["kld"]["median"]
    assert runs._fidelity([one, two]) == [0.375, 3, 0.5] and runs._fidelity([]) == []


def test_answers_are_right_from_a_score_of_one_on():
    rows = [{"id": str(n), "scores": {"score": s}} for n, s in enumerate((1.0, 1 - 1e-12, 0.999, 0.0, None))]
    assert runs._right(rows) == {"0": True, "1": True, "2": False, "3": False}
    assert runs.flips({"a": True}, {"b": True}) == []
    assert runs.flips({"a": True, "b": True, "c": False}, {"a": True, "b": False, "c": True, "d": True})[:3] == [
        1,
        1,
        3,
    ]


def test_rows_of_another_version_leave_a_run_without_figures():
    known = {"status": "unfinished", "env": {}}
    assert runs.partial(known, [{"id": "a"}]) == known


def timing(**more: Any) -> dict[str, Any]:
    return {"measured": {"device": "a", "ttft_s": 1.0, "step_s": [9.0, 2.0, 3.0], **more}}


def test_times_are_those_of_the_device_without_warm_up_and_first_steps():
    rows = [timing(), timing(warm_up=True, ttft_s=7.0), timing(device="b", ttft_s=3.0, step_s=[9.0, 4.0]), {}]
    assert spread(rows, "a") == ([1, 1, 1, 1, 1, 1], [2.05, 2.25, 2.5, 2.75, 2.95, 2])
    assert spread(rows, None)[0] == [1.1, 1.5, 2, 2.5, 2.9, 2] and spread(rows, None)[1][5] == 3
    assert spread([timing(ttft_s=None, step_s=[1.0])], None) == ([], [])
    assert spread([timing(ttft_s="x", step_s=None)], "a") == ([], [])


def pair_of(tmp_path, page, rows_a, rows_b):
    write_made_run(tmp_path / "runs", 1, "fp16", rows=rows_a)
    write_made_run(tmp_path / "runs", 2, rows=rows_b)
    (pair,) = page("--pair", run_id(1), run_id(2))["pairs"]
    return pair


def test_samples_of_a_pair_are_those_that_differ_the_farthest_apart_first(tmp_path, page):
    scores = [(1.0, 0.75, "x"), (0.5, 0.5, ""), (0.0, 1.0, "x"), (0.5, 0.5, "x"), (1.0, 0.75, "x"), (None, 0.5, "x")]
    rows = [[row(n, pair[side], pair[2] * side) for n, pair in enumerate(scores)] for side in (0, 1)]
    rows[0][5]["scores"] = {}
    pair = pair_of(tmp_path, page, [*rows[0], row(7, 1.0)], [*rows[1], row(8, 1.0)])
    assert [sample[0].rpartition("/")[2] for sample in pair["samples"]] == ["2", "5", "0", "4", "3"]
    assert pair["samples"][0] == ["key_value@2048/2", 0, 1, "answer 2", "x"]
    assert pair["samples"][1][1:3] == [None, 0.5]
    assert (pair["equal"], pair["left_out"], pair["runs"]) == (1, 0, [run_id(1), run_id(2)])


def test_texts_of_a_pair_are_cut(tmp_path, page):
    rows = [
        {**row(0, score, "p" * (4000 + place)), "id": "i" * (200 + place)} for place, score in enumerate((1.0, 0.0))
    ]
    rows[0]["id"] = rows[1]["id"]
    (sample,) = pair_of(tmp_path, page, rows[:1], rows[1:])["samples"]
    assert sample[0] == "i" * 97 + " ... " + "i" * 97
    assert [len(text) for text in sample[3:]] == [4000, 3999]


def test_notes_of_a_pair_are_cut(monkeypatch):
    stores = [SimpleNamespace(run_id=name, samples=lambda: SimpleNamespace(rows={})) for name in "ab"]
    said = SimpleNamespace(keys={}, notes=["n" * 300, "n" * 301])
    monkeypatch.setattr(data, "compare_runs", lambda a, b: said)
    pair = data.differing_samples(*(SimpleNamespace(store=store) for store in stores))
    assert pair["notes"] == ["n" * 300, "n" * 147 + " ... " + "n" * 147]


def test_texts_of_the_papers_are_cut(tmp_path):
    long = {key: key[0] * 500 for key in ("item", "number", "title")}
    (cell, _), (claim, *_) = test_papers.item()["cells"], test_papers.item()["claims"]
    cell |= {key: key[0] * 500 for key in ("row", "column", "model")}
    claim |= {"claim": "c" * 500, "model": "m" * 500, "unit": "u" * 500, "verdict": "v" * 500}
    headings = [{"name": cell["column"], "unit": "h" * 500}]
    notes = {"marks": ["n" * 301], "notes": ["n"] * 6}
    content = test_papers.item(**long, headings=headings, cells=[cell], claims=[claim], **notes)
    test_papers.write(tmp_path, content, f"paper/table/{'v' * 90}")
    ((shown,), _) = papers.items(tmp_path, set())
    assert {key: len(shown[key]) for key in ("item", "variant", "number", "title")} == {
        "item": 79, "variant": 79, "number": 39, "title": 159
    }  # fmt: skip
    named = [[len(shown["names"][i]) for i in numbers[0][:4]] for numbers in (shown["cells"], shown["claims"])]
    assert named == [[79, 79, 79, 19], [199, 79, 19, 199]]
    assert [len(note) for note in shown["notes"]] == [299, 1, 1, 1, 1, 1] and shown["mine"] == 0


def test_an_item_without_a_variant_and_tables_that_nobody_keeps(tmp_path):
    test_papers.write(tmp_path, test_papers.item(number=None, title=None), "cocktail/table1")
    test_papers.write(tmp_path, test_papers.item(), "trials/table2")
    test_papers.write(tmp_path, test_papers.item(), "trials/table2/tiny")
    test_papers.write(tmp_path, "[]", "atom/table3")
    shown, notes = papers.items(tmp_path, set())
    assert [(item["variant"], item["number"], item["title"]) for item in shown] == [("", "", "")]
    assert len(notes) == 1 and "atom" in notes[0]


def test_a_number_of_ours_reaches_to_the_farther_end_of_its_interval():
    entry = {"ours": 2.0, "low": 1.5, "high": 3.0, "stderr": 0.25}
    assert (
        papers._paper_reach(entry, "low", "high") == 1.0
        and papers._paper_reach({**entry, "low": 0.5}, "low", "high") == 1.5
    )
    for key in ("ours", "low", "high"):
        assert papers._paper_reach({**entry, key: None}, "low", "high") == 0.25
    assert papers._paper_reach({"ours": 1.0}, "low", "high") is None


def test_items_that_fit_after_one_that_does_not_are_kept(tmp_path, monkeypatch):
    small = test_papers.item(cells=test_papers.item()["cells"][:1], claims=[])
    for place, content in (("a/t1", small), ("b/t2", test_papers.item(title="x" * 160)), ("c/t3", small)):
        test_papers.write(tmp_path, content, place)
    sizes = [len(papers.encoded(item)) for item in papers.items(tmp_path, set())[0]]
    for most, kept in ((sizes[0] + sizes[2], 2), (sizes[0] + sizes[2] - 1, 1), (sum(sizes), 3)):
        monkeypatch.setattr(papers, "MOST_BYTES", most)
        shown, notes = papers.items(tmp_path, set())
        assert (len(shown), len(notes)) == (kept, kept < 3)
    monkeypatch.undo()
    assert papers.MOST_BYTES == 150_000 and papers.MOST_CELLS == 400


def test_what_has_been_read_of_a_run_is_kept_until_a_file_of_it_changes(tmp_path):
    store = write_made_run(tmp_path, 1)
    read: list[str] = []
    entry = SimpleNamespace(
        store=store, metrics=store.metrics() | {"older": None}, config=config(), command="c", changes={}
    )
    known = data.Report(lambda: [store], lambda one: read.append(one.run_id) or entry, tmp_path, tmp_path)
    before = known.signature()
    known.data()
    assert known.data()["runs"][0]["command"] == "c" and len(read) == 1 and known.signature() == before
    for count, name in enumerate(("config.yaml", "metrics.json", "samples.jsonl"), start=2):
        with (store.path / name).open("ab") as file:
            file.write(b"\n")
        after = known.signature()
        assert after != before
        before = after
        known.data()
        assert len(read) == count
    (store.path / "samples.jsonl").unlink()
    assert known.signature() != before


def test_a_problem_is_said_once_and_a_long_folder_cut(tmp_path):
    store = write_made_run(tmp_path, 1)
    store.samples_path.unlink()
    store.samples_path.mkdir()
    said: list[str] = []
    entry = SimpleNamespace(
        store=store, metrics=metrics(run_id(1), config(), [row(0, 1.0)]), config={}, command="c", changes={}
    )
    known = data.Report(lambda: [store], lambda one: entry, tmp_path / ("f" * 300), tmp_path, say=said.append)
    assert [len(known.data()["folder"]) for _ in range(2)] == [199, 199] and len(said) == 1
