"""Perplexity through a cache: equal to one pass where nothing is lost, and really read from the cache where it is."""

from __future__ import annotations

import itertools
import math
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import kvbench
from kvbench.config.setting import parse_setting
from kvbench.decoding.passes import forward, prefill
from kvbench.decoding.perplexity import PASS, decode_nll, exact_chunk, forward_nll, pass_tokens, simulated_nll
from kvbench.errors import ConfigError
from kvbench.models.load import hf_config, random_model
from kvbench.models.spec import ModelConfig
from kvbench.runner.run import answer_run
from kvbench.runner.span_likelihood import check_mode
from kvbench.tasks.perplexity import Perplexity
from kvbench.util.attachment import Placement, record_placement
from kvbench.util.schema import build
from tests import zoo
from tests.contract.test_methods import PLAIN, fresh, make
from tests.data_support import data_dir
from tests.marks import fast
from tests.run_files import store_of
from tests.run_support import ARCHITECTURE, config

LENGTH = 160


@pytest.fixture(scope="module")
def model():
    numbers = {"name": "toy", "weights": "random", "dtype": "float32", "max_length": 512}
    spec = build(ModelConfig, {**numbers, "architecture": ARCHITECTURE}, "model")
    made = random_model(hf_config(spec), torch.float32, torch.device("cpu"), 0).eval()
    with torch.no_grad():  # sharper attention, so that what the cache loses is seen
        for name, weight in made.named_parameters():
            if "q_proj" in name or "k_proj" in name:
                weight.mul_(8.0)
    return made


@pytest.fixture(scope="module")
def ids():
    return torch.randint(0, 259, (3, LENGTH), generator=torch.Generator().manual_seed(0))


def decoded(model, ids, method, **settings):
    return decode_nll(model, method.new_cache(model), ids, settings.pop("first", 1), **settings)


def test_fp16_decode_equals_one_pass(model, ids):
    method = kvbench.load_method("fp16")
    through = decoded(model, ids, method)
    method.detach(model)
    assert torch.allclose(through, forward_nll(model, ids, 1), rtol=1e-4)
    assert torch.allclose(decoded(model, ids, method, first=90), forward_nll(model, ids, 90), rtol=1e-4)


@pytest.mark.parametrize("prompt", [0, 1, 37])
def test_chunks_give_what_single_tokens_give(model, ids, prompt):
    method = kvbench.load_method("fp16")
    single = decoded(model, ids, method, prompt=prompt, first=max(1, prompt))
    for chunk in (7, 64, 500):
        computed = decoded(model, ids, method, prompt=prompt, first=max(1, prompt), chunk=exact_chunk(method, chunk))
        assert torch.allclose(computed, single, rtol=1e-5), chunk


@pytest.mark.parametrize(("name", "quantizer"), PLAIN)
def test_a_pass_over_many_tokens_gives_what_single_steps_give(name, quantizer):
    """Sums, bytes and places: in every layer each token sees every other one as it would have step by step."""
    model, method = zoo.model("llama"), make(name, quantizer).alone()
    ids, _ = zoo.padded_batch([276, 276], seed=4)
    found = {}
    for chunk in (1, 23, "auto"):
        cache = fresh(method, model, ids[:, :244], None)
        done: list[int] = []
        sums = decode_nll(model, cache, ids, 244, prompt=244, chunk=chunk, report=done.append)
        places = [layer.positions(row).tolist() for layer in cache.layers for row in range(2)]
        found[chunk] = (sums, cache.bill().used, places)
        assert done[-1] == 276 and len(done) == {1: 32, 23: 3, "auto": 2}[chunk]
    for chunk in (23, "auto"):
        # a balanced tile magnifies the last bits, in which products of many and of few tokens differ
        assert torch.allclose(found[chunk][0], found[1][0], rtol=1e-5 if name == "kvarn" else 1e-6), chunk
        assert found[chunk][1:] == found[1][1:], chunk
    method.detach(model)


@pytest.mark.parametrize("name", ["kivi", "atom", "logquant"])
def test_padded_rows_and_rows_that_count_from_other_tokens(name):
    """In passes over several tokens as in single steps, and as each row alone."""
    model, method = zoo.model("llama"), make(name, None)
    ids, mask = zoo.padded_batch([150, 139], seed=8)
    firsts = [60, 101]
    one, many = (
        decode_nll(model, fresh(method, model, ids[:, :50], mask[:, :50]), ids, firsts, mask=mask, prompt=50, chunk=c)
        for c in (1, 40)
    )
    assert torch.allclose(one, many, rtol=1e-6)
    alone = decode_nll(model, method.new_cache(model), ids[1:, 11:], firsts[1] - 11, prompt=39, chunk=40)
    assert torch.allclose(alone, many[1:], rtol=1e-6)
    with pytest.raises(ValueError, match="padding does not end before the prompt"):
        decode_nll(model, method.new_cache(model), ids, firsts, mask=mask, prompt=11)
    with pytest.raises(ValueError, match="first has 3 numbers for 2 rows"):
        decode_nll(model, method.new_cache(model), ids, [60, 60, 60])
    method.detach(model)


@pytest.mark.parametrize(
    ("name", "architecture"),
    fast(
        itertools.product(["kivi", "atom", "streamingllm"], ["mistral", "qwen2"]),
        [("kivi", "mistral"), ("atom", "qwen2"), ("streamingllm", "mistral")],
    ),
)
def test_passes_keep_a_sliding_window(name, architecture):
    model, method = zoo.model(architecture), make(name, None)
    ids, _ = zoo.padded_batch([200], seed=5)
    one, many = (decode_nll(model, method.new_cache(model), ids, 90, prompt=90, chunk=c) for c in (1, 64))
    assert torch.allclose(one, many, rtol=1e-6)
    method.detach(model)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("kivi", {"quantizer": "int4", "residual": 32}),
        ("atom", {}),
        ("logquant", {"quantizer": "int2", "window": 16}),
        ("quantspec", {}),
    ],
)
@pytest.mark.slow  # 6 s
def test_on_the_bundled_model_only_codes_at_a_border_differ(name, options):
    """In fp32, products over one row and over many round differently, so that now and then a code is one off.

    Until the first such code is read, likelihoods are those of single steps, to 1e-5 nats per token.
    """
    folder = Path(kvbench.__file__).parent / "models" / "tiny"
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    text = "The quick brown fox jumps over the lazy dog; the dog sleeps on. "
    ids = torch.tensor([AutoTokenizer.from_pretrained(folder)(text * 8)["input_ids"][:80]])
    method, runs = fitted(name, options), {}
    for size in (1, 40):
        cache = method.new_cache(model)
        cache.progress.span = 1
        with torch.inference_mode():
            scores = [prefill(model, cache, ids[:, :1], None)[:, None]]
            for place in range(1, 79, size):
                last = min(place + size, 79)
                positions = torch.arange(place, last)[None]
                scores.append(forward(model, cache, ids[:, place:last], None, positions, all_logits=True))
            cache.settle()
        losses = torch.nn.functional.cross_entropy(torch.cat(scores, 1)[0], ids[0, 1:], reduction="none")
        runs[size] = losses, cache
    first = ids.shape[1]
    for single, many in zip(runs[1][1].layers, runs[40][1].layers, strict=True):
        times = method.demotions(single, 79)
        for time, one, other in zip(times, single.stores(), many.stores(), strict=True):
            if len(one.segments) > 1:
                count = one.packed.lengths[0]
                off = (one.packed.codes(slice(0, 1), 0, count) - other.packed.codes(slice(0, 1), 0, count)).abs()
                assert int(off.amax()) <= 1 and float(off.float().mean()) < 0.01
                slots = off.amax((0, 1, 3)).nonzero()[:, 0]
                if len(slots):
                    first = min(first, int(time[single.positions(0)[slots]].min()))
    assert first > 16  # before, no query sees a code that is off
    apart = (runs[1][0] - runs[40][0])[: first - 1].abs()
    assert apart.mean() < 1e-5 and apart.max() < 1e-4


def fitted(name, options):
    """A method with groups that fit the bundled model and a text of 80 tokens."""
    if name == "quantspec":
        return parse_setting("quantspec:hierarchical:gamma=0:sensitive_layers=2:quantizer.key.group_size=32").load()
    return kvbench.load_method(name, **options)


def test_methods_that_move_tokens_go_one_by_one():
    assert exact_chunk(kvbench.load_method("fp16"), 64) == 64
    assert exact_chunk(kvbench.load_method("cocktail"), 64) == 64
    for name in ("kivi", "atom", "logquant", "partial_logquant"):
        assert exact_chunk(kvbench.load_method(name), 64) == 1, name
    assert exact_chunk(kvbench.load_method("atom", prefill="quantized"), 64) == 64  # packed before they attend
    assert exact_chunk(kvbench.load_method("snapkv"), 64) == 64 and exact_chunk(kvbench.load_method("h2o"), 64) == 1
    assert pass_tokens("auto") == PASS == 128 and pass_tokens(7) == 7
    assert pass_tokens("auto", torch.device("cpu")) == 128 and pass_tokens("auto", torch.device("cuda:1")) == 512


@pytest.mark.parametrize(
    ("name", "settings"), [("kivi", {"residual": 32}), ("atom", {}), ("logquant", {"reserved": 48})]
)
def test_a_lossy_cache_is_really_read(model, ids, name, settings):
    """Guards against the trap that one long pass never reads the quantized cache."""
    exact = decoded(model, ids, kvbench.load_method("fp16"))
    quantizer = {"kivi": "int2", "atom": "int2_token", "logquant": "int2"}[name]
    method = kvbench.load_method(name, quantizer=quantizer, **settings)
    computed = decoded(model, ids, method)
    assert bool(torch.isfinite(computed).all())
    assert (computed - exact).abs().min() > 1e-3
    # as long as nothing has left the window it is the same to the last bit
    if name == "kivi":
        short = ids[:, :30]
        assert torch.allclose(decoded(model, short, method), decoded(model, short, kvbench.load_method("fp16")))


def test_simulated_with_an_endless_window_is_fp16_and_differs_else(model, ids):
    exact = forward_nll(model, ids, 1)
    endless = kvbench.load_method("kivi", quantizer="int2", residual=1024)
    computed = simulated_nll(model, endless.new_cache(model), ids, 1)
    assert torch.allclose(computed, exact, rtol=1e-5)
    lossy = kvbench.load_method("kivi", quantizer="int2", residual=32)
    assert (simulated_nll(model, lossy.new_cache(model), ids, 1) - exact).abs().min() > 1e-3
    # decoding after it works as before: the attention was put back
    assert torch.allclose(decoded(model, ids, kvbench.load_method("fp16")), exact, rtol=1e-4)


def test_modes_without_effect_are_refused():
    kivi, cocktail = kvbench.load_method("kivi"), kvbench.load_method("cocktail")
    for method, mode, prompt in ((kivi, "fp16", 0), (cocktail, "simulated", 100), (cocktail, "decode", 0)):
        with pytest.raises(ConfigError):
            check_mode(method, mode, prompt)
    check_mode(cocktail, "decode", 100)


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "book.txt"
    path.write_text("It was a dark and stormy night; the rain fell in torrents. " * 30, encoding="utf-8")
    return path


def settings(text: Path, **changes):
    return {
        "_target_": "kvbench.tasks.perplexity.Perplexity",
        "name": "text",
        "text": "text",
        "path": str(text),
        "window": 96,
        "limit": 4,
        **changes,
    }


def test_rows_tables_and_pairs(tmp_path: Path, text: Path):
    runs = {}
    for name in ("fp16", "kivi"):
        made = config(tmp_path, name)
        made["dataset"] = settings(text)
        made["runtime"]["batch_size"] = 3
        runs[name] = answer_run(made)
    for result in runs.values():
        assert result["status"] == "ok"
        entry = result["scores"]["text@96"]["perplexity"]
        assert entry["mode"] == "decode"
        assert entry["windows"] == 4
        assert entry["ppl"] > 1
        # the tokenizer is one of bytes
        assert math.isclose(entry["bits_per_byte"], math.log2(entry["ppl"]), rel_tol=0.02)
    assert runs["kivi"]["scores"]["text@96"]["perplexity"]["vs_fp16"]["n"] == 4
    from kvbench.results.tables import runs_markdown, table_text

    assert "ppl" in table_text(list(runs.values()))
    assert "ppl" in runs_markdown(list(runs.values()))
    again = config(tmp_path, "kivi")
    again["dataset"] = settings(text)
    assert answer_run(again)["run_id"] == runs["kivi"]["run_id"]


def test_a_window_longer_than_the_model_is_refused(tmp_path: Path, text: Path):
    made = config(tmp_path, "fp16")
    made["dataset"] = settings(text, window=600, limit=1)
    with pytest.raises(ConfigError, match="exceeds the model's limit"):
        answer_run(made)
    assert not list(tmp_path.glob("*-*"))


def test_fp16_mode_equals_decode(tmp_path: Path, text: Path):
    found = {}
    for mode in ("decode", "simulated", "fp16"):
        made = config(tmp_path, "fp16")
        made["dataset"] = settings(text, mode=mode)
        found[mode] = answer_run(made)["scores"]["text@96"]["perplexity"]["ppl"]
    assert math.isclose(found["decode"], found["fp16"], rel_tol=1e-3)
    assert math.isclose(found["simulated"], found["fp16"], rel_tol=1e-3)


def test_sliding_windows_that_count_from_different_tokens_are_scored_as_alone(tmp_path: Path, text: Path):
    """The first of them counts from its second token, the others what the one before did not have."""
    nll = {}
    for batch in (1, 3):
        made = config(tmp_path / str(batch), "fp16", runtime={"batch_size": batch})
        made["dataset"] = settings(text, mode="fp16", stride=64, limit=3)
        rows = store_of(answer_run(made)).samples().rows
        nll[batch] = {name: row["nll"] for name, row in rows.items()}
    assert [each["n"] for each in nll[3].values()] == [95, 64, 64]
    for name, alone in nll[1].items():
        assert nll[3][name]["n"] == alone["n"]
        assert math.isclose(nll[3][name]["sum"], alone["sum"], rel_tol=1e-5)


class Letters:
    """One token a character."""

    bos_token_id = 1

    def __call__(self, text, **kwargs):
        return {"input_ids": [ord(c) for c in text], "offset_mapping": [(i, i + 1) for i in range(len(text))]}


def windows(tmp_path: Path, **changes):
    path = tmp_path / "alphabet.txt"
    path.write_text("abcdefghijklmnopqrstuvwxyz", encoding="utf-8")
    task = Perplexity(text="text", path=str(path), **{"window": 8, **changes})
    task.bind(Letters())
    return [(chr(w.ids[0]), w.first, w.bytes) for w in (s.work for s in task.samples())]


def test_windows_side_by_side_sliding_and_skipped(tmp_path: Path):
    assert windows(tmp_path) == [("a", 1, 7), ("i", 1, 7), ("q", 1, 7)]  # the last partial one is dropped
    assert windows(tmp_path, stride=6) == [("a", 1, 7), ("g", 2, 6), ("m", 2, 6), ("s", 2, 6)]
    assert windows(tmp_path, skip=10) == [("k", 1, 7), ("s", 1, 7)]
    assert windows(tmp_path, bos=True, limit=1) == [("\x01", 1, 7)]
    assert windows(tmp_path, prefill=4, per_document=2) == [("a", 4, 4), ("i", 4, 4)]


def test_c4_draws_are_the_papers(tmp_path: Path):
    """GPTQ's get_c4 restated: random.seed(0), a document that is long enough, a place in it."""
    import json
    import random

    documents = ["".join(chr(97 + (i * 7 + k) % 26) for k in range(5 + 9 * (i % 4))) for i in range(40)]
    path = tmp_path / "c4.jsonl"
    path.write_text("\n".join(json.dumps({"text": text}) for text in documents), encoding="utf-8")
    task = Perplexity(text="c4", path=str(path), window=16)
    task.bind(Letters())
    computed = ["".join(map(chr, sample.work.ids)) for sample in task.samples()]
    random.seed(0)
    expected = []
    for _ in range(256):
        while True:
            i = random.randint(0, len(documents) - 1)
            if len(documents[i]) > 16:
                break
        start = random.randint(0, len(documents[i]) - 16 - 1)
        expected.append(documents[i][start : start + 16])
    assert computed == expected
    joined = Perplexity(text="c4_new", path=str(path), window=16)
    joined.bind(Letters())
    assert "".join(chr(t) for t in next(iter(joined.samples())).work.ids) == " ".join(documents)[:16]


def test_real_texts():
    task = Perplexity(text="wikitext2", path=str(data_dir("wikitext2") / "test.raw.txt.gz"))
    assert task.documents[0].lstrip().startswith("= Robert Boulter =")
    books = Perplexity(text="pg19", path=str(data_dir("pg19")))
    assert len(books.documents) == 16


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"first": 1, "prompt": 20}, "first=1: must be after the prompt of 20"),
        ({"first": 19, "prompt": 20}, "20 to 39"),
        ({"first": 0}, "1 to 39"),
        ({"first": 40}, "1 to 39"),
        ({"first": 5, "prompt": -1}, "prompt=-1"),
        ({"first": 5, "prompt": 41}, "prompt=41"),
        ({"first": 5, "chunk": 0}, "chunk=0"),
    ],
)
def test_tokens_that_would_not_be_scored_are_not_asked_for_in_silence(model, ids, settings, said):
    ids, method = ids[:, :40], kvbench.load_method("fp16")
    with pytest.raises(ValueError, match=said):
        decoded(model, ids, method, **settings)
    if set(settings) == {"first"}:
        for sums in (forward_nll, lambda *given: simulated_nll(given[0], method.new_cache(model), *given[1:])):
            with pytest.raises(ValueError, match=f"first={settings['first']}: must be from 1 to 39"):
                sums(model, ids, settings["first"])
    most, least = (decoded(model, ids, method, first=first, prompt=20) for first in (20, 39))
    assert (most > least).all()
    assert (least > 0).all()


def test_a_text_of_its_prompt_alone_has_nothing_to_score(model, ids):
    method = kvbench.load_method("fp16")
    cache = method.new_cache(model)
    assert decode_nll(model, cache, ids[:, :1], 1).tolist() == [0.0] * 3
    assert cache.get_seq_length() == 1
    method.detach(model)


def test_one_pass_of_a_wider_dtype_reads_keys_and_values_as_caches_store_them():
    """The same as decoding with the full-precision cache of 16 bits; without a cache, nothing is rounded."""
    model, (ids, _) = zoo.fresh("llama"), zoo.padded_batch([40, 40])
    exact = forward_nll(model, ids, 5)
    record_placement(model, Placement(storage=torch.bfloat16))
    rounded = forward_nll(model, ids, 5)
    method = kvbench.load_method("fp16")
    cache = method.new_cache(model)
    assert cache.progress.storage == torch.bfloat16
    through = decode_nll(model, cache, ids, 5)
    assert torch.allclose(rounded, exact, rtol=1e-2) and not torch.equal(rounded, exact)
    assert torch.allclose(rounded, through, rtol=1e-3)
