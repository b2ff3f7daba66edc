"""One file in a folder of one's own is a choice everywhere: no other list in kvbench has to name it."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pytest

from kvbench.attention import reads
from kvbench.cache.kernels.reads import format_refusal
from kvbench.cli.choice import choice
from kvbench.cli.compose import Composer
from kvbench.errors import ConfigError
from kvbench.methods import load_method
from kvbench.quantizers.spec import kind_of, taken
from kvbench.util import confdir
from kvbench.util.confdir import choice_summary, conf_dir, group_options, read_choice

OWN_INT5 = """# 5 bits in groups of 64
name: own_int5
key: {bits: 5, group_size: 64, axis: channel}
value: {bits: 5, group_size: 64, axis: token}
"""
METHOD = '''from dataclasses import dataclass

from kvbench.methods import KeepMethod


@dataclass(kw_only=True)
class Mine(KeepMethod):
    """Keep the tokens with large values.

    Args:
        keep: share of the prompt.
    """

    takes: tuple[str, ...] = ("int2", "affine")
    keep: int | float = 0.25

    def score(self, keys, values, attention):
        return values.norm(dim=-1)
'''
DATA = '''from dataclasses import dataclass

from kvbench.tasks import Sample, Task


@dataclass(frozen=True, kw_only=True)
class Mine(Task):
    """One question."""

    name: str = "own"
    limit: int = 1
    question: str = ""

    def samples(self):
        yield Sample(id="own/0", task="own", prompt=self.question, answers=("1",), max_new_tokens=4)

    def identity(self):
        return {"target": "own", "question": self.question}

    def score(self, sample, prediction):
        return {"score": 0.0}
'''
#: methods that take presets by their kind
BY_KIND = [name for name, path in group_options("method").items() if "affine" in read_choice(path)["takes"]]
BASE = ["model=tiny", "dataset=mini", "logger=none"]


@pytest.fixture
def mine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(sys, "path", [*sys.path])
    for name in ("method.own_method", "dataset.own_data", "method", "dataset"):  # of another test's folder
        monkeypatch.delitem(sys.modules, name, raising=False)
    for name, text in (
        ("quantizer/own_int5.yaml", OWN_INT5),
        ("method/own_method.py", METHOD),
        ("dataset/own_data.py", DATA),
    ):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text, encoding="utf-8")
    return tmp_path


def test_each_method_that_packs_in_any_format_takes_a_new_preset(mine: Path) -> None:
    assert {"keep", "kivi", "logquant", "partial_logquant"} <= set(BY_KIND)
    for name in BY_KIND:
        quantizer = load_method(name, quantizer=str(mine / "quantizer" / "own_int5.yaml")).quantizer
        assert quantizer.name == "own_int5" and (quantizer.key.bits, quantizer.value.group_size) == (5, 64)
        assert "own_int5" in choice("method", name, mine).takes
    assert len(Composer(mine).check([*BASE, "method=fp16,kivi,keep", "quantizer=own_int5"], multirun=True)) == 3
    assert "own_int5" not in taken(load_method("kivi").takes) and "own_int5" in taken(load_method("kivi").takes, mine)


def test_a_preset_is_called_by_its_name_and_what_is_changed(mine: Path) -> None:
    """Rows with other formats never have the same label."""
    composer = Composer(mine)
    (job,) = composer.check([*BASE, "method=kivi", "quantizer=own_int5", "quantizer.key.bits=4"])
    assert composer.configuration(job).method.quantizer.name == "own_int5+key.bits=4"


def test_a_method_of_other_formats_refuses_a_new_preset(mine: Path) -> None:
    for name in sorted({*group_options("method")} - {*BY_KIND, "press"}):
        with pytest.raises(ConfigError, match="does not accept this quantizer"):
            load_method(name, quantizer=str(mine / "quantizer" / "own_int5.yaml"))


def test_a_preset_of_kvbench_is_one_file_too(mine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = shutil.copytree(conf_dir(), mine / "conf", ignore=shutil.ignore_patterns("*.py", "__pycache__"))
    shutil.copy(mine / "quantizer" / "own_int5.yaml", own / "quantizer")
    monkeypatch.setattr(confdir, "conf_dir", lambda: own)
    for name in BY_KIND:
        assert load_method(name, quantizer="own_int5").quantizer.key.bits == 5
        assert "own_int5" in choice("method", name).takes
    assert load_method("kivi", layers="0:own_int5").by_layer(2)[0].quantizer.value.bits == 5


def test_no_kernel_reads_the_new_format() -> None:
    """Its lists name 2, 3, 4 and 8 bits, so that such a layer goes to the reference path."""
    asked = {"keys": ("channel", reads.CUDA_KEYS, reads.TRITON_KEYS), "values": ("token", reads.CUDA_VALUES)}
    for axis, *lists in (*asked.values(), ("token", reads.TRITON_VALUES)):
        for rows in lists:
            assert format_refusal(rows, "affine", 5, axis, 64, 128) == "5-bit codes"
            assert format_refusal(rows, "affine", 4, axis, 64, 128) is None


def test_a_method_and_a_data_set_are_one_python_file_each(mine: Path) -> None:
    composer = Composer(mine)
    (job,) = composer.check(
        ["model=tiny", "logger=none", "method=own_method", "dataset=own_data", "dataset.question=?"]
    )
    made = composer.configuration(job)
    assert (made.method.keep, made.method.quantizer.name, made.method.takes) == (0.25, "int2", ("int2", "affine"))
    with pytest.raises(ConfigError, match=r"(?s)method\.kep.*keep"):
        composer.check(["method=own_method", "method.kep=3"])
    shown = choice("method", "own_method", mine)
    assert (shown.summary, shown.sets) == ("Keep the tokens with large values.", ("quantizer=int2",))
    options_shown = {option.key: option for option in shown.options}
    assert (options_shown["method.keep"].default, options_shown["method.keep"].meaning) == (
        "0.25",
        "share of the prompt.",
    )
    assert {"method.newest", "method.layers", "method.rotation.key"} <= set(options_shown)
    assert load_method(str(mine / "method" / "own_method.py"), quantizer="own_int5", keep=40).keep == 40
    assert read_choice(mine / "dataset" / "own_data.py") == {
        "_target_": "dataset.own_data.Mine", "name": "own", "limit": 1, "question": ""
    }  # fmt: skip


def test_a_yaml_of_the_same_name_wins(mine: Path) -> None:
    preset = mine / "method" / "own_method.yaml"
    preset.write_text("# mine\n_target_: method.own_method.Mine\ntakes: [none]\nkeep: 0.5\n", encoding="utf-8")
    assert group_options("method", mine)["own_method"] == preset and choice_summary(preset) == "mine"


def test_a_file_that_is_no_choice_is_refused(mine: Path) -> None:
    (mine / "method" / "own_method.py").write_text("import nothing_there\n", encoding="utf-8")
    with pytest.raises(ConfigError, match=r"(?s)own_method\.py: cannot be imported \(ModuleNotFoundError"):
        Composer(mine)
    (mine / "method" / "own_method.py").write_text("RATE = 3\n", encoding="utf-8")
    with pytest.raises(ConfigError, match="must define one public class, a dataclass; it defines none"):
        Composer(mine)
    (mine / "method" / "own_method.py").rename(mine / "method" / "_helper.py")
    assert "_helper" not in Composer(mine).groups["method"]


def test_the_kind_of_a_preset() -> None:
    kinds = {name: kind_of(read_choice(path)) for name, path in group_options("quantizer").items()}
    assert (kinds["int4"], kinds["hierarchical"], kinds["none"]) == ("affine", "hierarchical", "")
    mixed = {"key": {"bits": 8, "kind": "hierarchical"}, "value": {"bits": 8}}
    assert kind_of(mixed) == ""
