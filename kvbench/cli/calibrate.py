"""``python -m kvbench.calibrate [method=oscar] --model llama2-7b --text FILE``: make a method's calibration file.

For ``method=kvquant``, the default, this runs forward and backward passes of the model over a text, and writes
thresholds for the channels of keys, and codebooks for keys and values (KVQuant, sec. 3), to a safetensors file. For
``method=oscar`` it runs the text twice and writes a rotation of keys and one of values for each layer. The methods find
their files in results/calibration; use ``method.calibration=FILE`` for a file elsewhere.
"""

from __future__ import annotations

import argparse
import hashlib
import sys
import sysconfig
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from kvbench.cli.calibrate_options import calibrate_parser, check_arguments, check_options, code_sizes
from kvbench.errors import DataError, KvbenchError
from kvbench.models import by_name
from kvbench.models.spec import ModelConfig
from kvbench.tasks.files import is_file
from kvbench.util.schema import build

#: seed of the generated prompts, which no evaluation uses
MINI_SEED = 2**31


def main(argv: Sequence[str] | None = None) -> int:
    """Run ``python -m kvbench.calibrate`` and return the exit status; print errors to standard error."""
    arguments = calibrate_parser(__doc__).parse_args(argv)
    try:
        print(run_calibration(arguments))
    except KvbenchError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        return 130
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
