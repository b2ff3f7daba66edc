"""``python -m experiments.twin``: llama.cpp beside kvbench on the same weights, tokens and cache formats.

Windows of two texts (WikiText-2's test split, and the texts that come with Python) run through llama.cpp and kvbench
with fp16 caches and with each of llama.cpp's formats. The tables: ``f32``, both on float32 weights, where kvbench's
attention is exact, or as in the engine; ``noise``, llama.cpp beside itself with the last bit of every weight changed;
``quantized``, llama.cpp on the file with quantized weights beside the float32 file. A window that is complete is
written at once, and the same command again goes on behind it.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from experiments.place import positive
from experiments.twin import fold, measure, weights
from kvbench.errors import ConfigError
from kvbench.util import atomic
from kvbench.util.confdir import group_options, read_choice
from kvbench.util.door import enter

TABLES = ("f32", "noise", "quantized")
TEXTS = ("wikitext2", "python")
#: windows per document of Python's texts
PER_DOCUMENT = 4


def twin_parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    options = argparse.ArgumentParser(prog="python -m experiments.twin", description=__doc__)
    add = options.add_argument
    add("--tables", nargs="+", choices=TABLES, default=TABLES, help="tables to measure (default: all)")
    add("--python", default=sys.executable, help="Python with llama-cpp-python (default: this one; extra engines)")
    add("--model", default="smollm2-135m-q4_1", help="a model in conf/model from a GGUF file (default: %(default)s)")
    add("--text", type=Path, help="file of WikiText-2's test split (default: below KVBENCH_DATA, or from the hub)")
    add("--texts", nargs="+", choices=TEXTS, default=TEXTS, help="texts to measure (default: both)")
    add("--windows", type=positive, default=32, help="windows of each text (default: %(default)s)")
    add("--window", type=positive, default=512, help="tokens of a window; its second half counts (default: 512)")
    add("--parts", nargs="+", choices=measure.PARTS, default=("exact", "engine"), help="kvbench's columns in f32")
    add("--threads", type=positive, default=1, help="threads of llama.cpp and of torch (default: %(default)s)")
    add("--out", type=Path, default=Path("results/engines"), help="folder of rows and tables (default: %(default)s)")
    add("--fold-only", action="store_true", help="measure nothing; fold the tables from the rows that are there")
    return options


def windows(arguments: argparse.Namespace, tokenizer: Any) -> Iterator[tuple[str, int, list[int]]]:
    """Yield windows of the two texts by turns: the text's name, the window's number, and its tokens."""
    from experiments.real.files import PLACES, default_folder
    from kvbench.tasks.data import HubSource
    from kvbench.tasks.mini.text import python_documents
    from kvbench.tasks.texts import wikitext2

    there = [default_folder() / place for place in PLACES["perplexity/wikitext2"]] if default_folder() else []
    file = arguments.text or next((place for place in there if place.exists()), None)
    hub = HubSource(**read_choice(group_options("dataset")["perplexity/wikitext2"])["source"])
    texts = wikitext2(hub, None if file is None else str(file))
    size, cut = arguments.window, dict[str, list[list[int]]]()
    for name, documents, each in (
        ("wikitext2", texts, arguments.windows),
        ("python", [document.text for document in python_documents()], PER_DOCUMENT),
    ):
        cut[name] = []
        for text in documents:
            ids = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
            cut[name] += [ids[i * size : (i + 1) * size] for i in range(min(each, len(ids) // size))]
    for number in range(arguments.windows):
        for name, pieces in cut.items():
            if name in arguments.texts and number < len(pieces):
                yield name, number, pieces[number]


def read_rows(file: Path) -> list[dict[str, Any]]:
    """Return the rows of a file; none if it does not exist."""
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()] if file.exists() else []


def done_windows(file: Path, model: str, size: int, parts: Sequence[str] = ()) -> set[tuple[str, int, int]]:
    """Return the text, number and size of each window that a file has.

    Args:
        model: digest of the model's file.
        size: tokens of a window that is measured now.
        parts: kvbench's columns that rows of windows of this size must have.

    Raises:
        ConfigError: rows are of another model, or lack a column, so that others cannot be added to them.
    """
    rows = read_rows(file)
    elsewhere = "--out with another folder"
    for row in rows:
        if row["model_sha256"] != model:
            raise ConfigError("--out", str(file.parent), f"{file.name} has rows of another model", hint=elsewhere)
        lost = [part for part in parts if row["size"] == size and any(part not in x for x in row["formats"].values())]
        if lost:
            raise ConfigError("--parts", lost[0], f"{file} has rows without this column", hint=elsewhere)
    return {(row["text"], row["window"], row["size"]) for row in rows}


def measured(arguments: argparse.Namespace) -> None:
    """Measure the windows that are missing, and append a row for each as soon as it is complete."""
    import torch

    from kvbench.cli.calibrate import model_config
    from kvbench.config.run_config import RuntimeConfig
    from kvbench.models.gguf.place import models_folder
    from kvbench.models.load import load_model
    from kvbench.util.fingerprint import cache_folder, sha256

    torch.set_num_threads(arguments.threads)
    chosen = model_config(arguments.model, None, "float32", False)
    if chosen.package is None:
        raise ConfigError("--model", arguments.model, "does not come as a GGUF file", hint="--model smollm2-135m-q4_1")
    source = models_folder() / chosen.package.member.rpartition("/")[2]
    loaded = load_model(chosen, RuntimeConfig(device="cpu"))
    own, folder = measure.Own(loaded.model), cache_folder() / "twin"
    digest = sha256(source)[:16]
    stem = f"{source.stem}-{digest}-f32"
    plain = weights.write_float32(source, folder / f"{stem}.gguf")
    first = arguments.window // 2
    with measure.Twin(arguments.python, arguments.threads) as twin:
        about = {"llamacpp": twin.about["version"], "torch": torch.__version__, "model_sha256": digest}
        for table in arguments.tables:
            file = arguments.out / f"{table}.jsonl"
            done = done_windows(file, digest, arguments.window, arguments.parts if table == "f32" else ())
            file.parent.mkdir(parents=True, exist_ok=True)
            for name, number, ids in windows(arguments, loaded.tokenizer):
                if (name, number, arguments.window) in done:
                    continue
                began = time.process_time() + twin.seconds
                if table == "f32":
                    row = measure.against_kvbench(twin, own, plain, ids, first, arguments.parts)
                elif table == "noise":
                    noisy = weights.write_float32(source, folder / f"{stem}-noise.gguf", noise=True)
                    row = measure.against_itself(twin, plain, noisy, ids, first)
                else:
                    row = measure.against_itself(twin, source, plain, ids, first)
                seconds = round(time.process_time() + twin.seconds - began, 1)
                row = {"text": name, "window": number, "size": arguments.window, **row, "cpu_s": seconds, **about}
                with file.open("a", encoding="utf-8") as out:
                    out.write(json.dumps(row) + "\n")
                    out.flush()
                    os.fsync(out.fileno())
                print(f"{table}: {name} {number}, {seconds} s", file=sys.stderr, flush=True)


def folded(arguments: argparse.Namespace) -> str:
    """Write the tables of the rows that are there, and return them as text."""
    parts: list[str] = []
    figures: dict[str, Any] = {}
    titles = {
        "f32": "llama.cpp beside kvbench, both on float32 weights",
        "noise": "llama.cpp beside itself: float32 weights, and the same with the last bit of each changed",
        "quantized": "llama.cpp on the quantized file, beside itself on the float32 file",
    }
    for table in TABLES:
        every = [row for row in read_rows(arguments.out / f"{table}.jsonl") if row["size"] == arguments.window]
        texts = [text for text in TEXTS if any(row["text"] == text for row in every)]
        for text in (*texts, *(["both texts"] if len(texts) > 1 else [])):
            rows = [row for row in every if text in (row["text"], "both texts")]
            if table == "f32":
                here = [part for part in measure.PARTS if all(part in row["formats"]["q8_0"] for row in rows)]
                lines = fold.beside(rows, here)
                if "engine" in here:
                    figures[text] = fold.verdicts(rows)
            else:
                lines = fold.itself(rows, "the other file")
            largest = fold.number(max(row["f16"] for row in rows))
            about = f"{text}, {len(rows)} windows of {arguments.window} tokens; fp16 beside fp16 at most {largest}"
            parts += [f"### {titles[table]}: {about}", "", *lines, ""]
    text = "\n".join(parts)
    if parts:
        atomic.replace_file(arguments.out / "table.md", text.encode())
        atomic.replace_file(arguments.out / "verdicts.json", (json.dumps(figures, indent=1) + "\n").encode())
    return text or f"no rows in {arguments.out}"


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command, and return the exit status."""
    arguments = twin_parser().parse_args(argv)
    if not arguments.fold_only:
        measured(arguments)
    print(folded(arguments))
    return 0


if __name__ == "__main__":
    raise SystemExit(enter(main))
