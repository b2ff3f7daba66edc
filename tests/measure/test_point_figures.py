"""Figures of a measured point."""

import pytest
import torch

from kvbench.decoding.speculative import Round
from kvbench.measure.point_figures import token_times, weight_bytes


def test_a_tokens_time_is_the_rounds_over_the_mean_of_the_rows_that_got_any():
    rounds = [Round(1.2, [], [], [], [2, 4]), Round(1.0, [], [], [], [5]), Round(0.9, [], [], [], [0, 3, 0])]
    assert token_times(rounds) == pytest.approx([0.4, 0.2, 0.3])


def test_bytes_that_weights_share_count_once():
    model = torch.nn.Module()
    model.embedding = torch.nn.Embedding(10, 8)
    model.head = torch.nn.Linear(8, 10, bias=False)
    model.head.weight = torch.nn.Parameter(model.embedding.weight.data)  # a parameter of its own on the same bytes
    model.register_buffer("scale", torch.zeros(3, dtype=torch.float16))
    model.register_buffer("part", model.scale[:1])
    assert weight_bytes(model) == 10 * 8 * 4 + 3 * 2
