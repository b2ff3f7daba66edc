"""The twin: float32 GGUF files, the other process and its protocol, divergences, tables, windows that are missing."""

import json
import sys
from argparse import Namespace

import numpy as np
import pytest
import torch

from experiments.twin import __main__ as command
from experiments.twin import fold, measure, weights
from kvbench.errors import ConfigError

gguf = pytest.importorskip("gguf")

#: a program that answers as experiments/twin/engine.py does, with logits that name the file and the type
FAKE = """#!{python}
import json, sys
import numpy
print(json.dumps({{"version": "0", "system": "none"}}), flush=True)
for line in sys.stdin:
    wanted = json.loads(line)
    if wanted["type"] == "q4_1" and wanted["file"] == "broken":
        raise SystemExit("no such cache")
    seed = sum(map(ord, wanted["type"] + wanted["file"])) + len(wanted["ids"])
    rows = len(wanted["ids"]) - wanted["first"]
    numpy.save(wanted["out"], numpy.random.default_rng(seed).standard_normal((rows, 7)).astype("float32"))
    print(json.dumps({{"out": wanted["out"], "seconds": 0.5}}), flush=True)
"""


@pytest.fixture
def fake(tmp_path):
    program = tmp_path / "python"
    program.write_text(FAKE.format(python=sys.executable))
    program.chmod(0o755)
    return str(program)


def logits_of(form: str, file: str) -> torch.Tensor:
    seed = sum(map(ord, form + file)) + 6
    return torch.from_numpy(np.random.default_rng(seed).standard_normal((2, 7)).astype("float32"))


def test_a_file_of_float32_holds_the_dequantized_numbers_or_their_neighbours(tmp_path):
    numbers = np.random.default_rng(0).standard_normal((4, 64)).astype(np.float32)
    packed = gguf.quantize(numbers, gguf.GGMLQuantizationType.Q4_1)
    writer = gguf.GGUFWriter(tmp_path / "a.gguf", "llama")
    writer.add_block_count(3)
    writer.add_token_list(["a", "b"])
    writer.add_file_type(3)
    writer.add_tensor("w", packed, raw_dtype=gguf.GGMLQuantizationType.Q4_1)
    for write in (writer.write_header_to_file, writer.write_kv_data_to_file, writer.write_tensors_to_file):
        write()
    writer.close()
    expected = gguf.dequantize(packed, gguf.GGMLQuantizationType.Q4_1)
    plain, noisy = (
        gguf.GGUFReader(weights.write_float32(tmp_path / "a.gguf", tmp_path / name, noise=name == "n.gguf"))
        for name in ("f.gguf", "n.gguf")
    )
    assert plain.tensors[0].tensor_type == gguf.GGMLQuantizationType.F32
    assert np.array_equal(plain.tensors[0].data, expected)
    assert plain.fields["llama.block_count"].contents() == 3 and plain.fields["general.file_type"].contents() == 0
    assert plain.fields["tokenizer.ggml.tokens"].contents() == ["a", "b"]
    moved = noisy.tensors[0].data.view(np.int32) - expected.view(np.int32)
    assert set(np.unique(moved)) == {-1, 1}


def test_divergences_are_those_of_the_definition_and_see_the_direction():
    x, y = torch.randn(2, 5, 11, generator=torch.Generator().manual_seed(0)) * 4
    p, q = x.double().softmax(-1), y.double().softmax(-1)
    one, other = measure.Predictions(x), measure.Predictions(y)
    assert one.divergence(other) == pytest.approx(float((p * (p / q).log()).sum(-1).mean()), rel=1e-12)
    assert one.divergence(other) != pytest.approx(other.divergence(one), rel=1e-2)
    assert one.divergence(measure.Predictions(x + 3)) == pytest.approx(0, abs=1e-14)


def test_answers_come_in_the_order_of_the_requests(fake):
    with measure.Twin(fake) as twin:
        row = measure.against_itself(twin, "one", "two", range(6), 4)
        assert twin.about["version"] == "0" and twin.seconds == 14 * 0.5
    base = measure.Predictions(logits_of("f16", "one"))
    packed = measure.Predictions(logits_of("q5_0", "one"))
    assert row["formats"]["q5_0"]["own"] == base.divergence(packed)
    assert row["formats"]["q5_0"]["between"] == packed.divergence(measure.Predictions(logits_of("q5_0", "two")))
    assert row["f16"] == base.divergence(measure.Predictions(logits_of("f16", "two")))


def test_a_python_without_llama_cpp_and_one_that_ends_are_named(fake, capfd):
    with pytest.raises(ConfigError, match=r"--python=/nowhere/python: cannot be started"):
        measure.Twin("/nowhere/python")
    with pytest.raises(ConfigError, match=r"its llama\.cpp ended(?s:.*)kvbench\[engines\]"):
        measure.Twin("/bin/true")
    with measure.Twin(fake) as twin, pytest.raises(ConfigError, match=r"its llama\.cpp ended"):
        measure.against_itself(twin, "broken", "two", range(6), 4)


def rows_of(gap: float) -> list[dict]:
    """Two windows in which kvbench's column ``engine`` is beyond llama.cpp's by a share that differs between them."""
    line = {"llamacpp": 0.1, "engine": 0.1 * (1 + gap), "between_engine": 0.02}
    other = {"llamacpp": 0.3, "engine": 0.3 * (1 + gap) + 0.001, "between_engine": 0.06}
    return [
        {"text": "python", "window": i, "size": 8, "f16": 1e-6, "formats": dict.fromkeys(measure.FORMATS, part)}
        for i, part in enumerate((line, other))
    ]


def test_a_difference_is_met_within_a_tenth_or_two_paired_errors():
    near, far = (fold.summary(rows_of(gap), "q8_0", "engine") for gap in (0.05, 0.3))
    assert near["relative"] == pytest.approx(0.0525) and near["met"] and near["share"] == pytest.approx(0.2)
    assert far["gap"] == pytest.approx(0.0605) and far["error"] == pytest.approx(0.0305)
    assert far["met"]  # 1.98 paired errors
    assert not fold.summary([rows_of(0.3)[0]] * 2, "q8_0", "engine")["met"]
    said = fold.verdicts(rows_of(0.05))
    assert said["f16"]["met"] and all(said["difference"].values()) and all(said["share"].values())
    assert not fold.verdicts([{**row, "f16": 2e-5} for row in rows_of(0.05)])["f16"]["met"]


def test_tables_hold_each_format_and_are_written(tmp_path):
    (tmp_path / "f32.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows_of(0.05)))
    itself = {"own": 0.1, "other": 0.2, "between": 0.05}
    row = {**rows_of(0)[0], "formats": dict.fromkeys(measure.FORMATS, itself)}
    (tmp_path / "noise.jsonl").write_text(json.dumps(row) + "\n")
    text = command.folded(Namespace(out=tmp_path, window=8))
    assert text == (tmp_path / "table.md").read_text()
    assert "| q5_0 | 0.2 ± 0.1 | 0.211 ± 0.1 | +5 %, +1.9 errors | 0.20 |" in text
    assert "| iq4_nl | 0.1 ± 0 | 0.2 ± 0 | 0.05 ± 0 | 0.50 |" in text
    assert json.loads((tmp_path / "verdicts.json").read_text())["python"]["f16"]["met"]
    assert "no rows" in command.folded(Namespace(out=tmp_path, window=9))


def test_windows_are_added_only_to_rows_of_the_same_model_and_columns(tmp_path):
    file = tmp_path / "f32.jsonl"
    assert command.done_windows(file, "a", 6, ["exact"]) == set()
    formats = {"q8_0": {"llamacpp": 1.0, "exact": 1.0}}
    rows = [{"text": "python", "window": n, "size": 6, "model_sha256": "a", "formats": formats} for n in (0, 1)]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert command.done_windows(file, "a", 6, ["exact"]) == {("python", 0, 6), ("python", 1, 6)}
    with pytest.raises(ConfigError, match=r"f32\.jsonl has rows of another model(?s:.*)--out"):
        command.done_windows(file, "b", 6, ["exact"])
    with pytest.raises(ConfigError, match=r"--parts=engine(?s:.*)rows without this column"):
        command.done_windows(file, "a", 6, ["exact", "engine"])
    assert len(command.done_windows(file, "a", 8, ["engine"])) == 2  # rows of windows of another size are not folded
