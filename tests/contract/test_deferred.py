"""Packs that are deferred until all layers have settled, as a GPU does, leave what immediate ones leave.

On a GPU ``packs_together`` lets :meth:`settle` queue its packs; the kernel then reads the tails after every layer has
settled. Here the encoding of a packed segment is put off in the same way, on a CPU, where torch packs for this.
"""

from contextlib import contextmanager
from itertools import pairwise

import pytest
import torch

from kvbench.attention import fused
from kvbench.cache.kernels import pack_together
from kvbench.cache.segments.packed import PackedSegment
from kvbench.methods.logquant import LogQuant
from tests import zoo
from tests.contract.test_methods import PLAIN, fresh, make

STEPS = (1, 1, 2, 1, 5, 1, 1, 1)


@contextmanager
def deferred(monkeypatch):
    """Encode what is appended inside at the end, from where it lay."""
    jobs, plain, thin = [], PackedSegment._encode, pack_together.thin_windows
    monkeypatch.setattr(PackedSegment, "_encode", lambda *job: jobs.append((plain, job)))
    monkeypatch.setattr(pack_together, "thin_windows", lambda *job: jobs.append((thin, job)))
    yield
    monkeypatch.setattr(PackedSegment, "_encode", plain)
    monkeypatch.setattr(pack_together, "thin_windows", thin)
    for run, job in jobs:
        run(*job)


@contextmanager
def immediate(monkeypatch):
    yield


def states(method, monkeypatch, settling) -> list[torch.Tensor]:
    """All keys and values of two rows after a prompt and 60 steps."""
    model = zoo.model("llama")
    ids, mask = zoo.padded_batch([140, 171], seed=3)
    monkeypatch.setattr(fused, "prepare", lambda: None)  # the packer of CPUs, which would pack at once
    cache = fresh(method, model, ids, mask, tell=True)
    with torch.no_grad():
        model(input_ids=ids, attention_mask=mask, past_key_values=cache, use_cache=True)
    method.detach(model)
    for step in range(60):
        with settling(monkeypatch):
            cache.settle_layers()
        for number, layer in enumerate(cache.layers):
            for one in layer.chain():
                zoo.feed(one, *zoo.random_kv(STEPS[step % len(STEPS)], 2, 2, 64, seed=1000 * number + step))
    cache.settle()
    stored = []
    for layer in (one for own in cache.layers for one in own.chain()):
        for row in range(2):
            one = slice(row, row + 1)
            for store in layer.stores():
                cuts = store.cuts(one, 0, store.length(one))
                stored += [store.read(one, first, last, torch.float32) for first, last in pairwise(cuts)]
    return stored


def same(method, monkeypatch) -> bool:
    now, later = (states(method, monkeypatch, settling) for settling in (immediate, deferred))
    return len(now) == len(later) and all(map(torch.equal, now, later))


@pytest.mark.parametrize(("name", "quantizer"), PLAIN)
def test_deferred_packs_leave_what_immediate_ones_leave(name, quantizer, monkeypatch):
    method = make(name, quantizer)
    if not method.packs_together:
        pytest.skip("settles at once")
    assert same(method, monkeypatch)


def test_a_wrong_claim_is_caught(monkeypatch):
    """A method that thins its tail at once: a deferred pack would read what the thinning has moved."""

    class Wrong(LogQuant):
        packs_together = True

        def settle(self, layer, rows):
            for store in layer.stores():
                while store.tail.length(rows) >= 3 * self.W:
                    exact = store.tail.view(rows)
                    store.packed.append(rows, exact[:, :, 1 : 2 * self.W : 2])
                    kept = [*range(0, 2 * self.W, 2), *range(2 * self.W, exact.shape[2])]
                    store.tail.keep(rows, torch.tensor(kept))

    logquant = make("logquant", "int4")
    wrong = Wrong(takes=logquant.takes, quantizer=logquant.quantizer)
    assert wrong.packs_together and not same(wrong, monkeypatch)
    assert logquant.packs_together
