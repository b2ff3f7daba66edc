"""tiny-reason, bundled: its digests, and answers of held-out programs that 2 bits lose and 4 bits keep."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path

import pytest
import torch
import yaml
from transformers import AutoModelForCausalLM, AutoTokenizer

import kvbench
from kvbench.decoding.autoregressive import generate
from kvbench.models.spec import local_folder
from kvbench.tasks.programs import WORDS, program_text
from kvbench.tasks.reason import Reason

FOLDER = local_folder("kvbench:tiny-reason") or Path()


@pytest.fixture(scope="module")
def model():
    return AutoModelForCausalLM.from_pretrained(FOLDER, dtype=torch.bfloat16).eval()


def right_tokens(model, setting: str, lines: int, programs: list[int], length: int) -> list[int]:
    """Return how many tokens of each program's greedy answer are right before its first wrong one."""
    task = Reason(lines=lines, limit=max(programs) + 1, lengths=(length,), seed=1)
    prompts = torch.from_numpy(task._programs.prompts())[programs]
    traces = task._programs.traces(length // 2)[programs].tolist()
    name, _, quantizer = setting.partition(":")
    method = kvbench.load_method(name, **({"quantizer": quantizer} if quantizer else {}))
    cache = method.new_cache(model, max_length=prompts.shape[1] + length)
    answers = generate(model, cache, prompts, max_new_tokens=length).tokens
    method.detach(model)
    return [
        next((i for i, token in enumerate(trace) if answer[i : i + 1] != [token]), length)
        for answer, trace in zip(answers, traces, strict=True)
    ]


def test_the_files_have_the_digests_that_the_readme_says() -> None:
    text = (FOLDER / "README.md").read_text(encoding="utf-8")
    stated = re.findall(r"SHA-256 `(\w{64})`", text)
    assert stated == [
        hashlib.sha256((FOLDER / name).read_bytes()).hexdigest() for name in ("model.safetensors", "tokenizer.json")
    ]


def test_the_recipe_has_the_shape_of_the_model(model) -> None:
    recipe = yaml.safe_load((Path(__file__).parents[2] / "experiments" / "tiny" / "reason.yaml").read_text())["model"]
    config = model.config
    assert config.vocab_size == recipe["vocabulary"] == len(WORDS)
    assert (config.hidden_size, config.num_hidden_layers) == (recipe["width"], recipe["layers"])
    assert (config.head_dim, config.max_position_embeddings) == (recipe["head_dim"], recipe["context"])
    tokenizer = AutoTokenizer.from_pretrained(FOLDER)
    task = Reason(lengths=(50,), lines=16, limit=1)
    (sample,), prompt = task.samples(), task._programs.prompts()[0]
    assert tokenizer(sample.prompt)["input_ids"] == prompt.tolist()
    assert tokenizer.decode(prompt, skip_special_tokens=True) == program_text(prompt)


@pytest.mark.parametrize("setting", ["fp16", "kivi:int4"])
def test_short_answers_of_programs_that_it_has_not_seen_are_right(model, setting: str) -> None:
    """Beyond the window of 128 exact tokens, so that the program and most of the answer are packed."""
    assert right_tokens(model, setting, 32, [0, 1, 2, 3], 200) == [200] * 4


@pytest.mark.slow
def test_two_bits_go_wrong_in_longer_answers_and_full_precision_does_not(model) -> None:
    """Programs that 2 bits lost before the 300th token on one processor; another one may round otherwise."""
    programs = [7, 14, 18, 28]
    assert right_tokens(model, "fp16", 140, programs, 400) == [400] * 4
    lost = right_tokens(model, "kivi:int2", 140, programs, 400)
    assert min(lost) >= 50 and sum(tokens < 400 for tokens in lost) >= 2
