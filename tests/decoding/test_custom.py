"""kvbench's loops inside transformers' generate."""

import warnings
from types import SimpleNamespace

import pytest
import torch
from transformers import TopKLogitsWarper, TopPLogitsWarper

from kvbench.decoding.custom import custom_generate, with_prompts
from kvbench.decoding.sampling import Sampling, probabilities
from kvbench.errors import ModelError
from kvbench.methods import load_method
from tests import zoo
from tests.methods.test_quantspec import small


def test_generate_gives_what_stock_greedy_decoding_gives_with_speculation_inside():
    model, method = zoo.restless(), small(32, draft="fp16", target="fp16")
    ids, mask = zoo.padded_batch([90, 70])
    method.detach(model)
    stock = model.generate(ids, attention_mask=mask, max_new_tokens=20, do_sample=False)
    report = []
    generation = model.generate(
        ids,
        attention_mask=mask,
        max_new_tokens=20,
        do_sample=False,
        past_key_values=method.new_cache(model),
        custom_generate=custom_generate,
        report=report,
    )
    assert torch.equal(generation, stock)
    assert len(report[0].rounds) < 19


def test_rows_that_end_are_filled_up_and_sampling_follows_the_config():
    model, method = zoo.restless(), small(32)
    ids, _ = zoo.padded_batch([40])

    def run(**kwargs):
        return model.generate(
            ids.repeat(2, 1),
            max_new_tokens=12,
            past_key_values=method.new_cache(model),
            custom_generate=custom_generate,
            **kwargs,
        )[:, 40:]

    drawn = run(do_sample=True, temperature=0.9, top_p=0.9, seed=3)
    assert torch.equal(drawn, run(do_sample=True, temperature=0.9, top_p=0.9, seed=3))
    assert not torch.equal(drawn[0], drawn[1])  # each row has its own draws
    assert not torch.equal(drawn, run(do_sample=True, temperature=0.9, top_p=0.9, seed=4))
    greedy = run(do_sample=False)
    end = int(greedy[0, 5])
    first = greedy[0].tolist().index(end)
    ended = run(do_sample=False, eos_token_id=end, pad_token_id=0)
    assert ended[0].tolist() == greedy[0, : first + 1].tolist()


def test_the_most_probable_tokens_alone_are_drawn_from():
    """As transformers' warpers leave them, the 50 that generate() takes by default too."""
    logits = torch.randn(2, 3, 97, generator=torch.Generator().manual_seed(1)) * 3
    for k in (1, 7, 50, 200):
        for p in (1.0, 0.8):
            expected = TopKLogitsWarper(k)(None, logits.reshape(6, 97) / 0.7)
            expected = TopPLogitsWarper(p)(None, expected).softmax(-1).reshape(2, 3, 97)
            torch.testing.assert_close(probabilities(logits, Sampling(0.7, p, 0, k)), expected)
    model, method = zoo.restless(), small(32)
    ids, _ = zoo.padded_batch([40])

    def run(**kwargs):
        cache = method.new_cache(model)
        return model.generate(ids, max_new_tokens=12, past_key_values=cache, custom_generate=custom_generate, **kwargs)[
            0, 40:
        ].tolist()

    one = run(do_sample=True, temperature=5.0, top_k=1)
    assert one == run(do_sample=False) != run(do_sample=True, temperature=5.0)
    assert run(do_sample=True, temperature=5.0) == run(do_sample=True, temperature=5.0, top_k=50)
    assert run(do_sample=True, temperature=5.0) != run(do_sample=True, temperature=5.0, top_k=0)


@pytest.mark.parametrize(
    "kwargs", [{"repetition_penalty": 1.3}, {"do_sample": True, "min_p": 0.3}, {"num_beams": 2}, {"max_time": 9.0}]
)
def test_what_the_loops_do_not_have_is_refused(kwargs):
    model = zoo.restless()
    ids, _ = zoo.padded_batch([20])
    cache = load_method("quantspec").new_cache(model)
    with pytest.raises(ModelError, match="custom_generate"):
        model.generate(ids, max_new_tokens=4, past_key_values=cache, custom_generate=custom_generate, **kwargs)
    with pytest.raises(ModelError, match="kvbench cache"):
        model.generate(ids, max_new_tokens=4, custom_generate=custom_generate)


def test_a_loop_that_does_not_speculate_says_so_once_and_names_the_one_that_does():
    model, ids = zoo.model(), torch.arange(3, 40)[None]
    method = load_method("quantspec", gamma=4)
    with pytest.warns(
        UserWarning, match="does not speculate.*drafts 4 tokens per round.*custom_generate=custom_generate"
    ) as said:
        plain = model.generate(ids, past_key_values=method.new_cache(model), max_new_tokens=8, do_sample=False)
    assert len([each for each in said if "speculate" in str(each.message)]) == 1
    for silent, arguments in (
        (method, {"custom_generate": custom_generate}),
        (load_method("quantspec", gamma=0), {}),
        (load_method("kivi"), {}),
    ):
        with warnings.catch_warnings():
            warnings.filterwarnings("error", message=".*speculate.*")
            cache = silent.new_cache(model)
            out = model.generate(ids, past_key_values=cache, max_new_tokens=8, do_sample=False, **arguments)
        if silent is method:
            assert torch.equal(out, plain)


def test_answers_are_put_behind_their_prompts_and_filled_up():
    generation = SimpleNamespace(tokens=[[5, 6, 7], [8], []], finish=["length", "eos", "stop"])
    ids = torch.tensor([[1, 2], [3, 4], [5, 6]])
    assert with_prompts(ids, generation, [9, 10], 0).tolist() == [
        [1, 2, 5, 6, 7],
        [3, 4, 8, 9, 0],
        [5, 6, 0, 0, 0],
    ]
    assert with_prompts(ids, generation, [], 3)[1].tolist() == [3, 4, 8, 3, 3]


@pytest.mark.parametrize(
    ("ends", "pad", "passed"),
    [(None, None, ([], 0)), (7, None, ([7], 7)), ([8, 9], None, ([8, 9], 8)), ([8], 0, ([8], 0))],
)
def test_tokens_that_end_and_fill_up_come_from_the_config(ends, pad, passed, monkeypatch):
    """Without a pad token the first that ends; the limit is that of all tokens less the prompt's."""
    seen = []

    def generate(model, cache, ids, mask, **given):
        seen.append(given)
        return SimpleNamespace(tokens=[[5]], finish=["length"])

    monkeypatch.setattr("kvbench.decoding.custom.generate", generate)
    model = zoo.model("llama")
    config = SimpleNamespace(
        num_beams=None, do_sample=True, temperature=None, top_p=None, top_k=None, max_length=30,
        eos_token_id=ends, pad_token_id=pad,
    )  # fmt: skip
    ids, _ = zoo.padded_batch([20])
    cache = load_method("fp16").new_cache(model)
    custom_generate(model, ids, generation_config=config, past_key_values=cache, seed=3)
    (given,) = seen
    assert (given["eos_token_ids"], given["pad_token_id"]) == passed and given["max_new_tokens"] == 10
    assert given["sampling"] == Sampling(1.0, 1.0, 3, None)
