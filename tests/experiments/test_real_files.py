"""``--data real`` and ``--data-dir``: generated records in each layout are found, read and described, item by item."""

from __future__ import annotations

import gzip
import json
from dataclasses import replace
from itertools import chain
from random import Random

import pytest

from experiments import session, standin
from experiments.__main__ import main
from experiments.data import POINTS, Plan, columns_of, data_overrides, groups_of, runs_here
from experiments.fold.cells import Cell, Folded, Verdict
from experiments.fold.figures import SPEEDS, flips, mean_divergence
from experiments.fold.grid import Source, fold_grid
from experiments.fold.similarity import heat
from experiments.fold.sources import missing_runs, runs_of, setting_of
from experiments.item import Column, Computed, Grid, Model
from experiments.real.files import PLACES, file_notes, official_rows, paths_in
from experiments.registry import items
from experiments.runs import composed, run_of, unfilled
from kvbench.config.run_config import checked_config
from kvbench.errors import ConfigError

SMOL, TINY = Model("smollm2-135m-q4_1"), Model("tiny")
WORDS = standin.random_sentences(Random(0), 90)
#: LongBench's tasks that some item has
TASKS = sorted({column.task for item in items().values() if isinstance(item, Grid) for column in item.columns} - {""})


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with every layout, as ``KVBENCH_DATA`` has them: gzipped, and WikiText-2 beside its other editions."""
    root = tmp_path_factory.mktemp("data")
    for choice in ("gsm8k", "openbookqa", "multi_lexsum", "infinitebench_sum", "pg19", "longbench"):
        place = root / PLACES[choice][0].partition("/")[0]
        place.mkdir()
        for task in TASKS if choice == "longbench" else [""]:
            for name, content in standin.LAYOUTS[choice](task, 200):
                if choice == "gsm8k":  # LogQuant leaves prompts of fewer than 600 tokens out
                    content = [row | {"question": f"{WORDS} {row['question']}"} for row in content]
                text = content if isinstance(content, str) else "".join(json.dumps(row) + "\n" for row in content)
                with gzip.open(place / f"{name}.gz", "wt", encoding="utf-8") as stream:
                    stream.write(text)
    (root / "wikitext2").mkdir()
    ((_, text),) = standin.article("", 0)
    for name in ("test.raw.txt", "test.txt", "valid.txt"):
        (root / "wikitext2" / name).write_text(text, encoding="utf-8")
    return root


def test_an_item_without_its_model_says_how_to_fetch_it():
    item, here = items()["logquant/figure4"], Plan(models=("smollm2-135m-q4_1",), data="real")
    for reason, fetched in (("model smollm2-135m-q4_1: its weights are not on this machine.", 1), ("no data", 0)):
        folded = Folded([], [], [], [Cell("m", "row", "column", reason=reason)])
        said = session.empty(item, folded, here)
        assert reason in said and said.count("hint: python -m kvbench.fetch model=smollm2-135m-q4_1") == fetched


@pytest.fixture
def plan(folder):
    return Plan(models=("tiny",), data="real", limit=1, paths=tuple(paths_in(folder).items()))


@pytest.fixture(scope="module")
def tokenizer():
    from kvbench.models.load import load_tokenizer

    return load_tokenizer(checked_config(composed(("model=tiny",))).model)


def measured_columns(item, plan):
    if isinstance(item, Grid):
        return [column for column in columns_of(item, plan) if not runs_here(column, plan, TINY)]
    return [row.data for row in item.options.get("rows", ())] or list(item.options.get("data", ()))


MEASURED = [item for item in items().values() if session.measurable_item(item, Plan(models=("tiny",), data="real"))]


@pytest.mark.parametrize("item", MEASURED, ids=lambda item: item.id)
def test_every_item_reads_each_of_its_data_sets(item, plan, tokenizer):
    """The data sets that the folder holds give a sample each; what it does not hold is named, and nothing else."""
    absent = set()
    for texts in dict.fromkeys(tuple(data_overrides(column, plan, TINY)) for column in measured_columns(item, plan)):
        task = checked_config(composed(run_of("fp16", "tiny", texts, plan).overrides)).task
        choice = texts[0].removeprefix("dataset=")
        if not any("path" in text for text in texts):
            absent.add(choice)
            continue
        if task.needs_tokenizer:
            task.bind(tokenizer)
        assert [sample for sample in task.samples() if not sample.warm_up], choice
    assert absent <= {"perplexity/c4"}


@pytest.mark.parametrize("item", [item for item in MEASURED if isinstance(item, Grid)], ids=lambda item: item.id)
def test_no_times_no_other_encoder_and_every_claim_of_its_own(item, plan):
    columns = columns_of(item, plan)
    assert columns and not any(column.data == POINTS or column.figure in SPEEDS for column in columns)
    names = {column.name for column in columns}
    assert all(names.issuperset(group.columns) for group in groups_of(item, plan))
    for row in item.rows:
        if row.setting and row.name not in ("ADA-002", "BM25", "LLM Embedder", "Facebook-Contriever"):
            assert row.setting.partition(":")[0] != "cocktail" or "encoder=minilm" in setting_of(row, plan)
    for run in missing_runs(item, plan):
        assert {"model=tiny", "runtime.arithmetic=float32"} <= set(run.overrides)
        assert not any("model.weights" in text for text in run.overrides)
    assert fold_grid(item, plan, {}).headings or item.only_groups


def test_items_of_times_alone_are_refused_by_name(folder, capsys):
    words = ["--models", "tiny", "--data", "real", "--data-dir", str(folder), "--dry-run"]
    assert main(["cocktail/figure5", *words]) == 2 and "no score, attention or acceptance" in capsys.readouterr().err
    assert {item.id for item in items().values()} - {item.id for item in MEASURED} == {
        "cocktail/figure4", "cocktail/figure5", "cocktail/figure6", "logquant/figure7", "quantspec/figure1",
        "quantspec/figure2", "quantspec/figure5", "quantspec/figure6", "quantspec/figure7", "quantspec/table1",
        "quantspec/table5",
    }  # fmt: skip
    assert main(["cocktail/table3", "--data", "real", "--data-dir", str(folder)]) == 2
    assert "add --models NAME" in capsys.readouterr().err
    assert main(["cocktail/table3", "--data-dir", str(folder / "none")]) == 2
    assert "is not a folder" in capsys.readouterr().err


def test_longer_prompts_than_the_context_are_not_comparable(folder):
    item = items()["quantspec/table4"]
    plan = Plan(models=(SMOL.preset,), data="real", paths=tuple(paths_in(folder).items()))
    columns = {column.name: column for column in columns_of(item, plan)}
    assert runs_here(columns["pg19 8k: acceptance"], plan, SMOL) == ""
    assert "dataset.lengths=[8102]" in data_overrides(columns["pg19 8k: acceptance"], plan, SMOL)
    far = columns["multi_lexsum 32k: acceptance"]
    assert runs_here(far, plan, SMOL) == ("not comparable: prompts of 32,768 tokens, and smollm2-135m-q4_1 reads 8,192")
    places = runs_of(item, plan)
    assert places[SMOL.title, "QuantSpec", far.name].reason.startswith("not comparable")
    table = fold_grid(items()["quantspec/table7"], plan, {})
    words = {verdict.claim: verdict for verdict in table.verdicts}
    assert isinstance(words["books 1k: acceptance: QuantSpec above SnapKV"], Verdict)
    assert words["books 1k: acceptance: QuantSpec above SnapKV"].verdict == "not run"
    assert runs_here(far, Plan(models=(SMOL.preset,), lengths=(2048,), data="real"), SMOL) == ""


def test_records_that_fill_no_prompt_are_not_comparable(tmp_path):
    """A fold alone says so too, where no run has reported it; data that are not there are not run."""
    item, column = items()["quantspec/table6"], "multi_lexsum: acceptance"
    columns = tuple(replace(one, options=("dataset.lengths=[1024]",)) for one in item.columns)
    item = replace(item, columns=columns)
    place = tmp_path / "multi_lexsum"
    place.mkdir()
    for count, reason in ((40, "none of 1 records fills a prompt of 1024 tokens; the longest has"), (4000, "not run")):
        row = {"document": " ".join(["court"] * count), "summary": "s"}
        (place / "test.jsonl").write_text(json.dumps(row) + "\n")
        unfilled.cache_clear()
        plan = Plan(models=("tiny",), data="real", paths=(("multi_lexsum", str(place)),), runs=tmp_path / "runs")
        folded = session.folded_of(item, plan, {})
        cell = folded.at("tiny", "SnapKV, gamma 1", column)
        short = count == 40
        assert reason in cell.reason and cell.reason.startswith("not comparable: ") == short
        verdicts = {(one.verdict, reason in one.reason) for one in folded.verdicts if one.claim.startswith(column)}
        assert verdicts == {("not comparable" if short else "not run", short)}
        others = {one.verdict for one in folded.verdicts if not one.claim.startswith(column)}
        assert others == {"not run"} and not any(note.startswith("Files") for note in folded.notes)


def test_files_behind_no_number_are_not_listed(plan, monkeypatch):
    item = items()["quantspec/table6"]
    rows = {"a": {"measured": {}}}
    sources = {("tiny", row.name, "pg19: acceptance"): Source(rows, ("run",)) for row in item.rows}
    monkeypatch.setattr(session, "sources_of", lambda *_: sources)
    (note,) = [note for note in session.folded_of(item, plan, {}).notes if note.startswith("Files")]
    assert "pg19" in note and "multi_lexsum" not in note
    mini = session.folded_of(item, Plan(models=("tiny",), data="mini"), {})
    assert not any(note.startswith("Files") for note in mini.notes)


def test_the_command_line_fills_the_paths_and_path_wins(folder, tmp_path, monkeypatch):
    seen = []
    monkeypatch.setattr(session, "make_items", lambda items, plan, *rest: seen.append(plan) or 0)
    words = ["logquant/table1", "--models", "tiny", "--data", "real"]
    assert main([*words, "--data-dir", str(folder), "--path", f"gsm8k={tmp_path}"]) == 0
    paths = dict(seen[-1].paths)
    assert paths["gsm8k"] == str(tmp_path) and paths["gsm8k_logquant"] == str(folder / "gsm8k")
    assert paths["perplexity/wikitext2"] == str(folder / "wikitext2" / "test.raw.txt")
    assert "perplexity/c4" not in paths and paths["longbench/qmsum"] == str(folder / "longbench")
    monkeypatch.setenv("KVBENCH_DATA", str(folder))
    assert main(words) == 0 and dict(seen[-1].paths)["pg19"] == str(folder / "pg19")
    monkeypatch.delenv("KVBENCH_DATA")
    assert main(words) == 0 and seen[-1].paths == ()
    with pytest.raises(ConfigError, match="holds none of the data sets"):
        paths_in(tmp_path)


def test_tables_name_files_digests_and_samples(plan, folder):
    columns = (
        Column("a", "longbench_cocktail", task="qmsum"),
        Column("b", "gsm8k_logquant"),
        Column("c", "pg19"),
        Column("d", "perplexity/wikitext2"),
        Column("e", "fidelity/answers", over="openbookqa"),
        Column("f", "perplexity/c4"),
    )
    (note,) = file_notes(columns, plan)
    assert "longbench/qmsum.jsonl.gz (sample of 4 rows out of 200, sha256 " in note
    assert "gsm8k/test.jsonl.gz (sample of 4 rows out of 1,319, sha256 " in note
    assert "gsm8k/train.jsonl.gz (96 rows, sha256 " in note and "openbookqa/test.jsonl.gz (8 rows, " in note
    assert f"pg19 ({standin.RECORDS} texts, sha256 of their digests " in note and "wikitext2/test.raw.txt (sha" in note
    assert file_notes(columns[5:], plan) == [] and official_rows()["lcc"] == 500
    (folder / "longbench" / "qmsum.jsonl.gz").rename(folder / "longbench" / "away")
    assert "has no file of qmsum" in file_notes(columns[:1], plan)[0]
    (folder / "longbench" / "away").rename(folder / "longbench" / "qmsum.jsonl.gz")


def test_similarities_of_a_real_passage_and_the_questions_asked_about_it(folder, plan):
    item = items()["cocktail/figure1"]
    place = folder / "longbench" / "qmsum.jsonl.gz"
    with gzip.open(place, "rt", encoding="utf-8") as stream:
        rows = [json.loads(text) for text in stream]
    shared = [rows[0], *(row | {"context": rows[1]["context"]} for row in rows[1:])]
    kept = place.read_bytes()
    with gzip.open(place, "wt", encoding="utf-8") as stream:
        stream.writelines(json.dumps(row) + "\n" for row in shared)
    item = replace(item, options={**item.options, "real": "bm25", "length": 100})
    folded = heat(item, plan)
    place.write_bytes(kept)
    assert folded.rows == ["query 1", "query 2", "query 3"] and len(folded.arrays["heat"]) == 3
    assert {cell.column for cell in folded.cells} == {"FP16", "INT4", "INT2"}
    totals = [sum(cell.ours for cell in folded.cells if cell.row == row) for row in folded.rows]
    assert totals == pytest.approx([100.0] * 3)
    assert "of QMSum, bm25" in folded.notes[0] and "longbench/qmsum.jsonl.gz" in folded.notes[1]
    nowhere = heat(item, replace(plan, paths=(("longbench_cocktail", str(folder / "pg19")),)))
    assert all(cell.ours is None and cell.reason for cell in nowhere.cells) and not nowhere.arrays


def test_divergence_and_flips_count_tokens_not_samples():
    rows = [
        {"fidelity": {"kld": [0.0, 0.3], "other_top": [2], "mode": "decode"}},
        {"fidelity": {"kld": [0.9, 0.4, 0.4, 0.0], "other_top": [1, 2, 3], "mode": "decode"}},
    ]
    assert mean_divergence(rows).value == pytest.approx(2.0 / 6) and flips(rows).value == pytest.approx(4 / 6)
    # the influences add up to the value, and their spread is that of a ratio of sums over clusters
    assert sum(mean_divergence(rows).influences) / 2 == pytest.approx(2.0 / 6)
    assert mean_divergence(rows).influences[0] == pytest.approx(1 / 3 + (0.3 - 2 / 3) / 3)
    assert mean_divergence([{}]) is None and list(chain(*[r["fidelity"]["kld"] for r in rows]))[1] == 0.3
    assert isinstance(items()["logquant/figure1"], Computed)
