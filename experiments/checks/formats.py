"""Rules for results/formats, and for what other pages quote of it and of results/h200/formats."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from experiments.checks.rules import Row, Rule, Text, Whole, load, one
from experiments.formats.report import markdown
from experiments.formats.tpot import SOURCE, measured, steps
from experiments.formats.which import PAGE, table

FOLDER = "results/formats"
LINES, CLAIMS = f"{FOLDER}/lines.json", f"{FOLDER}/claims.json"
KERNEL = "results/h200/formats/kernel.json"
#: what loses score for a reason that which-format names by itself: e2m1 codes, and TurboQuant's sketch
NAMED = ("nvfp4 4over6", "nvfp4", "UltraQuant", "fp4_mx_block16")


def line(name: str, tail: str = "open") -> dict[str, Any]:
    """Return a line: a quantizer with one choice of exact tokens."""
    return one(load(LINES)["lines"], name=name, tail=tail)


def kld(name: str, *keys: str) -> list[float]:
    """Return figures of the KL divergence, in 0.0001 nats; without names the mean and its interval."""
    return [1e4 * line(name)["kld"][key] for key in keys or ("mean", "low", "high")]


def lost(name: str, tail: str = "open") -> list[float]:
    """Return the points of score that a line has less than fp16, and the standard error."""
    return [-100 * line(name, tail)["vs_fp16"]["diff"], 100 * line(name, tail)["vs_fp16"]["stderr"]]


def claim(first: str, second: str, tail: str = "open") -> dict[str, Any]:
    """Return the paired comparison of two quantizers."""
    return one(load(CLAIMS), better=f"{first} | {tail}", worse=f"{second} | {tail}")


def apart(first: str, second: str) -> list[float]:
    """Return the size of a paired difference of KL divergences and its interval, in 0.0001 nats."""
    entry = claim(first, second)["kld"]["kld_mean"]
    return sorted(abs(1e4 * entry[key]) for key in ("low", "diff", "high"))


def microseconds(form: str, model: str = "7b", context: int = 131072) -> float:
    """Return the time of one layer's attention."""
    return float(one(load(KERNEL)["rows"], model=model, context=context, format=form)["us"])


def rules() -> Iterator[Rule]:
    """Yield the rules of the table of formats."""
    yield Whole(f"{FOLDER}/table.md", markdown(load(LINES), load(CLAIMS), steps()), f"{LINES}, {CLAIMS}, {SOURCE}")
    yield Whole(PAGE, table(), f"{LINES}, results/h200/formats")
    yield from _which()
    yield from _rotation()
    yield from _kernels()
    yield from _turboquant()


def _which() -> Iterator[Rule]:
    """Yield the rules of the sentences of docs/which-format.md."""
    content = load(LINES)
    two = [-100 * row["vs_fp16"]["diff"] for row in content["lines"] if _two_bits(row["name"])]
    yield Text(PAGE, "scored; {} prompts of 872 to 1,000", [content["n"]], LINES)
    yield Text(PAGE, "answers to {} of them", [content["prompts"]], LINES)
    yield Text(PAGE, "values every format loses at least {} points", [min(two)], LINES)
    times = {name: 1e3 * seconds for name, seconds in measured().items()}
    names = ("int8 per token", "q8_0, rotated", "fp8")
    yield Text(PAGE, "Their steps take {} and {} ms, fp8's {}.", [times[name] for name in names], SOURCE)
    values = [value for name in ("fp8", "int8 per token", "q8_0, rotated") for value in kld(name)]
    pattern = "is {} ({} to {}) where int8's is {} ({} to {}) and q8_0's {} ({} to {})."
    yield Text(PAGE, pattern, values, LINES)
    assert all(lost(name)[0] <= 1.96 * lost(name)[1] for name in names), LINES
    turned, plain = "int4 per token, rotated", "int4 per token"
    low, middle, high = apart(turned, plain)
    values = [*kld(plain, "mean"), *kld(turned, "mean"), middle, low, high]
    yield Text(PAGE, "of int4 per token from {} to {}, by {} ({} to {}).", values, LINES)
    yield Text(PAGE, "hadamard`, {} ms a step at 7B", [times[turned] - times[plain]], SOURCE)
    entry = claim("q4_0, rotated", "q4_0, not rotated")["kld"]["kld_mean"]
    assert entry["low"] < 0 < entry["high"], CLAIMS
    alike = ("kivi int4 G32", "kivi int4 G128", "q4_0, rotated", "TurboQuant 4 bits", "KVarN k4v4", turned)
    assert max(line(name)["kld"]["low"] for name in alike) < min(line(name)["kld"]["mean"] for name in alike), LINES
    assert min(line(name)["kld"]["high"] for name in alike) > max(line(name)["kld"]["mean"] for name in alike), LINES
    bits = [line(name)["bits"] for name in alike]
    yield Text(PAGE, "intervals, with {} to {} bits when scored", [min(bits), max(bits)], LINES)
    ordered = sorted((*alike, "vLLM int4 per token"), key=times.__getitem__)
    assert (ordered[0], ordered[-1]) == ("KVarN k4v4", "TurboQuant 4 bits"), SOURCE
    low, middle, high = apart("iq4_nl, rotated", "q4_0, rotated")
    yield Text(PAGE, "q4_0, both rotated, by {} ({} to {}).", [middle, low, high], LINES)
    values = [value for name in NAMED for value in lost(name)]
    fours = {row["name"] for row in content["lines"] if 4 <= row["bits"] < 6 and row["tail"] == "open"}
    fours = {name for name in fours if not _two_bits(name)} - {*NAMED, "TurboQuant 4 bits, QJL", "KVarN k4v2"}
    shown = [lost(name)[0] for name in fours if f"| {name} |" in table()]
    pattern = "`nvfp4_4over6` {} ± {} points, `nvfp4` {} ± {}, UltraQuant {} ± {} and SGLang's `fp4_mx_block16` "
    pattern += "{} ± {}, where the other formats of 4 bits in the table lose {} or less"
    yield Text(PAGE, pattern, [*values, max(shown)], LINES)
    sketch = claim("TurboQuant 4 bits, QJL", "TurboQuant 4 bits")["score"]
    values = [-100 * sketch["diff"], 100 * sketch["stderr"]]
    yield Text(PAGE, "not in the table, scores {} ± {} points less", values, CLAIMS)
    yield Text(PAGE, "with 3. It loses {} ± {} points", lost("TurboQuant 3 bits"), LINES)
    yield Text(PAGE, "values in 2) loses {} ± {};", lost("KVarN k4v2"), LINES)
    yield Text(PAGE, "with {} bits when scored, because", [line("KVarN k4v2")["bits"]], LINES)
    values = []
    for other in ("TurboQuant 3 bits", "TurboQuant 4 bits"):
        low, middle, high = apart("KVarN k4v2", other)
        values += [middle, low, high]
        assert claim("KVarN k4v2", other)["kld"]["kld_mean"]["low"] > 0 and times["KVarN k4v2"] < times[other], CLAIMS
    pattern = "than TurboQuant's 3 bits (by {}, {} to {}) and 4 bits (by {}, {} to {})"
    yield Text(PAGE, pattern, values, CLAIMS)
    places = (("OSCAR int2", "open"), ("OSCAR int2", "own"))
    places += (("kivi int2 G32", "wide"), ("KVarN k2v2", "wide"), ("kivi int2 G128", "wide"))
    values = [100 * line(*place)["score"]["score"] for place in places]
    held = [line(*place)["bits"] for place in places[1:]]
    yield Text(PAGE, "exact tokens answers {} % of the questions; with its own 320, {} %", values[:2], LINES)
    pattern = (
        "groups of 32 answers {} %, KVarN {} % and KIVI in groups of 128 {} %; all four caches then hold {} to {} bits"
    )
    yield Text(PAGE, pattern, [*values[2:], min(held), max(held)], LINES)
    balance = claim("KVarN k2v2", "k2v2, rotated, not balanced")["score"]
    values = [-100 * balance["diff"], 100 * balance["stderr"]]
    yield Text(PAGE, "its tiles score {} ± {} points more", values, CLAIMS)
    values = [microseconds("turboquant_4bit"), microseconds("int4_g128")]
    yield Text(PAGE, "attention takes {} µs where int4 in groups of 128 takes {} (", values, KERNEL)


def _two_bits(name: str) -> bool:
    """Return True for keys and values in 2 bits."""
    return "int2" in name or "k2v2" in name


def _rotation() -> Iterator[Rule]:
    """Yield the rules of what docs/rotation.md quotes of steps on an H200."""
    page, turned = "docs/rotation.md", "rotation.key=hadamard:rotation.value=hadamard"
    values: list[float] = []
    for file, setting in (("tpot_7b", "kivi:int4_token:residual=1"), ("tpot_8b", "kivi:int4_g128")):
        rows = load(f"results/h200/formats/{file}.json")["rows"]
        plain, with_it = (one(rows, setting=name)["tpot_s"]["median"] for name in (setting, f"{setting}:{turned}"))
        more = 1e3 * (with_it - plain)
        values += [more, 1e3 * more / 32]
    pattern = "takes {} ms longer at 7B (32k tokens; {} µs a layer) and {} ms at 8B (128k tokens; {} µs)"
    yield Text(page, pattern, values, "results/h200/formats")


def _kernels() -> Iterator[Rule]:
    """Yield the rules of the times beside int4_g128's that docs/speed.md and docs/kernels.md quote."""
    rows = load(KERNEL)["rows"]

    def ends(key: str, form: str, models: Sequence[str] = ("7b", "8b")) -> list[float]:
        base = {(row["model"], row["context"]): row for row in rows if row["format"] == "int4_g128"}
        ratios = [
            row[key] / base[row["model"], row["context"]][key]
            for row in rows
            if row["format"] == form and row["model"] in models
        ]
        return [min(ratios), max(ratios)]

    values = [100 * (ratio - 1) for form in ("nvfp4", "turboquant_4bit") for ratio in ends("per_byte", form)]
    pattern = "nvfp4 {} to {} % longer, and TurboQuant, which looks up its levels, {} to {} % (4 bits)."
    yield Text("docs/speed.md", pattern, values, KERNEL)
    page, share = "docs/kernels.md", 100 * ends("bytes", "kvarn_k4v2")[0]
    pattern = "KVarN's 4-bit tiles take {} to {} times the time per byte of `int4_g128`, and with 2-bit values "
    values = [*ends("per_byte", "kvarn_k4v4"), share, *ends("us", "kvarn_k4v2")]
    yield Text(page, pattern + "({} % of the bytes) {} to {} of its time", values, KERNEL)
    values = ends("per_byte", "nvfp4", ["7b"])
    yield Text(page, "the kernel takes {} to {} times the time per byte of `int4_g128`", values, KERNEL)


def _turboquant() -> Iterator[Rule]:
    """Yield the rules of TurboQuant's table in docs/methods.md."""
    page, after = "docs/methods.md", "| TurboQuant | bits |"
    for label, name, tail in (
        ("`k8v4`", "TurboQuant k8v4", "own"),
        ("`4bit_nc`", "TurboQuant 4 bits", "own"),
        ("`k3v4_nc`", "TurboQuant k3v4", "own"),
        ("`3bit_nc`", "TurboQuant 3 bits", "own"),
        ("`k8v4`, all layers packed (`boundary=0`)", "TurboQuant k8v4", "open"),
        ("`4bit_nc`, all layers packed", "TurboQuant 4 bits", "open"),
        ("`k3v4_nc`, all layers packed", "TurboQuant k3v4", "open"),
        ("`3bit_nc`, all layers packed", "TurboQuant 3 bits", "open"),
        ("`4bit_nc`, all layers packed, `nc_at=none qjl=true`", "TurboQuant 4 bits, QJL", "open"),
    ):
        row = line(name, tail)
        values = [row["bits"], *(1e4 * row["kld"][key] for key in ("mean", "low", "high"))]
        values += [100 * row["same_top"]["share"], -lost(name, tail)[0], lost(name, tail)[1]]
        yield Row(page, after, label, values, LINES)
