"""The command line of ``python -m kvbench.tune``."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kvbench.bench.choices import nonnegative_number, positive, positive_number
from kvbench.cli.compose import Composer
from kvbench.config.run_config import RunConfig
from kvbench.errors import ConfigError, KvbenchError
from kvbench.tune.exports import EXPORTS, forms_in
from kvbench.tune.space import DEFAULT, Space, check_formats, layer_map, sides_of
from kvbench.util import atomic
from kvbench.util.door import reporting
from kvbench.util.progress import say
from kvbench.util.requirements import check_writable

#: overrides that stand where the command line has none for the same key
DATA = ("model=tiny", "method=engine", "dataset=fidelity", "dataset.window=640", "dataset.prefill=512",
        "dataset.per_document=null", "logger=none")  # fmt: skip
#: folder of the folders of results
OUT = Path("results/tune")
#: names of ``--search``; the searches themselves need numpy
NAMES = ("adaptive", "greedy-kl", "uniform", "ends", "random")


@reporting("interrupted; the same command goes on where this one stopped")
def main(argv: Sequence[str] | None = None) -> int:
    """Run ``python -m kvbench.tune``, and return the exit status; errors are printed to standard error."""
    arguments = tune_parser().parse_args(sys.argv[1:] if argv is None else argv)
    if arguments.recipe is not None:
        print("\n".join(exported(read_recipe(arguments.recipe), arguments.export or ["kvbench"])))
        return 0
    print(_tuned(arguments))
    return 0


def tune_parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m kvbench.tune",
        description="Search a cache format for each layer, keys and values apart, that loses least under a budget: KL "
        "divergence from the exact cache on texts or answers. The same command goes on after an interruption.",
    )
    add = parser.add_argument
    add("words", nargs="*", metavar="KEY=VALUE", help=f"overrides as for python -m kvbench (default: {' '.join(DATA)})")
    aim = parser.add_mutually_exclusive_group()
    aim.add_argument(
        "--bits", type=positive, metavar="X", help="budget: bits an element of keys and values (16: exact)"
    )
    aim.add_argument("--bytes", type=positive, metavar="N", help="budget: bytes a token, all layers together")
    aim.add_argument("--kl", type=positive, metavar="NATS", help="fewest bits with at most this mean KL divergence")
    add("--search", choices=NAMES, default="adaptive", help="how (default: %(default)s)")
    add("--budget", type=positive_number, default=120, metavar="N", help="evaluated settings (default: %(default)s)")
    add("--formats", nargs="+", default=list(DEFAULT), metavar="FORMAT", help=f"default: {' '.join(DEFAULT)}")
    add("--tie", type=positive_number, default=1, metavar="N", help="layers in a row that share a format (default: 1)")
    add(
        "--windows", type=positive_number, default=16, metavar="N", help="windows or prompts to search on (default: 16)"
    )
    add(
        "--held-out", type=nonnegative_number, default=16, metavar="N",
        help="further ones for the result's figures (default: 16)",
    )  # fmt: skip
    add(
        "--together", type=positive_number, default=4, metavar="N",
        help="windows that are scored at once, after which a recipe may be stopped (default: 4)",
    )  # fmt: skip
    add("--seed", type=nonnegative_number, default=0, metavar="N", help="seed of the search (default: 0)")
    add(
        "--out",
        type=Path,
        metavar="DIR",
        help="folder for recipe.json and evaluations.jsonl (default: results/tune/MODEL)",
    )
    add(
        "--export", nargs="+", choices=tuple(EXPORTS), metavar="ENGINE", help=f"show the flags of: {', '.join(EXPORTS)}"
    )
    add("--recipe", type=Path, metavar="FILE", help="show the exports of a recipe.json, without a search")
    return parser


def exported(forms: Sequence[str], engines: Sequence[str]) -> list[str]:
    """Return the flags of engines for the form of each layer; the only engine's refusal is raised, others are shown."""
    lines = []
    for engine in engines:
        try:
            text = EXPORTS[engine](forms)
        except KvbenchError as error:
            if len(engines) == 1:
                raise
            text = str(error).partition("\n")[0]
        lines.append(f"{engine}: {text}")
    return lines


def read_recipe(path: Path) -> list[str]:
    """Return the form of each layer of a ``recipe.json``.

    Raises:
        KvbenchError: it cannot be read, is not one, or names an unknown format.
    """
    try:
        return forms_in(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, RecursionError) as error:
        raise KvbenchError(f"{path}: cannot be read as a recipe: {error}\n  hint: --recipe DIR/recipe.json") from error
    except KvbenchError as error:
        raise KvbenchError(f"{path}: {error}") from error


def composed_config(words: Sequence[str], count: int, out: Path = OUT) -> RunConfig:
    """Return the checked configuration of overrides, completed by :data:`DATA`, with `count` windows or prompts.

    `out` takes the place of the folder of runs, of which nothing is read or written.
    """
    given = {word.partition("=")[0]: word.partition("=")[2] for word in words}
    place = "'{}'".format(str(out).replace("'", "\\'"))
    own = (*DATA, f"dataset.limit={count}", f"runtime.results_dir={place}")
    texts = [text for text in own if text.partition("=")[0] not in given]
    if not given.get("dataset", "fidelity").startswith("fidelity"):  # refused later, by what it is
        texts = [text for text in texts if not text.startswith("dataset.")]
    texts += words
    composer = Composer()
    composer.check(texts)
    return composer.configuration(texts)


def _tuned(arguments: argparse.Namespace) -> str:
    aims = {"--bits": arguments.bits, "--bytes": arguments.bytes, "--kl": arguments.kl}
    if not any(aims.values()):
        raise ConfigError(
            "--bits", None, "is missing: a search needs a budget", hint="--bits 5.4, --bytes N or --kl 0.01"
        )
    check_formats(arguments.formats)
    check_writable(str(arguments.out or OUT), "--out")
    config = composed_config(arguments.words, arguments.windows + arguments.held_out, arguments.out or OUT)

    from kvbench.tune.aim import Aim
    from kvbench.tune.search import run_search
    from kvbench.tune.session import Tuning, check_setting, planned_space, recipe_record
    from kvbench.tune.trials import check_optuna

    check_setting(config)
    if arguments.search == "adaptive":
        check_optuna()
    name = config.plain["model"].get("name", "model")
    out = arguments.out or OUT / str(name)
    _budget_bits(arguments, planned_space(config, arguments.formats))  # before weights are loaded and texts are read
    tuning = Tuning(config, arguments.windows, arguments.held_out, arguments.together, out / "evaluations.jsonl")
    space = tuning.space(arguments.formats, arguments.tie)
    aim = Aim(space, _budget_bits(arguments, space), arguments.kl)
    best, scores = run_search(aim, arguments.search, arguments.budget, arguments.seed,
                              lambda recipe, incumbent: tuning.evaluate(aim, recipe, incumbent))  # fmt: skip
    if best is None:
        other = "" if arguments.search == "adaptive" else ", or use --search adaptive"
        raise KvbenchError(
            f"--search {arguments.search} found no recipe under the budget in {len(scores)} evaluations.\n"
            f"  hint: raise --budget or --bits{other}"
        )
    layers, stopped = space.expand(best.recipe), sum(scored.stopped for scored in scores)
    record = recipe_record(tuning, aim, best, len(scores), arguments.search, tuning.test(layers))
    atomic.replace_file(out / "recipe.json", (json.dumps(record, indent=1) + "\n").encode())
    say(f"{len(scores)} evaluations, {tuning.evaluated} of them new, {stopped} stopped early; {out / 'recipe.json'}")
    exports = exported(layers, arguments.export or ["kvbench"])
    return "\n".join([sentence(record, best, aim, tuning.held_out), "", layer_table(layers), "", *exports])


def _budget_bits(arguments: argparse.Namespace, space: Space) -> float | None:
    """Return the budget in bits an element; None under a KL divergence. Raise ConfigError if no recipe has so few."""
    bits: float | None = arguments.bits if arguments.bytes is None else 8 * arguments.bytes / space.elements
    if bits is not None:
        space.check_budget(bits, in_bytes=arguments.bytes is not None)
    return bits


def sentence(record: dict[str, Any], best: Any, aim: Any, held_out: int) -> str:
    """Return bits and KL divergence of a recipe as a sentence: on held-out texts, if there are, and on the search's."""
    kl, error = record["kl"], record["kl"]["se"]
    spread = "" if error is None else f" ± {error:.2g}"
    texts = f"held-out texts, {best.mean:.4g} on those of the search"
    text = (
        f"{record['model']}: {record['bits']:.4g} bits an element, KL {kl['mean']:.4g}{spread} nats "
        f"(99 %: {kl['p99']:.3g}) on {texts if held_out else 'the texts of the search, none being held out'}"
    )
    if aim.kl is not None and best.mean > aim.kl:
        text += f"; no recipe that was evaluated has at most {aim.kl:g}"
    return text


def layer_table(layers: Sequence[str]) -> str:
    """Return the formats of runs of layers as lines."""
    lines = ["layers   keys          values"]
    for entry in layer_map(layers).split(","):
        span, _, form = entry.partition(":")
        keys, values = sides_of(form)
        lines.append(f"{span:<8} {keys:<13} {values}")
    return "\n".join(lines)
