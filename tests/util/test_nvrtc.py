"""Calls of the CUDA driver and of nvrtc, without a GPU."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from kvbench.util import nvrtc


def test_a_call_of_the_driver_gives_its_value_or_raises() -> None:
    fine, failed = SimpleNamespace(value=0), SimpleNamespace(value=700)
    assert nvrtc.ask((fine, 5)) == 5 and nvrtc.ask((fine,)) == () and nvrtc.ask((fine, 1, 2)) == (1, 2)
    with pytest.raises(RuntimeError, match="CUDA: namespace"):
        nvrtc.ask((failed, 5))
