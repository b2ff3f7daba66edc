"""Headers of GGUF files: what is read, and that every damage is named and bounded."""

from __future__ import annotations

import random
import struct
from pathlib import Path

import pytest

from kvbench.models.checkpoint import DamagedFile
from kvbench.models.gguf.header import MOST_ELEMENTS, Array, read_header
from tests.models.gguf import files


@pytest.fixture(scope="module")
def toy(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    return files.write(tmp_path_factory.mktemp("gguf") / "toy.gguf").read_bytes()


def text(value: bytes) -> bytes:
    return struct.pack("<Q", len(value)) + value


def header(keys: bytes = b"", count: int = 1, tensors: bytes = b"", tensor_count: int = 0, version: int = 3) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", version, tensor_count, count) + keys + tensors + bytes(4096)


def test_it_is_what_was_written(tmp_path: Path, toy: bytes) -> None:
    (tmp_path / "a.gguf").write_bytes(toy)
    read = read_header(tmp_path / "a.gguf")
    assert read.architecture == "llama"
    assert read.keys["llama.context_length"] == 256 and read.keys["tokenizer.ggml.pre"] == "smollm"
    assert read.keys["tokenizer.ggml.merges"] == Array(len(files.MERGES))
    assert read.keys["llama.rope.freq_base"] == 10000.0
    written = files.tensors()
    assert {name: tensor.shape[::-1] for name, tensor in read.tensors.items()} == {
        name: weights.shape for name, weights in written.items()
    }
    assert read.tensors["blk.0.attn_q.weight"].type == files.gguf.GGMLQuantizationType.Q4_1
    reader = files.gguf.GGUFReader(tmp_path / "a.gguf")
    assert {tensor.name: tensor.data_offset for tensor in reader.tensors} == {
        name: read.start + tensor.place for name, tensor in read.tensors.items()
    }


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (b"GGML" + bytes(40), "does not begin with GGUF"),
        (b"GG", "ends within its header"),
        (header(version=1), "has version 1 of the format"),
        (header(version=0x03000000), "other order of bytes"),
        (header(count=1 << 40), r"states 1099511627776 keys; at most"),
        (header(tensor_count=1 << 40), r"states 1099511627776 tensors; at most"),
        (header(struct.pack("<Q", 1 << 62)), "has a text of 4611686018427387904 bytes"),
        (header(text(b"k") + struct.pack("<IQ", 8, 1 << 30)), "has a text of 1073741824 bytes"),
        (header(text(b"k") + struct.pack("<I", 8) + text(b"\xff\xfe")), "is not UTF-8"),
        (header(text(b"k") + struct.pack("<I", 77)), "gives 'k' the type 77"),
        (header(text(b"k") + struct.pack("<IIQ", 9, 4, MOST_ELEMENTS + 1)), "elements of 'k'; at most"),
        (header(text(b"k") + struct.pack("<IIQ", 9, 4, MOST_ELEMENTS)), "ends within its header"),
        (header(text(b"k") + struct.pack("<IIQ", 9, 9, 1)), "elements of 'k' the type 9"),
        (header(2 * (text(b"k") + struct.pack("<II", 4, 1)), count=2), "has the key 'k' twice"),
        (header(text(b"general.alignment") + struct.pack("<II", 4, 24)), "general.alignment=24"),
        (header(count=0, tensors=text(b"t") + struct.pack("<I", 5), tensor_count=1), "5 dimensions"),
        (header(count=0, tensors=text(b"t") + struct.pack("<IQ", 1, 0), tensor_count=1), "for which the file is too"),
        (
            header(count=0, tensors=text(b"t") + struct.pack("<IQQ", 2, 1 << 40, 1 << 40), tensor_count=1),
            "for which the file is too small",
        ),
        (
            header(count=0, tensors=text(b"t") + struct.pack("<IQIQ", 1, 8, 0, 1 << 40), tensor_count=1),
            "places the tensor 't' at byte 1099511627776",
        ),
        (header(count=0, tensors=text(b"t") + struct.pack("<IQIQ", 1, 8, 0, 4), tensor_count=1), "at byte 4"),
    ],
)
def test_damage_is_named(tmp_path: Path, content: bytes, problem: str) -> None:
    (tmp_path / "a.gguf").write_bytes(content)
    with pytest.raises(DamagedFile, match=problem):
        read_header(tmp_path / "a.gguf")


def test_a_file_that_is_cut_or_scrambled_is_never_a_surprise(tmp_path: Path, toy: bytes) -> None:
    (tmp_path / "whole.gguf").write_bytes(toy)
    end, file, rng = read_header(tmp_path / "whole.gguf").start, tmp_path / "a.gguf", random.Random(0)
    for length in range(0, end, 997):
        file.write_bytes(toy[:length])
        with pytest.raises(DamagedFile):
            read_header(file)
    refused = 0
    for _ in range(60):
        scrambled = bytearray(toy[: end + 64])
        for place in rng.sample(range(200), 3):
            scrambled[place] = rng.randrange(256)
        file.write_bytes(scrambled)
        try:
            read_header(file)
        except DamagedFile:
            refused += 1
    assert refused > 30


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(DamagedFile, match=r"none\.gguf cannot be loaded: it cannot be read \(No such file"):
        read_header(tmp_path / "none.gguf")
