"""Names with units that a chart can show."""

from __future__ import annotations

import pytest

from kvbench.loggers.base import charted


@pytest.mark.parametrize(
    ("name", "value", "charted_name", "charted_value"),
    [
        ("kv_bytes/used/total", 2**20, "kv_MiB/used/total", 1),
        ("kv_bytes/fp16_equivalent", 2**21, "kv_MiB/fp16_equivalent", 2),
        ("kv_bytes/ratio", 4.0, "kv/ratio", 4.0),
        ("peak_bytes/decode", 2**19, "peak_MiB/decode", 0.5),
        ("peak_bytes/kind", "cuda_allocator", "peak/kind", "cuda_allocator"),
        ("ttft_s/median", 0.25, "ttft_ms/median", 250),
        ("ttft_s/n", 8, "ttft/n", 8),
        ("tokens_per_s", 30.0, "tokens_per_s", 30.0),
        ("scores/efficiency@4096/points/batches/8/GB_s", 3.0, "scores/efficiency@4096/points/batches/8/GB_s", 3.0),
        (
            "scores/efficiency@4096/points/batches/8/tpot_s/p90",
            0.5,
            "scores/efficiency@4096/points/batches/8/tpot_ms/p90",
            500,
        ),
        (
            "scores/efficiency@4096/points/batches/8/vs_fp16/tpot_s",
            0.5,
            "scores/efficiency@4096/points/batches/8/vs_fp16/tpot_s",
            0.5,
        ),
        ("scores/t/points/batches/1/kv_used", 2**20, "scores/t/points/batches/1/kv_used_MiB", 1),
        ("inter_token/1/slope_s", 1e-6, "inter_token/1/slope_ms", 1e-3),
        ("mean/score", 0.5, "mean/score", 0.5),
        ("attention/path", "a path", "attention/path", "a path"),
    ],
)
def test_units_are_in_the_names(name, value, charted_name, charted_value):
    ((shown, number),) = charted({name: value}).items()
    assert shown == charted_name
    assert number == (pytest.approx(charted_value) if isinstance(charted_value, float) else charted_value)
