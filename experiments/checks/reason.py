"""Figures of results/tiny-reason, in its own page, in the bundled model's README and in the recipe."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from experiments.checks.rules import Block, Rule, Text
from experiments.reason.fold import BUNDLED_NOISE, lengths_table, trainings_table
from experiments.stored import ROOT, csv_rows, load_result_json
from kvbench.metrics.fidelity import mcnemar
from kvbench.metrics.intervals import newcombe

FOLDER, TABLE = "results/tiny-reason", "results/tiny-reason/reason"
NOISE, LOG, PAGE = f"{FOLDER}/noise.json", f"{FOLDER}/train_log.jsonl", f"{FOLDER}/README.md"
SHORT = f"{FOLDER}/short.json"
MODEL, RECIPE = "kvbench/models/tiny-reason/README.md", "experiments/tiny/reason.yaml"


def reason_rules() -> Iterator[Rule]:
    """Yield the rules."""
    measured = load_result_json(NOISE)
    (bundled,) = (one for one in measured["trainings"] if one["noise"] == BUNDLED_NOISE)
    yield Block(PAGE, trainings_table(measured), NOISE, "trainings")
    yield Block(MODEL, trainings_table({**measured, "trainings": [bundled]}), NOISE, "bundled")
    lengths, steps = f"{TABLE}/lengths.csv", f"{TABLE}/steps.csv"
    if (ROOT / TABLE / "table.md").exists():
        yield Block(f"{TABLE}/table.md", lengths_table(csv_rows(lengths), csv_rows(steps)), f"{lengths}, {steps}")
        ends = csv_rows(lengths)
        exact = [row for row in ends if row["setting"] in ("fp16", "kivi 4")]
        assert all(row["right"] == row["n"] for row in exact), f"{lengths}: fp16 or kivi 4 loses answers"
        n, right = (
            int(ends[0]["n"]),
            {int(row["tokens"]): int(row["right"]) for row in ends if row["setting"] == "kivi 2"},
        )
        later = f"{right[2000]}, {right[4000]} and {right[8000]} at 2,000, 4,000 and 8,000"
        yield Text(MODEL, lengths, f"In {n} others (seed 0) int2 is right in {right[50]} at 50")
        yield Text(MODEL, lengths, f"tokens (p = {mcnemar(n - right[50], 0)}), and in {later}, while")
        lost = measured["n"] - bundled["settings"]["kivi int2"]["right"]["50"] + n - right[50]
        shown = f"{100 * lost / (measured['n'] + n)} points at 50 tokens can be seen (p = {mcnemar(lost, 0)})"
        yield Text(MODEL, f"{NOISE}, {lengths}", shown)
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
    """Yield what is said of other seeds on a CPU: of the bundled model, and of another with longer programs."""
    own, other, later = load_result_json(SHORT)["rows"]
    lost = [[row["n"] - right for right in row["right"].values()] for row in (own, other)]
    words = [f"{', '.join(map(str, one[:-1]))} and {one[-1]}" for one in lost]
    yield Text(PAGE, SHORT, f"KIVI in 2 bits loses {words[0]} of {own['n']} programs of seeds 0, 1, 5")
    yield Text(PAGE, SHORT, f"programs of {other['lines']} lines it loses {words[1]} of the same number")
    first, second = later["right"].values()
    yield Text(PAGE, SHORT, f"is right in {first} and {second} of {later['n']}")
    yield Text(MODEL, SHORT, f"int2 loses {sum(lost[0])} of {own['n'] * len(lost[0])} at 50 tokens, {own['n']} each")
    yield Text("CHANGELOG.md", SHORT, f"(on a CPU, of {own['n'] * len(lost[0])} in {sum(own['right'].values())})")


def _of_two_bits(n: int, trainings: list[dict[str, Any]], bundled: dict[str, Any]) -> Iterator[Rule]:
    """Yield what is said of kivi int2, and of fp16 and kivi int4, which lose one answer of a training at most."""
    for name in ("fp16", "kivi int4"):
        assert set(bundled["settings"][name]["right"].values()) == {n}, f"{NOISE}: {name} loses answers"
        assert all(min(one["settings"][name]["right"].values()) >= n - 1 for one in trainings), f"{NOISE}: {name}"
    at = bundled["settings"]["kivi int2"]["right"]
    lost = n - at["50"]
    low, high = newcombe(at["50"], 0, lost, 0)
    yield Text(
        MODEL, NOISE, f"int2 is right in {at['50']} of {n} programs and fp16 in {n}: {100 * lost / n} points less"
    )
    yield Text(MODEL, NOISE, f"interval from {100 * low} to {100 * high}, and p = {mcnemar(lost, 0)} in McNemar's")
    first, *others = (training["settings"]["kivi int2"]["right"]["4000"] for training in trainings)
    noises = [training["noise"] for training in trainings]
    yield Text(RECIPE, NOISE, f"fp16 and kivi int4 all, kivi int2 {first}. The noise")
    more = ", ".join(f"with {noise} {right}" for noise, right in zip(noises[1:], others, strict=True))
    yield Text(RECIPE, NOISE, f"2 bits break (right {more}:")
