"""Rules for the sentences of docs/speed.md that have no table, and for capacity in docs/bytes-and-latency.md."""

from __future__ import annotations

from collections.abc import Iterator

from experiments.checks.rules import Rule, Text, load, one

PAGE, BATCH = "docs/speed.md", "results/h200/batch8"
#: settings of a batch of 8, in the order of the sentence, each with its file
SENTENCE = (
    ("kivi:int4_g128", "steps_more"),
    ("kivi:int2_g128", "steps_last"),
    ("logquant:int2_g64", "steps_last"),
    ("logquant:int2_g128:window=64", "steps_last_more"),
    ("cocktail:split=10/30/60:encoder=bm25", "steps_more"),
    ("cocktail:encoder=bm25", "steps_last_more"),
    ("fp16", "fp16_24k"),
)


def rules() -> Iterator[Rule]:
    """Yield the rules."""
    values: list[float] = []
    for setting, file in SENTENCE:
        row = one(load(f"{BATCH}/{file}.json")["rows"], setting=setting)
        values += [1e3 * row["tpot_s"]["median"], row["tpot_s"]["median"] / row["predicted"]["tpot_s"]]
    pattern = "kivi int4 {} ({}), kivi int2 {} ({}), logquant {} ({}) and with `window=64` {} ({}), cocktail 10/30/60 "
    pattern += "{} ({}), cocktail by thresholds {} ({}), and fp16 with 24k tokens, as 32k do not fit, {} ({})."
    yield Text(PAGE, pattern, values, BATCH)

    file = "results/h200/kvquant/tpot.json"
    (row,) = load(file)["rows"]
    yield Text(PAGE, "with 3 bits and 1 % outliers takes {} ms at 32k", [1e3 * row["tpot_s"]["median"]], file)

    first, second = (f"results/h200x2/captured/{name}.json" for name in ("first", "second"))
    long = one(load(first)["times"], setting="fp16", context=131072)
    alone = [entry for entry in load(second)["times"] if entry["compiled"]]  # nobody else was on these GPUs
    short = one(alone, setting="fp16", context=32768)
    more = [100 * (entry["ratio"] - 1) for entry in (long, *alone)]
    values = [min(more), max(more), *(entry[side]["median_ms"] for entry in (short, long) for side in ("two", "one"))]
    pattern = (
        "takes {} to {} % longer than on one GPU (fp16 at 32k: {} ms instead of {}, at 128k {} instead of {}, both"
    )
    yield Text(PAGE, pattern, values, f"{first}, second.json")

    file = "results/h200/efficiency/capacity.json"
    row = one(load(file)["rows"], setting="kivi:int8")
    free = row["memory"] - row["weights"] - row["allocated"] * row["per_sequence"]
    values = [size / 2**30 for size in (free, row["per_sequence"], row["workspace"])]
    pattern = "by the sum, {} GiB were still free after four, and a fifth takes {} GiB and {} for a moment"
    yield Text("docs/bytes-and-latency.md", pattern, values, file)
