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
    exact = [row for row in ends if row["setting"] in ("fp16", "kivi 4")]
    assert all(row["right"] == row["n"] for row in exact), f"{lengths}: fp16 or kivi 4 loses answers"
    right = {int(row["tokens"]): int(row["right"]) for row in ends if row["setting"] == "kivi 2"}
    yield Text(
        MODEL, lengths, f"int2 is right in {right[4000]} % at 4,000 tokens and {right[8000]} % at 8,000; at 2,000 in"
    )
    n, more = int(ends[0]["n"]), load_result_json(SHORT)["rows"][3]
    together = right[2000] + sum(more["right"].values()), n + more["n"] * len(more["right"])
    share = f"which is {100 * together[0] / together[1]} % of all {together[1]}"
    yield Text(MODEL, f"{lengths}, {SHORT}", f"at 2,000 in {right[2000]} of these {n},")
    yield Text(MODEL, f"{lengths}, {SHORT}", share)
    yield Text(MODEL, lengths, f"At 50 tokens int2 is right in {right[50]} of these and fp16 in {ends[0]['n']}")
    lost = {tokens: int(ends[0]["n"]) - count for tokens, count in right.items()}
    at = f"at 50 tokens, {lost[2000]} at 2,000, {lost[4000]} at 4,000 and {lost[8000]} at 8,000"
    yield Text(PAGE, lengths, f"KIVI in 2 bits loses {lost[50]} of {ends[0]['n']} {at}")
    yield from _of_the_training(bundled)
    yield from _of_short_answers()
    yield from _of_two_bits(measured["n"], measured["trainings"], bundled)


def _of_the_training(bundled: dict[str, Any]) -> Iterator[Rule]:
    """Yield what is said of the length of the bundled model's training."""
    last = json.loads((ROOT / LOG).read_text(encoding="utf-8").splitlines()[-1])
    steps, tokens, seconds = last["step"], last["tokens"], last["seconds"]
    assert (steps, tokens) == (bundled["steps"], bundled["tokens"]), f"{LOG} is of another training than {NOISE}"
    yield Text(MODEL, LOG, f"AdamW, {steps} steps of {tokens / steps} tokens ({tokens / 1e6}M tokens) in {seconds} s")
    yield Text(RECIPE, LOG, f"# The bundled model is the outcome: {seconds} s, {steps} steps, {tokens / 1e6}M tokens")


def _of_short_answers() -> Iterator[Rule]:
    """Yield what is said of other seeds on a CPU, of the bundled model and of another with shorter programs."""
    other, full, short, later, long = load_result_json(SHORT)["rows"]
    n, counts = short["n"], list(short["right"].values())
    assert set(full["right"].values()) == {full["n"]}, f"{SHORT}: fp16 loses short answers"
    lost, most = sum(n - count for count in counts), max(n - count for count in counts)
    seen = f"int2 is right in {min(counts)} to {max(counts)} and fp16 in {n}"
    yield Text(
        MODEL, SHORT, f"{seen}: in none is a difference visible (McNemar's exact test: p = {mcnemar(most, 0)} or more)"
    )
    yield Text(MODEL, SHORT, f"int2 loses {lost} of {n * len(counts):,} ({100 * lost / (n * len(counts))} %)")
    others = list(later["right"].values())
    yield Text(MODEL, SHORT, f"on a CPU in {sum(others)} of {later['n'] * len(others)} others, which is")
    yield Text(PAGE, SHORT, f"KIVI in 2 bits loses {_listed([n - count for count in counts])} at 50 tokens, fp16 none")
    yield Text(PAGE, SHORT, f"at 2,000 tokens it is right in {_listed(others)} of {later['n']}")
    before = sum(other["n"] - count for count in other["right"].values())
    yield Text(PAGE, SHORT, f"but also {before} of {other['n'] * len(other['right'])} programs at 50 tokens")
    yield Text("CHANGELOG.md", SHORT, f"(on a CPU, of {n * len(counts):,} in {sum(counts):,})")
    more = {name: long["n"] - count for name, count in long["right"].items()}
    assert more == {"fp16": 1, "kivi int4": 1, "atom int4": 3, "logquant int4": 0}, f"{SHORT}: {PAGE} has other losses"


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
