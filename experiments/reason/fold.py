"""The tables of long answers: the share of traces that are right at their end, by setting and length.

Greedy answers of one run of the longest length are read at every length: the beginning of an answer is the answer of a
run that ends there. :func:`trainings_table` has the same of trainings of tiny-reason that differ in their noise.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

from experiments.measured import Folded, Rows, Setting, Stored
from experiments.stored import as_csv, grid
from kvbench.metrics.intervals import newcombe, wilson
from kvbench.tasks.reason import Reason

_SETTINGS = {
    "fp16": "fp16",
    "kivi 8": "kivi:int8",
    "kivi 4": "kivi:int4",
    "kivi 3": "kivi:int3",
    "kivi 2": "kivi:int2",
    "kivi 2, keys per token": "kivi:int2:key_axis=token",
    "atom 4": "atom:int4_token",
    "logquant 4": "logquant:int4_g64",
    "logquant 2": "logquant",
    "streamingllm, half": "streamingllm:budget=4096",
}
SETTINGS = tuple(Setting(name, "", setting) for name, setting in _SETTINGS.items())
#: tokens of the answers
LENGTHS = (50, 2000, 4000, 8000)
RUN = "reason"
#: noise of the training whose model is bundled
BUNDLED_NOISE = 0.1


def longest_answers(lines: int, limit: int, seed: int) -> dict[str, list[str]]:
    """Return the data of the one run that each setting has."""
    options = (f"lengths=[{max(LENGTHS)}]", f"lines={lines}", f"limit={limit}", f"seed={seed}")
    return {RUN: ["dataset=reason", *(f"dataset.{option}" for option in options)]}


def first_wrong(prediction: str, answer: str) -> int | None:
    """Return the first step (from 1) that is not the answer's, or is missing; None if all are right."""
    words, wanted = prediction.split(), answer.split()
    for place in range(0, len(wanted), 2):
        if words[place : place + 2] != wanted[place : place + 2]:
            return place // 2 + 1
    return None


def ends_right(prediction: str, answer: str, length: int) -> bool:
    """Return True if the state after `length` tokens is the answer's."""
    return prediction.split()[length - 2 : length] == answer.split()[length - 2 : length]


def fold_reason(stored: Mapping[str, Stored], lines: int, limit: int, seed: int = 0) -> Folded:
    """Return ``table.md``, ``lengths.csv`` and ``steps.csv`` of the settings that have all samples."""
    samples = Reason(lengths=(max(LENGTHS),), lines=lines, limit=limit, seed=seed).samples()
    answers = {sample.id: sample.answers[0] for sample in samples}
    runs = {name: done.rows[RUN] for name, done in stored.items()}
    full = {name: rows for name, rows in runs.items() if rows.keys() >= answers.keys()}
    if "fp16" not in full:
        return Folded(f"fp16 has {len(runs.get('fp16', ()))} of {limit} samples")
    right = {name: ends_by_length(rows, answers) for name, rows in full.items()}
    wrong = {
        name: [first_wrong(rows[key]["prediction"], answer) for key, answer in answers.items()]
        for name, rows in full.items()
    }
    cells = []
    for name, by_length in right.items():
        for length, ends in by_length.items():
            n, count = len(ends), sum(ends)
            full_precision = right["fp16"][length]
            pairs = list(zip(ends, full_precision, strict=True))
            differences = newcombe(*(float(pairs.count(pair)) for pair in _PAIRS))
            cells.append([name, length, count, n, *wilson(count, n), (count - sum(full_precision)) / n, *differences])
    columns = ["setting", "tokens", "right", "n", "low", "high", "to_fp16", "to_fp16_low", "to_fp16_high"]
    lengths = [dict(zip(columns, _shown(cell), strict=True)) for cell in cells]
    steps = [
        {"sample": key, **{name: str(steps[i] or "") for name, steps in wrong.items()}} for i, key in enumerate(answers)
    ]
    kind = f"programs of {lines} lines, seed {seed}"
    text = [f"{limit} {kind}; answers right at their end, %, with Wilson's 95 % interval"]
    text += ["", lengths_table(lengths, steps)]
    missing = [name for name in runs if name not in full]
    text += [f"Left out, with fewer samples: {', '.join(missing)}", ""] if missing else []
    files = {"lengths.csv": as_csv(columns, lengths), "steps.csv": as_csv(["sample", *wrong], steps)}
    return Folded("\n".join(text), files, {kind: limit, "settings": len(full)})


def lengths_table(lengths: Sequence[Mapping[str, str]], steps: Sequence[Mapping[str, str]]) -> str:
    """Return the table of the settings, from the lines of ``lengths.csv`` and of ``steps.csv``, as Markdown."""
    table = []
    for name in dict.fromkeys(cell["setting"] for cell in lengths):
        shares = [share_of(int(cell["right"]), int(cell["n"])) for cell in lengths if cell["setting"] == name]
        wrong = [int(line[name]) for line in steps if line[name]]
        right_ones = len(steps) - len(wrong)
        read = 2 * (sum(wrong) + right_ones * (max(LENGTHS) // 2))  # tokens up to the first error
        table.append([name, *shares, f"{median(wrong):.0f}" if wrong else "-", f"{len(wrong) / read:.1e}"])
    head = ["", *(f"{length} tokens" for length in LENGTHS), "first wrong step, median", "errors a token"]
    return grid(head, table)


#: the cases of Newcombe's interval: right in both, in the first alone, in the second alone, in neither
_PAIRS = ((True, True), (True, False), (False, True), (False, False))


def ends_by_length(rows: Rows, answers: Mapping[str, str]) -> dict[int, list[bool]]:
    """Return for each length whether each answer is right there."""
    return {
        length: [ends_right(rows[key]["prediction"], answer, length) for key, answer in answers.items()]
        for length in LENGTHS
    }


def _shown(cell: Sequence[object]) -> list[str]:
    return [f"{value:.5g}" if isinstance(value, float) else str(value) for value in cell]


def share_of(count: int, n: int) -> str:
    """Return a share in per cent, with Wilson's 95 % interval."""
    low, high = wilson(count, n)
    return f"{100 * count / n:.1f} ({100 * low:.1f}-{100 * high:.1f})"


def trainings_table(measured: Mapping[str, Any]) -> str:
    """Return answers right at their end by length, a line for each training and setting, as Markdown."""
    n, body = measured["n"], []
    for training in measured["trainings"]:
        for name, cell in training["settings"].items():
            shares = (share_of(count, n) for count in cell["right"].values())
            body.append([f"{training['noise']:.2f}", name, *shares])
    return grid(["noise", "", *(f"{length} tokens" for length in LENGTHS)], body)
