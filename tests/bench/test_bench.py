"""The bench's pure parts: bytes as the bill counts them, shapes of layers, the table."""

import argparse
import json
from dataclasses import asdict

import pytest
import torch

from kvbench.attention import synthetic
from kvbench.bench import __main__ as command
from kvbench.bench import clock, kernel, quantize, report
from kvbench.bench.choices import short_count
from kvbench.bench.clock import ROUND, Time, copies
from kvbench.bench.shapes import (
    FORMATS,
    FULL,
    MODELS,
    Model,
    Point,
    parse_point,
    phase_count,
    resolved,
    segment_lengths,
    side_bytes,
    step_bytes,
    tokens,
)
from kvbench.cache.segments.base import FullSegment
from kvbench.cache.segments.packed import PackedSegment
from kvbench.util.table import format_value, render_table


@pytest.mark.parametrize("name", [name for name in FORMATS if FORMATS[name].single])
@pytest.mark.parametrize("channels", [64, 128])
def test_bytes_of_a_format_are_those_of_the_bill(name, channels):
    for side in ("key", "value"):
        form = getattr(FORMATS[name].tiers[0], side)
        segment = PackedSegment(
            1, 3, channels, torch.float16, "cpu", quantizer=quantize.format_quantizer(name, side, channels), side=side
        )
        segment.append(slice(None), torch.zeros(1, 3, 128, channels, dtype=torch.float16))
        assert 3 * side_bytes(form, 128, channels) == sum(segment.used(0).values())
    full = FullSegment(1, 3, channels, torch.float16, "cpu")
    full.append(slice(None), torch.zeros(1, 3, 17, channels, dtype=torch.float16))
    assert 3 * side_bytes(FULL, 17, channels) == full.used(0)["window"]


def test_bits_an_element_are_those_that_performance_is_judged_by():
    bits = {"int4_g128": 4.25, "int4_g64": 4.375, "int4_g32": 5, "int8": 8.25, "int2_g128": 2.25, "int2_g32": 3}
    for name, expected in bits.items():
        tier = FORMATS[name].tiers[0]
        computed = sum(side_bytes(form, 4096, 128) for form in (tier.key, tier.value)) * 8 / (2 * 4096 * 128)
        assert computed == expected
    assert round(side_bytes(FULL, 32768, 128) * 2 * 32 / 1e6) == 537  # 7B at 32k, MB of a layer


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("q_len", [1, 5])
def test_segments_hold_every_token_once(name, q_len):
    layer = FORMATS[name]
    keys, values = segment_lengths(layer, 4096, q_len)
    assert sum(keys) == sum(values) and len(keys) == len(values) == len(layer.tiers) + 1
    assert sum(keys[:-1]) == 4096 and keys[-1] >= q_len and values[-1] >= q_len
    assert min(*keys, *values) >= 0
    for tier, count in zip(layer.tiers, keys, strict=False):
        assert tier.key.axis != "channel" or count % tier.key.group == 0
    at = Point("tiny", 2, 4096, q_len)
    everything = step_bytes(layer, at)
    assert everything["fp16"] >= 2 * 2 * q_len * 2 * 2 * 64
    assert sum(everything.values()) < 2 * 2 * sum(keys) * 2 * 2 * 64


def test_windows_and_shares():
    assert segment_lengths(FORMATS["int4_g128"], 4096, 5) == ([4096, 5], [4096, 5])
    assert segment_lengths(FORMATS["kivi2"], 4096, 1) == ([4096, 64], [4032, 128])
    assert phase_count(FORMATS["kivi2"], Point("7b", 1, 4096)) == 3
    two, four, full, tail = segment_lengths(FORMATS["mix"], 32768, 1)[0]
    assert (two % 128, four % 128, tail) == (0, 0, 1) and two + four + full == 32768
    assert abs(two / 32768 - 0.6) < 0.01 and abs(full / 32768 - 0.1) < 0.01
    assert resolved(FORMATS["int4_g128"].tiers[0].value, 64).group == 64


def test_every_window_and_share_of_the_formats():
    context = 12800
    windows = {"kivi2": (64, 128), "kivi4": (64, 128), "logquant2": (160, 160), "quantspec": (192, 192)}
    for name in FORMATS:
        keys, values = segment_lengths(FORMATS[name], context, 1)
        assert (keys[-1], values[-1]) == windows.get(name, (1, 1)), name
    for name in ("mix", "cocktail"):  # 60, 30 and 10 percent
        assert segment_lengths(FORMATS[name], context, 1) == ([7680, 3840, 1280, 1], [7680, 3840, 1280, 1])
    assert segment_lengths(FORMATS["kivi2"], context, 70)[0] == [context, 70]  # the new tokens of the step
    assert segment_lengths(FORMATS["kivi2"], 32, 1) == ([32, 64], [0, 96])  # fewer tokens than the values' window
    groups = {name: (layer.tiers[0].key.group, layer.tiers[0].value.group) for name, layer in FORMATS.items()}
    assert groups["cocktail"] == (32, 64) and groups["logquant2"] == (64, 32) and groups["int4_g64"] == (64, 0)
    assert FORMATS["int8"].single and not FORMATS["kivi2"].single and not FORMATS["mix"].single


def test_bytes_of_a_layer_by_hand():
    sizes = step_bytes(FORMATS["int8"], Point("tiny", 2, 128))  # 2 KV heads of 64 channels
    assert sizes == {"int8": 4 * ((8192 + 4 * 64) + (8192 + 4 * 128)), "fp16": 4 * 2 * 64 * 2}
    keys, values = FORMATS["int2_g32"].tiers[0].key, FORMATS["int2_g32"].tiers[0].value
    assert side_bytes(keys, 40, 64) == 40 * 64 // 4 + 4 * 64  # the second group of 32 is not complete
    assert side_bytes(values, 3, 64) == 3 * 64 // 4 + 4 * 3 * 2
    assert side_bytes(FULL, 3, 64, width=4) == 3 * 64 * 4
    assert (MODELS["7b"], MODELS["8b"], MODELS["tiny"]) == (Model(32, 32, 128), Model(32, 8, 128), Model(6, 2, 64))
    assert resolved(FORMATS["int4_g32"].tiers[0].value, 16).group == 16
    assert resolved(FORMATS["int4_g128"].tiers[0].key, 64).group == 128  # per channel: tokens


def test_numbers_of_tokens_and_points():
    assert [tokens(t) for t in ("4k", "32K", "4096", "7")] == [4096, 32768, 4096, 7]
    assert [short_count(n) for n in (4096, 262144, 100)] == ["4k", "256k", "100"]
    assert parse_point("8b:16:32k:5") == Point("8b", 16, 32768, 5)
    for text in ("4m", "", "0", "-4k"):
        with pytest.raises(ValueError, match="number of tokens"):
            tokens(text)
    assert parse_point("7b:2:100") == Point("7b", 2, 100, 1) and str(Point("7b", 2, 4096, 5)) == "7b B2 4k q5"
    for text in ("9b:1:4k", "7b:1", "7b:1:4k:0", "7b:x:4k", "7b:1:4k:5:6"):
        with pytest.raises(ValueError, match="point"):
            parse_point(text)
    args = command.bench_parser().parse_args(["kernel", "--contexts", "8k", "--models", "tiny", "--q-len", "1", "5"])
    assert kernel.kernel_points(args) == [Point("tiny", 1, 8192), Point("tiny", 1, 8192, 5)]
    args = command.bench_parser().parse_args(["kernel", "--points", "7b:1:4k", "8b:2:1k"])
    assert kernel.kernel_points(args) == [Point("7b", 1, 4096), Point("8b", 2, 1024)]
    args = command.bench_parser().parse_args(["kernel", "--quick", "--models", "tiny"])
    assert kernel.kernel_points(args) == [parse_point(text) for text in kernel.QUICK]
    args = command.bench_parser().parse_args(["kernel", "--production"])
    long = ["7b B1 32k q1", "7b B1 128k q1", "8b B1 32k q1", "8b B1 128k q1"]
    assert [str(at) for at in kernel.kernel_points(args)] == long


def test_a_layer_of_the_bench_is_what_its_lengths_say_and_its_twin_is_another(monkeypatch):
    monkeypatch.setitem(MODELS, "tiny", Model(4, 2, 64))
    at = Point("tiny", 2, 1280)
    work = kernel.random_layer("mix", at, torch.float16, device="cpu")
    assert [line[2] for line in work.counts[0]] == segment_lengths(FORMATS["mix"], 1280, 1)[0] == [768, 384, 128, 1]
    other = kernel.layer_twin(work)
    assert other.phases[0][0].words[0].data_ptr() != work.phases[0][0].words[0].data_ptr()
    query = torch.randn(2, 4, 1, 64)
    first = synthetic.dequantized_attention(query, work, 0.125)
    assert torch.equal(first, synthetic.dequantized_attention(query, other, 0.125))
    assert torch.equal(first[:, :, :2], synthetic.dequantized_attention(query, work, 0.125, slice(0, 1)))


@pytest.mark.parametrize(
    ("name", "channels", "size"),
    [("iq4_nl", 128, 144), ("octave_k3v4", 128, 136), ("octave_k3v3", 64, 64), ("octave_k3v3_compact", 64, 52)],
)
def test_bytes_of_a_token_are_those_of_the_engine_with_padding(name, channels, size, monkeypatch):
    monkeypatch.setitem(MODELS, "tiny", Model(2, 1, channels))
    sizes = step_bytes(FORMATS[name], Point("tiny", 1, 1280))
    assert sizes.pop("fp16") == 4 * channels and sum(sizes.values()) == 1280 * size
    work = kernel.random_layer(name, Point("tiny", 1, 1280), torch.float16, device="cpu")
    stored = [tensor for part in work.phases[0] for tensor in (*part.words, *part.params)]
    assert sum(tensor.nbytes for tensor in stored) == 1280 * size


def test_a_round_does_not_fit_the_cache():
    assert copies(1 << 30) == 1
    assert copies(10 << 20) * (10 << 20) >= ROUND
    assert copies(1) == 64
    assert copies(ROUND) == 1
    assert copies(ROUND - 1) == 2
    assert copies(ROUND * 2 // 3) == 2
    assert copies(0) == 64


@pytest.mark.parametrize(
    ("number", "shown"),
    [
        (0.0, "0.00"),
        (99.6, "99.6"),
        (99.95, "100"),
        (-99.95, "-100"),
        (9.98, "9.98"),
        (9.995, "10.0"),
        (0.01, "0.01"),
        (0.0099, "9.9e-03"),
        (float("inf"), "inf"),
        (3, "3"),
        ("x", "x"),
    ],
)
def test_figures_have_three_digits(number, shown):
    assert format_value(number) == shown


def test_floors_lie_between_the_measured_reads():
    reads = clock.Ceiling([(100, 5.0), (1000, 10.0), (10000, 40.0)], "triton")
    assert [reads.floor(n) for n in (1, 100, 550, 1000, 20000)] == [5.0, 5.0, 7.5, 10.0, 80.0]
    assert reads.rate == 0.25
    json.dumps(reads.as_dict())


def test_a_mix_is_expected_at_the_rates_of_its_formats():
    at = {"model": "7b", "batch": 1, "context": 32768, "q_len": 1, "path": "cuda", "best": "flash", "best_us": 1000.0}
    rows = [
        {**at, "format": name, "us": us, "bytes": sum(step_bytes(FORMATS[name], Point("7b", 1, 32768)).values())}
        for name, us in (("int2_g128", 30.0), ("int4_g128", 40.0))
    ]
    mix = {**at, "format": "mix", "bytes_by_format": step_bytes(FORMATS["mix"], Point("7b", 1, 32768))}
    assert kernel.expected_us(mix, rows) == pytest.approx(0.6 * 30 + 0.3 * 40 + 0.1 * 1000, rel=0.02)
    assert kernel.expected_us(rows[0], rows) is None
    assert kernel.expected_us(mix, rows[:1]) is None
    assert kernel.expected_us({**mix, "best": None}, rows) is None
    for key, other in (("path", "triton"), ("context", 4096), ("q_len", 5), ("model", "8b"), ("batch", 2)):
        assert kernel.expected_us(mix, [rows[0], {**rows[1], key: other}]) is None, key
    assert kernel.expected_us(mix, [rows[0], {**rows[1], "us": None}]) is None


def test_tokens_in_full_precision_are_as_fast_as_the_best_baseline():
    """By the bytes of the KV heads, of which an 8B model has a quarter as many as query heads."""
    at = {"model": "8b", "batch": 2, "context": 4096, "q_len": 1, "path": "cuda", "best": "flash", "best_us": 100.0}
    exact = 4 * 8 * 2 * 4096 * 128
    mix = {**at, "format": "mix", "bytes_by_format": {"fp16": exact // 4}}
    assert kernel.expected_us(mix, []) == pytest.approx(25.0)


@pytest.fixture
def device(monkeypatch, tmp_path):
    """A device whose kernels take 10 us, except those of INT8, which fail."""

    def measure(name, at, path, args):
        if name == "int8":
            raise RuntimeError("no\nkernel")
        size = sum(step_bytes(FORMATS[name], at).values())
        row = {**asdict(at), "format": name, "path": "cuda", "bytes": size, "error": 1e-3}
        row["bytes_by_format"] = step_bytes(FORMATS[name], at)
        return row | {"us": 10.0, "p10": 9.0, "p90": 11.0, "rounds": 7, "GB_s": size / 1e4}

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: "NVIDIA X")
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(kernel, "time_attention", measure)
    monkeypatch.setattr(clock, "measure_ceiling", lambda seconds: clock.Ceiling([(1000, 1.0)], "triton"))
    monkeypatch.setattr(kernel, "time_baselines", lambda *given: {"flash": Time(40.0, 1, 1, 7), "cudnn": "no"})
    monkeypatch.setattr(report, "machine", dict)
    monkeypatch.setattr(kernel, "healthy", lambda: True)
    return ["--out", str(tmp_path), "--models", "7b", "--contexts", "4k"]


def test_the_kernels_command_writes_rows_with_what_they_are_compared_with(device, tmp_path, capsys):
    assert command.main(["kernel", *device, "--formats", "int2_g128", "int4_g128", "mix"]) == 0
    content = json.loads((tmp_path / "kernel.json").read_text())
    two, four, mix = content["rows"]
    assert (two["best"], two["best_us"], two["ceiling_GB_s"]) == ("flash", 40.0, 1.0)
    assert two["floor_us"] == two["bytes"] / 1000 and two["expected_us"] is four["expected_us"] is None
    assert mix["expected_us"] == kernel.expected_us(mix, content["rows"]) > 0
    assert four["per_byte"] == 1 and two["per_byte"] == four["bytes"] / two["bytes"]  # all take as long
    assert content["baselines"] == {
        "7b B1 4k q1": {"flash": {"us": 40.0, "p10": 1, "p90": 1, "rounds": 7}, "cudnn": "no"}
    }
    more = 100 * (10.0 / mix["expected_us"] - 1)
    assert f"7b B1 4k q1 mix (cuda): {more:+.0f}% compared with" in capsys.readouterr().out
    assert command.main(["kernel", *device, "--formats", "int4_g128", "--no-baselines", "--path", "both"]) == 0
    content = json.loads((tmp_path / "kernel.json").read_text())
    assert len(content["rows"]) == 2 and content["rows"][0]["best"] is None and content["baselines"] == {}
    assert command.main(["kernel", *device, "--formats", "int2_g128"]) == 0
    assert json.loads((tmp_path / "kernel.json").read_text())["rows"][0]["per_byte"] is None  # nothing to compare with


def test_a_kernel_that_fails_is_a_row_and_a_new_process_goes_on(device, tmp_path, monkeypatch):
    formats = ["--formats", "int4_g128", "int8", "int2_g128"]
    assert command.main(["kernel", *device, *formats]) == 1
    rows = json.loads((tmp_path / "kernel.json").read_text())["rows"]
    assert [row.get("failed") for row in rows] == [None, "RuntimeError: no kernel", None]
    monkeypatch.setattr(kernel, "healthy", lambda: False)
    skips = []
    monkeypatch.setattr(kernel, "continued_rows", lambda args, skip: skips.append(skip) or [{**rows[2], "us": 77.0}])
    assert command.main(["kernel", *device, *formats]) == 1
    again = json.loads((tmp_path / "kernel.json").read_text())["rows"]
    assert skips == [2] and [row.get("us") for row in again] == [10.0, None, 77.0]
    assert command.main(["kernel", *device, *formats, "--skip", "2", "--name", "part"]) == 0
    assert len(json.loads((tmp_path / "part.json").read_text())["rows"]) == 1


def test_a_row_of_the_table_and_one_that_failed():
    row = {"model": "7b", "batch": 1, "context": 4096, "q_len": 1, "format": "int4_g128", "path": "cuda"}
    good = {**row, "us": 10.0, "p10": 9.9, "p90": 10.1, "bytes": 18_000_000, "ceiling_GB_s": 4600.0, "floor_us": 6.1}
    good.update(best="cudnn", best_us=22.0, error=8e-4, per_byte=1.07)
    bad = {**row, "failed": "NotServed: why", "best": "cudnn", "best_us": 22.0}
    text = render_table(kernel.HEAD, [kernel.kernel_cells(good), kernel.kernel_cells(bad)], width=160)
    lines = text.splitlines()
    assert len(lines) == 4
    assert lines[2].split() == "7b 1 4k 1 int4_g128 cuda 10.0 1.00 1800 39.1 6.10 1.07 cudnn 22.0 2.20 8.0e-04".split()
    assert lines[3].endswith("NotServed: why")
    assert kernel.kernel_cells({**good, "error": None, "best": None, "best_us": None})[-4:] == [None, None, None, "-"]
    assert kernel.kernel_cells(bad)[6:12] == [None] * 6 and kernel.kernel_cells(bad)[12:14] == ["cudnn", 22.0]
    assert quantize.packing_cells({**row, "what": "hqq", "failed": "no"}, 1.0)[-1] == "no"
    computed = quantize.packing_row(Point("7b", 1, 4096), "int8", "kernel", Time(10.0, 9.0, 11.0, 7), 10**6)
    assert quantize.packing_cells(computed | {"same": True}, 1000.0)[4:] == [10.0, 10.0, 100.0, 10.0, "yes"]
    bare = quantize.packing_cells(computed, 1.0)
    assert bare[:4] == ["7b", "4k", "int8", "kernel"] and bare[-1] == "-"
    assert quantize.packing_cells(computed | {"same": False}, 1.0)[-1] == "NO"
    assert quantize.packing_cells(computed | {"same": "ValueError: x"}, 1.0)[-1] == "ValueError: x"
    assert quantize.packing_cells(computed | {"bytes": None}, 1.0)[6:8] == [None, None]
    assert (computed["p10"], computed["p90"], computed["rounds"]) == (9.0, 11.0, 7)
    assert quantize.packing_row(Point("7b", 1, 4096), "int8", "x", "why", None)["failed"] == "why"


def test_a_packing_is_of_the_formats_own_quantizer():
    for name, side, kind, bits, group, axis in (
        ("int4_g32", "key", "AffineQuantizer", 4, 32, "channel"),
        ("int4_g128", "value", "AffineQuantizer", 4, 64, "token"),
        ("atom4", "key", "AtomQuantizer", 4, 64, "token"),
        ("int8", "key", "HierarchicalQuantizer", 8, 128, "channel"),
    ):
        made = quantize.format_quantizer(name, side, 64)
        assert (type(made).__name__, made.bits, made.axis) == (kind, bits, axis)
        assert made.group_size == group
    assert quantize.timed_flushes("int4_g128") == [("128 keys", "key", 128), ("1 value", "value", 1)]
    assert quantize.timed_flushes("int4_g64") == [
        ("128 keys", "key", 128),
        ("64 keys", "key", 64),
        ("1 value", "value", 1),
    ]
    side = 128 * 128 // 2 + 4 * 128  # codes, and a scale and a minimum for each of 128 groups
    assert quantize.packing_bytes("int4_g128", Point("7b", 2, 128)) == (4 * 128 * 128 + 2 * side) * 32 * 2


def test_torchs_way_ends_with_its_block(monkeypatch):
    from kvbench.cache.segments import packed

    known = packed.served
    with pytest.raises(ValueError), quantize.torchs_way():
        assert packed.served(None, None) == "bench: torch's way"
        raise ValueError
    assert packed.served is known
    with quantize.with_warps(None):
        assert packed.served is known
    with pytest.raises(ValueError), quantize.with_warps(2):
        assert packed.served is not known
        raise ValueError
    assert packed.served is known


def test_results_are_written_whole(tmp_path):
    report.write_json(tmp_path / "a" / "kernel.json", {"rows": []})
    assert json.loads((tmp_path / "a" / "kernel.json").read_text()) == {"rows": []}
    assert report.result_folder(tmp_path) == tmp_path


def test_without_a_gpu_it_says_so(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert command.main(["kernel", "--quick"]) == 2
    assert "CUDA" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        command.main(["kernel", "--formats", "int5"])
    assert isinstance(command.bench_parser(), argparse.ArgumentParser)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--points", "7b:1:4k", "7b:0:4k"], "'7b:0:4k' is not a point"),
        (["--points", "9b:1:4k"], "7b:1:32k"),
        (["--contexts", "0"], "'0' is not a number of tokens"),
        (["--batches", "0"], "'0' is not a whole number, 1 or greater"),
        (["--q-len", "x"], "'x' is not a whole number, 1 or greater"),
    ],
)
def test_wrong_shapes_are_refused_before_anything_is_measured(arguments, said, capsys):
    with pytest.raises(SystemExit):
        command.bench_parser().parse_args(["kernel", *arguments])
    assert said in capsys.readouterr().err


def test_quantize_writes_packings_and_flushes_and_says_whether_all_are_good(device, tmp_path, monkeypatch, capsys):
    """Kernels take 10 us and torch 20 us; a format whose bits differ from torch's, or that fails, is an exit status."""
    monkeypatch.setattr(quantize, "packs_equal", lambda format, at, dtype: format != "atom4")
    monkeypatch.setattr(quantize, "layer_packings", lambda format, at, dtype: [format])
    monkeypatch.setattr(quantize, "eager", lambda call, seconds: Time(20.0, 20.0, 20.0, 7))
    monkeypatch.setattr(quantize, "time_others", lambda at, dtype, bits, seconds: {f"hqq {bits}-bit": "no package"})
    monkeypatch.setattr(quantize, "measure_flush", lambda *given: (1.0, 2.0, 3.0))

    def replayed(calls, seconds):
        if calls == ["int8"]:
            raise RuntimeError("no\nkernel")
        return Time(10.0, 9.0, 11.0, 7)

    monkeypatch.setattr(quantize, "replayed", replayed)
    assert command.main(["quantize", *device, "--formats", "int4_g128", "--warps", "2", "4"]) == 0
    content = json.loads((tmp_path / "quantize.json").read_text())
    assert [(row["format"], row["what"], row.get("us")) for row in content["rows"]] == [
        ("int4_g128", "kernel, 2 warps", 10.0), ("int4_g128", "kernel, 4 warps", 10.0),
        ("int4_g128", "torch's way", 20.0), ("int4", "hqq 4-bit", None), ("int2", "hqq 2-bit", None),
    ]  # fmt: skip
    assert content["rows"][0]["bytes"] == quantize.packing_bytes("int4_g128", Point("7b", 1, 4096))
    assert {row["ceiling_GB_s"] for row in content["rows"]} == {1.0} and content["ceiling"]["GB_s"] == 1.0
    flush = {"model": "7b", "context": 4096, "format": "int4_g128"}
    times = {"gpu_us": 1.0, "called_us": 2.0, "torch_us": 3.0}
    assert content["flushes"] == [flush | {"flush": name} | times for name in ("128 keys", "1 value")]
    assert "hqq 4-bit" in capsys.readouterr().out
    for format, failed in (("atom4", None), ("int8", "RuntimeError: no kernel")):
        assert command.main(["quantize", *device, "--formats", format]) == 1
        row = json.loads((tmp_path / "quantize.json").read_text())["rows"][0]
        assert (row["same"], row.get("failed")) == (format != "atom4", failed)
