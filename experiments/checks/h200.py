"""Figures of results/h200, in its own pages, in docs/speed.md and in docs/faq.md."""

from __future__ import annotations

from collections.abc import Iterator

from experiments.checks.rules import GIB, KI, Rule, Text, range_text
from experiments.stored import Row, benchmark_rows, load_result_json, one, some

FOLDER = "results/h200"
PAGE, SPEED, FAQ = f"{FOLDER}/README.md", "docs/speed.md", "docs/faq.md"
FIRST, SECOND, QUANTIZE = f"{FOLDER}/kernel_both.json", f"{FOLDER}/kernel.json", f"{FOLDER}/quantize.json"
TPOT, LATER = f"{FOLDER}/whole/tpot.json", f"{FOLDER}/whole/tpot_later.json"
STATIC, CAPTURED = f"{FOLDER}/whole/tpot_static.json", f"{FOLDER}/whole/captured.json"
PREFILL, PREFILL_W42 = f"{FOLDER}/whole/prefill.json", f"{FOLDER}/whole/prefill_w42.json"
PROFILE, PROFILE_48 = f"{FOLDER}/whole/profile.json", f"{FOLDER}/profile_batch_7b.json"
H2O, ODD, ODD_LAYER = (f"{FOLDER}/{name}.json" for name in ("h2o/tpot", "logquant42/tpot", "logquant42/attention"))
PEAKS, BATCH, KVQUANT = f"{FOLDER}/peaks", f"{FOLDER}/batch8", f"{FOLDER}/kvquant/tpot.json"
TWO, PAGE_TWO = "results/h200x2", "results/h200x2/README.md"
LONG, OTHER, CAPTURED_TWO = f"{TWO}/long.json", f"{TWO}/multigpu.json", f"{TWO}/captured/first.json, second.json"
#: names of the settings in the tables, and in the files
SETTINGS = {
    "fp16": "fp16",
    "kivi int4, G 128": "kivi:int4_g128",
    "kivi int4, G 32": "kivi:int4",
    "kivi int2, G 128": "kivi:int2_g128",
    "logquant int2, W 64": "logquant:int2_g128:window=64,reserved=192",
    "cocktail 10/30/60": "cocktail:split=10/30/60,encoder=bm25",
    "atom int4": "atom",
    "streamingllm, 2048": "streamingllm",
    "logquant int2 as it comes, W 42": "logquant",
}


def attention_rows(file: str, model: str, batch: int, thousands: int, form: str, new: int = 1) -> list[Row]:
    """Return what the CUDA kernel did at one point; empty if the file does not have it."""
    at = {"model": model, "batch": batch, "context": thousands * KI, "q_len": new, "format": form, "path": "cuda"}
    return some(benchmark_rows(file), **at)


def packing(form: str, what: str = "kernel") -> float:
    """Return the milliseconds in which the keys and values of a 7B layer are packed, 32k tokens."""
    return float(one(benchmark_rows(QUANTIZE), model="7b", context=32 * KI, format=form, what=what)["us"] / 1e3)


def step(setting: str, thousands: int) -> Row:
    """Return the decode steps of the whole 7B model."""
    return one(benchmark_rows(TPOT), setting=setting, context=thousands * KI)


def odd_steps(file: str, setting: str) -> list[Row]:
    """Return the decode steps at 32k and 128k tokens in the runs of H2O and of odd windows."""
    return [one(benchmark_rows(file), setting=setting, prompt=thousands * KI) for thousands in (32, 128)]


def median(row: Row) -> float:
    """Return the median of decode steps in milliseconds."""
    return float(1e3 * row["tpot_s"]["median"])


def roof(row: Row, key: str = "tpot_s") -> float:
    """Return the roofline's time of a step in milliseconds; ``expected_tpot_s``: with the overhead of kernels."""
    return float(1e3 * row["predicted"][key])


def over(row: Row) -> float:
    """Return by how many per cent a step takes longer than expected."""
    return 100 * (median(row) / roof(row, "expected_tpot_s") - 1)


def finished(file: str) -> list[Row]:
    """Return the points that did not run out of memory, by batch."""
    return sorted(some(benchmark_rows(file), status="ok"), key=lambda row: int(row["batch"]))


def refused(file: str) -> int:
    """Return the smallest batch that ran out of memory."""
    return min(int(row["batch"]) for row in some(benchmark_rows(file), status="oom"))


def logquant_setting(method: str) -> str:
    """Return the file of a method in LogQuant's own setting."""
    return f"{FOLDER}/whole/logquant_setting_{method}.json"


def gains() -> list[float]:
    """Return by how many per cent LogQuant's throughput and batch are larger than fp16's in its own setting."""
    best = {method: finished(logquant_setting(method))[-1] for method in ("fp16", "logquant")}
    return [100 * (best["logquant"][key] / best["fp16"][key] - 1) for key in ("tokens_per_s", "batch")]


def h200_rules() -> Iterator[Rule]:
    """Yield the rules of the sentences."""
    for sentences in (_layers, _step_texts, _step_part_texts, _captured, _batches, _two_gpus):
        yield from sentences()


def _layers() -> list[Text]:
    """Return those of one layer's attention and packing."""
    mix, kivi4 = (one(attention_rows(SECOND, "7b", 1, 4, form)) for form in ("mix", "kivi4"))
    near, far = (one(attention_rows(FIRST, "7b", 1, thousands, "int4_g128")) for thousands in (4, 128))
    int4, quanto, hqq = packing("int4_g128"), packing("int4", "quanto 4-bit"), packing("int4", "hqq 4-bit")
    plain = packing("int4_g128", "torch's way")
    flushes = [row["gpu_us"] for row in load_result_json(QUANTIZE)["flushes"] if row["model"] == "7b"]
    odd = [row for row in load_result_json(ODD_LAYER) if "us" in row]
    w42, w64 = ([one(odd, bits=2, win=win, T=k * KI, heads=32)["us"] for k in (32, 128)] for win in (42, 64))
    return [
        Text(PAGE, SECOND, f"at 4k ({mix['us']} against bf16's {mix['best_us']})"),
        Text(PAGE, SECOND, f"at 4k ({kivi4['us']} against {kivi4['best_us']}), +8 % at 32k"),
        Text(FAQ, FIRST, f"takes {near['us']} µs with int4 and {near['best_us']} µs in bf16"),
        Text(FAQ, FIRST, f"at 128k it is {far['us']} µs against {far['best_us']} ("),
        Text(PAGE, QUANTIZE, f"int4 G128 {int4} ms, int4 G32 {packing('int4_g32')}, int8 {packing('int8')} (quanto"),
        Text(PAGE, QUANTIZE, f"(quanto {quanto} ms, hqq {hqq} ms, plain torch {plain} ms)"),
        Text(PAGE, QUANTIZE, f"decoding: {min(flushes)} (int4 G128, 128 keys) to {max(flushes)} microseconds"),
        Text(SPEED, QUANTIZE, f"a 7B layer takes {int4} ms (quanto {quanto}, hqq {hqq})"),
        Text(SPEED, QUANTIZE, f"takes {range_text(flushes)} µs at any length"),
        Text(FAQ, QUANTIZE, f"packing the 32k keys and values of one 7B layer takes {int4} ms"),
        Text(PAGE, ODD_LAYER, f"meets: {w42[0]} microseconds a layer at 32k and {w42[1]} at 128k"),
        Text(PAGE, ODD_LAYER, f"at 128k, W = 64: {w64[0]} and {w64[1]} ("),
    ]


def _step_texts() -> list[Text]:
    """Return those of decode steps of whole models."""
    fp16, int4 = (median(step(setting, 128)) for setting in ("fp16", "kivi:int4_g128"))
    served = [row for row in some(benchmark_rows(TPOT), path="cuda") if row["predicted"]["expected_tpot_s"]]
    *within, worst = sorted(map(over, served))
    assert len(within) == 15 and within[-1] < 15 and worst == over(step("kivi:int2_g128", 128)), TPOT
    drafts = [step("quantspec:gamma=4", thousands) for thousands in (32, 128)]
    chance = [f"{row['speculation']['accepted']} of {row['speculation']['drafted']}" for row in drafts]
    rounds = [1e3 * row["decode_s"] / row["speculation"]["rounds"] for row in drafts]
    compiled, full = median(one(benchmark_rows(STATIC), setting="static-compiled")), median(step("fp16", 32))
    later = [median(row) for row in benchmark_rows(LATER)]
    w42, w64, h2o = odd_steps(ODD, "logquant"), odd_steps(ODD, "logquant:window=64"), odd_steps(H2O, "h2o")
    means = [1e3 * row["tpot_s"]["mean"] for row in h2o]
    long = one(benchmark_rows(PREFILL), setting="kivi:int4_g128", context=128 * KI)
    w42_prompt = one(benchmark_rows(PREFILL_W42), setting="logquant")
    return [
        Text(FAQ, TPOT, f"takes {int4} ms per token at 128k with int4 in groups of 128, and {fp16} ms in bf16"),
        Text(SPEED, TPOT, f"but for int2 at 128k ({worst} %)"),
        Text(PAGE, TPOT, f"what is expected ({range_text(within)} %)"),
        Text(PAGE, TPOT, f"the other one, int2 at 128k, is at {worst} %"),
        Text(PAGE, TPOT, f"right by chance alone: {' and '.join(chance)} accepted)"),
        Text(PAGE, TPOT, f"{median(drafts[0])} ms a token at 32k and {median(drafts[1])} at 128k"),
        Text(PAGE, TPOT, f"that is {rounds[0]} and {rounds[1]} ms for a round of four drafts"),
        Text(PAGE, TPOT, f"quantspec {drafts[0]['over_used']} and, at 128k, {drafts[1]['over_used']} (whole"),
        Text(PAGE, TPOT, f"a flush of all layers (p99 of the steps) {1e3 * step('logquant', 32)['tpot_s']['p99']} ms"),
        Text(PAGE, STATIC, f'mode="reduce-overhead")` {compiled} ms, fp16 {full}: {compiled / full} times as fast'),
        Text(SPEED, STATIC, f"StaticCache with `torch.compile` takes {compiled} ms at 32k"),
        Text(PAGE, LATER, f"fp16 {later[0]}, kivi int4 G 128 {later[1]}, kivi int2 {later[2]}, logquant int2 W 64"),
        Text(PAGE, LATER, f"logquant int2 W 64 {later[3]}, cocktail 10/30/60 {later[4]} ms."),
        Text(SPEED, ODD, f"whose groups fit no tile, it takes {median(w42[0])} and {median(w42[1])} ms"),
        Text(SPEED, ODD, f"`window=64` took {median(w64[0])} and {median(w64[1])} in the same run"),
        Text(SPEED, H2O, f"keeps a fifth of the tokens, takes {median(h2o[0])} and {median(h2o[1])} ms"),
        Text(PAGE, H2O, f"of all steps is {means[0]} and {means[1]})"),
        Text(PAGE, PREFILL_W42, f"a 32k prompt is read and packed in {w42_prompt['over_stock']} of stock's time"),
        Text(SPEED, PREFILL, f"the time of stock transformers ({long['seconds']} s) at {long['peak'] / GIB} instead"),
        Text(SPEED, PREFILL, f"instead of {long['stock_peak'] / GIB} GiB (kivi int4)"),
    ]


def _step_part_texts() -> list[Text]:
    """Return those of what a step is made of, and of peaks of memory."""

    def profile(file: str, name: str) -> Row:
        row = one(benchmark_rows(file), setting=SETTINGS[name])
        return {"ms": median(row), "busy": row["profile"]["busy_ms"], **row["profile"]["ms"]}

    names = ("kivi int4, G 128", "logquant int2, W 64", "cocktail 10/30/60", "fp16")
    kivi, log, fp16 = (profile(PROFILE, name) for name in names if not name.startswith("cocktail"))
    many, *others = (profile(PROFILE_48, name) for name in names)
    log48, cocktail48, fp48 = (f"{row['ms']} ({row['attention']}, {row['linear']}, -)" for row in others)
    files = [f"{PEAKS}/{name}.json" for name in ("prefill", "random", "kvquant")]
    peaks = {row["setting"].split(":")[0]: row for file in files for row in benchmark_rows(file)}
    used = {name: row["over_used"] for name, row in peaks.items()}
    took = {name: median(row) for name, row in peaks.items()}
    return [
        Text(PAGE, PROFILE, f"G 128 {kivi['busy']} busy: linear layers {kivi['linear']} for 13.2 GB (2.9 at"),
        Text(PAGE, PROFILE, f"attention {kivi['attention']} for 4.6 GB (1.01), norms, RoPE and the rest"),
        Text(PAGE, PROFILE, f"norms, RoPE and the rest {kivi['elementwise']}, appending"),
        Text(PAGE, PROFILE, f"appending {kivi['append']}, packing {kivi['pack']} in the mean."),
        Text(PAGE, PROFILE, f"logquant {log['busy']}: {log['linear']}, {log['attention']}, {log['elementwise']}, "),
        Text(PAGE, PROFILE, f"{log['attention']}, {log['elementwise']}, {log['append']}. fp16"),
        Text(PAGE, PROFILE, f"fp16 {fp16['busy']}: {fp16['linear']}, {fp16['attention']} (3.8 at the ceiling)"),
        Text(PAGE, PROFILE, f"(3.8 at the ceiling), {fp16['elementwise']}, {fp16['append']}."),
        Text(PAGE, PROFILE_48, f"kivi int4 {many['ms']} (attention {many['attention']}, linear layers"),
        Text(PAGE, PROFILE_48, f"linear layers {many['linear']}, packing {many['pack']}), logquant int2"),
        Text(PAGE, PROFILE_48, f"logquant int2 {log48}, cocktail {cocktail48}, fp16 {fp48}"),
        Text(PAGE, PEAKS, f"h2o {used['h2o']}, streamingllm {used['streamingllm']}, kvquant {used['kvquant']}, "),
        Text(PAGE, PEAKS, f"on the reference path {used['logquant']}, partial_logquant {used['partial_logquant']}, "),
        Text(PAGE, PEAKS, f"snapkv {used['snapkv']}, quantspec"),
        Text(PAGE, PEAKS, f"partial_logquant took {took['partial_logquant']} ms, snapkv {took['snapkv']}, h2o"),
        Text(PAGE, PEAKS, f"h2o {took['h2o']} (eager)"),
        Text(PAGE, PEAKS, f"and kvquant {took['kvquant']} at 8k"),
        Text(PAGE, PEAKS, f"by the reference path, eager, {took['logquant']} ms a token at 32k"),
        Text(PAGE, PEAKS, f"**StreamingLLM** took {took['streamingllm']} ms"),
    ]


def _captured() -> list[Text]:
    """Return those of captured steps, compared with eager ones."""
    same = some(benchmark_rows(CAPTURED), how="graph")
    assert len(same) == 12 and all(row.get("parted_at") is None and row["same_bill"] for row in same), CAPTURED
    tokens = f"{same[0]['tokens']} of {same[0]['tokens']}"
    places = [row["compiled"]["parted_at"] for row in same if row["compiled"]["parted_at"] is not None]
    assert len(places) == 9, CAPTURED
    gaps = [row["compiled"]["gap"] for row in same if row["compiled"]["gap"] and not row["method"].startswith("atom")]
    return [
        Text(PAGE, CAPTURED, f"snapkv: {tokens} each, same bytes"),
        Text(
            PAGE,
            CAPTURED,
            f"somewhere (token {range_text(places)}), where the two best logits are {range_text(gaps)} apart",
        ),
        Text(SPEED, CAPTURED, f"with the same kernel: {tokens} in all twelve settings"),
    ]


def _batches() -> list[Text]:
    """Return those of several sequences."""
    (throughput, batch), fp16, logquant = gains(), logquant_setting("fp16"), logquant_setting("logquant")

    def tried(file: str) -> str:
        speeds, sizes = ([str(row[key]) for row in finished(file)] for key in ("tokens_per_s", "batch"))
        words = "tokens/s at batch" if file == fp16 else "at"
        return f"{' / '.join(speeds)} {words} {' / '.join(sizes)}, out of memory at {refused(file)}"

    def eight(setting: str, run: str = "_last") -> str:
        row = one(benchmark_rows(f"{BATCH}/steps{run}.json"), setting=setting)
        return f"{median(row)} ({median(row) / roof(row)})"

    fp24k = one(benchmark_rows(f"{BATCH}/fp16_24k.json"))
    return [
        Text(PAGE, fp16, f"fp16 {tried(fp16)};"),
        Text(PAGE, logquant, f"logquant int2 (W 64) {tried(logquant)}."),
        Text(PAGE, logquant, f"So {throughput} % throughput and {batch} % batch;"),
        Text(SPEED, BATCH, f"kivi int4 {eight('kivi:int4_g128', '_more')}, kivi int2 {eight('kivi:int2_g128')}, "),
        Text(SPEED, BATCH, f"logquant {eight('logquant:int2_g64')} and with `window=64` "),
        Text(SPEED, BATCH, f"and with `window=64` {eight('logquant:int2_g128:window=64', '_last_more')}, cocktail"),
        Text(SPEED, BATCH, f"cocktail 10/30/60 {eight('cocktail:split=10/30/60:encoder=bm25', '_more')}, cocktail"),
        Text(SPEED, BATCH, f"cocktail by thresholds {eight('cocktail:encoder=bm25', '_last_more')}, and fp16"),
        Text(SPEED, BATCH, f"as 32k do not fit, {median(fp24k)} ({median(fp24k) / roof(fp24k)})."),
    ]


def _two_gpus() -> list[Text]:
    """Return those of two GPUs: one GPU, layers over two and heads over two."""

    def measured(file: str, layout: str, method: str, graphs: str) -> Row:
        entry: dict[str, Row] = load_result_json(file)["layouts"][layout]["131072 tokens"]
        return next(entry[key] for key in (f"{method}, graphs={graphs}", method) if key in entry)

    lines, captured = [], {}
    for label, method in (("fp16", "fp16"), ("quantspec, gamma 4", "quantspec")):
        one_gpu = [measured(LONG, "one", method, graphs) for graphs in ("never", "auto")]
        layers = [measured(OTHER, "device_map", method, "never")]
        heads = [measured(LONG, "tensor_parallel", method, graphs) for graphs in ("never", "always")]
        captured[method] = first, second = one_gpu[1], heads[1]
        cells = [label]
        for steps in (one_gpu, layers, heads):
            peaks = zip(*(row["decode_peak"] for row in steps), strict=True)
            cells.append(" + ".join(str(max(peak) / GIB) for peak in peaks))
            cells += [str(row["tpot_ms"]) for row in steps]
        lines.append(f"| {' | '.join(cells)} ({first['tpot_ms'] / second['tpot_ms']}x) |")
    single, both = captured["quantspec"]
    fp16, fp16_both = (row["tpot_ms"] for row in captured["fp16"])
    alone = some(
        load_result_json(f"{TWO}/captured/second.json")["times"], compiled=True
    )  # nobody else was on these GPUs
    far = one(load_result_json(f"{TWO}/captured/first.json")["times"], setting="fp16", context=128 * KI)
    near = one(alone, setting="fp16", context=32 * KI)
    longer = [100 * (row["ratio"] - 1) for row in (far, *alone)]
    at32, at128 = ([row[side]["median_ms"] for side in ("two", "one")] for row in (near, far))
    return [
        *(Text(PAGE_TWO, f"{LONG}, {OTHER}", sentence) for sentence in lines),
        Text(PAGE_TWO, LONG, f"({single['tokens_a_round']} tokens a round in both captured runs)"),
        Text(PAGE_TWO, LONG, f"a verification takes {single['step_ms']} ms on one GPU and {both['step_ms']} on two."),
        Text(SPEED, LONG, f"fp16 at 128k takes {fp16_both} ms instead of {fp16}, both captured"),
        Text(SPEED, CAPTURED_TWO, f"takes {range_text(longer)} % longer than on one GPU"),
        Text(SPEED, CAPTURED_TWO, f"(fp16 at 32k: {at32[0]} ms instead of {at32[1]}, at"),
        Text(SPEED, CAPTURED_TWO, f"at 128k {at128[0]} instead of {at128[1]}, both"),
    ]
