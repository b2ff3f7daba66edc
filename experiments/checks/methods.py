"""Rules for docs/methods.md: the accuracy of the methods on the bundled model."""

from __future__ import annotations

from collections.abc import Iterator

from experiments.checks import mini
from experiments.checks.rules import Row, Rule, Text, load
from kvbench.methods.bytes import kv_bytes
from kvbench.methods.load import load_method

PAGE = "docs/methods.md"


def rules() -> Iterator[Rule]:
    """Yield the rules of docs/methods.md."""
    file = "results/tiny/sensitivity.json"
    means = load(file)["mean"]
    yield Row(PAGE, "", "mean score, %", [100 * cell["score"] for cell in means.values()], file)
    others = [cell for name, cell in means.items() if name != "fp16"]
    values = [value for cell in others for value in (100 * cell["vs_fp16"], 100 * cell["stderr"])]
    yield Row(PAGE, "", "to fp16, points", values, file)
    counts = {cell["n"] for entries in load(file)["tasks"].values() for cell in entries.values()}
    (samples,) = counts
    values = [len(load(file)["tasks"]), load(file)["length"], samples]
    yield Text(PAGE, "all {} tasks at {} tokens, {} samples each, paired", values, file)

    names: tuple[str, ...] = ("kivi 4", "logquant 4", "kivi 2", "logquant 2", "kivi 2, G 64", "cocktail")
    names += ("kivi 2, key per token",)
    names += ("hf_quantized 2 (hqq)", "snapkv, bytes of kivi 2", "kivi evict, bytes of kivi 2")
    yield Row(PAGE, "", "Δ", [value for name in names for value in mini.to_fp16(name)], mini.SCORES)
    yield Row(PAGE, "", "KV bytes, MiB (fp16 15.94)", [mini.mib(name) for name in names], mini.SCORES)
    yield Text(PAGE, "KV bytes, MiB (fp16 {})", [mini.mib("fp16")], mini.SCORES)
    yield Text(
        PAGE, "three retrieval tasks at 4,096 tokens, {} samples", [mini.setting("fp16")["mean"]["n"]], mini.SCORES
    )

    file = "results/quantspec/equality.json"
    rows = load(file)["rows"]
    equal, runs = (sum(row[key] for row in rows) for key in ("equal", "prompts"))
    yield Text(PAGE, "Greedy answers are the target's: {} of {} runs on tiny", [equal, runs], file)

    shape = {"layers": 32, "query_heads": 32, "heads": 32, "channels": 128}
    cocktail = [load_method("cocktail", split=(10, 30, 60), reorder=reorder) for reorder in (False, True)]
    sizes = [kv_bytes(method, 4096, **shape).total / 2**20 for method in (*cocktail, load_method("fp16"))]
    pattern = "A 7B model holds {} MiB at 4,096 tokens instead of {} (fp16: {}),"
    yield Text(PAGE, pattern, sizes, "kvbench.methods.bytes")
