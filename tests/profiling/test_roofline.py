"""The roofline against published parameter counts, hand computation, and figures measured on an H200.

The figures of every GPU as its data sheet gives them, and what predictions take from them.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from kvbench.errors import ConfigError
from kvbench.models.by_name import SERVED
from kvbench.models.spec import Architecture
from kvbench.profiling.roofline import (
    GPUS,
    LONG,
    SLICE,
    TOGETHER,
    Gpu,
    Shape,
    gpu_named,
    gpu_of,
    live_elements,
    max_batch,
    own_gpu,
    predict,
    tokens_of_a_pass,
)
from kvbench.util.confdir import conf_dir, group_options
from kvbench.util.schema import build

H200 = GPUS["h200"]
K = 1024


def architecture(name):
    return yaml.safe_load((conf_dir() / "model" / f"{name}.yaml").read_text(encoding="utf-8"))["architecture"]


SEVEN, EIGHT = (Shape.of(architecture(name)) for name in ("llama2-7b", "llama3-8b-instruct"))


@pytest.mark.parametrize(
    "name", [name for name in group_options("model") if name not in ("tiny", "tiny-reason", SERVED)]
)
def test_parameters_are_the_published_number(name):
    numbers = build(Architecture, architecture(name))
    assert Shape.of(numbers).parameters == numbers.parameters
    assert Shape.of(vars(numbers)) == Shape.of(numbers)


def test_shapes_of_a_model_and_of_its_config_agree_with_the_bytes_loaded():
    from tests import zoo

    for name in ("llama", "qwen2", "phi3"):
        model = zoo.model(name)
        shape = Shape.of(model.config)
        assert shape.parameters == sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize(
    ("shape", "bits", "group", "gigabytes"),
    [(SEVEN, 16, None, 13.21), (SEVEN, 4, 128, 3.51), (EIGHT, 16, None, 15.01), (EIGHT, 4, 128, 3.99)],
)
def test_bytes_of_weights_that_a_step_reads(shape, bits, group, gigabytes):
    read = shape.bytes_read(shape.weight_bytes(bits, group))
    assert read / 1e9 == pytest.approx(gigabytes, abs=0.006)


#: 2 layers, 2 query heads and 1 KV head of 2 channels, hidden 4, feed-forward 6, vocabulary 10
SMALL = Shape(4, 6, 2, 2, 1, 2, 10)
MODEL = {
    "hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 6, "num_attention_heads": 4, "vocab_size": 10
}  # fmt: skip


def test_elements_and_bytes_by_hand():
    assert (SMALL.linear_elements, SMALL.head_elements, SMALL.other_elements, SMALL.parameters) == (240, 40, 20, 340)
    tied, biased = replace(SMALL, tied=True), replace(SMALL, qkv_bias=True)
    assert tied.parameters == 300 and biased.other_elements == 36
    assert (SMALL.weight_bytes(), SMALL.weight_bytes(4, 8), SMALL.weight_bytes(4)) == (680, 400, 260)
    assert (tied.weight_bytes(), tied.weight_bytes(4, 8)) == (600, 360)
    assert (SMALL.weight_bytes(4, 8, 16), tied.weight_bytes(4, 8, 16)) == (440, 360)
    assert SMALL.bytes_read(680) == 600 and SMALL.bytes_read(680, 4) == 520 and tied.bytes_read(600) == 600
    assert SMALL.kv_bytes(10) == 160 and SMALL.kv_bytes(10, 1) == 80
    windowed = replace(SMALL, windows=(4, None))  # the next token sees three of the stored ones, and itself
    assert windowed.kv_bytes(10) == 104 and windowed.kv_bytes(2) == 32


def test_shapes_from_a_configuration():
    assert Shape.of(MODEL) == Shape(8, 16, 6, 4, 4, 2, 10)
    more = {"num_key_value_heads": 2, "head_dim": 16, "tie_word_embeddings": True, "attention_bias": True}
    assert Shape.of({**MODEL, **more}) == Shape(8, 16, 6, 4, 2, 16, 10, tied=True, qkv_bias=True)
    assert Shape.of({**MODEL, "model_type": "qwen2"}).qkv_bias
    for name in ("num_local_experts", "num_experts", "n_routed_experts", "kv_lora_rank"):
        with pytest.raises(ConfigError, match=f"model.{name}=4: is not supported by the roofline"):
            Shape.of({**MODEL, name: 4})
        assert Shape.of({**MODEL, name: 0}) == Shape.of(MODEL)
    for name in MODEL:
        for wrong in (0, "8", None):
            with pytest.raises(ConfigError, match=f"model.{name}.*: must be a whole number, 1 or greater"):
                Shape.of({**MODEL, name: wrong})


@pytest.mark.parametrize(
    ("keys", "sliding"),
    [
        ({}, [1, 1, 1, 1, 1, 1]),
        ({"use_sliding_window": False}, None),
        ({"sliding_window": 0}, None),
        ({"use_sliding_window": True, "max_window_layers": 4}, [0, 0, 0, 0, 1, 1]),
        ({"use_sliding_window": True}, [1, 1, 1, 1, 1, 1]),
        ({"model_type": "gemma2"}, [1, 0, 1, 0, 1, 0]),
        ({"model_type": "gemma3_text"}, [1, 1, 1, 1, 1, 0]),
        ({"model_type": "gemma3_text", "sliding_window_pattern": 3}, [1, 1, 0, 1, 1, 0]),
        ({"layer_types": ["full_attention"] * 5 + ["sliding_attention"], "model_type": "gemma2"}, [0, 0, 0, 0, 0, 1]),
    ],
)
def test_windows_of_layers(keys, sliding):
    windows = Shape.of({**MODEL, "sliding_window": 64, **keys}).windows
    assert windows == (None if sliding is None else tuple(64 if slides else None for slides in sliding))


#: 1000 bytes/s with any number of FLOPs, and 1000 FLOP/s with any number of bytes
SLOW_MEMORY, SLOW_COMPUTE = own_gpu(1e-9, 1.0, 1), own_gpu(1.0, 1e-9, 1)


def test_a_prediction_by_hand_where_memory_is_slow():
    prediction = predict(SMALL, 600, 680, 3, 5, SLOW_MEMORY, kv_stored_bytes=900, q_len=2)
    assert prediction.tpot_s == pytest.approx(0.6 + 0.6)
    assert prediction.ttft_s == pytest.approx((600 + 15 * 2 * 2 * 46 + 15 * 2 * 2 * 2 * 6 + 900) / 1000)
    assert (prediction.bound, prediction.prefill_bound, prediction.kv_share) == ("memory", "memory", pytest.approx(0.5))
    assert prediction.tokens_per_s == pytest.approx(3 / 1.2)
    assert prediction.expected_tpot_s - prediction.tpot_s == pytest.approx(2 * 11 * 2.3e-6, rel=1e-4)
    assert prediction.decode_peak_bytes == 680 + 900 + 3 * 2 * 10 * 6
    assert prediction.prefill_peak_bytes == 680 + 900 + 2 * 15 * 34 == prediction.peak_bytes
    assert replace(prediction, decode_peak_bytes=9999).peak_bytes == 9999
    wide = predict(SMALL, 600, 680, 3, 5, SLOW_MEMORY, width=4)
    assert wide.tpot_s == pytest.approx((680 - 160 + 600) / 1000)
    assert wide.decode_peak_bytes == 680 + 600 + 3 * 10 * 8
    peaks = [
        predict(SMALL, 600, 680, 3, 5, SLOW_MEMORY, **how).prefill_peak_bytes - 1280
        for how in ({"prefill_chunk": 2}, {"prefill_rows": 1}, {"mlp_chunk": 4}, {"prefill_chunk": 5})
    ]
    assert peaks == [2 * 6 * 34, 2 * 5 * 34, 2 * 15 * 28, 2 * 15 * 34]


def test_a_prediction_by_hand_where_compute_is_slow():
    prediction = predict(SMALL, 600, 680, 3, 5, SLOW_COMPUTE, q_len=2, overhead_s_per_layer=0.1)
    linear, attention = 2 * 280 * 3 * 2 / 1000, 4 * 2 * 2 * 2 * 3 * 2 * 5 / 1000
    assert prediction.tpot_s == pytest.approx(linear + attention + 0.2) == pytest.approx(prediction.expected_tpot_s)
    assert prediction.kv_share == pytest.approx(attention / (linear + attention + 0.2))
    assert prediction.tokens_per_s == pytest.approx(3 / (linear + attention + 0.2))
    assert prediction.ttft_s == pytest.approx((2 * 240 * 15 + 2 * 40 * 3 + 32 * 3 * 15) / 1000 + 0.2)
    assert (prediction.bound, prediction.prefill_bound) == ("compute", "compute")
    fewer = predict(SMALL, 600, 680, 3, 5, SLOW_COMPUTE, q_len=2, attended=2)
    assert fewer.tpot_s == pytest.approx(linear + attention * 2 / 5)
    long = predict(SMALL, 1e13, 680, 3, 5, SLOW_COMPUTE, kv_stored_bytes=0)  # 10 s of reading, 1.7 s of FLOPs
    assert (long.bound, long.prefill_bound) == ("memory", "compute")
    assert long.tpot_s == pytest.approx(linear / 2 + 10)


#: ms a token at batch 1 on an H200 by arithmetic of another hand: weights and KV bytes over 4.69 TB/s. Columns: bits of
#: the cache 16, 8 G128, 4 G128, 2 G128, 4 G32, 2 G32 with 16-bit weights; 16, 4 G128, 2 G128 with 4-bit weights
BITS = [16, 8.25, 4.25, 2.25, 5, 3, 16, 4.25, 2.25]
TPOT = {
    ("7b", 4): [3.27, 3.05, 2.94, 2.88, 2.96, 2.90, 1.21, 0.87, 0.81],
    ("7b", 32): [6.48, 4.71, 3.79, 3.33, 3.96, 3.50, 4.41, 1.72, 1.26],
    ("7b", 64): [10.14, 6.59, 4.76, 3.85, 5.11, 4.19, 8.07, 2.69, 1.78],
    ("7b", 128): [17.47, 10.37, 6.71, 4.88, 7.40, 5.56, 15.40, 4.64, 2.81],
    ("8b", 4): [3.31, 3.26, 3.23, 3.22, 3.24, 3.22, 0.96, 0.88, 0.87],
    ("8b", 32): [4.12, 3.67, 3.44, 3.33, 3.49, 3.37, 1.77, 1.09, 0.98],
    ("8b", 64): [5.03, 4.14, 3.69, 3.46, 3.77, 3.54, 2.68, 1.34, 1.11],
    ("8b", 128): [6.86, 5.09, 4.17, 3.71, 4.34, 3.89, 4.51, 1.82, 1.37],
}


@pytest.mark.parametrize(("model", "thousands"), TPOT)
def test_tpot_where_memory_bounds_it(model, thousands):
    shape = {"7b": SEVEN, "8b": EIGHT}[model]
    context = thousands * K
    for column, (bits, expected) in enumerate(zip(BITS, TPOT[model, thousands], strict=True)):
        weights = shape.weight_bytes(*((16, None) if column < 6 else (4, 128)))
        prediction = predict(shape, shape.kv_bytes(context) * bits / 16, weights, 1, context, H200)
        assert prediction.bound == "memory"
        assert prediction.tpot_s * 1e3 == pytest.approx(expected, rel=0.01, abs=0.006)


def test_peak_of_a_prefill_is_what_was_measured_with_stock_transformers():
    for thousands, gib in ((4, 15.0), (32, 31.6), (64, 50.6), (128, 88.7)):
        context = thousands * K
        prediction = predict(SEVEN, SEVEN.kv_bytes(context), SEVEN.weight_bytes(), 1, context, H200, mlp_chunk=None)
        assert prediction.prefill_peak_bytes / 2**30 == pytest.approx(gib, rel=0.01)
        assert prediction.prefill_bound == "compute"
        assert prediction.peak_bytes == prediction.prefill_peak_bytes > prediction.decode_peak_bytes


def test_slices_of_the_feed_forward_layer_leave_attention_as_the_largest():
    from kvbench.decoding import passes

    assert (SLICE, LONG) == (passes.SLICE, passes.LONG)
    assert TOGETHER == passes.TOGETHER
    a, b = 3 * 11008, 4 * 4096
    attention = 2 * 4096 + 128 * (3 * 32 + 4 * 32)
    assert live_elements(SEVEN, 16384, "auto") == live_elements(SEVEN, 16384) == 16384 * (a + b)
    assert live_elements(SEVEN, 1 << 17, "auto") == (1 << 17) * attention
    assert live_elements(EIGHT, 1 << 15, 16384) == 16384 * 3 * 14336 + (1 << 15) * b


def test_prefill_by_hand():
    """32k tokens of 7B: 2 FLOPs a weight and token; attention 4 FLOPs a channel and pair, half of the pairs."""
    n, linear = 32 * K, 32 * (4 * 4096**2 + 3 * 4096 * 11008)
    flops = 2 * linear * n + 2 * 32000 * 4096 + 4 * 32 * 4096 * n * (n + 1) / 2
    prediction = predict(SEVEN, SEVEN.kv_bytes(n), SEVEN.weight_bytes(), 1, n, H200)
    assert prediction.ttft_s == pytest.approx(flops / 718e12)
    assert 0.6 < prediction.ttft_s / 1.408 < 1  # 1.408 s were measured


def test_large_batches_of_short_prompts_are_bound_by_compute():
    n, batch = 64, 1024
    prediction = predict(SEVEN, batch * SEVEN.kv_bytes(n), SEVEN.weight_bytes(), batch, n, H200)
    linear = 2 * (SEVEN.linear_elements + SEVEN.head_elements) * batch / 718e12
    assert prediction.bound == "compute"
    assert prediction.tpot_s == pytest.approx(linear + batch * SEVEN.kv_bytes(n) / 4.69e12)
    assert prediction.tokens_per_s == pytest.approx(batch / prediction.tpot_s)


def test_overhead_is_a_layers_and_comes_on_top():
    plain = predict(SEVEN, 1e9, SEVEN.weight_bytes(), 1, K, H200)
    slow = predict(SEVEN, 1e9, SEVEN.weight_bytes(), 1, K, H200, overhead_s_per_layer=1e-5)
    assert slow.tpot_s - plain.tpot_s == pytest.approx(32e-5)
    assert slow.expected_tpot_s == plain.expected_tpot_s  # the kernels' 25 us a layer, not both
    slower = predict(SEVEN, 1e9, SEVEN.weight_bytes(), 1, K, H200, overhead_s_per_layer=1e-4)
    assert slower.expected_tpot_s == slower.tpot_s
    assert slow.ttft_s - plain.ttft_s == pytest.approx(32e-5)
    assert plain.throughput(1, 100) == pytest.approx(100 / (plain.ttft_s + 99 * plain.tpot_s))


def test_what_was_measured_is_within_15_percent_of_what_is_expected():
    """Compiled steps of a 7B model at 32k and 128k tokens, as they stand in results/h200."""
    measured = json.loads((Path(__file__).parents[2] / "results/h200/whole/tpot.json").read_text(encoding="utf-8"))
    # W = 42 is read by Triton's kernel, which is bound by its instructions
    rows = [row for row in measured["rows"] if row["path"] == "cuda" and not row.get("speculation")]
    assert measured["model"] == "llama2-7b" and len(rows) == 16
    assert {row["stepping"] for row in rows} == {"graph, compiled"}
    for row in rows:
        prediction = predict(SEVEN, row["kv"], SEVEN.weight_bytes(), 1, row["context"], H200)
        assert prediction.expected_tpot_s - prediction.tpot_s == pytest.approx(32 * 11 * 2.3e-6)
        # attention to 128k tokens of two bits is bound by unpacking them, not by reading
        most = 1.17 if (row["setting"], row["context"]) == ("kivi:int2_g128", 131072) else 1.15
        assert 1 < row["tpot_s"]["median"] / prediction.expected_tpot_s < most, row["setting"]


def test_the_largest_batch_fits_and_one_more_does_not():
    n, weights, each = 4 * K, SEVEN.weight_bytes(), SEVEN.kv_bytes(4 * K)
    for gpu, prefill in ((H200, True), (GPUS["l40s"], True), (GPUS["l40s"], False)):
        most = max_batch(SEVEN, each, weights, n, gpu, prefill=prefill)
        room = gpu.memory - 2**30
        fits = [predict(SEVEN, b * each, weights, b, n, gpu) for b in (most, most + 1)]
        used = [p.peak_bytes if prefill else p.decode_peak_bytes for p in fits]
        assert most > 0 and used[0] <= room < used[1]
    assert max_batch(SEVEN, SEVEN.kv_bytes(128 * K), weights, 128 * K, GPUS["l40s"]) == 0
    whole = max_batch(SEVEN, each, weights, n, H200)
    assert max_batch(SEVEN, each, weights, n, H200, prefill_chunk=64) > whole
    twelve = {"prefill_rows": 12}  # three times as many tokens as slices begin with
    assert max_batch(SEVEN, each, weights, n, H200, mlp_chunk=None, **twelve) < max_batch(
        SEVEN, each, weights, n, H200, **twelve
    )


@pytest.mark.parametrize("gib", [15, 16, 16.5, 17, 18, 20, 40])
@pytest.mark.parametrize("chunk", ["auto", None, 4096])
def test_the_largest_batch_is_that_of_a_search_through_all(gib, chunk):
    """Also where slices, which begin at 16385 tokens, let a larger batch fit than the next smaller one."""
    gpu, n, weights, each = own_gpu(1, 100, gib), 1000, SEVEN.weight_bytes(), 2**20
    room = (gib - 1) * 2**30
    how = {"mlp_chunk": chunk, "prefill_rows": None}
    fits = [b for b in range(1, 900) if predict(SEVEN, b * each, weights, b, n, gpu, **how).peak_bytes <= room]
    computed = max_batch(SEVEN, each, weights, n, gpu, **how)
    assert computed == max(fits, default=0)


@pytest.mark.parametrize(
    ("device", "name"),
    [
        ("NVIDIA H200", "h200"),
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA A100-SXM4-80GB", "a100-80gb"),
        ("NVIDIA A100-SXM4-40GB", "a100-40gb"),
        ("NVIDIA A100-PCIE-40GB", "a100-40gb"),
        ("NVIDIA A100 80GB PCIe", "a100-80gb-pcie"),
        ("NVIDIA L40S", "l40s"),
        ("NVIDIA RTX A6000", "a6000"),
        ("NVIDIA H100 PCIe", None),  # another memory, another clock
        ("NVIDIA H200 NVL", None),
        ("NVIDIA A100-SXM4-80GB MIG 1g.10gb", None),
        ("NVIDIA L40", None),
        ("NVIDIA RTX 6000 Ada Generation", None),
        ("Tesla T4", "t4"),
    ],
)
def test_gpus_by_the_name_of_the_device(device, name):
    computed = gpu_of(device)
    assert (computed and computed.name) == name


def test_gpus_by_name():
    assert gpu_named("H200").read == 4.69e12 and gpu_named("NVIDIA L40S") is GPUS["l40s"]
    assert gpu_named("A100") is GPUS["a100-80gb"]
    for name, known in (
        ("NVIDIA GeForce RTX 4090", "rtx4090"),
        ("NVIDIA B200", "b200"),
        ("Tesla T4", "t4"),
        ("NVIDIA L4", "l4"),
        ("NVIDIA A10", "a10"),
        ("NVIDIA GB10", "gb10"),
        ("NVIDIA GeForce RTX 4070 Ti SUPER", "rtx4070tisuper"),
        ("NVIDIA RTX PRO 6000 Blackwell Workstation Edition", "rtxpro6000"),
        ("Apple M2 Ultra", "m2ultra"),
    ):
        assert gpu_of(name) is GPUS[known]
    boards = ("4080 SUPER", "4090 Laptop GPU", "4090 D", "5090 D v2", "3080 Ti", "3080 Ti Laptop GPU", "4070 Ti")
    for name in (*(f"NVIDIA GeForce RTX {board}" for board in boards), "NVIDIA L40", "NVIDIA A10G", "NVIDIA GB200"):
        assert gpu_of(name) is None, "its rates are others"
    for name, gpu in GPUS.items():
        assert name[:3] != "rtx" or gpu_of(f"NVIDIA GeForce RTX {name[3:]}") is gpu
    with pytest.raises(ConfigError, match=r"did you mean 'a100-80gb'.*--bandwidth-TBs"):
        gpu_named("a100-80")
    own = own_gpu(2.0, 100, 24)
    assert (own.read, own.matmul, own.memory, own.ridge) == (2e12, 1e14, 24 * 2**30, 50)
    for gpu in GPUS.values():
        assert 0.5 * gpu.bandwidth < gpu.read < gpu.bandwidth and 0.5 * gpu.flops < gpu.matmul < gpu.flops


def test_prompts_of_a_pass() -> None:
    """As many as make 16k tokens, at least one; all of them where they come in chunks."""
    assert tokens_of_a_pass(64, 4096) == 4 * 4096
    assert tokens_of_a_pass(3, 4096) == 3 * 4096
    assert tokens_of_a_pass(4, 131072) == 131072
    assert tokens_of_a_pass(64, 4096, prefill_rows=None) == 64 * 4096
    assert tokens_of_a_pass(64, 4096, prefill_rows=2) == 2 * 4096
    assert tokens_of_a_pass(64, 4096, prefill_chunk=512) == 64 * 512
    assert tokens_of_a_pass(64, 4096, prefill_chunk=4096, prefill_rows=2) == 2 * 4096
    together = max_batch(SEVEN, 2**28, 13.5e9, 4096, H200)
    assert together > max_batch(SEVEN, 2**28, 13.5e9, 4096, H200, prefill_rows=None)


def test_figures_of_the_data_sheets():
    sheets = {name: (gpu.name, gpu.memory_gib, gpu.bandwidth / 1e9, gpu.flops / 1e12) for name, gpu in GPUS.items()}
    expected = {
        "a6000": (48, 768, 154.8),
        "l40s": (48, 864, 362.05),
        "a100-40gb": (40, 1555, 312),
        "a100-80gb": (80, 2039, 312),
        "a100-80gb-pcie": (80, 1935, 312),
        "h100": (80, 3350, 989.4),
        "h200": (141, 4800, 989.4),
    }
    assert {name: sheets[name] for name in expected} == {
        name: (name, *map(pytest.approx, figures)) for name, figures in expected.items()
    }
    measured = {name: (gpu.measured_read, gpu.measured_matmul) for name, gpu in GPUS.items() if gpu.measured_read}
    assert measured == {"h200": (pytest.approx(4.69e12), pytest.approx(718e12))}
    assert {gpu.kernel_s for name, gpu in GPUS.items() if name[0] != "m"} == {2.3e-6}
    assert GPUS["h100"].usable == 79.19 * 2**30 and GPUS["l4"].usable == 0.97 * 24 * 2**30


def test_rates_without_a_measurement_are_shares_of_the_data_sheets():
    gpu = Gpu("x", 2, 100.0, 1000.0)
    assert (gpu.read, gpu.matmul, gpu.memory, gpu.ridge) == (92.0, 726.0, 2**31, 10.0)
    gpu = Gpu("x", 2, 100.0, 1000.0, measured_read=50.0, measured_matmul=300.0)
    assert (gpu.read, gpu.matmul, gpu.ridge) == (50.0, 300.0, 10.0)


def test_names_in_any_case_and_unknown_ones():
    assert gpu_of("nvidia h200") is GPUS["h200"] and gpu_named("nvidia h200") is GPUS["h200"]
    assert gpu_of("NVIDIA H100 NVL") is gpu_of("NVIDIA H200 MIG 1g.18gb") is gpu_of("XH200") is None
    assert own_gpu(1, 1, 1).name == "own" and own_gpu(1, 1, 1, "mine").name == "mine"
    with pytest.raises(ConfigError, match="gpu=abacus: is not a known GPU") as refusal:
        gpu_named("abacus")
    assert refusal.value.hint.startswith("Describe other GPUs with --bandwidth-TBs")
