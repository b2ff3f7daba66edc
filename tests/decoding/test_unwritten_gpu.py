"""No answer depends on memory that nobody wrote: all memory that is free is NaN before each pass and each replay.

A recorded step reads fixed addresses. What it reads must be written by itself, or held by somebody: a tensor that was
freed after the capture still has the right numbers, for as long as nothing else is put in its place.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kvbench.cache import Prompts
from kvbench.cache.progress import Kernels, Options
from kvbench.decoding.autoregressive import generate
from kvbench.decoding.segments import Segments
from kvbench.methods import load_method
from tests import zoo
from tests.decoding.test_graphs_gpu import SETTINGS
from tests.decoding.test_graphs_sliding import model_of as sliding

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    # torch fills what it allocates only where it looks for operations that are not deterministic
    pytest.mark.filterwarnings("ignore:.*does not have a deterministic implementation:UserWarning"),
]

PROMPT, NEW = 300, 80
#: methods that no other test captures
MORE: dict[str, tuple[str, dict[str, Any]]] = {
    "cocktail": ("cocktail", {"encoder": "bm25"}),
    "keep": ("keep", {}),
    "kvquant": ("kvquant", {}),
    "oscar": ("oscar", {}),
    "turboquant": ("turboquant", {"boundary": 0}),
}
METHODS = SETTINGS | MORE
WAYS = {"eager": ("never", False), "captured": ("always", False), "compiled": ("always", True)}


def poison() -> int:
    """Make all memory that torch's allocator holds for nobody NaN in any floating-point dtype; return its bytes."""
    torch.cuda.synchronize()
    device, filled = torch.device("cuda", torch.cuda.current_device()), 0
    for segment in torch.cuda.memory_snapshot():
        address = segment["address"]
        for block in segment["blocks"]:
            if block["state"] == "inactive":
                storage = torch._C._construct_storage_from_data_pointer(address, device, block["size"])
                torch.empty(0, dtype=torch.uint8, device=device).set_(storage).fill_(255)
                filled += block["size"]
            address += block["size"]
    torch.cuda.synchronize()
    return filled


@pytest.fixture
def unwritten(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A function that makes free memory NaN from then on, before each pass of a model and each replay of a graph.

    What is allocated without being written is NaN too, also where a graph allocates it.
    """
    filled: list[int] = []
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()

    def begin(model: Any) -> list[int]:
        def first(*_: Any) -> None:
            if not torch.cuda.is_current_stream_capturing():
                filled.append(poison())

        replay = Segments.replay
        monkeypatch.setattr(Segments, "replay", lambda self: (first(), replay(self)))
        hooks.append(model.register_forward_pre_hook(first))
        torch.use_deterministic_algorithms(True, warn_only=True)
        monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", True)
        return filled

    hooks: list[Any] = []
    yield begin
    for hook in hooks:
        hook.remove()
    torch.use_deterministic_algorithms(before[0], warn_only=before[1])


@pytest.fixture(scope="module")
def tiny() -> Any:
    """The bundled model in bf16."""
    from experiments.kernels.greedy import load_on_device

    return load_on_device("tiny", "cuda")[0]


def other(name: str) -> Any:
    """A random model in bf16; one layer's attention slides over the newest 200 tokens."""
    model = zoo.capped(name, sliding_window=200).eval() if name in zoo.CAPPED else sliding(name, 200)
    return model.to(torch.bfloat16).cuda()


def answer(model: Any, name: str, kernels: Kernels, way: str) -> tuple[Any, ...]:
    """Tokens, likelihoods and bytes of two prompts, one of them padded; by what they were decoded, and how."""
    base, options = METHODS[name]
    if base == "cocktail":
        pytest.importorskip("bm25s")
    method = load_method(base, **options)
    generator = torch.Generator().manual_seed(5)
    ids = torch.randint(3, model.config.vocab_size, (2, PROMPT), generator=generator).cuda()
    mask = torch.ones_like(ids)
    mask[1, :7] = 0
    prompts = Prompts.from_batch(ids, mask, decode=lambda row: " ".join(map(str, row)))
    cache = method.new_cache(model, prompts, max_length=PROMPT + NEW)
    cache.options = Options(kernels=kernels)
    graphs, compiled = WAYS[way]
    try:
        made = generate(
            model, cache, ids, mask, max_new_tokens=NEW, answer_ids=[[5, 9, 11]] * 2, graphs=graphs, compile=compiled
        )
        return made.tokens, made.answer_nll, cache.bill().as_dict(), cache.path, made.stepping
    finally:
        method.detach(model)


def agrees(model: Any, unwritten: Any, name: str, kernels: Kernels, way: str) -> None:
    wanted = answer(model, name, kernels, way)
    if way != "eager" and wanted[-1].startswith("eager"):
        pytest.skip(f"its steps are {wanted[-1]}")
    filled = unwritten(model)
    assert answer(model, name, kernels, way) == wanted
    assert min(filled) > 0 and len(filled) > NEW // 8  # rounds of several tokens are fewer


@pytest.mark.parametrize("kernels", ["cuda", "triton"])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", METHODS)
def test_methods(tiny: Any, unwritten: Any, name: str, way: str, kernels: Kernels) -> None:
    """Eager, captured and compiled steps of the bundled model."""
    agrees(tiny, unwritten, name, kernels, way)


@pytest.mark.parametrize("kernels", ["cuda", "triton"])
@pytest.mark.parametrize("way", ["captured", "compiled"])
@pytest.mark.parametrize("name", ["fp16", "kivi", "atom"])
@pytest.mark.parametrize("model_name", ["qwen2", *zoo.CAPPED])
def test_models(unwritten: Any, model_name: str, name: str, way: str, kernels: Kernels) -> None:
    """Biases of projections that are one product, softcaps, sinks, experts, sliding windows."""
    agrees(other(model_name), unwritten, name, kernels, way)
