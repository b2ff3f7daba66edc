"""Set-up of all tests: Triton's interpreter on machines without a GPU, bytecode on disk, a quick garbage collector."""

import gc
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest


def _gpu() -> bool:
    """Return True if torch can use a GPU, which CUDA_VISIBLE_DEVICES="" may prevent in spite of a driver."""
    if not os.path.exists("/dev/nvidiactl"):
        return False
    import torch

    return torch.cuda.is_available()


if not _gpu():  # must be known before anything imports triton
    os.environ.setdefault("TRITON_INTERPRET", "1")

# tests start kvbench a hundred times; without bytecode on disk each of them, and each worker, compiles all source again
sys.dont_write_bytecode = False
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
os.environ["HF_TOKEN_PATH"] = os.devnull  # no test asks the hub in the name of whoever runs it
os.fsync = lambda descriptor: None  # nobody pulls the plug; a test of what waits for the disk sets its own

#: files that take long, the longest first: they begin in this order, as the last file that begins holds up the end
LONG = (
    "contract/test_methods.py",
    "decoding/test_rounds.py",
    "attention/test_cuda_emulated.py",
    "docs/test_commands.py",
    "config/test_run_config.py",
    "cli/test_cli_nonsense.py",
    "decoding/test_graphs.py",
    "cache/test_sliding.py",
    "runner/test_run_kill.py",
    "parallel/test_tensor_parallel.py",
    "attention/test_triton_decode.py",
    "cache/test_pack_together.py",
    "cache/test_pack_kernel.py",
    "measure/test_meter.py",
    "bench/test_points.py",
    "experiments/test_tiny_evaluate.py",
    "experiments/test_quantspec.py",
    "runner/test_stored.py",
    "runner/test_sources.py",
    "cli/test_sweep.py",
    "tasks/test_longbench.py",
    "results/test_tables.py",
    "hub/test_end_to_end.py",
    "test_imports.py",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put the :data:`LONG` files first; ``make test`` hands files out in this order (``--no-loadscope-reorder``)."""
    places: dict[Path, int] = {}
    for item in items:
        if item.path not in places:
            file = item.path.as_posix()
            places[item.path] = next((place for place, name in enumerate(LONG) if file.endswith(name)), len(LONG))
    items.sort(key=lambda item: places[item.path])


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


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> Iterator[None]:
    """Freeze what the tests of a file have left, such as modules, and models that files share."""
    yield
    if nextitem is None or nextitem.path != item.path:
        _freeze()


def pytest_unconfigure(config: pytest.Config) -> None:
    """Let what was frozen go: Triton's bindings print a page about objects that outlive the interpreter."""
    gc.unfreeze()
    gc.collect()
