"""The figures of a generation: the time to the first token includes the method's search."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from kvbench.decoding.autoregressive import Generation
from kvbench.profiling.memory import PhasePeaks
from kvbench.runner.answers import generation_figures
from kvbench.runner.rows import Machine


@pytest.mark.parametrize(("search_s", "ttft_s"), [(0.0, 0.25), (0.5, 0.75), (None, None)])
def test_the_time_to_the_first_token_includes_the_search_and_is_unknown_with_it(search_s, ttft_s) -> None:
    generation = Generation(
        tokens=[[1, 2]], text=["ab"], finish=["length"], ttft_s=0.25, step_s=[0.125], prompt_tokens=[3]
    )
    cache = SimpleNamespace(
        search_s=search_s,
        reads_packed=True,
        path="reference",
        progress=SimpleNamespace(prefill=SimpleNamespace(path="eager")),
    )
    figures = generation_figures(
        Machine("cpu", "float32"), cache, PhasePeaks(torch.device("cpu"), census=False), False, 1, generation
    )
    assert figures["ttft_s"] == ttft_s
    assert figures["step_s"] == [0.125]
