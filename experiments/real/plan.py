"""The plan of the measurements on a trained model: what, in which order, with how many samples, at what cost.

The order is that of value: what decides most claims for an hour comes first.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from experiments.data import Plan
from experiments.measured import keep_file
from experiments.place import choice
from experiments.real.files import default_folder, paths_in
from experiments.stored import markdown_table

#: hours of two cores, and minutes of an H100, that all parts together may take
HOURS, MINUTES = 40.0, 20.0
#: prompts at a time of items and floors, at most: those of GSM8K are short, those of LongBench have 7,500 tokens
BATCH = 25
#: parts that fit into those minutes
FIRST = 6


@dataclass(frozen=True)
class Part:
    """A part of the plan.

    Args:
        what: what is measured.
        stage: stage of ``python -m experiments.real``.
        items: of the stage ``items``: which.
        laptop, gpu: samples of each run on two cores, and on an H100; 0: not there.
        hours: on two cores, for `laptop` samples.
        minutes: on an H100, for `gpu` samples, with twelve processes side by side.
        why: why so many samples.
        stands_for: claims that it is a substitute for; empty: it is what the claim is about.
    """

    what: str
    stage: str
    laptop: int
    gpu: int
    hours: float
    minutes: float
    why: str
    items: tuple[str, ...] = ()
    stands_for: str = ""


_LONG = "prompts of 7,500 tokens, which the model reads in 60 s on a core"
PARTS = (
    Part(
        "perplexity of eight settings, WikiText-2 and Python's texts",
        "perplexity", 32, 148, 2.5, 1.0,
        "the pilot's Δ of kivi int4 (0.04 ± 0.07 over 4 windows) needs about 50 windows; WikiText-2 has 148",
    ),
    Part(
        "KL divergence of all formats, at 1k and 4k tokens and on Python's texts",
        "kl", 8, 64, 9.0, 12.0,
        "the pilot's 8 windows tell formats apart that differ by a third; 64 do by an eighth",
    ),
    Part(
        "KL divergence of formats by the factor of outliers, this model and tiny",
        "outliers", 8, 32, 1.6, 1.5,
        "factors of 4 change most figures by more than a third",
    ),
    Part(
        "LogQuant's attention: Figures 1 to 4 and 8, Table 4, over GSM8K and OpenBookQA prompts",
        "items", 20, 50, 2.0, 1.5,
        "as the items have it; intervals over 20 prompts of tiny already decide all their claims",
        ("logquant/table4", "logquant/figure1", "logquant/figure2", "logquant/figure3", "logquant/figure4",
         "logquant/figure8"),
    ),
    Part(
        "QuantSpec's perplexities: Tables 2 and 3",
        "items", 20, 148, 1.5, 0.5,
        "8 bits change perplexity by 0.001 in the pilot: a paired difference, which 20 windows know to 0.005",
        ("quantspec/table2", "quantspec/table3"),
    ),
    Part(
        "QuantSpec's acceptance on books by γ, context and draft: Tables 4, 6 and 7, Figure 9",
        "items", 4, 10, 12.0, 3.0,
        "the papers' ten prompts; on two cores four, of up to 8,102 tokens",
        ("quantspec/table7", "quantspec/table4", "quantspec/table6", "quantspec/figure9"),
    ),
    Part(
        "floors: fp16 against an empty answer and another row's, every data set",
        "floors", 5, 150, 2.0, 1.5,
        f"before any table of scores; sets of fewer than 100 rows stay samples ({_LONG})",
    ),
    Part(
        "GSM8K: accuracy and, beside it, KL and flips: LogQuant's Table 1 and Figure 6",
        "items", 8, 50, 3.0, 2.0,
        "accuracy is at the floor, so the claims rest on KL over fp16's own answers",
        ("logquant/table1", "logquant/figure6"),
        "claims on accuracy",
    ),
    Part(
        "retrieval and bytes of eight settings: RULER's single needle in 2,048 tokens",
        "retrieval", 16, 100, 0.6, 0.5,
        "a loss of 10 points is seen with 100 prompts",
    ),
    Part(
        "LongBench's sets with at least 100 rows: QMSum in Cocktail's Tables III and V and Figure 7",
        "items", 4, 150, 5.0, 4.0,
        f"150 rows are all that is at hand; {_LONG}",
        ("cocktail/table3", "cocktail/table5", "cocktail/figure7"),
    ),
    Part(
        "the other tables of LongBench: Cocktail's II and IV, LogQuant's 2, 3, 6 and 7",
        "items", 0, 20, 0.0, 6.0,
        "sets of 3 to 20 rows decide nothing: they are run last, and are not counted",
        ("cocktail/table2", "cocktail/table4", "logquant/table2", "logquant/table3", "logquant/table6",
         "logquant/table7"),
    ),
)  # fmt: skip


def plan_of(arguments: argparse.Namespace, limit: int | None) -> Plan:
    """Return the choices of ``python -m experiments`` that a command line asks for."""
    folder = arguments.data_dir or default_folder()
    return Plan(
        models=(arguments.model,),
        data="real",
        limit=limit,
        paths=tuple((paths_in(folder) if folder else {}).items()),
        device=arguments.device,
        batch=min(arguments.batch, BATCH),
        fold_only=arguments.fold_only,
        runs=arguments.runs,
        out=Path("results") if arguments.write else arguments.out,
        write=arguments.write,
        replace=arguments.replace,
    )


def size_of(part: Part, arguments: argparse.Namespace) -> int:
    """Return the samples of each run of a part on the machine that a command line names; 0: it is not for it."""
    return part.laptop if arguments.device in ("auto", "cpu") else part.gpu


def make_items(arguments: argparse.Namespace, parts: Sequence[Part] = PARTS) -> int:
    """Make the items of some parts, or those of ``--items`` among them, and return the exit status."""
    from experiments import reproduce, session
    from experiments.registry import chosen_items

    status = 0
    for part in parts:
        names = [name for name in part.items if not arguments.items or name in arguments.items]
        number = arguments.prompts or size_of(part, arguments)
        if names and number:
            plan = plan_of(arguments, number)
            items = session.measurable(chosen_items(names), plan)
            launcher = "joblib" if arguments.jobs > 1 else "local"
            status |= session.make_items(items, plan, launcher, arguments.jobs, arguments.fold_only)
            reproduce.follow_results(plan)
    return status


def make_parts(arguments: argparse.Namespace, make_stage: Callable[[str, int], int]) -> int:
    """Make all parts in their order until ``--minutes`` have passed, and return the exit status.

    `make_stage` makes a stage with so many samples. A part that has begun is ended; what is left is named.
    """
    begin, status = time.monotonic(), 0
    for number, part in enumerate(PARTS, start=1):
        size, spent = size_of(part, arguments), (time.monotonic() - begin) / 60
        if arguments.minutes and spent >= arguments.minutes:
            print(f"after {spent:.1f} minutes: part {number}, {part.what}, is left for the same command", flush=True)
        elif size:
            print(f"after {spent:.1f} minutes: part {number}, {part.what}", flush=True)
            status |= make_items(arguments, (part,)) if part.items else make_stage(part.stage, size)
    return status


def plan_markdown() -> str:
    """Return the plan as a page."""
    head = ["", "what", "command", "samples a run: 2 cores", "hours", "H100", "minutes", "why so many"]
    body = []
    for number, part in enumerate(PARTS, start=1):
        more = f" --items {' '.join(part.items)}" if part.items else ""
        what = f"{part.what} (substitute for {part.stands_for})" if part.stands_for else part.what
        sizes = [str(part.laptop or "-"), f"{part.hours:.1f}", str(part.gpu or "-"), f"{part.minutes:.1f}"]
        body.append([str(number), what, f"`{part.stage}{more}`", *sizes, part.why])
    hours, minutes = sum(part.hours for part in PARTS), sum(part.minutes for part in PARTS)
    first = sum(part.minutes for part in PARTS[:FIRST])
    lines = [
        "# The plan: a trained model on real text",
        "",
        *INTRODUCTION.strip().splitlines(),
        "",
        *markdown_table(head, body, "rllrrrrl"),
        "",
        f"Together {hours:.0f} hours of two cores (at most {HOURS:.0f}) and {minutes:.0f} minutes of an H100; of these",
        f"{first:.0f} are the first {FIRST} parts, and who has {MINUTES:.0f} stops there.",
        "",
        *RULES.strip().splitlines(),
    ]
    return "\n".join(lines) + "\n"


INTRODUCTION = """
Written before its runs by `python -m experiments.real --plan --write`. The model is `smollm2-135m-q4_1` (weights in 4
bits, dequantized to float32), the data are those of `KVBENCH_DATA`. A part is `python -m experiments.real STAGE`; the
order is that of value for an hour.
"""
RULES = """
- Costs are those of the pilot: 70 s of processor time for 4 windows of perplexity, 100 s for 8 windows of KL
  divergence (512 + 256 tokens); 60 s to read 7,500 tokens, and 60 to 150 ms a step. Minutes of an H100 are estimates:
  steps are eager, so that batches of 16 to 64 windows take little longer than one.
- `n` is what the pilot's paired spread asks for; a claim that stays open says how many samples would decide it.
- Floors come before verdicts on scores: a set on which fp16 is not above an empty and another row's answer is named,
  and its claims count as *at the floor*. Where a claim must do with KL divergence, flips or perplexity, it says
  *substitute*.
- Counted apart: decided, undecided for rows (more rows are not at hand), undecided for time, at the floor, not
  comparable (longer than 8,192 tokens, or times and sizes of other models).
- KVQuant and OSCAR are calibrated on WikiText-2's validation split, in float32, before the first part (`python -m
  kvbench.calibrate`, once for each method); without that their rows are named as not run.
- Sweeps share the prefill of a prompt; runs resume; each row says the machine that made it.

## Changes after the first run

- Perplexity and the KL divergence of eight settings were measured first, over all 148 and over 64 windows, on an H100
  in five minutes: fidelity reads one window's tokens step by step, so that the other formats' 70 lines would have taken
  about an hour there, not the five minutes of the estimate. They are open, as are the parts from 3 on.
- For that reason a window's last 128 tokens are compared, no longer 256: the same number of windows in half the time.
  All lines are run anew with it, first 32 windows on an H100 (4 of 4k tokens, 16 of Python's texts), then 64.
- QuantSpec's acceptance comes after the perplexities of Tables 2 and 3 with 4 prompts there too, GSM8K with 24, QMSum
  with 16 of its 150 rows: steps are eager, since no kernel for GPUs reads a cache in 32 bits.
- The first run's H100 had the sources of commit 0d94ae9c; its rows name an older one with changes.
- A second run had two H100s for 20 minutes in all, with NVIDIA's MPS: processes of one GPU then run side by side, where
  15 of them had taken turns and were slower than few. In it came the lines of 2 bits and KVQuant's, outliers over 32
  windows, floors with at most 20 rows a set, attention with 50 prompts, retrieval, and acceptance with 4 prompts.
  Processes with prompts of 8k tokens filled the GPUs' memory, so that eight of fifteen settings at 8k tokens are open,
  as are parts 8, 10 and 11, LogQuant's Figure 4, and 64 windows in place of 32.
- A third run, two H100s for a quarter of an hour: GSM8K and KL over its answers with 50 prompts, acceptance anew
  with 10, QMSum with 24 of its 150 rows, Cocktail's other sets with at most 12 rows and LogQuant's with at most 10,
  Figure 4 with 40 prompts. Its first 14 minutes, with 24 processes on two H200s, made all of Cocktail's items but
  KVQuant's rows, LogQuant's Table 1 and Figure 4, QuantSpec's acceptance at 8k, and half of LogQuant's Figure 6.
  Eight more minutes beside other training on the same machine made two runs and a calibration. Open: LogQuant's
  tables of LongBench, the rest of Figure 6, acceptance at 1k to 4k with 10 prompts, KVQuant in Cocktail's Table II.
- A fourth run, four H200s: acceptance at 1k to 4k with 10 prompts. Six of its runs were cut, and their last prompts (2
  to 7 of 13 samples each) were run on two cores of a CPU; rows name their machine. What it began of LongBench and of
  Figure 6 was lost with the machine.
- A fifth run, four H200s, 10 and 16 minutes: KL over GSM8K's answers for Figure 6, KVQuant in Cocktail's Table II, and
  LogQuant's tables of LongBench with batches of 3. Six runs, of GovReport, QMSum and Qasper, were ended or made on two
  cores of a CPU. Open: 27 runs of Table 2, which Tables 6 and 7 share, one of Table 7, GSM8K's scores in Figure 6 and
  Table 1, which are at the floor, and Cocktail's Table V without module II, whose eager steps took more than 14 minutes
  for 24 rows of QMSum. KL stays at 32 windows of 1k and 4 of 4k.
- A sixth run, one H200 with 15 processes for eight minutes: 25 of the 28 runs of LogQuant's tables that were open;
  KiVi's three of GovReport and QMSum were ended on two cores of a CPU. KL over 64 windows was begun, for 19 of the 78
  lines, and is not kept. The floors of DuReader and of passage retrieval in Chinese come from fp16's rows of Table 7.
- Part 11 has few rows, as planned, and its claims are counted all the same: with their intervals some are decided, and
  the head of the claims' table says how many of the decided ones have fewer than 30 rows. Part 5 has 50 windows in
  place of 148, and part 9 has 20, 50 and 60 prompts in place of 100 for fp16, KIVI and LogQuant.
"""


def keep_plan(arguments: argparse.Namespace) -> int:
    """Print the plan, and write ``plan.md`` with ``--write``."""
    text = plan_markdown()
    if not arguments.write:
        print(text)
        return 0
    return keep_file(text, arguments.out / "plan.md", choice(arguments), {}, None)
