"""Sentences on a trained model that follow from the files of its stages by rules.

- Of two formats the one with the smaller KL divergence is *closer to fp16* where the 95 % interval of the paired
  difference over windows excludes 0; else they *cannot be told apart* (:func:`order`). Of the bundled model, whose file
  has no figures of single prompts, two are ordered where their intervals do not overlap.
- A format *breaks* at the smallest factor of outliers at which its KL divergence is at least :data:`BROKEN` times that
  without outliers, if the interval of the difference excludes 0 there (:func:`breaks_at`).
- A format loses at most a share of perplexity if the upper end of its interval is no more on any text and context of
  the file (:func:`most_lost`); formats that were not measured on all of them are left out.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from typing import Any, Literal

from experiments.formats import which
from experiments.formats.grid import TAILS, Tail, line_key
from experiments.formats.which import bits
from experiments.real.fold import by_name, difference, short
from experiments.real.stages import LINES
from experiments.stored import some

Line = Mapping[str, Any]
Order = Literal["first", "second", "open"]
#: a layer in the middle of the model
SHAPE = replace(which.SHAPE, query_heads=9, heads=3, channels=64, layer=15, layers=30)
#: pairs that the page compares, by subject: two quantizers, and the exact tokens of both
PAIRS: tuple[tuple[str, str, str, Tail], ...] = (
    ("8 bits", "int8 per token", "fp8", "open"),
    ("8 bits", "q8_0, rotated", "int8 per token", "open"),
    ("A rotation, with a scale per token", "int4 per token, rotated", "int4 per token", "open"),
    ("A rotation, with groups of 32 channels", "q4_0, rotated", "q4_0, not rotated", "open"),
    ("4 bits", "kivi int4 G32", "q4_0, rotated", "wide"),
    ("4 bits", "kivi int4 G32", "KVarN k4v4", "wide"),
    ("4 bits", "kivi int4 G32", "TurboQuant 4 bits", "wide"),
    ("4 bits", "kivi int4 G32", "int4 per token, rotated", "wide"),
    ("4 bits", "kivi int4 G32", "vLLM int4 per token", "wide"),
    ("Uneven levels", "iq4_nl, rotated", "q4_0, rotated", "open"),
    ("e2m1 codes", "nvfp4 4over6", "nvfp4", "open"),
    ("e2m1 codes", "q4_0, rotated", "nvfp4", "open"),
    ("3 bits", "KVarN k4v2", "TurboQuant 3 bits", "wide"),
    ("2 bits", "KVarN k2v2", "kivi int2 G32", "wide"),
    ("2 bits", "kivi int2 G32", "kivi int2 G128", "wide"),
    ("2 bits", "kivi int2 G32", "OSCAR int2", "own"),
)
#: classes of formats by packed bits an element, scales included: name, and the fewest bits
CLASSES = (("8 bits", 7.0), ("6 bits", 5.5), ("4 bits", 4.0), ("3 bits", 3.2), ("2 bits", 0.0))
#: name of a quantizer -> its line as its authors ship it: with their exact tokens, or with none if they have none
SHIPPED = {setting.name.partition(" | ")[0]: setting.name for setting in reversed(LINES)}
#: shares of perplexity that a reader may be ready to lose
LOSSES = (0.01, 0.1)
#: times the KL divergence without outliers at which a format is broken
BROKEN = 2.0
#: of a pair that is told apart on this model and not on the bundled one
UNTOLD = " `tiny` does not tell them apart."
#: thousandths of a nat
MILLI = 1000.0


@cache
def packed_bits(setting: str) -> float:
    """Return the bits per packed element of a setting in this model's heads, scales included."""
    return bits(setting, SHAPE)


def order(low: float, high: float) -> Order:
    """Return which of two is smaller by the interval of first less second, or that they cannot be told apart."""
    return "first" if high < 0 else "second" if low > 0 else "open"


def order_of_intervals(first: Mapping[str, float], second: Mapping[str, float]) -> Order:
    """Return which of two is smaller, each with an interval of its own."""
    return "first" if first["high"] < second["low"] else "second" if second["high"] < first["low"] else "open"


def order_of_runs(first: Line, second: Line) -> Order:
    """Return which of two runs over the same windows is closer to fp16; with one window, that none is."""
    return order(*(difference(first, second)[1] or (-1.0, 1.0)))


def columns_of(whole: Line) -> list[str]:
    """Return the names of the runs of a stage's file; comparisons rest on the first."""
    return list(dict.fromkeys(name for line in whole["lines"] for name in line["runs"]))


def quantizer_of(line: Line) -> str:
    """Return the name of a line without its exact tokens."""
    name: str = line["name"].partition(" | ")[0]
    return name


def lines_of(whole: Line, tail: Tail | None) -> list[Line]:
    """Return the lines with these exact tokens, None: as shipped; by bits, most first, and then by KL divergence.

    fp16 is left out.
    """
    column = columns_of(whole)[0]
    known = [line for line in whole["lines"] if line["family"] != "fp16"]
    if tail is None:
        chosen = [line for line in known if line["name"] == SHIPPED.get(quantizer_of(line))]
    else:
        chosen = [line for line in known if line["name"].endswith(f" | {tail}")]

    def rank(line: Line) -> tuple[float, float]:
        run = line["runs"].get(column)
        return -packed_bits(line["setting"]), float(run["kl"]["value"]) if run else math.inf

    return sorted(chosen, key=rank)


def milli(nats: float) -> str:
    """Return a KL divergence in thousandths of a nat."""
    return short(MILLI * nats)


def listed(names: Sequence[str]) -> str:
    """Return names in a row, as code."""
    texts = [f"`{name}`" for name in names]
    return texts[0] if len(texts) == 1 else f"{', '.join(texts[:-1])} and {texts[-1]}"


def short_sentences(whole: Line, tiny: Sequence[Line]) -> list[str]:
    """Return a line for each class of bits, and what may be had for a share of perplexity."""
    out, above = [], math.inf
    for name, least in CLASSES:
        texts = []
        for tail, words in ((None, "As shipped"), ("wide", f"With {TAILS['wide']} exact tokens")):
            inside = [line for line in lines_of(whole, tail) if least <= packed_bits(line["setting"]) < above]  # type: ignore[arg-type]
            measured = [line for line in inside if columns_of(whole)[0] in line["runs"]]
            if len(measured) > 1:
                texts.append(f"{words}, {closest_text(measured, columns_of(whole)[0], tiny)}")
        above = least
        if texts:
            out.append(f"- **{name}.** {' '.join(texts)}")
    return out + [text for share in LOSSES if (text := loss_text(whole, share))]


def closest_text(lines: Sequence[Line], column: str, tiny: Sequence[Line]) -> str:
    """Return which of some lines is closest to fp16, which cannot be told apart from it, and which is farthest."""
    ranked = sorted(lines, key=lambda line: float(line["runs"][column]["kl"]["value"]))
    best, worst = ranked[0], ranked[-1]
    runs = {quantizer_of(line): line["runs"][column] for line in ranked}
    first = quantizer_of(best)
    tied = [name for name, run in runs.items() if name != first and order_of_runs(runs[first], run) != "first"]
    flips = 100 * runs[first]["flips"]["value"]
    text = f"`{first}` is closest to fp16: KL {milli(runs[first]['kl']['value'])}, {flips:.1f} % flips"
    if tied:
        text += f"; {listed(tied)} cannot be told apart from it"
    if quantizer_of(worst) not in tied:
        text += f"; `{quantizer_of(worst)}` is farthest ({milli(worst['runs'][column]['kl']['value'])})"
    return f"{text}.{closest_on_tiny(best, [line for line in ranked if quantizer_of(line) not in tied], tiny)}"


def closest_on_tiny(best: Line, others: Sequence[Line], tiny: Sequence[Line]) -> str:
    """Return which of the lines that are farther on this model are closer on the bundled one; empty without any."""
    own = small_line(best, tiny)
    closer = [
        quantizer_of(line)
        for line in others
        if own and (small := small_line(line, tiny)) and order_of_intervals(small["kld"], own["kld"]) == "first"
    ]
    return (
        f" `tiny` says otherwise: there {listed(closer)} {'is' if len(closer) == 1 else 'are'} closer."
        if closer
        else ""
    )


def small_line(line: Line, tiny: Sequence[Line]) -> Line | None:
    """Return the same line of the bundled model; None if that has none."""
    name, _, tail = line["name"].partition(" | ")
    return next(iter(some(tiny, name=name, tail=tail)), None)  # type: ignore[arg-type]


def most_lost(line: Line) -> float | None:
    """Return the largest loss of perplexity over a line's runs, as a share of fp16's; None before it is known.

    It is the upper end of the 95 % interval.
    """
    known = [run["loss"] for run in line["runs"].values() if run.get("loss")]
    ends = [loss["value"] if loss["high"] is None else loss["high"] for loss in known]
    return math.expm1(max(ends)) if ends and len(ends) == len(line["runs"]) else None


def loss_text(whole: Line, share: float) -> str:
    """Return which formats as shipped lose at most a share of perplexity with the fewest bits; empty without any.

    Formats that were not measured on every text and context are left out.
    """
    count = len(columns_of(whole))
    known = [line for line in lines_of(whole, None) if len(line["runs"]) == count]
    kept = [line for line in known if (lost := most_lost(line)) is not None and lost <= share]
    if not kept:
        return ""
    fewest = packed_bits(kept[-1]["setting"])
    names = [quantizer_of(line) for line in kept if packed_bits(line["setting"]) == fewest]
    return (
        f"- **At most {100 * share:.0f} % more perplexity** by the upper end of the interval, on each text and context "
        f"measured: as shipped, with the fewest bits, {listed(names)} ({fewest:.3g} bits)."
    )


def pair_sentences(whole: Line, tiny: Sequence[Line]) -> list[str]:
    """Return a line for each subject of :data:`PAIRS` whose formats have been measured."""
    column, by_subject = columns_of(whole)[0], dict[str, list[tuple[str, str]]]()
    for subject, one, two, tail in PAIRS:
        lines = [by_name(whole, line_key(name, tail)) for name in (one, two)]
        runs = [line.get("runs", {}).get(column) for line in lines]
        if runs[0] and runs[1]:
            small = [small_line(line, tiny) for line in lines]
            on_tiny = order_of_intervals(small[0]["kld"], small[1]["kld"]) if small[0] and small[1] else None
            said = order_of_runs(*runs)
            texts = compared((one, two), runs, said), beside((one, two), said, on_tiny)
            by_subject.setdefault(subject, []).append(texts)
    out = []
    for subject, both in by_subject.items():
        if len(both) > 1 and all(text == UNTOLD for _, text in both):
            both = [(text, "") for text, _ in both] + [(" `tiny` does not tell any of these apart.", "")]
        out.append(f"- **{subject}.** {' '.join(''.join(texts).strip() for texts in both)}")
    return out


def compared(names: tuple[str, str], runs: Sequence[Line], said: Order) -> str:
    """Return the sentence on one pair: which is closer to fp16, and by how much."""
    best, worst = (1, 0) if said == "second" else (0, 1)
    mean, interval, count = difference(runs[best], runs[worst])
    gap = f"difference {milli(mean)}, " + (" to ".join(map(milli, interval)) if interval else f"n = {count}")
    values = [milli(run["kl"]["value"]) for run in runs]
    if said == "open":
        return f"`{names[0]}` ({values[0]}) and `{names[1]}` ({values[1]}) cannot be told apart ({gap})."
    return (
        f"`{names[best]}` is closer to fp16 than `{names[worst]}`: KL {values[best]} against {values[worst]} ({gap})."
    )


def beside(names: tuple[str, str], said: Order, tiny: Order | None) -> str:
    """Return where the bundled model says otherwise; empty where it says the same or nothing."""
    if tiny is None or tiny == said or said == "open":
        return ""
    if tiny == "open":
        return UNTOLD
    return f" `tiny` says otherwise: there `{names[0 if tiny == 'first' else 1]}` is closer."


def breaks_at(line: Line, columns: Sequence[str]) -> str | None:
    """Return the first column at which a line is broken, the first being that without outliers; None if at none."""
    base = line["runs"].get(columns[0])
    for column in columns[1:]:
        run = line["runs"].get(column)
        if base and run and run["kl"]["value"] >= BROKEN * base["kl"]["value"] and order_of_runs(base, run) == "first":
            return column
    return None


def broken_in(whole: Line) -> dict[str, str | None]:
    """Return where each quantizer of a file breaks, None: it holds; without those that are not known to hold."""
    columns = columns_of(whole)
    known = {
        quantizer_of(line): (line, breaks_at(line, columns)) for line in whole["lines"] if line["family"] != "fp16"
    }
    return {name: at for name, (line, at) in known.items() if at or {columns[0], columns[-1]} <= line["runs"].keys()}


def break_sentences(whole: Line, tiny: Line | None) -> list[str]:
    """Return which formats hold up to the largest factor, which break where, which pairs turn round, and on `tiny`."""
    columns = columns_of(whole)
    lines = {quantizer_of(line): line for line in whole["lines"] if line["family"] != "fp16"}
    broken = broken_in(whole)
    out = []
    for column in (None, *reversed(columns[1:])):
        names = [name for name, own in broken.items() if own == column]
        if names:
            head = f"Hold up to {columns[-1]}" if column is None else f"Break at {column}"
            out.append(
                f"- **{head}**: {'; '.join(moved(lines[name], column or columns[-1], columns[0]) for name in names)}."
            )
    pairs = turned(lines, columns)
    if pairs:
        texts = [f"`{before}` is closer at {columns[0]}, `{after}` at {columns[-1]}" for before, after in pairs]
        out.append(f"- **The order turns round**: {'; '.join(texts)}.")
    if tiny:
        small = broken_in(tiny)
        other: dict[str | None, list[str]] = {}
        for name, own in broken.items():
            if name in small and small[name] != own:
                other.setdefault(small[name], []).append(name)
        texts = [
            f"{listed(names)} {'hold' if column is None else 'break'}{'s' if len(names) == 1 else ''}"
            f"{'' if column is None else f' at {column}'}"
            for column, names in other.items()
        ]
        if texts:
            out.append(f"- **`tiny` says otherwise**: there {', '.join(texts)}.")
    return out


def moved(line: Line, column: str, first: str) -> str:
    """Return how far a line's KL divergence is from that without outliers."""
    values = [line["runs"][name]["kl"]["value"] for name in (first, column) if name in line["runs"]]
    return f"`{quantizer_of(line)}` ({' to '.join(map(milli, values))})"


def turned(lines: Mapping[str, Line], columns: Sequence[str]) -> list[tuple[str, str]]:
    """Return the pairs of :data:`PAIRS` whose order at the last column is the opposite of that at the first.

    Of each, the one that is closer to fp16 at the first column comes first.
    """
    out = []
    for _, *names, _ in PAIRS:
        runs = [[lines[name]["runs"].get(column) for name in names if name in lines] for column in columns]
        ends = [order_of_runs(*both) if len(both) == 2 and all(both) else "open" for both in (runs[0], runs[-1])]
        if set(ends) == {"first", "second"}:
            before, after = (names[0 if end == "first" else 1] for end in ends)
            out.append((before, after))
    return out
