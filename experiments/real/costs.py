"""What the papers' items cost on two cores, reckoned from the processor time of a few samples.

An item's runs are taken together by class: data and method. Processor time (user and system) of processes with one
thread each was measured (:mod:`experiments.real.timing`), so that neighbours on the machine hardly matter; two such
processes keep two cores busy, so that an item's hours on two cores are half its processor hours. What was not measured
is reckoned from what was (:func:`sources_of`), and the tables say so.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

from experiments.stored import markdown_table

FILE = "time.json"
#: methods of whose runs a class is measured, by data; all others are reckoned
MEASURED: Mapping[str, Sequence[str]] = {
    "gsm8k_logquant, KL": ("fp16", "hf_quantized", "logquant", "kivi"),
    "longbench_logquant/qasper": ("fp16", "hf_quantized", "kivi", "logquant"),
    "pg19@8102": ("quantspec",),
    "gsm8k_logquant": ("kivi",),
    "longbench_logquant/hotpotqa": ("fp16",),
    "perplexity/wikitext2": ("fp16", "quantspec"),
    "pg19@1024": ("fp16", "quantspec snapkv", "quantspec"),
    "longbench_logquant/qmsum": ("fp16",),
    "longbench_cocktail/qasper": ("kvquant", "cocktail"),
    "longbench_cocktail/lcc": ("fp16",),
    "pg19@4096": ("quantspec",),
    "pg19@2048": ("quantspec",),
}
#: data with short prompts, of which twice as many samples are measured
SHORT = ("gsm8k_logquant, KL", "longbench_cocktail/lcc")
#: what is reckoned from others: LongBench's sets by length of prompts and limit of answers;
#: and fp16's answers to GSM8K, as its KL has fp16's references too
LIKE: Mapping[str, str] = {
    "gsm8k_logquant | fp16": "gsm8k_logquant | kivi",
    "longbench_cocktail/qasper | fp16": "longbench_logquant/qasper | fp16",
    "longbench_cocktail/qasper | kivi": "longbench_logquant/qasper | kivi",
    "perplexity/wikitext2 | kivi": "perplexity/wikitext2 | quantspec",
    "longbench_cocktail/multi_news": "longbench_cocktail/lcc",
    "longbench_cocktail/qmsum": "longbench_logquant/hotpotqa",
    "longbench_cocktail/repobench-p": "longbench_logquant/hotpotqa",
    "longbench_cocktail/samsum": "longbench_logquant/hotpotqa",
    "longbench_cocktail/trec": "longbench_logquant/hotpotqa",
    "longbench_cocktail/triviaqa": "longbench_logquant/hotpotqa",
    "longbench_logquant/2wikimqa": "longbench_logquant/hotpotqa",
    "longbench_logquant/dureader": "longbench_logquant/hotpotqa",
    "longbench_logquant/gov_report": "longbench_logquant/qmsum",
    "longbench_logquant/lcc": "longbench_cocktail/lcc",
    "longbench_logquant/lsht": "longbench_logquant/hotpotqa",
    "longbench_logquant/multi_news": "longbench_logquant/qmsum",
    "longbench_logquant/multifieldqa_en": "longbench_logquant/qasper",
    "longbench_logquant/multifieldqa_zh": "longbench_logquant/hotpotqa",
    "longbench_logquant/musique": "longbench_logquant/hotpotqa",
    "longbench_logquant/narrativeqa": "longbench_logquant/hotpotqa",
    "longbench_logquant/passage_count": "longbench_logquant/hotpotqa",
    "longbench_logquant/passage_retrieval_en": "longbench_logquant/hotpotqa",
    "longbench_logquant/passage_retrieval_zh": "longbench_logquant/hotpotqa",
    "longbench_logquant/repobench-p": "longbench_logquant/hotpotqa",
    "longbench_logquant/samsum": "longbench_logquant/hotpotqa",
    "longbench_logquant/trec": "longbench_logquant/hotpotqa",
    "longbench_logquant/triviaqa": "longbench_logquant/hotpotqa",
    "longbench_logquant/vcsum": "longbench_logquant/qmsum",
}
#: methods that are reckoned from others
SAME: Mapping[str, str] = {
    "atom": "kivi",
    "partial_logquant": "logquant",
    "quantspec streamingllm": "quantspec snapkv",
}
#: data set (without its task) or data -> data on which all of its methods were measured
ANCHOR: Mapping[str, str] = {
    "gsm8k_logquant": "gsm8k_logquant, KL",
    "longbench_cocktail": "longbench_cocktail/qasper",
    "longbench_logquant": "longbench_logquant/qasper",
    "pg19@2048": "pg19@1024",
    "pg19@4096": "pg19@1024",
    "pg19@8102": "pg19@1024",
}
Content = Mapping[str, Any]


def key_of(data: str, method: str) -> str:
    """Return the name of a class."""
    return f"{data} | {method}"


def sources_of(key: str) -> list[str]:
    """Return the measured classes that a class is reckoned from: one, or three.

    Of three, the first is another method on the same data: the last that was measured there. It is multiplied by the
    ratio of the other two, the method and that other one on the data on which all methods were measured.
    """
    own, method = key.split(" | ")
    data, method = LIKE.get(own, own), SAME.get(method, method)
    key, measured = key_of(data, method), MEASURED.get(data, ())
    if key in LIKE or not measured or method in measured:
        return [LIKE.get(key, key)]
    anchor, base = ANCHOR.get(data) or ANCHOR.get(own.partition("/")[0], data), measured[-1]
    return [LIKE.get(one, one) for one in (key_of(data, base), key_of(anchor, method), key_of(anchor, base))]


def mean_seconds(measured: Content) -> float:
    """Return the mean processor seconds of a class's samples."""
    return fmean(sample["seconds"] for sample in measured["samples"])


def estimate(key: str, classes: Mapping[str, Content]) -> tuple[float, float] | None:
    """Return the processor seconds of the beginning of a run and of each of its samples; None if not measured.

    The beginning (model, data) is that of the same method.
    """
    sources = sources_of(key)
    if any(source not in classes for source in sources):
        return None
    first, *ratio = (classes[source] for source in sources)
    if not ratio:
        return first["start"], mean_seconds(first)
    above, below = ratio
    return above["start"], mean_seconds(first) * mean_seconds(above) / mean_seconds(below)


def item_seconds(item: Content, classes: Mapping[str, Content], key: str = "runs") -> float | None:
    """Return the processor seconds of those runs of an item that can be reckoned, or of its study; None if none can.

    A run takes its beginning and so many samples; a study the load of the model and so many prompts. Two processes
    import what they need, one does for a study. `key` is ``new`` for the runs alone that no earlier item has.
    """
    imports, load = classes["imports"]["seconds"], classes["load"]["seconds"]
    if not item["groups"]:
        study = classes.get(item["id"])
        return study and imports + load + (study["seconds"] - load) * item["n"] / study["prompts"]
    both = [(group, estimate(group["class"], classes)) for group in item["groups"]]
    parts = [group[key] * (one[0] + group["samples"] * one[1]) for group, one in both if one]
    return 2 * imports + sum(parts) if parts else None


def hours_on_two_cores(seconds: float) -> float:
    """Return the hours that two busy cores take for so many processor seconds."""
    return seconds / 2 / 3600


def reckoned(item: Content, classes: Mapping[str, Content]) -> dict[str, Any]:
    """Return an item with the seconds of its classes, its processor seconds and its hours on two cores.

    ``share`` is the share of its samples that these are of, and ``measured`` that of classes that were measured.
    """
    groups, counts = [], {"all": 0, "share": 0, "measured": 0}
    for group in item["groups"]:
        both, sources = estimate(group["class"], classes), sources_of(group["class"])
        shown = {"start": round(both[0], 2), "sample": round(both[1], 2)} if both else {}
        groups.append({**group, **shown, "from": sources})
        number = group["runs"] * group["samples"]
        counts["all"] += number
        counts["share"] += number if both else 0
        counts["measured"] += number if both and sources == [group["class"]] else 0
    seconds, new = item_seconds(item, classes), item_seconds(item, classes, "new")
    shares = {key: round(counts[key] / counts["all"], 3) if groups else 1.0 for key in ("share", "measured")}
    return {
        **item,
        "groups": groups,
        "seconds": None if seconds is None else round(seconds),
        "seconds_new": None if new is None else round(new),
        "hours": None if seconds is None else round(hours_on_two_cores(seconds), 3),
        **shares,
    }


def counts_of(whole: Content) -> dict[str, int]:
    """Return the samples that each class rests on."""
    classes = whole["classes"]
    return {name: len(one["samples"]) if "samples" in one else one.get("prompts", 1) for name, one in classes.items()}


def time_markdown(whole: Content) -> str:
    """Return the table of items, that of the classes that were measured, and what is reckoned from which of them."""
    return "\n".join(
        [
            about_text(whole),
            "",
            *items_table(whole["items"]),
            "",
            together_text(whole),
            "",
            "## Measured",
            "",
            *classes_table(whole["classes"]),
            "",
            "## Reckoned from others",
            "",
            *reckoned_lines(whole["items"]),
            "",
        ]
    )


def about_text(whole: Content) -> str:
    """Return what the tables show, on which machine, and their limits."""
    machine = whole["machine"]
    processor = f"{machine['cores']} cores of an {machine['cpu']}{' with AMX' if machine['amx'] else ''}"
    versions = f"torch {machine['torch']}, transformers {machine['transformers']}"
    return (
        "What each item of the papers takes on two cores, with n samples of each run (rows, prompts or windows; of a "
        f"smaller set all; QuantSpec's warm-up prompts are added). {processor}; {versions}; {machine['date']}.\n\n"
        f"{LIMITS}"
    )


LIMITS = (
    "Few samples were measured of each class (data and method), and most classes are reckoned from others: a figure "
    "is good for its order of size, not for its digits. How long an answer is decides much of its time, and some end "
    "early: with one or two samples the spread is unknown (the lowest and the highest of two are shown). Not counted: "
    "the census of live tensors in a run's first sample, compiling of kernels, calibration of KVQuant. Processor time "
    "grows on a busy machine too, which shares its caches and its memory: `load` is how many processes were at work, "
    "where that was noted. An item's hours are half its processor hours: two processes of one thread (`--jobs 2`). "
    "An attention study is one process, and runs on two cores beside another item."
)


def items_table(items: Sequence[Content]) -> list[str]:
    """Return the table of items."""
    body = []
    for item in items:
        runs = f"{item['runs']}{f' (+ {own} not here)' if (own := item['not_here']) else ''}" if item["groups"] else "-"
        answers = sum(group["runs"] * group["samples"] for group in item["groups"]) or "-"
        part = "part: " if item["share"] < 1 else ""
        times = ["-", "-"]
        if item["seconds"] is not None:
            times = [f"{part}{item['seconds']:,}", f"{part}{hours_text(item['hours'])}"]
        shares = [f"{100 * item[key]:.0f}" for key in ("share", "measured")]
        body.append([item["id"], str(item["n"]), runs, str(answers), *times, *shares])
    head = ["item", "n", "runs", "samples", "processor seconds", "hours on two cores"]
    return markdown_table([*head, "of its samples, %", "measured themselves, %"], body)


def hours_text(hours: float) -> str:
    """Return hours with two digits, or all before the point."""
    return f"{hours:.2g}" if hours < 9.95 else f"{hours:.0f}"


def together_text(whole: Content) -> str:
    """Return what all items take together, with runs that several of them have made once; what is not reckoned."""
    items = whole["items"]
    alone, once = (sum(item[key] or 0 for item in items) for key in ("seconds", "seconds_new"))
    lacking = sorted(
        {one for item in items for group in item["groups"] for one in group["from"] if one not in whole["classes"]}
    )
    missing = f" Not measured yet, so left out: {', '.join(f'`{name}`' for name in lacking)}." if lacking else ""
    return (
        f"Together {hours_text(hours_on_two_cores(alone))} hours, each item by itself; "
        f"{hours_text(hours_on_two_cores(once))} where runs that several items have are made once, as in one "
        f"command. Runs that are not here lack their data, an encoder or a calibration on this machine.{missing}"
    )


def classes_table(classes: Mapping[str, Content]) -> list[str]:
    """Return the table of what was measured: samples, their tokens, processor seconds."""
    body = []
    for name, one in classes.items():
        load = f"{one['load']:.0f}" if "load" in one else "-"
        if "samples" not in one:
            count = f"{one['prompts']} prompts, model included" if "prompts" in one else "once"
            body.append([name, "-", count, "-", "-", f"{one['seconds']:.1f}", "-", load])
            continue
        samples = one["samples"]
        tokens = [extent([sample[key] for sample in samples], "d") for key in ("prompt", "answer")]
        seconds = [sample["seconds"] for sample in samples]
        body.append(
            [
                name.replace("|", r"\|"), f"`{one['setting']}`", str(len(samples)), *tokens, extent(seconds, ".1f"),
                f"{one['start']:.1f}", load,
            ]
        )  # fmt: skip
    head = ["class", "setting", "samples", "prompt tokens", "answer tokens", "s a sample", "s to begin a run", "load"]
    return markdown_table(head, body, "llr")


def extent(values: Sequence[float], form: str) -> str:
    """Return values as their lowest and highest, or the one that all are."""
    low, high = format(min(values), form), format(max(values), form)
    return low if low == high else f"{low} to {high}"


def reckoned_lines(items: Sequence[Content]) -> list[str]:
    """Return a line for each way of reckoning that was taken: of which data and methods, and from what."""
    names: dict[str, dict[str, None]] = {}
    for group in (group for item in items for group in item["groups"]):
        if group["from"] != [group["class"]] and "sample" in group:
            first, *ratio = (f"`{source}`" for source in group["from"])
            text = f"{first} times {ratio[0]} over {ratio[1]}" if ratio else first
            names.setdefault(text, {})[f"`{group['class']}`"] = None
    return [f"- from {text}: {', '.join(own)}." for text, own in names.items()]
