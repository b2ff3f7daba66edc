"""``python -m kvbench.calibrate [method=oscar] --model llama2-7b --text FILE``: make a method's calibration file.

The options are checked before any text is read.

For ``method=kvquant``, the default, this runs forward and backward passes of the model over a text, and writes
thresholds for the channels of keys, and codebooks for keys and values (KVQuant, sec. 3), to a safetensors file. For
``method=oscar`` it runs the text twice and writes a rotation of keys and one of values for each layer, for
``method=engine`` once for the scales of fp8 queries, keys and values, which ``method.calibration=FILE`` names. The
other methods find their files in results/calibration; use ``method.calibration=FILE`` for a file elsewhere.
"""

from __future__ import annotations

import argparse
import hashlib
import re
import sys
import sysconfig
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from kvbench.errors import ConfigError, DataError
from kvbench.models import by_name
from kvbench.models.spec import ModelConfig
from kvbench.tasks.files import is_file
from kvbench.util.door import reporting
from kvbench.util.requirements import check_writable, exists, has_gpu
from kvbench.util.schema import MOST_ROWS, MOST_TOKENS, build


def calibrate_parser(description: str | None) -> argparse.ArgumentParser:
    """Return the parser of the command line, whose ``--help`` begins with the description."""
    options = argparse.ArgumentParser(prog="python -m kvbench.calibrate", description=description)
    options.add_argument(
        "method",
        nargs="?",
        default="method=kvquant",
        choices=("method=kvquant", "method=oscar", "method=engine"),
        help="the method that is calibrated (default: %(default)s)",
    )
    options.add_argument("--model", required=True, help="a preset (llama2-7b), a repository of the hub, or a folder")
    options.add_argument("--path", help="folder with the weights (default: those that --model names)")
    options.add_argument("--random", action="store_true", help="use the architecture of --model with random weights")
    options.add_argument(
        "--text",
        required=True,
        nargs="+",
        help=(
            "files or folders with text, mini (generated text), or python (Python's standard "
            "modules); each of them provides the same number of sequences"
        ),
    )
    options.add_argument("--bits", help="kvquant: bits of the codebooks, separated by commas (default: 2,3,4)")
    options.add_argument(
        "--outliers",
        type=float,
        help="kvquant: share of outliers that stay in full precision (default: 0.01)",
    )
    options.add_argument("--sequences", type=int, default=16, help="number of sequences to read (default: %(default)s)")
    options.add_argument("--length", type=int, default=2048, help="tokens per sequence (default: %(default)s)")
    fisher = options.add_mutually_exclusive_group()
    fisher.add_argument(
        "--fisher",
        action="store_true",
        default=None,
        help="kvquant: weight quantization errors by squared gradients (the default)",
    )
    fisher.add_argument(
        "--no-fisher", action="store_false", dest="fisher", default=None, help="kvquant: weight all errors the same"
    )
    options.add_argument(
        "--per-head",
        action="store_true",
        default=None,
        help="oscar, engine: a rotation, or scales, of its own for each KV head (default: the heads of a layer share)",
    )
    options.add_argument(
        "--percentile",
        type=float,
        help="engine: percentage of magnitudes that do not saturate, such as 99.9 (default: all, that is min-max)",
    )
    options.add_argument(
        "--first-tokens",
        type=int,
        default=0,
        help="number of first tokens of each sequence to leave out (default: %(default)s)",
    )
    options.add_argument(
        "--device", default="auto", help="device: auto, cpu, mps, cuda or cuda:N (default: %(default)s)"
    )
    options.add_argument(
        "--dtype",
        choices=("float32", "float16", "bfloat16"),
        help="data type that caches store (default: the model's own)",
    )
    options.add_argument(
        "--out",
        help="file to write (default: MODEL-1pct.safetensors in results/calibration, or -oscar, or -fp8)",
    )
    return options


#: fewest tokens of a sequence from which anything is fitted
SHORTEST = 16


def code_sizes(text: str) -> tuple[int, ...]:
    """Return the numbers of bits that ``--bits`` lists, in ascending order, or raise ConfigError."""
    try:
        widths = tuple(sorted({int(part) for part in text.split(",")}))
    except ValueError as error:
        raise ConfigError("--bits", text, "is not a list of whole numbers", allowed="2,3,4") from error
    if not set(widths) <= {2, 3, 4}:
        raise ConfigError("--bits", text, "a codebook must have 2, 3 or 4 bits", allowed="2,3,4")
    return widths


def check_options(method: str, arguments: argparse.Namespace) -> None:
    """Raise ConfigError if an option was given that the method's calibration does not have."""
    for others, names in (
        (("oscar", "engine"), ("per_head",)),
        (("engine",), ("percentile",)),
        (("kvquant",), ("bits", "outliers", "fisher")),
    ):
        for name in names:
            value = getattr(arguments, name)
            if value is not None and method not in others:
                flag = isinstance(value, bool)
                raise ConfigError(
                    f"--{'no-' if value is False else ''}{name.replace('_', '-')}",
                    None if flag else value,
                    f"has no effect on a calibration for method={method}",
                    hint=f"leave it out, or calibrate for method={' or method='.join(others)}",
                )


def check_arguments(arguments: argparse.Namespace) -> None:
    """Check numbers, device and paths before any text is read; raise ConfigError if one is invalid."""
    for name, least, most in (
        ("sequences", len(arguments.text), MOST_ROWS),
        ("length", SHORTEST, MOST_TOKENS),
        ("first_tokens", 0, arguments.length - 1),
    ):
        value = getattr(arguments, name)
        if not least <= value <= most:
            raise ConfigError(f"--{name.replace('_', '-')}", value, "is out of range", allowed=f"{least} to {most}")
    if arguments.outliers is not None and not 0 <= arguments.outliers <= 0.5:
        raise ConfigError(
            "--outliers", arguments.outliers, "is not a valid share of outliers", allowed="0 to 0.5, such as 0.01"
        )
    if arguments.percentile is not None and not 50 <= arguments.percentile < 100:
        raise ConfigError(
            "--percentile", arguments.percentile, "is out of range", allowed="50 to below 100, such as 99.9",
            hint="leave it out for min-max",
        )  # fmt: skip
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


#: seed of the generated prompts, which no evaluation uses
MINI_SEED = 2**31


@reporting()
def main(argv: Sequence[str] | None = None) -> int:
    """Run ``python -m kvbench.calibrate`` and return the exit status; print errors to standard error."""
    arguments = calibrate_parser(__doc__).parse_args(argv)
    print(run_calibration(arguments))
    return 0


def run_calibration(arguments: argparse.Namespace) -> str:
    """Calibrate a model for a method, write the calibration file, and return a line for the user about it.

    Raises:
        KvbenchError: an argument is invalid, the model or a text is unavailable, or a text is too short.
    """
    method = arguments.method.removeprefix("method=")
    check_options(method, arguments)
    bits = code_sizes("2,3,4" if arguments.bits is None else arguments.bits)
    outliers = 0.01 if arguments.outliers is None else arguments.outliers
    check_arguments(arguments)
    chosen = model_config(arguments.model, arguments.path, arguments.dtype, arguments.random)
    texts = [text_documents(name) for name in arguments.text]

    import torch

    from kvbench.calibration import file
    from kvbench.calibration.calibrate import calibrate, cut_sequences
    from kvbench.calibration.rotate import rotations
    from kvbench.calibration.scales import scales
    from kvbench.calibration.stored import Stored
    from kvbench.config.run_config import RuntimeConfig
    from kvbench.models.load import load_model

    loaded = load_model(chosen, RuntimeConfig(device=arguments.device))
    length, pieces = min(arguments.length, loaded.max_length), []
    for number, (name, parts) in enumerate(zip(arguments.text, texts, strict=True)):
        ids = [token for part in parts for token in loaded.tokenizer(part, verbose=False)["input_ids"]]
        share = (arguments.sequences + len(texts) - 1 - number) // len(texts)
        pieces.append(cut_sequences(ids, share, length, name))
    sequences = torch.cat(pieces)
    source: dict[str, Any] = {"text_sha256": _digest_of_texts(texts), "tell": _tell}
    calibration: Stored
    if method == "oscar":
        calibration = rotations(
            loaded.model,
            sequences,
            name=chosen.calibrated_as,
            per_head=bool(arguments.per_head),
            first_tokens=arguments.first_tokens,
            **source,
        )
        name, contents = "oscar-heads" if arguments.per_head else "oscar", f"rotations, {calibration.info['heads']}"
    elif method == "engine":
        calibration = scales(
            loaded.model,
            sequences,
            name=chosen.calibrated_as,
            percentile=arguments.percentile,
            per_head=bool(arguments.per_head),
            first_tokens=arguments.first_tokens,
            **source,
        )
        name, contents = "fp8", f"scales, {calibration.info['rule']}, {calibration.info['heads']}"
    else:
        calibration = calibrate(
            loaded.model,
            sequences,
            name=chosen.calibrated_as,
            bits=bits,
            outliers=outliers,
            fisher=arguments.fisher is not False,
            first_tokens=arguments.first_tokens,
            **source,
        )
        name, contents = f"{100 * outliers:g}pct", f"{calibration.info['bits']} bits, {100 * outliers:g}% outliers"
    out = Path(arguments.out or file.FOLDER / f"{chosen.calibrated_as.replace('/', '--')}-{name}.safetensors")
    file.save(calibration, out)
    layers, heads, channels = calibration.shape
    return f"{out}: {contents}, {layers} layers of {heads} x {channels}, from {calibration.info['tokens']} tokens"


def model_config(name: str, path: str | None, dtype: str | None, random: bool) -> ModelConfig:
    """Return the configuration of a preset, a repository on the hub or a folder, after checking it.

    Args:
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


def text_documents(name: str) -> list[str]:
    """Return the texts that an argument of ``--text`` stands for, one string per document.

    It is a file or a folder; or ``mini`` or ``python`` for texts that need no file, unless a file has this name.

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
    from kvbench.tasks.texts import local_texts

    return local_texts(name, "calibration", "--text")


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
    from kvbench.tasks.mini.text import EXCLUDED

    folder = Path(sysconfig.get_paths()["stdlib"])
    modules = [path for path in sorted(folder.glob("*.py")) if path.name not in EXCLUDED]
    if not modules:
        raise DataError(f"--text python: {folder} contains no Python sources.\n  hint: use --text mini or --text FILE")
    return [path.read_text(encoding="utf-8", errors="replace") for path in modules]


#: names of generated texts, and the functions that return them
GENERATED: dict[str, Callable[[], list[str]]] = {"mini": mini, "python": python}


def _digest_of_texts(texts: Sequence[Sequence[str]]) -> str:
    joined = "\0".join(part for parts in texts for part in parts)
    return hashlib.sha256(joined.encode("utf-8", "surrogatepass")).hexdigest()


def _tell(done: int, total: int) -> None:
    end = "\n" if done == total else ""
    print(f"\rcalibrating: {done} of {total} passes", end=end, file=sys.stderr, flush=True)
