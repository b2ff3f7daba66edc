"""Notebooks: each runs from top to bottom (`make test-slow`)."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[1] / "notebooks"
NAMES = sorted(path.name for path in FOLDER.glob("*.ipynb"))


def content(name: str) -> dict:
    return json.loads((FOLDER / name).read_text(encoding="utf-8"))


def test_there_is_one_for_each_paper_for_a_trained_model_for_long_answers_and_for_a_method():
    named = ["cocktail", "logquant", "long_answers", "quantspec", "real_model", "your_own_method"]
    assert [Path(name).stem for name in NAMES] == named


@pytest.mark.parametrize("name", NAMES)
def test_the_code_compiles(name):
    for number, cell in enumerate(content(name)["cells"]):
        if cell["cell_type"] == "code":
            compile("".join(cell["source"]), f"{name}, cell {number}", "exec")


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_every_cell_runs(name, tmp_path):
    nbclient = pytest.importorskip("nbclient", reason="needs nbclient: pip install 'kvbench[notebooks]'")
    nbformat = pytest.importorskip("nbformat")
    notebook = nbformat.read(FOLDER / name, as_version=4)
    (tmp_path / "results").symlink_to(FOLDER.parent / "results")
    (tmp_path / "kvbench").symlink_to(FOLDER.parent / "kvbench")
    nbclient.NotebookClient(notebook, timeout=900, resources={"metadata": {"path": str(tmp_path)}}).execute()
