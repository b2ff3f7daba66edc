"""Figures of steps that were measured on an H200 on 2026-11-28: results/h200/steps, and pages beside it."""

from __future__ import annotations

from collections.abc import Iterator

from experiments.cells.jobs import predicted
from experiments.checks.h200 import FOLDER, KVQUANT, LATER, PAGE, SETTINGS, SPEED, median, one, roof, step
from experiments.checks.rules import KI, Block, Rule, Text, three
from experiments.formats.which import LATER as FORMATS
from experiments.formats.which import PAGE as WHICH
from experiments.stored import Row, benchmark_rows, grid, load_result_json, some

STEPS, BATCH, STEPS_PAGE = (f"{FOLDER}/steps/{name}" for name in ("tpot.json", "batch_8k_logquant.json", "README.md"))
NUQ, NUQ_PROFILE, NUQ_ATTENTION, NUQ_FIRST, NUQ_PAGE = (
    f"{FOLDER}/kvquant/{name}"
    for name in ("tpot_later.json", "profile.json", "attention_later.json", "attention.json", "README.md")
)
FORMATS_PAGE = f"{FOLDER}/formats/README.md"
DRAFTS, DRAFTS_PAGE = f"{FOLDER}/speculation/later/llama3.1-8b_128k.json", f"{FOLDER}/speculation/README.md"
PAPERS, PAPERS_PAGE, CHANGES = f"{FOLDER}/papers", f"{FOLDER}/papers/README.md", "CHANGELOG.md"
#: settings that were measured again, with the names of the table of steps
AGAIN = ("fp16", "kivi int4, G 128", "kivi int2, G 128", "logquant int2, W 64")
#: points of KVQuant's attention: label, shape, bits, tokens in thousands
NUQ_POINTS = (
    ("3 bits, 7B, 32k", "7b", 3, 32),
    ("2 bits, 7B, 32k", "7b", 2, 32),
    ("4 bits, 7B, 32k", "7b", 4, 32),
    ("3 bits, 7B, 4k", "7b", 3, 4),
    ("... 128k", "7b", 3, 128),
    ("... 8B, 32k", "8b", 3, 32),
    ("... 8B, 128k", "8b", 3, 128),
)
#: models whose steps without Cocktail's module II were captured
IN_PLACE = ("llama2-7b", "llama2-13b", "mistral-7b", "longchat-7b")
ACCEPTANCE, DRAFTED = 0.9, 3


def h200_step_rules() -> Iterator[Rule]:
    """Yield the rules."""
    yield Block(STEPS_PAGE, _steps(), f"{STEPS}, {FOLDER}/whole/tpot.json", "steps")
    yield Block(NUQ_PAGE, _nuq_attention(), f"{NUQ_ATTENTION}, {NUQ_FIRST}", "attention")
    yield Block(FORMATS_PAGE, _formats(), FORMATS, "steps")
    yield Block(DRAFTS_PAGE, _drafts(), DRAFTS, "later")
    for sentences in (_step_texts, _nuq_texts, _format_texts, _draft_texts, _in_place_texts):
        yield from sentences()


def again(name: str, thousands: int) -> Row:
    """Return the later decode steps of the 7B model by the name of the setting."""
    setting = SETTINGS[name].replace(",", ":")
    return one(benchmark_rows(STEPS), setting=setting, prompt=thousands * KI)


def between(row: Row) -> str:
    """Return the median of decode steps in milliseconds with the range of the middle four fifths."""
    low, high = (1e3 * row["tpot_s"][key] for key in ("p10", "p90"))
    return f"{median(row):.2f} ({low:.2f} to {high:.2f})"


def _steps() -> str:
    body = []
    for name in AGAIN:
        for thousands in (32, 128):
            row, fp16 = again(name, thousands), again("fp16", thousands)
            cells = [f"{median(step(SETTINGS[name], thousands)):.2f}", between(row), f"{roof(row):.2f}"]
            share = f"{100 * row['read_share']:.0f} %"
            body.append([name, f"{thousands}k", *cells, share, f"{median(fp16) / median(row):.2f}"])
    head = "| setting | tokens | before, ms | now, ms (10 to 90 %) | roof | share of the read ceiling | x over fp16 |"
    return grid(head, body)


def _nuq_attention() -> str:
    first, later = benchmark_rows(NUQ_FIRST), benchmark_rows(NUQ_ATTENTION)
    body = []
    for label, shape, bits, thousands in NUQ_POINTS:
        at = {"shape": shape, "bits": bits, "tokens": thousands * KI}
        before, row = some(first, **at), one(later, **at)
        assert row["same_bits_again"], NUQ_ATTENTION
        shown = [
            three(before[0]["us"]) if before else "-",
            f"{three(row['us'])} ({three(row['p10'])} to {three(row['p90'])})",
        ]
        body.append([label, *shown, f"{row['error']:.4f}".removeprefix("0")])
    return grid("| point | 2026-11-22 | now (10 to 90 %) | error |", body)


def _formats() -> str:
    body = []
    rows = benchmark_rows(FORMATS)
    for setting in dict.fromkeys(row["setting"] for row in rows):
        cells = [f"`{setting}`"]
        for thousands in (32, 128):
            row = one(rows, setting=setting, prompt=thousands * KI)
            cells += [between(row), f"{roof(row):.2f}", f"{100 * row['read_share']:.0f} %"]
        body.append(cells)
    return grid("| setting | 32k: ms (10 to 90 %) | roof | share | 128k: ms (10 to 90 %) | roof | share |", body)


def _quantspec() -> tuple[float, Row]:
    """Return the milliseconds of plain decoding, and the row of QuantSpec."""
    rows = benchmark_rows(DRAFTS)
    return one(rows, case="plain")["ms"], one(rows, case="quantspec")


def _format_texts() -> list[Text]:
    rows = benchmark_rows(FORMATS)
    names = ("engine:format=nvfp4", "turboquant:format=4bit_nc", "engine:format=iq4_nl", "engine:format=octave_k3v4")
    far = [one(rows, setting=name, prompt=128 * KI) for name in names]
    near = [one(rows, setting=name, prompt=32 * KI) for name in names]
    swing = [100 * (row["tpot_s"]["p90"] / row["tpot_s"]["median"] - 1) for row in far[:2]]
    more = [100 * (median(row) / median(steps[0]) - 1) for steps in (near, far) for row in steps[2:]]
    fp16, int4 = ([median(again(name, thousands)) for thousands in (32, 128)] for name in AGAIN[:2])
    return [
        Text(
            FORMATS_PAGE, STEPS, f"fp16 took {fp16[0]} and {fp16[1]} ms and `kivi:int4_g128` {int4[0]} and {int4[1]}."
        ),
        Text(WHICH, FORMATS, f"their TPOT from one in which nvfp4 took {median(near[0])} ms."),
        Text(WHICH, FORMATS, f"at 32k take {more[0]} and {more[1]} % longer than with nvfp4."),
        Text(FORMATS_PAGE, FORMATS, f"90th percentiles are {swing[0]} and {swing[1]} % above the median"),
        Text(
            FORMATS_PAGE,
            FORMATS,
            f"take {more[0]} and {more[1]} % longer than nvfp4 at 32k, and {more[2]} and {more[3]} %",
        ),
    ]


def _drafts() -> str:
    plain, row = _quantspec()
    body = []
    for of_gamma in row["gammas"]:
        cell = one(row["grid"], gamma=of_gamma["gamma"], acceptance=ACCEPTANCE)
        parts = [f"{of_gamma[key]:.{digits}f}" for key, digits in (("draft_ms", 2), ("verify_ms", 2), ("flush_ms", 2))]
        body.append([str(of_gamma["gamma"]), *parts, f"{cell['ms']:.2f}", f"{plain / cell['ms']:.2f}"])
    return grid("| γ | one draft, ms | verification, ms | flushes per token, ms | ms a token | x |", body)


def _step_texts() -> list[Text]:
    batch = one(benchmark_rows(BATCH))
    old = max(
        some(benchmark_rows(f"{FOLDER}/whole/batch_8k_logquant.json"), status="ok"), key=lambda row: int(row["batch"])
    )
    assert old["batch"] == batch["batch"], BATCH
    low, high = (1e3 * batch["tpot_s"][key] for key in ("p10", "p90"))
    ceilings = [load_result_json(file)["ceiling"]["GB_s"] for file in (f"{FOLDER}/whole/tpot.json", STEPS)]
    name, setting = "kivi int4, G 128", "kivi:int4_g128"
    other, other_fp16 = (median(one(benchmark_rows(LATER), setting=key)) for key in (setting, "fp16"))
    changes = [100 * (median(again(name, 32)) / before - 1) for before in (median(step(setting, 32)), other)]
    third, third_fp16 = (
        median(one(benchmark_rows(f"{FOLDER}/formats/tpot_7b.json"), setting=key)) for key in (setting, "fp16")
    )
    fp16, int4, int2, logquant = ([median(again(name, thousands)) for thousands in (32, 128)] for name in AGAIN)
    return [
        Text(STEPS_PAGE, STEPS, f"plain reads reach {ceilings[1]} GB/s there and {ceilings[0]} on the machine before"),
        Text(STEPS_PAGE, STEPS, f"At 32k int4 takes {changes[0]} % longer than before, and {changes[1]} % longer than"),
        Text(STEPS_PAGE, LATER, f"longer than its {other} ms in"),
        Text(STEPS_PAGE, LATER, f"{load_result_json(LATER)['ceiling']['GB_s']} GB/s; fp16 took"),
        Text(STEPS_PAGE, FORMATS_PAGE, f"a third machine had {third} beside fp16's {third_fp16}."),
        Text(STEPS_PAGE, BATCH, f"{median(batch)} ms (10 to 90 %: {low} to {high}) in place of {median(old)}"),
        Text(
            STEPS_PAGE,
            BATCH,
            f"The roofline has {roof(batch)}, which is {100 * roof(batch) / median(batch)} %",
        ),
        Text(
            STEPS_PAGE, BATCH, f"the bytes that the file counts as read come at {100 * batch['read_share']} % of 4.69"
        ),
        Text(
            STEPS_PAGE,
            LATER,
            f"fp16 took {other_fp16} there, int2 {median(one(benchmark_rows(LATER), setting='kivi:int2_g128'))})",
        ),
        Text(STEPS_PAGE, BATCH, f"{batch['tokens_per_s']} tokens/s with the prompts' {batch['prefill_s']} s"),
        Text(STEPS_PAGE, BATCH, f"it used {batch['energy']['W']} W of 700"),
        Text(PAGE, STEPS, f"fp16 {fp16[0]} and {fp16[1]} ms, kivi int4 G 128 {int4[0]} and {int4[1]}"),
        Text(PAGE, STEPS, f"kivi int2 {int2[0]} and {int2[1]}, logquant W 64 {logquant[0]} and {logquant[1]}"),
        Text(PAGE, BATCH, f"batch of 144 at 8k takes {median(batch)} ms"),
        Text(
            SPEED,
            STEPS,
            f"a week later: fp16 {fp16[0]} and {fp16[1]} ms, int4 in groups of 128 {int4[0]} and {int4[1]}",
        ),
        Text(SPEED, STEPS, f"int2 {int2[0]} and {int2[1]}, logquant {logquant[0]} and {logquant[1]}"),
    ]


def _nuq_texts() -> list[Text]:
    row, profiled, old = (one(benchmark_rows(file)) for file in (NUQ, NUQ_PROFILE, KVQUANT))
    low, high, last = (1e3 * row["tpot_s"][key] for key in ("p10", "p90", "p99"))
    profile = profiled["profile"]
    kernels = {kernel["name"]: kernel for kernel in profile["kernels"]}
    decode, insertion = kernels["decode"], kernels["quantize_token"]
    assert decode["calls"] == insertion["calls"] == 32, NUQ_PROFILE
    alone = one(benchmark_rows(NUQ_ATTENTION), shape="7b", bits=3, tokens=32 * KI)["us"]
    each, share = 1e3 * decode["ms"] / 32, 100 * row["read_share"]
    fp16, int4 = (median(again(name, 32)) for name in ("fp16", "kivi int4, G 128"))
    ms, more = profile["ms"], 100 * (median(row) / int4 - 1)
    return [
        Text(NUQ_PAGE, KVQUANT, f"captured and compiled: **{median(old)} ms a token**"),
        Text(
            NUQ_PAGE, NUQ, f"**{median(row)} ms a token** at 32k with 3 bits (10 to 90 %: {low} to {high}, p99 {last})"
        ),
        Text(NUQ_PAGE, NUQ, f"in place of {median(old)}; {share} % of 4.69 TB/s, roof {roof(row)}"),
        Text(NUQ_PAGE, STEPS, f"fp16 took {fp16} ms and kivi int4 G 128 {int4} on the same GPU"),
        Text(
            NUQ_PAGE,
            STEPS,
            f"takes {100 * (1 - median(row) / fp16)} % less time than fp16, and {more} % more than int4",
        ),
        Text(NUQ_PAGE, NUQ_PROFILE, f"a step would take some {median(row) - 32e-3 * (each - alone)} ms"),
        Text(NUQ_PAGE, NUQ_PROFILE, f"{profile['busy_ms']} ms busy: linear layers {ms['linear']}, attention"),
        Text(NUQ_PAGE, NUQ_PROFILE, f"attention {decode['ms']} ({each} µs a layer, alone {alone})"),
        Text(NUQ_PAGE, NUQ_PROFILE, f"insertion {insertion['ms']} ({1e3 * insertion['ms'] / 32} µs a layer), and"),
        Text(NUQ_PAGE, NUQ_PROFILE, f"and {ms['elementwise'] - insertion['ms']} for norms"),
        Text(PAGE, NUQ, f"takes {median(row)} ms at 32k with 3 bits, captured and compiled"),
        Text(SPEED, NUQ, f"3 bits and 1 % outliers takes {median(row)} ms at 32k"),
        Text(CHANGES, NUQ, f"A whole step at 32k takes {median(row)} ms in place of {median(old)}"),
    ]


def _draft_texts() -> list[Text]:
    plain, row = _quantspec()
    at = one(row["gammas"], gamma=DRAFTED)
    measured = one(row["measured"], acceptance=ACCEPTANCE, gamma=DRAFTED)
    grid_ms = one(row["grid"], gamma=DRAFTED, acceptance=ACCEPTANCE)["ms"]
    tokens = one(row["grid"], gamma=DRAFTED, acceptance=ACCEPTANCE)["tokens"]
    asked = tokens * plain / 1.9
    bound = predicted("llama3.1-8b", f"quantspec:gamma={DRAFTED}:draft_weights=int4_all", 128 * KI, 1, 2)
    exact = predicted("llama3.1-8b", "fp16", 128 * KI, 1, 2)
    assert bound.draft_s is not None and bound.verify_s is not None
    per_token = 1e3 * bound.tpot_s
    over = at["draft_ms"] / 1e3 / bound.draft_s, at["verify_ms"] / 1e3 / bound.verify_s
    return [
        Text(DRAFTS_PAGE, DRAFTS, f"γ=auto gave {row['auto']['ms']} ms."),
        Text(DRAFTS_PAGE, DRAFTS, f"plain decoding takes {plain} ms a token"),
        Text(
            DRAFTS_PAGE,
            DRAFTS,
            f"{plain / grid_ms} times as fast by these times, and {plain / measured['ms']} measured",
        ),
        Text(
            DRAFTS_PAGE,
            DRAFTS,
            f"({measured['ms']} ms, blocks of {min(measured['blocks_ms'])} to {max(measured['blocks_ms'])}",
        ),
        Text(DRAFTS_PAGE, DRAFTS, f"three drafts take {3 * at['draft_ms']} ms and the verification {at['verify_ms']}"),
        Text(DRAFTS_PAGE, DRAFTS, f"a round yields {tokens} tokens, and would have to take {asked} ms for 1.9"),
        Text(
            DRAFTS_PAGE,
            DRAFTS,
            f"a draft would take {1e3 * bound.draft_s} ms and the verification {1e3 * bound.verify_s}",
        ),
        Text(DRAFTS_PAGE, DRAFTS, f"{per_token} ms a token, {plain / per_token} times as fast as plain decoding was"),
        Text(DRAFTS_PAGE, DRAFTS, f"and {exact.tpot_s / bound.tpot_s} times as fast as plain decoding at that rate"),
        Text(DRAFTS_PAGE, DRAFTS, f"the expected gain is {exact.expected_tpot_s / bound.expected_tpot_s}."),
        Text(DRAFTS_PAGE, DRAFTS, f"which takes {over[0]} times its bound; the verification takes {over[1]} times."),
        Text(SPEED, DRAFTS, f"A later run of 8B at 128k, on another machine, gave {plain / measured['ms']}x"),
    ]


def _in_place_texts() -> list[Text]:
    def without(model: str) -> Row:
        rows = benchmark_rows(f"{PAPERS}/timed_{model}_44.7gib.json")
        return one([row for row in rows if "reorder=false" in row["setting"]])

    def whole(model: str) -> Row:
        rows = benchmark_rows(f"{PAPERS}/table5_{model}.json")
        return one([row for row in rows if row["setting"].startswith("cocktail") and "search" not in row["setting"]])

    pairs = [(without(model), whole(model)) for model in IN_PLACE]
    assert all(row["path"] == "in_place" and row["stepping"] == "graph, compiled" for row, _ in pairs), PAPERS
    times = ", ".join(f"{median(row)} ms in place of {median(other)}" for row, other in pairs)
    longer = sorted(100 * (median(row) / median(other) - 1) for row, other in pairs)
    peaks = sorted(
        100
        * (
            max(row["peak"]["prefill"], row["peak"]["decode"]) / max(other["peak"]["prefill"], other["peak"]["decode"])
            - 1
        )
        for row, other in pairs
    )
    return [
        Text(PAPERS_PAGE, PAPERS, f"a step takes {times} (Llama2-7B, Llama2-13B, Mistral-7B, LongChat-7B)"),
        Text(PAPERS_PAGE, PAPERS, f"{longer[0]} to {longer[-1]} % longer with module II left out, and memory"),
        Text(PAPERS_PAGE, PAPERS, f"memory {peaks[0]} to {peaks[-1]} % larger"),
        Text(CHANGES, PAPERS, f"steps take {longer[0]} to {longer[-1]} % longer than with module II"),
    ]
