"""Compilation of the CUDA decode kernel for a configuration (:class:`Build`), by nvrtc, once per machine.

The module :mod:`kvbench.util.nvrtc` compiles, loads and launches it.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache, lru_cache
from pathlib import Path

import torch

from kvbench.attention.phases import Format
from kvbench.util import nvrtc

KINDS = {"full": 0, "affine": 1, "atom": 2, "hierarchical": 3}
AXES = {"": 0, "channel": 0, "token": 1}
#: the files of the source, in the order in which they are joined
PARTS = (
    "header.cuh",
    "instructions.cuh",
    "storage.cuh",
    "loads.cuh",
    "scores.cuh",
    "softmax.cuh",
    "values.cuh",
    "walk.cuh",
    "queries.cuh",
    "merge.cuh",
    "decode.cu",
)
#: largest number of CTAs that share the tokens of a head: the last one keeps a weight for each in shared memory
MOST_SPLITS = 128
#: bytes of shared memory that a CTA may have (sm_90)
SHARED = 227 * 1024

Signature = tuple[tuple[Format, Format], ...]


@dataclass(frozen=True)
class Build:
    """Compile-time configuration of the CUDA decode kernel, as values for the macros that ``cuda/header.cuh`` explains.

    A *team* is a group of warps that load tiles into the same ring buffer in shared memory. A *query row* is the query
    of one new token in one of the query heads that share a KV head.

    Args:
        channels: number of channels of a head (macro ``D``).
        team: number of warps in a team (``TEAM``); each warp serves 8 query rows.
        one_column: True if a CTA serves at most 4 query rows (``ONECOL``). The kernel then leaves every other of the 8
            columns of its matrix instructions empty, and does no work for the empty ones.
        bf16: True if the query, the output and segments in full precision are bf16; False for fp16.
        phases: one pair per phase, the format of its keys and the format of its values. A phase is a run of consecutive
            tokens whose formats do not change.
        teams: number of teams in a CTA (``TEAMS``).
        stages: number of slots in a team's ring buffer (``STAGES``).
        resident: number of CTAs that a multiprocessor must be able to run at once (``MINB``), which bounds the
            registers of a thread.
        softcap: True if scores have a softcap.
        sinks: dtype of the model's attention sinks, as a number. 0: no sinks; 1: the dtype of the query; 2: fp32.
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

    @property
    def rows(self) -> int:
        """Largest number of query rows that a CTA can serve."""
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
        sizes = [32 * self.channels * 2 if "full" in (k.kind, v.kind) else 0 for k, v in self.phases]
        for key, value in self.phases:
            sizes += [slot_bytes(key, self.channels), slot_bytes(value, self.channels)]
        return max(sizes)

    @property
    def shared(self) -> int:
        """Dynamic shared memory of a CTA in bytes."""
        rows = self.rows if not self.one_column else 8
        queries = (2 if self.bf16 else 1) * rows * self.channels * 2
        merged = self.teams * self.shares * self.rows * self.channels * 4
        weights = self.rows * (MOST_SPLITS + 1) * 4
        return max(queries + self.teams * self.stages * self.slot, merged, weights)

    def macros(self) -> str:
        """Return the macro definitions that must precede the kernel's source."""
        table = ", ".join(
            "{" + ", ".join(str(x) for f in pair for x in (KINDS[f.kind], f.bits, AXES[f.axis], f.group)) + "}"
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
            "SOFTCAP": int(self.softcap),
            "SINKS": self.sinks,
            "NPHASES": len(self.phases),
            "PHASE_TABLE": "{" + table + "}",
        }
        return "".join(f"#define {name} {value}\n" for name, value in values.items())


def slot_bytes(form: Format, channels: int) -> int:
    """Return the bytes of codes, scales and minima of one tile of 128 tokens of a KV head; 0 in full precision.

    Args:
        form: format of the keys or of the values.
        channels: number of channels of a head.
    """
    if form.kind == "full":
        return 0
    params = 128 // form.group * channels * 2 if form.axis == "channel" else 128 * (channels // form.group) * 2
    return 128 * channels * form.bits // 8 + 2 * params


def build(
    phases: Signature,
    channels: int,
    rows: int,
    bf16: bool,
    tuning: tuple[tuple[str, int], ...] = (),
    shared: int = SHARED,
    softcap: bool = False,
    sinks: int = 0,
) -> Build:
    """Choose the kernel configuration for a number of query rows: the fastest that fits into shared memory.

    Which candidates are faster was measured on an H200. If none fits, the one with the smallest buffers is returned.

    Args:
        phases: one pair per phase, the format of its keys and the format of its values. A phase is a run of consecutive
            tokens whose formats do not change.
        channels: number of channels of a head.
        rows: number of query rows of a KV head, which is query heads per KV head times new tokens.
        bf16: True for a model in bf16, False for fp16.
        tuning: overrides of ``teams``, ``stages`` and ``resident`` (:class:`Build`), as pairs of name and value.
        shared: bytes of shared memory that the device allows a CTA.
        softcap: True if scores have a softcap.
        sinks: dtype of the model's attention sinks, as a number. 0: no sinks; 1: the dtype of the query; 2: fp32.
    """
    team = min(-(-rows // 8), 3)
    while team > 1 and -(-rows // (8 * (team - 1))) == -(-rows // (8 * team)):
        team -= 1  # the same number of CTAs with fewer rows each
    # as measured on an H200: two CTAs per multiprocessor if the rings of both fit, else one with more teams
    options = [(4, 2, 1), (2, 2, 1)] if team > 1 else [(4, 2, 2), (8, 2, 1), (6, 2, 1), (4, 2, 1), (2, 2, 1)]
    for teams, stages, resident in options:
        values = {"team": team, "teams": teams, "stages": stages, "resident": resident, **dict(tuning)}
        candidate = Build(channels, one_column=rows <= 4, bf16=bf16, phases=phases, softcap=softcap, sinks=sinks, **values)
        if (candidate.shared + 1024) * candidate.resident <= (shared if resident == 1 else min(shared, 160 * 1024)):
            break
    return candidate


class Kernel(nvrtc.Function):
    """The CUDA kernel, compiled for one configuration and loaded on one device.

    Args:
        build: configuration to compile.
        device: index of the GPU to load the kernel on.

    Raises:
        RuntimeError: nvrtc or the driver reported an error, which the message contains.
    """

    def __init__(self, build: Build, device: int) -> None:
        self.build = build
        super().__init__(build.macros() + source(), "decode", device, build.warps * 32, build.shared)


@cache
def source() -> str:
    """Return the CUDA source of the kernel, without the macro definitions that configure it."""
    folder = Path(__file__).parent
    return "\n".join((folder / part).read_text(encoding="utf-8") for part in PARTS)


@lru_cache(maxsize=256)
def kernel(
    phases: Signature,
    channels: int,
    rows: int,
    bf16: bool,
    device: int,
    tuning: tuple[tuple[str, int], ...] = (),
    softcap: bool = False,
    sinks: int = 0,
) -> Kernel:
    """Return the CUDA kernel for a layer's formats, compiled and loaded on a GPU; equal calls share one kernel.

    Args:
        phases: one pair per phase, the format of its keys and the format of its values. A phase is a run of consecutive
            tokens whose formats do not change.
        channels: number of channels of a head.
        rows: number of query rows of a KV head, which is query heads per KV head times new tokens.
        bf16: True for a model in bf16, False for fp16.
        device: index of the GPU.
        tuning: overrides of ``teams``, ``stages`` and ``resident`` (:class:`Build`), as pairs of name and value.
        softcap: True if scores have a softcap.
        sinks: dtype of the model's attention sinks, as a number. 0: no sinks; 1: the dtype of the query; 2: fp32.

    Raises:
        RuntimeError: nvrtc or the driver reported an error, which the message contains.
    """
    shared = int(getattr(torch.cuda.get_device_properties(device), "shared_memory_per_block_optin", SHARED))
    return Kernel(build(phases, channels, rows, bf16, tuning, shared, softcap, sinks), device)
