"""Searches for a recipe: each asks for evaluations, one after another, as a generator.

``adaptive`` measures sensitivities, solves for the best recipe if losses added up, and lets evaluations correct them
(:mod:`kvbench.tune.additive`); its proposals, the start points and free suggestions are trials of one Optuna study.
``greedy-kl`` is the layer-wise search of NVIDIA Model-Optimizer (PR 2272, ``AutoQuantizeKVSearcher``), restated: the
forward KL divergence of one layer in one form with all others exact; the least sum of these under the budget, exactly;
no form is exact. The others are baselines.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Mapping
from itertools import islice

import numpy as np

from kvbench.methods.layer_map import EXACT
from kvbench.tune.additive import SIDES, Belief, Floats, best_recipe, divided, smallest_recipe
from kvbench.tune.aim import Aim, Scored
from kvbench.tune.space import Recipe, Space, form_of, tied_layers
from kvbench.tune.trials import Trials

#: what a search asks for: a recipe, and True if it is measured for what it says of others, on all windows
Ask = tuple[Recipe, bool]
Search = Generator[Ask, Scored, None]
#: one proposal in so many is a free suggestion of Optuna's sampler
FREE = 6
#: share of a draw's deviation from the mean that the last draw has; earlier ones have less, and stay near the best
TEMPERATURE = 1.0
#: draws of the belief in search of a recipe that has not been evaluated
DRAWS = 24


def reference_form(space: Space) -> str:
    """Return the format that sensitivities are measured with: the one with the fewest bits for keys or values alone."""
    return min(space.single, key=lambda name: (space.form_bits(name), name))


def closest_form(space: Space) -> str:
    """Return the packed format with the most bits, in which the side that is not measured is."""
    return max(space.single, key=lambda name: (space.form_bits(name), name))


def sided(side: int, name: str, other: str) -> str:
    """Return the form with a format on one side (0: keys, 1: values) and another one on the other."""
    return form_of(name, other) if side == 0 else form_of(other, name)


def adaptive(aim: Aim, budget: int, seed: int) -> Search:
    """Search by sensitivities, an additive model that evaluations correct, and an Optuna study."""
    space, rng, trials = aim.space, np.random.default_rng(seed), Trials(aim, seed)
    evaluated: dict[Recipe, Scored] = {}
    estimates = yield from _estimated(space, budget, evaluated)
    belief = Belief(space, estimates)
    starts = iter(_start_points(aim, belief))
    random = islice(random_recipes(aim, rng), 50 * budget)
    for number in range(budget - len(evaluated)):
        belief.learn(_comparable(space, evaluated, tails=bool(number % 2) and aim.kl is None))
        sources = [lambda: _proposed(aim, belief, evaluated, rng), lambda: trials.free(rng, evaluated)]
        if number % FREE == FREE - 1:
            sources.reverse()
        recipe = next((one for one in starts if one not in evaluated), None)
        for source in (*sources, lambda: next((one for one in random if one not in evaluated), None)):
            recipe = recipe or source()
        if recipe is None:  # every recipe under the budget has been evaluated, or nearly
            return
        trial = trials.ask(recipe)
        scored = evaluated[recipe] = yield recipe, False
        trials.tell(trial, scored)


def _estimated(space: Space, budget: int, evaluated: dict[Recipe, Scored]) -> Generator[Ask, Scored, Floats]:
    """Measure and return the estimates of :class:`Belief`: each format's loss, divided among positions.

    The loss of a format is that of a whole cache with it on one side; half of what the other side's format costs, on
    both sides, is taken off. Positions share it as the reference format's losses in one group alone compare.
    """

    def measured(recipe: Recipe) -> Generator[Ask, Scored, Scored]:
        if recipe not in evaluated:  # with few evaluations or formats, the same recipe serves twice
            evaluated[recipe] = yield recipe, True
        return evaluated[recipe]

    low, high = reference_form(space), closest_form(space)
    packed = [name for name in space.formats if name != EXACT]
    whole: dict[str, Scored] = {}
    one_sided = [sided(side, name, high) for name in (low, *space.single) for side in (0, 1)]
    forms = dict.fromkeys([high, *one_sided, *(name for name in packed if name not in space.single)])
    for form in islice(forms, max(3, budget // 4)):
        whole[form] = yield from measured(space.uniform(form))
    rest = whole[high].mean / 2
    groups = tied_layers(space.positions, max(1, min(space.positions, budget // (2 * len(SIDES)))))
    estimates = np.zeros((2, space.positions, len(packed)))
    for side in (0, 1):
        alone = []
        for number, count in enumerate(groups):
            first, form = sum(groups[:number]), sided(side, low, high)
            recipe = tuple(form if first <= i < first + count else EXACT for i in range(space.positions))
            alone.append(max((yield from measured(recipe)).mean, 1e-12))
        shares = divided(groups, alone) / sum(alone)
        reference = max(whole[sided(side, low, high)].mean - rest, 1e-12)
        for place, name in enumerate(packed):
            if name in space.single:
                scored = whole.get(sided(side, name, high))
                loss = reference * 4.0 ** (space.form_bits(low) - space.form_bits(name))
                if scored is not None:
                    loss = max(scored.mean - (rest if name != high else scored.mean / 2), 1e-12)
            else:
                sides = [max(whole[sided(s, low, high)].mean - rest, 1e-12) for s in (0, 1)]
                loss = whole[name].mean if name in whole else 4 * sum(sides)
                loss *= reference / sum(sides)
            estimates[side, :, place] = loss * shares
    return estimates


def _comparable(space: Space, evaluated: Mapping[Recipe, Scored], tails: bool = False) -> dict[Recipe, float]:
    """Return the KL divergence of whole recipes; of stopped ones, scaled by what others have on the other windows.

    With `tails`, their 99 % are returned in place of the means, on the scale of these; stopped ones have none.
    """
    # layers packed one at a time have given the estimates, and would count twice
    usable = [one for one in evaluated.values() if set(one.recipe) <= set(space.forms)]
    usable = [one for one in usable if one.recipe.count(EXACT) < space.positions / 2]
    full = [one for one in usable if not one.stopped]
    if tails:
        scale = sum(one.mean for one in full) / max(sum(one.p99 for one in full), 1e-12)
        return {one.recipe: scale * one.p99 for one in full}
    means = {one.recipe: one.mean for one in full}
    for one in usable:
        if one.stopped:
            count = len(one.kl)
            means[one.recipe] = one.mean * float(np.mean([f.mean / max(f.kl[:count].mean(), 1e-12) for f in full]))
    return means


def _start_points(aim: Aim, belief: Belief) -> list[Recipe]:
    """Return the best of the baselines by the estimates: three uniform, two with exact ends, one of single layers."""
    points = []
    for baseline, count in ((uniform_recipes, 3), (end_recipes, 2)):
        points += sorted(baseline(aim), key=belief.expected)[:count]
    losses = belief.losses()
    pairs = [form in greedy_forms(aim.space, 3) for form in aim.space.forms]
    if any(pairs) and aim.kl is None:
        masked = np.where(np.array(pairs), losses, 1e9)
        points.append(best_recipe(aim.space, masked, aim.capacity))
    return [recipe for recipe in dict.fromkeys(points) if aim.admits(recipe)]


def _proposed(aim: Aim, belief: Belief, evaluated: Mapping[Recipe, Scored], rng: np.random.Generator) -> Recipe | None:
    """Return the best recipe by the belief's mean, or by a draw if that one is evaluated; None if all draws are."""
    for number in range(DRAWS):
        far = TEMPERATURE * number / DRAWS
        losses = belief.losses(far * rng.standard_normal(belief.estimates.size) if number else None)
        if aim.kl is None:
            recipe = best_recipe(aim.space, losses, aim.capacity)
        else:
            recipe = smallest_recipe(aim.space, losses, aim.kl)
        if recipe not in evaluated:
            return recipe
    return None


def greedy_forms(space: Space, count: int) -> tuple[str, ...]:
    """Return up to `count` forms that greedy-kl chooses from: Model-Optimizer's three first, then all others.

    Its three are one format of 8 bits for keys and values, one of 4 bits, and the former for keys with the latter for
    values. No layer is exact.
    """
    low, high = reference_form(space), closest_form(space)
    rest = [form for form in reversed(space.forms) if EXACT not in form]
    return tuple(dict.fromkeys([low, high, form_of(high, low), *sorted(rest, key=lambda form: "/" in form)]))[:count]


def greedy_kl(aim: Aim, budget: int, seed: int) -> Search:
    """Search as Model-Optimizer does: losses of one layer in one form, all others exact, and their least sum."""
    space, groups = aim.space, tied_layers(aim.space.positions, max(1, min(aim.space.positions, (budget - 1) // 2)))
    forms = greedy_forms(space, max(2, (budget - 1) // len(groups)))
    losses = np.full((space.positions, len(space.forms)), np.inf)
    for form in forms:
        alone = []
        for number, count in enumerate(groups):
            first = sum(groups[:number])
            scored = yield tuple(form if first <= i < first + count else EXACT for i in range(space.positions)), True
            alone.append(scored.mean)
        losses[:, space.forms.index(form)] = divided(groups, alone)
    if aim.kl is None:
        if np.isfinite(np.min(losses.min(1))) and space.costs[np.isfinite(losses)].size:
            yield best_recipe(space, losses, aim.capacity), False
    else:
        yield smallest_recipe(space, losses, aim.kl), False


def uniform_recipes(aim: Aim) -> Iterator[Recipe]:
    """Yield the recipes with one form everywhere, those with the most bits first."""
    for form in reversed(aim.space.forms):
        if aim.admits(recipe := aim.space.uniform(form)):
            yield recipe


def end_recipes(aim: Aim) -> Iterator[Recipe]:
    """Yield recipes with the first and last n positions in one form and the others in one with fewer bits.

    Exact ends come first, then those of one position.
    """
    space = aim.space
    packed = [form for form in reversed(space.forms) if form != EXACT]
    high = [form for form in (EXACT, *(form for form in packed if "/" not in form)) if form in space.forms]
    for ends in high:
        for count in range(1, (space.positions - 1) // 2 + 1):
            for form in packed:
                recipe = (ends,) * count + (form,) * (space.positions - 2 * count) + (ends,) * count
                if space.form_bits(form) < space.form_bits(ends) and aim.admits(recipe):
                    yield recipe


def random_recipes(aim: Aim, rng: np.random.Generator) -> Iterator[Recipe]:
    """Yield recipes at random: in random order, each position takes one of the forms that leave room for the others.

    Then, in random order again, each takes one of the forms with more bits that still fit.
    """
    costs, positions = aim.space.costs, aim.space.positions
    least = costs.min(1)
    while int(least.sum()) <= aim.capacity:
        places, room = costs.argmin(1), aim.capacity - int(least.sum())
        for more in (False, True):
            for position in rng.permutation(positions):
                now = costs[position, places[position]]
                fitting = costs[position] - now <= room
                if more:
                    fitting &= costs[position] > now
                if fitting.any():
                    places[position] = rng.choice(np.flatnonzero(fitting))
                    room -= int(costs[position, places[position]] - now)
        yield tuple(aim.space.forms[place] for place in places)


def _listed(recipes: Callable[[Aim, np.random.Generator], Iterator[Recipe]]) -> Callable[[Aim, int, int], Search]:
    """Return the search that evaluates different recipes of an iterator in order."""

    def search(aim: Aim, budget: int, seed: int) -> Search:
        tried: set[Recipe] = set()
        for recipe in islice(recipes(aim, np.random.default_rng(seed)), 50 * budget):
            if recipe not in tried and len(tried) < budget:
                tried.add(recipe)
                yield recipe, False

    return search


#: searches by the name of ``--search``: functions of the aim, the number of evaluations and the seed
SEARCHES: Mapping[str, Callable[[Aim, int, int], Search]] = {
    "adaptive": adaptive,
    "greedy-kl": greedy_kl,
    "uniform": _listed(lambda aim, rng: uniform_recipes(aim)),
    "ends": _listed(lambda aim, rng: end_recipes(aim)),
    "random": _listed(random_recipes),
}


def run_search(
    aim: Aim, name: str, budget: int, seed: int, evaluate: Callable[[Recipe, Scored | None], Scored]
) -> tuple[Scored | None, list[Scored]]:
    """Run a search of at most `budget` evaluations, and return the best recipe under the budget of bits, and all.

    `evaluate` takes a recipe and the best so far, beside which it may stop; None: all windows are to be evaluated.
    """
    search, best, scores = SEARCHES[name](aim, budget, seed), None, list[Scored]()
    try:
        recipe, probe = next(search)
        while len(scores) < budget:
            scored = evaluate(recipe, None if probe else best)
            scores.append(scored)
            candidate = set(recipe) <= set(aim.space.forms) and aim.admits(recipe) and not scored.stopped
            if candidate and (best is None or aim.rank(scored) < aim.rank(best)):
                best = scored
            recipe, probe = search.send(scored)
    except StopIteration:
        pass
    return best, scores
