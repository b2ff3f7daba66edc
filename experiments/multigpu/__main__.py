"""``python -m experiments.multigpu --out FOLDER``: one GPU, layers over two, heads over two, side by side.

Needs two GPUs for about four minutes, and no Hydra. Tokens: the bundled model with every method, greedy; where a
layout parts from one GPU, the gap between the two best logits there says whether it was a near tie (sums over ranks
are rounded in another order). Then a 7B model with random weights on a cache of 128k random tokens, in eager steps and,
where they can be captured, captured ones.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from experiments.measured import command_line, parted
from experiments.place import choice, place_result
from experiments.stored import as_json, content

LAYOUTS = ("one", "device_map", "tensor_parallel")


def launch_worker(layout: str, out: Path, processes: int, rest: list[str], limit_s: float) -> dict[str, Any]:
    """Run one layout's worker; what it had written when it ended, or was ended, and how it ended."""
    file = out / f"{layout}.json"
    start = [sys.executable, "-m"]
    if layout == "tensor_parallel":
        start += ["torch.distributed.run", "--standalone", "--nproc-per-node", str(processes), "-m"]
    command = [*start, "experiments.multigpu.worker", "--layout", layout, "--out", str(file), *rest]
    began = time.perf_counter()
    worker = subprocess.Popen(command, start_new_session=True, env={**os.environ, "PYTHONUNBUFFERED": "1"})
    try:
        status: int | str = worker.wait(limit_s)
    except subprocess.TimeoutExpired:
        os.killpg(worker.pid, signal.SIGKILL)
        worker.wait()
        status = f"ended after {limit_s:.0f} s"
    written: dict[str, Any] = content(file) if file.is_file() else {}
    seconds = round(time.perf_counter() - began, 1)
    print(f"{layout}: status {status}, {seconds} s", flush=True)
    return {**written, "status": status, "seconds": seconds}


def parting(one: dict[str, Any], other: dict[str, Any]) -> dict[str, Any] | None:
    """Return the first position at which two answers differ, and the gap there; None for equal answers."""
    at = parted(one["tokens"], other["tokens"])
    if at is None:
        return None
    if at == min(len(one["tokens"]), len(other["tokens"])):  # one of them ends here
        return {"at": at, "gaps": []}
    return {"at": at, "gaps": [answer["gaps"][at] if at < len(answer["gaps"]) else None for answer in (one, other)]}


def against(one: Any, other: Any) -> dict[str, Any]:
    """Compare the answers of a layout with one GPU's; either is a text where the method could not answer."""
    if isinstance(one, str) or not isinstance(other, list):
        return {"skipped": one if isinstance(one, str) else other}
    pairs = list(zip(one, other, strict=True))
    return {
        "parted": [parting(a, b) for a, b in pairs],
        "same_bytes": all(sum(a["kv_bytes"]) == sum(b["kv_bytes"]) for a, b in pairs),
        "path": sorted({answer["path"] for answer in other}),
    }


def compared(results: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Compare answers with one GPU's by dtype, method and layout: where they first differ, and the sums of bytes."""
    return {
        f"{part}, {name}, {layout}": against(one, results[layout].get(part, {}).get(name))
        for part, methods in results["one"].items()
        if part.startswith("tokens ")
        for name, one in methods.items()
        for layout in LAYOUTS[1:]
        if layout in results
    }


def main() -> int:
    """Measure, compare, print, write."""
    parser = command_line("experiments.multigpu", __doc__, None)
    parser.add_argument("--processes", type=int, default=2, help="number of ranks of the tensor-parallel layout")
    parser.add_argument("--layouts", nargs="*", default=list(LAYOUTS), choices=LAYOUTS)
    parser.add_argument("--limit-s", type=float, default=75.0, help="time limit per layout in seconds")
    args, rest = parser.parse_known_args()
    where = place_result(args.out, choice(args))
    args.out = where.path
    args.out.mkdir(parents=True, exist_ok=True)
    results = {layout: launch_worker(layout, args.out, args.processes, rest, args.limit_s) for layout in args.layouts}
    equal = compared(results) if "one" in results else {}
    (args.out / "multigpu.json").write_text(as_json({"equal": equal, "layouts": results}), encoding="utf-8")
    for name, what in equal.items():
        if "skipped" in what:
            print(f"{name}: skipped: {what['skipped']}")
        else:
            same = "equal" if not any(what["parted"]) else f"parts: {what['parted']}"
            print(f"{name}: {same}; bytes {'equal' if what['same_bytes'] else 'differ'}; {what['path']}")
    for layout, result in results.items():
        for part, rows in result.items():
            for name, row in rows.items() if part.endswith(" tokens") else ():
                if isinstance(row, str):
                    print(f"{layout}, {name}: {row}")
                    continue
                gib = [f"{count / 2**30:.1f}" for count in row["decode_peak"]]
                print(
                    f"{layout}, {name}: {row['tpot_ms']} ms a token, peak {' + '.join(gib)} GiB, KV "
                    f"{sum(row['kv_used']) / 2**30:.1f} GiB, {row['stepping']}"
                )
    where.say()
    return 0 if all(result["status"] == 0 for result in results.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
