"""A trained model: the rule of the sentences, the tables of the pages, floors, the plan, and the stages' command."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from experiments import measured, reproduce, session
from experiments.data import Plan
from experiments.fold.grid import Source, fold_grid
from experiments.formats.grid import ROWS
from experiments.formats.which import LINES as TINY_LINES
from experiments.measured import Stored
from experiments.real import __main__ as real
from experiments.real import fold, pages, plan, sentences
from experiments.real.stages import EIGHT, FACTORED, FACTORS, LINES, PYTHON, STAGES, Text, is_named, line_name
from experiments.registry import items
from experiments.runs import RunOutcome, composed
from experiments.stored import load_result_json
from kvbench.config.run_config import checked_config
from kvbench.config.setting import parse_setting
from kvbench.metrics.intervals import wilson
from tests.experiments.test_real_sentences import COLUMN, NOISE, PAIR, fidelity_row, kl_file

WIKI = Text("WikiText-2", "perplexity/wikitext2", "/data/wikitext2/test.raw.txt")


def test_pairs_are_lines_of_the_table_and_of_the_bundled_models():
    known = {setting.key for setting in LINES}
    for _, one, two, tail in sentences.PAIRS:
        assert {f"{one} | {tail}", f"{two} | {tail}"} <= known and one != two
    assert {line_name(one.name) for one in EIGHT} <= known
    tiny = load_result_json(TINY_LINES)["lines"]
    assert {f"{row['name']} | {row['tail']}" for row in tiny} == set(ROWS) < known
    assert FACTORED[0].key == "fp16 | own" and len(FACTORED) == 13


def test_figures_of_a_run_are_those_of_its_tokens_and_windows():
    figures = fold.run_figures([fidelity_row(0, [0.0, 0.4], [2]), fidelity_row(1, [0.2])])
    assert figures["kl"]["value"] == pytest.approx(0.2) and figures["flips"]["value"] == pytest.approx(1 / 3, rel=1e-4)
    assert figures["samples"] == [0.2, 0.2] and figures["tokens"] == 3 and "bytes" not in figures
    assert figures["ppl"] == pytest.approx(7.3891, rel=1e-4) and figures["ppl_fp16"] == pytest.approx(2.7183, rel=1e-4)
    lost = fold.run_figures([fidelity_row(0, [0.1], loss=0.5), fidelity_row(1, [0.1, 0.1, 0.1], loss=0.1)])["loss"]
    assert lost["value"] == pytest.approx(0.2) and lost["low"] < 0.2 < lost["high"]
    nll = fold.run_figures([{"id": "a", "nll": {"sum": 6.0, "n": 3}}, {"id": "b", "nll": {"sum": 2.0, "n": 2}}])
    assert nll["perplexity"]["value"] == pytest.approx(4.4817, rel=1e-4) and nll["samples"] == [2.0, 1.0]
    bill = {"used": {"total": 100}, "fp16_equivalent": 400}
    nll = {"sum": 3.0, "n": 2}  # of the reference answer
    score = fold.run_figures([{"id": "a", "scores": {"score": 1.0}, "nll": nll, "kv_bytes": bill, "measured": {}}])
    assert score["bytes"] == 100 and score["ratio"] == 4 and fold.run_figures([]) == {"n": 0}
    shares = fold.run_figures([{"id": str(i), "scores": {"score": float(i > 0)}, "measured": {}} for i in range(20)])
    assert (shares["score"]["low"], shares["score"]["high"]) == pytest.approx(wilson(19, 20), abs=1e-4)
    alike = fold.run_figures([{"id": str(i), "scores": {"score": 1.0}, "measured": {}} for i in range(20)])["score"]
    assert alike["value"] == alike["high"] == 1.0 and 0.7 < alike["low"] < 0.95
    mean, interval, count = fold.difference({"samples": [3.0, 5.0, 4.0]}, {"samples": [1.0, 2.0]})
    assert (mean, count) == (2.5, 2) and interval[0] < 2.5 < interval[1]


def test_a_stage_is_folded_with_what_it_rests_on_and_what_is_missing(tmp_path):
    stage = STAGES["kl"]
    rows = {name: {f"w/{i}": fidelity_row(i, [0.1, 0.3]) for i in range(3)} for name in (COLUMN,)}
    done = {setting.key: Stored({COLUMN: {}}) for setting in stage.settings[:4]}
    done[stage.settings[1].key] = Stored(rows, {"device": "cpu", "torch": "2.13", "hostname": "secret"})
    folded = fold.fold_stage(done, stage, {"model": "m"})
    whole = json.loads(folded.files[fold.FILE])
    assert whole["machine"] == {"device": "cpu", "torch": "2.13"} and len(whole["missing"]) == 3
    assert folded.counts == {f"{stage.settings[1].name}, {COLUMN}": 3} and "| 0.2" in folded.text
    assert "Measured on an unknown machine." in folded.text
    for row, device in zip(rows[COLUMN].values(), ("Abacus", "Abacus", "Loom"), strict=True):
        row["measured"] = {"device": device}
    others = {COLUMN: {key: {**row, "measured": {"device": "Abacus"}} for key, row in rows[COLUMN].items()}}
    done |= {setting.key: Stored(others, {"device": "cpu"}) for setting in stage.settings[2:4]}
    name = stage.settings[1].name.partition(" | ")[0]
    assert f"Measured on Abacus; on Loom: {name} ({COLUMN})." in fold.fold_stage(done, stage, {}).text
    done[stage.settings[2].key] = Stored({COLUMN: dict(list(others[COLUMN].items())[:2])}, {"device": "cpu"})
    few = fold.fold_stage(done, stage, {}).text
    assert few.count("With fewer samples") == 1 and f"{stage.settings[2].name} ({COLUMN}: 2)." in few
    one, two, key = COLUMN, "WikiText-2 4k", stage.settings[3].key
    runs = dict.fromkeys((one, two), others[COLUMN])
    part = fold.fold_stage(
        {key: Stored(runs), stage.settings[2].key: Stored({one: others[COLUMN], two: {}})}, stage, {}
    )
    assert json.loads(part.files[fold.FILE])["missing"] == [f"{stage.settings[2].key} ({two})"]
    assert f"Not run: {stage.settings[2].key} ({two})." in part.text
    (tmp_path / fold.FILE).write_text(folded.files[fold.FILE])
    assert fold.counts_before(tmp_path) == folded.counts and fold.counts_before(tmp_path / "none") is None
    assert fold.fold_stage({}, stage, {}).files == {}


def test_every_run_of_every_stage_is_one_that_kvbench_takes():
    for stage in STAGES.values():
        for options in stage.data([PYTHON], 4).values():
            config = checked_config(composed(("method=fp16", "model=smollm2-135m-q4_1", *options)))
            assert 2 <= config.task.limit <= 4
            assert (config.model.dtype == "float32") == (stage.name != "retrieval")
    runs = STAGES["kl"].data([WIKI, PYTHON], 64)
    assert list(runs) == [COLUMN, "WikiText-2 4k", "Python's texts 1k"]
    assert "dataset.limit=8" in runs["WikiText-2 4k"] and "dataset.limit=32" in runs["Python's texts 1k"]
    assert f"dataset.options={{path: {WIKI.path}}}" in runs[COLUMN]
    factors = STAGES["outliers"].data([WIKI], 2)
    assert [f"factor {n}" for n in FACTORS] == list(factors) and not any("outliers" in x for x in factors["factor 1"])
    assert "model.outliers=first_last:factor:16" in factors["factor 16"]


def test_the_readmes_table():
    kl = kl_file(**{line_name("kivi int4"): NOISE})
    nll = [{"id": str(i), "nll": {"sum": 3.0 + 0.1 * i, "n": 1}} for i in range(4)]
    worse = [{"id": str(i), "nll": {"sum": 3.5 + 0.1 * i + 0.01 * (i % 2), "n": 1}} for i in range(4)]
    both = {"fp16": nll, "kivi int4": worse}
    perplexity = {
        "lines": [{"name": name, "runs": {"WikiText-2": fold.run_figures(rows)}} for name, rows in both.items()]
    }
    bill = {"used": {"total": 2**20}, "fp16_equivalent": 3 * 2**20}
    needles = [{"id": str(i), "scores": {"score": float(i > 0)}, "kv_bytes": bill, "measured": {}} for i in range(4)]
    retrieval = {"lines": [{"name": "kivi int4", "runs": {"niah_single_1": fold.run_figures(needles)}}]}
    table = pages.readme_table(kl, perplexity, retrieval)
    cells = [[cell.strip() for cell in one.split("|")[1:-1]] for one in table]
    place = cells[0].index("kivi int4")
    column = {row[0]: row[place] for row in cells[2:]}
    assert column["KL from fp16, WikiText-2 1k (n = 4)"] == "1 ±0.13" and column["KV bytes, fp16's to them"] == (
        "1.00 MiB, 3.00x"
    )
    # 38.67 less 23.34, each exp of a mean; not 38.67 times the difference of the means (19.5)
    assert column["perplexity, WikiText-2 (n = 4)"].startswith("38.67 (Δ +15 ±") and len(cells[0]) == 1 + len(EIGHT)
    assert column["needle in 2,048 tokens, % (n = 4)"].startswith("75 ±")
    assert [row[1] for row in cells[2:]] == ["23.34", "0", "0", "0", "-", "-"]  # fp16


def test_a_perplexity_has_the_paired_difference_of_the_two_and_stands_alone_without_fp16s():
    base, own = ({"perplexity": {"value": 1.0}, "samples": values} for values in ([2.0, 3.0, 4.0], [2.1, 3.1, 4.1]))
    far = {"perplexity": {"value": 1.0}, "samples": [2.1, 3.2, 4.0]}
    text, further = pages.perplexity_text(own, base), pages.perplexity_text(far, base)
    assert text.startswith("1.00 (Δ +2.1 ±") and further.startswith("1.00 (Δ +2.1 ±") and text != further
    few = {**base, "samples": base["samples"][:2]}
    assert {pages.perplexity_text(*pair) for pair in ((base, base), (own, None), (own, few))} == {"1.00"}


def test_a_line_of_a_table_has_as_many_cells_as_its_head():
    text = fold.stage_markdown(kl_file(**{PAIR[0]: NOISE}))
    head, _, *body = (line for line in text.splitlines() if line.startswith("|"))
    assert r"| int8 per token \| open |" in body[0]
    assert {line.replace(r"\|", "").count("|") for line in (head, *body)} == {head.count("|")}


def test_a_damaged_file_of_a_stage_is_named_with_the_remedy(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(pages, "FOLDER", tmp_path)
    monkeypatch.setattr(pages, "ROOT", tmp_path.parent)
    monkeypatch.setattr(pages.page_blocks, "__defaults__", (tmp_path,))
    monkeypatch.setattr(pages.stage_file, "__defaults__", (tmp_path,))
    place = tmp_path / "kl" / fold.FILE
    place.parent.mkdir()
    for text in ("{", "[]", "{}", '{"about": "KL", "model": "m", "missing": [], "lines": [{"name": "x"}]}'):
        place.write_text(text)
        assert real.main(["--pages"]) == 1
        said = capsys.readouterr().err
        assert said.startswith(f"error: {place} is damaged") and "hint: restore it" in said


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["nosuch"], "no stage 'nosuch': eight, kl"),
        (["outliers", "--only", "kivi int4"], "no setting 'kivi int4': fp16, fp8, nvfp4, fp16 | own"),
        (["eight", "--only", "nosuch"], "no setting 'nosuch'"),
        (["items", "--items", "logquant/nosuch"], "no item 'logquant/nosuch' in the plan: logquant/table4"),
        (["kl", "--items", "logquant/table4"], "--items needs the stage items"),
        (["--limit", "0"], "0 is not a whole number of at least 1"),
    ],
)
def test_a_name_that_no_stage_has_is_refused(words, said, capsys):
    with pytest.raises(SystemExit) as ended:
        real.main(words)
    assert ended.value.code == 2 and said in capsys.readouterr().err


def test_a_folder_of_data_that_is_missing_is_refused_without_a_traceback(tmp_path, capsys):
    assert real.main(["eight", "--model", "tiny", "--data-dir", str(tmp_path / "none")]) == 2
    said = capsys.readouterr().err
    assert f"error: --data-dir={tmp_path / 'none'}: is not a folder" in said and "KVBENCH_DATA" in said


def test_texts_are_pythons_where_wikitext_cannot_be_had_with_the_reason(monkeypatch, capsys):
    monkeypatch.delenv("KVBENCH_DATA", raising=False)
    monkeypatch.setattr(real, "identify", lambda run: ("", "the hub is out of reach"))
    assert real.texts_of(argparse.Namespace(data_dir=None, model="tiny")) == [PYTHON]
    assert "Python's own texts are read: the hub is out of reach" in capsys.readouterr().err


def test_the_command_that_a_file_names_has_the_stage_and_the_texts_of_its_runs(tmp_path, monkeypatch):
    seen = []
    monkeypatch.setattr(
        measured, "make_table", lambda table, own, given: seen.append(table.fold.keywords["about"]) or 0
    )
    monkeypatch.setattr(real, "texts_of", lambda arguments: [replace(WIKI, path=None), PYTHON])
    monkeypatch.setattr(measured, "check_chosen_machine", lambda arguments: None)
    for words in (["eight", "--limit", "3"], ["kl", "--short"], ["kl", "--model", "tiny"]):
        assert real.main(words) == 0
    commands = ["eight --limit 3"] * 3 + ["kl --short --limit 8", "kl --model tiny --limit 8"]
    assert [about["command"] for about in seen] == [f"python -m experiments.real {text}" for text in commands]
    assert [len(about["texts"]) for about in seen] == [1, 1, 1, 1, 2]


def test_the_eight_settings_alone_are_those_of_the_readme():
    stage = real.stage_settings(STAGES["kl"], small=True)
    assert len(stage.settings) == len(EIGHT) and stage.settings[0].name == "fp16 | own"
    assert real.stage_settings(STAGES["kl"], small=False) is STAGES["kl"]
    assert real.stage_settings(STAGES["perplexity"], small=True).settings == EIGHT


def test_a_setting_of_the_readme_is_chosen_by_either_name_in_all_of_its_stages():
    for one in EIGHT:
        for name in (one.name, line_name(one.name)):
            for stage in ("kl", "perplexity", "retrieval"):
                (chosen,) = [setting for setting in STAGES[stage].settings if is_named(setting, [name])]
                assert parse_setting(chosen.setting).load() == parse_setting(one.setting).load()
            assert real.parse_real_options(["eight", "--only", name]).only == [name]
    assert [one.key for one in LINES if is_named(one, ["kivi int4 G32 | open"])] == ["kivi int4 G32 | open"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--model", "nosuch"], "error: model=nosuch: no such model."),
        (["--device", "gpu"], "error: runtime.device=gpu: is not a known device."),
        (["perplexity", "--model", "./nosuch"], "error: "),
    ],
)
def test_a_model_or_a_device_that_nothing_can_have_is_named_once(words, said, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(measured, "execute", lambda run: pytest.fail("a run was begun"))
    assert real.main([*words, "--runs", str(tmp_path)]) in (1, 2)
    out, err = capsys.readouterr()
    assert err.startswith(said) and err.count("error:") == 1 and out == ""


def test_kept_items_bring_the_page_of_all_items_up_to_date(tmp_path, monkeypatch):
    kept = []
    monkeypatch.setattr(reproduce, "main", lambda items, write: kept.append(write))
    monkeypatch.setattr(session, "make_items", lambda *rest: 0)
    words = ["items", "--items", "logquant/table4", "--model", "tiny", "--prompts", "1"]
    assert real.main(words) == 0 and kept == []
    assert real.main([*words, "--write"]) == 0 and kept == [True]


def test_the_command_runs_its_stages_and_children_one_stage(tmp_path, monkeypatch, capsys):
    seen = []
    monkeypatch.setattr(measured, "identify", lambda run: ("id", ""))
    monkeypatch.setattr(measured, "execute", lambda run: seen.append(run) or RunOutcome(run, "id", "ok"))
    monkeypatch.setattr(measured, "by_id", lambda folder, run: ({}, {}))
    monkeypatch.setattr(real, "texts_of", lambda arguments: [PYTHON])
    words = ["--model", "tiny", "--only", "fp16", "--run-only", "--runs", str(tmp_path), "--device", "cpu"]
    assert real.main(["perplexity", "retrieval", *words]) == 0
    assert [run.data for run in seen] == ["perplexity/mini_text", "ruler_offline"]
    given = []
    monkeypatch.setattr(measured, "run_apart", lambda table, setting, arguments, words: given.append(words) or True)
    assert real.main(["eight", *words[:2], "--run-only", "--jobs", "2", "--runs", str(tmp_path), "--limit", "3"]) == 0
    assert {words[0] for words in given} == {"perplexity", "kl", "retrieval"}
    assert all("eight" not in words and "--short" in words and words[-2:] == ["--limit", "3"] for words in given)
    with pytest.raises(SystemExit):
        real.main(["nothing"])
    assert "no stage 'nothing'" in capsys.readouterr().err
    assert (
        real.without_paths("dataset.options={path: /a/b/c.txt, limit: 2}") == "dataset.options={path: c.txt, limit: 2}"
    )
    assert real.without_paths("dataset.path=/a/b/c.txt") == "dataset.path=c.txt"


def test_the_plan_names_items_that_exist_and_keeps_its_hours():
    named = [name for part in plan.PARTS for name in part.items]
    assert len(set(named)) == len(named) and set(named) <= items().keys()
    assert sum(part.hours for part in plan.PARTS) <= plan.HOURS
    assert sum(part.minutes for part in plan.PARTS[: plan.FIRST]) <= plan.MINUTES + 1
    assert all(part.stage in real.CHOICES for part in plan.PARTS)
    scored = [
        number for number, part in enumerate(plan.PARTS) if part.stage == "retrieval" or "GSM8K: acc" in part.what
    ]
    assert min(scored) > [part.stage for part in plan.PARTS].index("floors")
    assert plan.plan_markdown() == (pages.FOLDER / "plan.md").read_text(encoding="utf-8")


def test_parts_end_when_the_minutes_are_over(monkeypatch, capsys):
    made = []
    clock = iter([0.0, 0.0, 50.0, *[1000.0] * 20])
    monkeypatch.setattr(plan.time, "monotonic", lambda: next(clock))
    monkeypatch.setattr(plan, "make_items", lambda arguments, parts: made.append(parts[0].items) or 0)
    arguments = argparse.Namespace(minutes=10.0, device="cuda")
    assert plan.make_parts(arguments, lambda stage, size: made.append((stage, size)) or 0) == 0
    assert made == [("perplexity", 148), ("kl", 64)]
    assert capsys.readouterr().out.count("is left for the same command") == len(plan.PARTS) - 2


def test_what_all_rows_leave_undecided_is_counted_apart():
    item = items()["cocktail/table3"]
    noisy = {row.name: {f"q/{i}": scored(i, row.name) for i in range(8)} for row in item.rows}
    noisy["chunks of 128"] = {f"q/{i}": scored(i, "chunks of 32" if i % 3 else "") for i in range(8)}
    sources = {
        ("tiny", name, column.name): Source(own, ("run",)) for name, own in noisy.items() for column in item.columns
    }
    for limit, word in ((None, "undecided for rows"), (9, "undecided for rows"), (8, "undecided")):
        verdicts = fold_grid(item, Plan(models=("tiny",), data="real", limit=limit), sources).verdicts
        content = {"claims": [asdict(one) for one in verdicts]}
        said = reproduce.counted(reproduce.Scale("x", Path(), content))
        assert f"2 {word}" in said.split(", ")


def scored(number, name):
    better = 0.5 if name in ("chunks of 32", "chunks of 8") else 0.1
    return {"id": f"q/{number}", "task": "qmsum", "scores": {"score": better + 0.01 * (number % 2)}, "measured": {}}
