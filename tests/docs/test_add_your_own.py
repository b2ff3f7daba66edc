"""The method of docs/add-your-own.md, made from the blocks of the page as a reader would make it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from kvbench.cli.compose import Composer
from kvbench.methods.load import load_method
from tests.zoo import feed, new_layer, random_kv

PAGE = Path(__file__).resolve().parents[2] / "docs" / "add-your-own.md"


def test_the_method_of_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = PAGE.read_text(encoding="utf-8")
    code, _ = re.findall(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    (preset,) = re.findall(r"^```yaml\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    (tmp_path / "method").mkdir()
    (tmp_path / "recent.py").write_text(code)
    (tmp_path / "method" / "recent.yaml").write_text(preset)
    monkeypatch.syspath_prepend(str(tmp_path))
    (command,) = re.findall(r"python -m kvbench --config-dir mine --multirun (.*)", text)
    assert len(Composer(tmp_path).check(command.split(), multirun=True)) == 2
    method = load_method(str(tmp_path / "method" / "recent.yaml"), residual=16)
    assert (method.sinks, method.exact(100), method.exact(5)) == (4, 16, 5)
    assert method.quantizer is not None and method.quantizer.name == "int4_token"


def test_the_score_of_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = PAGE.read_text(encoding="utf-8")
    _, code = re.findall(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    (tmp_path / "page_score.py").write_text(code)
    monkeypatch.syspath_prepend(str(tmp_path))
    target = {"_target_": "page_score.ValueNorm", "takes": ["int4"], "keep": 40, "residual": 32, "newest": 16}
    layer = new_layer(load_method(target, quantizer="int4"))
    keys, values = random_kv(90)
    feed(layer, keys, values)
    scores = (values.norm(dim=-1) / keys.norm(dim=-1))[0, 1, :74]
    expected = scores.argsort(descending=True)[:24].sort().values.tolist()
    assert layer.positions(0)[1].tolist() == [*expected, *range(74, 90)]
    example = (PAGE.parents[1] / "examples" / "configs" / "value_norm.py").read_text(encoding="utf-8")
    assert code.splitlines()[-1] in example.splitlines() and len(code.splitlines()) <= 12
