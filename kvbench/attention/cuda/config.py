"""The configuration of the CUDA decode kernel: what it is compiled for, and how many warps, slots and CTAs it gets."""

from __future__ import annotations

from dataclasses import dataclass

from kvbench.attention.cuda.storage import (
    LEVELS,
    NO_BYTES,
    NONE,
    Signature,
    byte_table,
    codebook_levels,
    columns_of_row,
    groups_met,
    has_columns,
    integer_rows,
    level_bytes,
    pitch,
    slot_bytes,
    table_words,
    tabulated,
)
from kvbench.attention.work import FACTORED, TABLES, Format


def build_options(columns: int, wide: bool, fine: bool, dense: bool, small: bool = False) -> list[dict[str, int]]:
    """Return the configurations to choose from, the fastest on an H200 first.

    Queries are the columns of the kernel's matrix products. Up to 8 columns, each warp has its own tiles, or two warps
    share the tokens of a tile, which takes half the shared memory. With more columns, each warp serves two blocks of 8,
    or two warps that share a tile serve two or three.

    Args:
        columns: number of columns that the query rows of a KV head take, usually one each.
        wide: True for heads of more than 128 channels, which leave a warp registers for one block of rows only.
        fine: True if a group has fewer than 32 tokens, so that two warps cannot share the tokens of a tile.
        dense: True if unpacking limits the speed: for codes of 3 bits, of levels or of tables, and for e2m1 codes with
            a column for each group.
        small: True if unpacking and factors limit the speed, for 4-bit codes of levels or of tables and other e2m1
            codes: with up to 4 columns, 16 warps of 128 registers are then faster than 8 of 256.

    Returns:
        Values for ``team``, ``shares``, ``blocks``, ``teams``, ``stages`` and ``resident`` of a :class:`Build`.
    """
    blocks = -(-columns // 8)
    # team, shares, blocks, teams, resident
    if blocks == 1:
        choices = [(1, 1, 1, 4, 2), (1, 1, 1, 8, 1), (2, 2, 1, 4, 1), (2, 2, 1, 3, 1), (2, 2, 1, 2, 1)]
        # dense: one CTA of 8 teams a multiprocessor rather than two of 4, the first choice otherwise
        choices = [(2, 2, 1, 8, 1)] * (small and columns <= 4) + choices[dense:]
        choices = [choice for choice in choices if choice[1] == 1 or not fine]
        choices += [(1, 1, 1, teams, 1) for teams in (4, 2, 1)]
    elif wide or fine:
        choices = [(min(blocks, 3), 1, 1, teams, 1) for teams in (4, 2, 1)]
    else:
        # 2 or 3 blocks a warp: as few CTAs as possible, then as few empty rows
        warp_blocks = min((3, 2), key=lambda n: (-(-blocks // n), -blocks % n))
        choices = [(1, 1, 2, 8, 1)] if warp_blocks == 2 else []
        choices += [(2, 2, warp_blocks, teams, 1) for teams in (4, 3, 2, 1)]
    names = ("team", "shares", "blocks", "teams", "resident")
    return [{**dict(zip(names, choice, strict=True)), "stages": 2} for choice in choices]


KINDS = {
    "full": 0,
    "affine": 1,
    "atom": 2,
    "hierarchical": 3,
    "offset": 4,
    "folded": 5,
    "float": 6,
    "levels": 7,
    "cross": 8,
    "levels_read": 9,
    "iq4_nl": 10,
    "octave": 11,
}
#: types in which scales are stored
SCALES = {"": 0, "fp16": 1, "fp32": 2, "e4m3": 3}
AXES = {"": 0, "channel": 0, "token": 1}
#: largest number of CTAs that share the tokens of a head: the last one keeps a weight for each in shared memory
MOST_SPLITS = 128
#: KiB of shared memory of a multiprocessor, by compute capability (CUDA C++ programming guide, technical
#: specifications); a CTA may have all but one, which the system takes of each CTA's share
MULTIPROCESSOR = {
    (8, 0): 164,
    (8, 6): 100,
    (8, 7): 164,
    (8, 9): 100,
    (9, 0): 228,
    (10, 0): 228,
    (10, 3): 228,
    (11, 0): 228,
    (12, 0): 100,
    (12, 1): 100,
}
#: compute capabilities of GPUs whose matrix units multiply integers at a small fraction of fp16's speed (data sheet of
#: HGX B300)
SLOW_INTEGERS = ((10, 3),)
#: bytes that the system takes of each CTA's share of a multiprocessor's shared memory
RESERVED = 1024
#: bytes of shared memory that CTAs of a multiprocessor share at most, if there are several: the rest caches loads
SEVERAL = 160 * 1024


@dataclass(frozen=True)
class Build:
    """Compile-time configuration of the CUDA decode kernel, as values for the macros that ``cuda/header.cuh`` explains.

    A *team* is a group of warps that load tiles into the same ring buffer in shared memory. A *query row* is the query
    of one new token in one of the query heads that share a KV head.

    Args:
        channels: number of channels of a head (macro ``D``).
        team: number of warps in a team (``TEAM``).
        one_column: True if a CTA serves at most 4 query rows (``ONECOL``). The kernel then leaves every other of the 8
            columns of its matrix instructions empty, and does no work for the empty ones.
        bf16: True if the query, the output and segments in full precision are bf16; False for fp16.
        teams: number of teams in a CTA (``TEAMS``).
        stages: number of slots in a team's ring buffer (``STAGES``).
        resident: number of CTAs that a multiprocessor must be able to run at once (``MINB``), which bounds the
            registers of a thread.
        sinks: dtype of the model's attention sinks, as a number. 0: no sinks; 1: the dtype of the query; 2: fp32.
        blocks: number of blocks of 8 query rows that a warp serves (``NT``). A warp unpacks each code once for all of
            them.
        shares: number of warps of a team that serve the same query rows (``SHARES``): 1, or 2 that take every second
            16 tokens of a tile each, which halves the scores that a warp keeps in registers.
        integer: largest number of query rows for which codes are multiplied as integers (``INTEGER``): 1, 4, or 0 for
            fp16 only; requires one warp per team (:func:`integer_rows`).
        one_row: True if there is one query row, for which each group of e2m1 codes has a column of the products, in
            the phases for which :func:`has_columns` is True (``ONEROW``); requires scores without a softcap.
    """

    channels: int
    team: int
    one_column: bool
    bf16: bool
    phases: Signature
    teams: int
    stages: int
    resident: int
    softcap: bool = False
    sinks: int = 0
    blocks: int = 1
    shares: int = 1
    integer: int = 0
    one_row: bool = False

    @property
    def rows(self) -> int:
        """Largest number of query rows that a CTA can serve."""
        return self.columns // self.slots

    @property
    def slots(self) -> int:
        """Number of columns of the products that a query row takes."""
        return 1 if self.integer == 1 else columns_of_row(self.phases)

    @property
    def columns(self) -> int:
        """Number of columns of the products that a CTA computes for query rows (:func:`columns_of_row`)."""
        return 4 if self.one_column else 8 * self.blocks * (self.team // self.shares)

    @property
    def warps(self) -> int:
        """Number of warps in a CTA."""
        return self.team * self.teams

    @property
    def slot(self) -> int:
        """Size of a slot of the ring buffer in bytes.

        A slot holds the keys or the values of one tile of packed tokens, or of 32 tokens in full precision.
        """
        sizes = [32 * pitch(self.channels) if "full" in (k.kind, v.kind) else 0 for k, v in self.phases]
        for key, value in self.phases:
            sizes += [slot_bytes(key, self.channels, key=True), slot_bytes(value, self.channels, tile=key.group)]
        return max(sizes)

    @property
    def shared(self) -> int:
        """Dynamic shared memory of a CTA in bytes."""
        columns = self.columns if not self.one_column else 8
        queries = (2 if self.bf16 else 1) * columns * self.channels * 2 + self.digits
        merged = self.teams * self.shares * self.columns * (self.channels + 4) * 4
        weights = self.warps * MOST_SPLITS * 4
        rings = self.teams * self.stages * self.slot
        # the same memory serves three times: for the tiles, then to merge the teams, then (in the last CTA) all CTAs
        return max(queries + rings + self.warps * self.scratch, merged, weights)

    @property
    def digits(self) -> int:
        """Bytes of shared memory for queries split into integer digits, 128 of them for sums (``DIGIT_BYTES``)."""
        if not (self.integer and self.bf16 and any(level_bytes(key) for key, _ in self.phases)):
            return 0
        return self.channels * (32 if self.integer == 1 else 16) + 128

    @property
    def scratch(self) -> int:
        """Bytes of shared memory in which a warp keeps a tile's factors (``cuda/factors.cuh``) or softmax weights."""
        sizes = []
        for key, value in self.phases:
            if self.one_row and has_columns(key, value, self.channels):
                sizes.append(2 * 128)  # the weights of a tile's tokens, in fp16
            else:
                sizes += [tabulated(key, self.channels, key=True), tabulated(value, self.channels)]
        return max(sizes)

    @property
    def occupied(self) -> int:
        """Shared memory that a CTA takes of a multiprocessor in bytes, dynamic, static and reserved."""
        static = (2 * self.teams * self.shares + 1) * max(self.columns, 8) * 4 + 4
        return self.shared + -(-static // 128) * 128 + RESERVED  # memory is given out in pieces of 128 bytes

    def fits(self, shared: int) -> bool:
        """Return True if :attr:`resident` CTAs fit into a multiprocessor that allows one CTA `shared` bytes."""
        room = shared + RESERVED
        return self.occupied * self.resident <= (room if self.resident == 1 else min(room, SEVERAL))

    def macros(self) -> str:
        """Return the macro definitions that must precede the kernel's source."""
        table = ", ".join(
            "{"
            + ", ".join(str(x) for f in pair for x in (KINDS[f.kind], f.bits, AXES[f.axis], f.group, SCALES[f.scale]))
            + "}"
            for pair in self.phases
        )
        values = {
            "D": self.channels,
            "TEAM": self.team,
            "SHARES": self.shares,
            "NT": self.blocks,
            "ONECOL": int(self.one_column),
            "BF16": int(self.bf16),
            "TEAMS": self.teams,
            "STAGES": self.stages,
            "MINB": self.resident,
            "SLOT": self.slot,
            "SCRATCH": self.scratch,
            "SOFTCAP": int(self.softcap),
            "SINKS": self.sinks,
            "INTEGER": int(self.integer),
            "DIGIT_BYTES": self.digits,
            "ONEROW": int(self.one_row),
            "NPHASES": len(self.phases),
            "PHASE_TABLE": "{" + table + "}",
            "WINDOW_TABLE": "{" + ", ".join(str(key.window) for key, _ in self.phases) + "}",
            "MET": columns_of_row(self.phases),
            "SLOTS": self.slots,
            **level_macros(self.phases, self.channels),
            **table_macros(self.phases),
        }
        return "".join(f"#define {name} {value}\n" for name, value in values.items())


def level_macros(phases: Signature, channels: int) -> dict[str, str]:
    """Return macros that define the levels of keys' 3-bit and 4-bit codes, zeros if unused; empty without such keys."""
    widths = {key.bits for key, _ in phases if key.kind in LEVELS}
    if not widths:
        return {}
    tables = [codebook_levels(channels, bits) if bits in widths else NONE for bits in (3, 4)]
    words = ", ".join("{" + ", ".join(f"{word:#x}u" for word in entry.words) + "}" for entry in tables)
    units = ", ".join(f"{entry.unit:.9e}f" for entry in tables)
    entries = byte_table(channels) if 3 in widths else NO_BYTES
    return {
        "LEVEL_BYTES": "{" + words + "}",
        "LEVEL_UNITS": "{" + units + "}",
        "ENTRY_BYTES": "{" + ", ".join(f"{word:#x}u" for word in entries.words) + "}",
        "ENTRY_UNITS": f"{{{entries.unit:.9e}f, {entries.read_unit:.9e}f}}",
    }


def table_macros(phases: Signature) -> dict[str, str]:
    """Return macros for codes of :data:`TABLES`: the levels, zeros if unused, and the padding of values.

    Empty without such codes.
    """
    used = {(form.kind, form.bits) for pair in phases for form in pair} & set(TABLES)
    if not used:
        return {}
    tables = [table_words(*entry) if entry in used else (0,) * 4 for entry in TABLES]
    return {
        "TABLE_BYTES": "{" + ", ".join("{" + ", ".join(f"{word:#x}u" for word in row) + "}" for row in tables) + "}",
        "PADDING_TABLE": "{" + ", ".join(str(value.padding) for _, value in phases) + "}",
    }


def shared_memory(capability: tuple[int, int]) -> int:
    """Return the bytes of shared memory that a GPU allows a CTA; for an unknown GPU, the least that any GPU allows."""
    return MULTIPROCESSOR.get(capability, min(MULTIPROCESSOR.values())) * 1024 - RESERVED


def build(
    phases: Signature,
    channels: int,
    rows: int,
    bf16: bool,
    shared: int,
    tuning: tuple[tuple[str, int], ...] = (),
    softcap: bool = False,
    sinks: int = 0,
    fast_integers: bool = True,
) -> Build:
    """Choose the kernel configuration for a number of query rows: the fastest that fits into shared memory.

    Which candidates are faster was measured on an H200. If none fits, the one with the smallest buffers is returned.

    Args:
        rows: number of query rows of a KV head, which is query heads per KV head times new tokens.
        shared: bytes of shared memory that the device allows a CTA (:func:`shared_memory`).
        tuning: overrides of numbers of :class:`Build` (``teams``, ``stages``, ...), as pairs of name and value.
        fast_integers: True if the GPU multiplies integers as fast as fp16 (:data:`SLOW_INTEGERS`).
    """
    columns = rows * columns_of_row(phases)
    forms = [form for pair in phases for form in pair if form.kind != "full"]
    fine = any(form.group < 32 and form.axis == "channel" and not form.window for form in forms)
    one_row = columns == 1 and not softcap and any(has_columns(key, value, channels) for key, value in phases)
    looked_up = (*LEVELS, "iq4_nl", "octave")
    dense = one_row or any(form.bits == 3 or form.kind in looked_up for form in forms)
    small = not one_row and any(form.kind in ("float", *looked_up) and form.bits == 4 for form in forms)
    for option in build_options(columns, channels > 128, fine, dense, small):
        values = {**option, **dict(tuning)}
        fast = fast_integers and values["team"] == 1  # integers need one warp per team
        integer = int(values.pop("integer", integer_rows(phases, channels, rows, softcap, bf16) if fast else 0))
        candidate = Build(
            channels,
            one_column=columns <= 4,
            bf16=bf16,
            phases=phases,
            softcap=softcap,
            sinks=sinks,
            integer=integer,
            one_row=bool(values.pop("one_row", one_row)),
            **values,
        )
        if candidate.fits(shared):
            break
    return candidate


#: largest number of groups in a token's value: the product that sums their minima has a row for each of so many
VALUE_GROUPS = 8


def unreadable(key: Format, value: Format, channels: int) -> str | None:
    """Return why the kernel cannot read two formats in one phase, although it reads each; None if it can."""
    if value.kind == "cross" and key.kind != "cross":
        return "cross factors of values, but not of keys"
    if key.padding:
        return "padded scales of keys"
    minima = value.kind != "full" and value.kind not in FACTORED
    if minima and channels // min(value.group, channels) > VALUE_GROUPS:
        return f"values in {channels // value.group} groups a token, more than {VALUE_GROUPS}"
    if key.window and groups_met(key) > 8:
        return f"windows of {key.window} tokens in groups of {key.group}: over 8 groups in a tile"
    return None
