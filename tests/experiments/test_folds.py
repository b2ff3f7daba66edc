"""Figures, verdicts and sources of cells by hand, and the words of tables around them."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import pytest

from experiments import published
from experiments.data import Plan
from experiments.draw.table import _bounds, _heading, item_markdown
from experiments.fold import sources
from experiments.fold.cells import Cell, Folded, Heading, Verdict
from experiments.fold.claims import bound, decided, judge
from experiments.fold.figures import FIGURES, Statistic, paired, quotient, standard_error
from experiments.fold.grid import Source, fold_grid, measured_on
from experiments.fold.points import _verdict, point_source
from experiments.fold.sources import Choice, belongs, out_of_memory
from experiments.item import Claim, Column, Grid, Group, Model, Row
from experiments.predict import Work, duration, works
from experiments.runs import run_of
from experiments.session import listing, needs, notes_of
from experiments.write import _finite
from kvbench.errors import DataError


def test_standard_errors_are_those_of_a_sample():
    assert standard_error([1.0]) is None is standard_error([])
    assert standard_error([1.0, 3.0]) == 1.0
    assert standard_error([0.0, 0.0, 3.0, 1.0]) == pytest.approx(math.sqrt(6 / 3 / 4))
    assert paired(Statistic(5.0, (4.0, 6.0)), Statistic(3.0, (3.0, 3.0))) == (2.0, 1.0)


def test_a_quotient_has_linearised_influences():
    ratio = quotient(Statistic(6.0, (4.0, 8.0)), Statistic(3.0, (3.0, 3.0)))
    assert ratio.value == 2.0 and ratio.influences == pytest.approx((4 / 3, 8 / 3))
    exact = quotient(Statistic(6.0, (4.0, 8.0)), Statistic(3.0, (2.0, 4.0)))
    assert exact.influences == pytest.approx((2.0, 2.0)) and exact.stderr == pytest.approx(0.0)


def test_figures_of_answers():
    bill = {"used": {"total": 2**21}, "fp16_equivalent": 2**23}
    rows = [{"kv_bytes": bill, "measured": {"step_s": [1.0, 3.0]}, "scores": {"score": 0.5}}]
    assert FIGURES["kv_mib"](rows) == Statistic(2.0, (2.0,)) and FIGURES["score"](rows).value == 0.5
    assert FIGURES["compression"](rows).value == 4.0
    single = [{**rows[0], "measured": {"dtype": "float32"}}]
    assert FIGURES["compression"](single).value == 8.0  # against the model's own words of four bytes
    assert FIGURES["seconds_per_token"](rows).value == 2.0
    empty = [*rows, {"kv_bytes": None, "measured": {"step_s": []}, "scores": {}}]
    for name in ("kv_mib", "compression", "seconds_per_token", "score"):
        assert FIGURES[name](empty) is None and FIGURES[name]([]) is None, name
    span = {"nll": {"sum": 2.0, "n": 2}}
    assert FIGURES["perplexity"]([span]).influences == pytest.approx((math.e,))
    assert FIGURES["perplexity"]([span, {"nll": {"sum": 0.0, "n": 0}}]) is None is FIGURES["perplexity"]([])
    assert FIGURES["acceptance"]([{"speculation": None}]) is None
    point = {"ttft_s": 0.25, "tokens_per_s": 9, "kv_used": {"total": 7}, "peak": {"prefill": 3, "decode": 4}}
    rows = [{"measured": {"point": point}}]
    values = {name: FIGURES[name](rows).value for name in ("ttft_s", "tokens_per_s", "kv_used", "peak", "peak_prefill")}
    assert values == {"ttft_s": 0.25, "tokens_per_s": 9.0, "kv_used": 7.0, "peak": 4.0, "peak_prefill": 3.0}
    assert FIGURES["tpot_s"](rows) is None is FIGURES["peak"]([])


@pytest.mark.parametrize(
    ("interval", "low", "high", "word"),
    [
        ((0.0, 8.0), 0.0, math.inf, "undecided"),  # just at the bound
        ((0.1, 8.1), 0.0, math.inf, "holds"),
        ((0.8, 1.2), 0.0, 1.2, "undecided"),
        ((0.8, 1.2), 0.0, 1.21, "holds"),
        ((1.8, 2.2), 0.0, 1.5, "does not hold"),
        ((1.4, 1.8), 0.0, 1.5, "undecided"),
        ((-0.5, -0.1), 0.0, 1.5, "does not hold"),
        ((-0.3, 0.1), 0.0, 1.5, "undecided"),
    ],
)
def test_the_interval_decides(interval, low, high, word):
    ours = sum(interval) / 2
    assert decided("c", "m", ours, low, high, interval=interval, stderr=0.1, n=20).verdict == word
    apart = decided("c", "m", ours, low, high, interval=interval, incomparable="a stand-in")
    assert (apart.verdict, apart.reason, apart.needed) == ("not comparable", "a stand-in", None)
    assert decided("c", "m", None, low, high, incomparable="a stand-in").verdict == "not run"


def test_a_number_without_an_interval_decides_nothing_unless_it_is_computed():
    once = decided("c", "m", 2.0, 0.0, math.inf, n=1)
    assert (once.verdict, once.label) == ("undecided", "one measurement")
    assert decided("c", "m", 2.0, 0.0, math.inf, n=9).label == "no spread"
    exact = [decided("c", "m", ours, 0.0, math.inf, computed=True) for ours in (2.0, -2.0)]
    assert [(one.verdict, one.label) for one in exact] == [("holds", "computed"), ("does not hold", "computed")]


def judged(claim, column, ours, cells, printed=(None, None), **more):
    return judge(claim, "cocktail", "m", column, cells.get, ours, printed, **more)


def test_an_undecided_claim_says_how_many_samples_would_decide_it():
    place = {"model": "m", "column": "c"}
    cells = {name: Cell(row=name, ours=50.0, n=20, **place) for name in "AB"}
    claim = Claim(text="better", first="A", second="B", column="c")
    column = Column(name="c", data="mini")
    entry = judged(claim, column, (5.0, 4.0, (-3.4, 13.4)), cells, (7.0, 5.0))
    assert (entry.verdict, entry.needed) == ("undecided", math.ceil(1.96**2 * 16 * 20 / 25))
    assert (entry.paper, entry.ours, entry.n, entry.unit, entry.digits) == (2.0, 5.0, 20, "points", 2)
    same = judged(replace(claim, low=-1.0, high=1.0), column, (0.0, 0.0, (-16.1, 16.1)), cells)
    assert (same.verdict, same.needed) == ("undecided", 381)  # a loss of a point that 20 samples cannot show
    assert judged(claim, column, None, cells).verdict == "not run"
    other = Column(name="c", data="mini", figure="kv_mib", digits=3, unit="MiB")
    assert judged(claim, other, (1.0, 0.1, (0.8, 1.2)), cells).digits == 3
    times = Column(name="c", data="mini", figure="decode_rate", unit="tokens/s")
    slow = judged(claim, times, (-9.0, 1.0, (-11.0, -7.0)), cells, standing_in=True)
    assert slow.verdict == "not comparable" and slow.reason.startswith("m stands in for the paper's models")


def test_a_relative_claim_is_in_percent_of_the_second():
    cells = {name: Cell(model="m", row=name, column="c", ours=number, n=1) for name, number in (("A", 3.0), ("B", 2.0))}
    claim = Claim(text="slower", first="A", second="B", column="c", low=50.0, high=60.0, relative=True)
    column = Column(name="c", data="efficiency", figure="tpot_s", unit="ms", digits=4)
    entry = judged(claim, column, (1.0, None, None), cells, (6.0, 4.0))
    assert (entry.ours, entry.paper, entry.unit, entry.digits) == (50.0, 50.0, "percent", 2)
    assert (entry.verdict, entry.label) == ("undecided", "one measurement")  # whatever the bounds are
    zero = {**cells, "B": replace(cells["B"], ours=0.0)}
    assert judged(claim, column, (1.0, None, None), zero).verdict == "not run"
    assert bound("cocktail", 3.5) == 3.5 and bound("cocktail", "-TPOT reduction vs FP16 (min)") == -32


ITEM = Grid(
    id="cocktail/table9",
    number="Table IX",
    title="t",
    caption="c",
    models=(Model("llama2-7b", "7B"),),
    rows=(Row(name="A", setting="fp16"), Row(name="B", setting="kivi", small="kivi:int4")),
    columns=(
        Column(name="speed-up", data="pg19", figure="seconds_per_token", scale=1.0, unit="x", digits=1, inverse=True),
        Column(name="time", data="pg19", figure="seconds_per_token", scale=1e3, unit="ms"),
    ),
    groups=(Group(name="one", columns=("time",)), Group(name="all", columns=("speed-up", "time"))),
    base="A",
)


def timed(*times):
    return {f"{n}": {"measured": {"step_s": [time]}} for n, time in enumerate(times)}


def test_a_speed_up_is_the_bases_time_divided_by_the_rows():
    computed = {("7B", "A", name): Source(timed(2.0, 4.0), ("a",), note="H200") for name in ("speed-up", "time")}
    computed |= {("7B", "B", name): Source(timed(1.0, 2.0), ("b",), note="A100") for name in ("speed-up", "time")}
    table = fold_grid(ITEM, Plan(), computed, ["before"])
    assert [table.at("7B", row, "speed-up").ours for row in "AB"] == [1.0, 2.0]
    assert [table.at("7B", row, "time").ours for row in "AB"] == [3000.0, 1500.0]
    assert table.at("7B", "B", "time").to_base == -1500.0
    assert [(h.name, h.unit, h.digits, h.mean) for h in table.headings] == [
        ("speed-up", "x", 1, False), ("time", "ms", 2, False), ("all", "x", 1, True)
    ]  # fmt: skip
    assert table.notes == ["before", "Measured on: H200. On A100: B."] and table.base == "A" and table.marks == []
    only = fold_grid(replace(ITEM, only_groups=True), Plan(), computed)
    assert [heading.name for heading in only.headings] == ["one", "all"]
    without = fold_grid(replace(ITEM, base=""), Plan(), computed)
    assert without.at("7B", "B", "speed-up").ours is None and without.at("7B", "B", "time").to_base is None
    one = fold_grid(ITEM, Plan(), {("7B", "A", "time"): Source(timed(2.0), ("a",))})
    assert one.at("7B", "A", "time").stderr is None and one.at("7B", "A", "all").reason == "not run"


def test_the_devices_stand_with_the_cells_that_they_made():
    both = "CPU and H200 (some samples each)"
    notes = {("A", "q"): "H200", ("A", "r"): both, ("B", "q"): "H200", ("B", "r"): "H200", ("C", "q"): both}
    notes |= {("C", "r"): both, ("D", "q"): "best of 2: quantspec:gamma=1; H200", ("D", "r"): ""}
    cells = [Cell("m", row, column, ours=1.0, note=note) for (row, column), note in notes.items()]
    (said,) = measured_on(cells)
    assert said == f"Measured on: H200. On {both}: A (r); C. On H200 (best of 2: quantspec:gamma=1): D."
    (said,) = measured_on([*cells, Cell("n", "A", "q", ours=1.0, note="CPU")])
    assert said.endswith("On H200 (best of 2: quantspec:gamma=1): m, D. On CPU: n, A.")
    assert measured_on(cells[6:7]) == ["Measured on: H200 (best of 2: quantspec:gamma=1): D."]
    assert measured_on([Cell("m", "A", "q")]) == []


def test_rows_of_a_run_belong_to_their_task_or_point():
    column, point = (
        Column(name="q", data="longbench", task="qasper"),
        Column(name="p", data="efficiency", prompt=4, batch=2),
    )
    assert belongs({"task": "qasper"}, column) and not belongs({"task": "trec"}, column)
    assert belongs({"task": "trec"}, replace(column, task=""))
    assert belongs({"measured": {"point": {"prompt": 4, "batch": 2}}}, point)
    for other in ({"prompt": 2, "batch": 4}, {"prompt": 4, "batch": 4}, None):
        assert not belongs({"measured": {"point": other}}, point)
    rows = [{"measured": {"point": {"status": "oom", "prompt": 4, "batch": batch}}} for batch in (8, 4)]
    rows.append({"measured": {"point": {"status": "ok", "prompt": 4, "batch": 1}}})
    assert [out_of_memory(rows, replace(point, batch=batch)) for batch in (1, 3, 4, 16)] == [False, False, True, True]
    assert not out_of_memory(rows, replace(point, prompt=8, batch=16)) and not out_of_memory([], point)


def test_of_several_settings_the_fastest_is_shown(monkeypatch):
    row = Row(name="best", setting="quantspec", choices=("quantspec:gamma=2", "quantspec:gamma=4"))
    column = Column(name="q", data="pg19")
    runs = tuple(run_of(text, "tiny", ["dataset=pg19"], Plan()) for text in row.choices)
    found = [Source(timed(3.0, 3.0), ("a",), note="H200"), Source(timed(2.0, 1.0, 99.0), ("b",), note="H200")]
    monkeypatch.setattr(sources, "_of_run", lambda run, outcome, plan, column: found[runs.index(run)])
    best = sources._fastest(Choice(runs), row, {}, Plan(), column)
    assert (best.runs, best.note) == (("b",), "best of 2: quantspec:gamma=4; H200")
    found[1] = replace(found[1], note="")
    assert sources._fastest(Choice(runs), row, {}, Plan(), column).note == "best of 2: quantspec:gamma=4"
    found[1] = Source({}, reason="no weights")
    assert sources._fastest(Choice(runs), row, {}, Plan(), column).reason == "no weights"
    found[1] = Source({"0": {"measured": {}}}, ("b",))
    assert sources._fastest(Choice(runs), row, {}, Plan(), column).reason == "no time per token"


def test_the_fastest_is_chosen_by_samples_of_one_machine(monkeypatch):
    """Two samples of a GPU say that the second is faster; a third, of two machines, would turn it round."""
    row = Row(name="best", setting="quantspec", choices=("quantspec:gamma=2", "quantspec:gamma=4"))
    column = Column(name="q", data="pg19")
    runs = tuple(run_of(text, "tiny", ["dataset=pg19"], Plan()) for text in row.choices)

    def made(*of: tuple[float, str]) -> dict[str, dict]:
        return {f"{n}": {"measured": {"step_s": [time], "device": device}} for n, (time, device) in enumerate(of)}

    gpu, cpu = "H200", "Xeon"
    found = [
        Source(made((3.0, gpu), (3.0, gpu), (1.0, gpu)), ("a",)),
        Source(made((2.0, gpu), (2.0, gpu), (50.0, cpu)), ("b",)),
    ]
    monkeypatch.setattr(sources, "_of_run", lambda run, outcome, plan, column: found[runs.index(run)])
    assert sources._fastest(Choice(runs), row, {}, Plan(), column).runs == ("b",)
    found[1] = Source(made((2.0, cpu), (2.0, cpu), (50.0, cpu)), ("b",))
    assert sources._fastest(Choice(runs), row, {}, Plan(), column).reason == "no time per token"
    found[1] = Source({key: {} for key in found[0].rows}, ("b",))
    assert sources._fastest(Choice(runs), row, {}, Plan(), column).reason == "no time per token"
    found[:] = [Source(made(*[(one, cpu), (2.0, gpu), (2.0, gpu)]), (name,)) for one, name in ((1.0, "a"), (0.1, "b"))]
    found[0] = Source(made((1.0, cpu), (1.0, gpu), (1.0, gpu)), ("a",))
    assert sources._fastest(Choice(runs), row, {}, Plan(), column).runs == ("a",), "by the two samples of the GPU"


def test_a_point_that_failed_elsewhere_says_so(tmp_path):
    row = {"setting": "fp16", "prompt": 4, "batch": 2, "status": "failed", "stepping": "graph (x)"}
    others = [{"setting": "dynamic", "prompt": 4, "batch": 2, "status": "ok"}, {"setting": "fp16"}]
    content = {"model": "llama2-7b", "device": "D", "rows": [row, *others]}
    (tmp_path / "a.json").write_text(json.dumps(content))
    column = Column(name="p", data="efficiency", prompt=4, batch=2)
    source = point_source("llama2-7b", "fp16", column, (tmp_path,))
    assert (source.reason, source.note, source.rows) == ("failed on D", "D, graph", {})
    assert point_source("llama2-7b", "fp16", replace(column, batch=4), (tmp_path,)) is None  # memory did not end


def test_a_speed_up_may_be_a_tenth_below_the_papers():
    entry = _verdict("c", "m", 2.0, 3.0)
    assert (entry.low, entry.high, entry.paper, entry.ours, entry.unit) == (1.8, math.inf, 2.0, 3.0, "factor")
    assert (entry.verdict, entry.label) == ("undecided", "one measurement")


def test_numbers_that_the_papers_do_not_print(tmp_path):
    (tmp_path / "x.csv").write_text("method,score\nA,1.5\nB,OOM\nC,\n")
    lookup = {name: published.lookup("x", {"method": name}, "score", tmp_path) for name in "ABCD"}
    assert lookup == {"A": 1.5, "B": None, "C": None, "D": None}
    with pytest.raises(DataError, match=r"x\.csv does not have the columns kind; it has method, score"):
        published.lookup("x", {"method": "A"}, "kind", tmp_path)
    with pytest.raises(DataError, match=r"y\.csv does not exist"):
        published.published_lines("y", tmp_path)


def test_numbers_that_json_does_not_have():
    assert _finite({"a": (1.0, math.inf, -math.inf), "b": [math.nan, "x", None, 2]}) == {
        "a": [1.0, None, None],
        "b": [None, "x", None, 2],
    }


@pytest.mark.parametrize(
    ("heading", "counts", "text"),
    [
        (Heading(name="a", unit="%"), [], "a"),
        (Heading(name="a", unit="ms"), [1], "a, ms"),
        (Heading(name="a", unit="ms"), [2], "a, ms (n = 2)"),
        (Heading(name="a"), [1, 2], "a (n = 1, 2)"),
        (Heading(name="a"), [2, 3, 9], "a (n = 2 to 9)"),
    ],
)
def test_headings_say_units_and_samples(heading, counts, text):
    assert _heading(heading, counts) == text


def test_bounds_in_words():
    one = Verdict(claim="c", model="m", paper=None, ours=None, stderr=None, n=0, low=1.0, high=2.5, unit="", verdict="")
    assert _bounds(one) == "1 to 2.5"
    assert (
        _bounds(replace(one, unit="factor")) == "factor 1 to 2.5" and _bounds(replace(one, unit="ms")) == "1 to 2.5 ms"
    )
    assert _bounds(replace(one, high=math.inf)) == "above 1" and _bounds(replace(one, low=-math.inf)) == "below 2.5"


def test_reasons_are_shortened_and_named_once():
    cells = [Cell(model=m, row=r, column="c", reason="word " * 60 + "\nhint") for m in ("m", "n") for r in ("A", "B")]
    cells.append(Cell(model="m", row="C", column="c", reason="y" * 240))
    cells.append(Cell(model="m", row="", column="c", reason="why"))
    folded = Folded(headings=[Heading(name="c")], rows=["A", "B", "C"], models=["m", "n"], cells=cells)
    text = item_markdown(ITEM, folded)
    assert f"Empty (A, B): {'word ' * 47}...\n" in text and f"Empty (C): {'y' * 240}\n" in text
    assert "Empty (c): why\n" in text
    assert "## m\n" in text and "## n\n" in text and "| A | ours | - |" in text
    assert text.startswith("# cocktail Table IX: t\n") and "hint" not in text


def test_what_a_table_shows_in_place_of_the_papers():
    item = replace(ITEM, columns=(Column(name="q", data="longbench", task="qasper"),), base="", groups=())
    assert notes_of(item, Plan()) == []
    notes = notes_of(item, Plan(models=("tiny",), data="mini", limit=3, max_new_tokens=5))
    assert notes[0] == "Models here: tiny, in place of 7B."
    assert notes[1].startswith("Data here: bundled (mini), in place of the paper's data sets.")
    assert notes[2:] == [
        "Settings here: B: kivi:int4 in place of kivi.",
        "At most 3 samples per data set and task.",
        "Answers end after 5 tokens.",
    ]
    assert notes_of(item, Plan(limit=3)) == ["At most 3 samples per data set."]
    runs = {"A": Source(timed(*range(5))), "B": Source(timed(*range(4))), "C": Source({})}
    for name, count in (("q", 4), ("r", 3)):  # of q all rows have 4 samples, of r 3
        sources = {("7B", row, name): Source(dict(list(runs[row].rows.items())[:count])) for row in runs}
        more = "; more, of runs that other tables share: q (4)" if count > 3 else ""
        assert notes_of(item, Plan(limit=3), sources) == [f"At most 3 samples per data set{more}."]
    rows = tuple(replace(row, small="cocktail:encoder=bm25") for row in item.rows)
    assert "Encoder here: BM25, which needs no weights, in place of Contriever." in notes_of(
        replace(item, rows=rows), Plan(data="mini")
    )
    some = notes_of(replace(item, rows=(item.rows[0], rows[1])), Plan(data="standin"))
    assert some[0].startswith("Encoder here (B): BM25")


def test_the_list_says_what_an_item_needs_and_what_is_there(monkeypatch):
    lines = []
    monkeypatch.setattr("experiments.session.states", lambda item, plan: lines)
    assert needs(ITEM) == "llama2-7b; pg19"
    start = ["cocktail/table9  Table IX  t", "                 needs llama2-7b; pg19"]
    assert listing([ITEM], Plan()).splitlines()[:4] == [*start, "                 here: nothing", ""]
    lines += ["one", "two"]
    text = listing([ITEM], Plan()).splitlines()
    assert text[:5] == [*start, "                 here: one", "                 here: two", ""]
    assert text[5].startswith("1 items")


def test_the_work_of_runs():
    def of(data, *options, model="llama2-7b"):
        return list(works(run_of("fp16", model, [f"dataset={data}", *options], Plan())))

    assert of("efficiency", "dataset.prompts=[64,128]", "dataset.batches=[1,4]", "dataset.new_tokens=9") == [
        Work(batch, prompt, 9, batch) for prompt in (64, 128) for batch in (1, 4)
    ]
    assert of("perplexity/wikitext2", "dataset.window=1024") == [Work(341_469 // 1024, 1024, 1)]
    assert of("pg19", "dataset.lengths=[512]", "dataset.limit=5", "dataset.warm_up=2") == [Work(7, 512, 90)]
    assert of("mini", "dataset.limit=5", "dataset.lengths=[512,1024]") == [Work(25, 512, 32), Work(25, 1024, 32)]
    with pytest.raises(KeyError, match="not known"):
        of("pg19", "dataset.limit=null")
    (qmsum,) = of("longbench", "dataset.tasks=[qmsum]", "dataset.limit=3", model="llama3.1-8b")
    assert (qmsum.samples, qmsum.prompt, qmsum.new) == (3, int(1.35 * 10614), 512)
    assert [duration(t) for t in (89.9, 90, 5399, 5400)] == ["89.9 s", "1.5 min", "90.0 min", "1.5 h"]
