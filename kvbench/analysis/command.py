"""The command line ``python -m kvbench.analysis``: parsing, checks, and the run."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from kvbench.config.setting import SYNTAX, parse_setting, typed_value
from kvbench.errors import ConfigError
from kvbench.models import by_name
from kvbench.models.spec import ModelConfig
from kvbench.tasks.base import Sample, Task
from kvbench.tasks.load import load as load_task
from kvbench.tasks.work import Generate
from kvbench.util.confdir import group_options, read_choice
from kvbench.util.door import reporting
from kvbench.util.requirements import check_packages
from kvbench.util.schema import build

#: KIVI with the groups of 64 of LogQuant's experiments
_KIVI = "kivi:int2:quantizer.key.group_size=64:quantizer.value.group_size=64"
#: the four settings of LogQuant's Table 4
TABLE_4 = ("logquant", _KIVI, "logquant:evict=true", f"{_KIVI}:evict=true")
#: first word of the command line that measures channels in place of attention
OUTLIERS = "outliers"
#: groups whose keys may be set by a word of the command line
GROUPS = ("model", "dataset", "runtime")


def analysis_parser() -> argparse.ArgumentParser:
    """Return the argument parser of ``python -m kvbench.analysis``."""
    top = argparse.ArgumentParser(
        prog="python -m kvbench.analysis",
        description=(
            "Compare the attention of methods with exact attention on the prompts of a data set, without their answers."
        ),
    )
    top.add_argument(
        "words",
        nargs="*",
        metavar="KEY=VALUE",
        help="overrides as for python -m kvbench, such as model=tiny dataset=mini dataset.limit=4 runtime.device=cuda; "
        "after the word outliers, the model's largest channels are measured, and --settings is not used",
    )
    top.add_argument("--settings", nargs="+", default=list(TABLE_4), metavar="SETTING", help=SYNTAX)
    top.add_argument("--steps", type=int, default=16, help="number of decode steps per prompt (default: %(default)s)")
    top.add_argument(
        "--prompt-queries", type=int, default=0, metavar="N", help="profile the last N queries of each prompt (-1: all)"
    )
    top.add_argument("--positions", action="store_true", help="also store the probability of each position and step")
    top.add_argument("--out", type=Path, help="folder for rows.jsonl, arrays.npz, about.json and table.md")
    return top


@reporting()
def main(argv: Sequence[str] | None = None) -> int:
    """Run ``python -m kvbench.analysis``, and return the exit status; errors are printed to standard error."""
    given = list(sys.argv[1:] if argv is None else argv)
    arguments = analysis_parser().parse_args(given)
    print(run_analysis(arguments, given))
    return 0


def run_analysis(arguments: argparse.Namespace, given: Sequence[str] = ()) -> str:
    """Run the analysis, write its files if ``--out`` names a folder, and return the table as markdown.

    The files record `given`, the arguments as typed.

    Raises:
        KvbenchError: an argument is invalid, or the model or the data are unavailable.
    """
    if arguments.words[:1] == [OUTLIERS]:
        return channels(grouped(arguments.words[1:]), arguments.out)
    groups = grouped(arguments.words)
    if arguments.steps < 1:
        raise ConfigError("--steps", arguments.steps, "must be positive", allowed="whole numbers, 1 or greater")
    if arguments.prompt_queries < -1:
        raise ConfigError(
            "--prompt-queries",
            arguments.prompt_queries,
            "must be the number of the prompt's last queries to profile, or -1 for all queries",
            allowed="-1, or 0 and greater",
        )
    model: ModelConfig = build(ModelConfig, groups["model"], "model")
    model.check()
    task = load_task(groups["dataset"])
    settings = [parse_setting(text) for text in arguments.settings]
    methods = {setting.text: setting.load() for setting in settings}
    for method in methods.values():
        method.check(head_dim=model.head_dim(), max_length=model.max_length)
        check_packages(method.packages())
        method.prepare(model)
        method.ready()

    from kvbench.analysis.analyse import analyse, texts
    from kvbench.analysis.observe import Options
    from kvbench.analysis.outcome import analysis_markdown, findings, page
    from kvbench.config.run_config import RuntimeConfig
    from kvbench.models.load import load_model
    from kvbench.profiling.device import device_name
    from kvbench.results.environment import environment
    from kvbench.util.progress import say

    loaded = load_model(model, build(RuntimeConfig, groups["runtime"], "runtime"))
    prompts = texts(samples(task, loaded.tokenizer), loaded, model, arguments.steps)
    queries = None if arguments.prompt_queries == -1 else arguments.prompt_queries
    chosen = Options(steps=arguments.steps, prompt_queries=queries, positions=arguments.positions)
    outcome = analyse(loaded, prompts, methods, chosen, lambda name: say(f"{loaded.name}: {name}"))
    table = f"{analysis_markdown(outcome)}\n\n{findings(outcome)}\n"
    if arguments.out is not None:
        place = environment(str(loaded.device), device_name(loaded.device), loaded.dtypes.names())
        command = "python -m kvbench.analysis " + " ".join(given)
        outcome.save(arguments.out, {"command": command, "weights": model.weights, "environment": place})
        (arguments.out / "table.md").write_text(page(outcome, command), encoding="utf-8")
    return table


def channels(groups: dict[str, dict[str, Any]], out: Path | None) -> str:
    """Return a markdown table that shows how far a model's largest channels of keys and values exceed the others.

    `groups` are those of :func:`grouped`. The table is also written to the file `out` unless that is None.

    Raises:
        KvbenchError: an argument is invalid, or the model or the data are unavailable.
    """
    model: ModelConfig = build(ModelConfig, groups["model"], "model")
    model.check()
    task = load_task(groups["dataset"])

    from kvbench.analysis.analyse import texts
    from kvbench.analysis.largest_channels import channel_page, channel_ratios
    from kvbench.config.run_config import RuntimeConfig
    from kvbench.models.load import load_model
    from kvbench.util import atomic

    loaded = load_model(model, build(RuntimeConfig, groups["runtime"], "runtime"))
    prompts = texts(samples(task, loaded.tokenizer), loaded, model, 1)
    table = channel_page(loaded.name, channel_ratios(loaded, prompts), sum(len(prompt.ids) for prompt in prompts))
    if out is not None:
        atomic.replace_file(out, table.encode())
    return table


def grouped(words: Iterable[str]) -> dict[str, dict[str, Any]]:
    """Build ``model``, ``dataset`` and ``runtime``, nested dicts of unchecked values, from words of the command line.

    The words are ``model=NAME`` (default ``tiny``), ``dataset=NAME`` (default ``mini``) or ``GROUP.KEY=VALUE``.

    Raises:
        ConfigError: an override has another form, or the model or data set does not exist.
    """
    chosen: dict[str, Any] = {"model": "tiny", "dataset": "mini"}
    changes: dict[str, dict[str, Any]] = {group: {} for group in GROUPS}
    for word in words:
        key, assigned, text = word.partition("=")
        group, dot, name = key.partition(".")
        if not assigned or group not in GROUPS or (not dot and group not in chosen):
            raise ConfigError(
                word,
                None,
                "is not an override that the analysis accepts",
                allowed="model=NAME, dataset=NAME, model.KEY=VALUE, dataset.KEY=VALUE, runtime.KEY=VALUE",
                hint="name methods after --settings: --settings kivi:int4",
            )
        if dot:
            changes[group][name] = typed_value(text)
        else:
            chosen[group] = text
    files = group_options("dataset")
    if chosen["dataset"] not in files:
        raise ConfigError("dataset", chosen["dataset"], "no such dataset", allowed=files)
    data = read_choice(files[chosen["dataset"]])
    return {
        "model": by_name.group(chosen["model"], changes["model"]),
        "dataset": {**data, **changes["dataset"]},
        "runtime": changes["runtime"],
    }


def samples(task: Task, tokenizer: Any) -> list[Sample]:
    """Return the samples of a data set that the analysis can use, without warm-up samples.

    Raises:
        ConfigError: a sample measures something other than a generated answer, such as perplexity.
    """
    if task.needs_tokenizer:
        task.bind(tokenizer)
    drawn = [sample for sample in task.samples() if not sample.warm_up]
    other = next((type(sample.work).__name__ for sample in drawn if not isinstance(sample.work, Generate)), None)
    if other is not None:
        raise ConfigError(
            "dataset",
            drawn[0].task,
            f"asks for {other}, but the analysis needs prompts with answers",
            hint="dataset=mini, dataset=gsm8k_logquant, dataset=longbench, ...",
        )
    return drawn
