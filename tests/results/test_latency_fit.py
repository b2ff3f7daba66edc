"""Lines over length with their R2, and the break-even length with its reason."""

from __future__ import annotations

import pytest

from kvbench.results.inter_token import Line, crossing, fit_latency, r_squared


def test_a_fit_by_hand():
    # mean (2, 3): slope (-1*-2 + 0 + 1*1) / 2 = 1.5, intercept 0; residuals -0.5, 1, -0.5 of 14/3
    points = [(1.0, 1.0), (2.0, 4.0), (3.0, 4.0)]
    fit = fit_latency(points, [[(1.0, 1.0), (3.0, 5.0)], [(1.0, 1.0), (3.0, 3.0)], [(1.0, 1.0)]])
    assert fit is not None
    assert (fit.line.slope, fit.line.intercept, fit.line.lengths) == (pytest.approx(1.5), pytest.approx(0), 3)
    assert fit.r2 == pytest.approx(1 - 1.5 / 6)
    assert fit.slopes == (2.0, 1.0) and fit.intercepts == (-1.0, 0.0)  # a process with one length has no line
    assert fit_latency([(1.0, 1.0), (1.0, 2.0)]) is None
    assert r_squared([(1.0, 2.0), (2.0, 2.0)], Line(0.0, 2.0, 2)) == 1.0


def test_break_even_by_hand():
    """Llama-3.1-8B on an H100: bf16 4.37e-5 ms a token and 6.44 ms, fp8 2.37e-5 and 6.58: 7.0k tokens."""
    bf16 = Line(4.37e-8, 6.44e-3, 2)
    result = crossing(Line(2.37e-8, 6.58e-3, 2), bf16)
    assert result.length == pytest.approx(7000) and result.reason is None
    assert crossing(Line(2.37e-8, 6.4e-3, 2), bf16).length == 0
    steeper = crossing(Line(5e-8, 7e-3, 2), bf16)
    assert steeper.length is None and steeper.reason == "a cached token costs 50 ns, not less than the 43.7 ns of fp16"
    early = crossing(Line(5.37e-8, 6.34e-3, 2), bf16)
    assert (
        early.length is None and early.reason is not None and early.reason.endswith("faster only below 10,000 tokens")
    )
