"""The dtypes of a model: what its caches store, and in what the machine computes."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from transformers import LlamaConfig, LlamaForCausalLM

from kvbench.config.run_options import RuntimeConfig
from kvbench.errors import ConfigError
from kvbench.methods import load_method
from kvbench.models import arithmetic
from kvbench.models.load import byte_tokenizer, load_model
from kvbench.models.spec import ModelConfig
from kvbench.util.schema import build
from tests import zoo
from tests.models.test_load import SMALL

CPU, GPU = torch.device("cpu"), torch.device("cuda")
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


@pytest.fixture(autouse=True)
def chosen_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(arithmetic.VARIABLE)
    monkeypatch.setenv("KVBENCH_CACHE", str(tmp_path / "cache"))
    arithmetic.faster_in_float32.cache_clear()


def probe(monkeypatch: pytest.MonkeyPatch, speed_up: float) -> list[torch.dtype]:
    """Let the probe give a result; return the list of its calls."""
    calls: list[torch.dtype] = []
    monkeypatch.setattr(arithmetic, "_float32_speed_up", lambda dtype: calls.append(dtype) or speed_up)
    arithmetic.faster_in_float32.cache_clear()
    return calls


def config(dtype: Any = None) -> LlamaConfig:
    return LlamaConfig(**zoo.ARCHITECTURE, dtype=dtype)


def dtypes(name: str = "auto", wanted: str = "auto", device: torch.device = CPU, **more: Any) -> arithmetic.Dtypes:
    runtime = RuntimeConfig(arithmetic=wanted, memory_limit_gb=more.pop("limit_gb", None))  # type: ignore[arg-type]
    return arithmetic.dtypes(name, runtime, device, more.pop("config", config(BF16)), **more)


@pytest.mark.parametrize("device", [CPU, GPU])
@pytest.mark.parametrize(
    ("own", "storage"), [(BF16, BF16), ("float16", FP16), (FP32, BF16), (None, BF16), ("bfloat16", BF16)]
)
def test_auto_stores_in_the_checkpoints_own_16_bits_on_every_device(
    own: Any, storage: torch.dtype, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    probe(monkeypatch, 3.0)
    got = dtypes(config=config(own), device=device)
    assert (got.storage, got.usual) == (storage, storage)
    assert got.arithmetic == (FP32 if device == CPU else storage)


def test_a_config_without_a_dtype_has_that_of_the_weights(tmp_path: Path) -> None:
    save_file({"w": torch.zeros(2, dtype=FP16)}, tmp_path / "model.safetensors")
    assert arithmetic.usual_storage(config(None), [tmp_path / "model.safetensors"]) == FP16
    assert arithmetic.usual_storage(config(FP32), [tmp_path / "model.safetensors"]) == BF16


@pytest.mark.parametrize(
    ("name", "wanted", "speed_up", "storage", "computed"),
    [
        ("auto", "auto", 1.1, BF16, BF16),  # not worth twice the memory
        ("auto", "auto", 1.3, BF16, FP32),
        ("float16", "auto", 1.3, FP16, FP32),
        ("auto", "storage", 1.3, BF16, BF16),
        ("auto", "float32", 0.2, BF16, FP32),
        ("float32", "auto", 0.2, FP32, FP32),
        ("float32", "storage", 0.2, FP32, FP32),
    ],
)
def test_the_machine_chooses_how_it_computes(
    name: str,
    wanted: str,
    speed_up: float,
    storage: torch.dtype,
    computed: torch.dtype,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    probe(monkeypatch, speed_up)
    got = dtypes(name, wanted)
    assert (got.storage, got.arithmetic, got.slower) == (storage, computed, "")


def test_auto_follows_the_environment_and_a_named_arithmetic_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    probe(monkeypatch, 3.0)
    monkeypatch.setenv(arithmetic.VARIABLE, "storage")
    assert dtypes().arithmetic == BF16 and dtypes(wanted="float32").arithmetic == FP32
    monkeypatch.setenv(arithmetic.VARIABLE, "")
    assert dtypes().arithmetic == FP32
    monkeypatch.setenv(arithmetic.VARIABLE, "bfloat16")
    with pytest.raises(ConfigError, match=r"KVBENCH_ARITHMETIC=bfloat16: .*\n.*storage"):
        dtypes()


def test_weights_that_do_not_fit_in_float32_stay_as_they_are_and_say_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    probe(monkeypatch, 3.0)
    save_file({"w": torch.zeros(1024, 1024, dtype=BF16)}, tmp_path / "w.safetensors")  # 4 MiB in float32
    monkeypatch.setattr(arithmetic, "free_memory", lambda: 6.0 * 2**20)
    assert dtypes(files=[tmp_path / "w.safetensors"]).arithmetic == FP32
    monkeypatch.setattr(arithmetic, "free_memory", lambda: 4.5 * 2**20)
    got = dtypes(files=[tmp_path / "w.safetensors"])
    assert got.arithmetic == BF16 and got.names()["slower"].startswith("weights in float32 would take 0.00391 GiB")
    monkeypatch.setattr(arithmetic, "free_memory", lambda: None)
    assert dtypes(files=[tmp_path / "w.safetensors"]).arithmetic == FP32
    assert dtypes(files=[tmp_path / "w.safetensors"], limit_gb=0.0101).arithmetic == FP32
    monkeypatch.setattr(arithmetic, "free_memory", lambda: 2.0**40)
    save_file({"w": torch.zeros(4096, 1024, dtype=BF16)}, tmp_path / "v.safetensors")
    assert dtypes(files=[tmp_path / "v.safetensors"], limit_gb=0.0101).arithmetic == BF16


def test_random_weights_that_do_not_fit_in_float32_stay_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    probe(monkeypatch, 3.0)
    count = LlamaForCausalLM(config()).num_parameters()
    assert dtypes(drawn=True, limit_gb=5.5 * count / 2**30).arithmetic == FP32
    assert dtypes(drawn=True, limit_gb=4.5 * count / 2**30).arithmetic == BF16


@pytest.mark.parametrize("wanted", ["storage", "float32"])
def test_random_weights_keep_the_frequencies_of_rope_in_float32(wanted: Any) -> None:
    data = {"name": "m", "weights": "random", "max_length": 256, "architecture": SMALL}
    loaded = load_model(build(ModelConfig, data, "model"), RuntimeConfig(device="cpu", arithmetic=wanted))
    rope = loaded.model.model.rotary_emb.inv_freq
    assert rope.dtype == FP32 and not torch.equal(rope, rope.to(BF16).float())


def test_hybrids_compute_in_the_storage_as_their_states_have_the_dtype_of_the_arithmetic(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    probe(monkeypatch, 3.0)
    monkeypatch.setattr(
        arithmetic, "layer_kinds", lambda config: [SimpleNamespace(states=0), SimpleNamespace(states=1)]
    )
    got = dtypes()
    assert got.arithmetic == BF16 and got.slower == "the model's states would take the bytes of float32"
    assert dtypes(wanted="float32").arithmetic == FP32


def test_ranks_of_a_team_compute_in_the_storage_and_say_so(monkeypatch: pytest.MonkeyPatch) -> None:
    probe(monkeypatch, 3.0)
    got = arithmetic.dtypes("auto", RuntimeConfig(tensor_parallel="auto"), CPU, config(BF16))
    assert got.arithmetic == BF16 and "ranks" in got.slower


def test_the_probe_runs_once_for_a_machine_and_its_instructions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = probe(monkeypatch, 2.0)
    assert arithmetic.faster_in_float32(BF16) and arithmetic.faster_in_float32(BF16)
    again = probe(monkeypatch, 0.5)  # another process: the cache folder knows
    assert arithmetic.faster_in_float32(BF16)
    assert calls == [BF16] and again == []
    assert not arithmetic.faster_in_float32(FP16) and again == [FP16]
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "SSE41")
    others = probe(monkeypatch, 0.5)
    assert not arithmetic.faster_in_float32(BF16) and others == [BF16]
    assert sorted(json.loads((tmp_path / "cache" / "arithmetic.json").read_text()).values()) == [0.5, 0.5, 2.0]


@pytest.mark.parametrize("content", ["[1]", "{", '{"a": "b"}', "null"])
def test_a_damaged_record_of_probes_is_made_anew(content: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache" / "arithmetic.json").write_text(content)
    assert probe(monkeypatch, 2.0) == [] and arithmetic.faster_in_float32(BF16)
    assert list(json.loads((tmp_path / "cache" / "arithmetic.json").read_text()).values()) == [2.0]


def test_without_a_folder_to_write_to_the_probe_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVBENCH_CACHE", "/dev/null/cache")
    calls = probe(monkeypatch, 2.0)
    assert arithmetic.faster_in_float32(BF16) and arithmetic.faster_in_float32(BF16) and calls == [BF16]


def test_the_probe_compares_the_quickest_products_of_both_dtypes(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, shapes, spent = [0.0], set(), {BF16: [9.0, 3.0, 6.0], FP32: [9.0, 2.0, 4.0]}  # the first one warms up

    def linear(x: torch.Tensor, weight: torch.Tensor) -> None:
        shapes.add((tuple(x.shape), tuple(weight.shape), x.dtype == weight.dtype))
        times = spent[x.dtype]
        clock[0] += times.pop(0) if len(times) > 1 else times[0]

    monkeypatch.setattr(torch.nn.functional, "linear", linear)
    monkeypatch.setattr(arithmetic, "time", SimpleNamespace(perf_counter=lambda: clock[0]))
    assert arithmetic._float32_speed_up(BF16) == 1.5
    assert shapes == {((512, 512), (1536, 512), True)}


def test_a_model_of_either_arithmetic_fills_its_cache_with_the_same(tmp_path: Path) -> None:
    """A checkpoint in float32: stored in bfloat16, and weights that float32 arithmetic does not round."""
    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(**{**zoo.ARCHITECTURE, "vocab_size": 300})).save_pretrained(tmp_path)
    byte_tokenizer().save_pretrained(tmp_path)
    bills, stored = {}, {}
    for wanted in ("storage", "float32"):
        loaded = load_model(
            ModelConfig(name="m", path=str(tmp_path), max_length=256),
            RuntimeConfig(device="cpu", arithmetic=wanted),  # type: ignore[arg-type]
        )
        assert loaded.storage == BF16 and loaded.dtype == (FP32 if wanted == "float32" else BF16)
        cache = load_method("kivi", quantizer="int2", residual=64).new_cache(loaded.model)
        ids = torch.arange(100)[None] + 10
        with torch.inference_mode():
            loaded.model(input_ids=ids, past_key_values=cache)
            loaded.model(input_ids=ids[:, :1], past_key_values=cache)
        bills[wanted] = cache.bill()
        tail = cache.kv_layers[0].stores()[0].tail
        stored[wanted] = tail.view(slice(0, 1)).float()
        assert tail.buffer.dtype == BF16
        exact = torch.equal(loaded.model.lm_head.weight.float().to(BF16).float(), loaded.model.lm_head.weight.float())
        assert exact == (wanted == "storage")
    assert bills["float32"] == bills["storage"] and bills["storage"].width == 2
    torch.testing.assert_close(stored["float32"], stored["storage"], rtol=0.05, atol=0.05)
