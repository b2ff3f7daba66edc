"""Kernels by kind."""

from __future__ import annotations

import pytest

from kvbench.bench.profile import STEPS, kernel_kind, summed_kernels


@pytest.mark.parametrize(
    ("name", "wanted"),
    [
        ("decode", "attention"),
        ("decode_split", "attention"),
        ("decoder", "elementwise"),
        ("merge_parts", "attention"),
        ("pack_windows_2", "pack"),
        ("write_keys", "append"),
        ("rewrite", "elementwise"),
        ("product", "linear"),
        ("products", "elementwise"),
        ("Memset (Device)", "copies"),
        ("pack_tiles", "pack"),
        ("write", "append"),
        ("void gemv2T_kernel_val<int, int, __nv_bfloat16>", "linear"),
        ("nvjet_tst_64x8_64x16_1x2_h_bz_TNT", "linear"),
        ("triton_red_fused_mm_t_view_6", "linear"),
        ("triton_red_fused__to_copy_add_mean_mm_mul_pow_rsqrt_t_view_1", "linear"),
        ("triton_red_fused__to_copy_add_mean_mul_pow_rsqrt_0", "elementwise"),
        ("Memcpy HtoD (Pinned -> Device)", "copies"),
        ("triton_poi_fused_silu_mul_2", "elementwise"),
        ("void at::native::vectorized_elementwise_kernel<4>", "elementwise"),
    ],
)
def test_kinds(name: str, wanted: str) -> None:
    """By the names that the libraries give them."""
    assert kernel_kind(name) == wanted


def test_sums() -> None:
    """Busy time is all of it; the longest come first."""
    computed = summed_kernels({"decode": [0.5] * 2 * STEPS, "write": [0.25] * STEPS})
    assert computed["busy_ms"] == 1.25 * STEPS
    assert computed["ms"] == {"attention": STEPS * 1.0, "append": STEPS * 0.25}
    assert computed["kernels"][0] == {"name": "decode", "ms": STEPS * 1.0, "calls": 2.0}
    many = summed_kernels({f"kernel {i}" + "x" * 200: [float(i)] for i in range(20)})
    assert [row["ms"] for row in many["kernels"]] == [float(i) for i in range(19, 7, -1)]
    assert {len(row["name"]) for row in many["kernels"]} == {120} and many["ms"] == {"elementwise": 190.0}
    assert STEPS == 16
