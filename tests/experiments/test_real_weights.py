"""The stage ``weights``: two checkpoints compared over the same windows, and its row where weights are missing."""

from __future__ import annotations

import argparse

import pytest
import torch

from experiments.real import __main__ as real
from experiments.real import weights
from experiments.real.fold import stage_content
from kvbench.errors import ConfigError, DataError
from kvbench.models.load import byte_tokenizer, random_model

OPTIONS = [
    "dataset=fidelity", "dataset.window=64", "dataset.prefill=48", "dataset.limit=2", "dataset.per_document=null",
    "model.dtype=float32",
]  # fmt: skip
TEXT = "The base are the weights that the other model's were rounded from, 16 bits of 32. "


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    """A checkpoint with random weights in float32, the same rounded to bfloat16, and one of another tokenizer."""
    from transformers import LlamaConfig

    config = LlamaConfig(hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2,
                         num_key_value_heads=1, vocab_size=320, max_position_embeddings=128, initializer_range=0.4,
                         tie_word_embeddings=True)  # fmt: skip
    folder, model = tmp_path_factory.mktemp("weights"), random_model(config, torch.float32, "cpu", 1)
    (folder / "text.txt").write_text(4 * TEXT)
    for name in ("whole", "rounded", "other"):
        if name == "rounded":
            model = model.bfloat16().float()
        tokenizer = byte_tokenizer()
        if name == "other":
            tokenizer.backend_tokenizer.pre_tokenizer = None
        model.save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)
    return folder


def options(folder):
    return [*OPTIONS, f"dataset.text={folder / 'text.txt'}"]


def config_of(folder):
    return weights.pass_config(f"model={folder}", options(folder.parent), "cpu")


def logits(folder, ids):
    from transformers import AutoModelForCausalLM

    with torch.no_grad():
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        return model(torch.tensor([ids])).logits[0].double().log_softmax(-1)


def test_rows_are_the_divergence_of_the_two_models_own_predictions(checkpoints):
    base, other = config_of(checkpoints / "whole"), config_of(checkpoints / "rounded")
    rows, env = weights.weight_rows(base, other)
    assert [row["id"] for row in rows] == [sample.id for sample in base.task.samples()] and env["device"] == "cpu"
    for row, sample in zip(rows, base.task.samples(), strict=True):
        ids = sample.work.ids
        p, q = (logits(checkpoints / name, ids)[48:-1] for name in ("whole", "rounded"))
        wanted = (p.exp() * (p - q)).sum(-1)
        assert len(row["fidelity"]["kld"]) == 15 and float(wanted.mean()) > 1e-5
        assert row["fidelity"]["kld"] == pytest.approx(wanted.tolist(), rel=1e-3)
        target = torch.tensor(ids[49:])[:, None]
        assert row["fidelity"]["nll_base"] == pytest.approx((-p.gather(-1, target)[:, 0]).tolist(), rel=1e-4)
        assert row["fidelity"]["nll"] == pytest.approx((-q.gather(-1, target)[:, 0]).tolist(), rel=1e-4)


def test_other_tokens_are_refused(checkpoints):
    with pytest.raises(DataError, match="cut the text into other tokens"):
        weights.weight_rows(config_of(checkpoints / "whole"), config_of(checkpoints / "other"))


def test_the_command_writes_one_row_and_says_why_there_is_none(checkpoints, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(
        weights, "STAGES", {"kl": argparse.Namespace(data=lambda texts, number: {"short": options(checkpoints)})}
    )
    monkeypatch.setattr(real, "texts_of", lambda arguments: [real.PYTHON])
    words = ["weights", "--model", str(checkpoints / "rounded"), "--device", "cpu", "--out", str(tmp_path)]
    assert real.main([*words, "--against", str(checkpoints / "whole")]) == 0
    (row,) = stage_content(tmp_path / "weights" / "figures.json")["lines"]
    assert row["name"].endswith("rounded against " + str(checkpoints / "whole")) and row["runs"]["short"]["n"] == 2
    assert real.main([*words, "--against", str(checkpoints / "none")]) != 0
    assert "none" in capsys.readouterr().err
    with pytest.raises(ConfigError, match="must name the model that tiny is compared with"):
        weights.weights_stage("tiny", None)
    assert weights.weights_stage("smollm2-135m-q4_1", None).settings[0].setting == "model=smollm2-135m"
