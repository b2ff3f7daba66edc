"""Tables of iq4_nl and octave for the CUDA kernel: bytes of levels, and what a kernel with them is compiled for."""

import pytest
import torch

from kvbench.attention.cuda.config import build, shared_memory, unreadable
from kvbench.attention.cuda.storage import slot_bytes, table_words
from kvbench.attention.phases import Format
from kvbench.attention.reads import CUDA_KEYS, describe_part, unread
from kvbench.attention.synthetic import FULL, Piece, random_part, read_tokens
from kvbench.attention.work import TABLES
from kvbench.cache.segments.packed import PackedSegment
from kvbench.quantizers.engine.amd import octave
from kvbench.quantizers.engine.llamacpp import IQ4NL

H100 = shared_memory((9, 0))


@pytest.mark.parametrize(("kind", "bits"), TABLES)
def test_bytes_are_levels_plus_128_in_the_order_in_which_codes_are_looked_up(kind, bits):
    stream = list(b"".join(word.to_bytes(4, "little") for word in table_words(kind, bits)))
    for code, level in enumerate(TABLES[kind, bits]):
        entry = code if bits == 4 else code >> 1 | (code & 1) << 2
        assert stream[entry] - 128 == level


def test_kernels_have_only_the_tables_and_the_padding_that_they_need():
    values = Format("octave", 3, "token", 128, padding=1)
    made = build(((Format("octave", 4, "token", 64), values), (FULL, FULL)), 128, 4, True, H100)
    rows = made.macros().split("#define TABLE_BYTES ")[1].splitlines()[0]
    assert rows.startswith("{{0x0u, 0x0u, 0x0u, 0x0u}") and f"{table_words('octave', 4)[3]:#x}u" in rows
    assert "#define PADDING_TABLE {1, 0}\n" in made.macros() and (made.warps, made.shares) == (16, 2)
    assert slot_bytes(values, 128) == 128 * (48 + 4)  # two fp16 numbers a token, of which one is unused
    plain = build(((Format("affine", 4, "channel", 32), FULL), (FULL, FULL)), 128, 4, True, H100).macros()
    assert "TABLE_BYTES" not in plain and "PADDING_TABLE" not in plain


def test_padded_keys_and_other_groups_are_refused():
    padded = Format("octave", 4, "token", 64, padding=1)
    assert unreadable(padded, FULL, 128) == "padded scales of keys" and unreadable(FULL, padded, 128) is None
    assert unread(CUDA_KEYS, Format("iq4_nl", 4, "token", 64), 128) == "groups of 64 channels"
    assert unread(CUDA_KEYS, Format("octave", 3, "token", 64), 80) == "groups of 64 channels"
    assert unread(CUDA_KEYS, Format("octave", 4, "token", 32), 128) == "groups of 32 channels"


@pytest.mark.parametrize(
    ("quantizer", "side", "padding"),
    [
        (IQ4NL(), "key", 0),
        (octave("octave_k3v4", 128, 128)[0], "key", 0),
        (octave("octave_k3v4", 128, 128)[1], "value", 1),
        (octave("octave_k3v3_compact", 128, 128)[1], "value", 0),
    ],
)
def test_what_a_segment_stores_is_what_a_kernel_is_told(quantizer, side, padding):
    """The reference for kernels reads a segment's buffers as the quantizer does."""
    x = torch.randn(1, 2, 200, 128, generator=torch.Generator().manual_seed(2))
    segment = PackedSegment(1, 2, 128, torch.float32, "cpu", quantizer=quantizer, side=side, capacity=200)
    segment.append(slice(0, 1), x)
    part = describe_part(segment, 128)
    assert part.format.kind == quantizer.kind and part.format.padding == padding
    found = read_tokens(part, side, 0, slice(None), 0, 200, 128)
    assert torch.allclose(found, segment.read(slice(0, 1), 0, 200, torch.float32)[0], rtol=1e-6, atol=0)


def test_random_padding_is_not_a_number():
    piece = Piece(Format("octave", 4, "token", 64, padding=2), [130])
    part = random_part(piece, "value", 1, 64, torch.float16, torch.Generator().manual_seed(0))
    assert part.params[0].shape[-1] == 3 and part.params[0][..., 1:].isnan().all()
    assert read_tokens(part, "value", 0, slice(None), 0, 130, 64).isfinite().all()
