"""The trainer on a toy configuration: rows, a few steps on the CPU, resuming, and the saved model in transformers."""

from __future__ import annotations

import dataclasses
import json
import lzma
from pathlib import Path

import numpy as np
import pytest
import torch

from experiments.tiny import corpus
from experiments.tiny.config import MixConfig, OptimizerConfig, Phase, length_at, rate_at, read_train_config
from experiments.tiny.export import export
from experiments.tiny.feed import Feed
from experiments.tiny.fillers import Library
from experiments.tiny.mix import ANSWER, BOS, EOS, NONE, Mix
from experiments.tiny.model import Network
from experiments.tiny.train import train_model
from kvbench.errors import ConfigError, DataError
from kvbench.tasks.mini.code import function
from kvbench.tasks.mini.prose import Prose
from kvbench.tasks.mini.rng import Rng
from kvbench.tasks.mini.task import TASKS
from kvbench.tasks.mini.text import EXCLUDED
from kvbench.tasks.mini.tokens import TOKENIZER, encoder

CONFIG = Path(__file__).parents[2] / "experiments" / "tiny" / "tiny.yaml"


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A corpus of our own: two documents of prose, two source files of which one is held out."""
    path = tmp_path_factory.mktemp("corpus")
    prose = Prose(Rng("test corpus"))
    documents = ["\n\n".join(prose.passage(60) for _ in range(60)) for _ in range(2)]
    with lzma.open(path / "novels.txt.xz", "wt", encoding="utf-8") as stream:
        stream.write("\n\f\n".join(documents))
    code = "\n\n\n".join(function(Rng("test code", i)) for i in range(60))
    (path / "python.txt").write_text(f"# file: argparse.py\nSECRET = 1\n\f\n# file: mine.py\n{code}\n")
    return path


@pytest.fixture(scope="module")
def library(folder) -> Library:
    return Library(corpus.tokenize(folder, ["python*"], TOKENIZER, EOS, 1), TOKENIZER)


def config(folder: Path, run: Path, *more: str):
    return read_train_config(
        CONFIG,
        [
            f"corpus.path={folder}",
            f"run.dir={run}",
            "run.seconds=null",
            "run.steps=4",
            "run.batch_tokens=512",
            "run.workers=1",
            "run.log_every=1",
            "run.device=cpu",
            "optimizer.warmup=2",
            "model={vocabulary: 4096, width: 32, layers: 2, heads: 4, kv_heads: 2, head_dim: 8, hidden: 48}",
            "model.context=256",
            "phases=[{length: 128, share: 0.5}, {length: 256, share: 0.5}]",
            *more,
        ],
    )


def test_held_out_modules_are_left_out(folder, library):
    documents = [text for path in corpus.text_files(folder) for text in corpus.training_documents(path)]
    assert len(documents) == 3
    assert not any("SECRET" in text for text in documents)
    assert {"argparse.py", "pydoc_data/topics.py"} <= EXCLUDED


def test_corpus_tokens_are_those_of_the_whole_documents(folder, library):
    encode = encoder(TOKENIZER)
    for path, tokens in (("novels.txt.xz", library.tokens.prose), ("python.txt", library.tokens.code)):
        whole = [i for text in corpus.training_documents(folder / path) for i in [*encode([text])[0], EOS]]
        if path.startswith("python"):
            assert tokens.tolist() == whole
        else:  # documents are dealt to the jobs, so their order is by turns
            assert sorted(tokens.tolist()) == sorted(whole)


def test_an_empty_folder_is_an_error(tmp_path):
    with pytest.raises(DataError, match=r"set corpus\.path"):
        corpus.text_files(tmp_path)


@pytest.mark.parametrize("length", [256, 1024])
def test_rows(library, length):
    mix = Mix(MixConfig(tasks=dict.fromkeys(TASKS, 1.0), text=0.1), library, seed=3)
    ids, codes = mix.batch(5, length, 16 * length)
    again = mix.batch(5, length, 16 * length)
    assert (ids == again[0]).all()
    assert (codes == again[1]).all()
    assert ids.shape == codes.shape == (16, length)
    assert ids.dtype == np.uint16
    assert (ids[:, 0] == BOS).all()
    assert (codes[:, 0] == NONE).all()
    assert (codes[ids == BOS] == NONE).all()
    parts = [
        (row, np.ma.clump_masked(np.ma.array(row, mask=code == ANSWER))) for row, code in zip(ids, codes, strict=True)
    ]
    answers = [library.text(row[part]) for row, own in parts for part in own]
    assert len(answers) >= 16
    assert all(text.endswith("\n") and text[0] == " " and text.strip() for text in answers)


@pytest.mark.parametrize("name", sorted(TASKS))
def test_every_task_makes_rows_whose_tokens_are_those_of_their_text(library, name):
    mix = Mix(MixConfig(tasks={name: 1.0}, text=0.0, grammar=1.0, own_wording=0.5), library, seed=1)
    ids, codes = mix.sample(Rng("row", name), 1024, 1024)
    assert ids[0] == BOS
    assert ids[-1] == EOS
    assert 512 < len(ids) <= 1024
    text = library.text(np.array(ids[1:-1]))
    assert encoder(TOKENIZER)([text])[0] == ids[1:-1]
    assert codes.count(ANSWER) >= 4


def test_schedule():
    phases = (Phase(256, 1.0), Phase(512, 3.0))
    assert [length_at(phases, p) for p in (0.0, 0.24, 0.26, 1.0)] == [256, 256, 512, 512]
    optimizer = OptimizerConfig(rate=1.0, warmup=10, hold=0.5, final=0.1)
    assert rate_at(optimizer, 0, 0.0) == pytest.approx(0.1)
    assert rate_at(optimizer, 99, 0.5) == 1.0
    assert rate_at(optimizer, 99, 0.75) == pytest.approx(0.55)
    assert rate_at(optimizer, 99, 1.0) == pytest.approx(0.1)


def _make(index: int, progress: float):
    return np.full(3, index), np.full(1, progress)


def test_feed_keeps_the_order_whatever_the_number_of_workers():
    for workers, start in ((1, 0), (3, 0), (3, 4)):
        with Feed(_make, workers, start, steps=100) as feed:
            assert [int(feed.next()[0][0]) for _ in range(7)] == list(range(start, start + 7))


@pytest.mark.slow  # 5 s
def test_a_resumed_training_equals_one_in_one_go(folder, tmp_path):
    whole = train_model(config(folder, tmp_path / "whole"))
    train_model(config(folder, tmp_path / "parts"), stop_after=2)
    parts = train_model(config(folder, tmp_path / "parts", "run.workers=2"))
    assert whole.step == parts.step == 4
    assert whole.tokens == parts.tokens == 4 * 512
    for a, b in zip(whole.network.parameters(), parts.network.parameters(), strict=True):
        assert torch.equal(a, b)
    rows = [
        [json.loads(line) for line in (tmp_path / run / "log.jsonl").read_text().splitlines()]
        for run in ("whole", "parts")
    ]
    assert [row["loss"] for row in rows[0]] == [row["loss"] for row in rows[1]]
    assert [row["length"] for row in rows[0]] == [128, 128, 256, 256]
    assert all(row["loss"] > 0 for row in rows[0])
    with pytest.raises(ValueError, match="another shape"):
        train_model(config(folder, tmp_path / "parts", "model.layers=1", "run.steps=9"))


def test_saved_model_gives_the_trainers_logits(tmp_path):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    shape = dataclasses.replace(read_train_config(CONFIG, ["run.dir=x"]).model, width=64, layers=2, heads=4, hidden=96)
    network = Network(shape, torch.float32)
    network.initialise(torch.Generator().manual_seed(0))
    with torch.no_grad():
        for parameter in network.parameters():  # norms other than one, attention that is not flat
            parameter.mul_(3.0 if parameter.dim() > 1 else 1.0).add_(0.01)
    export(shape, network.state_dict(), TOKENIZER, tmp_path, torch.float32)
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    assert tokenizer("a 12")["input_ids"][0] == tokenizer.bos_token_id == BOS
    ids = torch.randint(3, 4096, (2, 70), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        assert (model(ids).logits - network.logits(ids)).abs().max() < 1e-4


def test_wrong_configurations_are_refused(tmp_path):
    with pytest.raises(ConfigError, match="exactly one"):
        read_train_config(CONFIG, ["run.steps=3"])
    with pytest.raises(ConfigError, match="must divide"):
        read_train_config(CONFIG, ["phases=[{length: 300, share: 1}]"])
    with pytest.raises(ConfigError, match="did you mean 'rate'"):
        read_train_config(CONFIG, ["optimizer.rat=1"])
