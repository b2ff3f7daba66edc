"""What the benches of whole models share: their arguments, the model, and a JSON file that grows row by row."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kvbench.bench import report
from kvbench.bench.settings import Setting, load, model_config, setting, share
from kvbench.bench.table import table
from kvbench.cache.options import Options
from kvbench.errors import ConfigError, KvbenchError, ModelError
from kvbench.measure.meter import How, Meter
from kvbench.profiling.limit import limited
from kvbench.profiling.memory import release
from kvbench.util.failures import bytes_asked, is_out_of_memory
from kvbench.util.requirements import check_writable

Row = dict[str, Any]


class Bench:
    """One command: the model, the settings, and the rows so far, on disk after each of them.

    Args:
        args: as :mod:`kvbench.bench.command` parsed them.
        what: says in the file what its rows are.

    Raises:
        KvbenchError: a setting or the model cannot be had.
    """

    def __init__(self, args: argparse.Namespace, what: str) -> None:
        self.args, self.what, self.began = args, what, time.perf_counter()
        self.path = report.folder(args.out) / f"{args.name or f'{args.command}_{Path(args.model).name}'}.json"
        check_writable(str(self.path.parent), "--out")
        self.settings: list[Setting] = [setting(text) for text in args.settings]
        config = model_config(args.model, weights=args.weights, dtype=args.dtype)
        for each in self.settings:
            each.method.ready()  # an encoder that cannot be had is said before anything is measured
        try:
            self.loaded = load(config, args.device, args.seed)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            limit = "" if args.memory_limit_gb is None else f" within --memory-limit-gb {args.memory_limit_gb:g}"
            raise ModelError(f"{args.model} itself has no room on {args.device}{limit}: {error}") from None
        self.model, self.device = self.loaded.model, self.loaded.device
        for each in self.settings:
            share(self.loaded, each.method)
        self.rows: list[Row] = []
        self.extra: dict[str, Any] = {}

    @property
    def max_length(self) -> int | None:
        """Most tokens of a sequence; None: random weights have no limit."""
        return None if self.loaded.random_weights else int(self.loaded.max_length)

    @property
    def options(self) -> Options:
        """Kernels of every cache that is measured."""
        return Options(kernels=self.args.kernels)

    def check_lengths(self, contexts: Sequence[int], new_tokens: int) -> None:
        """Raise ConfigError where pretrained weights cannot take the longest sequence."""
        longest = max(contexts) + new_tokens
        if self.max_length is not None and longest > self.max_length:
            raise ConfigError(
                "--contexts",
                max(contexts),
                f"and {new_tokens} new tokens are more than {self.args.model} takes ({self.max_length})",
                hint="--weights random has no such limit",
            )

    def meter(self, each: Setting, **how: Any) -> Meter:
        """A meter for one setting; the model is switched to its method by its first cache."""
        shared = {name: getattr(self.args, name) for name in ("seed", "prefill_chunk", "prefill_rows")}
        return Meter(self.model, self.loaded.tokenizer, each.method, How(**{**shared, "options": self.options, **how}))

    def add(self, row: Row, shown: Sequence[object]) -> None:
        """A row into the file and onto the screen."""
        self.rows.append(row)
        self.write()
        print("  ".join(str(c) if not isinstance(c, float) else f"{c:.4g}" for c in shown if c is not None), flush=True)

    def write(self) -> None:
        """The file as it is now."""
        content = {
            "what": self.what,
            **report.machine(),
            "model": self.args.model,
            "weights": self.args.weights,
            "dtype": self.args.dtype,
            "memory_limit_gb": self.args.memory_limit_gb,
            "command": " ".join(self.args.argv),
            **self.extra,
            "rows": self.rows,
        }
        try:
            report.write(self.path, content)
        except OSError as error:
            raise KvbenchError(f"{self.path} cannot be written: {error}\n  hint: --out FOLDER") from error

    def failed(self, error: Exception) -> Row:
        """What a row says in place of figures; the process has its memory back afterwards.

        Raises:
            Exception: `error`, where it is a mistake of the user's.
        """
        if isinstance(error, KvbenchError):
            raise error
        status = "oom" if is_out_of_memory(error) else "failed"
        text = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
        return {"status": status, "message": text, "bytes_asked": bytes_asked(error)}

    def finish(self, head: Sequence[str], lines: Sequence[Sequence[object]], notes: Sequence[str] = ()) -> int:
        """Print the table; 1 where a row failed for another reason than memory."""
        self.write()
        print("\n" + table(head, lines))
        for note in notes:
            print(note)
        print(f"{self.path} ({time.perf_counter() - self.began:.0f} s)")
        return int(any(row.get("status") == "failed" for row in self.rows))


def run(args: argparse.Namespace) -> int:
    """The command that `args` names, under the memory limit."""
    from kvbench.bench import memory, prefill, tpot
    from kvbench.models.load import resolve_device

    try:
        device = resolve_device(args.device)
        with limited(device, args.memory_limit_gb) as held:
            if args.memory_limit_gb is not None and not held:
                print(f"--memory-limit-gb {args.memory_limit_gb}: this platform cannot limit {device}", flush=True)
            try:
                return {"tpot": tpot.run, "prefill": prefill.run, "memory": memory.run}[args.command](args)
            finally:
                release(device)
    except KvbenchError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code


def gib(count: float | None) -> float | None:
    """Bytes in GiB."""
    return None if count is None else count / 2**30


def ms(seconds: float | None) -> float | None:
    """Seconds in milliseconds."""
    return None if seconds is None else 1e3 * seconds
