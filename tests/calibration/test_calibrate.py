"""Calibration files: what is collected, the command line, and what it refuses."""

from pathlib import Path

import pytest
import torch

from kvbench.calibration import calibrate as library
from kvbench.calibration import file
from kvbench.calibration.calibrate import collect
from kvbench.calibration.fit import fit_values
from kvbench.cli import calibrate as command
from kvbench.errors import ConfigError, DataError, ModelError
from kvbench.methods import load_method
from kvbench.models.projections import attentions
from tests import zoo


@pytest.mark.parametrize("architecture", ["llama", "phi3"])
def test_keys_values_and_gradients_are_the_models(architecture):
    """Activations equal what the projections give; a gradient equals the loss's change under a small push."""
    model = zoo.model(architecture)
    sequences, _ = zoo.padded_batch([30, 30])
    computed = collect(model, sequences, [0, 1], fisher=True)
    keys, weights = computed[0][0].joined()
    assert keys.shape == weights.shape == (60, 128)
    assert all(parameter.requires_grad and parameter.grad is None for parameter in model.parameters())
    token, channel = divmod(int(weights[:30].argmax()), 128)
    attention = attentions(model)[0]
    fused = hasattr(attention, "qkv_proj")
    at = channel + (256 if fused else 0)

    def loss(push: float) -> float:
        def nudge(module, inputs, out):
            out = out.clone()
            out[0, token, at] += push
            assert push or out[0, token, at] == keys[token, channel]
            return out

        hook = (attention.qkv_proj if fused else attention.k_proj).register_forward_hook(nudge)
        try:
            logits = model(input_ids=sequences[:1], use_cache=False).logits[0, :-1].double()
        finally:
            hook.remove()
        return float(torch.nn.functional.cross_entropy(logits, sequences[0, 1:]))

    with torch.no_grad():
        assert loss(0.0) > 0
        slope = (loss(0.02) - loss(-0.02)) / 0.04
    assert slope**2 == pytest.approx(float(weights[token, channel]), rel=0.05)
    plain = collect(model, sequences, [0], fisher=False)
    assert torch.allclose(plain[0][0].joined()[0], keys, atol=1e-6) and plain[0][0].joined()[1] is None


def test_layers_in_groups_give_the_same_file(monkeypatch):
    model = zoo.model("llama")
    sequences, _ = zoo.padded_batch([40, 40])
    passes = []
    one = library.calibrate(model, sequences, name="m", bits=(2,), tell=lambda done, total: passes.append(total))
    monkeypatch.setattr(library, "MEMORY", 1)
    two = library.calibrate(model, sequences, name="m", bits=(2,), tell=lambda done, total: passes.append(total))
    assert set(passes) == {2, 4}
    assert one.info == two.info and one.tensors.keys() == two.tensors.keys()
    for name, tensor in one.tensors.items():  # a backward pass may sum in another order
        torch.testing.assert_close(tensor, two.tensors[name], rtol=1e-3, atol=1e-4)


def test_every_digit_of_the_share_of_outliers_is_kept(tmp_path):
    model, share = zoo.model("llama"), 0.0123456789
    sequences, _ = zoo.padded_batch([40, 40])
    calibration = library.calibrate(model, sequences, name="m", bits=(2,), outliers=share, fisher=False)
    file.save(calibration, tmp_path / "m.safetensors")
    assert calibration.outliers == share
    method = load_method("kvquant", bits=2, outliers=share, calibration=str(tmp_path / "m.safetensors"))
    method.new_cache(model)
    with pytest.raises(ConfigError, match=r"made with outliers=0\.0123456789\.\n  allowed: 0\.0123456789\n"):
        load_method("kvquant", bits=2, outliers=0.0123457, calibration=method.calibration).new_cache(model)


def test_first_tokens_do_not_count():
    model = zoo.model("llama")
    sequences, _ = zoo.padded_batch([40, 40])
    made = [library.calibrate(model, sequences, name="m", bits=(2,), fisher=False, first_tokens=n) for n in (0, 30)]
    names = ("layers.0.key.thresholds", "layers.0.key.levels.2")
    same = [torch.equal(made[0].tensors[name], made[1].tensors[name]) for name in names]
    assert same == [True, False]
    with pytest.raises(ConfigError, match="leaves no tokens, because sequences have 40 tokens"):
        library.calibrate(model, sequences, name="m", first_tokens=40)


def test_the_first_tokens_of_every_sequence_are_left_out_of_the_codebooks():
    model = zoo.model("llama")
    sequences, _ = zoo.padded_batch([40, 40, 40])
    calibration = library.calibrate(model, sequences, name="m", bits=(2,), fisher=False, first_tokens=15)
    values, _ = collect(model, sequences, [0], fisher=False)[0][1].joined()
    counted = values.unflatten(0, (3, 40))[:, 15:].flatten(0, 1)  # each token is normalised by itself
    expected = fit_values(counted, None, [2], 0.01).codebooks[2].levels
    assert torch.equal(calibration.tensors["layers.0.value.levels.2"], expected)


def test_sequences_that_texts_cannot_share_evenly_are_as_many_as_asked_for(tmp_path, monkeypatch):
    taken = []

    def noted(model, sequences, **settings):
        taken.append(sequences)
        raise DataError("enough")

    monkeypatch.setattr(library, "calibrate", noted)
    for name in "abc":
        (tmp_path / name).write_text(f"The harbour {name} lay still. " * 60, encoding="utf-8")
    texts = [str(tmp_path / name) for name in "abc"]
    for count in (3, 5, 7):
        arguments = ["--model", "tiny", "--text", *texts, "--sequences", str(count), "--length", "64", "--random"]
        assert command.main(arguments) == DataError.exit_code
    assert [tuple(each.shape) for each in taken] == [(3, 64), (5, 64), (7, 64)]


def test_the_bundled_files_are_tinys_and_are_found(tmp_path, monkeypatch):
    from kvbench.models.spec import local_folder

    folder = local_folder("kvbench:tiny")
    computed = list(file.calibrations_in([folder / "calibration"]))
    assert sorted(made.outliers for made in computed) == [0.0, 0.01]
    assert all(made.bits == (2, 3, 4) and made.shape == (8, 2, 64) for made in computed)
    monkeypatch.chdir(tmp_path)
    config = command.model_config("tiny", None, None, False)
    method = load_method("kvquant", bits=3)
    method.prepare(config)
    again = load_method("kvquant", bits=3, calibration=str(folder / "calibration" / "tiny-1pct.safetensors"))
    again.prepare(config)
    assert method.identity() == again.identity() and len(method.identity()["calibration"]) == 16
    with pytest.raises(ConfigError, match=r"--model llama2-7b --text FILE --bits 4 --outliers 0\.01"):
        load_method("kvquant").prepare(command.model_config("llama2-7b", None, None, False))


def test_the_command_writes_a_file_that_the_method_takes(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    text = tmp_path / "text.txt"
    text.write_text("The harbour lay still. " * 60, encoding="utf-8")
    arguments = [
        "--model",
        "tiny",
        "--text",
        str(text),
        "--sequences",
        "2",
        "--length",
        "64",
        "--bits",
        "2",
        "--no-fisher",
    ]
    assert command.main([*arguments, "--outliers", "0.05", "--dtype", "float32"]) == 0
    assert "2 bits, 5% outliers, 8 layers of 2 x 64, from 128 tokens" in capsys.readouterr().out
    loaded = file.load_calibration(Path("results/calibration/tiny-5pct.safetensors"))
    assert loaded.info["model"] == "tiny" and loaded.info["fisher"] == "false" and len(loaded.info["text_sha256"]) == 64
    method = load_method("kvquant", bits=2, outliers=0.05)
    method.prepare(command.model_config("tiny", None, None, False))


def test_texts_that_need_no_file_leave_the_measured_ones_out():
    from kvbench.tasks.mini import Mini
    from kvbench.tasks.mini.text import python_documents

    generated, sources = command.text_documents("mini"), command.text_documents("python")
    assert generated == command.text_documents("mini") and min(map(len, generated)) > 1000
    assert Mini(tasks="needle").sample("needle", 2048, 0).prompt not in "".join(generated)
    measured = {document.text for document in python_documents()}
    assert len(sources) > 50 and not measured & set(sources)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--model", "tiny", "--text", "nowhere"], "does not exist"),
        (["--model", "tiny", "--text", "/dev/zero"], "--text /dev/zero is a device, not a regular file"),
        (["--model", "tiny", "--text", "."], "calibration: . contains no text"),
        (["--model", "tinny", "--text", "mini"], "did you mean 'tiny'"),
        (["--model", "tiny", "--text", "mini", "--bits", "4,x"], "is not a list of whole numbers"),
        (["--model", "tiny", "--text", "mini", "python", "--sequences", "1"], "--sequences=1: is out of range"),
        (["--model", "tiny", "--text", "mini", "--length", "1"], "--length=1: is out of range"),
        (["--model", "llama2-7b", "--path", "empty", "--text", "mini"], "is not a folder"),
    ],
)
def test_the_command_names_what_is_wrong(arguments, message, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert command.main(arguments) != 0
    assert message in capsys.readouterr().err


def test_a_text_that_is_too_short_and_widths_that_are_none():
    with pytest.raises(
        DataError,
        match=r"has 100 tokens; 2 sequences of 64 tokens need 128\.\n  hint: provide more text, or use --sequences 1$",
    ):
        library.cut_sequences(range(100), 2, 64)
    with pytest.raises(DataError, match="--sequences 1 --length 100"):
        library.cut_sequences(range(100), 2, 128)
    pieces = library.cut_sequences(range(200), 3, 64)
    assert pieces.shape == (3, 64) and pieces.flatten().unique().numel() == 192 and int(pieces[-1, -1]) == 199
    with pytest.raises(ConfigError, match="--bits=5"):
        library.calibrate(zoo.model("llama"), pieces, name="m", bits=(5,))


def test_numbers_that_are_not_finite_are_named():
    model = zoo.model("llama")
    sequences, _ = zoo.padded_batch([20])
    hook = attentions(model)[1].v_proj.register_forward_hook(lambda module, inputs, out: out * float("nan"))
    try:
        with pytest.raises(ModelError, match="NaN or Inf in the values of layer 1 while calibrating"):
            collect(model, sequences, [1], fisher=False)
    finally:
        hook.remove()
