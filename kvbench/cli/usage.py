"""The text of ``python -m kvbench --help``: all groups with their choices, one per line, and examples."""

from __future__ import annotations

import re
import shutil
import sys
import textwrap
from pathlib import Path

from kvbench.util.confdir import choice_summary, config_groups, group_options

#: fewest characters of a line of help, however narrow the terminal
NARROWEST = 40

#: order of the groups in the help, the most used first
ORDER = ("method", "quantizer", "model", "dataset", "experiment", "runtime", "logger", "launcher")

HEAD = """\
kvbench: what a KV-cache method costs in accuracy, and what it saves in memory and time.

  python -m kvbench GROUP=CHOICE ... KEY=VALUE ...

One run is one model, method, quantizer and data set. Its results go to results/runs; the same command again resumes
where it stopped.
"""

#: lines about models without a preset
ANY_MODEL = (
    "  model=OWNER/NAME  any other model of the hub, such as Qwen/Qwen3-0.6B, with its own context, "
    "dtype and chat template",
    "  model=./FOLDER    any checkpoint in a folder",
)

EXAMPLES = """\
Examples
  python -m kvbench                                             full precision, tiny model, mini data
  python -m kvbench method=kivi quantizer=int2 dataset=mini     one method at 2 bits
  python -m kvbench method=kivi method.residual=64 dataset.limit=20
  python -m kvbench --multirun method=fp16,kivi,atom            a sweep with one table at its end
  python -m kvbench --multirun setting=fp16,kivi:int4:residual=64,cocktail:encoder=bm25
                                                                a sweep in which each method has its own options
  python -m kvbench --multirun method=kivi quantizer=int2,int4 method.residual=32,64,128
  python -m kvbench method=kivi model=llama2-7b                 weights from the hub, on a GPU
  python -m kvbench method=kivi model=Qwen/Qwen3-0.6B           any model of the hub, or model=./FOLDER
  python -m kvbench method=kivi model=llama2-7b model.path=DIR  a preset with the weights of a folder
  python -m kvbench method=kivi model=llama2-7b model.weights=random   the real architecture, no download
  python -m kvbench method=kivi model=llama2-7b model.weights=int4     weights rounded to 4 bits when they are loaded

Settings
  setting=METHOD[:QUANTIZER][:KEY=VALUE]...  sets method=, quantizer= and method.KEY=; write a value with ':' or ',' in
                     brackets; kvbench.bench accepts the same strings

Options
  --help GROUP=CHOICE
                     show the options of a choice (method=cocktail, dataset=ruler, runtime=default, ...): defaults,
                     types and what they do; --help GROUP lists the choices of a group, --help decoding shows the
                     options of decoding
  --multirun, -m     run every combination of comma-separated values, one after the other; failures do not stop it;
                     hydra.sweep.dir=DIR is the folder of its record, hydra.launcher.KEY=VALUE configures the launcher
                     (Hydra's other settings are fixed); KVBENCH_MAX_JOBS=N allows more than 10000 jobs
  --with-fp16        with --multirun: also run fp16 for each model and data set, to compare the others with it
  --resume ID        run what is missing of the sweep results/sweeps/ID; the same command does so too
  --cfg job, -c job  show the whole configuration of a run without running it
  --config-dir DIR   add choices: DIR/method/foo.py, or foo.yaml with a class in DIR, defines method=foo;
                     KVBENCH_MAX_YAML_VALUES=N allows files with more than 5000 values
  --hydra-help       show the help of Hydra, which composes the configuration
  --version          print the version

Exit status: 0 if all runs are ok, 1 if one failed or ran out of memory, 2 if the command line is wrong,
130 if interrupted.
"""


def help_text(extra: Path | None = None) -> str:
    """Return the help text of ``python -m kvbench``, with every choice of each configuration group."""
    known = config_groups()
    parts = [HEAD]
    for group in (*(g for g in ORDER if g in known), *(g for g in known if g not in ORDER)):
        parts.append(group_text(group, extra))
    parts.append(
        "decoding\n  decoding.max_new_tokens, .temperature, .top_p, .top_k, .stop: how answers are generated\n"
    )
    parts.append(EXAMPLES)
    return "\n".join(parts)


def folded(text: str) -> str:
    """Break the lines of a help text that are wider than the terminal, or than the variable ``COLUMNS``.

    Text after a gap of two spaces is continued in its own column, if that column begins in the left half of the
    terminal. If there is no terminal and ``COLUMNS`` is not set, the text is returned unchanged.
    """
    width = max(NARROWEST, shutil.get_terminal_size((sys.maxsize, 24)).columns)
    lines = []
    for line in text.split("\n"):
        column = re.match(r"( *\S.*? {2,}| +|)(?=\S)", line)
        indent = len(column[0]) if column and len(column[0]) <= width // 2 else 4
        hanging = textwrap.TextWrapper(width, subsequent_indent=" " * indent, break_on_hyphens=False)
        hanging.break_long_words = False
        lines += hanging.wrap(line) if len(line) > width else [line]
    return "\n".join(lines)


def group_text(group: str, extra: Path | None = None) -> str:
    """Return the choices of a configuration group, one per line with its description."""
    choices = group_options(group, extra)
    width = max(len(choice) for choice in choices)
    lines = [f"  {group}={choice.ljust(width)}  {choice_summary(path)}".rstrip() for choice, path in choices.items()]
    return "\n".join([group, *lines, *(ANY_MODEL if group == "model" else ())]) + "\n"
