"""Thinning of LogQuant's windows: the kernel, run by Triton's interpreter, and its order among deferred packs."""

import pytest
import torch

from tests.attention import interpreter

interpreter.require()

from kvbench.cache.kernels import pack_together  # noqa: E402
from kvbench.cache.kernels.pack_together import Thin  # noqa: E402


@pytest.mark.parametrize(("count", "length", "channels"), [(42, 126, 64), (3, 9, 48), (20, 41, 64), (1, 2, 32)])
@pytest.mark.parametrize("elements", [8192, 512], ids=["one block", "several blocks"])
def test_every_second_of_the_oldest_tokens_goes(monkeypatch, count, length, channels, elements):
    monkeypatch.setattr(pack_together, "ELEMENTS", elements)
    rng = torch.Generator().manual_seed(count)
    made = [torch.randn(3, 2, 140, channels, generator=rng).to(torch.bfloat16) for _ in range(2)]
    wanted = [buffer.clone() for buffer in made]
    stay = [*range(5, 5 + 2 * count, 2), *range(5 + 2 * count, 5 + length)]
    for buffer in wanted:
        buffer[1:3, :, 5 : 5 + len(stay)] = buffer[1:3, :, stay]
    for interpreted in (True, False):
        buffers = [buffer.clone() for buffer in made]
        monkeypatch.setattr(pack_together, "INTERPRET", interpreted)
        pack_together.thin_windows([Thin(buffer, (1, 3), 5, length, count) for buffer in buffers])
        for buffer, other in zip(buffers, wanted, strict=True):
            other[1:3, :, 5 + len(stay) : 5 + length] = buffer[1:3, :, 5 + len(stay) : 5 + length]  # dropped: any
            assert torch.equal(buffer, other)


def test_what_goes_is_packed_before_and_what_remains_afterwards(monkeypatch):
    """Two flushes of two windows: each kind of job of both in one launch, in the order of the windows' own jobs."""
    ran = []
    monkeypatch.setattr(pack_together, "pack_alike", lambda group: ran.append([job.segment for job in group]))
    monkeypatch.setattr(pack_together, "thin_windows", lambda group: ran.append([job.length for job in group]))
    monkeypatch.setattr(pack_together.Job, "signature", lambda job: job.start)
    buffers = [torch.zeros(1, 1, 40, 8) for _ in range(2)]
    jobs = []
    for name, buffer in zip("ab", buffers, strict=True):
        for start, length in ((0, 36), (12, 24)):
            jobs.append(pack_together.Job(f"{name}{start}", None, 0, buffer[:, :, 1:24:2], start))
            jobs.append(Thin(buffer, (0, 1), 0, length, 12))
    pack_together.carry_out_jobs(jobs)
    assert ran == [["a0", "b0"], [36, 36], ["a12", "b12"], [24, 24]]
