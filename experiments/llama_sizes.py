"""The sizes of caches that llama.cpp prints, for models of random weights: ``results/fit/llamacpp.json``.

python -m experiments.llama_sizes PYTHON    # PYTHON: an interpreter that has llama-cpp-python

A GGUF file per architecture is written with the package gguf: heads of a real size, everything else small. The other
interpreter makes a context per cache type, and llama.cpp logs what it allocates.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from experiments.stored import ROOT
from kvbench.util import atomic

#: cache types, by the numbers of ggml
TYPES = {"f16": 1, "q8_0": 8, "q5_1": 7, "q5_0": 6, "q4_1": 3, "q4_0": 2, "iq4_nl": 20}
#: architectures: layers, heads of queries, heads of keys, channels of a head
SHAPES = {"llama": (6, 8, 2, 64), "qwen3": (5, 8, 4, 128), "gemma": (3, 4, 1, 256)}
#: the context is no power of two, so that the printed digits tell formulas apart
CONTEXT, HIDDEN, INNER, VOCABULARY = 25600, 256, 512, 64
_LINE = re.compile(r"size = +[\d.]+ MiB \( *(\d+) cells, .*?K \((\w+)\): +([\d.]+) MiB, V \(\w+\): +([\d.]+) MiB")
_MAKE = """
import sys, llama_cpp
llama_cpp.Llama(sys.argv[1], n_ctx=int(sys.argv[2]), type_k=int(sys.argv[3]), type_v=int(sys.argv[3]),
                flash_attn=True, verbose=True)
"""


def write_gguf(path: Path, kind: str) -> None:
    """Write a model of random weights."""
    from gguf import GGUFWriter

    layers, heads, keys, channels = SHAPES[kind]
    writer = GGUFWriter(str(path), kind)
    writer.add_context_length(CONTEXT)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(layers)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(heads)
    writer.add_head_count_kv(keys)
    writer.add_key_length(channels)
    writer.add_value_length(channels)
    writer.add_rope_dimension_count(channels)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(VOCABULARY)
    writer.add_tokenizer_model("no_vocab")
    rows = {"attn_q": heads * channels, "attn_k": keys * channels, "attn_v": keys * channels}
    shapes = {name: (size, HIDDEN) for name, size in rows.items()} | {"attn_output": (HIDDEN, heads * channels)}
    shapes |= {"ffn_gate": (INNER, HIDDEN), "ffn_up": (INNER, HIDDEN), "ffn_down": (HIDDEN, INNER)}
    shapes |= {"attn_norm": (HIDDEN,), "ffn_norm": (HIDDEN,)}
    shapes |= {"attn_q_norm": (channels,), "attn_k_norm": (channels,)} if kind == "qwen3" else {}
    names = {f"blk.{layer}.{name}.weight": shape for layer in range(layers) for name, shape in shapes.items()}
    draw = np.random.default_rng(0)
    for name, shape in {**names, "token_embd.weight": (VOCABULARY, HIDDEN), "output_norm.weight": (HIDDEN,)}.items():
        writer.add_tensor(name, draw.normal(size=shape).astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def printed_sizes(python: str, file: Path, number: int) -> Mapping[str, Any]:
    """Return what llama.cpp prints of a cache: cells, type, and MiB of keys and of values."""
    done = subprocess.run([python, "-c", _MAKE, str(file), str(CONTEXT), str(number)], capture_output=True, text=True)
    found = _LINE.search(done.stderr)
    if found is None:
        raise SystemExit(f"error: llama.cpp printed no size of a cache: {done.stderr[-800:]}")
    cells, kind, keys, values = found.groups()
    return {"type": kind, "cells": int(cells), "keys_mib": keys, "values_mib": values}


def main(argv: Sequence[str] | None = None) -> int:
    """Write the file; return the exit status."""
    python = (sys.argv[1:] if argv is None else argv)[0]
    version = subprocess.check_output([python, "-c", "import llama_cpp; print(llama_cpp.__version__)"], text=True)
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for kind, (layers, heads, keys, channels) in SHAPES.items():
            write_gguf(Path(folder) / f"{kind}.gguf", kind)
            shape = {"model_type": kind, "num_hidden_layers": layers, "num_attention_heads": heads}
            shape |= {"num_key_value_heads": keys, "head_dim": channels, "hidden_size": HIDDEN}
            shape |= {"intermediate_size": INNER, "vocab_size": VOCABULARY}
            sizes = [printed_sizes(python, Path(folder) / f"{kind}.gguf", number) for number in TYPES.values()]
            rows.append({"model": shape, "printed": sizes})
    content = {"what": "sizes of caches that llama.cpp prints", "llama-cpp-python": version.strip(), "rows": rows}
    atomic.replace_file(ROOT / "results" / "fit" / "llamacpp.json", (json.dumps(content, indent=1) + "\n").encode())
    return 0


if __name__ == "__main__":
    sys.exit(main())
