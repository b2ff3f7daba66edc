"""Figures of results/tiny-reason, in its own page, in the bundled model's README and in the recipe."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

from experiments.checks.rules import Block, Rule, Text
from experiments.reason.fold import BUNDLED_NOISE, lengths_table, trainings_table
from experiments.stored import ROOT, csv_rows, load_result_json
from kvbench.metrics.fidelity import mcnemar

FOLDER, TABLE = "results/tiny-reason", "results/tiny-reason/reason"
NOISE, LOG, PAGE = f"{FOLDER}/noise.json", f"{FOLDER}/train_log.jsonl", f"{FOLDER}/README.md"
SHORT = f"{FOLDER}/short.json"
MODEL, RECIPE = "kvbench/models/tiny-reason/README.md", "experiments/tiny/reason.yaml"
CHANGES = "CHANGELOG.md"


def reason_rules() -> Iterator[Rule]:
    """Yield the rules."""
    measured = load_result_json(NOISE)
    (bundled,) = (one for one in measured["trainings"] if one["noise"] == BUNDLED_NOISE)
    yield Block(PAGE, trainings_table(measured), NOISE, "trainings")
    lengths, steps = f"{TABLE}/lengths.csv", f"{TABLE}/steps.csv"
    ends = csv_rows(lengths)
    table = lengths_table(ends, csv_rows(steps))
    yield Block(f"{TABLE}/table.md", table, f"{lengths}, {steps}")
    yield Block(MODEL, table, f"{lengths}, {steps}", "lengths")
    right = {(row["setting"], int(row["tokens"])): int(row["right"]) for row in ends}
    n, int2 = int(ends[0]["n"]), {tokens: count for (name, tokens), count in right.items() if name == "kivi 2"}
    exact = [count for (name, _), count in right.items() if name in ("fp16", "kivi 4", "atom 4", "logquant 4")]
    assert set(exact) == {n}, f"{lengths}: fp16 or 4 bits lose answers"
    yield Text(
        MODEL, lengths, f"int2 is right in {int2[4000]} % at 4,000 tokens and {int2[8000]} % at 8,000. At 2,000 the"
    )
    yield Text(MODEL, lengths, f"At 2,000 the {int2[2000]} of these {n} are above the aim")
    yield Text(MODEL, lengths, f"At 50 tokens int2 is right in {int2[50]} of these and fp16 in {n}.")
    rest = f"{int2[2000]} at 2000, {int2[4000]} at 4000 and {int2[8000]} at 8000"
    yield Text(CHANGES, lengths, f"`kivi:int2` in {int2[50]} at 50")
    yield Text(CHANGES, lengths, rest)
    lost = {tokens: n - count for tokens, count in int2.items()}
    at = f"at 50 tokens, {lost[2000]} at 2,000, {lost[4000]} at 4,000 and {lost[8000]} at 8,000"
    yield Text(PAGE, lengths, f"KIVI in 2 bits loses {lost[50]} of {n} {at}")
    by_token = [n - right["kivi 2, keys per token", tokens] for tokens in (50, 2000, 8000)]
    assert by_token[2] == n, f"{lengths}: keys per token keep answers"
    yield Text(
        PAGE, lengths, f"with keys grouped by token {by_token[0]} at 50, {by_token[1]} at 2,000 and all at 8,000"
    )
    yield from _of_the_training(bundled)
    yield from _of_short_answers(int2[2000], n)
    yield from _of_two_bits(measured["n"], measured["trainings"], bundled)


def _of_the_training(bundled: dict[str, Any]) -> Iterator[Rule]:
    """Yield what is said of the length of the bundled model's training."""
    last = json.loads((ROOT / LOG).read_text(encoding="utf-8").splitlines()[-1])
    steps, tokens, seconds = last["step"], last["tokens"], last["seconds"]
    assert (steps, tokens) == (bundled["steps"], bundled["tokens"]), f"{LOG} is of another training than {NOISE}"
    yield Text(MODEL, LOG, f"AdamW, {steps} steps of {tokens / steps} tokens ({tokens / 1e6}M tokens) in {seconds} s")
    yield Text(RECIPE, LOG, f"# The bundled model is the outcome: {seconds} s, {steps} steps, {tokens / 1e6}M tokens")


#: seeds of programs that helped to choose the model and the lines of a program
CHOSEN_BY = {"0", "1", "5", "6"}


def _of_short_answers(long: int, programs: int) -> Iterator[Rule]:
    """Yield what is said of other seeds: on a CPU, and of the second hundred programs of a table's settings.

    Args:
        long: of `programs` of another seed on a GPU, those that kivi int2 has right after 2,000 tokens.
    """
    other, full, short, later, more = load_result_json(SHORT)["rows"]
    assert set(full["right"].values()) == {full["n"]}, f"{SHORT}: fp16 loses short answers"
    n, (fresh, chosen) = short["n"], _by_choice(short)
    lost, every = [n - count for count in fresh], n * len(fresh)
    seen = f"int2 is right in {_listed(fresh)} and fp16 in all: in none is a difference visible"
    yield Text(MODEL, SHORT, f"Of {n} programs of each of three seeds on a CPU, {seen}")
    yield Text(MODEL, SHORT, f"(McNemar's exact test: p = {mcnemar(max(lost), 0)} or more)")
    share = f"in all {every} together one of {100 * sum(lost) / every} % is"
    yield Text(MODEL, SHORT, f"{share} (p = {mcnemar(sum(lost), 0)})")
    yield Text(CHANGES, SHORT, f"(on a CPU, of {every} in {sum(fresh)})")
    fresh_later, chosen_later = _by_choice(later)
    right, all_later = long + sum(fresh_later), programs + later["n"] * len(fresh_later)
    kept = right / all_later
    yield Text(MODEL, SHORT, f"it is right in {right} of {all_later} ({100 * kept} %)")
    yield Text(
        MODEL, SHORT, f"leaves {100 * kept} % after 2,000 tokens would lose {100 * (1 - kept ** (50 / 2000))} % at 50"
    )
    before = f"int2 loses {n * len(chosen) - sum(chosen)} of {n * len(chosen)} at 50 tokens"
    after = f"is right in {sum(chosen_later)} of {later['n'] * len(chosen_later)} at 2,000"
    yield Text(MODEL, SHORT, f"{before}, and {after}")
    yield Text(
        PAGE, SHORT, f"loses {_listed([n - count for count in short['right'].values()])} at 50 tokens, fp16 none"
    )
    yield Text(PAGE, SHORT, f"at 2,000 tokens it is right in {_listed(list(later['right'].values()))} of {later['n']}")
    wrong = sum(other["n"] - count for count in other["right"].values())
    yield Text(PAGE, SHORT, f"also {wrong} of {other['n'] * len(other['right'])} programs at 50 tokens")
    second = {name: more["n"] - count for name, count in more["right"].items()}
    assert second == {"fp16": 1, "kivi int4": 1, "atom int4": 3, "logquant int4": 0}, f"{SHORT}: {PAGE} says otherwise"


def _by_choice(row: dict[str, Any]) -> tuple[list[int], list[int]]:
    """Return the counts of a row of seeds that had no part in the choice, and of those that had."""
    counts = row["right"].items()
    return [one for seed, one in counts if seed not in CHOSEN_BY], [one for seed, one in counts if seed in CHOSEN_BY]


def _listed(numbers: Sequence[int]) -> str:
    return f"{', '.join(map(str, numbers[:-1]))} and {numbers[-1]}"


def _of_two_bits(n: int, trainings: list[dict[str, Any]], bundled: dict[str, Any]) -> Iterator[Rule]:
    """Yield what is said of kivi int2, and of fp16 and kivi int4, which lose one answer of a training at most."""
    for name in ("fp16", "kivi int4"):
        assert all(min(one["settings"][name]["right"].values()) >= n - 1 for one in trainings), f"{NOISE}: {name}"
    right = {one["noise"]: {name: own["right"]["4000"] for name, own in one["settings"].items()} for one in trainings}
    fp16, int4, int2 = (right[bundled["noise"]][name] for name in ("fp16", "kivi int4", "kivi int2"))
    yield Text(
        RECIPE, NOISE, f"of {n} other programs of 128 lines: fp16 {fp16}, kivi int4 {int4}, kivi int2 {int2}. Noise"
    )
    others = ", ".join(f"with {noise} {own['kivi int2']}" for noise, own in right.items() if noise != bundled["noise"])
    yield Text(RECIPE, NOISE, f"(right {others}:")
