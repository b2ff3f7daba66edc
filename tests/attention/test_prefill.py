"""Attention of a prompt to itself: padding in place of a mask, SDPA's back ends, causality by transformers' rule."""

from __future__ import annotations

from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend
from transformers.masking_utils import causal_mask_function, sliding_window_causal_mask_function

from kvbench.attention import prefill
from kvbench.attention.logits import PLAIN, Logits

GROUPED = torch.nn.Module()
GROUPED.num_key_value_groups = 2
SINKS = torch.tensor([4.0, -1.0, 2.0, 0.5])
#: a padded batch of two
REAL = torch.tensor([[0] * 3 + [1] * 5, [1] * 8])


def inputs(batch: int = 1, count: int = 12, width: int = 12, value_dim: int = 16) -> tuple[Tensor, Tensor, Tensor]:
    rng = torch.Generator().manual_seed(2)
    shapes = ((batch, 4, count, 16), (batch, 2, width, 16), (batch, 2, width, value_dim))
    q, k, v = (2 * torch.randn(*shape, generator=rng) for shape in shapes)
    return q, k, v


def request(**changes: Any) -> dict[str, Any]:
    """Return the mask of a whole padded prompt, as a model requests it from transformers' mask interface."""
    return {
        "q_length": 8,
        "kv_length": 8,
        "q_offset": 0,
        "kv_offset": 0,
        "mask_function": causal_mask_function,
        "attention_mask": REAL,
        "allow_is_causal_skip": True,
        **changes,
    }


def test_padding_replaces_the_mask_of_a_whole_causal_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefill, "MASK", 2 * 8 * 8)
    found = prefill.padding(request())
    assert found is not None and found.dtype == torch.bool and torch.equal(found, REAL.bool())
    assert torch.equal(prefill.padding(request(q_offset=torch.tensor(0))), REAL.bool())
    inside = torch.ones_like(REAL)
    inside[0, 3] = 0
    for change in (
        {"mask_function": sliding_window_causal_mask_function(4)},
        {"allow_is_causal_skip": False},
        {"local_size": 4},
        {"q_length": None},
        {"q_length": 7},
        {"kv_length": 9},
        {"q_offset": 1},
        {"kv_offset": 1},
        {"attention_mask": torch.nn.functional.pad(REAL, (0, 1), value=1)},
        {"attention_mask": REAL.flip(1)},  # padding on the right
        {"attention_mask": inside},
        {"attention_mask": torch.ones_like(REAL)},
        {"attention_mask": None},
    ):
        assert prefill.padding(request(**change)) is None, change
    bare = request()
    del bare["allow_is_causal_skip"]
    assert prefill.padding(bare) is None
    monkeypatch.setattr(prefill, "MASK", 2 * 8 * 8 + 1)
    assert prefill.padding(request()) is None


def test_rows_of_a_padded_batch_are_causal_over_their_own_tokens() -> None:
    """Rows that begin alike, one without padding, one of padding only, one of a single token."""
    q, k, v = inputs(5, value_dim=24)
    real = torch.ones(5, 12, dtype=torch.bool)
    real[4, :11] = False
    real[0, :5] = real[2, :5] = real[3] = False
    found, name = prefill.attend_prompt(GROUPED, q, k, v, real, 0.3, {})
    full = torch.ones(12, 12, dtype=torch.bool).tril() & real[:, None, None, :]
    masked, plain = prefill.attend_prompt(GROUPED, q, k, v, full, 0.3, {})
    assert (name, plain) == ("sdpa", "sdpa") and found.shape == (5, 12, 4, 24)
    torch.testing.assert_close(found[real], masked[real])
    assert not found[~real].any()


class Fake:
    """The attributes of a tensor on a GPU that the choice of a back end reads."""

    def __init__(self, tokens: int, elements: int = 1, cuda: bool = True) -> None:
        self.shape, self.is_cuda, self.device, self._elements = (1, 4, tokens, 128), cuda, "cuda:0", elements

    def numel(self) -> int:
        return self._elements


def chosen(monkeypatch: pytest.MonkeyPatch, *tensors: Fake, **more: Any) -> tuple[str, list[Any]]:
    """Return the name of the path, and the back ends that SDPA could use while it ran."""
    told: list[Any] = []

    @contextmanager
    def kernel(order: list[SDPBackend], set_priority: bool = False):
        told.extend([order, set_priority])
        yield
        told.append("over")

    monkeypatch.setattr(prefill, "sdpa_kernel", kernel)
    with prefill.order(*tensors, **{"mask": None, **more}) as name:
        assert "over" not in told
    return name, told


def test_cudnn_comes_first_for_long_causal_prompts_that_it_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefill, "_prefers", lambda device: device == "cuda:0")
    monkeypatch.setattr(prefill, "_serves", lambda *tensors: len(tensors) == 3)
    long, padding, mask = Fake(prefill.LONG), SimpleNamespace(ndim=2), SimpleNamespace(ndim=4)
    three = (long, long, long)
    backends = [
        SDPBackend.CUDNN_ATTENTION,
        SDPBackend.FLASH_ATTENTION,
        SDPBackend.EFFICIENT_ATTENTION,
        SDPBackend.MATH,
    ]
    largest = Fake(prefill.LONG, prefill.MOST - 1)
    for tensors, more in ((three, {}), (three, {"mask": padding}), ((long, long, largest), {})):
        assert chosen(monkeypatch, *tensors, **more) == ("sdpa:cudnn", [backends, True, "over"])
    short, cpu, longer = Fake(prefill.LONG - 1), Fake(prefill.LONG, cuda=False), Fake(prefill.LONG + 1)
    for tensors, more in (
        ((short, short, short), {}),
        ((long, longer, longer), {}),
        ((cpu, cpu, cpu), {}),
        (three, {"mask": mask}),
        (three, {"backend": "stock"}),
        *(((*three[:i], Fake(prefill.LONG, prefill.MOST), *three[i + 1 :]), {}) for i in range(3)),
    ):
        assert chosen(monkeypatch, *tensors, **more) == ("sdpa", [])
    for name in ("_prefers", "_serves"):
        with monkeypatch.context() as patch:
            patch.setattr(prefill, name, lambda *given: False)
            assert chosen(patch, *three) == ("sdpa", [])


def test_what_cudnn_serves_is_asked_of_torch_and_hopper_prefers_it(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    monkeypatch.setattr(torch.backends.cuda, "SDPAParams", lambda *given: asked.append(given) or given)
    monkeypatch.setattr(torch.backends.cuda, "can_use_cudnn_attention", lambda params: bool(params))
    wide, narrow = torch.zeros(1, 4, 2, 129).half(), torch.zeros(1, 4, 2, 128).half()
    assert prefill._serves(narrow, narrow, narrow) and prefill._serves(narrow.bfloat16(), narrow[:, :2], narrow)
    assert [given[3:] for given in asked] == [(None, 0.0, True, False), (None, 0.0, True, True)]
    for q, v in ((narrow.float(), narrow), (wide, narrow), (narrow, wide)):
        assert not prefill._serves(q, narrow, v)
    for capability, wanted in (((9, 0), True), ((10, 0), True), ((8, 9), False)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device, found=capability: found)
        assert prefill._prefers.__wrapped__("cuda:0") is wanted


@pytest.mark.parametrize("logits", [Logits(2.0), Logits(None, SINKS), Logits(2.0, SINKS)])
def test_a_causal_mask_begins_at_the_first_key_as_sdpas_does(logits: Logits) -> None:
    """Query i sees keys up to i, however many keys follow; scores are divided by the root of the channels."""
    q, k, v = inputs(count=5, width=9)
    mask = torch.ones(5, 5, dtype=torch.bool).tril()[None, None]
    wanted = prefill.attend_exact(GROUPED, q, k[:, :, :5], v[:, :, :5], mask, 0.25, logits)
    torch.testing.assert_close(prefill.attend_exact(GROUPED, q, k, v, None, None, logits), wanted)


def test_the_name_of_the_path_says_what_was_added() -> None:
    q, k, v = inputs()
    names = {
        "sdpa": {},
        "capped": {"softcap": 2.0},
        "sdpa+sinks": {"s_aux": SINKS},
    }
    for name, given in names.items():
        assert prefill.attend_prompt(GROUPED, q, k, v, None, 0.2, given)[1] == name
    assert prefill.attend_prompt(GROUPED, q, k, v, None, 0.2, {"softcap": 2.0, "s_aux": SINKS})[1] == "capped"


def test_causality_is_decided_as_in_transformers() -> None:
    module, several, one = torch.nn.Module(), torch.zeros(1, 4, 2, 8), torch.zeros(1, 4, 1, 8)
    assert prefill.is_causal(module, several, None, {}) and prefill.is_causal(
        module, several, None, {"is_causal": None}
    )
    assert not prefill.is_causal(module, one, None, {})
    assert not prefill.is_causal(module, several, torch.ones(1, 1, 2, 2), {})
    assert not prefill.is_causal(module, several, None, {"is_causal": False})
    module.is_causal = False
    assert not prefill.is_causal(module, several, None, {})
    assert prefill.is_causal(module, several, None, {"is_causal": True})


@pytest.mark.parametrize("most", [1 << 20, 100])
def test_capped_queries_are_the_last_of_the_tokens(most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(prefill.SCORES, "cpu", most)
    q, k, v = inputs(2, value_dim=24)
    whole = prefill.attend_capped(q, k, v, None, 0.3, Logits(2.0))
    torch.testing.assert_close(prefill.attend_capped(q[:, :, -5:], k, v, None, 0.3, Logits(2.0)), whole[:, -5:])
    both = prefill.attend_capped(q, k, v, None, 0.3, Logits(2.0), causal=False)
    everything = torch.ones(1, 1, 12, 12, dtype=torch.bool)
    torch.testing.assert_close(both, prefill.attend_capped(q, k, v, everything, 0.3, Logits(2.0)))


def test_capped_weights_are_dropped_while_a_model_is_trained() -> None:
    q, k, v = inputs()
    assert not prefill.attend_exact(GROUPED, q, k, v, None, 0.3, Logits(2.0), {"dropout": 1.0}).any()
    plain = prefill.attend_exact(GROUPED, q, k, v, None, 0.3, Logits(2.0))
    for dropout in (None, 0.0):
        assert torch.equal(prefill.attend_exact(GROUPED, q, k, v, None, 0.3, Logits(2.0), {"dropout": dropout}), plain)


def test_sinks_beyond_the_range_of_half_precision_take_all_or_nothing() -> None:
    q, k, v = (x.half() for x in inputs())
    sinks = torch.tensor([1e30, -1e30, -torch.inf, 0.0])
    found = prefill.attend_exact(GROUPED, q, k, v, None, 0.2, Logits(None, sinks))
    assert bool(torch.isfinite(found).all()) and not found[:, :, 0].any()
    plain = prefill.attend_exact(GROUPED, q, k, v, None, 0.2, PLAIN)
    torch.testing.assert_close(found[:, :, 1:3], plain[:, :, 1:3], rtol=2e-3, atol=2e-3)
    assert not torch.allclose(found[:, :, 3], plain[:, :, 3], atol=1e-2)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_a_sink_is_the_sum_of_three_channels_without_rounding(dtype: torch.dtype) -> None:
    q, k, v = (x.to(dtype) for x in inputs())
    sinks = torch.tensor([3.14159, -2.71828, 11.011, 0.5])
    query, keys, values, _ = prefill.with_sinks(q, k, v, None, 1.0, sinks, causal=False)
    assert torch.equal(query[0, :, 0, 16:].double().sum(-1), sinks.double())
    assert (query.shape[-1], keys.shape, values.shape) == (24, (1, 2, 13, 24), (1, 2, 13, 24))
