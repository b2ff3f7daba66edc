"""OSCAR's calibration of a model: what is collected, the file, and what is refused."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from kvbench.calibration import stored
from kvbench.calibration.rotate import attended, query_covariance, rotations, spectrum, token_weights, value_covariance
from kvbench.calibration.rotations import Rotations
from kvbench.errors import ConfigError, ModelError
from kvbench.models.projections import attentions
from tests import zoo


def collected(model, sequences):
    """Queries, keys and values of all sequences, by layer."""
    parts: dict[int, list] = {}
    attended(model, sequences, lambda layer, *x: parts.setdefault(layer, []).append([y.clone() for y in x]))
    return {layer: [torch.cat(x) for x in zip(*given, strict=True)] for layer, given in parts.items()}


@pytest.mark.parametrize("architecture", ["llama", "phi3", "gemma2"])
def test_what_attention_reads_is_collected_and_the_model_is_left_as_it_was(architecture):
    model = zoo.model(architecture)
    sequences, _ = zoo.padded_batch([24, 24])
    before = model.config._attn_implementation
    logits = []
    hook = model.lm_head.register_forward_hook(lambda module, inputs, out: logits.append(out))
    try:
        parts = collected(model, sequences)
    finally:
        hook.remove()
    assert model.config._attn_implementation == before and sorted(parts) == [0, 1]
    assert [x.shape for x in parts[1]] == [(48, 4, 64), (48, 2, 64), (48, 2, 64)]
    with torch.no_grad():
        model.set_attn_implementation("eager")
        try:
            out = model(input_ids=sequences, use_cache=True)
        finally:
            model.set_attn_implementation(before)
    layer = out.past_key_values.layers[0]
    torch.testing.assert_close(parts[0][1].unflatten(0, (2, 24)).transpose(1, 2), layer.keys, rtol=0, atol=1e-5)
    torch.testing.assert_close(parts[0][2].unflatten(0, (2, 24)).transpose(1, 2), layer.values, rtol=0, atol=1e-5)
    torch.testing.assert_close(torch.cat(logits)[:, -1], out.logits[:, -1], rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("per_head", [False, True])
def test_rotations_are_those_of_all_tokens_at_once(per_head, tmp_path):
    model = zoo.model("llama")
    sequences, _ = zoo.padded_batch([40, 40, 40])
    steps = []
    result = rotations(
        model, sequences, name="m", per_head=per_head, first_tokens=8, tell=lambda *numbers: steps.append(numbers)
    )
    assert steps == [(n, 6) for n in range(1, 7)]
    query, key, value = (x.unflatten(0, (3, 40))[:, 8:].flatten(0, 1) for x in collected(model, sequences)[1])
    keys = query_covariance(query, 2)
    weights = token_weights(key, keys)
    values = value_covariance(value, weights / weights.mean(0))
    for side, covariance in (("key", keys), ("value", values)):
        rotation = result.rotation(1, side)
        expected = spectrum(covariance if per_head else covariance.mean(0)).rotation.float()
        # an eigenvector's sign is arbitrary and R mixes the signs: the rotated covariance does not depend on them
        turned, known = (r.mT @ covariance.float() @ r for r in (rotation, expected))
        torch.testing.assert_close(
            turned.diagonal(dim1=-2, dim2=-1), known.diagonal(dim1=-2, dim2=-1), rtol=1e-4, atol=1e-7
        )
        identity = torch.eye(64).expand_as(rotation)
        torch.testing.assert_close(rotation.mT @ rotation, identity, rtol=0, atol=1e-6)
    path = tmp_path / "m.safetensors"
    stored.save(result, path)
    again = stored.load_stored(path, Rotations)
    assert (again.per_head, again.shape, again.info["first_tokens"]) == (per_head, (2, 2, 64), "8")
    assert torch.equal(again.rotation(0, "key"), result.rotation(0, "key"))
    again.check_model(model)
    assert again.matches(stored.probe(model))


def test_files_that_cannot_be_used_name_the_remedy(tmp_path):
    model = zoo.model("llama")
    sequences, _ = zoo.padded_batch([16])
    result = rotations(model, sequences, name="m")
    path = tmp_path / "m.safetensors"
    for change, message in (
        ({"heads": "some"}, "metadata is incomplete"),
        ({"layers": "3"}, r"key\.2 is missing"),
        ({"heads": "each"}, r"key\.0 is not a finite tensor of shape \[2, 64, 64\]"),
        ({"format": "kvbench-kvquant-1"}, r"expected 'kvbench-oscar-1'\)(?s:.*)kvbench\.calibrate method=oscar"),
    ):
        path.unlink(missing_ok=True)
        save_file(dict(result.tensors), path, {**result.info, **change})
        with pytest.raises(ConfigError, match=message):
            stored.load_stored(path, Rotations)
        assert not list(stored.calibrations_of_kind([tmp_path], Rotations))
    for change, message in (
        (lambda t: 2 * t, r"key\.1 is not a rotation: R R\^T is 3 from the identity"),
        (lambda t: 0 * t, r"key\.1 is not a rotation"),
        (lambda t: t.char(), r"key\.1 is not a finite tensor"),
    ):
        path.unlink()
        save_file({**result.tensors, "key.1": change(result.tensors["key.1"])}, path, dict(result.info))
        with pytest.raises(ConfigError, match=message):
            stored.load_stored(path, Rotations)
    path.write_bytes(b"no safetensors")
    with pytest.raises(
        ConfigError,
        match=r"is not a safetensors file, or is damaged(?s:.*)calibrate method=oscar",
    ):
        stored.load_stored(path, Rotations)
    with pytest.raises(ConfigError, match=r"does not exist(?s:.*)kvbench\.calibrate method=oscar"):
        stored.load_stored(Path("none.safetensors"), Rotations)
    assert Rotations.command("tiny-random").endswith("--model tiny --random --text FILE")
    assert Rotations.command("tiny") == "python -m kvbench.calibrate method=oscar --model tiny --text FILE"


def test_heads_and_tokens_that_cannot_be_calibrated(monkeypatch):
    model = zoo.model("llama")
    sequences, _ = zoo.padded_batch([16])
    with pytest.raises(ConfigError, match="leaves no tokens, because sequences have 16 tokens"):
        rotations(model, sequences, name="m", first_tokens=16)
    monkeypatch.setattr("kvbench.calibration.rotate.head_dim", lambda model: 80)
    with pytest.raises(ConfigError, match=r"80 channels(?s:.*)method\.rotation\.key=hadamard"):
        rotations(model, sequences, name="m")
    hook = attentions(model)[1].v_proj.register_forward_hook(lambda module, inputs, out: out * float("nan"))
    try:
        with pytest.raises(ModelError, match="NaN or Inf in the values of layer 1 while calibrating"):
            attended(model, sequences, lambda *x: None)
    finally:
        hook.remove()
    assert model.config._attn_implementation != "kvbench-calibration"
