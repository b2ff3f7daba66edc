"""Facts about modules, read from their files, and the modules that others reach; whose they are."""

from __future__ import annotations

import hashlib
import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvbench.runner import modules


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a function that writes a file of a user; its modules can be imported."""
    monkeypatch.syspath_prepend(str(tmp_path))
    modules.own.cache_clear()

    def write(name: str, text: str) -> Path:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        importlib.invalidate_caches()
        return path

    yield write
    modules.own.cache_clear()


def facts(name: str) -> modules.Module:
    content = modules.load(name, modules.module_file(name))
    assert content is not None
    return content


def reach(*names: str, enters: Callable[[str], bool] = lambda name: name.startswith("facts"), **more: bool) -> set[str]:
    return set(modules.reached(names, enters, modules.module_file, **more))


def test_imports_and_names_are_those_of_the_source(write) -> None:
    write("facts_pack/__init__.py", "from .sub import here\n")
    write("facts_pack/sub/__init__.py", "")
    write(
        "facts_pack/sub/one.py",
        "from typing import TYPE_CHECKING\nimport a.b\nimport c.d as e\nfrom f import g as h, i\nfrom . import j\n"
        "from ..k import l\nfrom m import *\nif TYPE_CHECKING:\n    import never\n    from never2 import n\n"
        "def inside():\n    import late\ndef other():\n    import later as late\n",
    )
    computed = facts("facts_pack.sub.one")
    assert computed.bound == {
        "TYPE_CHECKING": "typing.TYPE_CHECKING",
        "a.b": "a.b",
        "e": "c.d",
        "h": "f.g",
        "i": "f.i",
        "j": "facts_pack.sub.j",
        "l": "facts_pack.k.l",
        "*": "m.*",
        "late": "later",
    }
    assert computed.imports == {*computed.bound.values(), "late"}
    assert facts("facts_pack").bound == {"here": "facts_pack.sub.here"}


@pytest.mark.parametrize(
    ("text", "imports"),
    [
        ("if TYPE_CHECKING:\n    import a\n", set()),
        ("if TYPE_CHECKING:\n    def f():\n        import a\n", set()),
        ("if TYPE_CHECKING:\n    import a\ndef __getattr__(name): ...\n", {"a"}),
        ("if TYPE_CHECKING:\n    import a\nelse:\n    import b\n", {"a", "b"}),
        ("try:\n    import a\nexcept ImportError:\n    import b\nfinally:\n    import c\n", {"a", "b", "c"}),
        ("with x:\n    import a\nclass A:\n    def f(self):\n        async def g():\n            import b", {"a", "b"}),
        ("match x:\n    case 1:\n        import a\n", {"a"}),
    ],
)
def test_imports_are_found_wherever_they_stand(write, text, imports) -> None:
    write("facts_places.py", text)
    assert facts("facts_places").imports == imports


SCORER = """
class Ask:
    size = 3
    scorer_version: int = 1
    def samples(self): return 1
    def score(self, sample, prediction): return 2
    def score_questions(self, sample, predictions): return 3
class Other:
    scorer_version = 1
class Ranker:
    def score(self, passage): return 4
"""


@pytest.mark.parametrize(
    ("old", "new", "scorer", "rest"),
    [
        ("return 1", "return 9", False, True),
        ("size = 3", "size = 9", False, True),
        ("return 2", "return 9", True, False),
        ("return 3", "return 9", True, False),
        ("return 4", "return 9", False, True),  # may choose what is asked
        ("scorer_version: int = 1", "scorer_version: int = 9", True, False),
        ("scorer_version = 1", "scorer_version = 9", True, False),
        ("return 2", "return 2  # half", False, False),
    ],
)
def test_members_that_score_have_a_digest_of_their_own(write, old, new, scorer, rest) -> None:
    write("facts_scorer.py", SCORER)
    before = facts("facts_scorer")
    assert before.scorer and before.unscored != before.digest
    write("facts_scorer.py", SCORER.replace(old, new))
    after = facts("facts_scorer")
    assert (before.scorer != after.scorer) == scorer
    assert (before.unscored != after.unscored) == rest
    assert (before.digest != after.digest) == (scorer or rest)


def test_a_module_without_a_scorer_is_whole(write) -> None:
    write("facts_plain.py", "a = scorer_version = 1\nb.c = 2\ndef score(self, sample, prediction): pass\n")
    computed = facts("facts_plain")
    assert computed.scorer == "" and computed.unscored == computed.digest


@pytest.mark.parametrize("name", ["facts_broken.py", "facts_native.hpp", "facts_data.json"])
def test_a_file_that_is_not_python_counts_by_its_bytes(write, name) -> None:
    """A native source of comments alone would be Python too."""
    path = write(name, "def (:\n" if name.endswith("py") else "# pragma\n")
    expected = hashlib.sha256(path.read_bytes()).hexdigest()
    assert modules.load("facts", path) == modules.Module(expected, expected)


def test_data_files_that_a_source_names_are_noted(write) -> None:
    names = ["facts.json", "deep/facts.json", "facts.yaml", "facts.cu", "facts.hpp", "facts.c"]
    others = ["facts.csv", "../facts.json", "deep/../../facts.json", "a facts.json", "facts.cuda"]
    path = write("facts_data/__init__.py", "".join(f"open({name!r})\n" for name in names + others))
    assert facts("facts_data").data == {name: path.parent / name for name in names}


@pytest.mark.parametrize("name", ["facts_absent", "facts_pack2.absent", "facts_plain2.inner", "__main__", "sys"])
def test_modules_without_a_file_are_not_found(write, name, monkeypatch) -> None:
    write("facts_pack2/__init__.py", "")
    write("facts_plain2.py", "")
    write("facts_space/inner.py", "")
    monkeypatch.setattr(sys.modules["__main__"], "__spec__", None)
    assert modules.module_file(name) is None and modules.package_files(name) == {} and name not in reach(name)
    assert modules.module_file("facts_space") is None, "a namespace package"
    assert modules.load("facts", None) is None and modules.load("facts", Path("absent.py")) is None


def test_nothing_of_a_package_is_imported_to_find_its_files(write, tmp_path) -> None:
    write("facts_bang/__init__.py", "raise RuntimeError('imported')\n")
    write("facts_bang/inner.py", "")
    write("facts_bang/deep/__init__.py", "")
    write("facts_bang/deep/more.py", "")
    write("facts_bang/native/kernel.cuh", "")
    write("facts_bang/native/table.csv", "")
    files = {f"facts_bang{name}": tmp_path / "facts_bang" / path for name, path in FILES_BELOW.items()}
    assert modules.package_files("facts_bang") == files
    assert modules.module_file("facts_bang.deep.more") == files["facts_bang.deep.more"]
    assert reach("facts_bang.deep.more") == {"facts_bang", "facts_bang.deep", "facts_bang.deep.more"}
    assert "facts_bang" not in sys.modules


FILES_BELOW = {
    "": "__init__.py",
    ".inner": "inner.py",
    ".deep": "deep/__init__.py",
    ".deep.more": "deep/more.py",
    ".native.kernel.cuh": "native/kernel.cuh",
}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("class A:\n    def encode(self): ...\n    def decode(self): ...\n", True),
        ("class A:\n    def quantize(self): ...\n    def dequantize(self): ...\n    def more(self): ...\n", True),
        ("class A:\n    def encode_groups(self): ...\n    def decode(self): ...\n", True),
        ("class A:\n    def encode(self): ...\nclass B:\n    def decode(self): ...\n", False),
        ("from kvbench.quantizers.affine import AffineQuantizer\nclass A(AffineQuantizer): ...\n", True),
        ("from kvbench.quantizers.affine import AffineQuantizer as Q\nclass A(B, Q[int]): ...\n", True),
        ("import kvbench.quantizers.affine as q\nclass A(q.AffineQuantizer): ...\n", True),
        ("import kvbench.quantizers.affine\nclass A(kvbench.quantizers.affine.AffineQuantizer): ...\n", True),
        ("from kvbench.quantizers.affine import AffineQuantizer\nclass A: ...\n", False),
        ("from kvbench.methods.kivi import Kivi\nclass A(Kivi): ...\n", False),
        ("class A(made()): ...\n", False),
    ],
)
def test_a_quantizer_is_known_by_its_base_or_by_its_methods(write, text, expected) -> None:
    write("facts_quantizer.py", text)
    assert facts("facts_quantizer").quantizer is expected


@pytest.mark.parametrize(
    ("text", "kernel"),
    [
        ("import triton\n", True),
        ("try:\n    from triton import language as tl\nexcept ImportError:\n    pass\n", True),
        ("def f():\n    import triton\n", False),
        ("import tritons\n", False),
    ],
)
def test_a_kernel_imports_triton_at_once(write, text, kernel) -> None:
    path = write("facts_kernel.py", f"import facts_far\n{text}")
    write("facts_far.py", "")
    inside = modules.load("kvbench.facts_kernel", path)
    assert inside is not None and inside.kernel is kernel
    assert not facts("facts_kernel").kernel, "a user's module counts on every device"

    def place(name: str) -> Path | None:
        return path if name == "kvbench.facts_kernel" else modules.module_file(name)

    def reached(**more: bool) -> set[str]:
        return set(modules.reached(["kvbench.facts_kernel"], lambda name: name == "facts_far", place, **more))

    assert reached(kernels=True) == {"kvbench.facts_kernel", "facts_far"}
    assert ("facts_far" in reached()) is not kernel


def test_what_is_reached_follows_imports_as_far_as_it_may(write) -> None:
    write("facts_a.py", "import facts_b\nimport facts_x\n")
    write("facts_b.py", "def f():\n    from facts_c import g\n    import facts_a\n")
    write("facts_c.py", "import facts_d as d\nimport json\n")
    write("facts_d.py", "")
    write("facts_x.py", "import facts_y\n")
    write("facts_y.py", "")
    assert reach("facts_a") == {f"facts_{letter}" for letter in "abcdxy"}
    assert reach("facts_a.Class") == reach("facts_a.Class.Inner") == reach("facts_a")
    inside = {"facts_b", "facts_c", "facts_d", "facts_a"}
    assert reach("facts_b", enters=lambda name: modules.below(name, inside)) == inside
    assert reach("facts_d", "facts_absent") == {"facts_d"} and reach() == set()


def test_a_package_gives_its_own_code_and_the_home_of_a_name(write) -> None:
    """Whoever imports one name of a package does not depend on all that the package imports for others."""
    write("facts_shop/__init__.py", "from .apple import Apple\nfrom facts_shop.pear import Pear\ndef weigh(): ...\n")
    write("facts_shop/apple.py", "")
    write("facts_shop/pear.py", "")
    write("facts_one.py", "from facts_shop import Pear\n")
    write("facts_two.py", "from facts_shop.apple import Apple\n")
    write("facts_own.py", "from facts_shop import weigh\n")
    write("facts_all.py", "import facts_shop\n")
    both = {"facts_shop", "facts_shop.apple", "facts_shop.pear"}
    assert reach("facts_one") == {"facts_one", "facts_shop", "facts_shop.pear"}
    assert reach("facts_two") == {"facts_two", "facts_shop", "facts_shop.apple"}
    assert reach("facts_own") == {"facts_own", *both} and reach("facts_all") == {"facts_all", *both}


def test_a_package_that_imports_on_first_use_leads_to_the_home_of_a_name(write) -> None:
    lazy = "if TYPE_CHECKING:\n    from facts_lazy.home import Name, Other\ndef __getattr__(name): ...\n"
    write("facts_lazy/__init__.py", lazy)
    write("facts_lazy/home.py", "")
    write("facts_lazy/far.py", "")
    write("facts_user.py", "from facts_lazy import Name\n")
    assert reach("facts_user") == {"facts_user", "facts_lazy", "facts_lazy.home"}


def test_a_name_that_a_package_imports_from_itself_ends(write) -> None:
    write("facts_loop/__init__.py", "from facts_loop import Loop\n")
    assert reach("facts_loop.Loop") == {"facts_loop"}


def test_a_module_is_below_its_packages_by_whole_names() -> None:
    inside = [modules.below(name, ("a.b", "c")) for name in ("a.b", "a.b.d", "c.e", "a.bc", "a", "cc")]
    assert inside == [True, True, True, False, False, False] and not modules.below("a", ())


def test_the_users_own_modules_are_neither_kvbenchs_nor_installed(write, tmp_path) -> None:
    write("facts_mine.py", "")
    write("site-packages/facts_installed.py", "")
    sys.path.insert(0, str(tmp_path / "site-packages"))
    try:
        importlib.invalidate_caches()
        assert modules.own("facts_mine")
        assert not modules.own("facts_installed")
    finally:
        sys.path.remove(str(tmp_path / "site-packages"))
    for name in ("kvbench.methods.kivi", "kvbench", "json", "os.path", "torch", "pytest", "facts_absent", ""):
        assert not modules.own(name), name
