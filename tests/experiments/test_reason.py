"""tiny-reason: training rows, a training that resumes, its tokenizer, and the table of long answers."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import numpy as np
import pytest
import torch

from experiments.measured import Stored
from experiments.place import Choice, place_result
from experiments.reason.__main__ import main, stored_programs
from experiments.reason.fold import BUNDLED_NOISE, LENGTHS, first_wrong, fold_reason
from experiments.stored import ROOT
from experiments.tiny.circuits import draw_circuits
from experiments.tiny.config import ReasonConfig, length_at, rate_at, read_train_config
from experiments.tiny.mix import ANSWER, FIRST, NONE
from experiments.tiny.model import Network
from experiments.tiny.reason import TraceRows
from experiments.tiny.train import train_model
from kvbench.errors import ConfigError
from kvbench.tasks.programs import BOS, WORDS, Streams, draw_programs, program_text
from kvbench.tasks.reason import Reason

CONFIG = Path(__file__).parents[2] / "experiments" / "tiny" / "reason.yaml"


def config(run: Path, *more: str):
    return read_train_config(
        CONFIG,
        [
            f"run.dir={run}",
            "run.seconds=null",
            "run.steps=4",
            "run.batch_tokens=512",
            "run.workers=1",
            "run.log_every=1",
            "run.device=cpu",
            "model={vocabulary: 322, width: 32, layers: 2, heads: 4, kv_heads: 2, head_dim: 8, hidden: 48}",
            "model.context=128",
            "phases=[{length: 64, share: 0.5}, {length: 128, share: 0.5}]",
            *more,
        ],
    )


@pytest.mark.parametrize("length", [64, 1024, 4352])
def test_rows_are_programs_with_as_much_of_their_trace_as_fits(length: int) -> None:
    rows = TraceRows(ReasonConfig(), seed=3)
    ids, codes = rows.batch(5, length, 16 * length)
    again = rows.batch(5, length, 16 * length)
    assert (ids == again[0]).all() and (codes == again[1]).all()
    assert (rows.batch(6, length, 16 * length)[0] != ids).any()
    assert ids.shape == codes.shape == (16, length) and ids.dtype == np.uint16 and codes.dtype == np.uint8
    sizes = set()
    for row, code in zip(ids, codes, strict=True):
        first = int((code == NONE).sum())
        assert (code[:first] == NONE).all() and (code[first + 1 :: 2] == ANSWER).all()
        assert WORDS[row[0]] == BOS and WORDS[row[first - 1]] == "trace" and WORDS[row[1]] == "program"
        lines = (first - 6) // 8
        sizes.add(lines)
        assert first <= 0.7 * length and 2 <= lines <= 160 and 64 * lines >= min(length // 2, 64 * 160)
        words = program_text(row).split()
        table = {words[i]: (words[i + 1], words[i + 4], words[i + 7]) for i in range(1, 8 * lines, 8)}
        label, register = words[first - 4 : first - 2]
        taken = set()
        for i in range(first - 1, len(words) - 1, 2):
            jump = (label, int(register) % 2)
            assert code[i + 1] == (ANSWER if jump in taken else FIRST)
            taken.add(jump)
            label = table[label][1 + int(register) % 2]
            register = str((int(register) + int(table[label][0])) % 64)
            assert words[i : i + 2] == [label, register]
    assert len(sizes) > 1


def test_the_log_of_the_bundled_model_is_of_the_recipe() -> None:
    recipe = read_train_config(CONFIG)
    assert recipe.run.noise == BUNDLED_NOISE and recipe.run.seconds is not None
    log = [json.loads(row) for row in (ROOT / "results" / "tiny-reason" / "train_log.jsonl").read_text().splitlines()]
    assert abs(log[-1]["seconds"] - recipe.run.seconds) < 0.1
    for row in log:
        progress = row["seconds"] / recipe.run.seconds
        assert row["tokens"] == row["step"] * recipe.run.batch_tokens
        # rows are made a few steps ahead
        assert row["length"] in (length_at(recipe.phases, progress), length_at(recipe.phases, progress - 0.01))
        assert row["rate"] == pytest.approx(rate_at(recipe.optimizer, row["step"] - 1, progress), rel=0.01, abs=1e-6)


def test_first_weights_look_words_up() -> None:
    """A label at the end of a program is looked up: by the words that follow it, and by those two behind it."""
    shape = read_train_config(CONFIG).model
    network, generator = Network(shape, torch.float32), torch.Generator().manual_seed(0)
    network.initialise(generator)
    draw_circuits(network, generator)
    (prompt,) = draw_programs(Streams([("circuits", 0)]), 12).prompts()
    label, register = len(prompt) - 3, len(prompt) - 2
    stream = network.embedding[prompt]
    weights = []
    for layer in network.layers[:2]:
        q, k, v = network._before(
            stream, layer.norm1, layer.qkv, network.cos[: len(prompt)], network.sin[: len(prompt)], 4, 2, shape.eps
        )
        k, v = k.repeat_interleave(2, 1), v.repeat_interleave(2, 1)
        scores = torch.einsum("qhd,khd->hqk", q, k) / shape.head_dim**0.5
        weights.append((scores + torch.full_like(scores, -torch.inf).triu(1)).softmax(-1))
        mixed = torch.einsum("hqk,khd->qhd", weights[-1], v).flatten(1)
        stream = network._after(stream, mixed, layer.out, layer.norm2, layer.gate_up, layer.down, shape.eps)
    for head, back in enumerate((1, 2, 1, 2)):
        assert weights[0][head].diagonal(-back)[4:].min() > 0.98
    places = (torch.from_numpy(prompt)[:label] == prompt[label]).nonzero().flatten()
    assert len(places) == 5, "in its line three times, and as a jump twice"
    assert weights[1][1, label, places + 1].sum() > 0.7
    assert weights[1][2, register, places + 2].sum() > 0.7


def test_first_weights_need_a_shape_that_has_room_for_them(tmp_path) -> None:
    with pytest.raises(ConfigError, match=r"reason\.circuits"):
        train_model(config(tmp_path, "model.kv_heads=4"))
    train_model(config(tmp_path, "model.kv_heads=4", "reason.circuits=false"), stop_after=1)


def test_training_and_test_have_other_programs() -> None:
    ids, _ = TraceRows(ReasonConfig(), seed=0).batch(0, 2176, 8 * 2176)
    tests = Reason(limit=8)._programs.prompts()
    assert not {program_text(row[:40]) for row in ids} & {program_text(row[:40]) for row in tests}


def test_a_resumed_training_equals_one_in_one_go_and_saves_a_model_that_reads_the_data_set(tmp_path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    whole = train_model(config(tmp_path / "whole"))
    train_model(config(tmp_path / "parts"), stop_after=2)
    parts = train_model(config(tmp_path / "parts", "run.workers=2"))
    for a, b in zip(whole.network.parameters(), parts.network.parameters(), strict=True):
        assert torch.equal(a, b)
    log = [json.loads(line) for line in (tmp_path / "parts" / "log.jsonl").read_text().splitlines()]
    assert [row["length"] for row in log] == [64, 64, 128, 128]
    assert all(row["answers"] > 5 and row["unsure"] == row["first_unsure"] == 1.0 and row["text"] == 0 for row in log)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "parts" / "model")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "parts" / "model")
    task = Reason(lengths=(50,), lines=16, limit=1)
    (sample,) = task.samples()
    assert tokenizer(sample.prompt)["input_ids"] == task._programs.prompts()[0].tolist()
    answer = tokenizer(sample.continuation, add_special_tokens=False)["input_ids"]
    assert tokenizer.decode(answer) == sample.answers[0] and len(answer) == 50
    assert model.config.vocab_size == len(WORDS) == len(tokenizer)


def test_noise_changes_the_training_alone(tmp_path) -> None:
    plain = train_model(config(tmp_path / "plain", "run.noise=0"), stop_after=2)
    noisy = train_model(config(tmp_path / "noisy", "run.noise=0.5", "run.quiet=0"), stop_after=2)
    assert any(
        not torch.equal(a, b) for a, b in zip(plain.network.parameters(), noisy.network.parameters(), strict=True)
    )
    # the first half has none
    quiet = train_model(config(tmp_path / "quiet", "run.noise=0.5", "run.quiet=0.5"), stop_after=2)
    for a, b in zip(plain.network.parameters(), quiet.network.parameters(), strict=True):
        assert torch.equal(a, b)
    ids = torch.arange(40)[None]
    with torch.no_grad():
        assert torch.equal(noisy.network.logits(ids), noisy.network.logits(ids))


def test_rows_of_two_kinds_or_of_none_are_refused(tmp_path) -> None:
    with pytest.raises(ConfigError, match="either reason, or both corpus and mix"):
        config(tmp_path, "reason=null")
    with pytest.raises(ConfigError, match="either reason, or both corpus and mix"):
        config(tmp_path, "corpus={path: x}")


def stored(wrong_at: dict[int, int], limit: int) -> Stored:
    """Answers of which some are wrong from a token on."""
    rows = {}
    for number, sample in enumerate(Reason(lengths=(max(LENGTHS),), lines=128, limit=limit).samples()):
        words = sample.answers[0].split()
        if number in wrong_at:
            words[wrong_at[number] :] = ["x"] * (len(words) - wrong_at[number])
        rows[sample.id] = {"prediction": " ".join(words)}
    return Stored({"reason": rows})


def test_the_table_reads_each_answer_at_each_length(tmp_path) -> None:
    runs = {"fp16": stored({}, 4), "kivi 2": stored({0: 1000, 1: 1001, 3: 7999}, 4), "short": stored({}, 3)}
    folded = fold_reason(runs, 128, 4)
    folded.write(tmp_path)
    with (tmp_path / "lengths.csv").open() as handle:
        cells = {(line["setting"], int(line["tokens"])): line for line in csv.DictReader(handle)}
    assert [int(cells["fp16", length]["right"]) for length in LENGTHS] == [4, 4, 4, 4]
    assert [int(cells["kivi 2", length]["right"]) for length in LENGTHS] == [4, 2, 2, 1]
    assert float(cells["kivi 2", 8000]["to_fp16"]) == -0.75 and float(cells["kivi 2", 8000]["to_fp16_high"]) < 0.01
    with (tmp_path / "steps.csv").open() as handle:
        assert [line["kivi 2"] for line in csv.DictReader(handle)] == ["501", "501", "", "4000"]
    assert "Left out, with fewer samples: short" in folded.text
    assert stored_programs(tmp_path) == folded.counts == {"programs of 128 lines, seed 0": 4, "settings": 2}
    other = place_result(tmp_path, Choice(), {"programs of 128 lines, seed 1": 4, "settings": 2}, folded.counts)
    assert other.refused and "programs of 128 lines, seed 0: 0 in place of 4" in other.said
    assert fold_reason({"fp16": stored({}, 3)}, 128, 4).text == "fp16 has 3 of 4 samples"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--lines", "1"], "dataset.lines=1"),
        (["--lines", "-5"], "dataset.lines=-5"),
        (["--lines", "64"], "dataset.lines=125"),
        (["--seed", "-1"], "dataset.seed=-1"),
        (["--limit", "20000"], "dataset.limit=20000"),
    ],
)
def test_programs_that_cannot_be_are_one_error(options: list[str], message: str, capsys) -> None:
    assert main([*options, "--fold-only"]) == 2
    said = capsys.readouterr()
    assert message in said.err and said.err.count("error:") == 1 and "skipped" not in said.err and not said.out


def test_a_missing_step_is_wrong() -> None:
    assert first_wrong("a 1 b 2", "a 1 b 2") is None
    assert first_wrong("a 1", "a 1 b 2") == 2
    assert first_wrong("a 2 b 2", "a 1 b 2") == 1
