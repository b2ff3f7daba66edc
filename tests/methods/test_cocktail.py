"""Cocktail: placement by plan, exactness of what stays exact, permutation invariance, ablations, bill, refusals."""

import random

import pytest
import torch

from kvbench.attention import reference
from kvbench.cache import Prompts
from kvbench.errors import CacheError, ConfigError
from kvbench.methods import load_method
from kvbench.methods.bytes import kv_bytes
from kvbench.methods.cocktail import ChunkPlan, Plans
from kvbench.retrieval.chunks import Chunked, Widths
from tests import slow, zoo
from tests.zoo import feed, new_layer, random_kv

ALL = slice(None)


def planned(bits, size, first=0):
    """A plan with the given widths."""
    return ChunkPlan(Chunked(first, size, ("",) * len(bits), "", "input"), Widths(tuple(bits), None, None))


def filled(method, keys, values, plan, decoded=0):
    layer = new_layer(method)
    layer.progress.method_state = Plans([plan] * keys.shape[0])
    before = keys.shape[2] - decoded
    feed(layer, keys[:, :, :before], values[:, :, :before])
    for n in range(before, keys.shape[2]):
        feed(layer, keys[:, :, n : n + 1], values[:, :, n : n + 1])
    return layer


def slow_cocktail(keys, values, bits, size, first, group, value_group):
    """Keys and values with each chunk quantized where it stands, written from sec. III."""
    keys, values = keys.clone(), values.clone()
    for chunk, width in enumerate(bits):
        if width == 16:
            continue
        begin = first + chunk * size
        for start in range(begin, begin + size, group):
            block = keys[:, :, start : start + group].transpose(-1, -2)
            keys[:, :, start : start + group] = slow.affine(block, width).transpose(-1, -2)
        block = values[:, :, begin : begin + size].unflatten(-1, (-1, value_group))
        values[:, :, begin : begin + size] = slow.affine(block, width).flatten(-2)
    return keys, values


@pytest.mark.parametrize("size", [8, 16, 32, 64, 128, 256])
@pytest.mark.parametrize("reorder", [True, False])
def test_attention_equals_a_slow_whole_tensor_statement_for_every_chunk_size(size, reorder):
    method = load_method("cocktail", encoder="bm25", chunk_size=size, reorder=reorder)
    rng = random.Random(size)
    bits = [rng.choice((2, 4, 16)) for _ in range(max(2, 1500 // size))]
    first, count = 11, 11 + len(bits) * size + size // 2 + 30
    keys, values = random_kv(count, channels=64)
    layer = filled(method, keys, values, planned(bits, size, first), decoded=9)
    query = torch.randn(1, 4, 1, 64, generator=torch.Generator().manual_seed(1))
    got = reference.attend_reference(None, layer, query, None, 0.15)
    stored = slow_cocktail(keys, values, bits, size, first, min(32, size), 64)
    torch.testing.assert_close(got, slow.attention(query, *stored, 0.15), rtol=1e-4, atol=1e-5)
    two, four = (
        sum(s.length(ALL) for s in layer.stores()[0].segments if s.packed and s.quantizer.bits == width)
        for width in (2, 4)
    )
    assert (two, four) == (bits.count(2) * size, bits.count(4) * size)
    exact = sum(segment.length(ALL) for segment in layer.stores()[0].segments if not segment.packed)
    assert exact == count - two - four  # the remainder, the text around it and the answer
    assert len(layer.stores()[0].segments) == (3 if reorder else 1 + len(planned(bits, size, first).runs(count)) - 1)


def test_chunk_permutation_changes_nothing():
    """Whole chunks (keys and values together) may change places: the output stays, to 1e-5."""
    size, bits = 16, [2, 4, 16, 2, 2, 4, 16, 4, 2, 2]
    method = load_method("cocktail", encoder="bm25", chunk_size=size)
    keys, values = random_kv(len(bits) * size + 20, channels=64)
    query = torch.randn(1, 4, 1, 64, generator=torch.Generator().manual_seed(1))
    outputs = []
    for seed in range(4):
        order = list(range(len(bits)))
        random.Random(seed).shuffle(order)
        tokens = [c * size + i for c in order for i in range(size)] + list(range(len(bits) * size, keys.shape[2]))
        plan = planned([bits[c] for c in order], size)
        layer = filled(method, keys[:, :, tokens], values[:, :, tokens], plan)
        layer.append(keys[:, :, -1:], values[:, :, -1:])
        outputs.append(reference.attend_reference(None, layer, query, None, 0.15))
    for out in outputs[1:]:
        torch.testing.assert_close(out, outputs[0], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("size", [8, 32, 128])
def test_the_bill_is_the_formula_to_the_byte(size):
    heads, channels, bits = 2, 64, [2, 2, 4, 16, 2, 4]
    method = load_method("cocktail", encoder="bm25", chunk_size=size)
    keys, values = (x.bfloat16() for x in random_kv(len(bits) * size + 77, channels=channels))
    layer = filled(method, keys, values, planned(bits, size, 5), decoded=3)
    used = {"codes": 0, "scales": 0, "window": 0}
    for store in layer.stores():
        for segment in store.segments:
            for part, count in segment.used(0).items():
                used[part] += count
    group, value_group = min(32, size), 64
    quantized = {w: bits.count(w) * size for w in (2, 4)}
    expected = {"codes": 0, "scales": 0, "window": 2 * heads * channels * 2 * (keys.shape[2] - sum(quantized.values()))}
    for width, n in quantized.items():
        expected["codes"] += 2 * heads * n * channels * width // 8
        expected["scales"] += 4 * heads * channels * n // group + 4 * heads * n * channels // value_group
    assert used == expected


@pytest.mark.parametrize("axis", ["channel", "token"])
@pytest.mark.parametrize(("size", "tiles"), [(8, 5), (32, 5), (96, 6), (256, 12)])
def test_in_place_each_run_pays_for_its_last_tile(size, tiles, axis):
    """Five runs of chunks; of 96 tokens the run of two chunks needs two tiles, of 256 four."""
    heads, channels, bits = 2, 64, [2, 2, 4, 16, 2, 4, 16, 16, 2]
    method = load_method("cocktail", encoder="bm25", chunk_size=size, reorder=False, key_axis=axis)
    count = len(bits) * size + 30
    keys, values = (x.bfloat16() for x in random_kv(count, channels=channels))
    layer = filled(method, keys, values, planned(bits, size, 5))
    runs = [(5, 16), (2 * size, 2), (size, 4), (size, 16), (size, 2), (size, 4), (2 * size, 16), (size, 2), (25, 16)]
    assert layer.order == [None]
    used = {"codes": 0, "scales": 0, "window": 0}
    for store in layer.stores():
        assert [segment.length(ALL) for segment in store.segments] == [length for length, _ in runs]
        assert [s.quantizer.bits if s.packed else 16 for s in store.segments] == [width for _, width in runs]
        assert sum(segment.tiles for segment in store.segments if segment.packed) == tiles
        for segment in store.segments:
            reserved = {"codes": 0, "scales": 0, "window": 0}
            for part, buffer in segment.buffers():
                reserved[part] += buffer.untyped_storage().nbytes()
            for part, bytes_ in segment.used(0).items():
                used[part] += bytes_
                assert segment is store.tail or bytes_ == reserved[part]
    shape = {"layers": 1, "query_heads": heads, "heads": heads, "channels": channels}
    assert vars(kv_bytes(method, count, widths=bits, **shape)) == used | {"index": 0, "state": 0}
    together = load_method("cocktail", encoder="bm25", chunk_size=size, key_axis=axis)
    padding = sum(used.values()) - kv_bytes(together, count, widths=bits, **shape).total
    assert padding > 0 if size % 128 else padding == 0


def test_rows_of_a_batch_share_segments_and_each_pays_for_its_own():
    rows = [[2, 4, 2], [4, 2, 2], [16, 16, 16]]
    method = load_method("cocktail", encoder="bm25", chunk_size=32, reorder=False)
    keys, values = random_kv(120, batch=3, channels=64)
    layer = new_layer(method)
    layer.progress.method_state = Plans([planned(bits, 32, 4) for bits in rows])
    feed(layer, keys, values)
    segments = layer.stores()[0].segments
    assert len({tuple(segment.lengths) for segment in segments}) > 3
    query = torch.randn(3, 4, 1, 64, generator=torch.Generator().manual_seed(2))
    together = reference.attend_reference(None, layer, query, None, 0.15)
    for row, bits in enumerate(rows):
        one = slice(row, row + 1)
        alone = filled(method, keys[one], values[one], planned(bits, 32, 4))
        torch.testing.assert_close(reference.attend_reference(None, alone, query[one], None, 0.15), together[one])
        mine = [segment.used(0) for segment in alone.segments() if segment.lengths[0]]
        assert mine == [segment.used(row) for segment in layer.segments() if segment.lengths[row]]
    assert segments[-1].lengths == [20, 20, 120]  # the last row has no packed chunk


def test_bytes_in_place_without_a_text_take_places_at_random():
    method = load_method("cocktail", split=(10, 30, 60), reorder=False)
    shape = {"layers": 2, "query_heads": 4, "heads": 2, "channels": 64}
    reordered = kv_bytes(load_method("cocktail", split=(10, 30, 60)), 3200, **shape)
    spread = kv_bytes(method, 3200, **shape)
    apart = kv_bytes(method, 3200, widths=[2] * 60 + [4] * 30 + [16] * 10, **shape)
    assert spread.window == apart.window == reordered.window
    assert apart.codes == reordered.codes + 2 * 2 * 2 * 64 * (64 * 4) // 8  # 30 chunks of INT4 end within a tile
    assert spread.total > 1.3 * apart.total
    assert spread == kv_bytes(method, 3200, chunks=(60, 30), **shape)


def prompts(ids, context=None, query="", mask=None):
    batch = ids.shape[0]
    return Prompts.from_batch(
        ids,
        mask,
        context_spans=[context] * batch,
        queries=[query] * batch,
        decode=lambda ids: " ".join(f"w{i}" for i in ids),
    )


def test_the_searched_chunk_is_exact_and_the_row_says_so():
    model = zoo.model("llama")
    method = load_method("cocktail", encoder="bm25", chunk_size=16)
    ids, _ = zoo.padded_batch([300])
    ids[0] = ids[0] % 40 + 3
    ids[0, 100:116] = torch.arange(60, 76)  # words that stand nowhere else: chunk (100 - 20) / 16 = 5
    cache = method.new_cache(model, prompts(ids, (20, 280), "where is w61 w62 w63"))
    plan = cache.progress.method_state.rows[0]
    assert plan.widths.bits[5] == 16
    assert len(plan.widths.bits) == 16
    note = cache.notes[0]
    assert sum(note["chunks"].values()) == 16
    assert note["query_source"] == "input"
    assert note["t_low"] < note["t_high"]
    assert cache.search_s > 0
    with torch.no_grad():
        model(input_ids=ids, past_key_values=cache, use_cache=True)
    positions = cache.layers[0].positions(0).tolist()
    exact = positions[-cache.layers[0].stores()[0].tail.length(ALL) :]
    assert set(range(20)) | set(range(100, 116)) | set(range(276, 300)) <= set(exact)
    method.detach(model)


def test_bm25_finds_a_key_that_a_border_cuts():
    """Its first token is the last of chunk 4, its second the first of chunk 5."""
    model = zoo.model("llama")
    ids, _ = zoo.padded_batch([200])
    ids[0] = torch.arange(200) % 7 + 10

    def decode(tokens):
        return "".join({90: " zeb", 91: "ra"}.get(int(i), f" w{int(i)}") for i in tokens)

    ids[0, 79], ids[0, 80] = 90, 91
    widths = {}
    for whole in (None, True, False):
        method = load_method("cocktail", encoder="bm25", chunk_size=16, whole_words=whole)
        prompts = Prompts.from_batch(ids, None, context_spans=[(0, 192)], queries=["where is the zebra"], decode=decode)
        widths[whole] = method.new_cache(model, prompts).progress.method_state.rows[0].widths.bits
    method.detach(model)
    assert [i for i, bits in enumerate(widths[None]) if bits > 2] == [4, 5]
    assert widths[True] == widths[None]
    assert set(widths[False]) == {4}, "nothing is found, so all chunks are alike"


def test_no_full_chunk_one_chunk_and_unknown_borders():
    model = zoo.model("llama")
    method = load_method("cocktail", encoder="bm25")
    ids, _ = zoo.padded_batch([90])
    assert method.new_cache(model, prompts(ids, (10, 30), "q")).progress.method_state.rows[0].widths.bits == ()
    one = method.new_cache(model, prompts(ids, (10, 50), "q")).progress.method_state.rows[0]
    assert one.widths.bits == (4,)
    plain = method.new_cache(model, prompts(ids))
    assert plain.notes[0]["query_source"] == "last_64_tokens"
    longer, _ = zoo.padded_batch([200])
    assert len(method.new_cache(model, prompts(longer)).progress.method_state.rows[0].widths.bits) == (200 - 64) // 32
    template = method.new_cache(model, prompts(longer, (10, 150)))
    assert template.notes[0]["query_source"] == "template"
    method.detach(model)


def test_random_chunks_have_the_same_bytes_and_depend_on_the_seed():
    model = zoo.model("llama")
    ids, _ = zoo.padded_batch([700])
    bits = {}
    for state, (search, seed) in enumerate((("similarity", 0), ("none", 0), ("none", 0), ("none", 1))):
        random.seed(state), torch.manual_seed(state)  # no other seed counts
        method = load_method("cocktail", encoder="bm25", search=search, seed=seed, chunk_size=16, split=[15, 35, 50])
        cache = method.new_cache(model, prompts(ids, (0, 640), " ".join(f"w{i}" for i in ids[0, 64:72].tolist())))
        widths = cache.progress.method_state.rows[0].widths.bits
        assert [widths.count(w) for w in (16, 4, 2)] == [6, 14, 20]
        bits.setdefault((search, seed), []).append(widths)
    method.detach(model)
    assert bits["none", 0][0] == bits["none", 0][1]
    assert len({w[0] for w in bits.values()}) == 3


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"alpha": 0.9, "beta": 0.1}, "is too large for method.beta"),
        ({"alpha": -0.1}, "method.alpha=-0.1"),
        ({"beta": 1.5}, "method.beta=1.5"),
        ({"chunk_size": 0}, "method.chunk_size=0"),
        ({"chunk_size": 48}, "must divide method.chunk_size=48"),
        ({"group_size": 24}, "must divide method.chunk_size=32"),
        ({"split": [50, 50]}, "must be three shares"),
        ({"split": [0, 0, 0]}, "must be three shares"),
        ({"encoder": "bm52"}, "did you mean 'bm25'"),
        ({"value_group_size": 0}, "method.value_group_size=0: must be at least 1"),
        ({"search": "random"}, "method.search"),
        ({"quantizer": "int2"}, "does not accept this quantizer"),
    ],
)
def test_wrong_settings_are_refused(overrides, message):
    with pytest.raises(ConfigError, match=message):
        load_method("cocktail", **overrides)


def test_what_bm25_takes_for_words_is_part_of_the_identity():
    assert load_method("cocktail", encoder="bm25").identity() == {"encoder": "bm25 2"}
    assert load_method("cocktail").identity() == {}


def test_runs_in_place_are_not_mixed_with_those_of_chunks_that_were_only_read_in_place():
    own = load_method("cocktail", encoder="bm25", reorder=False).identity()
    assert own == {"encoder": "bm25 2", "reorder": "false: runs in place"}


def test_a_cache_without_prompts_says_what_to_pass():
    with pytest.raises(CacheError, match=r"Prompts.from_batch"):
        load_method("cocktail").new_cache(zoo.model("llama"))


def test_indices_are_made_once_for_all_layers_and_freed_after_the_last_one(monkeypatch):
    model, method = zoo.model("llama"), load_method("cocktail", encoder="bm25", chunk_size=16)
    ids, _ = zoo.padded_batch([300, 300])
    cache = method.new_cache(model, prompts(ids, (20, 280), "where"))
    held, plain = [], ChunkPlan.placed

    def counted(plan, layer):
        held.append(len(plan._indices))
        plain(plan, layer)

    monkeypatch.setattr(ChunkPlan, "placed", counted)
    with torch.no_grad():
        model(input_ids=ids, past_key_values=cache, use_cache=True)
    assert held == [1] * 4  # two layers of two rows
    assert not any(plan._indices for plan in cache.progress.method_state.rows)


class Timed:
    """An encoder whose search passes in no time and would have taken a second a prompt."""

    whole_words, unspent_s, uncharged = False, 0.0, 0

    def scores(self, query, texts):
        self.unspent_s += 1.0
        return [float(index) for index, _ in enumerate(texts)]


def test_kept_vectors_are_charged_to_the_search(monkeypatch):
    encoder = Timed()
    monkeypatch.setattr("kvbench.retrieval.encoders.encoder", lambda name: encoder)
    monkeypatch.setattr("kvbench.methods.cocktail.time.perf_counter", lambda: 0.0)  # no other time passes
    model, method = zoo.model("llama"), load_method("cocktail", encoder="minilm", chunk_size=16)
    ids, _ = zoo.padded_batch([300])
    for _ in range(2):
        cache = method.new_cache(model, prompts(ids, (20, 280), "where"))
        assert cache.search_s == 1.0
        assert cache.notes[0]["search_s"] == pytest.approx(cache.search_s, abs=1e-6)
    encoder.unspent_s = -1e9  # weights were loaded in earlier searches
    assert method.new_cache(model, prompts(ids, (20, 280), "where")).search_s == pytest.approx(1.0, abs=1e-6)


def test_a_search_that_cannot_be_charged_has_no_time(monkeypatch):
    encoder = Timed()
    monkeypatch.setattr("kvbench.retrieval.encoders.encoder", lambda name: encoder)
    monkeypatch.setattr(Timed, "scores", lambda self, query, texts: setattr(self, "uncharged", 3) or [0.0] * len(texts))
    method = load_method("cocktail", encoder="minilm", chunk_size=16)
    ids, _ = zoo.padded_batch([300])
    cache = method.new_cache(zoo.model("llama"), prompts(ids, (20, 280), "where"))
    assert cache.search_s is None and cache.notes[0]["search_s"] is None


def test_the_encoder_behind_a_name_is_part_of_the_run(tmp_path, monkeypatch):
    def identity(encoder):
        return load_method("cocktail", encoder=encoder).identity()

    for name in ("OPENAI_EMBEDDING_MODEL", "OPENAI_BASE_URL"):
        monkeypatch.delenv(name, raising=False)
    found = [identity("openai")]
    assert found == [{}]  # as ever
    monkeypatch.setenv("OPENAI_EMBEDDING_MODEL", "text-embedding-3-small")
    found.append(identity("openai"))
    monkeypatch.setenv("OPENAI_BASE_URL", "http://localhost:1/v1")
    found.append(identity("openai"))
    monkeypatch.delenv("OPENAI_EMBEDDING_MODEL")
    found.append(identity("openai"))
    monkeypatch.setenv("OPENAI_BASE_URL", "http://localhost:1/v1/")
    assert identity("openai") == found[-1]
    folder = tmp_path / "encoder" / "1_Pooling"
    folder.mkdir(parents=True)
    for content in ("a", "b"):
        (folder / "config.json").write_text(content)
        found.append(identity(str(tmp_path / "encoder")))
    assert len({str(each) for each in found}) == len(found)
    assert identity("minilm") == identity("org/model") == {}


def test_rows_of_a_copy_of_the_plans_are_its_own():
    first, second = (ChunkPlan(Chunked(0, 8, [], "", "input"), Widths((), None, None)) for _ in range(2))
    plans = Plans([first, second])
    plans.clone().select([1, 1, 0])
    assert plans.rows == [first, second]
