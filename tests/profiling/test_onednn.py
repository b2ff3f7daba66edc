"""oneDNN is in use again after memory ended inside it."""

from __future__ import annotations

import pytest
import torch

from kvbench.profiling import device


@pytest.mark.parametrize("strict", [True, False])
def test_what_torch_left_is_taken_up_again(strict: bool) -> None:
    def block() -> None:
        with device.kept(strict=strict):
            torch.backends.mkldnn.enabled = False  # as torch does

    if strict:
        with pytest.raises(MemoryError, match="oneDNN"):
            block()
    else:
        block()
    assert torch.backends.mkldnn.enabled


def test_an_error_of_the_block_stays_that_error() -> None:
    with pytest.raises(RuntimeError, match="you tried to allocate 5 bytes"), device.kept(strict=True):
        torch.backends.mkldnn.enabled = False
        raise RuntimeError("can't allocate memory: you tried to allocate 5 bytes")
    assert torch.backends.mkldnn.enabled


def test_what_was_off_before_stays_off() -> None:
    with torch.backends.mkldnn.flags(enabled=False):
        with device.kept(strict=True):
            pass
        assert not torch.backends.mkldnn.enabled


def test_without_a_switch_nothing_is_raised() -> None:
    with device.kept(strict=True):
        pass
    assert torch.backends.mkldnn.enabled
