"""Simulated goodput: three requests by hand, arrivals, interpolated steps."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest

from kvbench.results.goodput import Limits, Served, Server, arrivals, goodput, simulate


def test_three_requests_by_hand():
    """Prefill 1 s, steps .1 s alone and .2 s for two; two sequences at a time; answers of three tokens."""
    server = Server(prefill_s=1.0, step_s={1: 0.1, 2: 0.2}, most=2)
    # 0 arrives at 0 and is read until 1.0; 1 arrived at 0.5 and is read until 2.0; 2 waits for a place. Two steps of
    # two sequences end both at 2.4; 2 is read until 3.4 and ends after two steps alone, at 3.6.
    served = simulate([0.0, 0.5, 1.5], 3, server)
    assert [request.first for request in served] == pytest.approx([1.0, 2.0, 3.4])
    assert [request.end for request in served] == pytest.approx([2.4, 2.4, 3.6])
    assert [request.ttft_s for request in served] == pytest.approx([1.0, 1.5, 1.9])
    assert [request.tpot_s for request in served] == pytest.approx([0.7, 0.2, 0.1])
    assert [request.e2el_s for request in served] == pytest.approx([2.4, 1.9, 2.1])
    assert goodput(served, Limits()) == pytest.approx(3 / 3.6)
    assert goodput(served, Limits(ttft_s=1.6)) == pytest.approx(2 / 3.6)
    assert goodput(served, Limits(ttft_s=1.6, tpot_s=0.3)) == pytest.approx(1 / 3.6)
    assert goodput(served, Limits(e2el_s=2.2)) == pytest.approx(2 / 3.6)
    assert goodput(served, Limits(ttft_s=0.5)) == 0


def test_an_idle_server_waits_and_one_token_needs_no_step():
    server = Server(prefill_s=1.0, step_s={4: 0.5}, most=4)
    assert simulate([2.0, 10.0], 1, server) == [Served(2.0, 3.0, 3.0, 1), Served(10.0, 11.0, 11.0, 1)]
    assert simulate([2.0], 1, server)[0].tpot_s == 0
    assert simulate([0.0], 3, server)[0].end == pytest.approx(2.0)  # one sequence takes as long as the four recorded


def test_steps_between_recorded_batches_are_interpolated():
    server = Server(prefill_s=0, step_s={16: 0.02, 4: 0.01}, most=16)
    assert [server.step(batch) for batch in (1, 4, 10, 16)] == pytest.approx([0.01, 0.01, 0.015, 0.02])
    with pytest.raises(ValueError, match="17 sequences was not recorded, only up to 16"):
        server.step(17)


def test_arrivals_are_seeded_and_have_the_mean_and_the_variance_of_their_gaps():
    assert arrivals(3, math.inf) == [0, 0, 0]
    assert arrivals(5, 2.0, seed=1) == arrivals(5, 2.0, seed=1) != arrivals(5, 2.0, seed=2)
    for burstiness in (0.5, 1.0, 4.0):
        times = [0.0, *arrivals(20_000, 2.0, burstiness, seed=3)]
        gaps = [after - before for before, after in pairwise(times)]
        mean = sum(gaps) / len(gaps)
        variance = sum((gap - mean) ** 2 for gap in gaps) / len(gaps)
        assert mean == pytest.approx(0.5, rel=0.05)
        assert variance / mean**2 == pytest.approx(1 / burstiness, rel=0.1)


def test_a_limit_is_kept_up_to_its_own_value() -> None:
    request = Served(arrival=1.0, first=1.5, end=3.5, tokens=5)
    assert (request.ttft_s, request.tpot_s, request.e2el_s) == (0.5, 0.5, 2.5)
    for name, value in (("ttft_s", 0.5), ("tpot_s", 0.5), ("e2el_s", 2.5)):
        assert Limits(**{name: value}).kept(request) and not Limits(**{name: value - 0.01}).kept(request)
    assert Served(0.0, 1.0, 2.0, 2).tpot_s == 1.0


def test_a_request_that_comes_as_a_place_is_free_starts_at_once() -> None:
    server = Server(prefill_s=1.0, step_s={1: 0.5}, most=1)
    served = simulate([0.0, 1.5], 2, server)
    assert [(request.first, request.end) for request in served] == [(1.0, 1.5), (2.5, 3.0)]
    both = simulate([0.0, 1.0], 2, Server(prefill_s=1.0, step_s={1: 0.5, 2: 1.0}, most=2))
    assert [(request.first, request.end) for request in both] == [(1.0, 3.0), (2.0, 3.0)], "a prefill goes first"


def test_arrivals_are_a_poisson_process_with_seed_0_unless_said_otherwise() -> None:
    assert arrivals(4, 3.0) == arrivals(4, 3.0, 1.0, 0) != arrivals(4, 3.0, 2.0, 0)
    assert arrivals(2, 6.0)[1] == pytest.approx(arrivals(2, 3.0)[1] / 2)
