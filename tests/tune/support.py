"""A problem whose losses are known, and a random two-layer model with windows."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

from kvbench.config.run_config import RunConfig, checked_config
from kvbench.methods.layer_map import EXACT
from kvbench.tune.aim import Aim, Scored
from kvbench.tune.space import Recipe, Space, sides_of
from tests.run_support import config

FORMATS = (EXACT, "q8_0", "q5_0", "iq4_nl")
LOSS = {EXACT: 0.0, "q8_0": 0.002, "q5_0": 0.3, "iq4_nl": 1.0, "octave_k3v3": 2.0}


def space(positions: int, formats: tuple[str, ...] = FORMATS) -> Space:
    return Space((2,) * positions, 64, 64, formats, (1,) * positions)


def additive_problem(aim: Aim, seed: int = 0, cross: float = 0.0) -> Callable[[Recipe, Scored | None], Scored]:
    """An evaluation whose cells add up on each of eight windows, with cross terms of this size."""
    rng = np.random.default_rng(seed)
    cells = np.exp(rng.normal(size=(2, aim.space.positions)))
    mixed = rng.normal(size=(2 * aim.space.positions, 8))
    windows = np.exp(0.2 * rng.normal(size=8))

    def evaluate(recipe: Recipe, best: Scored | None) -> Scored:
        own = [cells[side, i] * LOSS[name] for i, form in enumerate(recipe) for side, name in enumerate(sides_of(form))]
        kl = (np.sum(own) + cross * (np.sqrt(own) @ mixed) ** 2) * windows
        if aim.hopeless(recipe, kl[:4], best, 1):
            return Scored(recipe, kl[:4], float("nan"), stopped=True)
        return Scored(recipe, kl, float(kl.max()))

    return evaluate


def exhaustive(aim: Aim, evaluate: Callable[[Recipe, Scored | None], Scored], forms: tuple[str, ...]) -> Scored:
    """The best of all recipes under the budget."""
    recipes = [recipe for recipe in product(forms, repeat=aim.space.positions) if aim.admits(recipe)]
    return min((evaluate(recipe, None) for recipe in recipes), key=aim.rank)


def engine_config(folder: Path, limit: int = 4, **dataset: Any) -> RunConfig:
    """A random two-layer model and windows of 48 tokens, of which 32 are prefilled."""
    data: dict[str, Any] = {
        "_target_": "kvbench.tasks.fidelity.Fidelity", "window": 48, "prefill": 32, "limit": limit, **dataset,
    }  # fmt: skip
    plain = config(folder, "fp16", method={"_target_": "kvbench.methods.engine.Engine", "format": "q8_0"})
    return checked_config({**plain, "dataset": data})
