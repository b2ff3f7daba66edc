"""Rules for docs/faq.md: what it quotes of the results."""

from __future__ import annotations

from collections.abc import Iterator

from experiments import quickstart
from experiments.checks import mini
from experiments.checks.h200 import FIRST, QUANTIZE, TPOT, attention, median, step
from experiments.checks.rules import Rule, Text, load, one

PAGE = "docs/faq.md"
PERPLEXITY = "results/tiny/perplexity.json"


def rules() -> Iterator[Rule]:
    """Yield the rules."""
    cells = load(PERPLEXITY)["cells"]
    kivi = [cells[f"{mode}/wikitext2/kivi int2"] for mode in ("decode", "simulated")]
    values = [value for cell in kivi for value in (cell["diff"], cell["stderr"])]
    pattern = "loses {} ± {} nats per token through the cache, and {} ± {} in the simulation"
    yield Text(PAGE, pattern, values, PERPLEXITY)
    yield from _mini()
    yield from _quickstart()
    yield from _speed()


def _mini() -> Iterator[Rule]:
    stock, kivi, wide = (mini.to_fp16(name) for name in ("hf_quantized 2 (hqq)", "kivi 2", "kivi 2, G 64"))
    pattern = "that costs {} ± {} points (`method=hf_quantized`, with hqq), where KIVI at the same 2 bits costs {} ± {}"
    yield Text(PAGE, pattern, [*stock, *kivi], mini.SCORES)
    yield Text(PAGE, "instead of 32 cost KIVI {} ± {} instead of {} ± {} points", [*wide, *kivi], mini.SCORES)
    count, error = mini.setting("kivi 2")["mean"]["n"], kivi[1]
    yield Text(PAGE, "three retrieval tasks with {} samples in all", [count], mini.SCORES)
    yield Text(PAGE, "has a standard error of {} points", [error], mini.SCORES)
    yield Text(PAGE, "of four bits no difference can be seen there ({} ± {})", mini.to_fp16("kivi 4"), mini.SCORES)
    sizes = [mini.mib(name) for name in ("kivi 2", "kivi 2, G 64", "fp16")]
    pattern = "KIVI takes {} MiB on our tasks with groups of 32, and {} MiB with groups of 64, because scales and the "
    yield Text(PAGE, pattern + "exact window count too; fp16 takes {} MiB", sizes, mini.SCORES)
    name = "snapkv, bytes of kivi 2"
    yield Text(PAGE, "as KIVI ({} MiB) loses {} ± {} points", [mini.mib(name), *mini.to_fp16(name)], mini.SCORES)


def _quickstart() -> Iterator[Rule]:
    runs = quickstart.kept()
    fp16, kivi2 = runs["fp16"], runs["kivi2"]
    yield Text(PAGE, "by a factor of {} with KIVI at 2 bits", [kivi2["kv_bytes"]["ratio"]], quickstart.FOLDER)
    for pattern, key in (
        ("the decode peak only from {} to {} MiB", "decode"),
        ("the prefill peak from {} to {} MiB", "prefill"),
    ):
        values = [run["peak_bytes"][key] / 2**20 for run in (fp16, kivi2)]
        yield Text(PAGE, pattern, values, quickstart.FOLDER)


def _speed() -> Iterator[Rule]:
    points = [attention(FIRST, "7b", 1, thousands, "int4_g128") for thousands in (4, 128)]
    near, far = (point for point in points if point is not None)
    yield Text(PAGE, "takes {} µs with int4 and {} µs in bf16", [near["us"], near["best_us"]], FIRST)
    yield Text(PAGE, "at 128k it is {} µs against {} (", [far["us"], far["best_us"]], FIRST)
    packing = one(load(QUANTIZE)["rows"], model="7b", context=32 * 1024, format="int4_g128", what="kernel")
    yield Text(PAGE, "packing the 32k keys and values of one 7B layer takes {} ms", [packing["us"] / 1e3], QUANTIZE)
    values = [median(step(setting, 128)) for setting in ("kivi:int4_g128", "fp16")]
    yield Text(PAGE, "takes {} ms per token at 128k with int4 in groups of 128, and {} ms in bf16", values, TPOT)
