"""Tokens of a captured step: written where a table in device memory says, by torch or by the kernel."""

from __future__ import annotations

import pytest
import torch

from kvbench.cache.kernels.at_once import append
from kvbench.cache.kernels.jobs import addresses, upload
from tests.cache.packing import interpreted

interpreted()

from kvbench.cache.kernels.exact_kernels import write_new_tokens  # noqa: E402


def by_kernel(keys, values, key_buffer, value_buffer, places) -> None:
    """The kernel as a GPU would run it."""
    batch, heads, count, channels = keys.shape
    write_new_tokens[(batch * heads, count, 2)](
        keys, values, key_buffer, value_buffer, places, *keys.stride()[:3], *values.stride()[:3],
        heads, key_buffer.shape[2], value_buffer.shape[2], channels, values.shape[3],
    )  # fmt: skip


class OnGpu(torch.Tensor):
    """A tensor that says it is on a GPU."""

    is_cuda = True


def by_launch(keys, values, *others) -> None:
    """The launch of the kernel as on a GPU; channels that are not contiguous are copied first."""
    keys, values = (torch.stack([x, x], -1)[..., 0] for x in (keys, values))
    append(keys.as_subclass(OnGpu), values.as_subclass(OnGpu), *others)


@pytest.mark.parametrize("do", [append, by_kernel, by_launch])
def test_new_tokens_are_written_at_the_places_of_their_rows_and_nothing_else_changes(do):
    generator = torch.Generator().manual_seed(0)
    keys = torch.randn(2, 2, 3, 24, generator=generator)  # channels need not be a power of two
    values = torch.randn(2, 3, 2, 16, generator=generator).transpose(1, 2)  # token by token, as models make them
    key_buffer, value_buffer = torch.randn(2, 2, 10, 24), torch.randn(2, 2, 7, 16)
    wanted = key_buffer.clone(), value_buffer.clone()
    for row, (key, value) in enumerate(((4, 0), (7, 3))):
        wanted[0][row, :, key : key + 3] = keys[row]
        wanted[1][row, :, value : value + 3] = values[row]
    do(keys, values, key_buffer, value_buffer, torch.tensor([[4, 0], [7, 3]], dtype=torch.int32))
    assert torch.equal(key_buffer, wanted[0]) and torch.equal(value_buffer, wanted[1])


def test_tables_are_copied_once_and_can_be_used_outside_of_inference_mode():
    cpu = torch.device("cpu")
    with torch.inference_mode():
        table = upload([[1, 2], [3, 4]], torch.int32, cpu)
        numbers = addresses((1 << 40, 5), cpu)
    assert table.tolist() == [[1, 2], [3, 4]] and table.dtype == torch.int32
    assert not table.is_inference() and not numbers.is_inference()
    assert numbers.tolist() == [1 << 40, 5] and numbers.dtype == torch.int64
    assert addresses((1 << 40, 5), cpu) is numbers and addresses((5, 1 << 40), cpu) is not numbers
