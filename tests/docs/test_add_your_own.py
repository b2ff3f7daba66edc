"""The methods and presets of docs/add-your-own.md, made from the blocks of the page as a reader would make them."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from kvbench.cli.compose import Composer
from kvbench.methods.load import load_method
from tests.zoo import feed, new_layer, random_kv

PAGE = Path(__file__).resolve().parents[2] / "docs" / "add-your-own.md"
TEXT = PAGE.read_text(encoding="utf-8")
RECENT, VALUE_NORM, FIVE = re.findall(r"^```python\n(.*?)^```", TEXT, re.MULTILINE | re.DOTALL)
MY_INT5, RECENT_64 = re.findall(r"^```yaml\n(.*?)^```", TEXT, re.MULTILINE | re.DOTALL)


@pytest.fixture
def mine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder `mine` of the page, with all its files."""
    monkeypatch.setattr(sys, "path", [*sys.path])
    for name, text in (
        ("method/recent.py", RECENT),
        ("method/value_norm.py", VALUE_NORM),
        ("method/my_five.py", FIVE),
        ("method/recent_64.yaml", RECENT_64),
        ("quantizer/my_int5.yaml", MY_INT5),
    ):
        assert f"`mine/{name}`" in TEXT or name in ("method/value_norm.py", "method/my_five.py")
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text, encoding="utf-8")
        if name.endswith(".py"):
            monkeypatch.delitem(sys.modules, name.removesuffix(".py").replace("/", "."), raising=False)
    return tmp_path


def test_the_method_of_the_page(mine: Path) -> None:
    (command,) = re.findall(r"python -m kvbench --config-dir mine --multirun (.*)", TEXT)
    assert len(Composer(mine).check(command.split(), multirun=True)) == 2
    method = load_method(str(mine / "method" / "recent.py"), residual=16)
    assert (method.sinks, method.exact(100), method.exact(5)) == (4, 16, 5)
    assert method.quantizer is not None and method.quantizer.name == "int4_token"
    preset = load_method(str(mine / "method" / "recent_64.yaml"))
    assert type(preset) is type(method) and (preset.sinks, preset.residual) == (4, 64)


def test_the_score_of_the_page(mine: Path) -> None:
    options = {"quantizer": "int4", "keep": 40, "residual": 32, "newest": 16}
    layer = new_layer(load_method(str(mine / "method" / "value_norm.py"), **options))
    keys, values = random_kv(90)
    feed(layer, keys, values)
    scores = (values.norm(dim=-1) / keys.norm(dim=-1))[0, 1, :74]
    expected = scores.argsort(descending=True)[:24].sort().values.tolist()
    assert layer.positions(0)[1].tolist() == [*expected, *range(74, 90)]
    example = (PAGE.parents[1] / "examples" / "configs" / "value_norm.py").read_text(encoding="utf-8")
    assert VALUE_NORM.splitlines()[-1] in example.splitlines() and len(VALUE_NORM.splitlines()) <= 14


def test_the_bits_of_the_page(mine: Path) -> None:
    """A preset that a method of kvbench and one of the page take, and bits of a method's own."""
    composer = Composer(mine)
    for method in ("kivi", "value_norm"):
        (job,) = composer.check(["model=tiny", "dataset=mini", f"method={method}", "quantizer=my_int5"])
        assert composer.configuration(job).method.quantizer.name == "my_int5"
    layer = new_layer(load_method(str(mine / "method" / "my_five.py")))
    feed(layer, *random_kv(100))
    packed, tail = layer.stores()[0].segments
    assert (packed.quantizer.bits, packed.length(slice(0, 1)), tail.length(slice(0, 1))) == (5, 68, 32)
