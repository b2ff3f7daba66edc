"""The contract of every method, for each YAML in conf/method and toy methods from outside the package.

``pytest --methods=DIR`` holds the methods of another folder to it instead (:mod:`tests.contract.subjects`).
"""

import gc
import importlib.util
from collections.abc import Collection
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from transformers import PreTrainedModel

from kvbench.attention.work import Work
from kvbench.cache import KVCache, Parts, Prompts
from kvbench.cache.progress import Progress
from kvbench.cache.segments.packed import PackedSegment
from kvbench.decoding import Generation, Sampling, generate
from kvbench.methods import KeepMethod, Method, RecencyMethod, ScoredMethod, load_method
from kvbench.util.confdir import read_choice
from tests import slow, zoo
from tests.contract import subjects

SLOW = pytest.mark.slow
#: methods from outside the package, one for each base class
TOYS = subjects.toys()
#: what a method needs to run here (encoders without weights), and variants of methods
OVERRIDES = {
    "cocktail": {"encoder": "bm25", "chunk_size": 16},
    "hf_quantized": {"backend": "hqq", "bits": 4, "residual": 32, "group_size": 64, "axis_key": 1, "axis_value": 1},
    "kvquant": {"outliers": 0.05},
    "turboquant": {"boundary": 0},  # of the two layers here, none would be packed
    "kvarn": {"sinks": 0},  # the prompts here are hardly longer than its 128 sinks
    # their papers' budgets keep prompts of this length whole
    "streamingllm": {"budget": 64},
    "snapkv": {"budget": 0.25},
    "keep": {"residual": 32, "newest": 8},
}
MISSING = {
    "hf_quantized": "" if importlib.util.find_spec("hqq") else "hqq is not installed: run pip install 'kvbench[hf]'",
}
VARIANTS = {
    "atom:authors": {"rope": "pre", "prefill": "quantized"},
    "kivi:evict": {"evict": True},
    "kivi:mixed": {
        "residual": 64,
        "rotation": {"key": "hadamard", "value": "rht"},
        "layers": "0:int8/int4",
    },
    "kivi:sinks": {"sinks": 5, "residual": 64},
    "kivi:token": {"key_axis": "token"},
    "kvquant:authors": {
        "bits": 3,
        "outliers": 0.05,
        "first_tokens": 3,
        "cap_outliers": True,
        "q_norm": True,
        "prefill": "quantized",
    },
    "logquant:evict": {"evict": True, "sinks": 2},
    "partial_logquant:released": {"value_window": "released", "window": 42},
    "streamingllm:original": {"budget": 0.25, "position": "original"},
    "h2o:max": {"group": "max", "per_query": True},
    "quantspec:plain": {"gamma": 0},
    "quantspec:draft": {"draft": "kivi", "draft_options": {"residual": 64}, "sensitive_layers": 1},
    "cocktail:in_place": {"encoder": "bm25", "chunk_size": 8, "reorder": False, "key_axis": "token"},
}


def cases(slow_variants: Collection[str]) -> list:
    """Every method with the first two quantizers that its YAML takes, and variants that place tokens otherwise.

    Of a method's quantizers the second one is slow, and so are the variants that are named.
    """
    found = [
        pytest.param(name, None, id=name.replace(":", "-"), marks=SLOW if name in slow_variants else ())
        for name in VARIANTS
        if subjects.folder is None
    ]
    for name in subjects.names():
        for number, quantizer in enumerate(subjects.quantizers(name)[:2]):
            marks = [pytest.mark.skipif(bool(MISSING.get(name)), reason=MISSING.get(name, ""))]
            marks += [SLOW] * number
            found.append(pytest.param(name, quantizer, id=f"{Path(name).stem}-{quantizer}", marks=marks))
    return found


#: the variant that takes longest is slow everywhere; in some tests all variants are, as they do there what others do
CASES, PLAIN = cases({"kvquant:authors"}), cases(VARIANTS)
LENGTHS = [119, 251, 246]  # KIVI packs keys at 128 and at 256 tokens: while these answers are decoded
NEW = 12  #: tokens of an answer, after which all three rows have packed


def fields(name: str) -> dict:
    """A method's fields here. Its calibration is made when a test asks for it, not when tests are collected."""
    more = VARIANTS.get(name) or OVERRIDES.get(name, {})
    if name == "oscar":
        return {"calibration": zoo.rotations("llama", "mistral"), **more}
    return {"calibration": zoo.calibrations("llama"), **more} if name.startswith("kvquant") else more


def make(name: str, quantizer: str | None):
    return load_method(name.split(":")[0], quantizer=quantizer, **fields(name))


def fresh(method, model: PreTrainedModel, ids, mask=None, *, tell=False) -> KVCache:
    """Return a cache that gets the prompts if `tell` or the method needs it, else infers the padding from the mask."""
    if not (tell or method.needs_prompts):
        return method.new_cache(model)
    return method.new_cache(model, Prompts.from_batch(ids, mask, decode=lambda ids: " ".join(map(str, ids))))


def answer(method, model: PreTrainedModel, ids, mask=None, *, tell=True, **kwargs):
    cache = fresh(method, model, ids, mask, tell=tell)
    return generate(model, cache, ids, mask, max_new_tokens=kwargs.pop("max_new_tokens", NEW), **kwargs), cache


ANSWERS = {"answer_ids": [[5, 9, 11], [7], [3, 4, 5, 6]]}


def places(kv: KVCache) -> list[list[list[int]]]:
    return [[layer.positions(row).tolist() for row in range(len(LENGTHS))] for layer in kv.layers]


class Whole(NamedTuple):
    """The rest of a padded batch whose prompts ran at once."""

    made: Generation
    used: Parts
    used_by_row: list[Parts]
    reserved: Parts
    held: int  #: bytes of all tensors that can be reached from the cache
    positions: list[list[list[int]]]


@cache
def whole(name: str, quantizer: str | None, new: int = NEW, architecture: str = "llama") -> Whole:
    ids, mask = zoo.padded_batch(LENGTHS, seed=1)
    model, method = zoo.model(architecture), make(name, quantizer)
    made, kv = answer(method, model, ids, mask, prefill_rows=None, max_new_tokens=new, **ANSWERS)
    by_row = [kv.bill(row).used for row in range(len(LENGTHS))]
    return Whole(made, kv.bill().used, by_row, kv.bill().reserved, held(kv), places(kv))


@pytest.fixture(scope="module")
def llama():
    return zoo.model("llama")


@pytest.mark.parametrize(("name", "quantizer"), CASES)
@pytest.mark.parametrize("architecture", ["llama", pytest.param("mistral", marks=SLOW)])
def test_a_left_padded_row_equals_the_row_alone(name, quantizer, architecture):
    model, method = zoo.model(architecture), make(name, quantizer)
    ids, _ = zoo.padded_batch(LENGTHS, seed=1)
    answers, together = ANSWERS["answer_ids"], whole(name, quantizer, architecture=architecture)
    for row, length in enumerate(LENGTHS):
        alone, own = answer(method, model, ids[row : row + 1, -length:], answer_ids=answers[row : row + 1])
        assert alone.tokens[0] == together.made.tokens[row]
        assert alone.answer_nll[0][0] == pytest.approx(together.made.answer_nll[row][0], rel=1e-4)
        assert own.bill().used == together.used_by_row[row]
    assert together.used.total == sum(used.total for used in together.used_by_row)


@pytest.mark.parametrize(("name", "quantizer"), PLAIN)
def test_prompts_run_row_by_row_equal_prompts_run_together(name, quantizer, llama):
    """Groups of two and one; bytes, positions and tokens."""
    wanted = whole(name, quantizer)
    ids, mask = zoo.padded_batch(LENGTHS, seed=1)
    parts, other = answer(make(name, quantizer), llama, ids, mask, prefill_rows=2, **ANSWERS)
    assert parts.tokens == wanted.made.tokens
    assert other.bill().used == wanted.used
    assert places(other) == wanted.positions
    assert other.progress.prefill.group is None


@pytest.mark.parametrize(("name", "quantizer"), CASES)
def test_chunked_prefill_equals_one_shot(name, quantizer, llama):
    method, wanted = make(name, quantizer), whole(name, quantizer, 3)
    ids, mask = zoo.padded_batch(LENGTHS, seed=1)
    for chunk, tell in ((250, True), (47, False)):  # 250 leaves a tail of one token, 47 divides no group or window
        chunked, other = answer(method, llama, ids, mask, prefill_chunk=chunk, tell=tell, max_new_tokens=3, **ANSWERS)
        assert chunked.tokens == wanted.made.tokens
        for (a, _), (b, _) in zip(chunked.answer_nll, wanted.made.answer_nll, strict=True):
            assert a == pytest.approx(b, rel=1e-4)
        assert other.bill().used == wanted.used
        assert places(other) == wanted.positions


@pytest.mark.parametrize(("name", "quantizer"), CASES)
def test_the_whole_cache_is_the_sum_of_the_bill(name, quantizer):
    """Every tensor that can be reached from the cache, on the model's device, is on the bill."""
    cache = whole(name, quantizer)
    assert cache.held == cache.reserved.total
    assert 0 < cache.used.total <= cache.reserved.total


def held(kv: KVCache) -> int:
    """Bytes of all tensors that can be reached from a cache, but the orders of its layers and the prompts."""
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in reachable(kv)}
    orders = sum(order.untyped_storage().nbytes() for layer in kv.layers for order in layer.order if order is not None)
    return sum(storages.values()) - orders - kv.progress.prefill.prompts.input_ids.untyped_storage().nbytes()


def reachable(kv: KVCache) -> list[torch.Tensor]:
    seen, stack, tensors = set(), [kv], []
    while stack:
        thing = stack.pop()
        if id(thing) in seen or isinstance(thing, type | PreTrainedModel):
            continue
        seen.add(id(thing))
        if isinstance(
            thing, Progress
        ):  # a step's mask, and where phases begin: kernels need them, and no token is there
            seen |= {id(thing.tables), id(thing.placed), id(thing.plain_masks)}
        if isinstance(thing, Work):
            seen.add(id(thing.table))
        if isinstance(thing, torch.Tensor):
            tensors.append(thing)
        elif isinstance(thing, dict | list | tuple | set) or type(thing).__module__.startswith(("kvbench", "tests")):
            stack.extend(gc.get_referents(thing))
    return tensors


@pytest.mark.parametrize(("name", "quantizer"), PLAIN)
def test_a_group_has_at_most_2_to_the_bits_levels_and_codes_were_made_once(name, quantizer, llama):
    ids, _ = zoo.padded_batch([370])  # groups and windows of all methods fill up before 400
    _, cache = answer(make(name, quantizer), llama, ids, max_new_tokens=31)
    cache.settle()
    row = slice(0, 1)
    for layer in cache.layers:
        for segment in layer.segments():
            if isinstance(segment, PackedSegment) and segment.length(row):
                if getattr(segment.quantizer, "kind", None) == "cross":  # levels of a row differ by token or channel
                    assert segment.codes(row, 0, segment.length(row)).max() < 2**segment.quantizer.bits
                    continue
                values = segment.read(row, 0, segment.length(row), torch.float32)
                grouped = segment.quantizer.group(values)
                grouped = grouped.transpose(-1, -2) if segment.quantizer.axis == "channel" else grouped
                assert slow.levels(grouped) <= 2**segment.quantizer.bits


@pytest.mark.parametrize(("name", "quantizer"), CASES)
def test_nothing_attends_to_padding(name, quantizer, llama):
    ids, mask = zoo.padded_batch(LENGTHS, seed=1)
    other, _ = answer(make(name, quantizer), llama, ids + (1 - mask) * 50, mask, max_new_tokens=3, **ANSWERS)
    wanted = whole(name, quantizer, 3).made
    assert other.tokens == wanted.tokens
    assert [nll for nll, _ in other.answer_nll] == pytest.approx([nll for nll, _ in wanted.answer_nll], rel=1e-6)


@pytest.mark.parametrize(("name", "quantizer"), CASES)
def test_new_tokens_do_not_see_the_future(name, quantizer, llama):
    """Logits of a step of five tokens do not change when the last two do."""
    method = make(name, quantizer)
    ids, _ = zoo.padded_batch([230])
    outs = []
    for tail in ([4, 5, 6, 7, 8], [4, 5, 6, 70, 80]):
        cache = fresh(method, llama, ids)
        with torch.no_grad():
            llama(input_ids=ids, past_key_values=cache, use_cache=True)
            outs.append(llama(input_ids=torch.tensor([tail]), past_key_values=cache, use_cache=True).logits)
    torch.testing.assert_close(outs[0][:, :3], outs[1][:, :3])
    assert not torch.allclose(outs[0][:, 3:], outs[1][:, 3:])


@pytest.mark.parametrize(("name", "quantizer"), CASES)
def test_rejected_tokens_are_rolled_back(name, quantizer, llama):
    method = make(name, quantizer)
    ids, _ = zoo.padded_batch([247])  # KIVI packs keys at 256: first those of drafts, then of what stays
    drafts = torch.tensor([[9, 8, 7, 6, 5]])

    def run(reject: bool):
        cache = fresh(method, llama, ids)
        outs = []
        with torch.no_grad():
            llama(input_ids=ids, past_key_values=cache, use_cache=True)
            for step in range(11):
                if reject:
                    llama(input_ids=(drafts + step) % 90, past_key_values=cache, use_cache=True)
                    cache.crop(-5)
                token = torch.tensor([[10 + step]])
                outs.append(llama(input_ids=token, past_key_values=cache, use_cache=True).logits)
        return torch.cat(outs), cache.bill().used

    (plain, bill), (rolled, rolled_bill) = run(False), run(True)
    torch.testing.assert_close(plain, rolled, rtol=1e-4, atol=1e-5)
    assert bill == rolled_bill


@pytest.mark.parametrize(("name", "quantizer"), CASES)
def test_a_clone_is_independent_and_beams_carry_their_caches(name, quantizer, llama):
    method = make(name, quantizer)
    ids, mask = zoo.padded_batch(LENGTHS)
    cache = fresh(method, llama, ids, mask)
    with torch.no_grad():
        llama(input_ids=ids, attention_mask=mask, past_key_values=cache, use_cache=True)
        twin = cache.clone()
        order = torch.tensor([2, 0, 0])
        twin.reorder_cache(order)
        tokens = torch.tensor([[5], [6], [7]])
        longer = torch.nn.functional.pad(mask, (0, 1), value=1)
        position = longer.sum(-1, keepdim=True) - 1
        first = llama(
            input_ids=tokens[order],
            attention_mask=longer[order],
            position_ids=position[order],
            past_key_values=twin,
            use_cache=True,
        ).logits
        second = llama(
            input_ids=tokens, attention_mask=longer, position_ids=position, past_key_values=cache, use_cache=True
        ).logits
    torch.testing.assert_close(first, second[order], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("name", "quantizer"), PLAIN)
def test_the_same_seed_draws_the_same_tokens_in_any_batch(name, quantizer, llama):
    method, (ids, mask) = make(name, quantizer), zoo.padded_batch(LENGTHS)
    batch, row = (Sampling(1.0, 0.9, seeds) for seeds in ([11, 22, 33], [22]))
    together, _ = answer(method, llama, ids, mask, sampling=batch, max_new_tokens=6)
    alone, _ = answer(method, llama, ids[1:2, -LENGTHS[1] :], sampling=row, max_new_tokens=6)
    assert alone.tokens[0] == together.tokens[1]


@pytest.mark.parametrize("toy", TOYS, ids=lambda path: path.stem)
def test_the_toys_lie_outside_the_package(toy):
    assert not read_choice(toy)["_target_"].startswith("kvbench.")


def test_every_base_class_is_under_contract():
    """By methods from outside: what a base promises holds for more than the methods that it was made for."""
    bases = {type(load_method(str(toy))).__mro__[1] for toy in TOYS}
    assert bases == {KeepMethod, Method, RecencyMethod, ScoredMethod}
