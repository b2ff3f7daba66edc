"""Items from the command line to their files, on tiny; cut sessions, missing weights, points, lengths, --dry-run."""

import csv
import json
from importlib.util import find_spec
from types import SimpleNamespace

import pytest

from experiments import registry, runs, session
from experiments.__main__ import experiments_parser, main
from experiments.data import Plan, columns_of, data_overrides, scaled, shortened
from experiments.fold import points
from experiments.fold.cells import Cell, Folded, Heading
from experiments.fold.sources import Source, missing_runs, runs_of, sources_of
from experiments.item import Claim, Column, Grid, Group, Model, Row
from experiments.place import Place
from experiments.runs import Run, RunOutcome, execute, run_of
from kvbench.errors import ConfigError, ModelError

MINI = (Column(name="needle", data="mini", task="needle", options=("dataset.tasks=[needle]",)),)
ITEM = Grid(
    id="cocktail/table9",
    number="Table IX",
    title="Two settings & more",
    caption="A caption with 100% of it.",
    models=(Model("llama2-7b", "Llama2-7B"),),
    rows=(
        Row(name="FP16", setting="fp16"),
        Row(name="KIVI", setting="kivi:int2", small="kivi:int2:residual=32"),
        Row(name="none", setting=None, absent="it has no weights"),
    ),
    columns=(
        Column(name="QMSum", data="longbench_cocktail", task="qmsum"),
        Column(name="memory", data="efficiency", figure="peak_decode", scale=2**-30, unit="GiB", prompt=4096, batch=1),
    ),
    groups=(Group(name="Average"),),
    mini=MINI,
    base="FP16",
    claims=(Claim(text="KIVI loses", first="FP16", second="KIVI", column="Average"),),
    draw="bars",
)


@pytest.fixture
def plan(tmp_path):
    return plan_in(tmp_path)


@pytest.fixture(scope="module")
def empty(tmp_path_factory):
    """A plan for tests that run nothing, so that its runs are composed once."""
    return plan_in(tmp_path_factory.mktemp("empty"))


def plan_in(folder):
    lengths = {"lengths": (512,), "limit": 1, "max_new_tokens": 2}
    return Plan(models=("tiny",), data="mini", device="cpu", runs=folder / "runs", out=folder / "out", **lengths)


@pytest.mark.slow  # 5 s
def test_from_runs_to_files_and_on_where_it_stopped(plan, capsys, monkeypatch):
    made = []
    whole = runs.execute_all

    def cut(todo, launcher, jobs):
        for outcome in whole(todo, launcher, jobs):
            made.append(outcome)
            yield outcome
            if len(made) == 1:
                raise KeyboardInterrupt

    monkeypatch.setattr(session, "execute_all", cut)
    with pytest.raises(KeyboardInterrupt):
        session.make_items([ITEM], plan, "local", 1)
    assert [outcome.status for outcome in made] == ["ok"] and not (plan.out).exists()
    assert session.make_items([ITEM], plan, "local", 1) == 0
    assert made[0].id == made[1].id and len({outcome.id for outcome in made}) == 4  # two settings, answers and points
    folder = plan.folder(ITEM)
    content = json.loads((folder / "cells.json").read_text())
    cells = {(cell["row"], cell["column"]): cell for cell in content["cells"]}
    full = cells["FP16", "needle"]
    assert full["n"] == 1 and full["runs"] == [made[0].id] and full["paper"] is None
    rows = runs.samples(plan.runs, full["runs"][0])
    scores = [row["scores"]["score"] for row in rows.values() if row["task"] == "needle"]
    assert full["ours"] == pytest.approx(100 * sum(scores))
    assert cells["FP16", "memory"]["ours"] > 1 and cells["none", "needle"]["reason"] == "it has no weights"
    table = (folder / "table.md").read_text()
    assert "| FP16 | ours |" in table and "Empty (none): it has no weights" in table and "ours - FP16" in table
    assert "KIVI: kivi:int2:residual=32 in place of kivi:int2" in table
    assert "efficiency 512 + 2 tokens in place of 4096 + 128" in table
    latex = (folder / "table.tex").read_text()
    assert r"\toprule" in latex and r"Two settings \& more" in latex and r"100\% of it" in latex
    lines = list(csv.DictReader((folder / "table.csv").read_text(encoding="utf-8").splitlines()))
    assert len(lines) == 3 * 3 and {line["model"] for line in lines} == {"tiny"}
    if find_spec("matplotlib") is not None:  # an optional package: without it there is no picture, but all tables
        assert (folder / "figure.png").stat().st_size > 5000 and (folder / "figure.svg").exists()
    capsys.readouterr()
    assert session.make_items([ITEM], plan, "local", 1, fold_only=True) == 0
    assert "| FP16 | ours |" in capsys.readouterr().out

    here = "here: tiny, mini, limit 1, max-new-tokens 2, lengths 512: 6 of 9 cells"
    assert session.listing([ITEM], plan).splitlines()[2].strip() == here
    path = plan.runs / full["runs"][0] / "metrics.json"
    metrics = json.loads(path.read_text())
    for parts in metrics["sources"].values():
        parts["cache"] = "0" * 12
    path.write_text(json.dumps(metrics))
    assert f"{here}; 1 of 4 runs is of older code: cache\n" in session.listing([ITEM], plan)
    path.write_text(json.dumps({**metrics, "status": "interrupted"}))
    assert f"{here}; 1 of 4 runs is incomplete\n" in session.listing([ITEM], plan)


def test_run_ids_are_those_of_the_typed_command(empty, monkeypatch):
    run = next(run for run in missing_runs(ITEM, empty) if "method=fp16" in run.overrides)
    assert run.command.startswith("python -m kvbench method=fp16 model=tiny dataset=mini ")
    from kvbench.cli.compose import Composer

    assert Composer().check(list(run.overrides)) == [list(run.overrides)]  # every override is accepted as typed
    name, reason = runs.identify(run)
    assert len(name.split("-")) == 2 and not reason


def test_a_missing_model_is_asked_for_once(monkeypatch, tmp_path):
    asked = []

    def refuse(config):
        asked.append(config["method"]["_target_"])
        raise ModelError("model llama2-7b: no weights on this machine.\n  hint: get them")

    monkeypatch.setattr("kvbench.runner.run.answer_run", refuse)
    monkeypatch.setattr(runs, "_absent", {})
    first, second = (run_of(name, "llama2-7b", ["dataset=mini"], Plan(runs=tmp_path)) for name in ("fp16", "kivi"))
    assert execute(first).status == "absent" and execute(second).reason.startswith("model llama2-7b")
    assert len(asked) == 1


def test_a_run_that_breaks_does_not_end_the_others(monkeypatch, tmp_path):
    def broken(config):
        raise ZeroDivisionError("1 / 0")

    monkeypatch.setattr("kvbench.runner.run.answer_run", broken)
    outcome = execute(run_of("fp16", "tiny", ["dataset=mini"], Plan(runs=tmp_path)))
    assert outcome.status == "failed" and outcome.reason.startswith("ZeroDivisionError: 1 / 0")


def test_a_reason_is_shown_where_the_run_is_missing(empty):
    run = run_of("fp16", "tiny", ["dataset=mini"], empty)
    place = ("tiny", "FP16", "needle")
    outcomes = {
        one: RunOutcome(one, "", "absent", "no network")
        for one in runs_of(ITEM, empty).values()
        if isinstance(one, Run)
    }
    sources = sources_of(ITEM, empty, outcomes)
    assert sources[place].reason == "no network" and not sources[place].rows
    assert isinstance(runs_of(ITEM, empty)["tiny", "none", "needle"], Source)
    assert run not in outcomes


def test_large_models_are_not_measured_without_a_gpu(monkeypatch, tmp_path):
    monkeypatch.setattr(runs, "has_gpu", lambda: False)
    plan = Plan(runs=tmp_path)
    measured = [run for run in missing_runs(ITEM, plan) if run.data == "efficiency"]
    assert measured and all("model.weights=random" in run.overrides for run in measured)
    assert execute(measured[0]).reason == runs.NO_GPU


def test_points_of_files(tmp_path):
    point = {"prompt": 4096, "batch": 2, "status": "ok", "peak": {"decode": 2**31}, "stepping": "graph"}
    rows = [
        {**point, "setting": "kivi:int4,residual=128"},
        {**point, "batch": 8, "status": "oom", "setting": "kivi:int4"},
    ]
    content = {"model": "llama2-7b", "device": "NVIDIA H200", "memory_limit_gb": 44.7, "rows": rows}
    (tmp_path / "memory.json").write_text(json.dumps(content))
    column = Column(name="x", data="efficiency", prompt=4096, batch=2, memory_gb=44.7)

    def at(**changes):
        return points.point_source("llama2-7b", "kivi:int4", Column(**{**vars(column), **changes}), (tmp_path,))

    source = at()
    assert source.runs == ("memory.json",) and source.note == "NVIDIA H200, graph"
    assert list(source.rows) == ["efficiency@4096/b2"]
    assert at(batch=8).reason == "out of memory on NVIDIA H200" == at(batch=16).reason
    assert at(batch=4) is None and at(memory_gb=None) is None and at(prompt=512) is None
    assert points.point_source("llama2-7b", "kivi:int2", column, (tmp_path,)) is None


def test_lengths_are_scaled_to_the_model_and_said():
    tiny, llama = Model("tiny"), Model("llama2-7b")
    books = Column(name="books", data="pg19", options=("dataset.lengths=[4096,8192]",))
    assert "dataset.lengths=[1024]" in data_overrides(books, Plan(models=("tiny",)), tiny)
    assert shortened(books, Plan(), tiny) == "pg19 [1024] tokens in place of [4096,8192]"
    assert "dataset.lengths=[4006]" in data_overrides(books, Plan(), llama)  # 4096 less 90 new tokens
    assert "model.prompt_limit=null" in data_overrides(books, Plan(), llama)  # LongBench's rule allows 3,500
    short = Column(name="books", data="pg19", options=("dataset.lengths=[2048]",))
    assert "model.prompt_limit=null" not in data_overrides(short, Plan(), llama)
    text = Column(name="text", data="perplexity/wikitext2", options=("dataset.window=512",))
    assert shortened(text, Plan(), tiny) == "" and "dataset.window=512" in data_overrides(text, Plan(), tiny)
    memory = ITEM.columns[1]
    assert (scaled(memory, Plan(), tiny).prompt, scaled(memory, Plan(), tiny).unit) == (1024, "MiB")
    assert scaled(memory, Plan(), llama) == memory


def test_mini_replaces_data_sets_and_keeps_points():
    names = [column.name for column in columns_of(ITEM, Plan(data="mini"))]
    assert names == ["needle", "memory"]
    assert [column.name for column in columns_of(ITEM, Plan())] == ["QMSum", "memory"]


def test_command_line(capsys, monkeypatch, tmp_path):
    monkeypatch.setattr(registry, "items", lambda: {ITEM.id: ITEM})
    assert main(["--out", str(tmp_path)]) == 0
    text = capsys.readouterr().out
    assert "cocktail/table9" in text and "llama2-7b; longbench_cocktail, efficiency" in text
    assert main(["cocktail/table8"]) == 2
    assert "no such item" in capsys.readouterr().err
    assert main(["cocktail/table9", "--models", "tyny"]) == 2
    assert "did you mean 'tiny'" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["all", "--limit", "0"])
    with pytest.raises(SystemExit):
        main(["all", "--launcher", "joblib", "--jobs", "0"])
    assert experiments_parser().parse_args(["all", "--models", "tiny", "--data", "mini"]).items == ["all"]


@pytest.mark.parametrize(
    ("text", "message"),
    [("longbench", "has no folder"), ("longbunch=.", "did you mean 'longbench'"), ("pg19=./nowhere", "nowhere")],
)
def test_local_files_that_cannot_be_used_are_refused(text, message, capsys):
    assert main(["cocktail/table2", "--path", text]) == 2
    assert message in capsys.readouterr().err


def test_a_folder_that_cannot_be_written_is_named(plan, capsys, monkeypatch, tmp_path):
    monkeypatch.setattr(registry, "items", lambda: {ITEM.id: ITEM})
    (tmp_path / "file").write_text("not a folder", encoding="utf-8")
    monkeypatch.setattr(session, "empty", lambda *rest: pytest.fail("it has a number"))
    cell = Cell(model="tiny", row="FP16", column="QMSum", ours=1.0, n=1)
    known = Folded(headings=[Heading(name="QMSum")], rows=["FP16"], models=["tiny"], cells=[cell])
    monkeypatch.setattr(session, "folded_of", lambda *rest: known)
    assert main([ITEM.id, "--fold-only", "--out", str(tmp_path / "file")]) == 2
    assert str(tmp_path / "file") in capsys.readouterr().err


def test_a_damaged_result_is_named(capsys, monkeypatch, tmp_path):
    from experiments import reproduce

    (tmp_path / ITEM.id).mkdir(parents=True)
    (tmp_path / ITEM.id / "cells.json").write_text('{"cells', encoding="utf-8")
    monkeypatch.setattr(registry, "items", lambda: {ITEM.id: ITEM})
    monkeypatch.setattr(reproduce, "main", lambda items, *rest: reproduce.page(items, tmp_path, {}))
    assert main(["--reproduce"]) == 2
    assert "cells.json is damaged" in capsys.readouterr().err


def test_lengths_of_cells_that_the_table_lacks_are_not_noted():
    from experiments.registry import items
    from experiments.session import notes_of

    (note,) = [text for text in notes_of(items()["quantspec/table4"], Plan()) if text.startswith("Lengths")]
    assert "32678" in note and "65536" not in note


def test_an_item_is_finished_as_soon_as_its_runs_have_ended(monkeypatch, capsys, tmp_path):
    one, two = (Run((f"method={name}",), "tiny", "mini") for name in ("a", "b"))
    needed = {"x/1": [one, two], "x/2": [one], "x/3": []}
    events, statuses = [], {one: ("absent", "no weights\n  hint"), two: ("absent", "no weights\n  hint")}

    def execute(todo, launcher, jobs):
        for run in todo:
            events.append(run)
            yield RunOutcome(run, "", *statuses[run])

    monkeypatch.setattr(session, "item_runs", lambda item, plan: needed[item.id])
    monkeypatch.setattr(session, "execute_all", execute)
    cell = Cell(model="tiny", row="FP16", column="QMSum", ours=1.0, n=1)
    done = lambda item, outcomes: SimpleNamespace(cells=[cell], of=(item.id, len(outcomes)))  # noqa: E731
    monkeypatch.setattr(session, "folded_of", lambda item, plan, outcomes: done(item, outcomes))
    place = lambda folded: events.append(folded.of) or Place(tmp_path)  # noqa: E731
    monkeypatch.setattr(session, "write_item", lambda item, folded, plan: (place(folded), "no picture"))
    monkeypatch.setattr(session, "item_markdown", lambda item, folded: item.id)
    items = [Grid(id=name, number="1", title="", caption="", rows=(), columns=()) for name in needed]
    assert session.make_items(items, Plan(), "local", 1) == 0
    assert events == [("x/3", 0), one, ("x/2", 1), two, ("x/1", 2)]
    out, err = capsys.readouterr()
    assert out.count("-> ") == 3 and err.count("no picture\n") == 3
    assert (
        err.replace("no picture\n", "") == "[1/2] absent  python -m kvbench method=a\n  no weights\n"
    )  # a reason is printed once
    statuses[two] = ("failed", "Traceback\nline two")
    events.clear()
    assert session.make_items(items, Plan(), "local", 1) == 1 and len(events) == 5
    assert "[2/2] failed  python -m kvbench method=b\nTraceback\nline two\n" in capsys.readouterr().err
    events.clear()
    assert session.make_items(items, Plan(), "local", 1, fold_only=True) == 0 and [e[1] for e in events] == [0, 0, 0]


def test_the_same_run_is_made_once(monkeypatch):
    one, two = (Run((name,), "tiny", "mini") for name in "ab")
    made = []
    monkeypatch.setattr(runs, "execute", lambda run, threads=None: made.append(run) or RunOutcome(run, "", "ok"))
    assert [outcome.run for outcome in runs.execute_all([one, two, one])] == [one, two] == made


def test_dry_run_of_an_unknown_gpu_is_refused(capsys):
    assert main(["cocktail/table2", "--dry-run", "--gpu", "rtx409"]) == 2
    assert "did you mean 'rtx4090'" in capsys.readouterr().err


def test_dry_run(empty, capsys, monkeypatch):
    from experiments.predict import Work, duration, expect_run, prediction_report

    text = prediction_report([ITEM, ITEM], empty)
    assert text.count("python -m kvbench method=fp16 model=tiny dataset=mini") == 1
    assert "4 of which are shared with items above" in text and "4 runs, expected on one h200" in text
    qmsum = run_of("fp16", "llama2-7b", ["dataset=longbench_cocktail", "dataset.tasks=[qmsum]"], empty)
    seconds, peak = expect_run(qmsum)
    # 200 samples of 127 steps; a step reads 13.2 GB of weights and 2.1 GB of keys and values at 4.7 TB/s, about 3.2 ms
    assert 200 * 127 * 3e-3 < seconds < 200 * 127 * 6e-3
    assert 14 < peak / 2**30 < 17
    batches = []
    for samples in (4, 5, 8):
        monkeypatch.setattr("experiments.predict.works", lambda run, samples=samples: [Work(samples, 64, 9, 4)])
        batches.append(expect_run(qmsum)[0])
    assert batches == pytest.approx([batches[0], 2 * batches[0], 2 * batches[0]]), "an incomplete batch takes as long"
    assert [duration(12), duration(120), duration(7200)] == ["12 s", "2.0 min", "2.0 h"]


@pytest.mark.slow  # 6 s
def test_joblib_makes_each_run_once_in_processes_of_their_own(tmp_path):
    wrong = [Run(("method=fp16", f"dataset={name}"), "tiny", name) for name in ("none", "nothing", "none")]
    outcomes = list(runs.execute_all(wrong, "joblib", 2))
    assert {outcome.run.data for outcome in outcomes} == {"none", "nothing"} and len(outcomes) == 2
    assert all(outcome.status == "absent" and outcome.reason for outcome in outcomes)


def test_a_missing_calibration_is_made(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    typed = []

    def refuse(checked):
        raise ConfigError("method.calibration", None, "there is none")

    monkeypatch.setattr("kvbench.runner.resolve.material", refuse)
    monkeypatch.setattr("kvbench.cli.calibrate.main", typed.append)
    run = run_of("kvquant", "tiny", ["dataset=mini"], Plan())
    runs.calibrate(runs.composed(run.overrides), run)
    assert typed == [["--model", "tiny", "--text", "mini", "python", "--device", "auto"]]
    runs.calibrate({}, run_of("kivi", "tiny", ["dataset=mini"], Plan()))
    assert len(typed) == 1


def test_items_are_listed_with_and_without_the_option(monkeypatch, capsys):
    monkeypatch.setattr(registry, "items", lambda: {ITEM.id: ITEM})
    for typed in ([], ["--list"]):
        assert main(typed) == 0
        listed = capsys.readouterr().out
        assert ITEM.id in listed and "`python -m experiments ITEM` makes one, `--dry-run` says how" in listed
    assert "without an argument, all items are listed" in " ".join(experiments_parser().format_help().split())
    assert main(["--list", "--runs", "/nope"]) == 2 and "--runs=/nope: is not a folder" in capsys.readouterr().err
