"""Predictions on the command line: figures against hand computation, torch left out, what is refused."""

import json
import os
import subprocess
import sys
from argparse import ArgumentTypeError
from dataclasses import replace
from pathlib import Path

import pytest

from kvbench.bench import __main__ as command
from kvbench.bench import prediction
from kvbench.bench.choices import method_of, shape_of, share
from kvbench.bench.predict import shown_predictions
from kvbench.bench.prediction import PredictedRow, draft_weights
from kvbench.methods import load_method
from kvbench.profiling.intensity import speculative_speed_up
from kvbench.profiling.roofline import Shape

ROOT = Path(__file__).resolve().parents[2]


def predicted(tmp_path, *arguments):
    """Rows of the JSON file by method."""
    assert command.main(["predict", *arguments, "--out", str(tmp_path)]) == 0
    content = json.loads((tmp_path / "predict.json").read_text())
    assert content["argv"][0] == "predict"
    return {row["method"]: row for row in content["rows"]}


def test_neither_torch_nor_a_gpu_is_needed(tmp_path):
    code = (
        "import sys\nfor name in ('torch', 'transformers', 'hydra', 'omegaconf'): sys.modules[name] = None\n"
        "from kvbench.bench.__main__ import main\n"
        "raise SystemExit(main(sys.argv[1:]))"
    )
    asked = ["predict", "--model", "llama2-7b", "--methods", "fp16", "kivi:int4", "quantspec", "--gpu", "h200", "l40s"]
    narrow = {**os.environ, "COLUMNS": "100"}
    done = subprocess.run(
        [sys.executable, "-c", code, *asked], cwd=ROOT, capture_output=True, text=True, timeout=60, env=narrow
    )
    assert done.returncode == 0, done.stderr
    tables = 2  # 100 columns are too few for one
    assert len([line for line in done.stdout.splitlines() if line.startswith("llama2-7b")]) == tables * 2 * 3 * 3
    assert any(
        line.split()[:7] == ["llama2-7b", "h200", "fp16", "1", "32768", "0.98", "6.48"]
        for line in done.stdout.splitlines()
    )


def test_figures_by_hand(tmp_path, capsys):
    rows = predicted(tmp_path, "--methods", "fp16", "kivi:int4", "cocktail:split=10/30/60", "--contexts", "32k")
    n, weights = 32768, 2 * 6738415616
    read = weights - 2 * 32000 * 4096
    fp16, kivi, cocktail = rows["fp16"], rows["kivi:int4"], rows["cocktail:split=10/30/60"]
    assert fp16["kv_bytes"] == 2 * 32 * 4096 * n * 2 and fp16["weight_bytes"] == weights
    assert fp16["tpot_s"] == pytest.approx((read + fp16["kv_bytes"]) / 4.69e12)
    assert (fp16["over_fp16"], fp16["kv_of_fp16"]) == (1, 1)
    # keys: no remainder of 128 exact; values: the newest 128; 5 bits an element with groups of 32
    assert kivi["kv_bytes"] == 32 * 4096 * (n * 5 // 8 + (n - 128) * 5 // 8 + 128 * 2)
    assert kivi["over_fp16"] == pytest.approx((read + fp16["kv_bytes"]) / (read + kivi["kv_bytes"]))
    two, four, exact = 32 * 614, 32 * 308, 32 * 102  # chunks of 32 tokens by rank: 102 in FP16, 410 - 102 in INT4
    per_element = two * (3 + 2.5) / 8 + four * (5 + 4.5) / 8 + exact * 4  # keys G 32, values G 64
    assert cocktail["kv_bytes"] == 32 * 4096 * per_element
    printed = capsys.readouterr().out
    assert "lower bounds from a roofline" in printed and "Speculation" not in printed


def test_speculation_is_drafts_and_a_verification(tmp_path, capsys):
    rows = predicted(tmp_path, "--methods", "quantspec:gamma=4:draft_weights=int4_all", "--contexts", "32k")
    (row,) = rows.values()
    fp16 = predicted(tmp_path, "--methods", "fp16", "--contexts", "32k")["fp16"]
    assert row["draft_s"] < row["verify_s"] < fp16["tpot_s"]
    # five passes a round, of which each yields E tokens
    passes = 5 / ((1 - 0.9**5) / (1 - 0.9))
    assert row["expected_tpot_s"] - row["tpot_s"] == pytest.approx(passes * (fp16["expected_tpot_s"] - fp16["tpot_s"]))
    assert row["over_fp16"] == pytest.approx(
        speculative_speed_up(0.9, 4, fp16["tpot_s"], row["draft_s"], row["verify_s"])
    )
    # a little above what drafts without exact tokens would take
    assert 1.72e-3 < row["draft_s"] < 1.72e-3 * 1.03 and row["verify_s"] == pytest.approx(4.71e-3, rel=0.01)
    assert row["weight_bytes"] - fp16["weight_bytes"] == (
        (32 * (4 * 4096**2 + 3 * 4096 * 11008) + 32000 * 4096) * 4.25 / 8
    )
    logits = 5 * 32000 * (2 + 4)  # of the verification's five tokens
    assert row["decode_peak_bytes"] == row["weight_bytes"] + row["kv_bytes"] + logits
    assert "acceptance of 0.9" in capsys.readouterr().out


def test_a_drafts_own_cache_is_stored_and_not_read_by_the_verification(tmp_path):
    asked = ["--contexts", "32k", "--methods", "quantspec:draft=streamingllm"]
    row = predicted(tmp_path, *asked)["quantspec:draft=streamingllm"]
    assert row["kv_bytes_per_step"] < 0.95 * row["kv_bytes"]


def test_a_sliding_window_holds_what_the_next_token_sees(tmp_path):
    config = {**vars(shape_config()), "model_type": "mistral", "sliding_window": 64}
    (tmp_path / "config.json").write_text(json.dumps(config))
    row = predicted(tmp_path, "--model", str(tmp_path), "--contexts", "1k", "--methods", "fp16")["fp16"]
    assert row["kv_bytes"] == 2 * 32 * 4096 * 63 * 2 and row["kv_of_fp16"] == 1


def test_the_largest_batch_is_one_that_fits(tmp_path):
    own = ["--bandwidth-TBs", "2", "--tflops", "100", "--memory-gb", "24", "--contexts", "4k", "--methods", "fp16"]
    assert [predicted(tmp_path, *own, "--batches", batch)["fp16"]["fits"] for batch in ("4", "5")] == [True, False]


def test_weights_of_drafts():
    shape = Shape(hidden=256, intermediate=512, layers=2, query_heads=4, heads=2, channels=64, vocabulary=128)
    whole, feed_forward = shape.weight_bytes(), 2 * 3 * 256 * 512
    assert draft_weights(shape, whole, "same") == (whole, 0)
    light = feed_forward * 4.25 / 8
    assert draft_weights(shape, whole, "int4") == (whole - 2 * feed_forward + light, light)
    everything = (shape.linear_elements + shape.head_elements) * 4.25 / 8
    table = 2 * (shape.other_elements + shape.head_elements)
    assert draft_weights(shape, whole, "int4_all") == (table + everything, everything)
    tied = replace(shape, tied=True)  # drafting reads the head's copy, not the table that the target reads
    assert draft_weights(tied, tied.weight_bytes(), "int4_all") == (2 * shape.other_elements + everything, everything)


def test_throughput_of_a_generation_and_the_largest_batch(tmp_path):
    """LogQuant's setting (sec. 4.4): an 8B model in 48 GB, prompts of 512 and 2,000 new tokens."""
    asked = ["--model", "llama3-8b-instruct", "--contexts", "512", "--new-tokens", "2000", "--memory-gb", "48"]
    first = predicted(tmp_path, *asked, "--methods", "fp16", "logquant")
    exact, packed = first["fp16"], first["logquant"]
    assert exact["kv_bytes"] == 2 * 32 * 1024 * 2511 * 2
    room = 47 * 2**30 - 2 * 8030261248
    used = [
        b * exact["kv_bytes"] + 2 * 16384 * max(3 * 14336 + 4 * 4096, 2 * 4096 + 128 * (3 * 32 + 4 * 8))
        for b in (exact["max_batch"], exact["max_batch"] + 1)
    ]
    assert used[0] <= room < used[1]  # 32 prompts are read together
    (whole,) = predicted(tmp_path, *asked, "--methods", "fp16", "--mlp-chunk", "none", "--prefill-rows", "all").values()
    assert whole["max_batch"] == int(room // (exact["kv_bytes"] + 2 * 512 * (3 * 14336 + 4 * 4096)))
    assert packed["max_batch"] > 3 * exact["max_batch"]
    step = 2 * (8030261248 - 128256 * 4096) + 2 * 32 * 1024 * 1511 * 2
    assert exact["tpot_s"] == pytest.approx(step / 4.69e12)
    assert exact["tokens_per_s"] == pytest.approx(2000 / (exact["ttft_s"] + 1999 * exact["tpot_s"]))


def test_columns_of_the_table(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "300")  # wide enough for one block
    row = PredictedRow(
        model="m", gpu="g", method="kivi", batch=2, context=7, new_tokens=3, ttft_s=1.5, tpot_s=0.002,
        expected_tpot_s=0.003, over_fp16=1.25, tokens_per_s=9.5, bound="memory", prefill_bound="compute", kv_share=0.5,
        weight_bytes=1, kv_bytes=2**31, kv_bytes_per_step=1, kv_of_fp16=0.25, decode_peak_bytes=3 * 2**30,
        prefill_peak_bytes=2**32, fits=False, max_batch=1,
    )  # fmt: skip
    args = command.bench_parser("predict").parse_args(["predict"])
    text = shown_predictions([row], args)
    (line,) = [line for line in text.splitlines() if line.startswith("m ")]
    assert [cell for cell in line.split() if cell not in ("m", "g", "kivi", "7")] == [
        *("2 1.50 2.00 3.00 1.25 9.50 memory 50.0".split()),
        *("2.00 25.0 4.00 3.00 no 1".split()),
    ]
    assert "11 per layer" in text and "prompts read in groups" in text and "Speculation" not in text
    args.prefill_rows, args.acceptance = None, 0.75
    text = shown_predictions([replace(row, draft_s=1.0)], args)
    assert "all prompts read together" in text and "acceptance of 0.75" in text


def test_packed_weights_and_other_memory(tmp_path):
    asked = ["--contexts", "4k", "--methods", "fp16", "--weight-bits", "4"]
    row = predicted(tmp_path, *asked)["fp16"]
    packed = 32 * (4 * 4096**2 + 3 * 4096 * 11008) + 32000 * 4096
    rest = 2 * (6738415616 - packed)
    assert row["weight_bytes"] == packed // 2 + packed // 32 + rest
    fewer = predicted(tmp_path, *asked, "--weight-group", "64")["fp16"]
    assert fewer["weight_bytes"] - row["weight_bytes"] == packed // 32
    exact_head = predicted(tmp_path, *asked, "--head-bits", "16")["fp16"]
    assert exact_head["weight_bytes"] - row["weight_bytes"] == 32000 * 4096 * (16 - 4.25) / 8
    small = predicted(tmp_path, "--contexts", "4k", "--methods", "fp16", "--memory-gb", "14")["fp16"]
    assert not small["fits"] and small["max_batch"] == 0 and small["gpu"] == "h200"
    several = predicted(tmp_path, "--contexts", "4k", "--methods", "fp16", "--batches", "3")["fp16"]
    assert several["kv_bytes"] == several["kv_bytes_per_step"] == 3 * 2 * 32 * 4096 * 4096 * 2
    assert several["tokens_per_s"] == pytest.approx(3 / several["tpot_s"]) and several["fits"]
    content = json.loads((tmp_path / "predict.json").read_text())
    assert content["gpus"]["h200"]["read"] == 4.69e12 and content["gpus"]["h200"]["matmul"] == 718e12


def test_formats_follow_the_turnedof_channels_that_rope_turns(tmp_path):
    """Octave packs channels without RoPE in 3 bits, others in 4; heads have 128 channels."""
    stored = {}
    for turned in (1.0, 0.5):
        config = {**vars(shape_config()), "model_type": "llama", "partial_rotary_factor": turned}
        (tmp_path / "config.json").write_text(json.dumps(config))
        asked = ["--model", str(tmp_path), "--contexts", "1k", "--methods", "engine:format=octave_k3v4"]
        stored[turned] = predicted(tmp_path, *asked)["engine:format=octave_k3v4"]["kv_bytes"]
    assert stored[1.0] - stored[0.5] == stored[1.0] // 136 * (64 // 8)


def test_a_grid_has_a_row_for_each_combination(tmp_path):
    asked = ["--contexts", "1k", "2k", "--batches", "1", "2", "--gpu", "h200", "l40s", "--methods", "kivi:int4"]
    assert command.main(["predict", *asked, "--out", str(tmp_path), "--name", "x"]) == 0
    content = json.loads((tmp_path / "x.json").read_text())["rows"]
    expected = [(gpu, context, batch) for gpu in ("h200", "l40s") for context in (1024, 2048) for batch in (1, 2)]
    assert [(row["gpu"], row["context"], row["batch"]) for row in content] == expected
    assert {row["method"] for row in content} == {"kivi:int4"} and all(row["over_fp16"] > 1 for row in content)


def test_evicted_tokens_are_not_attended(tmp_path):
    """64 queries over 128k tokens each take 6 ms of FLOPs if they see them all, and next to nothing if they see 64."""
    rows = predicted(tmp_path, "--methods", "snapkv:budget=64", "--contexts", "128k", "--batches", "64")
    assert rows["snapkv:budget=64"]["kv_share"] < 0.2


def test_a_gpu_of_ones_own(tmp_path):
    own = ["--bandwidth-TBs", "2", "--tflops", "100", "--memory-gb", "24"]
    row = predicted(tmp_path, *own, "--methods", "fp16", "--contexts", "4k", "--overhead-us", "10")["fp16"]
    assert row["gpu"] == "own" and row["fits"] and row["max_batch"] == 4
    read = 2 * (6738415616 - 32000 * 4096)
    assert row["tpot_s"] == pytest.approx((read + row["kv_bytes"]) / 2e12 + 32e-5)


def test_shapes_by_name_file_and_folder(tmp_path):
    tiny = shape_of("tiny")
    assert (tiny.layers, tiny.tied, tiny.channels) == (8, True, 64)
    (tmp_path / "config.json").write_text(json.dumps({**vars(shape_config()), "model_type": "llama"}))
    assert shape_of(str(tmp_path)).parameters == 6738415616
    assert shape_of(str(ROOT / "conf/model/llama2-7b.yaml")) == shape_of("llama2-7b")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('{"hidden_size": 8, "num_local_experts": 4}', "model.num_attention_heads"),
        ('{"model_type": "deepseek_v3", "kv_lora_rank": 512}', "multi-head latent attention"),
        (
            '{"hidden_size": 8, "num_attention_heads": 2, "layer_types": ["mamba", "attention"], "ssm_state_size": 8}',
            "mamba_num_heads",
        ),
        ('{"n_embd": 768}', "model.hidden_size"),
        ('{"hidden_size":', "cannot be read"),
        ("a sentence", "cannot be read"),
        ("[1]", "does not contain the keys"),
    ],
)
def test_models_of_which_nothing_can_be_said_are_refused(text, said, tmp_path, capsys):
    (tmp_path / "config.json").write_text(text)
    assert command.main(["predict", "--model", str(tmp_path)]) == 2
    assert said in capsys.readouterr().err


def shape_config():
    import yaml

    from kvbench.models.spec import Architecture
    from kvbench.util.schema import build

    return build(Architecture, yaml.safe_load((ROOT / "conf/model/llama2-7b.yaml").read_text())["architecture"])


def test_of_a_hybrid_and_a_mixture_of_experts_only_bytes_are_predicted(tmp_path, capsys):
    common = {"hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1, "num_hidden_layers": 2}
    hybrid = {"model_type": "lfm2", "layer_types": ["conv", "full_attention"], "conv_L_cache": 3}
    for name, more in (("hybrid", hybrid), ("experts", {"model_type": "mixtral", "num_local_experts": 4})):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps({**common, **more}))
    models = [str(tmp_path / name) for name in ("hybrid", "experts")]
    asked = ["predict", "--methods", "fp16", "engine:format=fp8", "--contexts", "100", "--batches", "2"]
    assert command.main([*asked, "--model", *models, "--out", str(tmp_path)]) == 0
    assert "Bytes only" in capsys.readouterr().out
    content = json.loads((tmp_path / "predict.json").read_text())
    assert content["rows"] == []
    keys = 2 * 2 * 100 * 32  # of a layer with one byte an element: two sequences, keys and values
    sizes = [(row["kv_bytes"], row["state_bytes"]) for row in content["bytes"]]
    assert sizes == [(2 * keys, 2 * 64 * 3 * 2), (keys, 2 * 64 * 3 * 2), (4 * keys, 0), (2 * keys, 0)]
    assert command.main([*asked[:2], "quantspec", "--model", models[0]]) == 2
    assert "cannot go back over rejected drafts" in capsys.readouterr().err


def test_bytes_of_a_hybrid_are_those_of_the_formats_that_suit_it():
    """TurboQuant keeps none of its layers exact, and Octave has wider codes in the channels that RoPE turns."""
    numbers = {"model_type": "lfm2", "layer_types": ["conv", *["full_attention"] * 5], "conv_L_cache": 3}
    numbers |= {"hidden_size": 256, "num_attention_heads": 2, "num_key_value_heads": 1, "partial_rotary_factor": 0.5}
    pairs = (("turboquant", {"boundary": 0}, {"boundary": 2}), ("engine", {"rope_dim": 64}, {"rope_dim": 128}))
    for name, *options in pairs:
        form = {"format": "octave_k3v4"} if name == "engine" else {}
        methods = {str(more): load_method(name, **form, **more) for more in ({}, *options)}
        own, same, other = (
            row.kv_bytes for row in prediction.predicted_bytes("a hybrid", numbers, methods, [100], [1], new_tokens=1)
        )
        assert own == same
        assert (own == other) == (name == "turboquant")  # of a hybrid, boundary has no effect


def test_methods_as_typed():
    kivi = method_of("kivi:int4:residual=64:evict=true")
    assert (kivi.residual, kivi.evict, kivi.quantizer.name) == (64, True, "int4")
    assert method_of("cocktail:split=10/30/60").split == (10, 30, 60)
    assert method_of("snapkv:budget=0.25").budget == 0.25


def test_an_option_of_another_command_is_refused_with_where_to_look(capsys):
    with pytest.raises(SystemExit):
        command.main(["predict", "--sequences", "3"])
    assert "unknown arguments of predict: --sequences 3 (python -m kvbench.bench predict" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--model", "llama2-7"], "did you mean 'llama2-7b"),
        (["--methods", "kiwi"], "did you mean 'kivi'"),
        (["--methods", "kivi:int7"], "quantizer=int7"),
        (["--methods", "kivi:int4:int2"], "two quantizers"),
        (["--methods", "kivi:residul=64"], "did you mean 'residual'"),
        (["--methods", "cocktail"], "split=[10,30,60]"),
        (["--gpu", "h300"], "did you mean 'h200'"),
        (["--gpu", "rtx4091"], "did you mean 'rtx4090'"),
        (["--settings", "kiwi"], "did you mean 'kivi'"),
        (["--methods", "kivi:residual=["], "leaves a bracket or quote open"),
        (["--methods", "kivi:residual=64:residual=128"], "residual twice"),
        (["--bandwidth-TBs", "2"], "--tflops: is missing"),
        (["--tflops", "2"], "--bandwidth-TBs: is missing"),
        (["--bandwidth-TBs", "2", "--tflops", "100"], "--memory-gb"),
        (
            ["--model", "phi3-mini-128k-instruct", "--methods", "cocktail:split=1/1/1,value_group_size=64"],
            "method.value_group_size",
        ),
    ],
)
def test_what_does_not_exist_is_refused(arguments, said, capsys):
    assert command.main(["predict", *arguments]) == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments",
    [
        ["--contexts", "4q"],
        ["--batches", "0"],
        ["--acceptance", "1.5"],
        ["--tflops", "-1"],
        ["--mlp-chunk", "some"],
        ["--overhead-us", "nan"],
        ["--overhead-us", "-9"],
    ],
)
def test_numbers_are_refused_on_the_command_line(arguments, capsys):
    with pytest.raises(SystemExit):
        command.main(["predict", *arguments])
    assert arguments[1] in capsys.readouterr().err
    with pytest.raises(ArgumentTypeError):
        share("x")
