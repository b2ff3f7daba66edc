"""A hybrid checkpoint in a folder, from the command line to the row."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from transformers import AutoTokenizer

import kvbench.models
from kvbench.cli.main import main
from tests import architectures

TINY = Path(kvbench.models.__file__).parent / "tiny"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> str:
    """A folder with a random LFM2 (a convolution, then attention) and the tokenizer of the bundled model."""
    folder, tokenizer = tmp_path_factory.mktemp("hybrid"), AutoTokenizer.from_pretrained(TINY)
    stem, options = architectures.HYBRID["lfm2"]
    special = {f"{name}_token_id": getattr(tokenizer, f"{name}_token_id") for name in ("pad", "bos", "eos")}
    sizes = {"vocab_size": len(tokenizer), "max_position_embeddings": 2048, **special}
    architectures.built(stem, {**options, **sizes}).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


def metrics(results: Path) -> dict:
    (path,) = results.glob("*/metrics.json")
    return json.loads(path.read_text())


MINI = "dataset=mini dataset.tasks=[passkey] dataset.lengths=[512] dataset.limit=1 decoding.max_new_tokens=3"
POINT = "dataset=efficiency dataset.prompts=[150] dataset.batches=[2] dataset.new_tokens=3 dataset.warm_up=2"


@pytest.mark.parametrize("words", [MINI, POINT])
def test_a_hybrid_in_a_folder_runs_to_a_row(words, checkpoint, tmp_path):
    given = [f"model={checkpoint}", "method=kivi", "quantizer=int4", f"runtime.results_dir={tmp_path}", *words.split()]
    assert main(given) == 0
    content = metrics(tmp_path)
    used = content["kv_bytes"]["used"]
    assert content["status"] == "ok" and used["codes"] > 0 and used["state"] == 64 * 3 * 2
    assert used["total"] == sum(count for part, count in used.items() if part != "total")
