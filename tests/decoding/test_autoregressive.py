"""kvbench's own loop: equal to transformers', with stops, limits, observers and the check that the cache was used."""

import pytest
import torch
from transformers import DynamicCache, Phi3Config, Phi3ForCausalLM

from kvbench.decoding import Sampling, generate
from kvbench.decoding.sampling import choose, probabilities
from kvbench.errors import CacheError, NonFiniteError
from kvbench.methods import load_method
from tests import zoo


class Letters:
    """A tokenizer whose tokens are letters."""

    def decode(self, tokens, skip_special_tokens=True):
        return "".join(chr(ord("a") + t % 26) for t in tokens)


@pytest.fixture(scope="module")
def llama():
    model = zoo.model("llama")
    yield model
    load_method("fp16").detach(model)


@pytest.mark.parametrize("name", zoo.MODELS)
@pytest.mark.parametrize("lengths", [[60], [50, 75, 70]])
def test_greedy_equals_transformers(name, lengths):
    model, method = zoo.model(name), load_method("fp16")
    ids, mask = zoo.padded_batch(lengths)
    method.detach(model)
    stock = model.generate(ids, attention_mask=mask, max_new_tokens=20, do_sample=False, eos_token_id=None)
    ours = generate(model, method.new_cache(model), ids, mask, max_new_tokens=20)
    method.detach(model)
    assert ours.tokens == stock[:, ids.shape[1] :].tolist()
    assert ours.finish == ["length"] * len(lengths)
    assert len(ours.step_s) == 19
    assert ours.prompt_tokens == lengths


def test_rows_end_by_token_by_string_or_by_length(llama):
    method = load_method("fp16")
    ids, mask = zoo.padded_batch([50, 75, 70])
    free = generate(llama, method.new_cache(llama), ids, mask, max_new_tokens=20, tokenizer=Letters())
    eos = free.tokens[0][5]
    ended = generate(llama, method.new_cache(llama), ids, mask, max_new_tokens=20, eos_token_ids=[eos])
    for got, whole, why in zip(ended.tokens, free.tokens, ended.finish, strict=True):
        at = whole.index(eos) if eos in whole else None
        assert got == whole[:at]
        assert why == ("length" if at is None else "eos")
    stop = free.text[1][7:9]
    stopped = generate(llama, method.new_cache(llama), ids, mask, max_new_tokens=20, stop=[stop], tokenizer=Letters())
    for got, whole in zip(stopped.text, free.text, strict=True):
        assert got == whole.split(stop)[0]
    assert "stop" in stopped.finish


def test_answers_likelihood_equals_one_forward_pass(llama):
    method = load_method("fp16")
    ids, mask = zoo.padded_batch([50, 75])
    answers = [[5, 6, 7, 8], [9, 10]]
    result = generate(llama, method.new_cache(llama), ids, mask, max_new_tokens=3, answer_ids=answers)
    method.detach(llama)
    for row, (length, answer) in enumerate(zip([50, 75], answers, strict=True)):
        whole = torch.cat([ids[row, -length:], torch.tensor(answer)])[None]
        with torch.no_grad():
            logs = torch.log_softmax(llama(input_ids=whole).logits[0, length - 1 : -1], -1)
        total, count = result.answer_nll[row]
        assert count == len(answer)
        assert total == pytest.approx(-float(logs.gather(1, torch.tensor(answer)[:, None]).sum()), rel=1e-5)


def test_the_observer_is_told_of_every_phase(llama):
    phases = []
    observer = type("Seen", (), {"phase": lambda self, name: phases.append(name)})()
    ids, _ = zoo.padded_batch([30])
    cache = load_method("fp16").new_cache(llama)
    generate(llama, cache, ids, max_new_tokens=2, observer=observer, answer_ids=[[5]])
    assert phases == ["prefill", "likelihood", "decode", "steps", "end"]


def test_phi3_longrope_keeps_the_cache_where_generate_drops_it():
    factors = [1.0] * 32
    config = Phi3Config(
        **{
            **zoo.ARCHITECTURE,
            "sliding_window": None,
            "original_max_position_embeddings": 64,
            "rope_scaling": {"type": "longrope", "short_factor": factors, "long_factor": [2.0] * 32},
        }
    )
    torch.manual_seed(0)
    model, method = Phi3ForCausalLM(config).eval(), load_method("kivi", quantizer="int4", residual=32)
    ids, mask = zoo.padded_batch([90])
    dropped = method.new_cache(model)
    model.generate(ids, attention_mask=mask, max_new_tokens=5, past_key_values=dropped)
    assert dropped.get_seq_length() == 0, "transformers keeps the cache now: the warning in the docs can go"
    cache = method.new_cache(model)
    generate(model, cache, ids, max_new_tokens=5)
    assert cache.get_seq_length() == 94
    assert cache.reads_packed


def test_a_model_that_uses_another_cache_is_found_out(llama):
    class Forgetful(torch.nn.Module):
        def forward(self, **kwargs):
            return llama(**{**kwargs, "past_key_values": DynamicCache()})

    cache = load_method("fp16").new_cache(llama)
    with pytest.raises(CacheError, match="the model used another cache"):
        generate(Forgetful(), cache, zoo.padded_batch([30])[0], max_new_tokens=2)


def test_nucleus_keeps_the_smallest_set_that_reaches_p():
    logits = torch.log(torch.tensor([[0.5, 0.3, 0.15, 0.05]]))
    probs = probabilities(logits, Sampling(1.0, 0.6))
    torch.testing.assert_close(probs, torch.tensor([[0.625, 0.375, 0.0, 0.0]]))
    assert probabilities(logits, Sampling(1.0, 0.4)).tolist() == [[1.0, 0.0, 0.0, 0.0]]
    generators = Sampling(1.0, 1.0, 5).generators(1)
    drawn = torch.stack([choose(logits, Sampling(1.0), generators) for _ in range(4000)]).flatten()
    share = torch.bincount(drawn, minlength=4) / 4000
    torch.testing.assert_close(share, torch.tensor([0.5, 0.3, 0.15, 0.05]), atol=0.03, rtol=0)


def test_wrong_calls_are_refused(llama):
    ids, _ = zoo.padded_batch([30])
    cache = load_method("fp16").new_cache(llama)
    with pytest.raises(ValueError, match="max_new_tokens=0"):
        generate(llama, cache, ids, max_new_tokens=0)
    with pytest.raises(ValueError, match="require a tokenizer"):
        generate(llama, cache, ids, max_new_tokens=2, stop=["x"])
    with pytest.raises(ValueError, match="2 seeds were given for a batch of 1"):
        generate(llama, cache, ids, max_new_tokens=2, sampling=Sampling(1.0, 1.0, [1, 2]))


def test_a_used_cache_is_refused_until_it_is_reset():
    """Its second prompt would be taken for new tokens of the first."""
    model, method = zoo.model("llama"), load_method("kivi", quantizer="int4", residual=32)
    ids, _ = zoo.padded_batch([50])
    cache = method.new_cache(model)
    first = generate(model, cache, ids, max_new_tokens=40).tokens
    with pytest.raises(CacheError, match=r"already contains 89 tokens of another prompt.*cache\.reset\(\)"):
        generate(model, cache, ids, max_new_tokens=40)
    assert cache.get_seq_length() == 89
    cache.reset()
    assert generate(model, cache, ids, max_new_tokens=40).tokens == first


def test_an_answer_that_must_say_something_does_not_end_at_once(llama):
    """`min_length` one above the prompt: the first token is none of those that end, later ones may be."""
    ids, _ = zoo.padded_batch([12])
    method = load_method("fp16")
    first = generate(llama, method.new_cache(llama), ids, max_new_tokens=1).tokens[0][0]
    ended = generate(llama, method.new_cache(llama), ids, max_new_tokens=4, eos_token_ids=[first])
    assert ended.tokens == [[]] and ended.finish == ["eos"]
    generation = generate(
        llama, method.new_cache(llama), ids, max_new_tokens=4, eos_token_ids=[first], say_something=True
    )
    logits = llama(input_ids=ids).logits[0, -1]
    assert generation.tokens[0][0] == int(logits.topk(2).indices[1])
    method.detach(llama)


@pytest.mark.parametrize("broken", [float("nan"), float("inf")])
def test_logits_that_are_no_numbers_are_no_answer(broken):
    """A weight that is NaN gave the token 0 for ever, and a score of 0 that looked measured."""
    model, method = zoo.fresh("llama"), load_method("fp16")
    with torch.no_grad():
        model.lm_head.weight[3, 0], model.lm_head.weight[4, 0] = broken, -broken
    ids = torch.arange(5, 25)[None]
    with pytest.raises(NonFiniteError, match=r"row 0 contain NaN or Inf.*\n  hint: download the weights again"):
        generate(model, method.new_cache(model), ids, None, max_new_tokens=3)
    model.bfloat16()
    with pytest.raises(NonFiniteError, match=r"row 0 contain NaN or Inf.*\n  hint: set model\.dtype=float32"):
        generate(model, method.new_cache(model), ids, None, max_new_tokens=3)
