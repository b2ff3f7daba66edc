"""What the CUDA kernel is configured by: shared memory, slots, columns, and the configurations to choose from."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest

from kvbench.attention.cuda import config, storage
from kvbench.attention.cuda import decode as cuda_build
from kvbench.attention.cuda.config import build_options
from kvbench.attention.cuda.storage import byte_table, codebook_levels, factors_of
from kvbench.attention.synthetic import FULL
from kvbench.attention.work import Format

#: shared memory of a CTA on an H200
H200 = 227 * 1024
AFFINE = Format("affine", 4, "channel", 64), Format("affine", 4, "token", 64)
TWO_BITS = Format("affine", 2, "channel", 32), Format("affine", 2, "token", 32)
E2M1 = Format("float", 4, "token", 16, 0, "e4m3")


def made(**changes: Any) -> config.Build:
    """A configuration of one team of one warp."""
    given: dict[str, Any] = {"channels": 128, "team": 1, "one_column": True, "bf16": False, "phases": (AFFINE,)}
    return config.Build(**{**given, "teams": 1, "stages": 2, "resident": 1, **changes})


@pytest.mark.parametrize(
    ("capability", "kib"),
    [
        ((8, 0), 164), ((8, 6), 100), ((8, 7), 164), ((8, 9), 100), ((9, 0), 228), ((10, 0), 228), ((10, 3), 228),
        ((11, 0), 228), ((12, 0), 100), ((12, 1), 100), ((7, 5), 100), ((13, 0), 100),
    ],
)  # fmt: skip
def test_a_cta_may_have_all_of_a_multiprocessors_shared_memory_but_one_kib(capability, kib):
    """A GPU that is not in the table counts as one with the least."""
    assert config.shared_memory(capability) == (kib - 1) * 1024


def test_several_ctas_share_160_kib_at_most_and_one_may_have_all():
    class Sized(config.Build):
        occupied = 0

    def fits(occupied, resident, shared=H200):
        Sized.occupied = occupied
        return Sized(128, 1, True, False, (AFFINE,), 1, 2, resident).fits(shared)

    assert fits(228 * 1024, 1) and not fits(228 * 1024 + 1, 1)
    assert fits(80 * 1024, 2) and not fits(80 * 1024 + 1, 2)
    assert fits(50 * 1024, 2, 99 * 1024) and not fits(50 * 1024 + 1, 2, 99 * 1024)


def test_the_numbers_of_kinds_axes_and_scales_are_those_of_the_kernels_source():
    named = dict(
        re.findall(r"([A-Z_0-9]+) = (\d+)[,\s}]", "".join(re.findall(r"enum \{.*?\}", cuda_build.cuda_source())))
    )
    for kind, number in config.KINDS.items():
        assert int(named[kind.upper()]) == number, kind
    assert [int(named[name]) for name in ("CHANNEL", "TOKEN")] == [config.AXES["channel"], config.AXES["token"]]
    scales = [config.SCALES[name] for name in ("", "fp16", "fp32", "e4m3")]
    assert [int(named[name]) for name in ("NO_SCALE", "HALF", "SINGLE", "BYTE")] == scales


def test_a_configuration_serves_what_its_warps_have_columns_for():
    assert (made().rows, made().columns, made().slots, made().warps) == (4, 4, 1, 1)
    several = made(one_column=False, team=6, shares=2, blocks=3, teams=2)
    assert (several.rows, several.columns, several.warps) == (8 * 3 * 3, 72, 12)


def test_shared_memory_holds_queries_and_rings_or_what_is_merged_at_the_end():
    """At the end, 4 more numbers a column stand beside the sums of the channels, and 128 weights a warp."""
    slot = 8 * 4 * 256 + 2 * 128 * 4  # codes of 4 bits, scale and minimum of each channel of two groups
    one = made()
    assert (one.slot, one.scratch, one.digits) == (slot, 0, 0)
    assert one.shared == 8 * 128 * 2 + 2 * slot
    assert made(bf16=True).shared == 2 * 8 * 128 * 2 + 2 * slot
    assert made(teams=3, stages=4).shared == 8 * 128 * 2 + 12 * slot
    grouped = made(one_column=False, blocks=2)
    assert grouped.shared == 16 * 128 * 2 + 2 * slot
    wide = made(one_column=False, blocks=3, team=8, shares=2, teams=4, stages=1)
    assert wide.columns == 96 and wide.shared == 4 * 2 * 96 * (128 + 4) * 4
    narrow = made(channels=16, phases=((FULL, FULL),), team=32, shares=32, stages=1)
    assert narrow.shared == max(8 * 16 * 2 + 32 * (2 * 16 + 16), 32 * 4 * 20 * 4, 32 * 128 * 4) == 16384
    static = (2 * 4 * 2 + 1) * 96 * 4 + 4
    assert wide.occupied == wide.shared + -(-static // 128) * 128 + 1024
    assert one.occupied == one.shared + 128 + 1024  # 3 x 8 numbers and one more


def test_a_slot_holds_32_exact_tokens_or_a_tile_of_packed_ones():
    assert made(phases=((FULL, FULL),)).slot == 32 * 256
    assert made(phases=((FULL, FULL),), channels=80).slot == 32 * 176
    assert made(phases=((AFFINE[0], FULL), (FULL, FULL))).slot == 8 * 4 * 256 + 2 * 128 * 4
    eight = Format("affine", 8, "token", 32)
    assert made(phases=((FULL, eight), (FULL, FULL))).slot == 8 * 8 * 256 + 128 * 4 * 4


@pytest.mark.parametrize(("channels", "wanted"), [(64, 128), (80, 176), (96, 208), (128, 256), (256, 512)])
def test_rows_of_keys_lie_16_bytes_apart_unless_they_fill_the_banks(channels, wanted):
    assert storage.pitch(channels) == wanted


@pytest.mark.parametrize(
    ("form", "channels", "more", "wanted"),
    [
        (FULL, 128, {"key": True}, 0),
        (Format("affine", 4, "channel", 32), 128, {"key": True}, 8192 + 4 * 128 * 4),
        (Format("affine", 4, "token", 32), 128, {"key": True}, 8192 + 128 * 4 * 4),
        (Format("affine", 4, "token", 32), 96, {}, 8 * 4 * 192 + 128 * 3 * 4),
        (Format("affine", 4, "token", 32), 96, {"key": True}, 8 * 4 * 208 + 128 * 3 * 4),
        (Format("affine", 3, "token", 128), 128, {}, 6144 + 128 * 4),
        (Format("offset", 8, "token", 128, 0, "fp32"), 128, {"key": True}, 16384 + 128 * 4),
        (E2M1, 64, {}, 4096 + 128 * 4),
        (Format("float", 8, "token", 128, 0, ""), 128, {}, 16384),
        (Format("cross", 4, "channel", 128), 128, {"key": True}, 8192 + 128 * 4 + 256),
        (Format("cross", 4, "token", 128), 128, {"tile": 128}, 8192 + 128 * 4 + 256),
        (Format("cross", 4, "token", 128), 128, {"tile": 64}, 8192 + 128 * 4 + 512),
        (Format("affine", 2, "channel", 42, 42), 64, {"key": True}, 2048 + 2 * 4 * (128 + 16)),
    ],
)
def test_a_slot_has_the_codes_of_128_tokens_and_their_parameters(form, channels, more, wanted):
    assert storage.slot_bytes(form, channels, **more) == wanted


@pytest.mark.parametrize(
    ("form", "key", "wanted"),
    [
        (Format("affine", 4, "token", 32), True, 0),
        (Format("float", 8, "token", 128, 0, ""), False, 0),  # no factors
        (Format("offset", 8, "token", 32), True, 128 * 4 * 4),
        (Format("offset", 8, "token", 128, 0, "fp32"), True, 0),  # one factor a token is not tabulated
        (Format("offset", 8, "token", 32), False, 128 * 4 * 2),
        (Format("offset", 8, "token", 128, 0, "fp32"), False, 128 * 2),
        (Format("folded", 4, "token", 128, 0, "fp32"), False, 2 * 128 * 2),
        (Format("folded", 4, "token", 128, 0, "fp32"), True, 0),
        (E2M1, True, 128 * 8 * 4),
    ],
)
def test_factors_are_tabulated_in_fp32_for_keys_and_in_fp16_for_values(form, key, wanted):
    assert storage.tabulated(form, 128, key=key) == wanted
    if not key:
        assert made(phases=((FULL, form), (FULL, FULL))).scratch == wanted


def test_codes_that_have_columns_need_room_for_the_weights_of_a_tile_alone():
    pair = ((E2M1, E2M1), (FULL, FULL))
    assert made(phases=pair).scratch == 128 * 8 * 4 and made(phases=pair, one_row=True).scratch == 256
    assert made(phases=pair, one_row=True, channels=96).scratch == 128 * 6 * 4


@pytest.mark.parametrize(("channels", "wanted"), [(64, True), (80, False), (96, False), (128, True), (256, False)])
def test_groups_have_columns_in_heads_of_64_and_128_channels(channels, wanted):
    assert storage.has_columns(E2M1, E2M1, channels) is wanted
    for change in ({"kind": "offset"}, {"bits": 8}, {"group": 32}, {"scale": "fp16"}):
        other = replace(E2M1, **change)
        assert not storage.has_columns(other, E2M1, channels) and not storage.has_columns(E2M1, other, channels)


def test_integers_are_multiplied_where_every_condition_holds():
    key, value = TWO_BITS
    assert storage.integers(key, value, 64) and storage.integers(key, value, 128)
    assert not storage.integers(key, value, 96) and not storage.integers(key, value, 256)
    assert not storage.integers(replace(key, axis="token"), value, 128)
    assert not storage.integers(replace(key, group=16), value, 128)
    assert not storage.integers(key, replace(value, group=16), 128)  # 8 groups a token
    assert storage.integers(key, replace(value, group=16), 64)  # 4
    for form in (replace(key, bits=4), replace(key, kind="atom")):
        assert not storage.integers(form, value, 128) and not storage.integers(key, replace(form, axis="token"), 128)


@pytest.mark.parametrize(
    ("phases", "rows", "softcap", "bf16", "wanted"),
    [
        ((TWO_BITS,), 1, False, False, 1),
        ((TWO_BITS,), 1, True, False, 0),
        ((TWO_BITS,), 2, False, True, 0),
        (((Format("levels", 3, "token", 128), FULL),), 1, True, True, 1),
        (((Format("levels", 3, "token", 128), FULL),), 4, True, True, 4),
        (((Format("levels", 3, "token", 128), FULL),), 2, False, True, 4),
        (((Format("levels", 3, "token", 128), FULL),), 5, False, True, 0),
        (((Format("levels", 3, "token", 128), FULL),), 1, False, False, 0),
        (((Format("levels", 4, "token", 128), FULL),), 1, False, True, 0),
        (((FULL, FULL),), 1, False, True, 0),
        (((Format("affine", 2, "channel", 42, 42), FULL), TWO_BITS), 1, False, True, 0),
    ],
)
def test_so_many_query_rows_are_multiplied_as_integers(phases, rows, softcap, bf16, wanted):
    assert storage.integer_rows(phases, 128, rows, softcap, bf16) == wanted


def test_digits_of_queries_take_room_only_where_levels_are_multiplied_as_integers():
    levels = ((Format("levels_read", 3, "token", 128), FULL), (FULL, FULL))
    assert [made(phases=levels, bf16=True, integer=n).digits for n in (0, 1, 4)] == [0, 128 * 32 + 128, 128 * 16 + 128]
    assert made(phases=levels, integer=1).digits == 0  # fp16
    assert made(phases=(TWO_BITS,), bf16=True, integer=1).digits == 0
    with_digits, without = (made(phases=levels, bf16=True, integer=n, teams=2) for n in (4, 0))
    assert with_digits.shared - without.shared == with_digits.digits


def chosen(*given: Any, **more: Any) -> list[tuple[int, ...]]:
    names = ("team", "shares", "blocks", "teams", "resident")
    found = build_options(*given, **more)
    assert all(set(option) == {*names, "stages"} and option["stages"] == 2 for option in found)
    return [tuple(option[name] for name in names) for option in found]


ALONE = [(1, 1, 1, teams, 1) for teams in (4, 2, 1)]


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        ((1, False, False, False),
         [(1, 1, 1, 4, 2), (1, 1, 1, 8, 1), (2, 2, 1, 4, 1), (2, 2, 1, 3, 1), (2, 2, 1, 2, 1), *ALONE]),
        ((8, True, False, True), [(1, 1, 1, 8, 1), (2, 2, 1, 4, 1), (2, 2, 1, 3, 1), (2, 2, 1, 2, 1), *ALONE]),
        ((8, False, True, False), [(1, 1, 1, 4, 2), (1, 1, 1, 8, 1), *ALONE]),
        ((4, False, False, True, True),
         [(2, 2, 1, 8, 1), (1, 1, 1, 8, 1), (2, 2, 1, 4, 1), (2, 2, 1, 3, 1), (2, 2, 1, 2, 1), *ALONE]),
        ((4, False, True, True, True), [(1, 1, 1, 8, 1), *ALONE]),
        ((9, True, False, False), [(2, 1, 1, teams, 1) for teams in (4, 2, 1)]),
        ((33, False, True, False), [(3, 1, 1, teams, 1) for teams in (4, 2, 1)]),
        ((16, False, False, False), [(1, 1, 2, 8, 1), *[(2, 2, 2, teams, 1) for teams in (4, 3, 2, 1)]]),
        ((17, False, False, False), [(2, 2, 3, teams, 1) for teams in (4, 3, 2, 1)]),
        ((32, False, False, False), [(1, 1, 2, 8, 1), *[(2, 2, 2, teams, 1) for teams in (4, 3, 2, 1)]]),
        ((48, False, False, False), [(2, 2, 3, teams, 1) for teams in (4, 3, 2, 1)]),
    ],
)  # fmt: skip
def test_configurations_come_with_the_fastest_first(given, wanted):
    """Pairs of warps cannot share tiles of fine groups; 16 warps serve 4-bit levels of up to four columns."""
    assert chosen(*given) == wanted


def test_sixteen_warps_serve_up_to_four_columns_only():
    assert chosen(5, False, False, True, True) == chosen(5, False, False, True)


@pytest.mark.parametrize(("bits", "group", "warps"), [(4, 32, 16), (8, 128, 8)])
def test_narrow_floats_are_unpacked_by_16_warps(bits, group, warps):
    form = Format("float", bits, "token", group)  # rings for tiles of 8 bits fit four pairs of warps
    assert config.build(((form, form), (FULL, FULL)), 128, 2, True, H200).warps == warps


def test_one_row_of_narrow_floats_has_columns_for_its_groups():
    pair = ((E2M1, E2M1), (FULL, FULL))
    one = config.build(pair, 128, 1, True, H200)
    assert one.one_row and one.teams == 8 and "#define ONEROW 1\n" in one.macros()
    for built in (
        config.build(pair, 128, 2, True, H200),
        config.build(pair, 128, 1, True, H200, softcap=True),
        config.build(pair, 96, 1, True, H200),
        config.build(pair, 128, 1, True, H200, (("one_row", 0),)),
        config.build((AFFINE,), 128, 1, True, H200),
    ):
        assert not built.one_row and "#define ONEROW 0\n" in built.macros()


def test_the_macros_of_levels_are_those_of_the_widths_in_use():
    three, four = (((Format("levels", bits, "token", 128), FULL), (FULL, FULL)) for bits in (3, 4))
    zeros = "{0x0u, 0x0u, 0x0u, 0x0u}"

    def words(numbers):
        return "{" + ", ".join(f"{number:#x}u" for number in numbers) + "}"

    found = config.level_macros(three, 128)
    assert found["LEVEL_BYTES"] == "{" + words(codebook_levels(128, 3).words) + ", " + zeros + "}"
    assert found["LEVEL_UNITS"] == f"{{{codebook_levels(128, 3).unit:.9e}f, {0:.9e}f}}"
    bytes_of = byte_table(128)
    assert found["ENTRY_BYTES"] == words(bytes_of.words)
    assert found["ENTRY_UNITS"] == f"{{{bytes_of.unit:.9e}f, {bytes_of.read_unit:.9e}f}}"
    found = config.level_macros(four, 64)
    assert found["LEVEL_BYTES"] == "{" + zeros + ", " + words(codebook_levels(64, 4).words) + "}"
    assert found["LEVEL_UNITS"] == f"{{{0:.9e}f, {codebook_levels(64, 4).unit:.9e}f}}"
    assert found["ENTRY_BYTES"] == zeros and found["ENTRY_UNITS"] == f"{{{0:.9e}f, {0:.9e}f}}"
    assert config.level_macros(((FULL, FULL), AFFINE), 128) == {}
    assert "LEVEL_BYTES" in config.build(three, 128, 1, True, H200).macros()


def test_factors_of_levels_go_from_one_to_two():

    assert factors_of(0) == 1.0 and factors_of(storage.FACTORS) == 2.0 and factors_of(storage.FACTORS // 2) == 1.5


def test_the_kernel_is_built_for_the_gpu_on_which_it_runs(monkeypatch):
    """Its shared memory as the driver says it, else as the table does; slow integers on a B300 alone."""
    import torch

    asked = []
    monkeypatch.setattr(cuda_build, "build", lambda *given: asked.append(given) or "built")
    monkeypatch.setattr(cuda_build, "Kernel", lambda *given: given)
    for capability, told, shared, fast in (
        ((9, 0), {"shared_memory_per_block_optin": 5}, 5, True),
        ((8, 6), {}, 99 * 1024, True),
        ((10, 3), {}, H200, False),
        ((10, 0), {}, H200, True),
    ):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device, found=capability: found)
        properties = type("Properties", (), told)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device, found=properties: found)
        got = cuda_build.cuda_kernel.__wrapped__((AFFINE,), 128, 4, True, 3, (("teams", 2),), True, 2)
        assert got == ("built", 3)
        assert asked.pop() == ((AFFINE,), 128, 4, True, shared, (("teams", 2),), True, 2, fast)
    cuda_build.cuda_kernel.__wrapped__((AFFINE,), 64, 1, False, 0)
    assert asked.pop() == ((AFFINE,), 64, 1, False, H200, (), False, 0, True)


@pytest.mark.parametrize(("capability", "wanted"), [((9, 0), True), ((8, 9), False), ((10, 0), True)])
def test_a_kernel_begins_before_the_last_has_ended_from_hopper_on(capability, wanted, monkeypatch):
    import torch

    loaded = []
    monkeypatch.setattr(cuda_build.nvrtc.Function, "__init__", lambda self, *given: loaded.append(given))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    build = made(teams=2)
    kernel = cuda_build.Kernel(build, 1)
    assert kernel.build is build
    assert loaded == [(build.macros() + cuda_build.cuda_source(), "decode", 1, 64, build.shared, wanted)]
    monkeypatch.setattr(cuda_build, "OVERLAPPED", False)
    cuda_build.Kernel(build, 1)
    assert loaded[1][-1] is False
