"""Tokens in the formats of transformers' quantized cache, with a backend that is easy to check."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from kvbench.cache.segments.foreign import Fp8Segment, HFSegment, tensors
from kvbench.errors import CacheError
from tests import zoo

ALL, ONE = slice(None), slice(0, 1)


class Rounding:
    """A backend that rounds to halves, as hqq's objects look; it refuses more than 40 tokens."""

    def __init__(self) -> None:
        self.calls: list[tuple[int, int]] = []

    def _quantize(self, x: torch.Tensor, axis: int) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        assert x.is_contiguous() and len(x) == 1
        self.calls.append((x.shape[2], axis))
        if x.shape[2] > 40:
            raise ValueError("too many")
        return (2 * x.float()).round().to(torch.int8), {"scale": torch.tensor(0.5), "zero": torch.zeros(3)}

    def _dequantize(self, quantized: tuple[torch.Tensor, dict[str, torch.Tensor]]) -> torch.Tensor:
        return quantized[0].float() * 0.5


def new(multiple: int = 1) -> tuple[HFSegment, Rounding]:
    backend = Rounding()
    return HFSegment(2, 2, 32, torch.float16, "cpu", backend=backend, axis=1, multiple=multiple), backend


def halves(x: torch.Tensor) -> torch.Tensor:
    return (2 * x.float()).round() / 2


def test_each_row_is_quantized_again_as_a_whole():
    segment, backend = new(multiple=4)
    x = zoo.random_kv(9, 2)[0].half()
    assert segment.used(0) == {"codes": 0, "scales": 0} and segment.buffers() == [] and not segment.packed
    segment.append(ALL, x[:, :, :5])
    segment.append(ALL, x[:, :, 5:5])  # nothing
    segment.append(slice(1, 2), x[1:, :, 5:])
    assert segment.lengths == [5, 9] and backend.calls == [(8, 1), (8, 1), (12, 1)]
    assert torch.equal(segment.read(ONE, 1, 5, torch.float32), halves(x)[:1, :, 1:5])
    assert torch.equal(segment.read(slice(1, 2), 0, 9, torch.float32), halves(x)[1:])
    assert segment.read(ONE, 0, 2, torch.float16).dtype == torch.float16
    # the rest of a multiple is filled with the last token
    assert torch.equal(segment.rows[0][0][0, :, 5:], segment.rows[0][0][0, :, 4:5].expand(-1, 3, -1))
    assert segment.used(0) == {"codes": 8 * 2 * 32, "scales": 4 + 12}
    assert segment.used(1) == {"codes": 12 * 2 * 32, "scales": 4 + 12}
    assert [part for part, _ in segment.buffers()] == ["codes", "scales", "scales"] * 2


def test_what_the_backend_refuses_is_explained():
    segment, _ = new()
    with pytest.raises(CacheError, match="cannot take 41 tokens of 2 heads along axis 1: too many") as raised:
        segment.append(ALL, zoo.random_kv(41, 2)[0].half())
    assert "method.axis_key=0 method.axis_value=0" in str(raised.value)


def test_no_single_token_can_leave():
    segment, _ = new()
    segment.append(ALL, zoo.random_kv(5, 2)[0].half())
    for drop in (lambda: segment.drop_back(0, 1), lambda: segment.drop_front(ALL, 1)):
        with pytest.raises(TypeError, match="tokens cannot be removed from a HFSegment"):
            drop()


def test_rows_and_copies_share_quantized_tensors_and_nothing_else():
    segment, _ = new()
    x = zoo.random_kv(9, 2)[0].half()
    segment.append(ONE, x[:1, :, :5])
    segment.append(slice(1, 2), x[1:])
    twin, third = segment.clone(), segment.clone()
    third.append(ONE, x[:1, :, 5:])
    assert third.lengths == [9, 9] and torch.equal(segment.read(ONE, 0, 5, torch.float32), halves(x)[:1, :, :5])
    assert segment.read(ONE, 0, 9, torch.float32).shape[2] == 5
    segment.select(torch.tensor([1, 0, 1]))
    assert segment.lengths == [9, 5, 9] and twin.lengths == [5, 9]
    assert torch.equal(segment.read(ONE, 0, 9, torch.float32), halves(x)[1:])
    twin.append(ONE, x[:1, :, 5:])
    assert segment.lengths[1] == 5 and torch.equal(twin.read(ALL, 0, 9, torch.float32), halves(x))
    assert torch.equal(segment.read(slice(1, 2), 0, 5, torch.float32), halves(x)[:1, :, :5])


def test_tensors_of_quanto_are_found_too():
    codes, scale, shift = torch.zeros(4, dtype=torch.uint8), torch.ones(2), torch.ones(3)
    quantized = SimpleNamespace(_data=SimpleNamespace(_data=codes), _scale=scale, _shift=shift)
    pairs = tensors(quantized)
    assert [part for part, _ in pairs] == ["codes", "scales", "scales"]
    assert all(a is b for (_, a), b in zip(pairs, (codes, scale, shift), strict=True))


def test_tokens_in_fp8_have_the_scale_of_their_rows_first_ones():
    """Codes are appended, none is quantized again; the newest can be dropped."""

    class Eighths:
        """Codes are eighths of the scale, which the first tokens set."""

        def _quantize(self, x: torch.Tensor, scale: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
            scale = x.float().abs().amax() if scale is None else scale
            return (x.float() / scale * 8).round().to(torch.int8), scale

        def _dequantize(self, quantized: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
            return quantized[0].float() / 8 * quantized[1]

    def rounded(x: torch.Tensor, first: int) -> torch.Tensor:
        scale = x[:, :, :first].float().abs().amax()
        return (x.float() / scale * 8).round() / 8 * scale

    segment = Fp8Segment(2, 2, 32, torch.float16, "cpu", backend=Eighths(), axis=0)
    x = zoo.random_kv(9, 2)[0].half()
    segment.append(ALL, x[:, :, :3])
    segment.append(ALL, x[:, :, 3:3])  # nothing
    segment.append(slice(1, 2), x[1:, :, 3:8])
    segment.append(slice(1, 2), x[1:, :, 8:])
    assert segment.lengths == [3, 9]
    assert torch.equal(segment.read(ONE, 0, 3, torch.float32), rounded(x[:1], 3)[:, :, :3])
    assert torch.equal(segment.read(slice(1, 2), 0, 9, torch.float32), rounded(x[1:], 3))
    assert segment.used(1) == {"codes": 9 * 2 * 32, "scales": 4}
    segment.drop_back(1, 2)
    segment.append(slice(1, 2), x[1:, :, 7:8])
    assert segment.lengths == [3, 8]
    assert torch.equal(segment.read(slice(1, 2), 0, 8, torch.float32), rounded(x[1:], 3)[:, :, :8])
