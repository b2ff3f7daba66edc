"""Environment that torchrun sets, and the rows of a layer that each process takes."""

from __future__ import annotations

import pytest

from kvbench.errors import ConfigError
from kvbench.parallel import launch
from kvbench.parallel.shard import bounds

TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*TORCHRUN, "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.usefixtures("alone")
def test_one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    assert (launch.rank(), launch.size(), launch.local_rank(), launch.local_size()) == (0, 1, 0, 1)
    assert not launch.launched()
    for name in TORCHRUN[:4]:  # one of the five is missing: something else set them
        monkeypatch.setenv(name, "3")
    assert (launch.rank(), launch.size(), launch.local_rank()) == (0, 1, 0)


@pytest.mark.usefixtures("alone")
def test_one_of_several(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in zip(TORCHRUN, ("5", "8", "1", "host", "29500"), strict=True):
        monkeypatch.setenv(name, value)
    assert (launch.rank(), launch.size(), launch.local_rank(), launch.local_size()) == (5, 8, 1, 8)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert launch.local_size() == 4
    for name, ask in (("RANK", launch.rank), ("WORLD_SIZE", launch.size), ("LOCAL_RANK", launch.local_rank)):
        monkeypatch.setenv(name, "-1")
        with pytest.raises(ConfigError, match=f"{name}=-1: must be a whole number, 0 or greater"):
            ask()
        monkeypatch.setenv(name, "1")


@pytest.mark.parametrize(("count", "size"), [(8, 2), (10, 4), (3, 4), (7, 3), (1, 1)])
def test_every_row_is_taken_once(count: int, size: int) -> None:
    taken = [range(*bounds(count, size, rank)) for rank in range(size)]
    assert [row for rows in taken for row in rows] == list(range(count))
    assert max(map(len, taken)) - min(map(len, taken)) <= 1
