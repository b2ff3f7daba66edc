"""The answer in words, as a table, and as a plot."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from kvbench.bench.choices import short_count
from kvbench.fit.answer import CLOSE, WORTH, FitRow, Wish, chosen, measured, step_time
from kvbench.fit.engines import ENGINES, FORMATS
from kvbench.util.table import render_table

HEAD = ("format", "fits", "longest context", "largest batch", "cache GiB", "TPOT ms", "interval", "KL, nats", "flips %")
#: points of the plot for each doubling of the context
_PER_OCTAVE = 2
#: lines that tell formats of similar colours apart
_STYLES = ("-", "--", ":")


def answer_sentence(wish: Wish, rows: Sequence[FitRow], engine: str | None = None) -> str:
    """Return what to use and why, or what is too large and what to change."""
    row = chosen(rows, engine)
    asked = f"{short_count(wish.context)} tokens x {wish.batch}"
    card = wish.gpu.name if wish.gpus == 1 else f"{wish.gpus} x {wish.gpu.name}"
    others = ", ".join(other.format for other in rows if other.fits and (other.flags or not engine))
    if row is None and others:
        whys = (other.refused.get(engine or "") for other in rows if other.fits)
        why = next((f" ({reason})" for reason in whys if reason), "")
        return (
            f"Nothing that {engine or 'an engine'} has fits {asked} of {wish.model.name} on {card}{why}, but {others} "
            f"would; use {'another --engine, ' if engine else ''}other --formats, a shorter --context or a smaller "
            "--batch."
        )
    if row is None:
        far = max(rows, key=lambda row: row.longest_context)
        most = f"the longest context is {far.longest_context:,} tokens, with {far.format}"
        if not far.longest_context:
            most = f"there is no room for a token of each of {wish.batch} sequences"
        ways = ["a shorter --context", "a smaller --batch"]
        if wish.model.size is None and wish.model.precision.bits > 5:
            ways.append("--weights int4")
        forms = [FORMATS[row.format] for row in rows if (engine in row.flags if engine else row.flags)]
        if count := wish.enough_gpus(forms):
            ways.append(f"--gpus {count}")
        return f"Nothing fits {asked} of {wish.model.name} on {card}: {most}; use {', '.join(ways[:-1])} or {ways[-1]}."
    served = engine or ", ".join(name for name in ENGINES if name in row.flags)
    what = f"Use {row.format} ({served}) for {asked} of {wish.model.name} on {card}"
    at = f"{1e3 * row.tpot_s:.3g} ms a token, {1 / row.tpot_s * wish.batch:.3g} tokens/s"
    if row.format == "fp16":
        reason = "what others lose was not measured" if row.kl is None else f"no close format is {WORTH:.0%} faster"
        if len(rows) == 1:
            reason = "no other format was compared"
        return f"{what}: it fits and is exact, and {reason} ({at})."
    if row.kl is None:
        return f"{what}: it has the most bits of what fits ({at}); its loss was not measured."
    near = f"of the formats close to fp16, the closest whose time is within {WORTH:.0%} of the fastest's"
    why = near if row.kl <= CLOSE else "the closest to fp16 that fits"
    return f"{what}: {why} ({at}; KL {row.kl:.2g} nats on {measured()['fidelity']['model']})."


def interval_text(row: FitRow) -> str:
    """Return the interval of a row's time in milliseconds; without an upper end where nothing was measured."""
    low = f"{1e3 * row.tpot_low_s:.3g}"
    return f"from {low}" if row.tpot_high_s is None else f"{low} to {1e3 * row.tpot_high_s:.3g}"


def fit_table(rows: Sequence[FitRow]) -> str:
    """Return the table of all formats."""
    lines = [
        [
            row.format,
            "yes" if row.fits else "no",
            row.longest_context,
            row.largest_batch,
            row.cache_bytes / 2**30,
            1e3 * row.tpot_s,
            interval_text(row),
            "-" if row.kl is None else "reference" if FORMATS[row.format].exact else f"{row.kl:.2g}",
            None if row.flips is None else 100 * row.flips,
            *("yes" if engine in row.flags else "refused" if engine in row.refused else "-" for engine in ENGINES),
        ]
        for row in rows
    ]
    return render_table((*HEAD, *ENGINES), lines)


def fit_notes(wish: Wish, rows: Sequence[FitRow], left_out: Mapping[str, str]) -> list[str]:
    """Return what the figures rest on, a line each."""
    model, known, used = wish.model, measured(), 2**-30
    activations = wish.activations(wish.context, wish.batch)
    notes = [
        f"memory: {used * wish.gpu.usable:.4g} GiB x {wish.utilization:g}, of which weights ({model.precision.name}) "
        f"{used * wish.weights:.3g}, activations {used * activations:.2g}, left for the cache "
        f"{used * wish.room(wish.context, wish.batch):.3g}" + (f"; on each of {wish.gpus} GPUs" * (wish.gpus > 1)),
        *[
            f"{wish.gpus} GPUs: llama.cpp gives each whole layers, which work one after the other; the rows of formats "
            "that it alone has, and with --engine llama.cpp all, count so"
        ]
        * (wish.gpus > 1),
        "contexts are those of the whole batch at a time"
        + (f", up to the model's own {model.longest:,} tokens" if model.longest else ""),
    ]
    low, high = known["elsewhere"]["error"]
    reasons = {
        "measured on this card": "kvbench's steps on this card; models left out of the fit are within its interval",
        "measured on an H200, scaled": "kvbench's steps on an H200 with this card's bandwidth; published times of "
        f"other cards were {100 * low:.0f} to {100 * high:+.0f} % off. An engine's own kernels may be slower",
        "roofline only": "bandwidth and bytes: nothing like it was timed here",
    }
    for basis in dict.fromkeys(row.basis for row in rows):
        these = [row.format for row in rows if row.basis == basis]
        of = "" if len(these) == len(rows) else f" ({', '.join(these)})"
        notes.append(f"TPOT, {basis}{of}: {reasons[basis]}")
    fidelity = known["fidelity"]
    notes.append(
        f"KL and flips: {fidelity['data']}, on {fidelity['model']}; how far {model.name} is from it is unknown. "
        "-: not measured"
    )
    if model.latent:
        notes.append("latent attention (MLA): bytes are predicted, but kvbench does not run such models")
    if model.weights is not None and model.weights.routed:
        notes.append(f"experts: {model.weights.total / 1e9:.3g} billion weights, of which a step reads what it chooses")
    refused = dict[str, list[str]]()
    for row in rows:
        for engine, why in row.refused.items():
            refused.setdefault(f"{engine}: {why}", []).append(row.format)
    notes += [f"not on {wish.gpu.name}: {', '.join(names)} ({why})" for why, names in refused.items()]
    return notes + [f"not for this model: {name}: {reason}" for name, reason in left_out.items()]


def fit_commands(row: FitRow) -> list[str]:
    """Return the commands that serve a model with a format, a line per engine."""
    missing = {engine: row.refused.get(engine, f"has no {row.format}") for engine in row.commands}
    return [f"{engine}: {command or missing[engine]}" for engine, command in row.commands.items()]


def draw_fit(wish: Wish, rows: Sequence[FitRow], path: Path) -> None:
    """Draw time per token against context, for each format up to its longest context. Needs matplotlib."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 5))
    colours = matplotlib.colormaps["turbo"].resampled(len(rows))
    for index, row in enumerate(rows):
        lengths, length = list[int](), 1024.0
        while length < row.longest_context:
            lengths.append(round(length))
            length *= 2 ** (1 / _PER_OCTAVE)
        if row.longest_context:
            lengths.append(row.longest_context)
            placed = wish.placed(FORMATS[row.format])
            times = [1e3 * step_time(replace(placed, context=at), FORMATS[row.format])[0] for at in lengths]
            style = _STYLES[index % len(_STYLES)]
            axes.plot(lengths, times, style, color=colours(index), marker="o", markevery=[-1], label=row.format)
    axes.axvline(wish.context, color="grey", linewidth=0.8)
    axes.set_xscale("log", base=2)
    axes.set_xlabel(f"context, tokens (batch {wish.batch}; a dot: the longest that fits)")
    axes.set_ylabel("expected TPOT, ms")
    axes.set_title(f"{wish.model.name} on {wish.gpu.name}")
    axes.legend(fontsize=7, ncols=2)
    figure.tight_layout()
    figure.savefig(path)
    pyplot.close(figure)
