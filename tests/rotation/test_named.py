"""Transforms equal the golden arrays, which engines' own code produced, and are exact inverses."""

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from kvbench.errors import ConfigError
from kvbench.rotation import named, transform
from kvbench.rotation.spec import RotationSpec

GOLDEN = np.load(Path(__file__).parents[1] / "golden/new/rotation.npz")
CPU = torch.device("cpu")
NAMES = {
    "sylvester": ("hadamard", "key"),
    "rht_unnormalised": ("rht_unnormalised", "key"),
    "blocks8": ("blocks:8", "key"),
    "blocks16": ("blocks:16", "value"),
    "blocks32": ("blocks:32", "key"),
    "blocks64": ("blocks:64", "key"),
    "octave_blocks64": ("octave", "key"),
    "octave_whole": ("octave", "value"),
}


def golden(prefix: str) -> list[tuple[str, int]]:
    """Names and head sizes of the golden arrays that begin so."""
    return [(name, int(size)) for name, _, size in (key.rpartition("_") for key in GOLDEN) if name.startswith(prefix)]


@pytest.mark.parametrize(("name", "size"), [pair for prefix in NAMES for pair in golden(prefix) if pair[0] == prefix])
def test_rotated_rows_equal_the_golden_ones(name, size):
    rotation, side = NAMES[name]
    x, wanted = (torch.from_numpy(GOLDEN[f"{key}_{size}"])[None] for key in ("x", name))
    basis = transform(rotation, side, size, CPU)
    limit = 1e-5 * wanted.abs().amax(-1, keepdim=True)
    assert bool(((basis.keys(x) - wanted).abs() <= limit).all())
    assert bool(((basis.back(wanted) - x).abs() <= 1e-5 * x.abs().amax(-1, keepdim=True)).all())


@pytest.mark.parametrize(("name", "size"), golden("rht_inverse_of_rht"))
def test_vllms_inverse_undoes_its_transform(name, size):
    x = torch.from_numpy(GOLDEN[f"rht_unnormalised_{size}"])[None]
    wanted = torch.from_numpy(GOLDEN[f"{name}_{size}"])
    undone = transform("rht_unnormalised", "value", size, CPU).back(x)[0]
    assert bool(((undone - wanted).abs() <= 1e-5 * wanted.abs().amax(-1, keepdim=True)).all())


def test_signs_equal_the_engines():
    for name, size in golden("rht_signs"):
        assert named.signs(size).tolist() == GOLDEN[f"{name}_{size}"].tolist()
    for name, size in golden("octave_signs"):
        assert named.octave_signs(size).tolist() == GOLDEN[f"{name}_{size}"].tolist()
    for name, size in golden("H_sign"):
        bits = np.unpackbits(GOLDEN[f"{name}_{size}"], axis=1)
        assert (named.sylvester(size).numpy() > 0).tolist() == bits.astype(bool).tolist()


@pytest.mark.parametrize("name", ["hadamard", "rht", "rht_unnormalised", "blocks:16", "file"])
@pytest.mark.parametrize("size", [64, 80, 96, 128])
def test_scores_and_outputs_are_those_of_the_models_basis(name, size, tmp_path):
    """Also of a file with a matrix per KV head, which the query heads of its group share."""
    generator = torch.Generator().manual_seed(size)
    q, k, v = (torch.randn(2, heads, 5, size, generator=generator) for heads in (6, 3, 3))
    if name == "file":
        name = str(tmp_path / "a.safetensors")
        own = torch.linalg.qr(torch.randn(3, size, size, generator=generator))[0].contiguous()
        save_file({"key.1": own, "value.1": own[0].clone()}, name)
    key, value = (transform(name, side, size, CPU, layer=1) for side in ("key", "value"))
    scores = q.unflatten(1, (3, 2)) @ k[:, :, None].transpose(-1, -2)
    stored = key.queries(q).unflatten(1, (3, 2)) @ key.keys(k)[:, :, None].transpose(-1, -2)
    assert torch.allclose(stored, scores, atol=1e-5 * scores.abs().max())
    out = (scores.softmax(-1) @ v[:, :, None]).flatten(1, 2)
    rotated = (scores.softmax(-1) @ value.values(v)[:, :, None]).flatten(1, 2)
    assert torch.allclose(value.back(rotated), out, atol=1e-5)


def test_products_are_computed_in_fp32_a_few_tokens_at_a_time(monkeypatch):
    x = torch.randn(2, 3, 50, 64, generator=torch.Generator().manual_seed(0)).bfloat16() * 100
    basis = transform("hadamard", "key", 64, CPU)
    whole = basis.keys(x)
    assert whole.dtype == torch.bfloat16
    assert torch.equal(whole, basis.keys(x.float()).bfloat16())
    monkeypatch.setattr("kvbench.rotation.basis.ELEMENTS", 2 * 3 * 64 * 7)
    assert torch.equal(basis.keys(x), whole)


def test_none_is_no_transform_and_layers_share_the_matrices_of_a_name():
    assert transform("none", "key", 64, CPU) is None
    assert transform("rht", "key", 64, CPU, layer=0) is transform("rht", "key", 64, CPU, layer=3)


@pytest.mark.parametrize(("size", "block"), [(32, 32), (128, 128), (192, 64), (384, 64)])
def test_octave_rotates_whole_heads_of_values_only_if_their_channels_are_a_power_of_two(size, block):
    mixed = transform("octave", "value", size, CPU).forward != 0
    assert mixed.sum(0).tolist() == mixed.sum(1).tolist() == [block] * size


def test_blocks_need_no_colon_and_files_are_identified_by_content(tmp_path):
    assert RotationSpec("blocks16") == RotationSpec("blocks:16")
    for name in ("a", "b"):
        save_file({"key.0": torch.eye(4)}, tmp_path / f"{name}.safetensors")
    identities = [RotationSpec(value=str(tmp_path / f"{name}.safetensors")).identity() for name in ("a", "b")]
    assert identities[0] == identities[1] and len(identities[0]["value"]) == 16 and identities[0]["key"] == "none"


@pytest.mark.parametrize(
    ("name", "size", "words"),
    [
        ("hadamrd", 64, ["method.rotation.key=hadamrd", "no such rotation", "did you mean 'hadamard'"]),
        ("blocks:12", 64, ["blocks of a power of two", "method.rotation.key=blocks:16"]),
        ("blocks:32", 80, ["32", "80", "up to 16"]),
        ("octave", 96, ["64", "96", "up to 32"]),
        ("blocks:", 64, ["method.rotation.key=blocks:", "no such rotation", "method.rotation.key=blocks:16"]),
        ("nowhere.safetensors", 64, ["no such file", "calibrate"]),
    ],
)
def test_names_that_cannot_be_used_say_what_to_type(name, size, words):
    with pytest.raises(ConfigError) as error:
        RotationSpec(key=name).check(size)
    assert all(word in str(error.value) for word in words), str(error.value)


def test_files_of_another_model_are_refused(tmp_path):
    file = str(tmp_path / "a.safetensors")
    save_file({"key.0": torch.eye(32)}, file)
    with pytest.raises(ConfigError, match=r"no matrix 'value\.0', but 1 others, such as 'key\.0'"):
        transform(file, "value", 32, CPU)
    with pytest.raises(ConfigError, match=r"shape \[32, 32\], but the heads have 64 channels"):
        transform(file, "key", 64, CPU)


@pytest.mark.parametrize(
    ("matrix", "message"),
    [
        (None, "is not a safetensors file, or is damaged"),
        (torch.zeros(16, 16), r"has a matrix 'key\.0' without a finite inverse"),
        (torch.full((16, 16), float("nan")), r"has a matrix 'key\.0' without a finite inverse"),
    ],
    ids=["damaged", "singular", "nan"],
)
def test_files_that_no_cache_can_use_are_refused(matrix, message, tmp_path):
    path = tmp_path / "a.safetensors"
    if matrix is None:
        path.write_bytes(b"garbage")
    else:
        save_file({"key.0": matrix}, path)
    with pytest.raises(ConfigError, match=rf"method\.rotation\.key(?s:.*){message}(?s:.*)hint: calibrate again"):
        transform(str(path), "key", 16, CPU)


@pytest.mark.parametrize(
    ("matrices", "words"),
    [
        (None, "is damaged"),
        ({}, "has no matrix 'key.0'."),
        ({"value.0": torch.eye(8)}, "has no matrix 'key.0', but 1 others, such as 'value.0'"),
        ({"key.0": torch.eye(4)}, "of shape [4, 4], but the heads have 8 channels"),
        ({"key.0": torch.ones(8)}, "of shape [8], but the heads have 8 channels"),
    ],
)
def test_a_file_is_checked_by_its_header_before_a_model_is_loaded(matrices, words, tmp_path):
    path = tmp_path / "a.safetensors"
    path.write_bytes(b"cut")
    if matrices is not None:
        save_file(matrices, path)
    with pytest.raises(ConfigError) as raised:
        RotationSpec(key=str(path)).check(8)
    assert words in str(raised.value)
    save_file({"key.0": torch.eye(8), "key.1": torch.eye(8).expand(2, 8, 8).contiguous()}, path)
    RotationSpec(key=str(path)).check(8)
