"""The command line of ``python -m kvbench.fit``."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from kvbench.bench.choices import positive, positive_number, tokens
from kvbench.errors import ConfigError
from kvbench.fit.answer import FitRow, Wish, check_room, chosen, fit_row
from kvbench.fit.engines import ENGINES, FORMATS, LATENT, CacheFormat, Serving, command_of
from kvbench.fit.model import FitModel, read_model
from kvbench.fit.show import answer_sentence, draw_fit, fit_commands, fit_notes, fit_table
from kvbench.fit.weights import PRECISIONS
from kvbench.profiling.roofline import GPUS, Gpu, gpu_named, own_gpu
from kvbench.util.door import reporting
from kvbench.util.requirements import Package, check_packages, check_writable

#: endings of the names of plots
PLOTS = (".png", ".pdf", ".svg")


@reporting()
def main(argv: Sequence[str] | None = None) -> int:
    """Run ``python -m kvbench.fit`` and return the exit status: 1 if nothing fits, 2 for nonsense."""
    return _answer(fit_parser().parse_args(argv))


def fit_parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m kvbench.fit",
        description="Which cache formats fit a model and a card, how fast a step is, what each loses, and the flags of "
        "engines. Needs the model's config.json or GGUF file alone, and no GPU.",
    )
    add = parser.add_argument
    add("model", metavar="MODEL", help="OWNER/NAME of the hub, a folder, a preset of conf/model, or a GGUF file")
    add("--gpu", required=True, help=f"cpu (this machine, measured) or one of: {', '.join(GPUS)}")
    add(
        "--gpus",
        type=positive_number,
        default=1,
        metavar="N",
        help="GPUs that share each layer (llama.cpp: the layers)",
    )
    add("--context", type=tokens, metavar="N", help="tokens per sequence, such as 32k (default: 8k, or the model's)")
    add("--batch", type=positive_number, default=1, metavar="B", help="sequences at a time (default: 1)")
    add("--weights", choices=tuple(PRECISIONS), help="precision of the weights (default: the checkpoint's)")
    add("--weights-gb", type=positive, metavar="GiB", help="size of the weights, where it cannot be counted")
    add("--memory-gb", type=positive, metavar="GiB", help="memory of the card that a program sees, for other sizes")
    add(
        "--bandwidth-TBs", type=positive, metavar="TB/s", help="read bandwidth of a card that is not listed (--gpu own)"
    )
    add("--utilization", type=_utilization, default=0.92, help="share of the memory to use (default: 0.92, vLLM's)")
    add("--engine", choices=ENGINES, help="recommend only what this engine has (GGUF files: llama.cpp)")
    add("--formats", nargs="+", metavar="FORMAT", help=f"formats to compare (default: all): {', '.join(FORMATS)}")
    add("--json", action="store_true", help="print everything as JSON, with the commands of all formats")
    add("--plot", type=Path, metavar="FILE", help="draw time per token against context (kvbench[plot])")
    return parser


def _utilization(text: str) -> float:
    value = positive(text)
    if value > 1:
        raise argparse.ArgumentTypeError(f"{text} is not a share of the memory: at most 1")
    return value


def card_of(arguments: argparse.Namespace) -> Gpu:
    """Return the card that is asked for.

    Raises:
        ConfigError: it is not known, or its memory or bandwidth is missing.
    """
    if arguments.gpu.lower() != "own" and arguments.bandwidth_TBs is not None:
        hint = "--gpu own --memory-gb 24, or leave it out"
        raise ConfigError("--bandwidth-TBs", arguments.bandwidth_TBs, "is for a card that is not listed", hint=hint)
    kind = arguments.gpu.lower()
    if kind == "cpu":
        from kvbench.fit.stream import this_processor

        card = this_processor()
    elif kind == "own":
        missing = [option for option in ("memory_gb", "bandwidth_TBs") if getattr(arguments, option) is None]
        if missing:
            option = f"--{missing[0].replace('_', '-')}"
            hint = "--gpu own --memory-gb 24 --bandwidth-TBs 0.9"
            raise ConfigError(option, None, "is needed for a card of your own", hint=hint)
        card = own_gpu(arguments.bandwidth_TBs, 1e3, arguments.memory_gb)
    else:
        try:
            card = gpu_named(arguments.gpu)
        except ConfigError as error:
            hint = error.hint.partition("Describe")[0] + "--gpu own --memory-gb 24 --bandwidth-TBs 0.9 for another card"
            raise ConfigError("--gpu", arguments.gpu, error.problem, allowed=error.allowed, hint=hint) from None
    if arguments.memory_gb is None:
        return card
    return replace(card, memory_gib=arguments.memory_gb, usable_gib=arguments.memory_gb)


def suited(model: FitModel, names: Sequence[str] | None) -> tuple[list[CacheFormat], dict[str, str]]:
    """Return the formats that a model can have, and by name why others cannot.

    Raises:
        ConfigError: a name is not one of a format, or the model can have none of them.
    """
    unknown = next((name for name in names or () if name not in FORMATS), None)
    if unknown is not None:
        raise ConfigError("--formats", unknown, "is not a format", allowed=FORMATS)
    forms, left_out = list[CacheFormat](), dict[str, str]()
    for name, form in FORMATS.items():  # those with the most bits first, in whatever order they are asked for
        if names and name not in names:
            continue
        if model.cache is None:
            if name in LATENT:
                forms.append(form)
            elif names:
                left_out[name] = "latent attention is stored otherwise"
            continue
        try:
            form.method.suit(model.numbers)
            form.method.check(model.cache.channels)
        except ConfigError as error:
            left_out[name] = error.problem
            continue
        forms.append(form)
    if not forms:
        problem = f"cannot hold the cache of {model.name} ({'; '.join(dict.fromkeys(left_out.values()))})"
        raise ConfigError("--formats", " ".join(left_out), problem, hint="--formats fp16 fp8")
    return forms, left_out


def _answer(arguments: argparse.Namespace) -> int:
    if arguments.plot is not None:
        if arguments.plot.suffix not in PLOTS:
            raise ConfigError("--plot", arguments.plot, "is no name of a picture", allowed=PLOTS, hint="--plot fit.png")
        check_packages([Package("matplotlib", "--plot", str(arguments.plot), "run pip install 'kvbench[plot]'")])
        check_writable(str(arguments.plot), "--plot", file=True)
    card = card_of(arguments)
    model = read_model(arguments.model, arguments.weights, arguments.weights_gb)
    engine = arguments.engine or ("llama.cpp" if model.gguf else None)
    context = arguments.context or min(8192, model.longest or 8192)
    if model.longest is not None and context > model.longest:
        problem = f"is longer than the {model.longest} tokens that {model.name} was made for"
        raise ConfigError("--context", context, problem, hint=f"--context {model.longest}")
    whole = engine == "llama.cpp"  # which gives each GPU whole layers
    if not whole:
        model.check_gpus(arguments.gpus)
    elif arguments.gpus > model.layers:
        problem = (
            f"is more than the {model.layers} layers of {model.name}, of which llama.cpp gives each GPU whole ones"
        )
        raise ConfigError("--gpus", arguments.gpus, problem, hint=f"--gpus {model.layers}")
    wish = Wish(model, card, context, arguments.batch, arguments.gpus, arguments.utilization, whole)
    check_room(wish, [form for form in suited(model, arguments.formats)[0] if not engine or engine in form.flags])
    rows, left_out = fit_rows(wish, arguments.formats, arguments.weights == "fp8")
    sentence, notes = answer_sentence(wish, rows, engine), fit_notes(wish, rows, left_out)
    if arguments.weights in ("int4", "int8"):  # unlike fp8, engines do not make them of 16 bits
        notes.append(f"weights: in the commands, put a checkpoint of {model.name} in {arguments.weights} for its name")
    best = chosen(rows, engine)
    if arguments.json:
        head = {"kvbench": 1, "kind": "fit", "sentence": sentence, "best": None if best is None else best.format}
        print(json.dumps({**head, **_figures(wish), "rows": [asdict(row) for row in rows],
                          "left_out": left_out, "notes": notes}, indent=1))  # fmt: skip
    else:
        commands = [] if best is None else ["", *fit_commands(best)]
        print("\n".join([sentence, "", fit_table(rows), "", *notes, *commands]))
    if arguments.plot is not None:
        draw_fit(wish, rows, arguments.plot)
    return 0 if best is not None else 1


def fit_rows(
    wish: Wish, names: Sequence[str] | None = None, runtime_fp8: bool = False
) -> tuple[list[FitRow], dict[str, str]]:
    """Return a row for each format that the model can have, and by name why others cannot.

    `names` are the formats to compare, None for all; `runtime_fp8` is as for :func:`command_of`.

    Raises:
        ConfigError: as for :func:`suited`.
    """
    forms, left_out = suited(wish.model, names)
    rows = []
    for form in forms:
        placed = wish.placed(form)
        cached = placed.cached(form, wish.context, wish.batch)
        static = min(0.95, 0.005 + (wish.weights + cached) / wish.gpu.usable)
        at = Serving(wish.model.served, wish.context, wish.batch, wish.utilization, static, wish.gpus)
        rows.append(fit_row(placed, form, {engine: command_of(engine, form, at, runtime_fp8) for engine in ENGINES}))
    return rows, left_out


def _figures(wish: Wish) -> dict[str, Any]:
    """Return what the rows share, for JSON."""
    activations = wish.activations(wish.context, wish.batch)
    memory = {"usable": wish.gpu.usable, "budget": wish.budget, "weights": wish.weights, "activations": activations}
    shared = {"model": wish.model.name, "gpu": wish.gpu.name, "gpus": wish.gpus}
    asked = {"context": wish.context, "batch": wish.batch, "weights": wish.model.precision.name}
    return {**shared, **asked, "memory": {**memory, "left": wish.room(wish.context, wish.batch)}}
