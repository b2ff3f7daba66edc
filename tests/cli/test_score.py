"""Scoring files from elsewhere: the forms, a folder, what is refused."""

from __future__ import annotations

import gzip
import json
import subprocess
import sys
from pathlib import Path

import pytest

from kvbench.cli import score
from kvbench.errors import DataError
from tests.data_support import data_dir

ROWS = [
    {"pred": "the answer is 42", "answers": ["42"], "all_classes": None, "length": 100},
    {"pred": "no", "answers": ["yes"], "all_classes": None, "length": 5000},
]


def write(path: Path, rows: list) -> Path:
    path.write_text("\n".join(json.dumps(row) for row in rows), encoding="utf-8")
    return path


def test_a_file_by_task_or_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = write(tmp_path / "outputs.jsonl", ROWS)
    assert score.main([str(file), "--task", "qasper"]) == 0
    assert "25.00" in capsys.readouterr().out
    assert score.main([str(file)]) == 1
    assert "'outputs' is not a task" in capsys.readouterr().err
    assert score.main([str(file), "--task", "qaspr"]) == 1
    assert "--task qasper" in capsys.readouterr().err


def test_a_folder_at_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path / "qasper_e.jsonl", ROWS)
    write(tmp_path / "notes.jsonl", ROWS)
    write(tmp_path / "gsm8k.jsonl", [{"response": "so 7", "answer": "x #### 7"}])
    (tmp_path / "musique.jsonl.gz").write_bytes(gzip.compress(json.dumps(ROWS[0]).encode()))
    output = tmp_path / "scores.json"
    assert score.main([str(tmp_path), "--format", "json", "-o", str(output)]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report == json.loads(output.read_text())
    assert report["scores"]["qasper_e"]["buckets"] == {"0-4k": 50.0, "4-8k": 0.0, "8k+": None}
    assert report["scores"]["gsm8k"]["variants"] == {"strict": 0.0, "flexible": 100.0}
    assert (report["tasks"], report["skipped"]) == (3, ["notes.jsonl"])


def test_the_tables_say_scores_errors_numbers_and_the_mean(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path / "qasper.jsonl", [ROWS[0], ROWS[1], ROWS[0]])  # .5, 0, .5: 33.33 with an error of 16.67
    write(tmp_path / "trec_e.jsonl", [{"pred": "b", "answers": ["b"], "all_classes": ["b"], "length": 7999}])
    write(tmp_path / "gsm8k.jsonl", [{"response": "so 7", "answer": "#### 7"}])
    assert score.main([str(tmp_path), "--format", "markdown"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "| task | score | stderr | n |",
        "|:--|--:|--:|:--|",
        "| gsm8k | 0.00 | - | 1  strict 0.00, flexible 100.00 |",
        "| qasper | 33.33 | ±16.67 | 3 |",
        "| trec_e | 100.00 | - | 1  0-4k -, 8k+ - |",
        "| mean of 3 tasks | 44.44 |  |  |",
    ]
    assert score.main([str(tmp_path)]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert lines[:1] == [["task", "score", "stderr", "n"]]
    assert ["qasper", "33.33", "±16.67", "3"] in lines and ["mean", "of", "3", "tasks", "44.44"] in lines


def test_the_harness_own_logs(tmp_path: Path) -> None:
    row = {"doc": {"question": "?", "answer": "x #### 7"}, "resps": [["It is 7.\n#### 7"]], "target": "x #### 7"}
    scores, _ = score.score_path(write(tmp_path / "gsm8k.jsonl", [row]))
    assert scores["gsm8k"]["score"] == 100.0


def test_missing_fields_and_damage_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = write(tmp_path / "qasper.jsonl", [{"answers": ["x"]}])
    assert score.main([str(file)]) == 1
    assert "qasper.jsonl line 1: the record needs one of the fields pred" in capsys.readouterr().err
    file.write_text('{"pred": "x", "answers"')
    assert score.main([str(file)]) == 1
    assert "line 1: is not valid JSON" in capsys.readouterr().err
    assert score.main([str(tmp_path / "none.jsonl")]) == 1


@pytest.mark.parametrize("answers", [None, [5], 5])
def test_answers_that_are_no_texts_are_named(tmp_path: Path, answers: object) -> None:
    with pytest.raises(DataError, match=r"line 1: field '.*answers.*' is .*; expected a list of at least one string"):
        score.score_path(write(tmp_path / "qasper.jsonl", [{"pred": "x", "answers": answers}]))


def test_tasks_that_longbench_e_lacks_and_missing_classes_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert score.main([str(write(tmp_path / "narrativeqa_e.jsonl", ROWS))]) == 1
    assert "'narrativeqa_e' is not a task" in capsys.readouterr().err
    for classes in (None, []):
        file = write(tmp_path / "trec.jsonl", [{**ROWS[0], "all_classes": classes}])
        assert score.main([str(file)]) == 1
        assert "trec.jsonl line 1: trec is scored by class" in capsys.readouterr().err


@pytest.mark.slow  # 6 s
def test_published_outputs_as_a_folder() -> None:
    pytest.importorskip("jieba")
    folder = data_dir("longbench_preds", "llama2-7b-chat")
    published = json.loads(gzip.decompress((folder / "result.json.gz").read_bytes()))
    scores, skipped = score.score_path(folder)
    assert skipped == ["result.json.gz"]
    assert {task: entry["score"] for task, entry in scores.items()} == {task: published[task] for task in scores}
    assert len(scores) == 17


def test_it_starts_without_torch(tmp_path: Path) -> None:
    file = write(tmp_path / "qasper.jsonl", ROWS)
    code = (
        "import sys; sys.modules['torch'] = None; from kvbench import score; raise SystemExit(score.main(sys.argv[1:]))"
    )
    done = subprocess.run([sys.executable, "-c", code, str(file)], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


def test_two_files_of_a_task_records_that_are_no_objects_and_references_without_a_number(tmp_path):
    import pytest

    from kvbench.cli.score import score_path, score_records
    from kvbench.errors import DataError, KvbenchError

    line = '{"pred": "a", "answers": ["a"], "all_classes": null}\n'
    for name in ("qasper.jsonl", "qasper.json"):
        (tmp_path / name).write_text(line)
    with pytest.raises(KvbenchError, match="two files of outputs for the task qasper"):
        score_path(tmp_path)
    with pytest.raises(KvbenchError, match="2 files of outputs for --task qasper"):
        score_path(tmp_path, "qasper")
    with pytest.raises(DataError, match="record 0: the record is not a JSON object"):
        score_records("qasper", [5])
    with pytest.raises(DataError, match="does not name a paragraph"):
        score_records("passage_retrieval_en", [{"pred": "1", "answers": ["para 1"], "all_classes": None}])


@pytest.mark.parametrize(
    ("task", "row", "said"),
    [
        ("qasper", {"pred": "x", "answers": []}, "field 'answers.*' is a list"),
        ("qasper", {"pred": 5, "answers": ["x"]}, "field 'pred.*' is a number"),
        ("qasper", {"pred": [], "answers": ["x"]}, "field 'pred.*' is a list"),
        ("trec", {"pred": "x", "answers": ["x"], "all_classes": "xyz"}, "field 'all_classes' is a string"),
        ("trec", {"pred": "x", "answers": ["x"], "all_classes": ["y"]}, "scored by class, but none of the answers"),
        ("qasper_e", {"pred": "x", "answers": ["x"], "length": None}, "field 'length' is null"),
        ("qasper_e", {"pred": "x", "answers": ["x"], "length": "5"}, "field 'length' is a string"),
        ("qasper_e", {"pred": "x", "answers": ["x"]}, "needs the field length"),
        ("gsm8k", {"doc": {"answer": None}, "resps": "x", "target": 7}, "is a number"),
        ("gsm8k", {"doc": {"answer": 7}, "resps": "x"}, "is a number"),
        ("gsm8k", {"response": {"a": 1}, "answer": "#### 7"}, "field 'pred.*' is an object"),
        ("gsm8k", {"response": "7", "answer": ""}, "is an empty string"),
    ],
)
def test_fields_of_another_kind_are_refused(tmp_path: Path, task: str, row: dict, said: str) -> None:
    good = {"pred": "7", "answers": ["7"], "answer": "#### 7", "length": 1, "all_classes": ["7"]}
    if task == "gsm8k":
        good.pop("answers")
    write(tmp_path / f"{task}.jsonl", [good, row])
    with pytest.raises(DataError, match=f"{task}.jsonl line 2: .*{said}"):
        score.score_path(tmp_path / f"{task}.jsonl")


def test_files_that_cannot_be_read_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "qasper.jsonl").write_text("[" * 100_000)
    assert score.main([str(tmp_path)]) == 1
    assert "qasper.jsonl line 1: the JSON is nested too deeply" in capsys.readouterr().err
    (tmp_path / "qasper.jsonl").write_text("\n")
    assert score.main([str(tmp_path)]) == 1
    assert "qasper.jsonl contains no records" in capsys.readouterr().err
    assert score.main(["/dev/zero", "--task", "qasper"]) == 1
    assert "/dev/zero is a device, not a regular file" in capsys.readouterr().err
    with pytest.raises(DataError, match="here: there are no records"):
        score.score_records("qasper", [], "here")
