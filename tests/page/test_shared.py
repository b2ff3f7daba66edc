"""Data of the page beside runs: the leaderboard's rows, recipes and answers of kvbench.fit."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from kvbench.cli import report
from kvbench.errors import ConfigError, KvbenchError
from kvbench.fit.command import main as fit
from kvbench.page import shared
from kvbench.page.numbers import encoded
from kvbench.results.board_file import row_text
from tests.page.report_support import data_of

LEADERBOARD = Path(__file__).resolve().parents[2] / "leaderboard"
RECIPE: dict[str, Any] = {
    "kvbench": 1,
    "kind": "recipe",
    "model": "tiny <b>",
    "budget_bits": 5.4,
    "bits": 5.25,
    "kl": {"mean": 0.003, "se": 0.0002, "p99": 0.04},
    "evaluations": 12,
    "search": "greedy-kl",
    "layers": [{"keys": "fp16", "values": "int8"}, {"keys": "q5_1", "values": "nvfp4"}],
}


def write(path: Path, content: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(content if isinstance(content, str) else json.dumps(content), encoding="utf-8")
    return path


def test_a_recipe_has_its_figures_and_the_bits_of_each_layer(tmp_path: Path) -> None:
    named = write(tmp_path / "one.json", RECIPE)
    write(tmp_path / "tune" / "tiny" / "recipe.json", {**RECIPE, "model": "kept", "kl": None})
    write(tmp_path / "tune" / "other" / "5.4" / "recipe.json", {"kind": "row"})
    added, notes = shared.added_files(tmp_path, [named])
    first, second = added["recipe"]
    assert first["layers"] == [["fp16", "int8", 16, 8], ["q5_1", "nvfp4", 5, 4]]
    assert first["kl"] == [0.003, 0.0002, 0.04] and first["bits"] == 5.25 and first["search"] == "greedy-kl"
    assert second["model"] == "kept" and second["kl"] == [None, None, None]
    assert len(notes) == 1 and "other/5.4/recipe.json: is neither a recipe" in notes[0]


@pytest.mark.parametrize(
    "content", ["[" * 10_000, "{}", '{"kind": "recipe"}', {**RECIPE, "layers": []}, {**RECIPE, "layers": [3]}, [1]]
)
def test_a_named_file_that_cannot_be_shown_is_an_error(tmp_path: Path, content: Any) -> None:
    with pytest.raises(KvbenchError, match=r"one.json: is neither .*\n  hint: name another file after --add"):
        shared.added_files(tmp_path, [write(tmp_path / "one.json", content)])


def test_large_recipes_are_cut_and_odd_values_become_text_or_nothing() -> None:
    layers = [{"keys": "x" * 500, "values": 8}] * 1000
    shown = shared.recipe_data({**RECIPE, "bits": float("nan"), "model": "\ud800", "layers": layers})
    assert shown["bits"] is None and len(shown["layers"]) == shared.MOST_LAYERS and len(encoded(shown)) < 60_000
    assert shown["layers"][0][2:] == [None, 8]


def test_an_answer_of_fit_has_its_table_and_the_commands_of_the_recommended_format(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert fit(["tiny", "--gpu", "l4", "--json", "--formats", "fp16", "fp8"]) == 0
    content = json.loads(capsys.readouterr().out)
    shown = shared.fit_data(content)
    assert shown["best"] == content["best"] == "fp16" and shown["title"] == "tiny on l4, 4096 tokens"
    assert [row[0] for row in shown["rows"]] == ["fp16", "fp8"] and shown["rows"][0][1] is True
    assert dict(shown["commands"]).keys() == {"vllm", "sglang", "llama.cpp"}
    assert shared.fit_data({**content, "best": None})["commands"] == []


def test_rows_stand_with_their_pairs_and_who_reproduced_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for path in LEADERBOARD.glob("5fb9bcc888-*.json"):
        shutil.copy(path, tmp_path)
    rows, notes = shared.shared_rows(tmp_path)
    assert not notes and len(rows) == 4
    kivi = next(row for row in rows if row[0] == "kivi int2")
    assert kivi[1:3] == ["tiny", "mini"] and kivi[4] == "score" and kivi[8] == pytest.approx(kivi[5] - 1, abs=1e-3)
    assert kivi[14] is None and kivi[15] == "self-reported"
    source = json.loads((tmp_path / kivi[16]).read_text(encoding="utf-8"))
    text = row_text({**source, "who": "B", "again": source["digest"]})
    write(tmp_path / f"{source['run']}-{json.loads(text)['digest'][:8]}.json", text)
    write(tmp_path / "bad.json", "{}")
    rows, notes = shared.shared_rows(tmp_path)
    assert len(rows) == 4 and next(row for row in rows if row[0] == "kivi int2")[15] == "reproduced by B"
    assert len(notes) == 1 and notes[0].startswith("not a row of the leaderboard: bad.json: ")
    monkeypatch.setattr(shared, "MOST_ROWS", 1)
    assert shared.shared_rows(tmp_path)[1][0] == "the leaderboard has 6 rows, of which 1 are shown"
    assert shared.shared_rows(tmp_path / "none") == ([], [])


def test_the_page_takes_added_files_and_the_leaderboard_beside_results(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(LEADERBOARD, tmp_path / "leaderboard")
    recipe, page = write(tmp_path / "recipe.json", RECIPE), tmp_path / "page.html"
    runs = tmp_path / "results" / "runs"
    runs.mkdir(parents=True)
    assert report.main(["--results", str(runs), "--html", str(page), "--add", str(recipe)]) == 0
    text = page.read_text(encoding="utf-8")
    data = data_of(text)
    assert len(data["rows"]) == 14 and len(data["recipes"]) == 1 and data["fits"] == [] and "tiny <b>" not in text
    capsys.readouterr()
    assert report.main(["--results", str(runs), "--add", str(recipe)]) == ConfigError.exit_code
    assert "--add" in capsys.readouterr().err
