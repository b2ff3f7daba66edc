"""The command of a stored run composes to the configuration that the run had."""

from __future__ import annotations

import shlex

import pytest

from kvbench.cli.compose import Composer
from kvbench.config.stored_command import changes, command

BEGIN = ["python", "-m", "kvbench"]


@pytest.fixture(scope="module")
def composed():
    """Function that composes overrides as the command line does."""
    composer = Composer()

    def compose(overrides):
        return composer.plain([*overrides, "logger=none"])

    return compose


@pytest.mark.parametrize(
    "overrides",
    [
        [
            "method=kivi",
            "method.residual=64",
            "dataset=mini/key_value",
            "dataset.lengths=[1024]",
            "runtime.batch_size=2",
        ],
        [
            "method=kivi",
            "quantizer=int4_g128",
            "quantizer.key.group_size=64",
            "model.dtype=float32",
            "decoding.stop=['a b',\"c'd\"]",
        ],
        ["method=hf_quantized", "model=llama2-7b", "model.weights=random", "dataset=efficiency", "runtime=fast"],
    ],
    ids=lambda overrides: " ".join(overrides),
)
def test_the_command_of_a_run_composes_to_the_same_configuration(composed, overrides):
    config = composed(overrides)
    words = shlex.split(command(config))
    assert words[:3] == BEGIN
    assert composed(words[3:]) == config


def test_what_is_as_in_the_presets_is_left_out(composed):
    config = composed(["method=atom"])
    assert command(config) == "python -m kvbench model=tiny method=atom dataset=mini"
    assert changes(config) == {}
    config["decoding"]["max_new_tokens"] = 5
    assert changes(config) == {"decoding.max_new_tokens": 5}
    config["method"] = {"_target_": "mine.Mine", "preset": "mine; rm -r x", "takes": ["int2"], "depth": 3}
    words = shlex.split(command(config))  # a method of one's own needs its folder
    assert words[3:6] == ["--config-dir", "DIR", "model=tiny"] and "method='mine; rm -r x'" in words


@pytest.mark.parametrize(
    "config", [{}, {"model": None}, {"model": {}}, {"method": {"_target_": 3}}, {"dataset": {"name": []}}]
)
def test_a_damaged_configuration_gives_a_command_all_the_same(config):
    assert command(config).startswith("python -m kvbench")
