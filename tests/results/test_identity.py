"""Changes that start a new run, and changes that do not."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from types import MappingProxyType

import pytest
import yaml

from kvbench.methods import load_method
from kvbench.results.identity import (
    content_digest,
    identity,
    is_baseline,
    method_name,
    rounded_weights,
    run_id,
    short_name,
)
from kvbench.util import fingerprint as fingerprint_module
from kvbench.util.confdir import group_options
from kvbench.util.fingerprint import fingerprint
from tests.run_support import config

DATA = {"identity": {"name": "toy", "seed": 0}, "version": 1}


def an_id(made, data=DATA, weights=None):
    return run_id(identity(made, data, weights))


@pytest.mark.parametrize(
    "change",
    [
        {"runtime": {"device": "cuda"}},
        {"runtime": {"batch_size": 8}},
        {"runtime": {"prefill_chunk": 64}},
        {"runtime": {"results_dir": "elsewhere"}},
        {"runtime": {"retry": "oom"}},
        {"logger": {"name": "csv", "path": "x.csv"}},
        {"dataset": {"limit": 100}},
        {"model": {"licence": "MIT", "note": "fine"}},
        {"quantizer": {"name": "another name for it"}},
        {"model": {"revision": "abc"}},  # of random weights
        {"method": {"takes": ["int2", "int4"]}},
    ],
)
def test_same_run(change):
    assert an_id(config("r", **change)) == an_id(config("r"))


def test_a_later_hyper_parameter_that_changes_nothing_leaves_the_id():
    atom = "kvbench.methods.atom.Atom"
    before = an_id(config("r", method={"_target_": atom, "rope": "post"}))
    assert an_id(config("r", method={"_target_": atom, "rope": "post", "window": 0, "sinks": 0})) == before
    assert an_id(config("r", method={"_target_": atom, "rope": "post", "window": 8, "sinks": 0})) != before
    # of a method that always had it, the same key counts
    snapkv = {"_target_": "kvbench.methods.snapkv.SnapKV"}
    assert an_id(config("r", method={**snapkv, "window": 0})) != an_id(config("r", method=snapkv))


def test_weights_of_another_commit_are_another_run():
    runs = {an_id(config("r", model={"weights": "pretrained", "revision": name})) for name in (None, "abc", "abd")}
    assert len(runs) == 3


@pytest.mark.parametrize(
    ("change", "same_setting"),
    [
        ({"model": {"name": "other"}}, False),
        ({"model": {"dtype": "bfloat16"}}, False),
        ({"model": {"preset": "tiny"}}, False),
        ({"model": {"weights": "random_int4"}}, False),
        ({"decoding": {"temperature": 1.0}}, False),
        ({"decoding": {"max_new_tokens": 7}}, False),
        ({"runtime": {"seed": 1}}, False),
        ({"method": {"residual": 64}}, True),
        ({"quantizer": {"key": {"bits": 4, "group_size": 32, "axis": "channel"}}}, True),
    ],
)
def test_another_run(change, same_setting):
    one, other = an_id(config("r")), an_id(config("r", **change))
    assert one != other
    assert (one.split("-")[0] == other.split("-")[0]) == same_setting


def test_data_and_generation_version_count(monkeypatch):
    before = an_id(config("r"))
    assert an_id(config("r"), {**DATA, "version": 2}) != before
    monkeypatch.setattr("kvbench.results.identity.GENERATION_VERSION", 2)
    assert an_id(config("r")) != before


def test_methods_of_one_setting_share_the_first_half():
    assert an_id(config("r", "fp16")).split("-")[0] == an_id(config("r", "kivi")).split("-")[0]
    assert is_baseline(config("r", "fp16"))
    assert not is_baseline(config("r", "kivi"))


def test_a_local_checkpoint_counts_by_content_not_by_place(tmp_path):
    settings = config("r", model={"weights": "pretrained"})
    for name in ("a", "b", "c"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "model.safetensors").write_bytes(b"other" if name == "c" else b"weights")
    ids = [an_id(settings, weights=tmp_path / name) for name in ("a", "b", "c")]
    assert ids[0] == ids[1] != ids[2]


def test_names_for_people():
    assert short_name(config("r", "kivi")) == "kivi int2"
    assert short_name(config("r", "fp16")) == "fp16"
    forced = config("r", method={"preset": "quantspec", "forced_acceptance": 0.9}, quantizer={"name": "none"})
    rotated = config("r", "kivi", method={"rotation": {"key": "some/where.safetensors", "value": "none"}})
    assert short_name(rotated) == "kivi int2 rotation=where.safetensors/none"
    kept = config("r", "kivi", method={"keep": 0.5, "rotation": {"key": "rht", "value": "rht"}})
    assert short_name(kept).endswith(" keep=0.5 rotation=rht")
    assert short_name(forced) == "quantspec (forced acceptance 0.9)"
    for layers in (["0-1:fp16", "-1:int8"], "0-1:fp16,-1:int8", {"0-1": "fp16", "-1": "int8"}):
        mixed = config("r", "kivi", method={"layers": layers})
        assert short_name(mixed) == "kivi int2 layers=0-1:fp16,-1:int8"


def test_fp16_with_rotated_heads_is_no_baseline():
    assert is_baseline(config("r", "fp16", method={"rotation": {"key": "none", "value": "none"}}))
    assert not is_baseline(config("r", "fp16", method={"rotation": {"key": "none", "value": "rht"}}))


def checkpoint(folder, content=b"weights", place=None, size=40 << 20):
    """A folder with one large file, zeros but for `content` at `place`."""
    folder.mkdir(exist_ok=True)
    with (folder / "model.safetensors").open("wb") as handle:
        handle.truncate(size)
        handle.seek(size // 2 if place is None else place)
        handle.write(content)
    return folder


@pytest.fixture
def cached(tmp_path, monkeypatch):
    monkeypatch.setenv("KVBENCH_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(fingerprint_module, "_memory", {})
    return tmp_path


@pytest.mark.parametrize("size", [100, 2 << 20, (32 << 20) - 1, 32 << 20, 40 << 20])
def test_every_byte_of_a_checkpoint_counts(cached, size):
    places = (0, size // 4, size // 2, size - 7)
    computed = [fingerprint(checkpoint(cached / "m", b"changed", place, size)) for place in places]
    computed.append(fingerprint(checkpoint(cached / "m", b"", 0, size)))
    assert len(set(computed)) == len(computed)
    assert None not in computed


def test_digests_of_large_files_are_kept_and_follow_every_change(cached, monkeypatch):
    folder = checkpoint(cached / "m")
    file = folder / "model.safetensors"
    os.utime(file, ns=(10**18, 10**18))
    read = []
    whole = fingerprint_module._file_digest
    monkeypatch.setattr(fingerprint_module, "_file_digest", lambda path: read.append(path) or whole(path))
    first = fingerprint(folder)
    assert fingerprint(folder) == first
    assert read == [file]
    monkeypatch.setattr(fingerprint_module, "_memory", {})  # another process
    assert fingerprint(folder) == first
    assert read == [file]
    with file.open("r+b") as handle:  # the same size, and the same time of the last change
        handle.seek(20 << 20)
        handle.write(b"another")
    os.utime(file, ns=(10**18, 10**18))
    assert fingerprint(folder) != first
    assert len(read) == 2


def test_a_file_that_was_just_written_is_read_again(cached, monkeypatch):
    folder = checkpoint(cached / "m")
    read = []
    whole = fingerprint_module._file_digest
    monkeypatch.setattr(fingerprint_module, "_file_digest", lambda path: read.append(path) or whole(path))
    assert fingerprint(folder) == fingerprint(folder)
    assert len(read) == 2


@pytest.mark.parametrize("damage", ["folder", "text", "list", "values"])
def test_a_place_that_cannot_be_used_costs_time_alone(cached, monkeypatch, damage):
    folder = checkpoint(cached / "m")
    os.utime(folder / "model.safetensors", (1, 1))
    expected = fingerprint(folder)
    path = fingerprint_module.cache_file()
    assert path.is_file()
    monkeypatch.setattr(fingerprint_module, "_memory", {})
    if damage == "folder":
        monkeypatch.setenv("KVBENCH_CACHE", str(folder / "model.safetensors"))
        assert fingerprint(folder) == expected
        monkeypatch.setattr(
            fingerprint_module, "_file_digest", lambda path: pytest.fail("read again in the same process")
        )
    else:
        content = json.loads(path.read_text())
        path.write_text({"text": "{", "list": "[]", "values": json.dumps(dict.fromkeys(content, 3))}[damage])
    assert fingerprint(folder) == expected


def test_reading_many_gigabytes_is_said(cached, monkeypatch):
    messages: list[str] = []
    folder = checkpoint(cached / "m")
    os.utime(folder / "model.safetensors", (1, 1))
    fingerprint(folder, messages.append)
    assert not messages
    monkeypatch.setattr(fingerprint_module, "SLOW", 1 << 20)
    fingerprint(checkpoint(cached / "n"), messages.append)
    fingerprint(folder, messages.append)
    assert len(messages) == 1 and "reading 40 MiB of weights" in messages[0] and str(cached / "n") in messages[0]


def test_folders_inside_count_where_asked_for(cached):
    (cached / "m" / "1_Pooling").mkdir(parents=True)
    (cached / "m" / "config.json").write_text("{}")
    (cached / "m" / "1_Pooling" / "config.json").write_text("a")
    before = fingerprint(cached / "m"), fingerprint(cached / "m", deep=True)
    (cached / "m" / "1_Pooling" / "config.json").write_text("b")
    after = fingerprint(cached / "m"), fingerprint(cached / "m", deep=True)
    assert before[0] == after[0] and before[1] != after[1]
    assert fingerprint(None) is fingerprint(cached / "nothing") is None


def test_the_name_of_a_preset_is_the_label_and_makes_no_other_run():
    assert short_name(config("r", method={"preset": "kivi_wide"})) == "kivi_wide int2"
    assert an_id(config("r", method={"preset": "kivi_wide"})) == an_id(config("r"))


@pytest.mark.parametrize("name", ["engine", "kvarn", "turboquant", "oscar", "kivi"])
def test_a_rotation_that_a_method_has_by_default_is_not_named(name):
    defaults = yaml.safe_load(group_options("method")[name].read_text())
    assert "rotation" not in short_name({"method": defaults})
    assert "rotation" not in short_name({"method": {**defaults, "rotation": vars(load_method(name).rotation)}})
    assert short_name({"method": {**defaults, "rotation": {"key": "octave"}}}).split()[-1].startswith("rotation=octave")


def test_random_weights_of_a_folder_count_by_the_files_that_describe_the_model(tmp_path):
    def of(path="somewhere"):
        material = identity(config("r", model={"path": path, "revision": "abc"}), DATA, tmp_path)
        return material["setting"]["model"]

    seen = [of()["description"]]
    for name in ("config.json", "tokenizer.json", "tokenizer.model"):
        (tmp_path / name).write_text("")  # an empty file is not a missing one
        seen.append(of()["description"])
        (tmp_path / name).write_text("content")
        seen.append(of()["description"])
        (tmp_path / "other.txt").write_text(name)
        assert of()["description"] == seen[-1], "other files say nothing about the model"
    assert len(set(seen)) == 7 and {len(text) for text in seen} == {16}
    assert of()["revision"] == "abc", "the commit of a folder's files counts"
    assert "description" not in of("kvbench:tiny"), "kvbench's own files have versions"


def test_the_identity_holds_what_decides_the_answers():
    made = config("r", "kivi", decoding={"max_new_tokens": 7}, runtime={"seed": 3})
    material = identity(made, DATA)
    setting = material["setting"]
    assert setting["generation_version"] == 1 and setting["data"] == DATA
    assert setting["decoding"] == {"max_new_tokens": 7} and setting["seed"] == 3
    named = {"name": "toy", "weights": "random", "dtype": "float32", "max_length": 512}
    unset = dict.fromkeys(("hub_id", "revision", "prompt_limit", "chat"))
    assert setting["model"] == {**named, **unset, "architecture": made["model"]["architecture"]}
    assert material["method"]["method"] == {key: value for key, value in made["method"].items() if key != "takes"}
    assert material["method"]["quantizer"] == {side: made["quantizer"][side] for side in ("key", "value")}
    assert identity(config("r"), DATA)["setting"]["seed"] == 0
    assert identity(config("r", "fp16"), DATA)["method"]["quantizer"] is None
    hot = identity(config("r", decoding={"temperature": 0.5}), DATA)["setting"]["decoding"]
    assert hot == {"temperature": 0.5, "draw": 2}
    assert "draw" not in identity(config("r", decoding={"temperature": 0.0}), DATA)["setting"]["decoding"]


def test_weights_that_are_read_count_instead_of_the_architecture(tmp_path):
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    model = identity(config("r", model={"weights": "pretrained"}), DATA, tmp_path)["setting"]["model"]
    assert model["architecture"] is None and model["files"] == fingerprint(tmp_path)
    assert "description" not in model


def test_values_of_python_are_hashed_like_those_of_json():
    plain = content_digest({"a": [1, 2], "b": "x", "c": {"d": None}})
    assert len(plain) == 10 and set(plain) <= set("0123456789abcdef")
    assert content_digest({"c": MappingProxyType({"d": None}), "b": Path("x"), "a": (1, 2)}) == plain
    assert content_digest({"a": {2, 1}, "b": "x", "c": {"d": None}}) == plain
    assert content_digest({"a": frozenset((2, 1)), "b": "x", "c": {"d": None}}) == plain
    assert content_digest({"a": [2, 1], "b": "x", "c": {"d": None}}) != plain
    canonical = b'{"a":[1,2],"b":"\\u00e4"}'
    assert content_digest({"b": "ä", "a": [1, 2]}) == hashlib.sha256(canonical).hexdigest()[:10]


@pytest.mark.parametrize(
    ("weights", "expected"), [("int4", "int4"), ("random_int4", "random_int4"), ("random", None), ("pretrained", None)]
)
def test_weights_of_4_bits_are_told_apart(weights, expected):
    assert rounded_weights(config("r", model={"weights": weights})) == expected


@pytest.mark.parametrize(
    ("method", "name"),
    [
        ({"_target_": "kvbench.methods.kivi.Kivi"}, "kivi"),
        ({"_target_": "mine.Own"}, "own"),
        ({"_target_": "Own"}, "own"),
        ({"_target_": "kvbench.methods.kivi.Kivi", "preset": "wide"}, "wide"),
        ({}, "?"),
    ],
)
def test_a_method_is_named_for_its_preset_its_module_or_its_class(method, name):
    assert method_name({"method": method}) == name


@pytest.mark.parametrize(
    ("method", "quantizer", "name"),
    [
        ({"format": "nuq3"}, {"name": "none"}, "own nuq3"),
        ({"format": {"bits": 3}}, None, "own"),
        ({"format": "nuq3", "keep": 0}, {"name": "int4"}, "own nuq3 int4 keep=0"),
        ({"layers": None, "rotation": None}, {"name": "int4"}, "own int4"),
        ({"forced_acceptance": 0.0}, {}, "own (forced acceptance 0)"),
        ({"rotation": {"value": "rht"}}, {}, "own rotation=none/rht"),
    ],
)
def test_a_label_has_what_is_not_the_default(method, quantizer, name):
    assert short_name({"method": {"_target_": "mine.Own", **method}, "quantizer": quantizer}) == name
