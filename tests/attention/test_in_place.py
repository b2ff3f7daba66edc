"""The Triton kernel that visits runs where they stand, in the interpreter, against fp32 attention and the reference."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from tests.attention import interpreter

interpreter.require()

from kvbench.attention import fused, phases, reference  # noqa: E402
from kvbench.attention.logits import Logits  # noqa: E402
from kvbench.attention.phases import Format, NotServed  # noqa: E402
from kvbench.attention.synthetic import FULL, Piece, dequantized_attention, layer, relative_error  # noqa: E402
from kvbench.attention.triton import decode as triton_decode  # noqa: E402
from kvbench.attention.triton import in_place  # noqa: E402
from kvbench.methods import load_method  # noqa: E402
from tests import zoo  # noqa: E402

TOLERANCE = 3e-3
triton_decode.TABLE.update(triton_decode.changed(full_step=64))
FORMATS = {bits: (Format("affine", bits, "channel", 32), Format("affine", bits, "token", 64)) for bits in (2, 4)} | {
    16: (FULL, FULL)
}


def runs(widths: list[int], lengths: list[list[int]], channels: int = 64) -> Any:
    """Return a layer's work: a segment for each run, of one width and with one length for each row; the newest last."""
    keys, values = (
        [Piece(FORMATS[width][side], counts, room=8) for width, counts in zip(widths, lengths, strict=True)]
        for side in (0, 1)
    )
    return layer(keys, values, heads=2, key_dim=channels, value_dim=channels)


def queries(batch: int, heads: int, count: int, channels: int = 64) -> torch.Tensor:
    drawn = torch.randn(batch, heads, count, channels, generator=torch.Generator().manual_seed(3))
    return (drawn * 1.5).half()


def check(work: Any, query: torch.Tensor) -> torch.Tensor:
    scaling = query.shape[-1] ** -0.5
    assert in_place.refuses(query, work) is None
    out = in_place.attend(query, work, scaling)
    assert relative_error(out, dequantized_attention(query, work, scaling)) < TOLERANCE
    return out


WIDTHS = [16, 2, 4, 2, 16, 4, 2, 16]
LENGTHS = [[7, 3], [32, 64], [160, 32], [64, 0], [32, 96], [32, 32], [288, 32], [41, 40]]


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("parts", [1, 2])
def test_runs_of_all_widths_in_any_order(parts: int, count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs shorter than a tile, longer ones with whole tiles, rows without a run; one program and two that merge."""
    work = runs(WIDTHS, LENGTHS)
    monkeypatch.setattr(type(work), "tiles", lambda self: parts)
    check(work, queries(2, 4, count))


@pytest.mark.parametrize(
    "logits", [Logits(5.0), Logits(None, torch.tensor([1.0, -2.0, 0.5, 3.0]))], ids=["cap", "sinks"]
)
def test_caps_and_sinks(logits: Logits) -> None:
    work = runs([2, 16, 4, 16], [[32], [5], [64], [9]])
    work.logits = logits
    check(work, queries(1, 4, 1))


def test_more_parts_than_the_last_program_merges(monkeypatch: pytest.MonkeyPatch) -> None:
    work = runs([4, 16], [[128], [70]])
    monkeypatch.setitem(triton_decode.TABLE, 4, triton_decode.Tuning(fused=1, full_step=64))
    check(work, queries(1, 2, 1))


def test_the_kernel_is_compiled_for_the_widths_and_not_for_their_order() -> None:
    one, other = runs(WIDTHS, LENGTHS), runs([2, 4, 16], [[32], [32], [9]])
    assert in_place.tables(one)[0] == in_place.tables(other)[0]
    assert [len(in_place.tables(work)[1]) for work in (one, other)] == [8, 3]
    assert in_place.tables(one)[2] is in_place.tables(one)[2]  # of a captured step, which cannot make another
    assert one.phases[0][0].buffer is not None
    assert int(in_place.tables(one)[2][0, 0]) == one.phases[0][0].buffer.data_ptr()


def test_what_it_refuses() -> None:
    packed = layer([Piece(FORMATS[4][0], [64])], [Piece(FORMATS[4][1], [64])], heads=2, key_dim=64, value_dim=64)
    assert in_place.refuses(queries(1, 4, 1), packed) == "newest tokens that are packed"
    apart = layer(
        [Piece(FORMATS[4][0], [64]), Piece(FULL, [9])], [Piece(FULL, [64]), Piece(FULL, [9])],
        heads=2, key_dim=64, value_dim=64,
    )  # fmt: skip
    assert "only the keys or only the values" in str(in_place.refuses(queries(1, 4, 1), apart))
    assert "heads of 96 channels" in str(in_place.refuses(queries(1, 4, 1, 96), runs([16], [[5]], 96)))


def test_a_kernel_that_cannot_be_compiled_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """The compiler is asked once; lack of memory is no failure of it."""
    work, query = runs([4, 16], [[32], [9]]), queries(1, 4, 1)
    raised: list[Exception] = [torch.OutOfMemoryError("CUDA out of memory"), ValueError("an instruction")]

    def at_once(launch: Any) -> int:
        raise raised.pop(0)

    monkeypatch.setattr(in_place, "FAILED", {})
    monkeypatch.setattr(in_place, "INTERPRETED", False)
    monkeypatch.setattr(in_place._Launch, "at_once", at_once)
    with pytest.raises(torch.OutOfMemoryError):
        in_place.refuses(query, work)
    for _ in range(3):  # layers and steps
        assert in_place.refuses(query, work) == "its kernel cannot be compiled (ValueError)"


def cocktail(length: int, batch: int = 1) -> Any:
    """A layer of Cocktail in place after a prompt and three steps, with chunks of all widths in a mixed order."""
    from kvbench.methods.cocktail import ChunkPlan, Plans
    from kvbench.retrieval.chunks import Chunked, Widths

    drawn, chunks, plans = random.Random(5), length // 32, []
    for _ in range(batch):
        widths = [drawn.choice((2, 2, 4, 16)) for _ in range(chunks)]
        plans.append(ChunkPlan(Chunked(0, 32, ("",) * chunks, "", "input"), Widths(tuple(widths), None, None)))
    method = load_method("cocktail", encoder="bm25", reorder=False)
    held = zoo.new_layer(method)
    held.progress.method_state = Plans(plans)
    keys, values = (x.half() for x in zoo.random_kv(length + 4, batch, 2, 64))
    zoo.feed(held, keys[:, :, :length], values[:, :, :length])
    for step in range(length, length + 4):
        zoo.feed(held, keys[:, :, step : step + 1], values[:, :, step : step + 1])
    return held


@pytest.mark.parametrize("batch", [1, 2])
def test_cocktail_in_place_equals_the_eager_path(batch: int) -> None:
    held = cocktail(363, batch)
    work = phases.work(held)
    assert work.in_place and len(work.phases) > 6
    query = queries(batch, 4, 1)
    eager = reference.attend_reference(torch.nn.Module(), held, query, None, 64**-0.5)
    assert relative_error(check(work, query), eager) < TOLERANCE


def test_on_a_gpu_the_kernel_for_runs_is_picked_and_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    held = cocktail(200)
    work = phases.work(held)
    name, module = fused.pick(queries(1, 4, 1), work, "triton")
    assert (name, module) == ("in_place", in_place)
    assert fused.label(name, work) == {"in_place", "packed"}
    with pytest.raises(NotServed, match="cuda: only Triton's kernel reads segments in the order of the text"):
        fused.pick(queries(1, 4, 1), work, "cuda")
    with pytest.raises(NotServed, match="order of the text, which a CPU's kernels do not support"):
        fused.check_plain_causal(held, None, 1)
    held.device = torch.device("cuda")
    fused.check_plain_causal(held, None, 1)
