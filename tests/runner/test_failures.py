"""Failures of a run: which one gives the run its status."""

import torch

from kvbench.runner.failures import Failures


def test_memory_that_ran_out_is_the_status_whatever_failed_before() -> None:
    failures = Failures("kivi int2")
    assert failures.status == "ok"
    failures.add("a", ValueError("a record without a question"), show=lambda line: None)
    assert failures.status == "error"
    failures.ran_out(torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."), "b")
    assert failures.status == "oom"
    assert failures.samples() == {"a"}
    assert failures.oom is not None and failures.oom["bytes_asked"] == 2 << 30
