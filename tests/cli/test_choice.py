"""``--help GROUP=CHOICE``: every option of every choice has a default, a type and an explanation."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from kvbench.cli.choice import NOT_OPTIONS, WHOLE, WIDTH, choice, choice_help, decoding, plain_docstring
from kvbench.cli.main import main
from kvbench.errors import ConfigError
from kvbench.util.confdir import config_groups, group_options


@pytest.mark.parametrize("group", config_groups())
def test_every_key_of_every_choice_is_explained(group: str) -> None:
    for name in group_options(group):
        for option in choice(group, name).options:
            assert option.meaning or option.comment, f"{group}={name}: {option.key} has no comment and no docstring"
            assert option.type or group in WHOLE, f"{group}={name}: {option.key} has no type"


@pytest.mark.parametrize("group", config_groups())
def test_the_keys_are_those_of_the_files(group: str) -> None:
    for name, path in group_options(group).items():
        keys = {str(key) for key in yaml.safe_load(path.read_text(encoding="utf-8")) or {}} - NOT_OPTIONS
        shown = {option.key.split(".")[0 if group in WHOLE else 1] for option in choice(group, name).options}
        assert keys - shown <= {"name"}, f"{group}={name}"


def test_options_of_a_method() -> None:
    cocktail = choice("method", "cocktail")
    alpha = cocktail.options[0]
    assert (alpha.key, alpha.default, alpha.type) == ("method.alpha", "0.6", "a number, at least 0 and at most 1")
    assert alpha.comment == "T_low, eq. 2 (sec. IV-A)" and alpha.meaning.startswith("the threshold for INT2")
    assert cocktail.takes == ("none",) and cocktail.sets == ("quantizer=none",)
    assert {option.key: option.default for option in choice("method", "kivi").options}["method.evict"] == "false"


def test_nested_keys_and_keys_of_a_base() -> None:
    keys = [option.key for option in choice("quantizer", "int2").options]
    assert keys[:3] == ["quantizer.key.bits", "quantizer.key.group_size", "quantizer.key.axis"]
    assert {option.key: option.default for option in choice("dataset", "gsm8k").options}["dataset.stop"] == (
        '["Question:","</s>","<|im_end|>"]'
    )
    fast, default = ({option.key: option for option in choice("runtime", name).options} for name in ("fast", "default"))
    assert fast.keys() == default.keys()
    assert (fast["runtime.graphs"].default, default["runtime.graphs"].default) == ("always", "auto")
    assert fast["runtime.graphs"].comment == default["runtime.graphs"].comment
    assert decoding().options[0].key == "decoding.max_new_tokens"


def test_presets_set_keys_of_other_groups() -> None:
    preset = choice("experiment", "quickstart/kivi4")
    assert preset.sets == ("model=tiny", "dataset=mini", "method=kivi", "quantizer=int4")
    assert [(option.key, option.default) for option in preset.options] == [("runtime.batch_size", "8")]


def test_choices_of_another_folder(tmp_path: Path) -> None:
    (tmp_path / "method").mkdir()
    text = "# mine\n_target_: kvbench.methods.kivi.Kivi\ntakes: [int2]\nresidual: 32   # short\n"
    (tmp_path / "method" / "mine.yaml").write_text(text)
    help_text = choice_help(["method=mine"], tmp_path)
    assert help_text is not None and "method.residual=32   # short" in help_text


def test_the_text_of_a_choice() -> None:
    text = choice_help(["method=cocktail", "method.alpha=0.5"])
    assert text is not None and text.startswith("method=cocktail\n  Cocktail: ")
    assert "  method.alpha=0.6   # T_low, eq. 2 (sec. IV-A)\n      [a number, at least 0 and at most 1] the thr" in text
    assert all(len(line) <= WIDTH for line in text.splitlines())
    assert choice_help(["method.alpha=0.5"]) is None is choice_help(["model=OWNER/NAME"])
    both, one = choice_help(["method=kivi,fp16"]), choice_help(["method=kivi"])
    assert both is not None and one is not None and both.startswith(one) and "It has no options." in both
    assert choice_help(["decoding"]) == choice_help(["decoding.temperature=1"]) is not None


def test_a_group_alone_lists_its_choices() -> None:
    text = choice_help(["quantizer"])
    assert text is not None and text.startswith("quantizer\n  quantizer=hierarchical ")


def test_docstrings_read_as_one_types() -> None:
    assert (
        plain_docstring("``None`` or True: see :meth:`~kvbench.a.B.run` and `window`")
        == "null or true: see run and window"
    )


def test_an_unknown_choice_is_refused_with_the_nearest() -> None:
    with pytest.raises(ConfigError, match="did you mean 'kivi'"):
        choice_help(["method=kivy"])


def test_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help", "method=cocktail"]) == 0
    assert "method.chunk_size=32" in capsys.readouterr().out
    assert main(["--help", "method=kivy"]) == 2
    assert "did you mean 'kivi'" in capsys.readouterr().err
    assert main(["--help"]) == 0
    assert "python -m kvbench GROUP=CHOICE" in capsys.readouterr().out
