"""The Optuna study of a search: every proposal is a trial, and its sampler suggests recipes of its own."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import numpy as np

from kvbench.errors import KvbenchError
from kvbench.tune.aim import Aim, Scored
from kvbench.tune.space import Recipe
from kvbench.util.requirements import installed

#: suggestions in search of a recipe that has not been evaluated
TRIES = 20


def check_optuna() -> None:
    """Raise KvbenchError if Optuna is not installed."""
    if not installed("optuna"):
        raise KvbenchError(
            "--search adaptive needs the package 'optuna'.\n  hint: run pip install 'kvbench[tune]', or use --search "
            "greedy-kl"
        )


class Trials:
    """A study of two objectives: mean and 99 % of the KL divergence, or bits and mean.

    Raises:
        KvbenchError: Optuna is not installed.
    """

    def __init__(self, aim: Aim, seed: int) -> None:
        check_optuna()
        import optuna

        optuna.logging.set_verbosity(optuna.logging.WARNING)
        self.aim, self.state = aim, optuna.trial.TrialState
        sampler = optuna.samplers.TPESampler(seed=seed, n_startup_trials=1)
        self.study = optuna.create_study(directions=["minimize", "minimize"], sampler=sampler)

    def _suggested(self, trial: Any) -> Recipe:
        space = self.aim.space
        return tuple(trial.suggest_categorical(str(i), space.forms) for i in range(space.positions))

    def ask(self, recipe: Recipe) -> Any:
        """Return a new trial of a recipe."""
        self.study.enqueue_trial({str(i): form for i, form in enumerate(recipe)})
        trial = self.study.ask()
        assert self._suggested(trial) == recipe
        return trial

    def tell(self, trial: Any, scored: Scored) -> None:
        """End a trial by the outcome of its evaluation."""
        if scored.stopped:
            self.study.tell(trial, state=self.state.PRUNED)
        elif self.aim.kl is None:
            self.study.tell(trial, [scored.mean, scored.p99])
        else:
            self.study.tell(trial, [self.aim.space.bits(scored.recipe), scored.mean])

    def free(self, rng: np.random.Generator, evaluated: Collection[Recipe]) -> Recipe | None:
        """Return a recipe that the sampler suggests, brought under the budget; None if all were evaluated."""
        for _ in range(TRIES):
            trial = self.study.ask()
            recipe = self._within(self._suggested(trial), rng)
            self.study.tell(trial, state=self.state.FAIL)  # it is asked again, as it is evaluated
            if recipe not in evaluated:
                return recipe
        return None

    def _within(self, recipe: Recipe, rng: np.random.Generator) -> Recipe:
        """Return a recipe with forms of fewer bits at so many positions, in random order, that it is in the budget."""
        space, forms = self.aim.space, list(recipe)
        for position in rng.permutation(space.positions):
            over = space.cost(tuple(forms)) - self.aim.capacity
            if over <= 0:
                break
            costs = space.costs[position]
            wanted = costs[space.forms.index(forms[position])] - over
            fitting = np.flatnonzero(costs <= max(wanted, costs.min()))
            forms[position] = space.forms[int(fitting[-1])]
        return tuple(forms)
