"""``python -m kvbench.bench memory``: peaks, the bill and throughput against the batch until memory ends."""

from __future__ import annotations

import argparse
from typing import Any

from kvbench.bench.shapes import short
from kvbench.bench.whole import Bench, gib, ms
from kvbench.tasks.efficiency import Efficiency
from kvbench.tasks.work import MeasurePoint

HEAD = "setting|prompt|B|new|TTFT ms|TPOT ms|roof|tokens/s|weights|KV|peak dec|x|peak pre|steps".split("|")


def run(args: argparse.Namespace) -> int:
    """All settings × contexts, the batch growing; a point without room is the last of its context."""
    bench = Bench(args, "time and memory of whole generations against the batch, until memory ends")
    bench.check_lengths(args.contexts, args.new_tokens)
    grid = Efficiency(
        prompts=tuple(args.contexts),
        batches=tuple(args.batches) if args.batches else "grow",
        max_batch=args.max_batch,
        bisect=args.bisect,
        new_tokens=args.new_tokens,
    )
    for each in bench.settings:
        meter = bench.meter(
            each, new_tokens=args.new_tokens, repeats=args.repeats, graphs=args.graphs, compile=args.compile
        )
        done: dict[str, Any] = {}
        while True:
            left = [sample for sample in grid.next_samples(done) if sample.id not in done]
            if not left:
                break
            point = left[0].work
            assert isinstance(point, MeasurePoint)
            row = {"setting": each.text, **meter.point(point.prompt, point.batch)}
            done[left[0].id] = row
            bench.add(row, line(row))
        each.method.detach(bench.model)
    notes = [
        "GiB. KV: bytes of the whole batch in use; x: peak of decoding to weights + KV; roof: TPOT by the roofline;"
        " tokens/s: search, prefill and decode inside"
    ]
    return bench.finish(HEAD, [line(row) for row in bench.rows], notes)


def line(row: dict[str, Any]) -> list[object]:
    """A row of the table."""
    start = [row["setting"], short(row["prompt"]), row["batch"], row["new_tokens"]]
    if row["status"] != "ok":
        asked = row.get("bytes_asked")
        said = f"oom in {row['phase']}" + (f", {asked / 2**30:.2f} GiB asked for" if asked else "")
        return [*start, *[None] * (len(HEAD) - len(start) - 1), said]
    roof = (row["predicted"] or {}).get("tpot_s")
    times = [ms(row["ttft_s"]), ms(row["tpot_s"]["median"]), ms(roof), row["tokens_per_s"]]
    peak = row["peak"]
    sizes = [gib(row["weights"]), gib(row["kv_used"]["total"]), gib(peak["decode"])]
    return [*start, *times, *sizes, row["over_used"], gib(peak["prefill"]), row["stepping"]]
