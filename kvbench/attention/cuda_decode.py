"""Decode attention by the CUDA kernel in ``cuda/``: compiled at first use for the formats of a layer.

nvrtc, which comes with every CUDA build of torch, compiles it in about a second; no nvcc and no host compiler are
needed. One kernel serves all phases of :class:`kvbench.attention.phases.Work` in one launch.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import os
import struct
import threading
from dataclasses import dataclass
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kvbench.attention.phases import Format, Part, Work

KINDS = {"full": 0, "affine": 1, "atom": 2, "hierarchical": 3}
AXES = {"": 0, "channel": 0, "token": 1}
#: the parts of the source, in their order
PARTS = (
    "header.cuh",
    "instructions.cuh",
    "storage.cuh",
    "loads.cuh",
    "scores.cuh",
    "softmax.cuh",
    "values.cuh",
    "decode.cu",
)
#: shared memory of a multiprocessor and of a CTA that may be used, bytes (sm_90)
SHARED = 227 * 1024

Signature = tuple[tuple[Format, Format], ...]


@dataclass(frozen=True)
class Build:
    """What the kernel is compiled for; the macros of ``cuda/header.cuh``."""

    channels: int
    team: int
    one_column: bool
    bf16: bool
    phases: Signature
    teams: int
    stages: int
    resident: int

    @property
    def rows(self) -> int:
        """Query rows that a CTA serves."""
        return 4 if self.one_column else 8 * self.team

    @property
    def warps(self) -> int:
        """Warps of a CTA."""
        return self.team * self.teams

    @property
    def slot(self) -> int:
        """Bytes of the largest part of a tile."""
        sizes = [32 * self.channels * 2 if "full" in (k.kind, v.kind) else 0 for k, v in self.phases]
        for key, value in self.phases:
            sizes += [slot_bytes(key, self.channels), slot_bytes(value, self.channels)]
        return max(sizes)

    @property
    def shared(self) -> int:
        """Bytes of dynamic shared memory."""
        queries = (2 if self.bf16 else 1) * self.team * self.channels // 16 * 256
        return max(queries + self.teams * self.stages * self.slot, self.teams * self.rows * self.channels * 4, 16384)

    def macros(self) -> str:
        """The lines that stand before the source."""
        table = ", ".join(
            "{" + ", ".join(str(x) for f in pair for x in (KINDS[f.kind], f.bits, AXES[f.axis], f.group)) + "}"
            for pair in self.phases
        )
        values = {
            "D": self.channels,
            "TEAM": self.team,
            "ONECOL": int(self.one_column),
            "BF16": int(self.bf16),
            "TEAMS": self.teams,
            "STAGES": self.stages,
            "MINB": self.resident,
            "SLOT": self.slot,
            "NPHASES": len(self.phases),
            "PHASE_TABLE": "{" + table + "}",
        }
        return "".join(f"#define {name} {value}\n" for name, value in values.items())


def slot_bytes(form: Format, channels: int) -> int:
    """Bytes of codes and parameters of one tile of a packed format."""
    if form.kind == "full":
        return 0
    params = 128 // form.group * channels * 2 if form.axis == "channel" else 128 * (channels // form.group) * 2
    return 128 * channels * form.bits // 8 + 2 * params


def build(phases: Signature, channels: int, rows: int, bf16: bool, tuning: tuple[tuple[str, int], ...] = ()) -> Build:
    """The configuration for `rows` query rows of a KV head; `tuning` overrides teams, stages, resident."""
    team = min(-(-rows // 8), 3)
    while team > 1 and -(-rows // (8 * (team - 1))) == -(-rows // (8 * team)):
        team -= 1  # as many CTAs with fewer rows each
    # as measured on an H200: two CTAs a multiprocessor where the rings of both fit, else one with more teams
    options = [(4, 2, 1), (2, 2, 1)] if team > 1 else [(4, 2, 2), (8, 2, 1), (6, 2, 1), (4, 2, 1), (2, 2, 1)]
    chosen = dict(tuning)
    for teams, stages, resident in options:
        made = Build(
            channels,
            team,
            rows <= 4,
            bf16,
            phases,
            chosen.get("teams", teams),
            chosen.get("stages", stages),
            chosen.get("resident", resident),
        )
        if (made.shared + 1024) * made.resident <= (SHARED if team > 1 or resident == 1 else 160 * 1024):
            break
    return made


class Kernel:
    """A compiled :class:`Build` on one device.

    Raises:
        RuntimeError: nvrtc or the driver refused; the message holds their words.
    """

    def __init__(self, made: Build, device: int) -> None:
        from cuda.bindings import driver

        self.made = made
        major, minor = torch.cuda.get_device_capability(device)
        binary = compiled(made.macros() + source(), f"sm_{major}{minor}")
        self.module = ask(driver.cuModuleLoadData(binary))
        self.function = ask(driver.cuModuleGetFunction(self.module, b"decode"))
        attribute = driver.CUfunction_attribute
        ask(
            driver.cuFuncSetAttribute(
                self.function, attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, made.shared
            )
        )
        self.registers = ask(driver.cuFuncGetAttribute(attribute.CU_FUNC_ATTRIBUTE_NUM_REGS, self.function))
        self.spilled = ask(driver.cuFuncGetAttribute(attribute.CU_FUNC_ATTRIBUTE_LOCAL_SIZE_BYTES, self.function))
        fit = ask(driver.cuOccupancyMaxActiveBlocksPerMultiprocessor(self.function, made.warps * 32, made.shared))
        self.resident = fit * torch.cuda.get_device_properties(device).multi_processor_count
        self._launch = driver.cuLaunchKernel

    def launch(self, grid: tuple[int, int, int], arguments: bytes, stream: int) -> None:
        """Run it; `arguments` is the packed ``Args``."""
        held = ctypes.create_string_buffer(arguments, len(arguments))
        pointers = (ctypes.c_void_p * 1)(ctypes.addressof(held))
        ask(
            self._launch(
                self.function,
                *grid,
                self.made.warps * 32,
                1,
                1,
                self.made.shared,
                stream,
                ctypes.addressof(pointers),
                0,
            )
        )


def compiled(source: str, architecture: str) -> bytes:
    """The machine code of `source`, from the disk where it was compiled before.

    Raises:
        RuntimeError: nvrtc refused; the message holds its words.
    """
    from cuda.bindings import nvrtc

    options = [f"--gpu-architecture={architecture}", "--std=c++17", "-default-device"]
    words = "\n".join([repr(nvrtc.nvrtcVersion()), *options, source])
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    path = base / "kvbench" / "kernels" / f"{hashlib.sha256(words.encode()).hexdigest()[:32]}.cubin"
    if path.is_file():
        return path.read_bytes()
    program = ask(nvrtc.nvrtcCreateProgram(source.encode(), b"decode.cu", 0, [], []))
    if nvrtc.nvrtcCompileProgram(program, len(options), [option.encode() for option in options])[0].value:
        log = bytearray(ask(nvrtc.nvrtcGetProgramLogSize(program)))
        nvrtc.nvrtcGetProgramLog(program, log)
        raise RuntimeError(f"nvrtc could not compile the decode kernel: {log.decode(errors='replace')}")
    binary = bytearray(ask(nvrtc.nvrtcGetCUBINSize(program)))
    ask(nvrtc.nvrtcGetCUBIN(program, binary))
    with contextlib.suppress(OSError):  # a cache that cannot be written costs a second, no more
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_suffix(f".{os.getpid()}.{threading.get_ident()}")
        part.write_bytes(binary)
        part.replace(path)
    return bytes(binary)


def ask(answer: tuple[Any, ...]) -> Any:
    """The value of a call of cuda.bindings, which answers (error, value); raises RuntimeError with its name."""
    if answer[0].value:
        raise RuntimeError(f"CUDA: {answer[0]!r}")
    return answer[1] if len(answer) == 2 else answer[1:]


@cache
def source() -> str:
    """The kernel's source, without the macros."""
    folder = Path(__file__).with_name("cuda")
    return "\n".join((folder / part).read_text(encoding="utf-8") for part in PARTS)


@lru_cache(maxsize=256)
def kernel(
    phases: Signature, channels: int, rows: int, bf16: bool, device: int, tuning: tuple[tuple[str, int], ...] = ()
) -> Kernel:
    """The compiled kernel, once a process."""
    return Kernel(build(phases, channels, rows, bf16, tuning), device)


@cache
def available() -> str | None:
    """Why this machine cannot compile the kernel, or None."""
    try:
        from cuda.bindings import driver, nvrtc  # noqa: F401
    except ImportError:
        return "the package cuda-bindings is not installed"
    if not torch.cuda.is_available():
        return "there is no GPU"
    if torch.cuda.get_device_capability() < (8, 0):
        return "the GPU is older than sm_80"
    return None


def refuses(query: Tensor, work: Work) -> str | None:
    """Why this kernel does not serve a layer, or None."""
    reason = available()
    if reason:
        return reason
    if work.key_dim != work.value_dim or work.key_dim not in (64, 128):
        return f"heads of {work.key_dim} and {work.value_dim} channels"
    if query.dtype not in (torch.float16, torch.bfloat16):
        return f"queries in {str(query.dtype).removeprefix('torch.')}"
    for key, value in work.phases:
        if value.format.axis == "channel":
            return "values grouped per channel"
        for form in (key.format, value.format):
            if form.axis == "token" and form.group > work.key_dim:
                return f"groups of {form.group} channels"
        for part in (key, value):
            if part.buffer is not None and part.buffer.dtype != query.dtype:
                return "queries and exact keys or values of different types"
    return None


def attend(
    query: Tensor, work: Work, scaling: float, tuning: tuple[tuple[str, int], ...] = (), splits: int | None = None
) -> Tensor:
    """Attention of the newest tokens to everything in the stores.

    Args:
        query: ``[B, Hq, q, D]``, fp16 or bf16, channels contiguous.
        work: the layer (:func:`kvbench.attention.phases.work`).
        scaling: factor on the scores.
        tuning: overrides of teams, stages, resident (benchmarks).
        splits: CTAs that share a head; None: as many as the GPU holds at once.

    Returns:
        ``[B, q, Hq, D]``.
    """
    batch, heads_q, count, channels = query.shape
    if query.stride(-1) != 1:
        query = query.contiguous()
    group = heads_q // work.heads
    rows = group * count
    device = query.device.index or 0
    made_for = kernel(work.signature(), channels, rows, query.dtype == torch.bfloat16, device, tuning)
    made = made_for.made
    blocks = -(-rows // made.rows)
    if splits is None:
        splits = best_splits(batch * work.heads * blocks, made_for.resident, most_splits(work, made.teams))
    out = torch.empty(batch, count, heads_q, channels, dtype=query.dtype, device=query.device)
    stream = torch.cuda.current_stream(query.device).cuda_stream
    lines = batch * work.heads * blocks
    partial, counter = workspace(device, stream, lines * splits * made.rows * (channels + 2), lines)
    arguments = b"".join(pack(key, value) for key, value in work.phases) + struct.pack(
        "PP3qPPP4ifi",
        work.table.data_ptr(),
        query.data_ptr(),
        query.stride(0),
        query.stride(1),
        query.stride(2),
        out.data_ptr(),
        partial.data_ptr(),
        counter.data_ptr(),
        work.heads,
        group,
        count,
        splits,
        scaling * 1.4426950408889634,
        0,
    )
    made_for.launch((splits, batch * work.heads, blocks), arguments, stream)
    return out


def pack(key: Part, value: Part) -> bytes:
    """``struct Phase`` of one phase."""
    fields: list[int] = []
    capacity = []
    for part in (key, value):
        if part.buffer is not None:
            fields += [part.buffer.data_ptr(), 0, 0, 0]
            capacity.append(part.buffer.shape[2])
        else:
            lower = part.words[1].data_ptr() if len(part.words) > 1 else 0
            fields += [part.words[0].data_ptr(), lower, part.params[0].data_ptr(), part.params[1].data_ptr()]
            capacity.append(part.words[0].shape[2])
    return struct.pack("8P2i", *fields, *capacity)


def most_splits(work: Work, teams: int) -> int:
    """CTAs of a head beyond which teams would find no tile."""
    tiles = [sum(-(-count // 128) for _, _, count in row) for row in work.counts]
    return max(1, -(-max(tiles) // teams))


@lru_cache(maxsize=4096)
def best_splits(lines: int, resident: int, most: int) -> int:
    """Splits that fill the GPU best: the last wave of CTAs should not be a small one, and partial results cost time."""
    return min(range(1, min(most, 128) + 1), key=lambda s: -(-lines * s // resident) / s * (1 + 0.002 * s))


_workspaces: dict[tuple[int, int], list[tuple[Tensor, Tensor]]] = {}


def workspace(device: int, stream: int, floats: int, lines: int) -> tuple[Tensor, Tensor]:
    """Partial results and counters of a stream. Outgrown ones are kept: a captured graph may still write to them."""
    held = _workspaces.setdefault((device, stream), [])
    if not held or held[-1][0].numel() < floats or held[-1][1].numel() < lines:
        most = max(floats, 2 * held[-1][0].numel() if held else 1 << 20)
        where = torch.device("cuda", device)
        with torch.inference_mode(False):
            held.append(
                (torch.empty(most, device=where), torch.zeros(max(lines, 4096), dtype=torch.int32, device=where))
            )
    return held[-1]
