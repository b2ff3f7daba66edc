"""Tasks that need a step between reading and answering: variable chains, two hops, few-shot labels, arithmetic."""

from __future__ import annotations

import itertools

from kvbench.tasks.mini import vocabulary
from kvbench.tasks.mini import vocabulary as words
from kvbench.tasks.mini.compose import Draft, DraftQuestion, Setting
from kvbench.tasks.mini.retrieval import ask, locate_value
from kvbench.tasks.mini.rng import Rng


def variable_tracking(setting: Setting) -> Draft:
    """Generate the task ``variable_tracking``: the model must follow assignments back to the value of a variable.

    There are four chains of assignments, such as ``VAR A = 12345.``, ``VAR B = VAR A.``, ``VAR C = VAR B.``, as in
    RULER. Each assignment is a record of its own, and the chains are interleaved. The question names the last variable
    of a chain, and the answer writes out the chain: ``VAR C = VAR B = VAR A = 12345``.
    """
    rng, n, hops = setting.rng, setting.count(4, 120, least=2), setting.size(2, 1, 3)
    variables = vocabulary.distinct(n * (hops + 1), lambda: vocabulary.variable(rng))
    steps: list[tuple[int, str, str]] = []  # chain, record, what the answer takes from it
    queries: list[tuple[str, str]] = []
    for chain in range(n):
        own = variables[chain * (hops + 1) : (chain + 1) * (hops + 1)]
        value = vocabulary.digits(rng, 5)
        steps.append((chain, f"VAR {own[0]} = {value}.", value))
        steps += [(chain, f"VAR {b} = VAR {a}.", f"VAR {a}") for a, b in itertools.pairwise(own)]
        spelled = " = ".join(f"VAR {name}" for name in reversed(own))
        queries.append((f"What is the value of VAR {own[-1]}? Write the whole chain.", f"{spelled} = {value}"))
    # the steps of all chains are interleaved at random; each chain keeps its own order
    turns = [chain for chain, _, _ in steps]
    rng.shuffle(turns)
    left = {chain: [step for step in steps if step[0] == chain] for chain in range(n)}
    dealt = [left[chain].pop(0) for chain in turns]
    questions = []
    for chain in setting.pick(n):
        evidence = [locate_value(record, i, part) for i, (c, record, part) in enumerate(dealt) if c == chain]
        questions.append(ask(*queries[chain], *evidence))
    return Draft("qa", [record for _, record, _ in dealt], questions, ordered=True)


def two_hop(setting: Setting) -> Draft:
    """Generate the task ``two_hop``: the model must combine two sentences to say where somebody's brother lives.

    For each of 12 people A, the records ``The brother of A is B.`` and ``B lives in P.`` stand at different places of
    the context. The question asks where the brother of A lives, and the answer is ``B lives in P``.
    """
    rng, n = setting.rng, setting.count(12, 85, least=2)
    people = vocabulary.distinct(2 * n, lambda: vocabulary.person(rng))
    records: list[str] = []
    pool: list[DraftQuestion] = []
    for first, second in zip(people[:n], people[n:], strict=True):
        town = vocabulary.town(rng)
        answer = f"{second} lives in {town}"
        relation, home = f"The brother of {first} is {second}.", f"{second} lives in {town}."
        evidence = (locate_value(relation, len(records), second), locate_value(home, len(records) + 1, town))
        records += [relation, home]
        pool.append(ask(f"Where does the brother of {first} live?", answer, *evidence))
    return Draft("qa", records, [pool[i] for i in setting.pick(n)])


_KINDS = (words.ANIMALS, words.FOODS, words.TOOLS, words.PEOPLE)
_DID = ("saw", "liked", "missed", "noticed", "painted", "remembered", "sketched", "mentioned", "described", "wanted")


def _shot(rng: Rng, kind: int) -> str:
    noun = f"{rng.choice(words.ADJECTIVES)} {rng.choice(_KINDS[kind])}"
    return f"{rng.choice(words.FIRST_NAMES)} {rng.choice(_DID)} the {noun} {rng.choice(words.ADVERBS)}."


def few_shot(setting: Setting) -> Draft:
    """Generate the task ``few_shot``: the model must label a sentence after 24 labelled examples in the context.

    The sentences are about an animal, a food, a tool or a person, and each of these classes has a made-up word as its
    label. The model can learn only from the examples which label belongs to which class.
    """
    rng, n = setting.rng, setting.count(24, 42, least=6)
    labels = vocabulary.distinct(4, lambda: vocabulary.label(rng))
    kinds = [i % 4 for i in range(n)]
    rng.shuffle(kinds)
    records = [f"Text: {_shot(rng, kind)}\nLabel: {labels[kind]}" for kind in kinds]
    questions = []
    for _ in range(setting.questions):
        kind = rng.choice(sorted(set(kinds)))
        text = _shot(rng, kind)
        evidence = tuple(locate_value(records[i], i, labels[kind]) for i, other in enumerate(kinds) if other == kind)
        questions.append(DraftQuestion(f"\n\nText: {text}\nLabel:", text, labels[kind], evidence))
    return Draft("few_shot", records, questions, meta={"classes": labels})


def _plural(noun: str) -> str:
    if noun[-1] in "sxz" or noun[-2:] in ("ch", "sh"):
        return f"{noun}es"
    return f"{noun[:-1]}ies" if noun[-1] == "y" and noun[-2] not in "aeiou" else f"{noun}s"


_MORE = (
    "buys {b} more {x}",
    "finds {b} {x}",
    "gets {b} {x} from {m}",
    "makes {b} {x}",
    "is given {b} more {x}",
    "wins {b} {x}",
    "borrows {b} {x} from {m}",
    "collects {b} {x}",
)
_LESS = (
    "gives {b} {x} to {m}",
    "loses {b} {x}",
    "sells {b} {x}",
    "throws {b} {x} away",
    "breaks {b} {x}",
    "lends {b} {x} to {m}",
    "leaves {b} {x} behind",
    "sends {b} {x} to {m}",
)
_NOUNS = tuple(noun for noun in words.TOOLS if len(noun) < 8 and noun not in ("scissors", "scales"))


def problem(rng: Rng, steps: int) -> tuple[str, str]:
    """Return the text of a random word problem, and its solution, for example ``12 + 9 = 21. 21 - 5 = 16. #### 16``.

    The final number stands after ``####``, as in GSM8K. The solution has `steps` calculations; a quarter of the
    problems ask for two people's things together, which takes one calculation more.
    """
    who, friend = rng.sample(words.FIRST_NAMES, 2)
    things = _plural(rng.choice(_NOUNS))
    total = rng.between(5, 60)
    text, solution = [f"{who} has {total} {things}."], []
    for _ in range(steps):
        kind = rng.below(10)
        if kind == 0 and total <= 40:
            result, line = 2 * total, f"{friend} has as many {things} and gives them all to {who}."
            solution.append(f"{total} + {total} = {result}.")
        elif kind < 6 or total < 4:
            b = rng.between(2, 30)
            result, line = total + b, f"{who} {rng.choice(_MORE).format(b=b, x=things, m=friend)}."
            solution.append(f"{total} + {b} = {result}.")
        else:
            b = rng.between(1, min(30, total - 1))
            result, line = total - b, f"{who} {rng.choice(_LESS).format(b=b, x=things, m=friend)}."
            solution.append(f"{total} - {b} = {result}.")
        total = result
        text.append(line)
    if rng.below(4) == 0:
        b = rng.between(2, 30)
        text.append(f"{friend} has {b} {things}. How many {things} do {who} and {friend} have together?")
        solution.append(f"{total} + {b} = {total + b}.")
        total += b
    else:
        text.append(f"How many {things} does {who} have now?")
    return " ".join(text), f"{' '.join(solution)} #### {total}"


def arithmetic(setting: Setting) -> Draft:
    """Generate the task ``arithmetic``: the model must solve a word problem after six solved examples.

    The examples stand together at the end of the context, after all filler, and no record lies between the filler.
    """
    rng = setting.rng
    shots = [problem(rng, rng.between(1, 3)) for _ in range(setting.count(6, 200))]
    closing = "".join(f"\n\nProblem: {text}\nSolution: {solution}" for text, solution in shots)
    questions = []
    for _ in range(setting.questions):
        text, solution = problem(rng, rng.between(1, 3))
        questions.append(DraftQuestion(f"\n\nProblem: {text}\nSolution:", text, solution, ()))
    return Draft("problems", [], questions, closing=closing)
