"""QuantSpec's Table 1 at points computed by hand, its regimes, and the speed-up formula at published values."""

import pytest

from kvbench.profiling.intensity import (
    accepted,
    asymptote,
    best_gamma,
    bound,
    decode_work,
    prefill_work,
    regime,
    speculative_speed_up,
    table_1,
)
from kvbench.profiling.roofline import GPUS, Shape, own_gpu

LLAMA = Shape(4096, 11008, 32, 32, 32, 128, 32000)


@pytest.mark.parametrize(
    ("phase", "part", "flops", "mops"),
    [  # B = 2, S_L = 8, d = 4, k = 3
        ("prefill", "linear", 2 * 8 * 16, 64 + 16),
        ("prefill", "attention", 2 * 64 * 4, 16 + 64),
        ("prefill", "aggregate", 256 + 512, 80 + 80),
        ("decode", "linear", 3 * 2 * 16, 24 + 48),
        ("decode", "attention", 3 * 2 * 8 * 4, 48 + 192),
        ("decode", "aggregate", 96 + 192, 72 + 240),
    ],
)
def test_table_1_by_hand(phase, part, flops, mops):
    cell = table_1(phase, part, B=2, S_L=8, d=4, k=3)
    assert (cell.flops, cell.mops) == (flops, mops)
    assert cell.value == pytest.approx(flops / mops)


@pytest.mark.parametrize("phase", ["prefill", "decode"])
@pytest.mark.parametrize("part", ["linear", "attention", "aggregate"])
@pytest.mark.parametrize(("B", "S_L"), [(1, 8), (4, 8), (1, 1 << 20), (4, 1 << 20)])
def test_intensity_tends_to_the_tables_last_rows(phase, part, B, S_L):
    d = 4096
    found, limit = table_1(phase, part, B, S_L, d, k=100).value, asymptote(phase, part, B, S_L, d)
    assert 0.4 < found / limit <= 1.01


def test_a_text_as_long_as_the_model_is_wide_is_a_long_one():
    limits = {phase: [asymptote(phase, "aggregate", 4, S_L, 64) for S_L in (63, 64)] for phase in ("prefill", "decode")}
    assert limits == {"prefill": [4 * 63, 64], "decode": [4, 1]}
    assert asymptote("prefill", "linear", 4, 64, 64) == 64


def test_the_last_rows_of_the_table():
    limits = {
        (phase, part): [asymptote(phase, part, 4, S_L, 64) for S_L in (8, 128)]
        for phase in ("prefill", "decode")
        for part in ("linear", "attention", "aggregate")
    }
    assert list(limits.values()) == [[32, 64], [8, 128], [32, 128], [4, 4], [1, 1], [4, 1]]
    assert table_1("decode", "linear", 2, 8, 4) == table_1("decode", "linear", 2, 8, 4, k=1)


def test_decoding_is_memory_bound_and_prefill_is_not_on_an_a6000():
    """Fig. 2 and 6: Llama-2-7B in 16 bits; linear layers, attention, and both, at all batches and contexts."""
    gpu = GPUS["a6000"]
    for batch in (1, 8, 64):
        for context in (1 << 10, 1 << 14, 1 << 17):
            weights, kv = 2 * (LLAMA.linear_elements + LLAMA.head_elements), batch * LLAMA.kv_bytes(context)
            linear, attention = weights * batch, 4 * 32 * 32 * 128 * batch * context
            assert bound(linear, weights, gpu) == bound(attention, kv, gpu) == "memory"
            assert bound(linear + attention, weights + kv, gpu) == "memory"
            assert bound(weights * batch * context, weights, gpu) == "compute"


def test_what_is_worth_quantizing():
    """Sec. 3.1.2, end: small batch and short context: weights; a long context or a large batch: keys and values."""
    weights = 2 * LLAMA.linear_elements
    assert regime(weights, LLAMA.kv_bytes(4096)) == "weights"
    assert regime(weights, LLAMA.kv_bytes(24 * 1024)) == "both"
    assert regime(weights, LLAMA.kv_bytes(128 * 1024)) == "kv"
    assert regime(weights, 64 * LLAMA.kv_bytes(4096)) == "kv"


def test_borders_belong_to_both_and_to_compute():
    sums = [(1, 2), (1, 2.1), (2, 1), (2.1, 1), (1, 1)]
    assert [regime(linear, kv) for linear, kv in sums] == ["both", "kv", "both", "weights", "both"]
    gpu = own_gpu(1, 2, 1)
    assert [bound(flops, 10, gpu) for flops in (19, 20, 21)] == ["memory", "compute", "compute"]


def test_tokens_of_a_round():
    assert accepted(0.0, 4) == 1 and accepted(1.0, 4) == 5
    assert accepted(0.8, 2) == pytest.approx((1 - 0.8**3) / 0.2)
    for wrong in (1.2, -0.1):
        with pytest.raises(ValueError, match=f"acceptance={wrong} is not a probability"):
            accepted(wrong, 2)


@pytest.mark.parametrize(
    ("times", "acceptance", "gamma", "factor"),
    [  # times of a roofline in ms: plain step, draft, verification; arithmetic of another hand
        ((6.48, 1.72, 4.71), 0.8, 2, 1.94),
        ((6.48, 1.72, 4.71), 0.9, 4, 2.29),
        ((6.48, 1.72, 4.71), 0.95, 7, 2.60),
        ((17.47, 4.64, 10.37), 0.9, 3, 2.47),
        ((4.12, 1.09, 3.67), 0.8, 3, 1.75),
        ((8.36, 5.17, 8.68), 0.85, 2, 1.13),
        ((20.10, 12.35, 20.63), 0.95, 4, 1.30),
    ],
)
def test_speed_up_of_speculation(times, acceptance, gamma, factor):
    assert speculative_speed_up(acceptance, gamma, *times) == pytest.approx(factor, abs=0.006)
    assert best_gamma(acceptance, *times) == (gamma, pytest.approx(factor, abs=0.006))


def test_among_equal_speed_ups_the_shortest_draft_is_the_best():
    assert speculative_speed_up(0.0, 1, 2.0, 0.0, 2.5) == speculative_speed_up(0.0, 8, 2.0, 0.0, 2.5) == 0.8
    assert best_gamma(0.0, 2.0, 0.0, 2.5) == (1, 0.8)


def test_up_to_eight_tokens_are_drafted_unless_others_are_named():
    assert best_gamma(1.0, 1.0, 0.0, 1.0) == (8, 9.0)
    assert best_gamma(1.0, 1.0, 0.0, 1.0, range(2, 4)) == (3, 4.0)
    assert best_gamma(0.1, 1.0, 1.0, 1.0)[0] == 1


def test_a_draft_that_costs_as_much_as_its_target_never_pays():
    assert best_gamma(0.95, 1.0, 1.0, 1.0)[1] < 1.0


#: 2 layers, 2 query heads and 1 KV head of 2 channels, hidden 4, feed-forward 6, vocabulary 10
SMALL = Shape(4, 6, 2, 2, 1, 2, 10)


def test_the_work_of_decoding_by_hand():
    weights = 2 * (4 * 2 * (2 * 2 + 2 * 1) + 3 * 4 * 6) + 4 * 10
    work = decode_work(SMALL, batch=3, context=5, new_tokens=2)
    assert work["linear"].flops == 2 * weights * 3 * 2
    activations = 3 * (2 * (2 * 4 + 2 * (2 * 2 + 2 * 1) + 2 * 4 + 3 * 6) + 4 + 10)
    assert work["linear"].mops == 2 * (weights + activations) * 2
    seen = 6 + 7  # tokens that the two steps attend to, their own included
    assert work["attention"].flops == 3 * 2 * 2 * 4 * 2 * seen  # sequences, layers, heads, 4 operations, channels
    assert work["attention"].mops == 2 * (3 * 2 * 2 * 2 * seen + 3 * 2 * 2 * 2 * 2 * 2)
    assert decode_work(SMALL, 3, 5) == decode_work(SMALL, 3, 5, 1000, 2)
    assert decode_work(SMALL, 3, 5, 2, width=1)["attention"].mops == work["attention"].mops / 2
    both = work["aggregate"]
    assert (both.flops, both.mops) == tuple(
        getattr(work["linear"], name) + getattr(work["attention"], name) for name in ("flops", "mops")
    )


def test_the_work_of_a_prefill_by_hand():
    linear = 2 * (4 * 2 * (2 * 2 + 2 * 1) + 3 * 4 * 6)
    work = prefill_work(SMALL, batch=3, context=5)
    assert work["linear"].flops == 2 * linear * 15 + 2 * 40 * 3
    assert work["linear"].mops == 2 * (linear + 40 + 15 * 2 * 46 + 3 * (4 + 10))
    assert prefill_work(SMALL, 3, 5, width=1)["linear"].mops == work["linear"].mops / 2
    assert work["aggregate"] == work["linear"] + work["attention"]
    assert work["attention"].flops == 3 * 2 * 2 * 4 * 2 * 15  # 15 pairs of a query and a key in a prompt of 5
    assert work["attention"].mops == 2 * 3 * 2 * 5 * 2 * (2 * 2 + 2 * 1)


def test_all_decoding_lies_below_the_ridge_of_an_a6000_and_all_prefill_above():
    """QuantSpec's Figures 2 and 6, over their ranges of contexts and batches."""
    ridge = GPUS["a6000"].ridge
    for batch in (1, 4, 16, 64):
        for context in (1 << 10, 1 << 14, 1 << 18):
            assert all(work.value < ridge for work in decode_work(LLAMA, batch, context).values())
            assert prefill_work(LLAMA, batch, context)["aggregate"].value > ridge
