"""QuantSpec's buffer: what is packed when, through any rejections, and what it costs."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from kvbench.cache import KVCache
from kvbench.errors import CombinationError, ConfigError
from kvbench.methods import load_method
from kvbench.models.spec import Architecture, ModelConfig, local_folder
from tests import zoo
from tests.run_support import ARCHITECTURE

BUFFER = json.loads((Path(__file__).parents[1] / "golden" / "quantspec_buffer.json").read_text())
ALL = slice(None)


def small(group: int, **options):
    """QuantSpec with a group of few tokens, so that flushes come often."""
    form = {"bits": 8, "kind": "hierarchical"}
    key, value = {**form, "group_size": group, "axis": "channel"}, {**form, "group_size": "head_dim", "axis": "token"}
    return load_method("quantspec", quantizer={"key": key, "value": value}, **options)


@pytest.mark.parametrize("row", BUFFER["rows"], ids=lambda row: str(row["L"]))
def test_the_prompt_is_packed_as_by_the_authors_code(row):
    method = load_method("quantspec")
    assert method.border(row["L"]) == row["quantized"]
    if row["L"] <= 1000:
        layer = zoo.new_layer(method)
        zoo.feed(layer, *zoo.random_kv(row["L"], channels=16))
        for store in layer.stores():
            assert (store.packed.length(ALL), store.tail.length(ALL)) == (row["quantized"], row["residual"])


def test_after_any_rejections_the_buffer_keeps_its_bounds_and_nothing_is_quantized_twice():
    """Three rows that accept differently; codes are those of the whole sequence quantized once, group by group."""
    G, gamma, rounds = 16, 5, 60
    method = small(G, gamma=gamma)
    cache = KVCache(method, 1)
    layer, generator = cache.layers[0], torch.Generator().manual_seed(3)
    prompt = 4 * G + 5
    keys, values = zoo.random_kv(prompt + rounds * (gamma + 1), batch=3, channels=16)
    zoo.feed(layer, keys[:, :, :prompt], values[:, :, :prompt])
    stored = [prompt] * 3
    seen_sizes = set()

    def new(count: int):
        rows = [torch.arange(n, n + count) for n in stored]
        return (torch.stack([x[row][:, index] for row, index in enumerate(rows)]) for x in (keys, values))

    for _ in range(rounds):
        cache.settle()
        assert all(G <= store.tail.lengths[row] < 2 * G for store in layer.stores() for row in range(3))
        cache.progress.frozen = True
        for _ in range(gamma):  # drafts, whose keys and values are not those of the target
            zoo.feed(layer, *(x + 1 for x in new(1)))
        cache.crop(-gamma)
        cache.progress.frozen = False
        zoo.feed(layer, *new(gamma + 1))
        sizes = [store.tail.lengths[row] for store in layer.stores() for row in range(3)]
        assert max(sizes) <= 2 * G + gamma
        seen_sizes.update(sizes)
        kept = torch.randint(1, gamma + 2, (3,), generator=generator).tolist()
        cache.take_back([gamma + 1 - k for k in kept])
        stored = [n + k for n, k in zip(stored, kept, strict=True)]
        assert [layer.real_tokens(row) for row in range(3)] == stored
        assert min(store.tail.lengths[row] for store in layer.stores() for row in range(3)) >= G
    assert max(seen_sizes) == 2 * G + gamma  # the bound is reached
    cache.settle()
    for row in range(3):
        one = slice(row, row + 1)
        for store, x in zip(layer.stores(), (keys, values), strict=True):
            count = store.packed.length(one)
            assert count == stored[row] // G * G - G
            codes = store.packed.quantizer.quantize(x[one, :, :count]).codes()
            assert torch.equal(store.packed.codes(one, 0, count).to(torch.uint8), codes)
            assert torch.equal(store.tail.view(one), x[one, :, count : stored[row]])


def test_a_prompt_below_two_groups_stays_exact_and_the_next_step_flushes_from_two_on():
    method = small(16)
    for length, packed in ((16, 0), (31, 0), (32, 16), (33, 16)):
        layer = zoo.new_layer(method)
        keys, values = zoo.random_kv(length + 1, channels=16)
        zoo.feed(layer, keys[:, :, :length], values[:, :, :length])
        zoo.feed(layer, keys[:, :, length:], values[:, :, length:])
        assert layer.stores()[0].packed.length(ALL) == packed


def test_the_bill_is_the_formula():
    method, n = load_method("quantspec", gamma=6), 700
    layer = zoo.new_layer(method)
    cache = KVCache(method, 1)
    layer = cache.layers[0]
    zoo.feed(layer, *(x.half() for x in zoo.random_kv(n, channels=64)))
    H, D, G, q, P, S = 2, 64, 128, 512, 2, 4
    bill = cache.bill()
    assert bill.used.codes == 2 * H * q * D
    assert bill.used.scales == S * H * D * q // G + S * H * q * D // D
    assert bill.used.window == 2 * H * (n - q) * D * P
    assert bill.reserved.window == 2 * H * (2 * G + 6 + 1) * D * P


def test_sensitive_layers_and_an_fp16_target_pack_nothing():
    keys, values = zoo.random_kv(400, channels=16)
    for options, packed in (({"sensitive_layers": 1}, [0, 256]), ({"target": "fp16", "draft": "kivi"}, [0, 0])):
        cache = KVCache(load_method("quantspec", **options), 2)
        for layer, expected in zip(cache.layers, packed, strict=True):
            zoo.feed(layer, keys, values)
            store = layer.stores()[0]
            assert sum(s.length(ALL) for s in store.segments if s.packed) == expected
            assert store.length(ALL) == 400


@pytest.mark.parametrize(
    ("options", "key"),
    [
        ({"gamma": 65}, "method.gamma"),
        ({"gamma": "many"}, "method.gamma=many: must be a whole number or auto"),
        ({"forced_acceptance": 1.5}, "method.forced_acceptance=1.5: must be at most 1"),
        ({"forced_acceptance": 0.9, "gamma": 0}, "method.forced_acceptance=0.9: has no effect with method.gamma=0"),
        ({"draft": "kivvi"}, "method.draft=kivvi"),
        ({"draft": "kivi", "draft_options": {"residul": 64}}, "method.draft_options.residul"),
        ({"draft": "quantspec"}, "method.draft"),
        ({"draft": "full"}, "method.draft"),
        ({"target": "fp16"}, "method.target"),
        ({"draft_options": {"residual": 64}}, "method.draft_options"),
        ({"draft": "kivi", "draft_options": {"residual": 33}}, "method.draft_options.residual=33"),
        ({"draft": "kivi", "draft_options": 3}, "method.draft_options"),
        ({"quantizer": "int4"}, "quantizer"),
        ({"gamma": 0, "draft": "kivvi"}, "method.draft=kivvi"),
        ({"gamma": 0, "draft": "kivi", "draft_options": {"residul": 64}}, "method.draft_options.residul"),
        ({"gamma": 0, "draft_options": {"residual": 64}}, "method.draft_options"),
    ],
)
def test_what_cannot_run_is_refused(options, key):
    with pytest.raises(ConfigError) as caught:
        load_method("quantspec", **options)
    assert key in str(caught.value)


def test_without_speculation_it_is_of_no_account_whether_draft_and_target_differ():
    assert load_method("quantspec", gamma=0, target="fp16").speculation is None
    assert load_method("quantspec", gamma=0, draft="full").speculation is None


def test_some_layers_are_quantized():
    model = zoo.model("llama")
    config = ModelConfig(name="toy", weights="random", max_length=64, architecture=Architecture(**ARCHITECTURE))
    assert config.layers() == model.config.num_hidden_layers == 2
    load_method("quantspec", sensitive_layers=1).prepare(config)
    method = load_method("quantspec", sensitive_layers=2)
    for refused in (lambda: method.prepare(config), lambda: method.new_cache(model)):
        with pytest.raises(CombinationError, match=r"sensitive_layers=2: .* has 2 layers.\n  allowed: 0 to 1"):
            refused()


def test_what_the_draft_was_calibrated_with_is_part_of_the_identity(tmp_path):
    """KVQuant as a draft: by the file's content, wherever it lies."""
    here = local_folder("kvbench:tiny") / "calibration" / "tiny-1pct.safetensors"
    there, other = tmp_path / "moved.safetensors", tmp_path / "other.safetensors"
    shutil.copy(here, there)
    with safe_open(here, framework="pt") as opened:
        save_file(load_file(here), other, {**opened.metadata(), "tokens": "7"})
    config = ModelConfig(name="tiny", path="kvbench:tiny", max_length=64)
    found = []
    for path in (None, here, there, other):
        options = {"bits": 3} if path is None else {"bits": 3, "calibration": str(path)}
        method = load_method("quantspec", draft="kvquant", draft_options=options)
        method.prepare(config)
        found.append(method.identity()["draft_options"])
    assert found[0] == found[1] == found[2] != found[3]
    assert found[0]["bits"] == 3 and len(found[0]["calibration"]) == 16
    assert load_method("quantspec", draft="kivi").identity() == load_method("quantspec").identity() == {}
    with pytest.raises(ConfigError, match=r"method\.draft_options\.calibration: kvquant needs a calibration"):
        load_method("quantspec", draft="kvquant", draft_options={"outliers": 0.2}).prepare(config)


def test_gamma_stays_below_the_group():
    with pytest.raises(ConfigError, match="gamma"):
        small(8, gamma=8)
    with pytest.raises(ConfigError, match=r"method\.gamma=auto: .*group_size=8; auto chooses from 1 to 8"):
        small(8, gamma="auto")


def test_gamma_may_be_chosen_for_each_round():
    settings, fixed = load_method("quantspec", gamma="auto").speculation, load_method("quantspec", gamma=3).speculation
    assert (settings.gamma, settings.choices, settings.most) == ("auto", (1, 2, 3, 4, 5, 6, 7, 8), 8)
    assert (fixed.gamma, fixed.choices, fixed.most) == (3, (3,), 3)
    layer = KVCache(load_method("quantspec", gamma="auto"), 1).layers[0]
    zoo.feed(layer, *zoo.random_kv(255, channels=16))
    room = layer.stores()[0].segments[-1].capacity
    assert room == 2 * 128 + 8 + 1  # the double buffer, and the longest round


def test_forced_acceptance_is_for_times_only():
    method = load_method("quantspec", forced_acceptance=0.9)
    assert method.speculation.forced == 0.9 and method.meaningless == "method.forced_acceptance"
    assert method.hyperparameters()["forced_acceptance"] == 0.9
    plain = load_method("quantspec")
    assert plain.speculation.forced is None and plain.meaningless is None
    assert "forced_acceptance" not in plain.hyperparameters()  # run ids from before the option hold
    assert method.alone().forced_acceptance is None


def test_what_the_draft_needs_is_asked_for_before_a_run(monkeypatch):
    """An encoder that cannot be had is said before the model is loaded, under the draft's name where it is a key."""
    asked = []
    monkeypatch.setattr(type(load_method("cocktail")), "ready", lambda self: asked.append(self.encoder))
    load_method("quantspec", draft="cocktail", draft_options={"encoder": "bm25"}).ready()
    load_method("quantspec", draft="cocktail", gamma=0).ready()
    load_method("quantspec").ready()
    assert asked == ["bm25"]


@pytest.mark.parametrize(("side", "kind"), [("key", "affine"), ("value", "affine")])
def test_formats_without_two_nibbles_are_refused(side, kind):
    form = {"bits": 8, "kind": "hierarchical", "group_size": 32}
    formats = {"key": {**form, "axis": "channel"}, "value": {**form, "axis": "token"}}
    load_method("quantspec", quantizer=formats)
    formats[side]["kind"] = kind
    with pytest.raises(ConfigError, match=rf"quantizer\.{side}\.kind={kind}: must be hierarchical"):
        load_method("quantspec", quantizer=formats)
    formats[side].update(kind="hierarchical", axis={"key": "token", "value": "channel"}[side])
    with pytest.raises(ConfigError, match="keys grouped per channel and values grouped per token"):
        load_method("quantspec", quantizer=formats)
