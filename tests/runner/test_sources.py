"""The digest of a method's code: what it does counts, how it is written and where it lies does not."""

from __future__ import annotations

import hashlib
import importlib
import sys
import textwrap
from pathlib import Path

import pytest

from kvbench import load_method
from kvbench.methods.base import Method
from kvbench.quantizers.spec import QuantizerSpec
from kvbench.runner import sources

METHOD = '''
"""A method."""
from __future__ import annotations
from dataclasses import dataclass
from kvbench.methods.kivi import Kivi
from foreign_helper import share


@dataclass(kw_only=True)
class Foreign(Kivi):
    """KIVI with a share."""

    def settle(self, layer, rows):
        """Settle."""
        if share(rows) > 0.5:  # half
            super().settle(layer, rows)
'''
HELPER = "def share(rows):\n    return 0.25\n"

EVERYTHING = '''
from __future__ import annotations
import a.b as c
from .d import (e, f as g)
X: int = 0x10_0; Y = 1e-3; Z = 3j; W = ...; N = None; T = True
class K(list, metaclass=type):
    """Doc."""
    a: tuple[int, ...] = (1, -2)
    @property
    def p(self, /, x, *args, y=1, **kw) -> str:
        "doc"
        global Q
        match x:
            case {"a": [1, *rest], **others} if y: return f"{x!r:>{y}} {{}} {y=}" 'tail' "é"
            case K(a=1) | None: pass
            case _: raise ValueError("x") from None
        try: pass
        except* OSError as error: del error
        with open("f") as h, h: yield from (i async for i in x)
        return lambda q, *, r: (z := q) if not r else {**kw, 1: b"\\x00\\xff", "s": {1, 2}, **{}}
    async def f(self):
        async with x: await y; x[1:2, ::3, ...] @= 3; assert x, "m"
        while True:
            for i, *j in x: break
            else: continue
'''


@pytest.fixture
def foreign(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Digest of a method outside the package, of texts for its module and for its helper."""

    def made(method: str = METHOD, helper: str = HELPER, place: str = "a") -> str | None:
        folder = tmp_path / place
        folder.mkdir(exist_ok=True)
        (folder / "foreign_method.py").write_text(method)
        (folder / "foreign_helper.py").write_text(helper)
        for name in ("foreign_method", "foreign_helper"):
            sys.modules.pop(name, None)
        monkeypatch.setattr(sys, "path", [str(folder), *(path for path in sys.path if str(tmp_path) not in path)])
        importlib.invalidate_caches()
        sources._read.cache_clear()
        cls: type[Method] = importlib.import_module("foreign_method").Foreign
        return sources.digest(cls(quantizer=load_method("kivi").quantizer))

    yield made
    for name in ("foreign_method", "foreign_helper"):
        sys.modules.pop(name, None)


def test_the_same_code_has_the_same_digest_wherever_it_lies(foreign) -> None:
    first = foreign()
    assert first is not None and len(first) == sources.DIGITS
    assert foreign(place="b") == first


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('"""A method."""', "# no docstring, and\n# a comment"),
        ('"""KIVI with a share."""', '"""Other\n    words."""'),
        ("  # half", ""),
        ("if share(rows) > 0.5:", "if (\n            share(\n                rows,\n            ) > 0.50\n        ):"),
    ],
)
def test_comments_docstrings_and_formatting_do_not_count(foreign, old: str, new: str) -> None:
    assert old in METHOD
    assert foreign(METHOD.replace(old, new)) == foreign()


@pytest.mark.parametrize(
    ("old", "new"),
    [("> 0.5", ">= 0.5"), ("0.5", "0.6"), ("layer, rows)\n", "rows, layer)\n"), ("Kivi", "Kivi as Kivi")],
)
def test_what_the_code_does_counts(foreign, old: str, new: str) -> None:
    assert old in METHOD
    changed = METHOD.replace(old, new, 1)
    assert foreign(changed) != foreign()


def test_a_helper_beside_it_counts(foreign) -> None:
    assert foreign(helper=HELPER.replace("0.25", "0.75")) != foreign()
    assert foreign(helper="# a share\n" + HELPER) == foreign()


def test_bases_and_quantizers_of_kvbench_count(monkeypatch: pytest.MonkeyPatch) -> None:
    method, full = load_method("kivi"), load_method("fp16")
    before = sources.digest(method), sources.digest(full)
    read = sources._read

    def changed(name: str) -> None:
        def other(path: str, time: int, module: str) -> tuple[str, tuple[str, ...]]:
            content, imported = read(path, time, module)
            return ("other" if module == name else content), imported

        monkeypatch.setattr(sources, "_read", other)

    for name, moves in (
        ("kvbench.methods.kivi", (True, False)),
        ("kvbench.methods.base", (True, True)),
        ("kvbench.methods.fp16", (False, True)),
        ("kvbench.quantizers.affine", (True, False)),
        ("kvbench.cache.segments.base", (False, False)),
    ):
        changed(name)
        after = sources.digest(method), sources.digest(full)
        assert tuple(a != b for a, b in zip(before, after, strict=True)) == moves, name


def test_every_method_has_a_digest_of_its_own() -> None:
    names = ("fp16", "kivi", "atom", "logquant", "cocktail", "h2o", "snapkv", "streamingllm", "quantspec")
    assert len({sources.digest(load_method(name)) for name in names}) == len(names)


def test_a_class_without_a_source_has_none() -> None:
    typed = type("Typed", (Method,), {"__module__": "__typed_at_a_prompt__"})
    assert sources.digest(typed()) is None
    assert isinstance(QuantizerSpec, type)


def test_it_is_the_same_in_every_version_of_python() -> None:
    """The digest below was made by 3.11, 3.12 and 3.13."""
    form = sources.normal_form(EVERYTHING)
    assert hashlib.sha256(form.encode()).hexdigest()[:16] == "2447f54f454d37c1"
    again = textwrap.dedent(EVERYTHING).replace('"doc"', '"other"').replace("'tail'", '"tail"')
    assert sources.normal_form(again) == form
    assert sources.normal_form("x = 'a' 'b'  # c") == sources.normal_form('x = ("ab")')
    assert sources.normal_form("x = 1") != sources.normal_form("x = 1.0") != sources.normal_form("x = True")
    assert sources.normal_form("x = None") != sources.normal_form("x = ''")
    assert sources.normal_form('f"{a}b"') != sources.normal_form('f"b{a}"')
    assert sources.normal_form("def f(a, /): pass") != sources.normal_form("def f(a): pass")
