"""Facts about modules, read from their files: imports, names, bases, scorers, data files, and whose they are."""

from __future__ import annotations

import gc
import hashlib
import importlib
import sys
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
    content = modules.load_facts(name)
    assert content is not None
    return content


def test_imports_and_names_are_those_of_the_source(write) -> None:
    write("facts_pack/__init__.py", "from .sub import here\n")
    write("facts_pack/sub/__init__.py", "")
    write(
        "facts_pack/sub/one.py",
        "from typing import TYPE_CHECKING\nimport a.b\nimport c.d as e\nfrom f import g as h, i\nfrom . import j\n"
        "from ..k import l\nfrom m import *\nif TYPE_CHECKING:\n    import never\n    from never2 import n\n"
        "def inside():\n    import late\n",
    )
    computed = facts("facts_pack.sub.one")
    assert computed.names == {
        "TYPE_CHECKING": "typing.TYPE_CHECKING",
        "a": "a",
        "e": "c.d",
        "h": "f.g",
        "i": "f.i",
        "j": "facts_pack.sub.j",
        "l": "facts_pack.k.l",
        "*": "m.*",
        "late": "late",
    }
    assert computed.imports == tuple(
        sorted(
            ["typing", "typing.TYPE_CHECKING", "a.b", "c.d", "f", "f.g", "f.i", "facts_pack.sub", "facts_pack.sub.j"]
            + ["facts_pack.k", "facts_pack.k.l", "m", "m.*", "late"]
        )
    )
    assert computed.stars == ("m",)
    assert facts("facts_pack").names == {"here": "facts_pack.sub.here"}


def test_bases_are_named_as_written_without_parameters_or_calls(write) -> None:
    write(
        "facts_bases.py",
        "class A(b.C, D[int], make(), e.F[str]):\n    class Inner(G):\n        pass\nclass H:\n    pass\n",
    )
    assert facts("facts_bases").bases == {"A": ("b.C", "D", "e.F"), "Inner": ("G",), "H": ()}


SCORER = """
class Ask:
    size = 3
    scorer_version: int = 1
    def samples(self): return 1
    def score(self, s, p): return 2
    def score_questions(self, s, p): return 3
class Other:
    scorer_version = 1
"""


@pytest.mark.parametrize(
    ("old", "new", "scorer", "rest"),
    [
        ("return 1", "return 9", False, True),
        ("size = 3", "size = 9", False, True),
        ("return 2", "return 9", True, False),
        ("return 3", "return 9", True, False),
        ("scorer_version: int = 1", "scorer_version: int = 9", True, False),
        ("scorer_version = 1", "scorer_version = 9", True, False),
        ("return 2", "return 2  # half", False, False),
    ],
)
def test_members_that_score_have_a_digest_of_their_own(write, old, new, scorer, rest) -> None:
    write("facts_scorer.py", SCORER)
    before = facts("facts_scorer")
    assert before.scorer and before.without_scorer != before.digest
    write("facts_scorer.py", SCORER.replace(old, new))
    after = facts("facts_scorer")
    assert (before.scorer != after.scorer) == scorer
    assert (before.without_scorer != after.without_scorer) == rest
    assert (before.digest != after.digest) == (scorer or rest)
    assert modules.module_digest("facts_scorer") == after.digest


def test_a_module_without_a_scorer_is_whole(write) -> None:
    write("facts_plain.py", "a = scorer_version = 1\nb.c = 2\ndef score(): pass\n")
    computed = facts("facts_plain")
    assert computed.scorer == "" and computed.without_scorer == computed.digest == modules.module_digest("facts_plain")


def test_a_source_that_python_does_not_read_counts_by_its_bytes(write) -> None:
    path = write("facts_broken.py", "def (:\n")
    expected = hashlib.sha256(path.read_bytes()).hexdigest()
    assert facts("facts_broken") == modules.Module(expected, expected, "")
    assert modules.module_digest("facts_broken") == expected


@pytest.mark.parametrize("enabled", [True, False])
def test_the_garbage_collector_is_left_as_it_was(write, enabled) -> None:
    write(f"facts_collected_{enabled}.py", "x = 1\n")
    assert gc.isenabled()
    try:
        if not enabled:
            gc.disable()
        modules.load_facts(f"facts_collected_{enabled}")
        assert gc.isenabled() == enabled
    finally:
        gc.enable()


@pytest.mark.parametrize(
    ("literal", "counts"),
    [
        ("'facts.json'", True),
        ('"deep/facts.json"', True),
        ("'facts.yaml'", True),
        ("'facts.cu'", True),
        ("'facts.csv'", False),
        ("'../facts.json'", False),
        ("'deep/../../facts.json'", False),
        ("'absent.json'", False),
        ("'a facts.json'", False),
    ],
)
def test_data_files_that_a_source_names_count(write, literal, counts) -> None:
    for name in ("facts.json", "deep/facts.json", "facts.yaml", "facts.cu", "facts.csv", "../facts.json"):
        write(f"facts_data/{name}", "1")
    write("facts_data/__init__.py", f"x = open({literal})\n")
    before = modules.module_digest("facts_data"), facts("facts_data").digest
    assert before[0] == before[1]
    for name in ("facts.json", "deep/facts.json", "facts.yaml", "facts.cu", "facts.csv", "../facts.json"):
        write(f"facts_data/{name}", "22")
    assert (modules.module_digest("facts_data") != before[0]) == counts
    assert (facts("facts_data").digest != before[0]) == counts


def test_a_data_file_belongs_to_the_module_and_not_to_its_scorer(write) -> None:
    """A prompt may come from the file too, so that an edit needs new predictions."""
    write("facts_words/__init__.py", SCORER.replace("return 2", "return open('words.txt')"))
    write("facts_words/words.txt", "one")
    before = facts("facts_words")
    write("facts_words/words.txt", "eleven")
    after = facts("facts_words")
    assert before.without_scorer != after.without_scorer and before.digest != after.digest
    assert before.scorer == after.scorer


def test_a_folder_named_like_a_data_file_is_none(write) -> None:
    write("facts_folder/odd.json/inside", "1")
    write("facts_folder/__init__.py", "x = 'odd.json'\n")
    assert modules.module_digest("facts_folder") == facts("facts_folder").digest


@pytest.mark.parametrize("name", ["facts_absent", "facts_pack2.absent", "facts_plain2.inner", "__main__", "sys", ""])
def test_modules_without_a_file_have_no_facts(write, name, monkeypatch) -> None:
    write("facts_pack2/__init__.py", "")
    write("facts_plain2.py", "")
    (write("facts_space/inner.py", "")).exists()
    monkeypatch.setattr(sys.modules["__main__"], "__spec__", None)
    assert modules.module_spec(name) is None
    assert modules.load_facts(name) is None and modules.module_digest(name) is None and modules.submodules(name) == []
    assert modules.load_facts("facts_space") is None, "a namespace package"


def test_nothing_of_a_package_is_imported_to_find_its_modules(write) -> None:
    write("facts_bang/__init__.py", "raise RuntimeError('imported')\n")
    write("facts_bang/inner.py", "")
    write("facts_bang/deep/__init__.py", "")
    write("facts_bang/deep/more.py", "")
    spec = modules.module_spec("facts_bang.deep.more")
    assert spec is not None and spec.name == "facts_bang.deep.more"
    names = ["facts_bang", "facts_bang.deep", "facts_bang.deep.more", "facts_bang.inner"]
    assert sorted(modules.submodules("facts_bang")) == names
    assert modules.submodules("facts_bang.inner") == ["facts_bang.inner"]
    assert modules.submodules("facts_bang.deep") == names[1:3] and "facts_bang" not in sys.modules


def test_lineage_goes_through_stars_aliases_and_calls_and_ends_at_the_standard_library(write) -> None:
    write("facts_root.py", "import collections\nclass Root(collections.OrderedDict):\n    pass\n")
    write("facts_stars.py", "from facts_root import *\nmade = type('Made', (), {})\n")
    write("facts_leaf.py", "import facts_stars as s\nclass Mixin:\n    pass\nclass Leaf(Mixin, s.Root):\n    pass\n")
    write("facts_loop.py", "from facts_loop import Loop\n")
    assert modules.lineage("facts_leaf.Leaf") == ["facts_leaf", "facts_root"]
    assert modules.lineage("facts_stars.Root") == ["facts_root"]
    assert modules.lineage("facts_stars.made") == ["facts_stars"]
    assert modules.lineage("facts_loop.Loop") == ["facts_loop"]
    assert modules.lineage("collections.OrderedDict") == ["collections"]
    assert modules.lineage("facts_absent.Class") == modules.lineage("") == []


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("class A:\n    def encode(self): ...\n    def decode(self): ...\n", True),
        ("class A:\n    def quantize(self): ...\n    def dequantize(self): ...\n    def more(self): ...\n", True),
        ("class A:\n    def encode_groups(self): ...\n    def decode(self): ...\n", True),
        ("class A:\n    def encode(self): ...\nclass B:\n    def decode(self): ...\n", False),
        ("from kvbench.quantizers.affine import AffineQuantizer\nclass A(AffineQuantizer): ...\n", True),
        ("import kvbench.quantizers.affine as q\nclass A(q.AffineQuantizer): ...\n", True),
        ("from kvbench.quantizers.affine import AffineQuantizer\nclass A: ...\n", False),
        ("from kvbench.methods.kivi import Kivi\nclass A(Kivi): ...\n", False),
    ],
)
def test_a_quantizer_is_known_by_its_base_or_by_its_methods(write, text, expected) -> None:
    write("facts_quantizer.py", text)
    assert modules.is_quantizer("facts_quantizer", "kvbench.quantizers") is expected
    assert not modules.is_quantizer("facts_absent", "kvbench.quantizers")


def test_a_closure_follows_what_it_may_and_stops_at_closed_modules(write) -> None:
    write("facts_a.py", "import facts_b\nimport facts_x\n")
    write("facts_b.py", "import facts_c\nimport facts_a\n")
    write("facts_c.py", "import facts_d\n")
    write("facts_d.py", "")
    write("facts_x.py", "")

    def follow(name: str) -> bool:
        return name != "facts_x"

    assert set(modules.closure(["facts_a"], follow)) == {"facts_a", "facts_b", "facts_c", "facts_d"}
    assert set(modules.closure(["facts_a"], follow, ["facts_c"])) == {"facts_a", "facts_b", "facts_c"}
    assert set(modules.closure(["facts_d", "facts_absent"], follow)) == {"facts_d"}
    assert modules.closure(["facts_d"], follow)["facts_d"] == facts("facts_d")


def test_a_module_is_below_its_packages_by_whole_names() -> None:
    assert modules.below("a.b", ("x", "a")) and modules.below("a", ("a",))
    assert not modules.below("ab", ("a",)) and not modules.below("a", ("a.b",)) and not modules.below("a", ())


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
    for name in ("kvbench.methods.kivi", "kvbench", "json", "os.path", "torch", "pytest", "facts_absent"):
        assert not modules.own(name), name
    assert modules.standard("os.path") and not modules.standard("torch")
