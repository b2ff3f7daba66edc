"""What makes another run, and what does not."""

from __future__ import annotations

import pytest

from kvbench.results.identity import identity, is_baseline, run_id, short_name
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
        {"method": {"takes": ["int2", "int4"]}},
    ],
)
def test_same_run(change):
    assert an_id(config("r", **change)) == an_id(config("r"))


@pytest.mark.parametrize(
    ("change", "same_setting"),
    [
        ({"model": {"name": "other"}}, False),
        ({"model": {"revision": "abc"}}, False),
        ({"model": {"dtype": "bfloat16"}}, False),
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
    made = config("r", model={"weights": "pretrained"})
    for name in ("a", "b", "c"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "model.safetensors").write_bytes(b"other" if name == "c" else b"weights")
    ids = [an_id(made, weights=tmp_path / name) for name in ("a", "b", "c")]
    assert ids[0] == ids[1] != ids[2]


def test_names_for_people():
    assert short_name(config("r", "kivi")) == "kivi int2"
    assert short_name(config("r", "fp16")) == "fp16"
