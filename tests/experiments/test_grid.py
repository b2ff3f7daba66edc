"""Cells of a grid against values computed by hand."""

import math
from dataclasses import replace

import pytest

from experiments.data import Plan
from experiments.draw.table import amount
from experiments.fold import figures
from experiments.fold.cells import Cell
from experiments.fold.claims import judge
from experiments.fold.figures import Statistic, paired
from experiments.fold.grid import Source, fold_grid
from experiments.item import Claim, Column, Grid, Group, Model, Row
from experiments.real.files import row_count
from kvbench.metrics import intervals


def sample(score):
    return {"task": "qasper", "scores": {"score": score}}


ITEM = Grid(
    id="cocktail/table2",
    number="Table II",
    title="two methods",
    caption="A caption.",
    models=(Model("llama2-7b", "Llama2-7B"),),
    rows=(
        Row(name="FP16", setting="fp16", published={"method": "FP16"}),
        Row(name="KIVI", setting="kivi", published={"method": "KIVI"}),
        Row(name="ADA", setting=None, absent="no key"),
    ),
    columns=(
        Column(name="Qasper", data="longbench_cocktail", task="qasper", published={"dataset": "qasper"}),
        Column(name="TREC", data="longbench_cocktail", task="trec", published={"dataset": "trec"}),
    ),
    groups=(Group(name="Average", published={"dataset": "average"}),),
    base="FP16",
    published="cocktail_table2",
    claims=(Claim(text="KIVI loses", first="FP16", second="KIVI", column="Average"),),
)


def rows(**scores):
    return {name: sample(score) for name, score in scores.items()}


def folded(plan=None, model="Llama2-7B"):
    sources = {
        (model, "FP16", "Qasper"): Source(rows(a=1.0, b=1.0, c=0.5, d=0.0), ("run-fp",)),
        (model, "FP16", "TREC"): Source(rows(x=1.0, y=1.0), ("run-fp2",)),
        (model, "KIVI", "Qasper"): Source(rows(a=0.5, b=1.0, c=0.0), ("run-k",)),
        (model, "KIVI", "TREC"): Source(rows(x=1.0, y=0.0), ("run-k2",)),
        (model, "ADA", "Qasper"): Source({}, reason="no key"),
        (model, "ADA", "TREC"): Source({}, reason="no key"),
    }
    return fold_grid(ITEM, plan or Plan(), sources)


def test_cells_over_the_samples_that_all_settings_have():
    table = folded()
    full, kivi = table.at("Llama2-7B", "FP16", "Qasper"), table.at("Llama2-7B", "KIVI", "Qasper")
    # a, b and c: d is left out, which KIVI has not done
    assert (full.n, full.ours) == (3, pytest.approx(100 * 2.5 / 3))
    assert full.stderr == pytest.approx(100 * math.sqrt((2 * (1 / 6) ** 2 + (1 / 3) ** 2) / 2 / 3))
    assert kivi.ours == pytest.approx(50) and kivi.runs == ("run-k",)
    # differences -0.5, 0, -0.5: mean -1/3
    assert kivi.to_base == pytest.approx(-100 / 3)
    assert kivi.to_base_stderr == pytest.approx(100 * math.sqrt((2 * (1 / 6) ** 2 + (1 / 3) ** 2) / 2 / 3))
    assert full.to_base is None
    assert (full.paper, kivi.paper) == (9.63, 9.18)
    assert kivi.difference == pytest.approx(50 - 9.18)


def test_a_setting_of_the_same_runs_as_the_base_has_no_difference_to_it():
    full, kivi = {"a": sample(1.0), "b": sample(0.5)}, {"a": sample(0.5), "b": sample(0.5)}
    item = replace(
        ITEM, rows=(*ITEM.rows[:2], Row(name="alpha 0.6", setting="fp16")), columns=ITEM.columns[:1], groups=()
    )
    place = ("Llama2-7B", "Qasper")

    def with_runs(base, same):
        sources = {"FP16": Source(full, base), "KIVI": Source(kivi, ("run-k",)), "alpha 0.6": Source(full, same)}
        table = fold_grid(
            replace(item, claims=()), Plan(), {(place[0], row, place[1]): s for row, s in sources.items()}
        )
        return [table.at(place[0], row, place[1]).to_base for row in ("KIVI", "alpha 0.6")]

    assert with_runs(("run-fp",), ("run-fp",)) == [pytest.approx(-25), None]
    assert with_runs(("run-fp",), ("run-other",)) == [pytest.approx(-25), 0.0]
    # one file of points holds many settings
    assert with_runs(("points.json",), ("points.json",)) == [pytest.approx(-25), 0.0]


def test_means_are_of_columns_not_of_samples():
    table = folded()
    mean = table.at("Llama2-7B", "KIVI", "Average")
    assert mean.ours == pytest.approx((50 + 50) / 2) and mean.n == 5
    qasper, trec = table.at("Llama2-7B", "KIVI", "Qasper"), table.at("Llama2-7B", "KIVI", "TREC")
    assert mean.stderr == pytest.approx(math.hypot(qasper.stderr, trec.stderr) / 2)
    assert mean.to_base == pytest.approx((-100 / 3 - 50) / 2)
    assert mean.to_base_stderr == pytest.approx(math.hypot(qasper.to_base_stderr, trec.to_base_stderr) / 2)
    assert mean.paper == 43.97


def test_a_set_without_variance_widens_the_interval_of_a_mean():
    """None of 6 right, and 3 of 12: the ends are those of the sets' own intervals."""
    item = replace(ITEM, rows=ITEM.rows[:2])

    def mean_of(first, second):
        answers = {"FP16": (first, second), "KIVI": ([0.0] * 6, [0.0] * 12)}
        sources = {
            ("m", row, column): Source(rows(**{f"s{i}": x for i, x in enumerate(scores)}))
            for row, both in answers.items()
            for column, scores in zip(("Qasper", "TREC"), both, strict=True)
        }
        table = fold_grid(item, Plan(models=("m",)), sources)
        return [table.at("m", "FP16", name) for name in ("Qasper", "TREC", "Average")], table

    (_, _, mean), table = mean_of([0.0] * 6, [1.0] * 3 + [0.0] * 9)
    none, some = (tuple(100 * end for end in intervals.wilson(*counts)) for counts in ((0, 6), (3, 12)))
    error = 100 * intervals.Z * math.sqrt(3 / 12 * 9 / 12 / 11)
    assert mean.high == pytest.approx(12.5 + math.hypot(none[1], some[1] - 25) / 2)
    assert mean.low == pytest.approx(12.5 - max(25 - some[0], min(error, 25)) / 2)
    kivi = table.at("m", "KIVI", "Average")
    pairs = [(0, 0, 0, 6), (0, 0, 3, 9)]
    ends = [intervals.newcombe(*counts) for counts in pairs]
    assert kivi.to_base_low == pytest.approx(-12.5 - 100 * math.hypot(ends[0][0], ends[1][0] + 0.25) / 2)
    (claim,) = table.verdicts
    assert (claim.least, claim.most) == pytest.approx((-kivi.to_base_high, -kivi.to_base_low))
    assert claim.verdict == "undecided"
    # what would decide it follows from the interval that leaves it open
    assert claim.needed == math.ceil(18 * ((claim.ours - claim.least) / claim.ours) ** 2)


def test_rows_are_not_at_an_end_where_prompts_were_chosen_by_length():
    sources = {
        ("m", "FP16", "Qasper"): Source(rows(a=1.0, b=0.5, c=0.0), ("run-fp",)),
        ("m", "KIVI", "Qasper"): Source(rows(a=0.5, b=1.0, c=0.0), ("run-k",)),
    }
    claims = (replace(ITEM.claims[0], column="Qasper"),)
    labels = []
    for options in ((), ("dataset.prompt_tokens=[600,1700]",)):
        columns = (replace(ITEM.columns[0], options=options),)
        item = replace(ITEM, rows=ITEM.rows[:2], columns=columns, groups=(), claims=claims)
        (verdict,) = fold_grid(item, Plan(models=("m",), data="real", limit=50), sources).verdicts
        assert verdict.verdict == "undecided" and verdict.n == 3
        labels.append(verdict.label)
    assert labels == ["needs more rows than are at hand", ""]


def real_table(first, second, paths=(), limit=50):
    """Return ITEM folded with --data real from scores of Qasper and of TREC; a setting without any was not run."""
    sources = {
        ("m", row, column): Source(rows(**{f"s{i}": x for i, x in enumerate(scores)}))
        for column, pair in (("Qasper", first), ("TREC", second))
        for row, scores in zip(("FP16", "KIVI"), pair, strict=True)
    }
    plan = Plan(models=("m",), data="real", limit=limit, paths=tuple(paths))
    return fold_grid(replace(ITEM, rows=ITEM.rows[:2]), plan, sources)


def test_sets_at_the_floor_are_left_out_of_a_claim_on_a_mean(monkeypatch):
    scores = [1.0, 0.5, 1.0, 0.75], [0.25, 0.5, 0.0, 0.25]
    (before,) = real_table(scores, ([0.0] * 6, [1.0] * 6)).verdicts
    assert (before.n, before.label) == (10, "needs more rows than are at hand")
    lost = frozenset({"longbench_cocktail/trec"})
    monkeypatch.setattr("experiments.fold.rows.verdicts_of", lambda model: dict.fromkeys(lost, "at the floor"))
    for others in ([1.0] * 6, []):  # run or not
        table = real_table(scores, ([0.0] * 6, others))
        (claim,) = table.verdicts
        assert (claim.n, claim.ours) == (4, pytest.approx(100 * (0.8125 - 0.25)))
        alone = tuple(100 * end for end in intervals.of_pairs(*scores))
        assert (claim.least, claim.most) == pytest.approx(alone)
        assert claim.label.startswith("without sets at the floor: TREC")
        assert claim.paper == pytest.approx(9.63 - 9.18), "the paper's number is of the same sets"
        mean = table.at("m", "KIVI", "Average")
        assert (mean.ours, mean.n) == ((62.5, 10) if others else (None, 0)), "cells stay as they are"
    (claim,) = real_table((scores[0], []), ([0.0] * 6, [1.0] * 6)).verdicts
    assert (claim.verdict, amount(claim)) == ("not run", "- (without sets at the floor: TREC)")
    lost |= {"longbench_cocktail/qasper"}
    (claim,) = real_table(scores, ([0.0] * 6, [])).verdicts
    assert claim.verdict == "at the floor" and "(Qasper, TREC)" in claim.reason
    assert claim.paper == pytest.approx(44.55 - 43.97)


def test_a_claim_that_needs_more_rows_than_its_files_have_is_undecided_for_rows(tmp_path):
    def labelled(first, second, **counts):
        for name, count in counts.items():
            (tmp_path / f"{name}.jsonl").write_text('{"input": ""}\n' * count)
        row_count.cache_clear()
        (claim,) = real_table(first, second, [("longbench_cocktail", str(tmp_path))], limit=6).verdicts
        assert claim.verdict == "undecided"
        return claim.needed, claim.label

    noisy = [1.0, 0.0, 1.0, 0.0, 1.0, 1.0], [0.0, 1.0, 0.0, 1.0, 1.0, 0.0]
    still = [0.5, 0.6, 0.7, 0.5, 0.6, 0.7], [0.4, 0.6, 0.5, 0.5, 0.4, 0.7]
    missing = "needs more rows than are at hand"
    needed, label = labelled(noisy, still, qasper=6, trec=100_000)
    assert (needed < 1000, label) == (True, missing), "rows of TREC do not narrow Qasper's interval"
    assert labelled(noisy, still, qasper=100_000, trec=6) == (needed, "")
    assert labelled(noisy, still, qasper=20, trec=20) == (needed, missing)


def test_a_setting_that_cannot_run_stays_empty_with_its_reason():
    cell = folded().at("Llama2-7B", "ADA", "Average")
    assert cell.ours is None and cell.reason == "no key" and cell.paper is None


def test_another_model_shows_no_number_of_the_paper_but_its_claims_difference():
    table = folded(Plan(models=("tiny",)), "tiny")
    cell = table.at("tiny", "KIVI", "Qasper")
    assert cell.paper is None and cell.difference is None and cell.ours == pytest.approx(50)
    (claim,) = table.verdicts
    assert claim.paper == pytest.approx(44.55 - 43.97)
    assert claim.ours == pytest.approx((100 / 3 + 50) / 2)
    assert claim.verdict == "undecided" and claim.least < 0 < claim.most


def test_standin_is_marked():
    assert folded(Plan(data="standin")).marks == ["format only: generated records, no result"]


def test_few_samples_of_a_figure_have_a_wide_interval():
    # a perplexity that samples lower by 0, 0.001 and 0.002
    def span(total):
        return {"nll": {"sum": total, "n": 10}, "task": "text"}

    column = Column(name="text", data="perplexity/mini_text", figure="perplexity", digits=4)
    claim = Claim(text="costs little", first="KIVI", second="FP16", column="text", low=-9.0, high=0.02)
    item = replace(ITEM, columns=(column,), groups=(), claims=(claim,), rows=ITEM.rows[:2])

    def claimed(n):
        sources = {
            ("Llama2-7B", "FP16", "text"): Source({f"s{i}": span(10.0) for i in range(n)}),
            ("Llama2-7B", "KIVI", "text"): Source({f"s{i}": span(10.0 - 0.001 * (i % 3)) for i in range(n)}),
        }
        return fold_grid(item, Plan(), sources).verdicts[0]

    assert claimed(1).label == "one measurement"
    assert (claimed(3).verdict, claimed(12).verdict) == ("undecided", "holds")
    assert claimed(2).most - claimed(2).least > 2 * (claimed(3).most - claimed(3).least)
    assert claimed(12).digits == 4


def test_perplexity_and_its_paired_difference():
    def span(total, n):
        return {"nll": {"sum": total, "n": n}}

    first = figures.FIGURES["perplexity"]([span(2.0, 2), span(6.0, 2)])
    assert first.value == pytest.approx(math.exp(2.0))
    assert first.stderr == pytest.approx(math.exp(2.0) * 1.0)  # means 1 and 3: standard error 1
    second = figures.FIGURES["perplexity"]([span(2.2, 2), span(6.2, 2)])
    difference, error = paired(second, first)
    assert difference == pytest.approx(math.exp(2.1) - math.exp(2.0))
    assert error < first.stderr / 5


def test_acceptance_is_a_ratio_with_samples_as_clusters():
    drafts = [{"speculation": {"drafted": 10, "accepted": 9}}, {"speculation": {"drafted": 30, "accepted": 15}}]
    figure = figures.FIGURES["acceptance"](drafts)
    assert figure.value == pytest.approx(24 / 40)
    # kvbench.results.speculation.ratio_error: sqrt(2 / 1 * (3^2 + 3^2)) / 40
    assert figure.stderr == pytest.approx(6 / 40)


def test_a_point_has_no_error():
    row = {"measured": {"point": {"tpot_s": {"median": 0.02}, "peak": {"decode": 5}}}}
    assert figures.FIGURES["tpot_s"]([row]) == Statistic(0.02)
    assert figures.FIGURES["peak_decode"]([row]).stderr is None
    assert figures.FIGURES["peak_prefill"]([row]) is None


@pytest.mark.parametrize(("note", "word"), [("H200, graph", "undecided"), ("H200, eager", "not comparable")])
def test_points_that_were_run_in_another_way_decide_nothing(note, word):
    claim = Claim(text="slower", first="A", second="B", column="TPOT", relative=True)
    place = {"model": "m", "column": "TPOT", "n": 1}
    cells = {
        "A": Cell(row="A", ours=4.0, note=note, **place),
        "B": Cell(row="B", ours=2.0, note="H200, graph", **place),
    }
    column = Column(name="TPOT", data="efficiency", figure="tpot_s", unit="ms")
    seen = judge(claim, "cocktail", "m", column, cells.get, (2.0, None, None), (None, None))
    assert (seen.ours, seen.verdict) == (pytest.approx(100.0), word)


def test_an_empty_cell_says_why():
    def reason(fp16, kivi):
        sources = {("Llama2-7B", "FP16", "Qasper"): Source(fp16), ("Llama2-7B", "KIVI", "Qasper"): Source(kivi)}
        return fold_grid(ITEM, Plan(), sources).at("Llama2-7B", "KIVI", "Qasper").reason

    without = {"a": {"task": "qasper", "scores": {}}}
    assert reason(rows(a=1.0), {}) == "not run"
    assert reason(rows(a=1.0), rows(b=1.0)) == "no sample that all settings have done"
    assert reason(rows(a=1.0), without) == "a run of this setting does not have this figure"
