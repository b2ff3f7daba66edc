"""Tables of data sets and of similarities: counts, mean lengths with their errors, shares of chunks."""

from __future__ import annotations

from statistics import fmean
from types import SimpleNamespace

from experiments.data import Plan
from experiments.fold import similarity, statistics
from experiments.item import Column, Computed, Described
from experiments.registry import items
from experiments.runs import samples
from kvbench.errors import DataError

TABLE5 = items()["logquant/table5"]


def computed(rows: tuple[Described, ...]) -> Computed:
    return Computed(
        id="logquant/table5", number="Table 5", title="t", caption="c", compute="statistics:of_datasets",
        published="logquant_table5", options={"rows": rows},
    )  # fmt: skip


def test_counts_and_lengths_of_data_sets(monkeypatch):
    rows = tuple(row for row in TABLE5.options["rows"] if row.data.task in ("qmsum", "trec"))
    asked = {
        "qmsum": [SimpleNamespace(meta={"words": n}, prompt="", task="qmsum") for n in (10, 30)],
        "trec": [SimpleNamespace(meta={}, prompt="a b c", task="trec")],
    }
    other = SimpleNamespace(meta={"words": 9999}, prompt="", task="another task")

    def config(row, plan):
        return SimpleNamespace(task=SimpleNamespace(samples=lambda: [*asked[row.data.task], other]))

    monkeypatch.setattr(statistics, "_config", config)
    monkeypatch.setattr(statistics, "of", lambda config: {"data": [{"hub_id": "a/b", "revision": "123"}]})
    table = statistics.of_datasets(computed(rows), Plan())
    by_task = {row.data.task: row.name for row in rows}
    count, length = (table.at("", by_task["qmsum"], name) for name in ("records", "mean length"))
    assert (count.ours, count.n, count.paper, count.stderr) == (2.0, 2, 200.0, None)
    assert (length.ours, length.n, length.paper, length.stderr) == (20.0, 2, 10614.0, 10.0)
    assert table.at("", by_task["trec"], "mean length").ours == 3.0  # words of the prompt
    assert [(heading.name, heading.unit) for heading in table.headings] == [("records", ""), ("mean length", "words")]
    assert table.notes[1:] == ["Records of a/b at commit 123."]
    limited = statistics.of_datasets(computed(rows), Plan(data="standin"))
    assert limited.marks and all(cell.paper is None for cell in limited.cells)


def test_data_that_are_missing_leave_both_cells_empty(monkeypatch):
    def missing(row, plan):
        raise DataError("no file")

    monkeypatch.setattr(statistics, "_config", missing)
    row = next(row for row in TABLE5.options["rows"] if row.data.task == "qmsum")
    cells = statistics.of_datasets(computed((row,)), Plan()).cells
    assert {(cell.ours, cell.reason) for cell in cells} == {(None, "no file")}
    assert [cell.paper for cell in cells] == [200.0, 10614.0]


def test_samples_of_one_task_are_counted():
    mini = Described(name="x", data=Column(name="x", data="mini", task="repeat", options=("dataset.limit=2",)))
    table = statistics.of_datasets(computed((mini,)), Plan())
    assert table.at("", "x", "records").ours == 2 and len(table.notes) == 1  # nothing came from the hub


def test_shares_of_chunks_and_similarities_from_0_to_1(monkeypatch):
    scores = iter([[1.0, 2.0, 3.0, 5.0], [3.0, 3.0, 3.0, 3.0]])
    scorer = SimpleNamespace(whole_words=False, scores=lambda query, texts: next(scores))
    monkeypatch.setattr(similarity, "encoder", lambda name: scorer)
    monkeypatch.setattr(similarity, "cut_chunks", lambda *given: SimpleNamespace(texts=["a"] * 4))
    item = items()["cocktail/figure1"]
    item = Computed(
        id=item.id, number="1", title="t", caption="c", compute="similarity:heat",
        options={**item.options, "queries": 2, "length": 1024},
    )  # fmt: skip
    table = similarity.heat(item, Plan(data="mini"))
    name = item.options["small"]
    widths = [similarity.by_threshold(values, 0.6, 0.1) for values in ([1.0, 2.0, 3.0, 5.0], [3.0] * 4)]
    for row, chosen in zip(table.rows, widths, strict=True):
        for column, bits in (("FP16", 16), ("INT4", 4), ("INT2", 2)):
            assert table.at(name, row, column).ours == 25.0 * list(chosen.bits).count(bits)
            assert table.at(name, row, column).n == 4
    assert table.arrays["heat"] == [[0.0, 0.25, 0.5, 1.0], [0.0] * 4]
    full = fmean(25.0 * list(chosen.bits).count(16) for chosen in widths)
    assert f"on average {full:.1f} % of the chunks are FP16" in table.notes[0]
    assert (similarity.ALPHA, similarity.BETA) == (0.6, 0.1)


def test_warm_up_samples_are_no_rows_of_a_run(monkeypatch, tmp_path):
    rows = {"a": {"warm_up": True}, "b": {"warm_up": False}, "c": {}}
    store = SimpleNamespace(samples=lambda: SimpleNamespace(rows=rows))
    monkeypatch.setattr("kvbench.results.store.RunStore", lambda folder, run_id: store)
    assert list(samples(tmp_path, "x")) == ["b", "c"]
