"""The same points, measured by several new processes (``--processes K`` of ``tpot``, ``prefill`` and ``memory``).

The processes run one after the other. Each measures all points in a random order of its own: a block of a randomised
complete block design. ``python -m kvbench.bench latency FILES`` folds the files of such processes again.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

from kvbench.bench import latency, report
from kvbench.errors import ConfigError


def run_replicates(args: argparse.Namespace) -> int:
    """Run the processes of ``--processes`` and fold their files; return the exit status.

    The status is that of the first process that failed, or 1 if it was ended by a signal.

    Raises:
        KvbenchError: an option does not go with ``--processes``.
    """
    if args.grow or not args.batches:
        raise ConfigError(
            "--processes", args.processes, "needs fixed batch sizes, because processes measure the same points",
            hint="give them with --batches 1 8",
        )  # fmt: skip
    folder, name = report.result_folder(args.out), args.name or f"{args.command}_{Path(args.model).name}"
    first = 0 if args.shuffle is None else args.shuffle
    files = []
    for number in range(args.processes):
        own = ["--shuffle", str(first + number), "--out", str(folder), "--name", f"{name}.{number + 1}"]
        command = [sys.executable, "-m", "kvbench.bench", *args.argv, "--processes", "1", *own]
        print(f"process {number + 1} of {args.processes}", flush=True)
        status = subprocess.run(command, check=False).returncode
        if status:
            return max(status, 1)
        files.append(folder / f"{name}.{number + 1}.json")
    return latency.write_fold(files, folder / f"{name}.json", " ".join(args.argv))
