"""``python -m kvbench.calibrate --model llama2-7b --text FILE``: make the calibration file of method=kvquant.

Runs forward and backward passes of the model over a text, and writes thresholds for the channels of keys, and codebooks
for keys and values (KVQuant, sec. 3), to a safetensors file. ``method=kvquant`` finds the file in results/calibration;
use ``method.calibration=FILE`` for a file elsewhere.
"""

from __future__ import annotations

import argparse
import hashlib
import re
import sys
import sysconfig
from collections.abc import Callable, Sequence
from pathlib import Path

from kvbench.errors import ConfigError, DataError, KvbenchError
from kvbench.models import by_name
from kvbench.models.spec import ModelConfig
from kvbench.tasks.files import is_file
from kvbench.util.requirements import exists
from kvbench.util.schema import MOST_ROWS, MOST_TOKENS, build

#: seed of the generated prompts, which no evaluation uses
MINI_SEED = 2**31


def main(argv: Sequence[str] | None = None) -> int:
    """Run ``python -m kvbench.calibrate`` and return the exit status; print errors to standard error.

    Args:
        argv: arguments of the command line, without the program's name; None for ``sys.argv``.
    """
    arguments = _parser().parse_args(argv)
    try:
        print(run(arguments))
    except KvbenchError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        return 130
    return 0


def run(arguments: argparse.Namespace) -> str:
    """Calibrate a model for KVQuant and write the calibration file.

    Args:
        arguments: the parsed command line.

    Returns:
        A line for the user: the file and what it contains.

    Raises:
        KvbenchError: an argument is invalid, the model or a text is unavailable, or a text is too short.
    """
    bits = _bits(arguments.bits)
    _check(arguments)
    chosen = model_config(arguments.model, arguments.path, arguments.dtype, arguments.random)
    texts = [documents(name) for name in arguments.text]

    import torch

    from kvbench.calibration import file
    from kvbench.calibration.calibrate import calibrate, cut
    from kvbench.config.run_config import RuntimeConfig
    from kvbench.models.load import load

    out = (
        Path(arguments.out)
        if arguments.out
        else file.FOLDER / f"{chosen.name.replace('/', '--')}-{100 * arguments.outliers:g}pct.safetensors"
    )
    loaded = load(chosen, RuntimeConfig(device=arguments.device))
    length, pieces = min(arguments.length, loaded.max_length), []
    for number, (name, parts) in enumerate(zip(arguments.text, texts, strict=True)):
        ids = [token for part in parts for token in loaded.tokenizer(part, verbose=False)["input_ids"]]
        share = (arguments.sequences + len(texts) - 1 - number) // len(texts)
        pieces.append(cut(ids, share, length, name))
    calibration = calibrate(
        loaded.model,
        torch.cat(pieces),
        name=chosen.name,
        bits=bits,
        outliers=arguments.outliers,
        fisher=arguments.fisher,
        first_tokens=arguments.first_tokens,
        text_sha256=_digest(texts),
        tell=_tell,
    )
    file.save(calibration, out)
    layers, heads, channels = calibration.shape
    return (
        f"{out}: {calibration.info['bits']} bits, {100 * calibration.outliers:g}% outliers, "
        f"{layers} layers of {heads} x {channels}, from {calibration.info['tokens']} tokens"
    )


def model_config(name: str, path: str | None, dtype: str | None, random: bool) -> ModelConfig:
    """Return the configuration of the model that the command line names, after checking it.

    Args:
        name: a preset, a repository on the hub, or a folder.
        path: folder of the weights; None if they are where `name` says.
        dtype: dtype of the weights; None for the model's default.
        random: True for random weights.

    Raises:
        ConfigError: there is no such model.
    """
    changes = {"path": path, "dtype": dtype, "weights": "random" if random else None}
    group = by_name.group(name, {key: value for key, value in changes.items() if value}, "--model")
    chosen: ModelConfig = build(ModelConfig, group, "model")
    chosen.check()
    return chosen


def documents(name: str) -> list[str]:
    """Return the texts that an argument of ``--text`` stands for, one string per document.

    Args:
        name: a file or a folder; or ``mini`` or ``python`` for texts that need no file, unless a file has this name.

    Raises:
        DataError: there is no such file or folder, or it contains no text.
    """
    there = is_file(Path(name), "--text ")
    if name in GENERATED and there is None:
        return GENERATED[name]()
    if there is None:
        raise DataError(
            f"--text {name} does not exist.\n"
            f"  hint: to calibrate without your own text, use --text {' '.join(GENERATED)}"
        )
    from kvbench.tasks.texts import files

    return files(name, "calibration", "--text")


def mini() -> list[str]:
    """Return generated calibration texts: prompts of the mini tasks, each followed by its answer.

    The seed of these samples is never used by an evaluation, so the model is not evaluated on its calibration data.
    """
    from kvbench.tasks.mini import Mini

    task = Mini(lengths=(2048,), limit=2, seed=MINI_SEED)
    return [sample.prompt + sample.continuation for sample in task.samples()]


def python() -> list[str]:
    """Return calibration texts from Python's standard library: the source code of each top-level module.

    The modules whose text is the data of ``dataset=mini_text`` are left out, because perplexity is measured on them.

    Raises:
        DataError: this Python installation has no source files.
    """
    from kvbench.tasks.mini.heldout import EXCLUDED

    folder = Path(sysconfig.get_paths()["stdlib"])
    modules = [path for path in sorted(folder.glob("*.py")) if path.name not in EXCLUDED]
    if not modules:
        raise DataError(f"--text python: {folder} contains no Python sources.\n  hint: use --text mini or --text FILE")
    return [path.read_text(encoding="utf-8", errors="replace") for path in modules]


#: names of generated texts, and the functions that return them
GENERATED: dict[str, Callable[[], list[str]]] = {"mini": mini, "python": python}


def _digest(texts: Sequence[Sequence[str]]) -> str:
    joined = "\0".join(part for parts in texts for part in parts)
    return hashlib.sha256(joined.encode("utf-8", "surrogatepass")).hexdigest()


def _bits(text: str) -> tuple[int, ...]:
    try:
        widths = tuple(sorted({int(part) for part in text.split(",")}))
    except ValueError as error:
        raise ConfigError("--bits", text, "is not a list of whole numbers", allowed="2,3,4") from error
    if not set(widths) <= {2, 3, 4}:
        raise ConfigError("--bits", text, "a codebook must have 2, 3 or 4 bits", allowed="2,3,4")
    return widths


def _check(arguments: argparse.Namespace) -> None:
    """Check numbers, device and paths before any text is read.

    Raises:
        ConfigError: an argument is invalid.
    """
    from kvbench.util.requirements import check_writable, has_gpu

    for name, least, most in (
        ("sequences", len(arguments.text), MOST_ROWS),
        ("length", 2, MOST_TOKENS),
        ("first_tokens", 0, arguments.length - 1),
    ):
        value = getattr(arguments, name)
        if not least <= value <= most:
            raise ConfigError(f"--{name.replace('_', '-')}", value, "is out of range", allowed=f"{least} to {most}")
    if not 0 <= arguments.outliers <= 0.5:
        raise ConfigError(
            "--outliers", arguments.outliers, "is not a valid share of outliers", allowed="0 to 0.5, such as 0.01"
        )
    if not re.fullmatch(r"auto|cpu|mps|cuda(:\d+)?", arguments.device):
        raise ConfigError("--device", arguments.device, "is not a device", allowed="auto, cpu, cuda, cuda:N or mps")
    if arguments.device.startswith("cuda") and not has_gpu():
        raise ConfigError("--device", arguments.device, "no GPU is visible on this machine", hint="--device cpu")
    if arguments.out is not None:
        if not arguments.out or Path(arguments.out).name in ("", ".."):
            raise ConfigError("--out", arguments.out, "must name a file", hint="--out mine.safetensors")
        check_writable(arguments.out, "--out", file=True)
    for name in arguments.text:
        if not name:
            raise ConfigError(
                "--text",
                "''",
                "must name a file or folder with text",
                hint="--text mini python to calibrate without your own text",
            )
    for name in (*arguments.text, arguments.model, arguments.path or "."):
        exists(name, "--text, --model or --path")


def _tell(done: int, total: int) -> None:
    end = "\n" if done == total else ""
    print(f"\rcalibrating: {done} of {total} passes", end=end, file=sys.stderr, flush=True)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m kvbench.calibrate", description=__doc__)
    parser.add_argument("--model", required=True, help="a preset (llama2-7b), a repository of the hub, or a folder")
    parser.add_argument("--path", help="folder with the weights (default: those that --model names)")
    parser.add_argument("--random", action="store_true", help="use the architecture of --model with random weights")
    parser.add_argument(
        "--text",
        required=True,
        nargs="+",
        help=(
            "files or folders with text, mini (generated text), or python (Python's standard "
            "modules); each of them provides the same number of sequences"
        ),
    )
    parser.add_argument(
        "--bits", default="2,3,4", help="bits of the codebooks, separated by commas (default: %(default)s)"
    )
    parser.add_argument(
        "--outliers",
        type=float,
        default=0.01,
        help="share of outliers that stay in full precision (default: %(default)s)",
    )
    parser.add_argument("--sequences", type=int, default=16, help="number of sequences to read (default: %(default)s)")
    parser.add_argument("--length", type=int, default=2048, help="tokens per sequence (default: %(default)s)")
    parser.add_argument(
        "--fisher",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="weight quantization errors by squared gradients",
    )
    parser.add_argument(
        "--first-tokens",
        type=int,
        default=0,
        help="number of first tokens of each sequence to leave out of the codebooks (default: %(default)s)",
    )
    parser.add_argument(
        "--device", default="auto", help="device: auto, cpu, mps, cuda or cuda:N (default: %(default)s)"
    )
    parser.add_argument(
        "--dtype", choices=("float32", "float16", "bfloat16"), help="data type of the model (default: the model's own)"
    )
    parser.add_argument("--out", help="file to write (default: results/calibration/MODEL-1pct.safetensors)")
    return parser
