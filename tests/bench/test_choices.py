"""Words of the bench's command line: what each type takes, at its bounds, and what it refuses."""

from __future__ import annotations

from argparse import ArgumentTypeError
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvbench.bench import __main__ as command
from kvbench.bench import choices
from kvbench.bench.predict import mlp_chunk
from kvbench.errors import ConfigError
from kvbench.util.schema import MOST, MOST_TOKENS


@pytest.mark.parametrize(
    ("kind", "texts", "refused", "said"),
    [
        (choices.tokens, {"1": 1, "4k": 4096, " 2K ": 2048, str(MOST_TOKENS): MOST_TOKENS}, ["0", "k", "-1", "1.5k"],
         "is not a number of tokens such as 4k, 32k or 131072"),
        (choices.tokens, {}, [str(MOST_TOKENS + 1), "16385k"], f"exceeds the limit of {MOST_TOKENS} tokens"),
        (choices.positive_number, {"1": 1, str(MOST): MOST}, ["0", "-1", "1.0", "²", ""],
         "is not a whole number, 1 or greater"),
        (choices.positive_number, {}, [str(MOST + 1), "1" * 13], "is too large"),
        (choices.several, {"2": 2}, ["1", "0"], "is not a whole number, 2 or greater"),
        (choices.nonnegative_number, {"0": 0, "7": 7}, ["-1", "x"], "is not a whole number, 0 or greater"),
        (choices.valid_device, {"cpu": "cpu", "cuda": "cuda", "cuda:3": "cuda:3"}, ["gpu", "cuda:", "cpu:0", "xcpu"],
         "is not a device: cuda, cuda:N or cpu"),
        (choices.prefill_rows, {"auto": "auto", "all": None, "3": 3}, ["0", "none"], "is not a whole number"),
        (choices.duration, {"0": 0.0, "1.5": 1.5}, ["-1", "inf", "nan", "x"], "is not a number, 0 or greater"),
        (choices.positive, {"0.5": 0.5}, ["0", "-1", "inf", "nan", "x"], "is not a number above 0"),
        (choices.share, {"0": 0.0, "1": 1.0, "0.25": 0.25}, ["-0.1", "1.1", "nan", "x"], "is not a number from 0 to 1"),
        (mlp_chunk, {"auto": "auto", "none": None, "null": None, "2k": 2048}, ["some"], "is not a number of tokens"),
    ],
)  # fmt: skip
def test_words(kind: Callable[[str], Any], texts: dict[str, Any], refused: list[str], said: str) -> None:
    assert {text: kind(text) for text in texts} == texts
    for text in refused:
        with pytest.raises(ArgumentTypeError, match=said):
            kind(text)


def test_a_model_without_dimensions_is_refused(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text("name: mine\n")
    with pytest.raises(ConfigError, match=r"model\.architecture: is missing in .*mine\.yaml"):
        choices.shape_of(str(tmp_path / "mine.yaml"))
    (tmp_path / "list.yaml").write_text("- a\n")
    with pytest.raises(ConfigError, match="does not contain the keys of a model"):
        choices.shape_of(str(tmp_path / "list.yaml"))
    with pytest.raises(ConfigError, match="cannot be read"):
        choices.read_model_file(tmp_path / "absent.yaml")


def test_defaults_of_the_commands() -> None:
    parser = command.bench_parser()
    kernel, quantize, products, predict = (
        vars(parser.parse_args([name])) for name in ("kernel", "quantize", "products", "predict")
    )
    shared = {"quick": False, "out": None, "name": None, "skip": 0, "seconds": 0.25}
    contexts = [4096, 32768, 131072]
    assert kernel == shared | {
        "command": "kernel", "models": ["7b", "8b"], "formats": None, "contexts": contexts, "batches": [1],
        "q_len": [1], "points": None, "dtype": "float16", "path": "auto", "no_baselines": False, "check_heads": 2,
        "production": False,
    }  # fmt: skip
    assert quantize == shared | {
        "command": "quantize", "models": ["7b", "8b"], "formats": None, "contexts": contexts, "dtype": "float16",
        "warps": None,
    }  # fmt: skip
    assert products == shared | {
        "command": "products", "models": ["llama2-7b", "llama3.1-8b"], "dtype": "bfloat16", "compiled": False,
        "bits": [4, 16], "rows": [1, 2, 5, 8, 16],
    }  # fmt: skip
    assert predict == {
        "command": "predict", "model": ["llama2-7b"], "methods": ["fp16", "kivi:int4", "kivi:int2"],
        "contexts": contexts, "batches": [1], "gpu": ["h200"], "bandwidth_TBs": None, "tflops": None,
        "memory_gb": None, "new_tokens": 1, "weight_bits": 16, "weight_group": 128, "head_bits": None,
        "acceptance": 0.9,
        "overhead_us": 0.0, "prefill_chunk": None, "prefill_rows": "auto", "mlp_chunk": "auto", "out": None,
        "name": None,
    }  # fmt: skip


def test_options_of_whole_models() -> None:
    parser = command.bench_parser()
    for name, graphs, ceiling in (("tpot", "always", True), ("prefill", "never", False), ("memory", "always", False)):
        args = parser.parse_args([name])
        assert (args.graphs, args.ceiling, args.eager, args.compile, args.profile) == (graphs, ceiling, *[False] * 3)
        assert (args.settings, args.model, args.weights, args.dtype) == (["fp16"], "llama2-7b", "random", "bfloat16")
        assert (args.device, args.seed, args.kernels, args.memory_limit_gb) == ("cuda", 0, "auto", None)
        assert (args.prefill_chunk, args.prefill_rows, args.grow) == (None, "auto", False)
        changed = parser.parse_args([name, "--eager-only", "--no-stock", "--check", "7", "--steps", "9"])
        assert (changed.graphs, changed.baselines, changed.compare, changed.steps) == ("never", [], 7, 9)
    assert parser.parse_args(["tpot", "--no-ceiling"]).ceiling is False
    assert parser.parse_args(["memory", "--ceiling"]).ceiling is True
