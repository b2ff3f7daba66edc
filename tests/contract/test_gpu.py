"""On a GPU: every method gives what it gives on the CPU, and a padded row what it gives alone."""

import pytest
import torch

from kvbench.cache import Prompts
from kvbench.decoding import generate
from kvbench.methods import load_method
from tests import zoo
from tests.contract import subjects
from tests.contract.test_methods import MISSING, fields

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
LENGTHS = [228, 251, 246]


def made(name):
    """The method, unless a package that it needs is not installed."""
    if MISSING.get(name):
        pytest.skip(MISSING[name])
    if name == "cocktail":
        pytest.importorskip("bm25s")
    return load_method(name, **fields(name))


def answer(method, model, ids, mask, device, **kwargs):
    ids, mask = ids.to(device), None if mask is None else mask.to(device)
    prompts = Prompts.from_batch(ids, mask, decode=lambda ids: " ".join(map(str, ids)))
    cache = method.new_cache(model, prompts)
    result = generate(model, cache, ids, mask, max_new_tokens=32, answer_ids=[[5, 9, 11]] * len(ids), **kwargs)
    method.detach(model)
    return result, cache.bill()


@pytest.mark.parametrize("name", subjects.names())
def test_fp32_on_the_gpu_equals_the_cpu(name):
    method = made(name)
    ids, mask = zoo.padded_batch(LENGTHS)
    on_cpu, bill = answer(method, zoo.model("llama"), ids, mask, "cpu")
    model = zoo.model("llama").cuda()
    try:
        on_gpu, gpu_bill = answer(method, model, ids, mask, "cuda")
    finally:
        model.cpu()
    assert gpu_bill.used == bill.used
    for (a, _), (b, _) in zip(on_gpu.answer_nll, on_cpu.answer_nll, strict=True):
        assert a == pytest.approx(b, rel=1e-3)
    assert on_gpu.tokens == on_cpu.tokens


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", subjects.names())
def test_a_padded_row_equals_the_row_alone(name, dtype):
    method = made(name)
    model = zoo.model("llama", dtype).cuda()
    ids, mask = zoo.padded_batch(LENGTHS)
    together, bill = answer(method, model, ids, mask, "cuda")
    for row, length in enumerate(LENGTHS):
        alone, _ = answer(method, model, ids[row : row + 1, -length:], None, "cuda")
        # 16-bit sums differ in their last bits between batch shapes
        assert alone.answer_nll[0][0] == pytest.approx(together.answer_nll[row][0], rel=0.02)
    assert bill.used.total > 0
