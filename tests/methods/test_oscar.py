"""OSCAR: what is exact, what is stored, its bytes, the calibration file, and settings that are refused."""

import shutil
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from kvbench.cache.segments.packed import PackedSegment
from kvbench.calibration import stored
from kvbench.calibration.rotations import Rotations
from kvbench.cli.calibrate import model_config
from kvbench.errors import ConfigError
from kvbench.methods import load_method
from kvbench.methods.bytes import kv_bytes
from kvbench.quantizers.oscar import OscarQuantizer
from tests import zoo

CALIBRATED = {"sinks": 4, "window": 20}


def oscar(**fields):
    return load_method("oscar", **{"calibration": zoo.rotations("llama"), **CALIBRATED, **fields})


def filled(method, tokens: int = 58, steps: int = 4, model=None):
    """A cache after a prompt and steps of a random model."""
    model = model or zoo.model("llama")
    ids, _ = zoo.padded_batch([tokens + steps])
    cache = method.new_cache(model)
    with torch.no_grad():
        logits = model(ids[:, :tokens], past_key_values=cache).logits[:, -1:]
        for at in range(tokens, tokens + steps):
            logits = torch.cat([logits, model(ids[:, at : at + 1], past_key_values=cache).logits], 1)
    return cache, logits, ids


@pytest.mark.parametrize("per_head", [False, True])
def test_tokens_are_stored_rotated_and_clipped_between_exact_ones(per_head):
    folder = zoo.rotations("llama", per_head=per_head)
    cache, _, ids = filled(oscar(calibration=folder))
    bill = cache.bill()  # settles
    assert bill.used.scales > 0
    model = zoo.model("llama")
    exact = load_method("fp16").new_cache(model)
    with torch.no_grad():
        model(ids, past_key_values=exact)
    file = stored.load_stored(next(Path(folder).glob("*.safetensors")), Rotations)
    layer, plain = cache.layers[0], exact.layers[0]  # the first layer's inputs do not depend on the cache
    for side, clip, store, known in zip(("key", "value"), (0.96, 0.92), layer.stores(), plain.stores(), strict=True):
        first, packed, tail = store.segments
        lengths = [segment.length(slice(0, 1)) for segment in store.segments]
        assert lengths == [4, 38, 20] and isinstance(packed, PackedSegment)
        matrix = file.rotation(0, side)
        assert matrix.ndim == (3 if per_head else 2)
        rotated = known.tail.view(slice(0, 1)) @ matrix
        for segment, begin, end in ((first, 0, 4), (tail, 42, 62)):
            torch.testing.assert_close(segment.view(slice(0, 1)), rotated[:, :, begin:end], rtol=0, atol=1e-5)
        expected = OscarQuantizer(2, clip).quantize(rotated[:, :, 4:42])
        codes = packed.codes(slice(0, 1), 0, 38)
        assert float((codes != expected.codes()).float().mean()) < 1e-3  # another order of sums
        read = packed.read(slice(0, 1), 0, 38, torch.float32)
        assert float((read - expected.dequantize()).abs().max()) < 0.5 * float(rotated.abs().max())


def test_without_quantized_tokens_the_answer_is_that_of_fp16():
    """The rotation alone changes nothing: everything is inside sinks and window."""
    _, logits, _ = filled(oscar(window=100))
    _, expected, _ = filled(load_method("fp16"))
    torch.testing.assert_close(logits, expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("scales", ["fp16", "bf16", "fp32"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bytes_are_those_of_the_formula(scales, dtype):
    cache, _, _ = filled(oscar(scales=scales), model=zoo.model("llama", dtype))
    used = cache.bill().used
    width = dtype.itemsize
    param = {"fp16": 4 if dtype == torch.float32 else 2, "bf16": 2, "fp32": 4}[scales]
    stores = 2 * 2 * 2  # layers, heads, sides
    expected = (stores * 38 * 64 // 4, stores * 38 * 2 * param, stores * 24 * 64 * width)
    assert (used.codes, used.scales, used.window) == expected
    predicted = kv_bytes(
        oscar(scales=scales), layers=2, tokens=62, prompt=58, query_heads=4, heads=2, channels=64, width=width
    )
    assert (predicted.codes, predicted.scales, predicted.window) == expected


def test_the_papers_bits_per_element():
    """2.28 bits at 128k tokens: 16-bit parameters, and 320 exact tokens."""
    bits = {}
    for scales in ("fp16", "fp32"):
        total = kv_bytes(
            load_method("oscar", scales=scales),
            layers=1, tokens=131072, prompt=131072, query_heads=8, heads=8, channels=128, width=2,
        ).total  # fmt: skip
        bits[scales] = round(8 * total / (2 * 8 * 128 * 131072), 2)
    assert bits == {"fp16": 2.28, "fp32": 2.53}


def test_options_reach_the_quantizer():
    method = oscar(levels="lloyd_max", scales="fp32", clip_key=1.0)
    key, value = (method.make_quantizer(side, 64) for side in ("key", "value"))
    assert (key.clip, value.clip, key.lloyd_max, key.scales) == (1.0, 0.92, True, "fp32")
    filled(method)
    plain = oscar(basis="rotation", calibration=None, rotation={"key": "hadamard", "value": "none"}, clip_value=1.0)
    cache, _, _ = filled(plain)
    layer = cache.layers[0]
    assert layer.transform("value") is None
    matrix = layer.transform("key").forward
    torch.testing.assert_close(matrix.abs(), torch.full((64, 64), 0.125))


def test_tensor_parallel_ranks_take_the_rotations_of_their_heads():
    folder = zoo.rotations("llama", per_head=True)
    cache = oscar(calibration=folder).new_cache(zoo.model("llama"))
    layer = cache.layers[1]
    whole = stored.load_stored(cache.progress.method_state.path, Rotations).rotation(1, "value")
    layer.heads, layer.value_dim, layer.device = 1, whole.shape[-1], torch.device("cpu")
    for rank in (0, 1):
        cache.progress.rank = rank, 2
        assert torch.equal(layer.transform("value").forward, whole[rank : rank + 1])


def test_the_bundled_calibration_is_found_and_is_part_of_the_identity(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    method = load_method("oscar")
    assert "calibration" not in method.identity()
    method.prepare(model_config("tiny", None, None, False))
    assert method.calibration_file.name == "tiny-oscar.safetensors" and len(method.identity()["calibration"]) == 16
    copy = tmp_path / "copy.safetensors"
    shutil.copy(method.calibration_file, copy)
    again = load_method("oscar", calibration=str(copy))
    again.prepare(model_config("tiny", None, None, False))
    assert again.identity() == method.identity() and again.hyperparameters()["calibration"] == str(copy)
    with pytest.raises(
        ConfigError, match=r"none for llama2-7b(?s:.*)calibrate method=oscar --model llama2-7b --text"
    ) as e:
        load_method("oscar").prepare(model_config("llama2-7b", None, None, False))
    assert "--random" not in str(e.value), "a trained model is not calibrated with random weights"
    with pytest.raises(ConfigError, match=r"none for tiny-random .*-oscar\S* \(tiny\)(?s:.*)--model tiny --random"):
        load_method("oscar").prepare(model_config("tiny", None, None, True))
    plain = load_method("oscar", basis="rotation")
    plain.prepare(model_config("llama2-7b", None, None, False))
    assert plain.calibration_file is None


def test_a_file_of_another_model_is_refused(tmp_path):
    path = next(Path(zoo.rotations("llama")).glob("*.safetensors"))
    with pytest.raises(ConfigError, match="was made with another model, llama, which has the same shape"):
        oscar(calibration=str(path)).new_cache(zoo.restless())
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match=r"oscar needs a calibration \(rotations\), but there is none"):
        oscar(calibration=str(tmp_path / "empty")).new_cache(zoo.model("llama"))
    shutil.copytree(zoo.rotations("llama"), tmp_path / "toy" / "calibration")
    model = zoo.restless()
    model.config._name_or_path = str(tmp_path / "toy")
    with pytest.raises(ConfigError, match=r"the weights of this model \(toy\)(?s:.*) \(llama\)(?s:.*)with --random if"):
        oscar(calibration=None).new_cache(model)
    odd = LlamaForCausalLM(LlamaConfig(**{**zoo.ARCHITECTURE, "head_dim": 80}))
    with pytest.raises(ConfigError, match=r"80 channels(?s:.*)method\.rotation\.key=hadamard"):
        oscar(calibration=str(tmp_path / "empty")).new_cache(odd)  # no calibration can be made for it


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"window": -1}, "method.window=-1: must be at least 0"),
        ({"sinks": -1}, "method.sinks=-1: must be at least 0"),
        ({"clip_key": 0.0}, "method.clip_key=0.0: must be greater than 0.0"),
        ({"clip_value": 1.5}, "method.clip_value=1.5: must be at most 1.0"),
        ({"calibration": "absent.safetensors"}, r"absent.safetensors: does not exist(?s:.*)--out absent.safetensors"),
        ({"rotation": {"key": "hadamard"}}, r"has no effect(?s:.*)hint: set method\.basis=rotation"),
        ({"basis": "rotation", "calibration": "x"}, r"is not read with method\.basis=rotation"),
        ({"quantizer": "int2", "takes": ["int2"]}, "OSCAR has one group per token and head"),
    ],
)
def test_settings_that_cannot_be(fields, message):
    with pytest.raises(ConfigError, match=message):
        load_method("oscar", **fields)


def test_lloyd_max_needs_2_bits_and_the_rotation_a_power_of_two():
    four = {"key": {"bits": 4, "group_size": "head_dim", "axis": "token"}}
    formats = {**four, "value": four["key"]}
    assert load_method("oscar", quantizer=formats).make_quantizer("key", 64).bits == 4
    with pytest.raises(ConfigError, match=r"cuts codes at the edges of a 2-bit quantizer"):
        load_method("oscar", quantizer=formats, levels="lloyd_max")
    with pytest.raises(ConfigError, match="80 channels, but the bit reversal of OSCAR's rotation"):
        load_method("oscar").check(80)
    load_method("oscar", basis="rotation").check(80)
