"""Normal form of code: it depends on what the code does, not on how it is written or for which Python."""

from __future__ import annotations

import hashlib
import textwrap

import pytest

from kvbench.util.normal_form import normal_form

EVERYTHING = '''
from __future__ import annotations
import a.b as c
from .d import (e, f as g)
if TYPE_CHECKING:
    import h
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


def test_it_is_the_same_in_every_version_of_python() -> None:
    """The digest below was made by 3.11, 3.12 and 3.13."""
    form = normal_form(EVERYTHING)
    assert hashlib.sha256(form.encode()).hexdigest()[:16] == "93ecd3f7b61c2376"
    again = textwrap.dedent(EVERYTHING).replace('"doc"', '"other"').replace("'tail'", '"tail"')
    assert normal_form(again) == form
    assert normal_form(EVERYTHING.replace("    import h\n", "    import k\n")) == form


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("x = 'a' 'b'  # c", 'x = ("ab")'),
        ("def f():\n    '''Doc.'''", "def f():\n    pass"),
        ("def f():\n    '''Doc.'''\n    return 1", "def f(): return 1"),
        ("x = 0x10", "x = 16"),
        ("f(a, b)", "f(\n    a,\n    b,\n)"),
    ],
)
def test_how_it_is_written_does_not_count(one: str, other: str) -> None:
    assert normal_form(one) == normal_form(other)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("x = 1", "x = 1.0"),
        ("x = 1", "x = True"),
        ("x = None", "x = ''"),
        ("x = None", "x = 0"),
        ('f"{a}b"', 'f"b{a}"'),
        ("def f(a, /): pass", "def f(a): pass"),
        ("def f(a=None): pass", "def f(a): pass"),
        ("return_ = a < b", "return_ = a <= b"),
        ("if TYPE_CHECKING:\n    x = 1\nelse:\n    x = 2", "if TYPE_CHECKING:\n    x = 1\nelse:\n    x = 3"),
    ],
)
def test_what_it_does_counts(one: str, other: str) -> None:
    assert normal_form(one) != normal_form(other)
