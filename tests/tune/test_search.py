"""Searches on problems that can be solved exhaustively."""

from __future__ import annotations

import numpy as np
import pytest

from kvbench.errors import KvbenchError
from kvbench.tune import trials
from kvbench.tune.additive import Belief, best_recipe, smallest_recipe
from kvbench.tune.aim import Aim, Scored, standard_error, student_tail
from kvbench.tune.search import SEARCHES, end_recipes, greedy_forms, random_recipes, run_search, uniform_recipes
from tests.tune.support import additive_problem, exhaustive, space


@pytest.mark.parametrize("bits", [4.5, 5.0, 6.3, 9.0, 16.0])
def test_the_sum_of_losses_is_the_least_of_all_recipes(bits: float) -> None:
    aim = Aim(space(3), bits)
    losses = np.random.default_rng(int(10 * bits)).random((3, len(aim.space.forms)))

    def total(recipe: tuple[str, ...], _: Scored | None) -> Scored:
        return Scored(
            recipe, np.array([sum(losses[i, aim.space.forms.index(form)] for i, form in enumerate(recipe))]), 0
        )

    best = exhaustive(aim, total, aim.space.forms)
    found = best_recipe(aim.space, losses, aim.capacity)
    assert aim.admits(found)
    assert total(found, None).mean == pytest.approx(best.mean)


def test_the_fewest_bits_under_a_loss_are_the_fewest_of_all_recipes() -> None:
    aim = Aim(space(3), kl=1.1)
    losses = np.random.default_rng(5).random((3, len(aim.space.forms)))

    def total(recipe: tuple[str, ...], _: Scored | None) -> Scored:
        return Scored(
            recipe, np.array([sum(losses[i, aim.space.forms.index(form)] for i, form in enumerate(recipe))]), 0
        )

    best = exhaustive(aim, total, aim.space.forms)
    found = smallest_recipe(aim.space, losses, 1.1)
    assert total(found, None).mean <= 1.1
    assert aim.space.cost(found) == aim.space.cost(best.recipe)


@pytest.mark.parametrize("bits", [4.5, 5.4, 6.5, 8.5])
def test_greedy_kl_finds_the_best_recipe_where_losses_add_up(bits: float) -> None:
    aim = Aim(space(4), bits)
    evaluate = additive_problem(aim, seed=3)
    forms = greedy_forms(aim.space, 10)
    assert "fp16" not in forms
    assert forms[:3] == ("iq4_nl", "q8_0", "q8_0/iq4_nl")
    best, scores = run_search(aim, "greedy-kl", 41, 0, evaluate)
    assert len(scores) == 4 * len(forms) + 1
    assert best is not None
    assert best.mean == pytest.approx(exhaustive(aim, evaluate, forms).mean)


def test_the_adaptive_search_comes_close_to_the_best_of_all_recipes() -> None:
    aim = Aim(space(3), 6.5)
    evaluate = additive_problem(aim, seed=1, cross=0.05)
    best, scores = run_search(aim, "adaptive", 40, 0, evaluate)
    assert best is not None
    assert len(scores) <= 40
    assert best.mean <= 1.02 * exhaustive(aim, evaluate, aim.space.forms).mean
    others = [run_search(aim, name, 40, 0, evaluate)[0] for name in SEARCHES if name != "adaptive"]
    assert best.mean <= min(other.mean for other in others if other is not None)


def test_the_same_seed_searches_the_same_recipes_and_another_one_others() -> None:
    aim = Aim(space(4), 5.4)
    evaluate = additive_problem(aim, cross=0.1)
    runs = [[one.recipe for one in run_search(aim, "adaptive", 30, seed, evaluate)[1]] for seed in (0, 0, 1)]
    assert runs[0] == runs[1] != runs[2]
    assert len(set(runs[0])) == len(runs[0])


@pytest.mark.parametrize("name", SEARCHES)
def test_what_is_found_is_under_the_budget_and_no_search_evaluates_more(name: str) -> None:
    aim = Aim(space(5), 5.5)
    best, scores = run_search(aim, name, 33, 2, additive_problem(aim, cross=0.1))
    assert best is not None
    assert aim.space.bits(best.recipe) <= 5.5
    assert len(scores) <= 33
    inside = [
        one for one in scores if set(one.recipe) <= set(aim.space.forms) and aim.admits(one.recipe) and not one.stopped
    ]
    assert best.mean == min(one.mean for one in inside)


@pytest.mark.parametrize("formats", [("fp16", "q8_0", "q5_0", "iq4_nl"), ("fp16", "q5_0")])
@pytest.mark.parametrize("budget", [1, 3, 5, 7, 8, 12])
def test_no_recipe_is_evaluated_twice_however_few_evaluations_there_are(formats: tuple[str, ...], budget: int) -> None:
    aim = Aim(space(4, formats), 6.0)
    scores = run_search(aim, "adaptive", budget, 0, additive_problem(aim))[1]
    assert len({one.recipe for one in scores}) == len(scores) <= budget


def test_under_a_kl_divergence_the_recipe_with_the_fewest_bits_counts() -> None:
    bound = Aim(space(3), kl=3.0)
    evaluate = additive_problem(bound, seed=4, cross=0.05)
    best, _ = run_search(bound, "adaptive", 40, 0, evaluate)
    smallest = exhaustive(bound, evaluate, bound.space.forms)
    assert best is not None
    assert best.mean <= 3.0
    assert bound.space.bits(best.recipe) <= bound.space.bits(smallest.recipe) + 0.5


def test_a_recipe_stops_only_where_it_is_clearly_worse() -> None:
    aim, recipe = Aim(space(2), 5.0), ("q5_0", "iq4_nl")
    best = Scored(("iq4_nl", "iq4_nl"), np.array([1.0, 1.1, 0.9, 1.0, 1.2, 1.0, 1.1, 0.9]), 2.0)
    assert aim.hopeless(recipe, np.array([2.0, 2.2, 1.9, 2.1]), best, 1)
    assert not aim.hopeless(recipe, np.array([2.0, 2.2, 1.9]), best, 1)  # too few windows
    assert not aim.hopeless(recipe, np.array([0.5, 0.6, 0.4, 0.5]), best, 1)
    assert not aim.hopeless(recipe, np.array([1.3, 0.9, 1.2, 0.8]), best, 1)  # within its error
    assert not aim.hopeless(recipe, np.array([9.0, 9.0, 9.0, 9.0]), None, 1)
    # three paired errors of four windows are no proof, and more looks want more
    near = np.array([1.045, 1.255, 0.945, 1.155])
    assert (near - best.kl[:4]).mean() / standard_error(near - best.kl[:4]) > 3
    assert not aim.hopeless(recipe, near, best, 1)
    between = np.array([1.1, 1.25, 1.0, 1.15])
    assert aim.hopeless(recipe, between, best, 1)
    assert not aim.hopeless(recipe, between, best, 100)


def test_under_a_kl_divergence_a_recipe_stops_where_it_cannot_become_the_best() -> None:
    bound = Aim(space(2), kl=1.5)
    small, middle, large = ("iq4_nl", "iq4_nl"), ("q5_0", "iq4_nl"), ("q8_0", "q8_0")
    within = Scored(middle, np.array([1.0, 1.1, 0.9, 1.0, 1.2, 1.0]), 2.0)
    assert bound.hopeless(small, np.array([2.0, 2.2, 1.9, 2.1]), within, 1)  # above the bound
    assert not bound.hopeless(small, np.array([1.4, 1.9, 1.3, 1.6]), within, 1)  # within its error
    assert not bound.hopeless(small, np.array([1.4, 1.5, 1.3, 1.4]), within, 1)  # loses more, and has fewer bits
    assert bound.hopeless(large, np.array([0.1, 0.1, 0.1, 0.2]), within, 1)  # has more bits
    assert bound.hopeless(middle[::-1], np.array([1.4, 1.5, 1.3, 1.4]), within, 1)  # has as many, and loses more
    above = Scored(middle, within.kl + 1.0, 2.0)
    # nothing is below the bound so far: what comes nearer goes on, though it is above it as well
    assert not bound.hopeless(large, above.kl[:4] - 0.3, above, 1)
    assert bound.hopeless(small, above.kl[:4] + np.array([0.3, 0.31, 0.29, 0.3]), above, 1)


def test_a_recipe_that_would_be_the_best_is_seldom_stopped() -> None:
    rng, aim, recipe = np.random.default_rng(3), Aim(space(2), 5.0), ("q5_0", "iq4_nl")
    stopped = better = 0
    for _ in range(4000):
        best = Scored(("iq4_nl", "iq4_nl"), rng.normal(1.0, 0.2, 16), 2.0)
        kl = best.kl + rng.normal(-0.01, 0.1, 16)
        better += kl.mean() < best.mean
        stopped += kl.mean() < best.mean and any(aim.hopeless(recipe, kl[:n], best, 3) for n in (4, 8, 12))
    assert better > 2000
    assert stopped <= 0.01 * better


@pytest.mark.parametrize(("t", "freedom", "probability"), [
    (6.314, 1, 0.05), (2.920, 2, 0.05), (4.541, 3, 0.01), (2.571, 5, 0.025), (3.169, 10, 0.005), (2.467, 28, 0.01),
])  # fmt: skip
def test_students_t_is_that_of_tables(t: float, freedom: int, probability: float) -> None:
    assert student_tail(t, freedom) == pytest.approx(probability, rel=2e-3)
    assert student_tail(-t, freedom) == pytest.approx(1 - probability, rel=2e-3)


def test_a_budget_above_exact_caches_is_that_of_exact_caches() -> None:
    assert Aim(space(2), 1e12).capacity == Aim(space(2), 16.0).capacity > Aim(space(2), 15.0).capacity


def test_baselines_have_their_shape() -> None:
    aim = Aim(space(6), 8.6)
    assert all(len(set(recipe)) == 1 and aim.admits(recipe) for recipe in uniform_recipes(aim))
    ends = list(end_recipes(aim))
    assert ends[0] == ("fp16", *("iq4_nl",) * 4, "fp16")
    assert all(recipe == recipe[::-1] and len(set(recipe)) == 2 and aim.admits(recipe) for recipe in ends)
    draws = random_recipes(aim, np.random.default_rng(0))
    drawn = [next(draws) for _ in range(40)]
    assert all(aim.admits(recipe) for recipe in drawn)
    assert np.mean([aim.space.bits(recipe) for recipe in drawn]) > 8.0


def test_evaluations_move_the_belief_towards_what_was_measured() -> None:
    cells = space(4)
    belief = Belief(cells, np.ones((2, 4, 3)))
    high, low = cells.uniform("q5_0"), ("iq4_nl", *("q5_0",) * 3)
    belief.learn({high: 8.0, low: 11.0})
    assert belief.expected(low) > belief.expected(high)
    assert belief.expected(low) == pytest.approx(11.0, rel=0.15)
    # a format is worse than thought in one layer, so it is likely to be worse in others
    assert belief.losses()[1, cells.forms.index("iq4_nl")] > 2.0


def test_without_optuna_the_command_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trials, "installed", lambda name: False)
    aim = Aim(space(2), 5.0)
    with pytest.raises(KvbenchError, match=r"pip install 'kvbench\[tune\]'"):
        run_search(aim, "adaptive", 10, 0, additive_problem(aim))
    assert run_search(aim, "random", 5, 0, additive_problem(aim))[0] is not None
