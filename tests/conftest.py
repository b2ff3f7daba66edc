"""Set-up of all tests: Triton's interpreter on machines without a GPU, bytecode on disk, a quick garbage collector."""

import atexit
import gc
import os
import sys
import tempfile
import zlib
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml


def _gpu() -> bool:
    """Return True if torch can use a GPU, which CUDA_VISIBLE_DEVICES="" may prevent in spite of a driver."""
    if not os.path.exists("/dev/nvidiactl"):
        return False
    import torch

    return torch.cuda.is_available()


if not _gpu():  # must be known before anything imports triton
    os.environ.setdefault("TRITON_INTERPRET", "1")

# bm25s calls JAX while it is imported, where JAX is installed, and on a GPU JAX takes three quarters of the memory then
os.environ.setdefault("JAX_PLATFORMS", "cpu")

# the same arithmetic on every CPU; tests of the choice take this away
os.environ["KVBENCH_ARITHMETIC"] = "storage"

# wandb stages files in the home folder, which need not be one that can be written
os.environ.setdefault("WANDB_DATA_DIR", tempfile.gettempdir())

# tests start kvbench a hundred times; without bytecode on disk each of them, and each worker, compiles all source again
sys.dont_write_bytecode = False
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
os.environ["HF_TOKEN_PATH"] = os.devnull  # no test asks the hub in the name of whoever runs it
os.fsync = lambda descriptor: None  # nobody pulls the plug; a test of what waits for the disk sets its own

# libyaml reads what yaml's own parser reads, ten times as fast: tests compose hundreds of configurations
yaml.SafeLoader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)

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
    "cli/test_plan.py",
    "tasks/test_longbench.py",
    "results/test_tables.py",
    "hub/test_end_to_end.py",
    "test_imports.py",
)
#: the same for tests on a GPU, of which `make test-gpu` hands out one after the other: those that compile most
LONG_GPU = (
    "attention/test_triton_gpu.py",
    "attention/test_logits_gpu.py",
    "attention/test_fused.py",
    "decoding/test_unwritten_gpu.py",
    "decoding/test_graphs_gpu.py",
    "attention/test_codebook_gpu.py",
    "cache/test_pack_gpu.py",
    "contract/test_gpu.py",
    "attention/test_cuda_decode.py",
)


def part(text: str) -> tuple[int, int]:
    """Read ``2/3``, the second of three parts of the tests."""
    number, parts = map(int, text.split("/"))
    if not 1 <= number <= parts:
        raise ValueError(text)
    return number, parts


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add ``--part``, for machines whose time is short, and ``--methods``, for methods outside the tree."""
    parser.addoption("--part", type=part, default=(1, 1), metavar="I/N", help="run the i-th of n parts, such as 2/3")
    parser.addoption(
        "--methods", metavar="DIR", help="run the contract tests, and over the methods of a folder (DIR/method/*) alone"
    )


def pytest_configure(config: pytest.Config) -> None:
    """Choose the methods of ``--methods``, and the contract tests unless other files are named."""
    if config.getoption("--methods") is None:
        return
    from tests.contract import subjects

    subjects.choose(config.getoption("--methods"))
    if config.args_source is not pytest.Config.ArgsSource.ARGS:
        config.args = [str(Path(__file__).parent / "contract")]


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave the tests of this part, and put those of :data:`LONG` files first.

    ``make test`` hands files out in this order (``--no-loadscope-reorder``), ``make test-gpu`` tests. A test's name
    decides its part: neighbours differ in one parameter, such as the kernel, of which one takes longer.
    """
    if config.getoption("--methods") is not None:
        held = [item for item in items if _names_a_method(item)]
        config.hook.pytest_deselected(items=[item for item in items if item not in held])
        items[:] = held
    number, parts = config.getoption("part")
    shares: tuple[list[pytest.Item], list[pytest.Item]] = [], []
    for item in items:
        shares[zlib.crc32(item.nodeid.encode()) % parts == number - 1].append(item)
    config.hook.pytest_deselected(items=shares[False])
    items[:] = sorted(shares[True], key=place)


def _names_a_method(item: pytest.Item) -> bool:
    """Return True for a case of the contract: a test with the parameter `name`."""
    return "name" in getattr(getattr(item, "callspec", None), "params", {})


def place(item: pytest.Item) -> int:
    """Return the place of a test's file among the long ones."""
    long, file = LONG_GPU if item.get_closest_marker("gpu") else LONG, item.path.as_posix()
    return next((place for place, name in enumerate(long) if file.endswith(name)), len(long))


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
    """Freeze what the tests of a file have left, such as modules, and models that files share.

    Tests on a GPU give back memory that torch keeps for later: other processes may need it.
    """
    yield
    torch = sys.modules.get("torch")
    if item.get_closest_marker("gpu") and torch is not None and torch.cuda.is_initialized():
        torch.cuda.empty_cache()
    if nextitem is None or nextitem.path != item.path:
        _freeze()


# Triton's bindings print a page about objects that outlive the interpreter, which collects once more as it ends; pytest
# collects before, twice, a second each if nothing were frozen
atexit.register(gc.unfreeze)
