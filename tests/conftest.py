"""Set-up of all tests: Triton's interpreter on machines without a GPU, bytecode on disk, a quick garbage collector."""

import gc
import os
import sys

import pytest

if not os.path.exists("/dev/nvidiactl"):  # must be known before anything imports triton
    os.environ.setdefault("TRITON_INTERPRET", "1")

# tests start kvbench a hundred times; without bytecode on disk each of them, and each worker, compiles all source again
sys.dont_write_bytecode = False
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
os.fsync = lambda descriptor: None  # nobody pulls the plug; a test of what waits for the disk sets its own

#: files of few tests that take long: begun first, as the last file that begins holds up the end
LONG = (
    "contract/test_methods.py",
    "runner/test_run_kill.py",
    "parallel/test_tensor_parallel.py",
    "attention/test_triton_decode.py",
    "cache/test_pack_together.py",
    "cache/test_pack_kernel.py",
    "decoding/test_rounds.py",
    "measure/test_meter.py",
    "bench/test_points.py",
    "experiments/test_tiny_evaluate.py",
    "experiments/test_quantspec.py",
    "runner/test_stored.py",
    "runner/test_sources.py",
    "cli/test_sweep.py",
    "cli/test_cli_nonsense.py",
    "tasks/test_longbench.py",
    "results/test_tables.py",
    "hub/test_end_to_end.py",
    "test_imports.py",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put the :data:`LONG` files first; ``make test`` hands files out in this order (``--no-loadscope-reorder``)."""
    items.sort(key=lambda item: not item.path.as_posix().endswith(LONG))


def _freeze() -> None:
    """Take the objects that are alive out of the garbage collector's sight.

    Torch, transformers and the tests themselves are a million objects that live until the end. Every run collects
    garbage and looks for live tensors, which takes half a second among all of these.
    """
    gc.collect()
    gc.freeze()


def pytest_collection_finish(session: pytest.Session) -> None:
    """Freeze what imports and collection have made."""
    _freeze()


def pytest_runtest_logfinish(nodeid: str) -> None:
    """Freeze what the tests of a file have left (models that all files share, modules), once for each file."""
    file = nodeid.partition("::")[0]
    if _frozen_after.get("file", file) != file:
        _freeze()
    _frozen_after["file"] = file


#: file of the test that ended last
_frozen_after: dict[str, str] = {}
