"""Small parts of the command line: help, scores of files, plans of sweeps, and what the composer checks in advance."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from kvbench.cli import choice, compose, plan, score, settings, usage
from kvbench.cli.arguments import parse_arguments
from kvbench.cli.compose import Composer
from kvbench.errors import CombinationError, ConfigError, DataError, KvbenchError
from kvbench.results.sweeps import Job

GOOD = {"pred": "x", "answers": ["x"]}


def write(path: Path, *rows: Any) -> Path:
    path.write_text("\n".join(map(json.dumps, rows)))
    return path


# -- scores of files -------------------------------------------------------------------------------------------------


def test_one_task_of_a_folder_is_scored_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path / "qasper.jsonl", GOOD)
    write(tmp_path / "trec.jsonl", {"nothing": 1})
    write(tmp_path / "notes.txt", "words")
    scores, skipped = score.score_path(tmp_path, "qasper")
    assert (list(scores), skipped) == (["qasper"], [])
    with pytest.raises(KvbenchError, match="contains no files of outputs for --task gsm8k"):
        score.score_path(tmp_path, "gsm8k")
    (tmp_path / "trec.jsonl").rename(tmp_path / "mine.json")
    assert score.score_path(tmp_path)[1] == ["mine.json"], "a file of another kind is not even skipped"
    assert score.main([str(tmp_path)]) == 0
    assert "skipped, because they are not named after tasks: mine.json" in capsys.readouterr().out
    (tmp_path / "qasper.jsonl").rename(tmp_path / "other.jsonl")
    with pytest.raises(KvbenchError, match=r"does not contain a file with the name of a task \(.*, \.\.\., gsm8k\)"):
        score.score_path(tmp_path)
    assert score.score_path(tmp_path / "other.jsonl", "qasper")[0]["qasper"]["n"] == 1


@pytest.mark.parametrize(
    ("task", "hint"), [("qaspr", "did you mean --task qasper?"), ("zzzz", "use --task with one of")]
)
def test_a_task_that_is_none_is_refused_with_the_nearest(task: str, hint: str, tmp_path: Path) -> None:
    with pytest.raises(KvbenchError, match=f"'{task}' is not a task of LongBench or GSM8K") as caught:
        score.score_path(write(tmp_path / "a.jsonl", GOOD), task)
    assert hint in str(caught.value)


def test_endings_of_files_of_outputs(tmp_path: Path) -> None:
    packed = tmp_path / "qasper.jsonl.gz"
    packed.write_bytes(gzip.compress(json.dumps(GOOD).encode()))
    assert score.score_path(packed)[0]["qasper"]["score"] == 100.0
    stems = {
        name: score._stem(Path(name)) for name in ("a.jsonl", "a.jsonl.gz", "a.json", "a.json.gz", "a.txt", "a.b.json")
    }
    assert stems == {
        "a.jsonl": "a",
        "a.jsonl.gz": "a",
        "a.json": "a",
        "a.json.gz": "a",
        "a.txt": "a.txt",
        "a.b.json": "a.b",
    }


def test_scores_are_percentages_with_their_error_and_variants() -> None:
    """Of three answers, one is right by the rule and one by its digits alone: 100/3, and a standard error of 1/3."""
    rows = [{"response": text, "answer": "#### 7"} for text in ("#### 7", "#### 8", "no")]
    scores = score.score_records("gsm8k", rows)
    assert (scores["score"], scores["stderr"], scores["n"]) == (33.33, 33.33, 3)
    assert set(scores["variants"]) == {"strict", "flexible"} and "buckets" not in scores
    single = score.score_records("gsm8k_logquant", [{"resps": [["It is 7."]], "doc": {"answer": "#### 7"}}])
    assert single["variants"]["digits"] == single["score"] and single["stderr"] is None
    lengths = [{**GOOD, "length": n, "pred": "x" if n < 5000 else "y"} for n in (0, 3999, 4000, 7999, 8000)]
    buckets = score.score_records("qasper_e", lengths)["buckets"]
    assert buckets == {"0-4k": 100.0, "4-8k": 50.0, "8k+": 0.0}
    assert score.score_records("qasper_e", lengths[:1])["buckets"] == {"0-4k": 100.0, "4-8k": None, "8k+": None}
    with pytest.raises(DataError, match="here, record 1: the record needs one of the fields"):
        score.score_records("qasper", [GOOD, {}], "here")


def test_scores_are_written_and_printed_in_each_form(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, out = write(tmp_path / "qasper.jsonl", GOOD), tmp_path / "out.json"
    assert score.main([str(file), "--format", "json", "-o", str(out)]) == 0
    printed = capsys.readouterr().out
    assert printed == out.read_text() and printed.startswith('{\n  "scores"')
    report = json.loads(printed)
    assert (report["mean"], report["tasks"], report["skipped"]) == (100.0, 1, [])
    assert score.main([str(file), "--format", "markdown"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 3 and lines[2].startswith("| qasper | 100.00 | - | 1")
    assert score.main([str(file), "--output", str(tmp_path)]) == 2
    assert "--output" in capsys.readouterr().err
    assert score._overall({"a": {"score": 1.0}, "b": {"score": 2.005}}) == {"mean": 1.5, "tasks": 2}


# -- help ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("limits", "words"),
    [
        ({}, ""),
        ({"minimum": 0}, ", at least 0"),
        ({"above": 0.5}, ", greater than 0.5"),
        ({"maximum": 65535}, ", at most 65535"),
        ({"maximum": 65536}, ""),
        ({"minimum": 1, "maximum": 8}, ", at least 1 and at most 8"),
    ],
)
def test_bounds_in_words(limits: dict[str, Any], words: str) -> None:
    assert choice._bounds(limits) == words


@pytest.mark.parametrize(
    ("value", "typed"),
    [
        (None, "null"),
        (True, "true"),
        (0.5, "0.5"),
        ("a/b.c", "a/b.c"),
        ("a b", '"a b"'),
        ("é,", '"é,"'),
        ([1, "a", "a:b"], '[1,a,"a:b"]'),
        ({"a": [None], "b": "x y"}, '{a:[null],b:"x y"}'),
        ("", '""'),
    ],
)
def test_defaults_are_shown_as_they_are_typed(value: Any, typed: str) -> None:
    assert choice._typed_default(value) == typed


def test_lines_of_help_fit_the_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    line = "  --option NAME  " + "word " * 20
    assert usage.folded(line) == line, "without a terminal, nothing is broken"
    monkeypatch.setenv("COLUMNS", "50")
    lines = usage.folded(line.rstrip()).split("\n")
    assert all(len(one) <= 50 for one in lines) and all(one.startswith(" " * 17 + "word") for one in lines[1:])
    assert "".join(lines).count("word") == 20
    far = usage.folded(" " * 2 + "x" * 30 + "  " + "word " * 20).split("\n")
    assert all(one.startswith("    word") for one in far[1:]), "a column in the right half is not kept"
    monkeypatch.setenv("COLUMNS", "10")
    assert max(map(len, usage.folded("word " * 20).split("\n"))) > 10, "no line is narrower than 40"
    assert usage.folded("x" * 80) == "x" * 80, "a word is not broken"


# -- plans -----------------------------------------------------------------------------------------------------------


def test_jobs_of_one_model_are_adjacent_and_fp16_comes_first() -> None:
    jobs = [
        ["method=kivi", "model=a"],
        ["method=kivi", "model=b"],
        ["method=fp16", "quantizer=none", "model=b"],
        ["method=fp16", "model=a"],
        ["method=kivi", "model=a", "runtime.seed=1"],
    ]
    found = plan.ordered(jobs)
    assert [job.number for job in found] == [0, 1, 2, 3, 4]
    assert [list(job.overrides) for job in found] == [jobs[3], jobs[0], jobs[2], jobs[1], jobs[4]]
    assert [job.label for job in plan.ordered([[], ["method=kivi"]])] == ["fp16", "kivi"]


def test_a_reference_is_added_where_one_is_missing() -> None:
    jobs = [
        ["method=kivi", "model=a"],
        ["method=fp16", "model=a"],
        ["setting=kivi", "model=b"],
        ["method=atom", "model=b"],
    ]
    found = [list(job.overrides) for job in plan.ordered(jobs, with_fp16=True)]
    assert len(found) == 5 and ["method=fp16", "model=b"] in found
    preset = plan.ordered([["experiment=x", "method=kivi"]], with_fp16=True)
    assert list(preset[0].overrides) == ["method=fp16", "quantizer=none", "experiment=x"]
    plain = plan.ordered([["experiment=null", "dataset=a"]], with_fp16=True)
    assert len(plain) == 1, "the default method is fp16"


@pytest.mark.parametrize(("text", "shared"), [("true", 1), ("True", 1), ("1", 1), ("yes", 1), ("on", 1), ("false", 0)])
def test_jobs_that_share_a_prefill_are_one_unit(text: str, shared: int) -> None:
    word = f"runtime.shared_prefill={text}"
    jobs = [
        Job(number=n, overrides=overrides, label="")
        for n, overrides in enumerate(
            [("method=a", word), ("method=b", "quantizer=c", word), ("method=a", "dataset=d", word), ("method=a",)]
        )
    ]
    assert plan.shares([word]) is bool(shared)
    numbers = [[job.number for job in unit] for unit in plan.units(jobs)]
    assert numbers == ([[0, 1], [2], [3]] if shared else [[0], [1], [2], [3]])


def test_a_unit_comes_out_as_it_went_in() -> None:
    jobs = [Job(number=3, overrides=("a=b c", "d='x | y'"), label=""), Job(number=12, overrides=("é=%20",), label="")]
    text = plan.encoded(jobs)
    assert text[0] == text[-1] == "'" and text.isascii()
    assert plan.decoded(text[1:-1]) == [(3, ["a=b c", "d='x | y'"]), (12, ["é=%20"])]


@pytest.mark.parametrize(
    ("line", "refused"),
    [
        ("--resume a", None),
        ("--resume=a", None),
        ("--resume a b=1", "--resume"),
        ("--resume=a b=1", "--resume"),
        ("--resume a --multirun", "--resume"),
        ("--with-fp16", "--with-fp16"),
        ("--with-fp16 --multirun", None),
        ("--resume", "--resume"),
    ],
)
def test_options_of_sweeps_stand_where_they_mean_something(line: str, refused: str | None) -> None:
    if refused is None:
        arguments = parse_arguments(line.split())
        assert arguments.resume == ("a" if "resume" in line else None)
        assert arguments.with_fp16 == ("fp16" in line)
        return
    with pytest.raises(ConfigError) as caught:
        parse_arguments(line.split())
    assert caught.value.key == refused and caught.value.hint


# -- what is checked in advance --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def composer() -> Composer:
    return Composer()


def test_a_setting_stays_as_it_was_typed(composer: Composer) -> None:
    texts = ["dataset=mini", "setting='fp16,kivi:int4'", "runtime.seed=1,2", "launcher=local", "hydra.sweep.dir=x"]
    assert composer.typed(texts) == [
        ["dataset=mini", f"setting={name}", f"runtime.seed={seed}"] for name in ("fp16", "kivi:int4") for seed in (1, 2)
    ]
    assert composer.typed(["method=fp16,kivi"]) == [["method=fp16"], ["method=kivi"]]
    assert [one.text for one in settings.chosen_settings(['setting="fp16"'], False)] == ["fp16"]
    with pytest.raises(ConfigError, match="only a sweep accepts"):
        settings.chosen_settings(["setting=fp16,kivi"], False)
    with pytest.raises(ConfigError, match="is given twice"):
        settings.chosen_settings(["setting=fp16", "setting=kivi"], True)


def test_fp16_runs_once_without_the_quantizer_of_the_others(composer: Composer) -> None:
    kivi = [["method=kivi", f"quantizer={name}"] for name in ("int2", "int4")]
    assert composer.typed(["method=fp16,kivi", "quantizer=int2,int4"]) == [["method=fp16"], *kivi]
    assert composer.typed(["method=kivi", "quantizer=int2,int4"]) == kivi
    assert composer.typed(["method=fp16,kivi"]) == [["method=fp16"], ["method=kivi"]]
    none = [[f"method={name}", "quantizer=none"] for name in ("fp16", "kivi")]
    assert composer.typed(["method=fp16,kivi", "quantizer=none"]) == none
    with pytest.raises(ConfigError) as caught:
        composer.typed(["method=kivi,atom", "quantizer=int3"])
    assert (caught.value.key, caught.value.value) == ("quantizer", "int3")
    said = str(caught.value)
    assert "is not a quantizer of method=atom; nothing was started" in said and "leave out atom: method=kivi" in said


def failing(composer: Composer, monkeypatch: pytest.MonkeyPatch, wrong: dict[str, ConfigError]) -> list[str]:
    """Let jobs with some texts be wrong; the result names those that were checked."""
    checked: list[str] = []

    def of(plain: dict[str, Any]) -> str:
        checked.append(plain["name"])
        for text in plain["name"].split():
            if text in wrong:
                raise wrong[text]
        return "good"

    monkeypatch.setattr(composer, "plain", lambda job: {"name": " ".join(job), "dataset": {}})
    monkeypatch.setattr(compose, "checked_config", of)
    return checked


def test_a_value_that_no_valid_job_has_is_refused_in_advance(
    composer: Composer, monkeypatch: pytest.MonkeyPatch
) -> None:
    failing(composer, monkeypatch, {"b=2": ConfigError("b", 2, "is wrong")})
    composer._check_jobs([["a=1", "b=1"]], None)
    for jobs in ([["a=1", "b=2"]], [["a=1", "b=1"], ["a=1", "b=2"]]):
        with pytest.raises(ConfigError, match="b=2: is wrong"):
            composer._check_jobs(jobs, None)


def test_values_that_are_wrong_together_alone_are_left_to_their_job(
    composer: Composer, monkeypatch: pytest.MonkeyPatch
) -> None:
    failing(composer, monkeypatch, {"c=3": CombinationError("c", 3, "does not go with that")})
    composer._check_jobs([["a=1"], ["c=3"]], None)
    with pytest.raises(ConfigError):
        composer._check_jobs([["c=3"]], None)
    wrong = ConfigError("a", 1, "is too large for b")
    monkeypatch.setattr(
        compose, "checked_config", lambda plain: (_ for _ in ()).throw(wrong) if plain["name"] == "a=1 b=1" else ""
    )
    composer._check_jobs([["a=1", "b=1"], ["a=1", "b=2"], ["a=2", "b=1"]], None)
    with pytest.raises(ConfigError):
        composer._check_jobs([["a=1", "b=1"], ["a=1", "b=2"]], None)


def test_no_more_time_is_spent_on_checks_than_allowed(composer: Composer, monkeypatch: pytest.MonkeyPatch) -> None:
    checked = failing(composer, monkeypatch, {})
    clock = iter([0.0, 0.0, compose.CHECK_SECONDS, compose.CHECK_SECONDS + 0.1])
    monkeypatch.setattr(compose.time, "monotonic", lambda: next(clock))
    composer._check_jobs([["a=1"], ["a=2"], ["a=3"]], None)
    assert checked == ["a=1", "a=2"]


def test_a_checked_configuration_is_given_out_once(composer: Composer, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Any] = []
    monkeypatch.setattr(compose, "checked_config", lambda plain: made.append(plain) or len(made))
    composer._check_jobs([["method=fp16"]], None)
    assert [composer.configuration(["method=fp16"]) for _ in range(3)] == [1, 2, 3]
    assert made[1]["method"]["preset"] == "fp16" and made[1]["quantizer"]["name"] == "none"
    assert not {"hydra", "launcher", "experiment"} & set(made[1])


def test_what_the_machine_lacks_is_checked_only_if_it_runs_here(
    composer: Composer, monkeypatch: pytest.MonkeyPatch
) -> None:
    failing(composer, monkeypatch, {})
    asked: list[Any] = []
    monkeypatch.setattr(compose, "check_path", lambda path: asked.append(("path", path)))
    monkeypatch.setattr(compose, "check_here", lambda checked, launcher: asked.append((checked, launcher)))
    composer._check_jobs([["a=1"]], None)
    assert asked == []
    composer._check_jobs([["a=1"]], "joblib")
    assert asked == [("path", None), ("good", "joblib")]


def test_keys_that_only_other_keys_may_set_are_refused(composer: Composer) -> None:
    for key in compose.FIXED:
        with pytest.raises(ConfigError) as caught:
            composer.check([f"{key}=x"])
        assert (caught.value.key, caught.value.value, caught.value.hint) == (key, "x", compose.FIXED[key])
