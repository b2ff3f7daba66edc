"""Outliers on purpose: the model computes the same, the channels are larger, and what cannot have them is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from kvbench.cli.compose import Composer
from kvbench.config.stored_command import command
from kvbench.errors import ConfigError, ModelError
from kvbench.models import by_name
from kvbench.models.make_outliers import make_outliers
from kvbench.models.outliers import PRESETS, Outliers, named, outliers, written
from kvbench.models.projections import attentions, key_source, value_source
from kvbench.results.identity import run_id
from kvbench.runner.resolve import material

SIZE, HEADS, KV_HEADS, LAYERS = 16, 4, 2, 3


def model(kind: str = "llama", **options: Any) -> Any:
    """A small model with random weights in float32."""
    from transformers import AutoConfig

    sizes = {
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": SIZE,
        "vocab_size": 50,
        "max_position_embeddings": 64,
        "pad_token_id": 0,
    }
    torch.manual_seed(0)
    made = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **{**sizes, **options})).eval().float()
    for name, weight in made.named_parameters():
        if name.endswith("bias"):  # they begin as zeros
            weight.data.normal_(0, 0.5)
    return made


@torch.no_grad()
def logits(made: Any) -> torch.Tensor:
    tokens = torch.arange(40).remainder(50).view(2, 20)
    return made(tokens).logits


@torch.no_grad()
def projected(made: Any, of: Any) -> list[torch.Tensor]:
    """Keys before RoPE, or values, by layer: ``[B, H, T, D]``."""
    seen: list[torch.Tensor] = []
    sources = [of(made, module) for module in attentions(made)]
    hooks = [
        source.module.register_forward_hook(lambda _, __, out, source=source: seen.append(source.cut(out, SIZE)))
        for source in sources
    ]
    logits(made)
    for hook in hooks:
        hook.remove()
    return seen


KINDS = [
    ("llama", {}),
    ("llama", {"attention_bias": True}),
    ("qwen2", {}),
    ("mistral", {"sliding_window": None}),
    ("phi3", {"partial_rotary_factor": 0.5}),
    ("gemma", {}),
]


@pytest.mark.parametrize(
    ("kind", "options"), KINDS, ids=lambda value: value if isinstance(value, str) else "+".join(value)
)
@pytest.mark.parametrize("side", ["keys", "values"])
def test_the_model_computes_the_same(kind: str, options: dict[str, Any], side: str) -> None:
    for factor, most in ((64.0, 0.0), (0.25, 0.0), (10.0, 1e-3), (63.0, 1e-3)):
        made = model(kind, **options)
        before, of = logits(made), key_source if side == "keys" else value_source
        first = projected(made, of)
        make_outliers("m", made, Outliers(side, "0+-1", 2, factor))
        assert (logits(made) - before).abs().max() <= most, factor
        for place, (one, other) in enumerate(zip(first, projected(made, of), strict=True)):
            ratio = (other / one).nanmean(dim=(0, 1, 2))
            larger = set(range(SIZE)) if place == 1 else set()
            rotary = 8 if kind == "phi3" and side == "keys" else SIZE
            channels = Outliers(side, "all", 2, factor).channels(rotary, SIZE)
            expected = [factor if channel in channels and place != 1 else 1.0 for channel in range(SIZE)]
            assert torch.allclose(ratio, torch.tensor(expected), rtol=1e-3), (place, larger)


def test_a_wrong_pair_would_change_the_model() -> None:
    """What the test above holds: with one channel of a pair alone, the logits move."""
    made = model()
    before = logits(made)
    module = attentions(made)[0]
    with torch.no_grad():
        module.k_proj.weight.unflatten(0, (-1, SIZE))[:, 3] *= 64.0
        module.q_proj.weight.unflatten(0, (-1, SIZE))[:, 3] /= 64.0
    assert (logits(made) - before).abs().max() > 1e-3


def test_pairs_are_spread_over_the_channels_that_are_turned() -> None:
    assert PRESETS["keys"].channels(64, 64) == [8, 24, 40, 56]
    assert Outliers("keys", "all", 1, 2.0).channels(32, 64) == [8, 24]
    assert Outliers("values", "all", 1, 2.0).channels(32, 64) == [16, 48]
    assert Outliers("keys", "all", 8, 2.0).channels(16, 16) == list(range(16))
    with pytest.raises(ConfigError, match=r"=keys:pairs:9:factor:2: asks for 9 pairs .*, but a head has 8\.\n"):
        Outliers("keys", "all", 9, 2.0).channels(16, 16)
    assert PRESETS["first_last"].chosen(30) == [0, 29] and PRESETS["first_last"].chosen(1) == [0]
    assert Outliers("keys", "1+-1+2", 1, 2.0).chosen(3) == [1, 2]
    with pytest.raises(ConfigError) as refused:
        Outliers("keys", "1+99", 2, 64.0).chosen(3)
    assert str(refused.value).splitlines() == [
        "model.outliers=keys:layers:1+99: names layer 99, which the model lacks.",
        "  allowed: layers 0 to 2, or -3 to -1 from the last",
        "  hint: layers are all, ends, or indices joined by plus signs, such as first_last:layers:0+-1",
    ]


@pytest.mark.parametrize(
    ("kind", "problem"),
    [
        ("qwen3", r"model m: .*: Qwen3ForCausalLM norms its keys after their projection \(k_norm, q_norm\)"),
        ("gemma3_text", "Gemma3ForCausalLM norms its keys after"),
        ("cohere", "CohereForCausalLM is none of the architectures"),
    ],
)
def test_other_models_are_refused_by_name(kind: str, problem: str) -> None:
    made = model(kind)
    before = logits(made)
    with pytest.raises(ModelError, match=problem):
        make_outliers("m", made, PRESETS["keys"])
    assert torch.equal(logits(made), before)


def test_quantized_weights_are_refused() -> None:
    from kvbench.models.quantized.loading import round_model

    made = model().bfloat16()
    round_model(made, "int4")
    with pytest.raises(ModelError, match=r"its weights are not plain ones \(Int4Linear\)"):
        make_outliers("m", made, PRESETS["keys"])


@pytest.mark.parametrize(
    ("text", "meant"),
    [
        ("first_last", Outliers("keys", "ends", 2, 64.0)),
        ("keys:layers:ends", Outliers("keys", "ends", 2, 64.0)),
        ("values:factor:16:pairs:1", Outliers("values", "all", 1, 16.0)),
        ("keys:layers:0+29:side:values", Outliers("values", "0+29", 2, 64.0)),
        ("keys:factor:2.5", Outliers("keys", "all", 2, 2.5)),
    ],
)
def test_texts_mean_and_are_written_one_way(text: str, meant: Outliers) -> None:
    assert outliers(text) == meant
    assert outliers(written(meant)) == meant
    assert named({"name": "a", "outliers": text})["name"] == f"a outliers={written(meant)}"


def test_the_shortest_text_is_the_name() -> None:
    assert written(Outliers("keys", "ends", 2, 64.0)) == "first_last"
    assert written(Outliers("keys", "ends", 2, 16.0)) == "first_last:factor:16"
    again = named(named({"name": "a", "outliers": "keys:layers:ends"}))
    assert again == {"name": "a outliers=first_last", "outliers": "first_last"}
    assert named({"name": "a", "outliers": "none"}) == {"name": "a", "outliers": "none"}


@pytest.mark.parametrize(
    "text",
    [
        "first",
        "keys:",
        "keys:factor",
        "keys:factor:0",
        "keys:factor:x",
        "keys:pairs:0",
        "keys:layers:a",
        "keys:side:both",
        "none:pairs:1",
    ],
)
def test_wrong_texts_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=r"model\.outliers"):
        outliers(text)


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        (
            "none:factor:4",
            ["none:factor:4: has options, but none has no outliers.", "set none alone, or NAME:"],
        ),
        *(
            (f"keys:factor:{value}", [f"has a wrong option: factor:{value}.", "a number above 0 and at most 65536"])
            for value in ("0", "nan", "1e30", "-inf", "x")
        ),
        ("keys:pairs:65", ["allowed: pairs: a whole number from 1 to 64"]),
        ("keys:side:both", ["allowed: side: keys or values"]),
        ("keys:layers:5000", ["indices from -4096 to 4095 joined by plus signs"]),
        ("keys:size:3", ["has no option size.", "allowed: side, layers, pairs, factor"]),
        ("first", ["is no preset of outliers.", "allowed: none, keys, values, first_last"]),
    ],
)
def test_a_refusal_names_bounds_and_form(text: str, parts: list[str]) -> None:
    with pytest.raises(ConfigError) as refused:
        outliers(text)
    assert all(part in str(refused.value) for part in [*parts, "such as first_last:factor:16"])


def test_name_identity_and_command_have_them() -> None:
    composer = Composer()
    base = ["model=tiny", "dataset=mini", "dataset.limit=2", "runtime.device=cpu", "logger=none"]

    def ids(*typed: str) -> tuple[str, str, str]:
        (job,) = composer.check([*base, *typed])
        config = composer.configuration(job)
        return config.model.name, run_id(material(config)), command(composer.plain(job))

    plain, plain_id, _ = ids()
    name, other_id, shown = ids("model.outliers=keys:layers:ends:factor:16")
    assert (plain, name) == ("tiny", "tiny outliers=first_last:factor:16")
    assert len({plain_id, other_id, ids("model.outliers=first_last")[1]}) == 3
    assert ids("model.outliers=first_last:factor:16")[1] == other_id
    assert "model.outliers=first_last:factor:16" in shown and "model=tiny " in f"{shown} "
    assert by_name.group("tiny", {"outliers": "keys"})["name"] == "tiny outliers=keys"
    with pytest.raises(ConfigError, match=r"model\.outliers=keys: needs weights that are not rounded to int4"):
        ids("model.outliers=keys", "model.weights=int4")
