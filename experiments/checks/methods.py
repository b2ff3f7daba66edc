"""Rules for docs/methods.md: the accuracy of the methods on the bundled model."""

from __future__ import annotations

from collections.abc import Iterator

from experiments.checks import mini
from experiments.checks.rules import Row, Rule, Text, load, one, table
from kvbench.methods.bytes import kv_bytes
from kvbench.methods.load import load_method

PAGE = "docs/methods.md"
ABLATIONS = "results/tiny/ablations"
#: lines of the table of ``keep``: share of the prompt, quantizer, name of the run
KEEP = (
    ("1", "int4", "keep int4 keep=1"),
    ("1", "int2", "keep int2 keep=1"),
    ("0.5", "int4", "keep int4 keep=0.5"),
    ("0.5", "none", "keep keep=0.5"),
)
#: lines of the table of OSCAR's parts: label in the page, name of the run
OSCAR = {
    "one group per token and head, neither rotated nor clipped": "oscar int2_token clip_key=1 clip_value=1 "
    "levels=uniform basis=rotation",
    "... calibrated rotation, not clipped": "oscar int2_token clip_key=1 clip_value=1 levels=uniform basis=calibrated",
    "... Hadamard rotation, not clipped (QuaRot)": "oscar int2_token rotation=hadamard clip_key=1 clip_value=1",
    "... Hadamard rotation, clipped": "oscar int2_token rotation=hadamard clip_key=0.96 clip_value=0.92",
    "**OSCAR**: calibrated rotation, clipped": "oscar int2_token clip_key=0.96 clip_value=0.92 levels=uniform "
    "basis=calibrated",
    "OSCAR, `levels=lloyd_max`": "oscar int2_token clip_key=0.96 clip_value=0.92 levels=lloyd_max basis=calibrated",
    "KIVI int2, groups of 32": "kivi int2 residual=32 sinks=64 window=256",
    "KIVI int2, groups of 32, with its own newest tokens exact": "kivi int2 residual=128 sinks=0 window=0",
}


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

    file = f"{ABLATIONS}/oscar.csv"
    for label, name in OSCAR.items():
        run = one(table(file), run=name)
        values = [float(run[f"mini_text@768 kld_{key}"]) for key in ("mean", "low", "high", "p99.9")]
        yield Row(PAGE, "## OSCAR", label, [*values, int(run["kv_bytes"]) / 2**20], file)
    values = [int(table(file)[0]["mini_text@768 prompts"])]
    yield Text(PAGE, "over {} windows of 512 prompt and 256 decoded tokens", values, file)

    files = [f"{ABLATIONS}/{name}.csv" for name in ("keep", "keep_scores")]
    for share, bits, name in KEEP:
        text, key = (one(table(file), run=name) for file in files)
        values = [float(text[f"mini_text@768 kld_{part}"]) for part in ("mean", "low", "high", "p99.9")]
        values += [int(text["kv_bytes"]) / 2**20]
        values += [100 * float(key[f"key_value@1024 {part}"]) for part in ("score", "stderr")]
        row = [*values, int(key["kv_bytes"]) / 2**20]
        yield Row(PAGE, "## Eviction, then packing", f"`keep={share} quantizer={bits}`", row, ", ".join(files))

    shape = {"layers": 32, "query_heads": 32, "heads": 32, "channels": 128}
    cocktail = [load_method("cocktail", split=(10, 30, 60), reorder=reorder) for reorder in (False, True)]
    sizes = [kv_bytes(method, 4096, **shape).total / 2**20 for method in (*cocktail, load_method("fp16"))]
    pattern = "A 7B model holds {} MiB at 4,096 tokens instead of {} (fp16: {}),"
    yield Text(PAGE, pattern, sizes, "kvbench.methods.bytes")
