"""4-bit weights: packing and its inverse, products by the operation, stacks, refusals."""

from __future__ import annotations

import pytest
import torch
from torch import library

from kvbench.linear import int4, layout


def parts(rows: int, columns: int, group: int, dtype: torch.dtype = torch.float16) -> tuple[torch.Tensor, ...]:
    """Random codes, scales and zeros; all zeros from 0 to 16 occur in larger matrices."""
    rng = torch.Generator().manual_seed(rows + columns)
    codes = torch.randint(0, 16, (rows, columns), generator=rng, dtype=torch.uint8)
    scales = (torch.rand(rows, columns // group, generator=rng) * 0.02 + 0.001).to(dtype)
    return codes, scales, torch.randint(0, 17, scales.shape, generator=rng, dtype=torch.uint8)


def exact(codes: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor) -> torch.Tensor:
    """The weights in fp32, number by number."""
    group = codes.shape[1] // scales.shape[1]
    spread = [t.float().repeat_interleave(group, 1) for t in (scales, zeros)]
    return (codes.float() - spread[1]) * spread[0]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("rows", "columns", "group"), [(48, 256, 128), (16, 192, 64), (7, 96, 32), (33, 128, 128)])
def test_packed_codes_come_back(rows: int, columns: int, group: int, dtype: torch.dtype) -> None:
    given = parts(rows, columns, group, dtype)
    weight = int4.pack(*given)
    assert (weight.rows, weight.columns, weight.group, weight.dtype) == (rows, columns, group, dtype)
    for part, back in zip(given, int4.unpacked(weight), strict=True):
        assert part.dtype == back.dtype and torch.equal(part, back)
    assert weight.codes.shape == (-(-rows // 16), -(-columns // 64), 32, 4)
    assert weight.nbytes == 4 * (weight.codes.numel() + weight.groups.numel()) and weight.to("cpu") is weight
    assert torch.equal(int4.dequantized(weight, torch.float32), exact(*given))
    assert torch.equal(int4.dequantized(weight, torch.bfloat16), exact(*given).bfloat16())


def test_dequantizing_in_slices_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = int4.pack(*parts(70, 128, 64))
    whole = int4.dequantized(weight, torch.float32)
    monkeypatch.setattr(int4, "SLICE", 32)
    assert torch.equal(int4.dequantized(weight, torch.float32), whole)


def test_a_lane_has_the_numbers_of_its_matrix_instructions() -> None:
    """The layout restated: for each instruction, lane and half register, the output and the input channel."""
    codes = parts(32, 128, 32)[0]
    words = layout.fragments(codes)
    for lane in range(32):
        g, t = divmod(lane, 4)
        for step in range(4):
            word = int(words[1, 1, lane, step]) & 0xFFFFFFFF
            for register in range(4):  # of the fragment: a0 and a2 hold row g, a1 and a3 row g + 8
                pair = word >> 4 * register & 0x000F000F
                first = 64 + 32 * (step // 2) + 8 * t + 4 * (step % 2) + 2 * (register // 2)
                row = 16 + g + 8 * (register % 2)
                assert [pair & 0xFFFF, pair >> 16] == codes[row, first : first + 2].tolist()


def test_the_word_of_a_group_holds_its_scale_and_zero() -> None:
    scales, zeros = parts(16, 128, 64, torch.bfloat16)[1:]
    words = layout.group_words(scales, zeros)
    for g in range(8):
        for row in range(2):
            word = words[0, 1, g, row].view(1).view(torch.bfloat16)
            assert word[0] == scales[g + 8 * row, 1] and word[1] == 128 + zeros[g + 8 * row, 1]


def test_stacked_matrices_are_one() -> None:
    for sizes in ((32, 16, 16), (33, 16, 8)):
        each = [int4.pack(*parts(rows, 128, 64)) for rows in sizes]
        stack = int4.stacked(each)
        assert stack.rows == sum(sizes) and stack.columns == 128
        whole = torch.cat([int4.dequantized(weight, torch.float32) for weight in each])
        assert torch.equal(int4.dequantized(stack, torch.float32), whole)
    with pytest.raises(ValueError, match="agree in"):
        int4.stacked([int4.pack(*parts(16, 128, 64)), int4.pack(*parts(16, 128, 32))])


def test_the_product_is_one_operation_for_the_compiler() -> None:
    weight, bias = int4.pack(*parts(40, 128, 64)), torch.randn(40)
    exactly = int4.dequantized(weight, torch.float32)
    for dtype in (torch.float32, torch.bfloat16):
        x = torch.randn(2, 3, 128).to(dtype)
        wanted = torch.nn.functional.linear(x.float(), exactly, bias)
        out = int4.product(x, weight, bias.to(dtype))
        assert out.dtype == dtype and out.shape == (2, 3, 40)
        torch.testing.assert_close(out.float(), wanted, rtol=0, atol=1e-5 if dtype == torch.float32 else 3e-2)
    x = torch.randn(5, 128)
    seen: list[str] = []

    def backend(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> torch.nn.Module:
        seen.extend(str(node.target) for node in graph.graph.nodes if node.op == "call_function")
        return graph

    compiled = torch.compile(lambda x: int4.product(x, weight), backend=backend, fullgraph=True)
    assert torch.equal(compiled(x), int4.product(x, weight))
    assert sum("int4_product" in name for name in seen) == 1
    fields = (weight.codes, weight.groups, weight.rows, weight.columns, weight.group, True)
    library.opcheck(torch.ops.kvbench.int4_product, (x, *fields))
    library.opcheck(torch.ops.kvbench.int4_product, (x, *fields, bias))


def test_matrices_that_are_none_are_refused() -> None:
    codes, scales, zeros = parts(16, 128, 64)
    for given, message in (
        ((codes, scales[:, :0], zeros), "128 input channels have 0 scales per output channel"),
        (
            (codes[:, :80], scales, zeros),
            "80 input channels have 2 scales per output channel: expected groups of 128, 64",
        ),
        ((codes, scales[:8], zeros), "need scales and zeros of shape"),
        ((codes, scales.float(), zeros), "scales must be float16 or bfloat16, not float32"),
        ((codes + 16, scales, zeros), "4 bits hold 0 to 15"),
        ((codes, scales, zeros + 17), "zeros must be from 0 to 16"),
    ):
        with pytest.raises(ValueError, match=message):
            int4.pack(*given)
    with pytest.raises(RuntimeError):
        int4.product(torch.randn(2, 64), int4.pack(codes, scales, zeros))
