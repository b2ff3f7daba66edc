"""The kernels of a step, interpreted on a CPU: what they write is the product with the transform's matrices."""

import pytest
import torch

from tests.cache.packing import interpreted

interpreted()

from kvbench.rotation import Transform, transform  # noqa: E402
from kvbench.rotation import basis as kernel  # noqa: E402
from kvbench.rotation.named import butterfly_transform  # noqa: E402
from kvbench.rotation.step import step  # noqa: E402

CPU = torch.device("cpu")
HEADS, GROUP, BATCH, COUNT = 2, 3, 2, 3


def basis(name: str, size: int) -> Transform | None:
    generator = torch.Generator().manual_seed(size)
    if name == "matrix":
        return Transform.of(torch.randn(size, size, generator=generator, dtype=torch.float64))
    if name == "heads":
        own = torch.randn(HEADS, size, size, generator=generator, dtype=torch.float64)
        return Transform.of(torch.linalg.qr(own)[0])
    if name == "pairs":
        return butterfly_transform(2, size)
    return transform(name, "key", size, CPU)


def tensors(size: int, value_size: int, count: int = COUNT) -> list[torch.Tensor]:
    """Queries, keys and values as models make them: token by token, so that heads and tokens are exchanged."""
    generator = torch.Generator().manual_seed(1)
    shapes = ((HEADS * GROUP, size), (HEADS, size), (HEADS, value_size))
    return [torch.randn(BATCH, count, *shape, generator=generator).transpose(1, 2) for shape in shapes]


@pytest.mark.parametrize(
    ("key", "value", "size"),
    [
        ("hadamard", "rht", 64),
        ("rht_unnormalised", "none", 24),
        ("none", "hadamard", 16),
        ("matrix", "pairs", 24),
        ("heads", "matrix", 16),
        ("blocks:8", "heads", 80),
    ],
)
@pytest.mark.parametrize("placed", [True, False])
def test_a_step_is_rotated_in_one_launch_and_written_where_the_table_says(key, value, size, placed):
    q, k, v = tensors(size, 16)
    first, second = basis(key, size), basis(value, 16)
    wanted = (
        q if first is None else first.queries(q),
        k if first is None else first.keys(k),
        v if second is None else second.values(v),
    )
    buffers = torch.zeros(BATCH, HEADS, 9, size), torch.zeros(BATCH, HEADS, 7, 16)
    places = torch.tensor([[4, 0], [2, 3]], dtype=torch.int32)
    query, keys, values = step(q, k, v, first, second, *((*buffers, places) if placed else ()))
    assert torch.allclose(query, wanted[0], atol=1e-5)
    if not placed:
        assert torch.allclose(keys, wanted[1], atol=1e-5) and torch.allclose(values, wanted[2], atol=1e-5)
        return
    assert keys is buffers[0] and values is buffers[1]
    for row, (a, b) in enumerate(places.tolist()):
        assert torch.allclose(keys[row, :, a : a + COUNT], wanted[1][row], atol=1e-5)
        assert torch.allclose(values[row, :, b : b + COUNT], wanted[2][row], atol=1e-5)
    assert int((keys != 0).any(-1).sum()) == int((values != 0).any(-1).sum()) == BATCH * HEADS * COUNT


@pytest.mark.parametrize(("name", "size"), [("hadamard", 96), ("rht_unnormalised", 80), ("octave", 64), ("heads", 16)])
@pytest.mark.parametrize("use", ["forward", "dual", "inverse"])
def test_one_tensor_is_multiplied_by_any_of_the_matrices(name, size, use):
    x, one = tensors(size, 16)[0], basis(name, size)
    wanted = {"forward": one.keys, "dual": one.queries, "inverse": one.back}
    if use == "forward":
        x = x[:, :HEADS]
    got = kernel.rotated(x, getattr(one, use), one.butterfly, use)
    assert torch.allclose(got, wanted[use](x), atol=1e-5)
    assert got.stride() == torch.empty_like(x).stride()


def test_many_tokens_share_a_matrix_per_program(monkeypatch):
    """Sixteen lines per program, the last of which are missing."""
    monkeypatch.setattr(kernel, "PROGRAMS", 10)
    q, k, v = tensors(16, 16, count=11)
    first = basis("heads", 16)
    query, keys, _ = step(q, k, v, first, basis("matrix", 16))
    assert torch.allclose(query, first.queries(q), atol=1e-5) and torch.allclose(keys, first.keys(k), atol=1e-5)
    assert kernel.per_program(11, dense=True) == 16 and kernel.per_program(11, dense=False) == 1


def test_sixteen_bits_are_rotated_in_fp32():
    """As by the product in fp32, but for numbers between two of fp16."""
    given = [x.half() * 30 for x in tensors(64, 64)]
    one = basis("rht", 64)
    for got, x in zip(step(*given, one, one), given, strict=True):
        wanted = one.keys(x.float())
        assert got.dtype == x.dtype == torch.float16
        assert bool(((got.float() - wanted).abs() <= wanted.abs() * 2**-11 + 1e-5).all())
