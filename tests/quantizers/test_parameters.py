"""Descriptions of parameters: shapes, rows and bytes for groups of channels, of tokens, and of windows."""

import pytest
import torch

from kvbench.quantizers.affine import Parameter


@pytest.mark.parametrize(
    ("parameter", "shape", "block", "nbytes"),
    [
        (Parameter(torch.float32), (256, 1), (1, 1), 256 * 4),
        (Parameter(torch.float16, "token", 32), (256, 4), (1, 1), 256 * 4 * 2),
        (Parameter(torch.uint8, "token", 16, padding=2), (256, 10), (1, 1), 2560),
        (Parameter(torch.float16, "channel", 128), (2, 128), (128, 1), 2 * 128 * 2),
        (Parameter(torch.float16, "channel", 43, window=85), (6, 128), (85, 2), 6 * 128 * 2),
    ],
)
def test_shapes_rows_and_bytes(parameter, shape, block, nbytes):
    assert parameter.shape(256, 128) == shape
    assert (parameter.block_tokens, parameter.block_rows) == block
    assert parameter.nbytes(256, 128) == nbytes
    assert parameter.row(3 * block[0]) == 3 * block[1]
