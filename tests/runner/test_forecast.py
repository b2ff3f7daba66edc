"""The memory that a run is expected to take, from its configuration."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kvbench.config.run_config import checked_config
from kvbench.errors import ConfigError
from kvbench.runner.forecast import CONTEXT, check_fits, longest, peak_bytes
from tests.run_support import ARCHITECTURE, config

PARAMETERS = 2 * 259 * 64 + 2 * (64 * 32 * (2 * 2 + 2 * 1) + 3 * 64 * 64 + 2 * 64) + 64


def expected(folder: Path, name: str = "fp16", **groups: Any) -> int:
    bytes_ = peak_bytes(checked_config(config(folder, name, **groups)))
    assert bytes_ is not None
    return bytes_


def test_weights_cache_and_activations_are_added(tmp_path: Path) -> None:
    cache = 2 * 2 * 512 * 32 * 4  # both sides, two layers, 508 + 4 tokens, fp32
    alive = 384 * (508) * 4
    one = expected(tmp_path, decoding={"max_new_tokens": 4})
    hidden, inner, heads = 64, 64, (3 * 2 + 4 * 1) * 32
    alive = 508 * max(3 * inner + 4 * hidden, 2 * hidden + heads) * 4
    assert one == PARAMETERS * 4 + cache + alive + CONTEXT


def test_weights_above_the_limit_are_refused(tmp_path: Path) -> None:
    def of(limit: float, weights: str = "random", **groups: Any) -> None:
        wide = {"architecture": {**ARCHITECTURE, "intermediate_size": 400_000}, "weights": weights, **groups}
        check_fits(checked_config(config(tmp_path, "fp16", model=wide, runtime={"memory_limit_gb": limit})))

    size = (2 * 3 * 64 * 400_000 + PARAMETERS - 2 * 3 * 64 * 64) * 4 / 2**30  # 0.57 GiB in float32
    of(size + 1e-6)
    with pytest.raises(ConfigError, match=r"limit_gb=0\.57: the weights of .* alone take 0\.6 GiB.*(\n.*)*random_int4"):
        of(0.57)
    of(size / 2 + 1e-6, dtype="auto")  # 16 bits
    with pytest.raises(ConfigError):
        of(size / 2 - 1e-3, dtype="auto")
    of(0.12, "random_int4")  # a little more than an eighth of float32: scales and the table of tokens
    with pytest.raises(ConfigError, match="limit_gb=1, or choose a smaller model"):
        of(size / 8, "random_int4")


def test_more_takes_more(tmp_path: Path) -> None:
    one = expected(tmp_path)
    assert expected(tmp_path, runtime={"batch_size": 4}) > one
    assert expected(tmp_path, "kivi") < one
    assert expected(tmp_path, model={"max_length": 1024}) > one
    assert expected(tmp_path, model={"dtype": "bfloat16"}) < one
    assert expected(tmp_path, runtime={"prefill_chunk": 16}) < one
    assert expected(tmp_path, model={"prompt_limit": 64}) < one


def test_the_longest_prompt_is_that_of_the_data_or_of_the_model(tmp_path: Path) -> None:
    def of(data: dict[str, Any], **groups: Any) -> tuple[int, int, int]:
        checked = checked_config(config(tmp_path, "fp16", **groups))
        return longest(type(checked)(**{**vars(checked), "dataset": data}))

    assert of({}) == (512 - 128, 128, 1)
    assert of({"lengths": [64, 256], "max_new_tokens": 8}) == (256, 8, 1)
    assert of({"prompts": [4096], "batches": [1, 8], "new_tokens": 16}) == (4096, 16, 8), "random weights take more"
    assert of({"lengths": [64]}, decoding={"max_new_tokens": 3}, runtime={"batch_size": 5}) == (64, 3, 5)


def test_a_model_that_the_roofline_does_not_know_has_no_forecast(tmp_path: Path, monkeypatch: Any) -> None:
    checked = checked_config(config(tmp_path, "fp16"))
    monkeypatch.setattr(type(checked.model), "dimensions", lambda self: {**ARCHITECTURE, "num_experts": 8})
    assert peak_bytes(checked) is None
    monkeypatch.setattr(type(checked.model), "dimensions", lambda self: {})
    assert peak_bytes(checked) is None


@pytest.mark.parametrize("weights", ["random", "random_int4"])
def test_weights_of_4_bits_take_less(tmp_path: Path, weights: str) -> None:
    groups = {"model": {"weights": weights, "dtype": "bfloat16"}}
    assert (expected(tmp_path, **groups) < expected(tmp_path, model={"dtype": "bfloat16"})) == (weights != "random")
