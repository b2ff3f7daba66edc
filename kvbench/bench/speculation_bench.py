"""``python -m kvbench.bench speculation``: speed-up of QuantSpec over plain decode steps, both as CUDA graphs.

Weights, keys and values are random, and a draft is accepted with a given probability, so the times are real but the
text is meaningless. A case is one setting at one point (model, batch, context). For each gamma, the parts of a round
(drafts, verification, rest) are timed at one acceptance. The time per token at any other acceptance is computed from
these. The fastest gamma is then measured again, over several blocks of ``--tokens`` tokens.
"""

from __future__ import annotations

import argparse
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from kvbench.bench import speculation_grid as arithmetic
from kvbench.bench.choices import (
    add_device_options,
    add_output_options,
    argument,
    model_config,
    positive_number,
    share,
    token_count,
)
from kvbench.bench.report import Recording, Row, failed_row
from kvbench.bench.speculation_grid import case_label, shown_parts, speculation_tables
from kvbench.config.run_config import RuntimeConfig
from kvbench.config.setting import parse_setting
from kvbench.decoding import speculative
from kvbench.decoding.autoregressive import continued
from kvbench.decoding.compiled import load_joined
from kvbench.decoding.drafting import prepare_draft
from kvbench.decoding.round_times import Round, totals
from kvbench.decoding.rounds import captured_rounds
from kvbench.decoding.sampling import Sampling, Stopping
from kvbench.measure.point_figures import weight_bytes
from kvbench.measure.random_fill import fill_at_random
from kvbench.methods.base import Method
from kvbench.methods.speculation import AUTO, Speculation
from kvbench.models import shared
from kvbench.profiling.memory import release
from kvbench.profiling.timing import median
from kvbench.results.speculation import round_times

SCHEMA = 1
#: cases in the order of their worth: name, setting and stage; a stage begins when the one before has all its points
CASES = {
    "plain": ("fp16", 0),
    "quantspec": ("quantspec:draft_weights=int4_all", 0),
    "kv": ("quantspec", 1),
    "weights": ("quantspec:target=fp16:draft=full:draft_weights=int4_all", 1),
    "streamingllm": ("quantspec:draft=streamingllm:target=fp16", 1),
    "snapkv": ("quantspec:draft=snapkv:target=fp16", 1),
}
#: largest number of tokens of a round
LONGEST = max(AUTO) + 1


class SpeculationPoint(NamedTuple):
    """A point at which speculation is measured; `context`: tokens in each sequence's cache at the beginning."""

    model: str
    batch: int
    context: int


def speculation_point(text: str) -> SpeculationPoint:
    """Parse a point such as ``llama2-7b:1:32k``; raise ValueError for any other text."""
    model, *rest = text.rsplit(":", 2)
    if len(rest) != 2 or not model or not rest[0].isdecimal() or not int(rest[0]):
        raise ValueError(f"{text!r} is not MODEL:BATCH:TOKENS, such as llama2-7b:1:32k")
    return SpeculationPoint(model, int(rest[0]), token_count(rest[1]))


def drafts(text: str) -> int:
    """Parse a number of drafts per round, 1 to 8 (an argparse ``type``)."""
    gamma = positive_number(text)
    if gamma > 8:
        raise argparse.ArgumentTypeError(f"{text!r}: at most 8 drafts per round can be measured")
    return gamma


def add_speculation_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``speculation``."""
    add, shown = parser.add_argument, "MODEL:B:N"
    default = [
        SpeculationPoint(*at) for at in (("llama2-7b", 1, 2**15), ("llama2-7b", 1, 2**17), ("llama3.1-8b", 1, 2**17))
    ]
    about = "model, batch, tokens in the cache"
    add("--points", nargs="+", type=argument(speculation_point), default=default, metavar=shown, help=about)
    about = "points at which the cases after quantspec are measured (default: all)"
    add("--side-points", nargs="*", type=argument(speculation_point), metavar=shown, help=about)
    about = (
        "plain: 16-bit decoding; quantspec: drafts of 4-bit weights and upper nibbles; kv, weights: only one of "
        "them; streamingllm, snapkv: drafts of a quarter of the context (default: all)"
    )
    add("--cases", nargs="+", choices=CASES, default=list(CASES), metavar="CASE", help=about)
    add("--gammas", nargs="+", type=drafts, default=list(range(1, 9)), metavar="G", help="drafts per round (1 to 8)")
    add("--side-gammas", nargs="+", type=drafts, default=[2, 4, 6], metavar="G", help="the same for all other cases")
    add("--acceptances", nargs="+", type=share, default=[0.8, 0.85, 0.9, 0.95], metavar="A")
    add("--at", type=share, default=0.9, help="acceptance at which rounds are measured (default: 0.9)")
    add("--measure-all", action="store_true", help="measure the best gamma of every acceptance too")
    add("--blocks", type=positive_number, default=5, help="blocks of tokens whose median counts (default: 5)")
    add("--tokens", type=positive_number, default=64, help="tokens of a block (default: 64)")
    about = "measure quantspec with gamma=auto too, which captures and compiles a pass for every gamma"
    add("--auto", action=argparse.BooleanOptionalAction, default=True, help=about)
    add("--no-compile", action="store_false", dest="compile", help="do not compile what surrounds attention")
    add_device_options(parser)
    add_output_options(parser)


class SpeculationBench:
    """One run of the command: the loaded model, the arguments, and the rows so far."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        what = "python -m kvbench.bench speculation: forced acceptance, meaningless text"
        settings = {key: getattr(args, key) for key in ("dtype", "compile", "blocks", "tokens", "at", "acceptances")}
        self.file = Recording(args, "speculation", what, schema=SCHEMA, **settings)
        self.side_points = args.points if args.side_points is None else args.side_points
        self.methods = {name: parse_setting(CASES[name][0]).load() for name in args.cases}
        self.loaded: Any = None
        self.name: str | None = None
        self.device = torch.device(args.device)

    def measure_cases(self) -> None:
        """Measure all cases in the order of their stages (:data:`CASES`); load the model whenever it changes."""
        for stage, points in enumerate((self.args.points, self.side_points)):
            names = [name for name in self.args.cases if CASES[name][1] == stage]
            for point in points if names else ():
                self.load(point.model)
                for name in names:
                    row = {"model": point.model, "batch": point.batch, "context": point.context, "case": name}
                    self.file.rows.append({**row, "setting": CASES[name][0], "status": "unfinished"})
                    self.attempt(self.file.rows[-1], self.methods[name], point)

    def load(self, name: str) -> None:
        """Load a model with random weights, unless it is the present one."""
        if self.name == name:
            return
        self.give_back()
        self.name = name
        config = model_config(name, dtype=self.args.dtype)
        runtime = RuntimeConfig(device=self.args.device, seed=self.args.seed, compile=self.args.compile)
        self.loaded = shared.take(config, runtime, load_joined)
        self.say(f"{name} loaded")

    def give_back(self) -> None:
        """End the use of the present model, which stays loaded only if several calls of the process share it."""
        if self.loaded is not None:
            shared.give_back(self.loaded)
        self.loaded, self.name = None, None
        release(self.device)

    def attempt(self, row: Row, method: Method, point: SpeculationPoint) -> None:
        """Measure one case and store its figures in `row`, or the error if it fails; then release the memory."""
        try:
            for _ in self.plain(row, method, point) if row["case"] == "plain" else self.rounds(row, method, point):
                self.file.write()
            row["status"] = "ok"
        except Exception as error:
            row |= failed_row(error)
            self.say(f"{case_label(row)}: {row['status']}, {row['message']}")
        finally:
            method.detach(self.loaded.model)
            release(self.device)
            self.file.write()

    def plain(self, row: Row, method: Method, point: SpeculationPoint) -> Iterator[None]:
        """Measure plain decoding in blocks of captured steps, add the figures to `row`, and then yield once."""
        steps = self.args.blocks * self.args.tokens + arithmetic.SKIPPED
        cache = self.filled(method, point, steps)
        done = continued(
            self.loaded.model,
            cache,
            self.token(point),
            None,
            torch.full((point.batch,), point.context, device=self.device),
            Stopping(point.batch, (), (), None),
            Sampling(),
            [],
            steps + 1,
            graphs="always",
            compile=self.args.compile,
        )
        times, size = done["step_s"][arithmetic.SKIPPED :], self.args.tokens
        per_block = [1e3 * sum(times[i : i + size]) / size for i in range(0, len(times) - size + 1, size)]
        row |= {"ms": median(per_block), "blocks_ms": per_block, "stepping": done["stepping"], **self.memory()}
        self.say(f"{case_label(row)}: {row['ms']:.3f} ms a token, {row['stepping']}")
        yield

    def rounds(self, row: Row, method: Any, point: SpeculationPoint) -> Iterator[None]:
        """Measure speculative decoding; yield whenever figures have been added to `row`.

        One block of tokens is decoded with each gamma, then several with the best gamma of each acceptance.
        """
        args, main = self.args, row["case"] == "quantspec"
        gammas = args.gammas if main else args.side_gammas
        method = replace(method, gamma="auto", forced_acceptance=args.at)
        others = [a for a in args.acceptances if a != args.at] if main and args.measure_all else []
        room = len(gammas) * self.tokens(1) + (2 + len(others)) * self.tokens(args.blocks)
        cache = self.filled(method, point, room)
        engine = self.engine(method, cache, point)
        row |= {"forced": args.at, "gammas": [], "grid": [], "measured": []}
        row["stepping"] = getattr(engine, "stepping", "eager")
        for gamma in gammas:
            parts = arithmetic.round_parts(self.decoded(engine, method, cache, point, gamma, 1), gamma)
            row["gammas"].append(parts)
            row["gammas"].sort(key=lambda entry: entry["gamma"])
            row["grid"] = arithmetic.speed_grid(row["gammas"], args.acceptances, AUTO)
            row |= self.memory()
            self.say(f"{case_label(row)}, gamma {gamma}: {shown_parts(parts)}")
            yield
        for acceptance in (args.at, *others):
            if acceptance != args.at:
                method = replace(method, forced_acceptance=acceptance)
                engine = self.engine(method, cache, point)
            gamma = arithmetic.fastest_gamma(row["grid"], acceptance) or gammas[0]
            turns = self.decoded(engine, method, cache, point, gamma, args.blocks)
            per_block = arithmetic.block_times(turns, args.tokens)
            whole = 1e3 * sum(turn.seconds for turn in turns)
            timed = round_times(totals(turns, range(point.batch))) or {}
            row["measured"].append(
                {
                    "acceptance": acceptance,
                    **arithmetic.round_parts(turns, gamma),
                    "accepted": timed.get("acceptance"),
                    "why": timed.get("why"),
                    "ms": median(per_block),
                    "mean_ms": whole / sum(sum(turn.emitted) / point.batch for turn in turns),
                    "blocks_ms": per_block,
                }
            )
            row |= self.memory()
            self.say(f"{case_label(row)}, acceptance {acceptance}: {row['measured'][-1]['ms']:.3f} ms a token")
            yield
            if main and args.auto and acceptance == args.at:
                row["auto"] = self.chosen(engine, method, cache, point)
                self.say(
                    f"{case_label(row)}, gamma=auto: {row['auto']['ms']:.3f} ms a token, gammas {row['auto']['gammas']}"
                )
                yield

    def filled(self, method: Method, point: SpeculationPoint, room: int) -> Any:
        """Return a cache with random keys and values and room for `room` more tokens; reset the peak of memory."""
        prepare_draft(self.loaded.model, method.speculation)
        cache = method.new_cache(self.loaded.model, None, max_length=point.context + room)
        with torch.inference_mode():
            fill_at_random(self.loaded.model, cache, point.batch, point.context, self.args.seed)
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
        return cache

    def engine(self, method: Any, cache: Any, point: SpeculationPoint) -> Any:
        """Return the engine that runs the passes of rounds as CUDA graphs; None on a CPU, where passes are eager."""
        if self.device.type != "cuda":
            return None
        with torch.inference_mode():
            return captured_rounds(
                self.loaded.model, cache, method.speculation, self.sampling(point), point.batch, self.args.compile
            )

    def decoded(
        self, engine: Any, method: Any, cache: Any, point: SpeculationPoint, gamma: int, blocks: int
    ) -> Sequence[Round]:
        """Decode some blocks of tokens with one gamma, and return the rounds to time (:func:`full_rounds`)."""
        rounds = self.all_rounds(engine, replace(method.speculation, gamma=gamma), cache, point, blocks)
        return arithmetic.full_rounds(rounds, gamma)

    def chosen(self, engine: Any, method: Any, cache: Any, point: SpeculationPoint) -> Row:
        """Decode blocks of tokens with ``gamma=auto``; return times and the number of rounds with each gamma."""
        rounds = self.all_rounds(engine, method.speculation, cache, point, self.args.blocks)
        rounds = rounds[arithmetic.SKIPPED : -arithmetic.SKIPPED]  # limits at the end of an answer are no choice
        times = arithmetic.block_times(rounds, self.args.tokens)
        counts = Counter(max(turn.drafted) for turn in rounds)
        return {"ms": median(times), "blocks_ms": times, "gammas": {str(g): counts[g] for g in sorted(counts)}}

    def all_rounds(
        self, engine: Any, speculation: Speculation, cache: Any, point: SpeculationPoint, blocks: int
    ) -> list[Round]:
        """Decode some blocks of tokens, and return all rounds."""
        sampling = self.sampling(point)
        return speculative.speculative_decode(
            self.loaded.model,
            cache,
            self.token(point),
            Stopping(point.batch, (), (), None),
            sampling,
            sampling.generators(point.batch),
            self.tokens(blocks),
            0,
            speculation,
            engine,
        )

    def tokens(self, blocks: int) -> int:
        """Return how many tokens to decode to time `blocks` blocks.

        This is more than they have: a block ends with a whole round, and some rounds are not timed.
        """
        return blocks * (self.args.tokens + LONGEST) + (arithmetic.SKIPPED + 2) * LONGEST

    def sampling(self, point: SpeculationPoint) -> Sampling:
        """Return greedy sampling with a seed for each row, from which drafts are accepted at random."""
        return Sampling(seed=[self.args.seed + row for row in range(point.batch)])

    def token(self, point: SpeculationPoint) -> torch.Tensor:
        """Return an arbitrary first token of each row, ``[B]``."""
        return torch.arange(point.batch, device=self.device) * 17 + 3

    def memory(self) -> Row:
        """Return the peak of allocated memory since the cache was filled, and the bytes of the model's weights."""
        peak = torch.cuda.max_memory_allocated(self.device) if self.device.type == "cuda" else None
        return {"peak": peak, "weights": weight_bytes(self.loaded.model)}

    def say(self, text: str) -> None:
        """Print a line of progress after the seconds since the beginning."""
        print(f"[{time.perf_counter() - self.file.began:.0f} s] {text}", flush=True)


def measure_speculation(args: argparse.Namespace) -> int:
    """Measure all cases and print the tables; return 1 if a case failed for a reason other than memory, else 0.

    Raises:
        KvbenchError: the model cannot be loaded, or the file cannot be written.
    """
    if args.at not in args.acceptances:
        args.acceptances = sorted({*args.acceptances, args.at})
    bench = SpeculationBench(args)
    try:
        bench.measure_cases()
    finally:
        bench.give_back()
    print("\n" + speculation_tables(bench.file.rows, args.at))
    bench.file.end()
    return int(any(row["status"] not in ("ok", "oom") for row in bench.file.rows))
