"""Rules for results/h200x2, and for what docs/speed.md quotes of it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from experiments.checks.rules import Row, Rule, Text, Value, load

PAGE, LONG, OTHER = "results/h200x2/README.md", "results/h200x2/long.json", "results/h200x2/multigpu.json"
GRAPHS = {"one": "auto", "tensor_parallel": "always"}


def point(file: str, layout: str, method: str, graphs: str) -> dict[str, Any]:
    """Return the measurement of a layout at 128k tokens."""
    entry: dict[str, Any] = load(file)["layouts"][layout]["131072 tokens"]
    return next(entry[key] for key in (f"{method}, graphs={graphs}", method) if key in entry)


def rules() -> Iterator[Rule]:
    """Yield the rules."""
    captured: dict[tuple[str, str], dict[str, Any]] = {}
    for label, method in (("fp16", "fp16"), ("quantspec, gamma 4", "quantspec")):
        values: list[Value] = []
        for layout, file in (("one", LONG), ("device_map", OTHER), ("tensor_parallel", LONG)):
            eager = point(file, layout, method, "never")
            steps = [eager]
            if layout in GRAPHS:
                captured[method, layout] = point(file, layout, method, GRAPHS[layout])
                steps.append(captured[method, layout])
            peaks = zip(*(row["decode_peak"] for row in steps), strict=True)
            values += [max(peak) / 2**30 for peak in peaks]
            values += [row["tpot_ms"] for row in steps]
        one, two = (captured[method, layout] for layout in GRAPHS)
        values += [one["tpot_ms"] / two["tpot_ms"]]
        yield Row(PAGE, "| | one GPU | | | layers over two |", label, values, f"{LONG}, {OTHER}")
    rounds = [captured["quantspec", layout] for layout in GRAPHS]
    yield Text(PAGE, "({} tokens a round in both captured runs)", [rounds[0]["tokens_a_round"]], LONG)
    pattern = "a verification takes {} ms on one GPU and {} on two."
    yield Text(PAGE, pattern, [row["step_ms"] for row in rounds], LONG)
    steps = [captured["fp16", layout]["tpot_ms"] for layout in reversed(GRAPHS)]
    yield Text("docs/speed.md", "fp16 at 128k takes {} ms instead of {}, both captured", steps, LONG)
