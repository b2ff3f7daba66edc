"""``python -m experiments.real [STAGE ...]``: a trained model on real text, stage by stage, into results/smollm2.

Stages: ``kl`` (all formats), ``perplexity``, ``retrieval`` (with bytes), ``outliers`` and ``items`` (the papers' tables
and figures with ``--data real``); ``floors`` compares fp16 with empty and with random answers, ``weights`` the model's
weights with those that they were rounded from, where these can be had, and ``time`` measures what a few samples of
the items take on two cores. ``eight`` is what README's second table shows of ``kl``, ``perplexity`` and ``retrieval``;
``all`` is the plan, part by part. The same command goes on where it stopped;
``--fold-only`` writes the files of what is there, ``--pages`` the tables of README and docs/which-format.md from them.
WikiText-2 and the papers' data come from ``--data-dir`` (default: KVBENCH_DATA) or the hub; without either, the texts
that come with Python are read, and every table says so.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from experiments import measured
from experiments.place import positive
from experiments.real import fold
from experiments.real.files import MODEL, default_folder, digest_of, paths_in
from experiments.real.stages import EIGHT, PYTHON, STAGES, Stage, Text, is_named, line_name
from experiments.runs import Run, identify
from kvbench.util.door import enter, reporting

#: folder of the tables, whatever is dequantized into the model
OUT = "results/smollm2"


def parse_real_options(given: Sequence[str]) -> argparse.Namespace:
    """Parse the command line."""
    parser = measured.table_parser("experiments.real", __doc__, "results/runs/real", batch=1, limit=None)
    parser.set_defaults(model=MODEL)
    add = parser.add_argument
    add("stages", nargs="*", metavar="STAGE", help=f"what to run: {', '.join(CHOICES)} (default: eight)")
    add("--data-dir", type=Path, metavar="FOLDER", help="folder of WikiText-2 and the papers' data")
    add("--pages", action="store_true", help="write the tables of README and docs from the files of results/smollm2")
    add("--plan", action="store_true", help="print the plan: what is measured in which order, at what cost")
    add("--items", nargs="+", default=[], metavar="ITEM", help="of the stage items: which (default: those of the plan)")
    add("--prompts", type=positive, metavar="N", help="of items and floors: samples per data set (default: the plan's)")
    add("--samples", type=positive, default=1, metavar="N", help="of the stage time: samples measured of each class")
    add("--short", action="store_true", help="the first text and context of a stage alone (eight has no others)")
    add("--against", metavar="MODEL", help="of weights: the model whose weights were rounded (default: the preset's)")
    add("--minutes", type=float, metavar="N", help="of the stage all: begin no further part after so many")
    arguments = parser.parse_args(given)
    arguments.stages = arguments.stages or ["eight"]
    for name in arguments.stages:
        if name not in CHOICES:
            parser.error(f"no stage {name!r}: {', '.join(CHOICES)}")
    check_chosen(parser, arguments)
    arguments.out = arguments.out or Path(
        OUT if arguments.model == MODEL else f"results/{measured.slug_of(arguments.model)}/real"
    )
    return arguments


def check_chosen(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> None:
    """End the command at an item that is not in the plan, and at a setting that no chosen stage has."""
    from experiments.real.plan import PARTS

    planned = [name for part in PARTS for name in part.items]
    if arguments.items and not {"items", "time", "all"}.intersection(arguments.stages):
        parser.error("--items needs the stage items: python -m experiments.real items --items ITEM")
    for name in arguments.items:
        if name not in planned:
            parser.error(
                f"no item {name!r} in the plan: {', '.join(planned)}; `python -m experiments` lists all others"
            )
    stages = STAGES if {"eight", "all"}.intersection(arguments.stages) else arguments.stages
    settings = [setting for name in stages if name in STAGES for setting in STAGES[name].settings]
    known = [one.name for one in EIGHT if any(is_named(setting, (one.name,)) for setting in settings)]
    measured.check_names(parser, arguments.only, list(dict.fromkeys([*known, *(one.key for one in settings)])))


CHOICES = ("eight", *STAGES, "weights", "items", "floors", "time", "all")


def texts_of(arguments: argparse.Namespace) -> list[Text]:
    """Return the texts of this machine: WikiText-2 from the folder or the hub, where it can be had, and Python's."""
    folder = arguments.data_dir or default_folder()
    path = paths_in(folder).get("perplexity/wikitext2") if folder else None
    wiki = Text("WikiText-2", "perplexity/wikitext2", path)
    run = Run(("method=fp16", f"model={arguments.model}", f"dataset={wiki.choice}"), arguments.model, wiki.choice)
    reason = "" if path else identify(run)[1]
    if reason:
        print(f"WikiText-2 cannot be had, so that Python's own texts are read: {reason}", file=sys.stderr)
    return [PYTHON] if reason else [wiki, PYTHON]


def stage_settings(stage: Stage, small: bool) -> Stage:
    """Return a stage with the settings of README's table alone, if `small`."""
    if not small or stage.settings is EIGHT:
        return stage
    names = {line_name(one.name) for one in EIGHT}
    return replace(stage, settings=tuple(setting for setting in stage.settings if setting.name in names))


def chosen_runs(
    name: str, stage: Stage, texts: Sequence[Text], arguments: argparse.Namespace
) -> tuple[dict[str, Sequence[str]], dict[str, Any]]:
    """Return the data of a stage's runs, and what its file says of them: model, texts with their digests, command.

    `name` is the stage that was asked for, which may be several.
    """
    number = arguments.limit or stage.number
    texts = texts[:1] if arguments.short else texts
    runs = dict(list(stage.data(texts, number).items())[: 1 if arguments.short else None])
    more = "" if arguments.model == MODEL else f" --model {arguments.model}"
    more += " --short" if arguments.short and name == stage.name else ""
    return runs, {
        "model": arguments.model,
        "texts": [{"name": text.name, "sha256": text.path and digest_of(Path(text.path))} for text in texts],
        "command": f"python -m experiments.real {name}{more} --limit {number}",
        "data": {name: list(map(without_paths, options)) for name, options in runs.items()},
    }


def make_stage(
    stage: Stage, texts: Sequence[Text], given: Sequence[str], arguments: argparse.Namespace, name: str
) -> int:
    """Run what is missing of a stage, write its file, and return the exit status.

    `given` is the command line of this stage alone, and `name` the stage that was asked for.
    """
    runs, about = chosen_runs(name, stage, texts, arguments)
    known = [setting for setting in stage.settings if not arguments.only or is_named(setting, arguments.only)]
    own = argparse.Namespace(**{**vars(arguments), "chosen": known, "only": [], "out": arguments.out / stage.name})
    table = measured.Table(
        "experiments.real",
        lambda _: runs,
        partial(fold.fold_stage, stage=stage, about=about),
        fold.counts_before,
    )
    return measured.make_table(table, own, [*given, "--limit", str(arguments.limit or stage.number)])


def without_paths(text: str) -> str:
    """Return an override without the folders of this machine."""
    return re.sub(r"(path[=:] ?)/\S*/", r"\1", text)


@reporting("interrupted; run the same command again to resume")
def main(argv: Sequence[str] | None = None) -> int:
    """Do what the command line says, and return the exit status: 1 if a stage failed."""
    given = list(sys.argv[1:] if argv is None else argv)
    arguments = parse_real_options(given)
    if arguments.plan:
        from experiments.real.plan import keep_plan

        return keep_plan(arguments)
    if arguments.pages:
        from experiments.real.pages import write_pages

        return write_pages(arguments.write)
    measured.check_chosen_machine(arguments)
    status = 0
    for name in arguments.stages:
        status |= _make(name, given, arguments)
    return status


def _make(name: str, given: Sequence[str], arguments: argparse.Namespace) -> int:
    from experiments.real import floors, plan, weights

    if name == "items":
        return plan.make_items(arguments)
    if name == "floors":
        return floors.make_floors(arguments)
    if name == "time":
        from experiments.real import timing

        return timing.make_time(arguments)
    if name == "all":

        def make(stage: str, size: int) -> int:
            sized = {"prompts": size} if stage == "floors" else {"limit": size}
            return _make(stage, given, argparse.Namespace(**{**vars(arguments), **sized}))

        return plan.make_parts(arguments, make)
    if name == "weights":
        stage = weights.weights_stage(arguments.model, arguments.against)
        return weights.make_weights(stage, *chosen_runs(name, stage, texts_of(arguments), arguments), arguments)
    small = name == "eight"
    names = ("perplexity", "kl", "retrieval") if small else (name,)
    texts, status = texts_of(arguments), 0
    if small:
        arguments, given = argparse.Namespace(**{**vars(arguments), "short": True}), [*given, "--short"]
    for one in names:
        again: list[Any] = [text for text in given if text not in arguments.stages]
        status |= make_stage(stage_settings(STAGES[one], small), texts, [one, *again], arguments, name)
    return status


if __name__ == "__main__":
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    raise SystemExit(enter(main))
