"""``python -m kvbench.fit``: weights of published models, searches, the choice, the commands, and what is refused."""

from __future__ import annotations

import json
import os
import struct
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvbench.bench.choices import shape_of
from kvbench.errors import ConfigError
from kvbench.fit.answer import RUNTIME, Wish, chosen, greatest, step_time
from kvbench.fit.command import fit_rows, main
from kvbench.fit.engines import FORMATS
from kvbench.fit.model import FitModel, model_of, read_model
from kvbench.profiling.roofline import gpu_named

ROOT = Path(__file__).resolve().parents[2]
MODELS = json.loads((ROOT / "results" / "fit" / "vllm.json").read_text(encoding="utf-8"))["models"]
LATENT = MODELS["moonshotai/Kimi-K2-Thinking"]
DEEPSEEK = {
    **LATENT, "model_type": "deepseek_v3", "num_attention_heads": 128, "vocab_size": 129280, "n_routed_experts": 256,
    "first_k_dense_replace": 3, "quantization_config": {"quant_method": "fp8"},
}  # fmt: skip
GPT_OSS = {
    "model_type": "gpt_oss", "hidden_size": 2880, "intermediate_size": 2880, "num_hidden_layers": 24, "head_dim": 64,
    "num_attention_heads": 64, "num_key_value_heads": 8, "vocab_size": 201088, "num_local_experts": 32,
    "num_experts_per_tok": 4, "sliding_window": 128, "layer_types": ["sliding_attention", "full_attention"] * 12,
    "quantization_config": {"quant_method": "mxfp4"},
}  # fmt: skip
GEMMA2 = {
    "model_type": "gemma2", "hidden_size": 3584, "intermediate_size": 14336, "num_hidden_layers": 42, "head_dim": 256,
    "num_attention_heads": 16, "num_key_value_heads": 8, "vocab_size": 256000, "sliding_window": 4096,
}  # fmt: skip
NEXT = {
    "model_type": "qwen3_next", "hidden_size": 2048, "intermediate_size": 5120, "num_hidden_layers": 48,
    "num_attention_heads": 16, "num_key_value_heads": 2, "head_dim": 256, "vocab_size": 151936, "num_experts": 512,
    "full_attention_interval": 4, "linear_conv_kernel_dim": 4, "linear_key_head_dim": 128, "linear_num_key_heads": 16,
    "linear_num_value_heads": 32, "linear_value_head_dim": 128, "num_experts_per_tok": 10,
    "moe_intermediate_size": 512, "shared_expert_intermediate_size": 512,
}  # fmt: skip


def model(numbers: dict[str, Any], **more: Any) -> FitModel:
    return model_of("made", numbers, **more)


@pytest.mark.parametrize(
    ("numbers", "billions", "gib"),
    [
        (DEEPSEEK, 671.03, 626.7),  # 671B; the files have 689 GB with a layer that predicts more tokens
        (GPT_OSS, 20.91, 12.8),  # 20.9B, 13.8 GB
        (GEMMA2, 9.24, 17.21),  # vLLM's log: 17.22 GiB
        (NEXT, 79.67, 148.4),  # 80B
        (MODELS["Qwen/Qwen1.5-MoE-A2.7B"], 14.32, 26.67),  # vLLM's log: 26.67 GiB
        (MODELS["Qwen/Qwen3-235B-A22B-FP8"], 235.09, 437.9),
    ],
    ids=["deepseek-v3", "gpt-oss", "gemma-2", "qwen3-next", "qwen1.5-moe", "qwen3-235b"],
)
def test_weights_of_published_models(numbers: dict[str, Any], billions: float, gib: float) -> None:
    counted = model(numbers)
    assert counted.weights.total / 1e9 == pytest.approx(billions, abs=0.02)
    assert counted.weight_bytes / 2**30 == pytest.approx(gib, rel=0.002)
    assert counted.read_bytes(1) < counted.read_bytes(64) <= counted.weight_bytes or not counted.weights.routed


def test_dense_models_have_the_weights_of_the_roofline() -> None:
    for name in ("llama2-7b", "llama3.1-8b", "qwen2-7b-instruct", "tiny", "phi3-mini-128k-instruct", "smollm2-135m"):
        shape, ours = shape_of(name), read_model(name, "int4")
        assert ours.weights.total == shape.parameters
        assert ours.weight_bytes == pytest.approx(shape.weight_bytes(4, 128, 16))
    assert read_model("qwen1.5-7b-chat-awq").precision.name == "awq 4 bits"


def test_caches_of_windows_states_and_latent_vectors() -> None:
    fp16, fp8 = FORMATS["fp16"].method, FORMATS["fp8"].method
    full = 2 * 8 * 256 * 2
    assert model(GEMMA2).cache_bytes(fp16, 8192) == 21 * full * (8192 + 4095)
    state = model(NEXT).cache.state
    assert state > 0 and model(NEXT).cache_bytes(fp16, 1000) == 12 * 2 * 2 * 256 * 2 * 1000 + state
    assert model(DEEPSEEK).cache_bytes(fp16, 10) == 2 * model(DEEPSEEK).cache_bytes(fp8, 10) == 61 * 576 * 2 * 10
    assert model(DEEPSEEK).cache_bytes(fp16, 10, gpus=8) == model(DEEPSEEK).cache_bytes(fp16, 10)
    qwen = model(MODELS["Qwen/Qwen3-235B-A22B-FP8"])  # 4 heads: more GPUs hold copies
    assert [qwen.cache_bytes(fp16, 1, gpus) for gpus in (1, 2, 4, 8)] == [188 * 256 * n for n in (4, 2, 1, 1)]


def test_what_fits_is_the_most_that_does() -> None:
    assert [greatest(lambda n, most=most: n <= most, 100) for most in (0, 1, 57, 100, 200)] == [0, 1, 57, 100, 100]
    wish = Wish(read_model("llama3.1-8b"), gpu_named("rtx4090"), 8192, 2)
    rows, left_out = fit_rows(wish, ["fp16", "q8_0", "turboquant_4bit_nc"])
    assert not left_out
    for row in rows:
        form = FORMATS[row.format]
        assert wish.fits(form, row.longest_context, 2) and not wish.fits(form, row.longest_context + 1, 2)
        assert wish.fits(form, 8192, row.largest_batch) and not wish.fits(form, 8192, row.largest_batch + 1)
        assert row.fits and row.cache_bytes == 2 * wish.model.cache_bytes(form.method, 8192)
        assert row.tpot_low_s < row.tpot_s < (row.tpot_high_s or 0)
    assert rows[0].longest_context < rows[1].longest_context < rows[2].longest_context


def test_llama_cpp_gives_each_gpu_whole_layers_that_work_one_after_the_other() -> None:
    one = Wish(read_model("llama3.1-8b"), gpu_named("rtx4090"), 8192)
    several, q8 = replace(one, gpus=3, whole_layers=True), FORMATS["q8_0"]
    assert several.weights == one.weights * 11 / 32
    assert several.cached(q8, 8192, 4) == one.cached(q8, 8192, 4) * 11 / 32
    assert step_time(several, q8)[0] == step_time(one, q8)[0]
    assert several.left(0) == one.budget - several.weights - RUNTIME, "layers that are not shared need no NCCL"
    assert several.placed(FORMATS["fp8"]) == several and replace(one, gpus=2).placed(q8).whole_layers
    rows = {row.format: row for row in fit_rows(replace(one, gpus=2), ["q8_0", "int8_per_token_head"])[0]}
    assert rows["q8_0"].tpot_s > 1.5 * rows["int8_per_token_head"].tpot_s, "vLLM's GPUs share each layer"


@pytest.mark.parametrize(
    ("asked", "count"),
    [
        ("llama2-13b --memory-gb 4.5 --formats fp16", 20),  # 40 heads
        ("llama2-13b --memory-gb 4.5 --formats q8_0", 8),  # which llama.cpp places
        ("llama2-13b --memory-gb 4.5 --formats fp16 --engine llama.cpp", 8),
        ("smollm2-135m --memory-gb 0.6 --batch 2 --context 8k", 3),  # 9 heads, 3 for keys
        ("smollm2-135m --memory-gb 0.6 --batch 2 --context 8k --engine vllm", None),  # NCCL's buffers are larger
        ("llama3.1-8b --memory-gb 24 --batch 1000000", None),
    ],
)
def test_a_hint_names_the_fewest_gpus_that_can_share_the_model_and_suffice(
    asked: str, count: int | None, capsys: pytest.CaptureFixture[str]
) -> None:
    words = f"{asked} --gpu own --bandwidth-TBs 1".split()
    assert main(words) == 1
    said = "".join(capsys.readouterr())
    assert ("--gpus" in said) == (count is not None)
    if count is not None:
        assert f"--gpus {count}" in said
        assert main([*words, "--gpus", str(count)]) == 0


def test_the_sentence_compares_fp16_with_what_was_compared(capsys: pytest.CaptureFixture[str]) -> None:
    for formats, reason in (("fp16", "no other format was compared"), ("fp16 q8_0", "no close format is 5% faster")):
        assert main(f"llama2-7b --gpu h100 --formats {formats}".split()) == 0
        assert f"it fits and is exact, and {reason} (" in capsys.readouterr().out


def test_what_times_rest_on() -> None:
    plain = Wish(read_model("llama3.1-8b"), gpu_named("h200"), 32768)
    basis = {
        "measured on this card": plain,
        "measured on an H200, scaled": replace(plain, gpu=gpu_named("l4")),
        "roofline only": replace(plain, gpus=2),
    }
    for expected, wish in basis.items():
        seconds, low, high, shown = step_time(wish, FORMATS["fp8"])
        assert shown == expected and low < seconds and (high is None) == (expected == "roofline only")
    assert step_time(replace(plain, model=model(GPT_OSS)), FORMATS["fp8"])[3] == "roofline only"
    assert step_time(plain, FORMATS["q5_1"])[3] == "roofline only"
    assert step_time(plain, FORMATS["fp16"])[0] == pytest.approx(5.26e-3, rel=0.05)  # docs/bytes-and-latency.md


def test_the_choice() -> None:
    rows, _ = fit_rows(Wish(read_model("llama3.1-8b"), gpu_named("h200"), 8192), ["fp16", "q8_0", "fp8", "q4_0"])
    exact, first, second, far = (
        replace(row, fits=True, tpot_s=seconds, kl=kl)
        for row, seconds, kl in zip(rows, (1.0, 0.97, 0.8, 0.5), (0.0, 0.001, 0.005, 0.06), strict=True)
    )
    assert chosen([exact, first]) is exact, "3 % are not worth a loss"
    assert chosen([exact, first, second, far]) is second, "the fastest that is close"
    assert chosen([exact, replace(first, tpot_s=0.82), second]).format == first.format, (
        "2 % are not worth a loss either"
    )
    assert chosen([exact, first, second], "llama.cpp") is exact
    assert chosen([replace(exact, fits=False), far]) is far, "none is close: the closest"
    unknown = replace(first, kl=None), replace(second, kl=None)
    assert chosen(unknown) is unknown[0] and chosen([replace(far, fits=False)]) is None


def test_torch_is_not_needed() -> None:
    code = (
        "import sys\nfor name in ('torch', 'transformers', 'hydra'): sys.modules[name] = None\n"
        "from kvbench.fit.command import main\nraise SystemExit(main(sys.argv[1:]))"
    )
    asked = [sys.executable, "-c", code, "llama3.1-8b", "--gpu", "rtx4090", "--context", "32k", "--engine", "vllm"]
    done = subprocess.run(asked, cwd=ROOT, capture_output=True, text=True, env={**os.environ, "COLUMNS": "160"})
    assert done.returncode == 0, done.stderr
    first, *rest = done.stdout.splitlines()
    assert first.startswith("Use ") and "for 32k tokens x 1 of llama3.1-8b on rtx4090" in first
    text = "\n".join(rest)
    assert "vllm serve meta-llama/Llama-3.1-8B --max-model-len 32768 --max-num-seqs 1" in text
    assert "how far llama3.1-8b is from it is unknown" in text


def test_commands_of_engines(capsys: pytest.CaptureFixture[str]) -> None:
    asked = "llama3.1-8b --gpu h100 --gpus 2 --context 4k --batch 8 --weights fp8 --json".split()
    assert main(asked) == 0
    answer = json.loads(capsys.readouterr().out)
    rows = {row["format"]: row["commands"] for row in answer["rows"]}
    assert rows["turboquant_4bit_nc"]["vllm"] == (
        "vllm serve meta-llama/Llama-3.1-8B --max-model-len 4096 --max-num-seqs 8 --gpu-memory-utilization 0.92 "
        "--tensor-parallel-size 2 --quantization fp8 --kv-cache-dtype turboquant_4bit_nc"
    )
    assert "--tp 2 --quantization fp8 --kv-cache-dtype fp8_e4m3" in rows["fp8"]["sglang"]
    assert rows["q8_0"]["llama.cpp"].endswith("-np 8 -c 32768 -fa on -ctk q8_0 -ctv q8_0")
    assert rows["q8_0"]["vllm"] is None and rows["kivi int4"] == dict.fromkeys(rows["kivi int4"])
    memory = answer["memory"]
    assert memory["weights"] == read_model("llama3.1-8b", "fp8").weight_bytes / 2 < memory["budget"]


@pytest.mark.parametrize(
    ("asked", "status", "said"),
    [
        ("llama3.1-8b --gpu rtx4091", 2, "did you mean 'rtx4090'"),
        ("llama3.1-8 --gpu h100", 2, "did you mean 'llama3.1-8b'"),
        ("llama3.1-8b --gpu h100 --memory-gb 0", 2, "'0' is not a number above 0"),
        ("llama3.1-8b --gpu h100 --context -5", 2, "'-5' is not a number of tokens"),
        ("llama3.1-8b --gpu h100 --context 256k", 2, "use --context 131072"),
        ("llama3.1-8b --gpu h100 --utilization 2", 2, "at most 1"),
        ("llama3.1-8b --gpu h100 --formats q8", 2, "did you mean 'q8_0'"),
        ("llama3.1-8b --gpu own --memory-gb 24", 2, "--bandwidth-TBs 0.9"),
        ("llama3.1-8b --gpu h100 --bandwidth-TBs 2", 2, "is for a card that is not listed"),
        ("none.gguf --gpu h100", 2, "does not exist"),
        ("llama3.1-8b --gpu h100 --plot fit.foo", 2, "use --plot fit.png"),
        ("llama3.1-8b --gpu h100 --gpus 3", 2, "8 for keys, which so many GPUs cannot share"),
        ("llama3.1-8b --gpu h100 --gpus 1000000", 2, "use --gpus 32, or --engine llama.cpp"),
        ("llama3.1-8b --gpu h100 --weights-gb 100", 1, "use more GPUs (--gpus 2)"),
        ("llama3.1-8b --gpu h100 --weights-gb 1000", 1, "use more GPUs (--gpus 16)"),
        ("llama3.1-8b --gpu h100 --weights-gb 1e9", 1, "use a card with more memory"),
        ("llama3.1-8b --gpu h100 --gpus 33 --engine llama.cpp", 2, "--gpus=33: is more than the 32 layers"),
        ("endpoint --gpu h100", 2, "name another model"),
        ("llama3.1-8b --gpu t4", 1, "use --weights int4, more GPUs (--gpus 2) or a card with more memory"),
        ("smollm2-135m --gpu own --memory-gb 0.3 --bandwidth-TBs 1", 1, "use --weights int4 or a card"),
    ],
)
def test_nonsense_is_refused_with_a_remedy(
    asked: str, status: int, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        ended = main(asked.split())
    except SystemExit as end:
        ended = end.code
    assert ended == status and said in capsys.readouterr().err


def test_models_that_are_refused_by_name() -> None:
    for numbers, said in (
        ({"model_type": "mamba", "hidden_size": 8, "num_hidden_layers": 2}, "no softmax attention"),
        ({**GEMMA2, "num_kv_shared_layers": 4}, "share the keys and values of another layer"),
        ({**GEMMA2, "quantization_config": {"quant_method": "hieroglyphs"}}, "not a known way"),
        ({**GEMMA2, "layer_types": ["mamba", "attention"] * 21, "mamba_n_heads": 4, "mamba_d_head": 64,
          "mamba_d_state": 16, "mamba_d_conv": 4, "mamba_n_groups": 1}, "--weights-gb"),
        ({}, "complete its config.json"),
        ({**GEMMA2, "num_attention_heads": 0}, "num_attention_heads=0: must be a whole number"),
        ({**GEMMA2, "num_key_value_heads": "8"}, "num_key_value_heads=8: must be a whole number"),
        ({**GEMMA2, "head_dim": -64}, "head_dim=-64: must be a whole number"),
        ({**LATENT, "qk_rope_head_dim": None}, "model.qk_rope_head_dim"),
        ({**GEMMA2, "quantization_config": {"quant_method": "awq", "bits": "four"}}, "bits=four: must be a number"),
        ({**GEMMA2, "num_hidden_layers": 10**9}, "num_hidden_layers=1000000000: is larger than 4096"),
        ({**GEMMA2, "hidden_size": 10**30}, "is larger than"),
        ({**GEMMA2, "sliding_window": -1}, "sliding_window=-1: must be a whole number"),
        ({**GEMMA2, "max_position_embeddings": 0}, "max_position_embeddings=0: must be 1 or greater"),
        ({**GEMMA2, "layer_types": ["full_attention"]}, "the kinds of 1 layers, but num_hidden_layers is 42"),
        ({**GEMMA2, "model_type": ["gemma2"]}, "must be a text"),
    ):  # fmt: skip
        with pytest.raises(ConfigError) as refused:
            model(numbers)
        assert said in str(refused.value)
    unknown = {**GEMMA2, "quantization_config": {"quant_method": "hieroglyphs"}}
    assert model(unknown, size_gib=2.0).weight_bytes == 2 * 2**30, "the remedy works"


def test_a_config_is_json_and_weights_in_fewer_bits_are_another_checkpoint(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = [str(tmp_path), "--gpu", "h200", "--weights", "int4", "--formats", "fp16"]
    (tmp_path / "config.json").write_text(json.dumps(GEMMA2, indent="\t"))
    assert main(asked) == 0 and "in int4 for its name" in capsys.readouterr().out
    for damaged in ("{no json", "[" * 100_000):
        (tmp_path / "config.json").write_text(damaged)
        assert main(asked) == 2 and "cannot be read" in capsys.readouterr().err
    odd: tuple[dict[str, Any], ...] = (
        {"layer_types": 5},
        {"quantization_config": {"quant_method": "modelopt", "quantization": [2]}},
    )
    for change in odd:
        (tmp_path / "config.json").write_text(json.dumps({**GEMMA2, **change}))
        assert main(asked[:3]) == 2 and "configuration that makes no sense" in capsys.readouterr().err
    (tmp_path / "no.gguf").write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 0, 0) + b"\0" * 64)  # no metadata
    assert main([str(tmp_path / "no.gguf"), "--gpu", "h200"]) == 2 and "must be a whole" in capsys.readouterr().err


def test_formats_are_ordered_by_bits_however_they_are_asked_for() -> None:
    rows, _ = fit_rows(Wish(model(LATENT), gpu_named("b200"), 1024, gpus=8), ["fp8", "fp16", "fp8"])
    assert [row.format for row in rows] == ["fp16", "fp8"]


def test_formats_that_no_engine_or_model_has(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["tiny", "--gpu", "h200", "--engine", "llama.cpp", "--formats", "fp8"]) == 1
    assert capsys.readouterr().out.startswith("Nothing that llama.cpp has fits 4k tokens x 1 of tiny on h200, but fp8 ")
    with pytest.raises(ConfigError, match="latent attention is stored otherwise"):
        fit_rows(Wish(model(LATENT), gpu_named("h200"), 1024), ["q8_0"])


def test_too_long_a_context_says_what_fits(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main("llama2-13b --gpu h200 --context 4k --batch 4000".split()) == 1
    said = capsys.readouterr().out
    assert said.startswith("Nothing fits 4k tokens x 4000") and "use a shorter --context" in said
    assert main("llama2-13b --gpu h200 --batch 200000 --formats fp16".split()) == 1
    assert "there is no room for a token of each of 200000 sequences" in capsys.readouterr().out
    file = tmp_path / "fit.png"
    pytest.importorskip("matplotlib")
    assert main(["tiny", "--gpu", "l4", "--formats", "fp16", "fp8", "--plot", str(file)]) == 0 and file.stat().st_size


def test_a_plot_without_matplotlib_is_refused_before_anything_is_computed(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setattr("kvbench.util.requirements.installed", lambda name: name != "matplotlib")
    assert main(["tiny", "--gpu", "l4", "--plot", str(tmp_path / "fit.png")]) == 2
    said = capsys.readouterr()
    assert said.out == "" and "matplotlib, which is not installed" in said.err and "kvbench[plot]" in said.err


def test_the_reference_loses_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    exact, fp8 = fit_rows(Wish(read_model("tiny"), gpu_named("l4"), 1024), ["fp16", "fp8"])[0]
    assert (exact.kl, exact.kl_high, exact.flips) == (0.0, 0.0, 0.0) and fp8.kl is not None and fp8.kl > 0.001
    assert main(["tiny", "--gpu", "l4", "--formats", "fp16", "fp8"]) == 0
    assert " reference " in capsys.readouterr().out
    assert fit_rows(Wish(model(LATENT), gpu_named("b200"), 1024, gpus=8), ["fp16"])[0][0].kl is None


@pytest.mark.parametrize(
    ("gpu", "vllm", "sglang"),
    [
        ("t4", "int8_per_token_head", "fp8 int8_per_token_head"),
        ("rtx3090", "int8_per_token_head", "fp8 int8_per_token_head"),
        ("rtx4090", "fp8 int8_per_token_head", "fp8 int8_per_token_head"),
        ("h200", "fp8 int8_per_token_head", "fp8 int8_per_token_head"),
        ("b200", "fp8 int8_per_token_head nvfp4", "fp4_mx_block16 fp8 int8_per_token_head"),
        ("rtx5090", "fp8 int8_per_token_head", "fp8 int8_per_token_head"),
        ("gb10", "fp8 int8_per_token_head", "fp8 int8_per_token_head"),
        ("m1", "", ""),
    ],
)
def test_what_engines_serve_depends_on_the_card(gpu: str, vllm: str, sglang: str) -> None:
    asked = ["int8_per_token_head", "fp8", "nvfp4", "fp4_mx_block16", "q8_0"]
    rows = fit_rows(Wish(read_model("tiny"), gpu_named(gpu), 1024), asked)[0]
    for engine, expected in (("vllm", vllm), ("sglang", sglang), ("llama.cpp", "q8_0")):
        assert sorted(row.format for row in rows if engine in row.flags) == expected.split()
        assert all((row.commands[engine] is None) == (engine not in row.flags) for row in rows)
    assert all({*row.flags, *row.refused} == FORMATS[row.format].flags.keys() for row in rows)


def test_refused_formats_are_named_and_not_recommended(capsys: pytest.CaptureFixture[str]) -> None:
    asked = "tiny --engine vllm --formats fp8 int4_per_token_head".split()
    assert main([*asked, "--gpu", "l4"]) == 0 and capsys.readouterr().out.startswith("Use fp8 (vllm)")
    assert main([*asked, "--gpu", "rtx3090"]) == 0
    said = capsys.readouterr().out
    assert said.startswith("Use int4_per_token_head (vllm)") and "not on rtx3090: fp8 (vllm: vLLM's Triton" in said
    assert main(["tiny", "--gpu", "m1", "--engine", "vllm"]) == 1
    assert "(its kernels need CUDA), but fp16, q8_0," in capsys.readouterr().out
    unlisted = "tiny --gpu own --memory-gb 24 --bandwidth-TBs 0.9 --formats fp8 --engine vllm".split()
    assert main(unlisted) == 0, "nothing is known of it"


def test_this_machine_as_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    from kvbench.fit import stream

    monkeypatch.setattr(stream, "COPIED", 1 << 16)
    monkeypatch.setattr(stream, "ROWS", 16)
    card = stream.this_processor()
    assert card.name == "cpu" and card.read > 0 and card.usable > 0
    row = fit_rows(Wish(read_model("tiny"), card, 1024), ["fp16"])[0][0]
    assert row.fits and row.basis == "roofline only"
    packed = fit_rows(Wish(read_model("tiny"), card, 1024), ["fp8", "q8_0"])[0]
    assert set(row.flags) == {"vllm", "sglang", "llama.cpp"} and [set(one.flags) for one in packed] == [
        {"llama.cpp"},
        set(),
    ]
