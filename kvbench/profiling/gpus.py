"""GPUs with figures from data sheets and from measurements: the two rates and the memory that a roofline needs."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

import yaml

from kvbench.errors import ConfigError, nearest

#: share of the data sheet's bandwidth that reads are assumed to reach on GPUs that were not measured. An H200 reaches
#: 0.977 (4.69 of 4.8 TB/s); boards with GDDR6 or older HBM are known to reach somewhat less.
READ_SHARE = 0.92
#: share of the data sheet's dense bf16 rate that a large matmul is assumed to reach; measured on an H200 (718 of 989
#: TFLOP/s)
MATMUL_SHARE = 0.726


@dataclass(frozen=True)
class Gpu:
    """A GPU model: the figures of its data sheet and, if someone has measured them, the rates it really reaches.

    Args:
        name: name on the command line.
        memory_gib: memory in GiB according to the data sheet. Programs cannot use 1% to 7% of it (most with GDDR6 and
            ECC).
        bandwidth: memory bandwidth according to the data sheet, bytes/s.
        flops: dense bf16 matmul rate (without sparsity) according to the data sheet, FLOP/s.
        measured_read: highest measured rate of a kernel that only reads, bytes/s; None if not measured.
        measured_matmul: measured rate of a large bf16 matmul, FLOP/s; None if not measured.
        kernel_s: fixed time in seconds of each kernel in a sequence, on top of the time to move its bytes at full
            bandwidth: the memory pipeline has to fill and drain. The default was measured on an H200, where reads of 17
            to 268 MB take 2.2 to 2.6 us longer than at the bandwidth of a 4 GB read (three runs: ``ceiling`` in
            results/h200/whole); it is assumed for other GPUs too.
    """

    name: str
    memory_gib: float
    bandwidth: float
    flops: float
    measured_read: float | None = None
    measured_matmul: float | None = None
    kernel_s: float = 2.3e-6

    @property
    def read(self) -> float:
        """Read bandwidth for predictions, bytes/s: the measured one if there is one, else 92% of the data sheet's."""
        return self.measured_read or READ_SHARE * self.bandwidth

    @property
    def matmul(self) -> float:
        """Matmul rate for predictions, FLOP/s: the measured one if there is one, else 72.6% of the data sheet's."""
        return self.measured_matmul or MATMUL_SHARE * self.flops

    @property
    def memory(self) -> float:
        """Memory in bytes according to the data sheet."""
        return self.memory_gib * 2**30

    @property
    def ridge(self) -> float:
        """Ridge point in FLOP/byte: the data sheet's FLOP rate divided by its memory bandwidth.

        A kernel whose arithmetic intensity is lower is memory-bound. Source: QuantSpec, sec. 3.1.2.
        """
        return self.flops / self.bandwidth


_T = 1e12


def _known_gpus() -> dict[str, Gpu]:
    """Read the table of GPUs (``gpus.yaml`` beside this module), which says where its figures are from."""
    table = yaml.safe_load(Path(__file__).with_name("gpus.yaml").read_text(encoding="utf-8"))
    gpus = {}
    for name, row in table.items():
        rates = {f"measured_{key}": row[key] * _T for key in ("read", "matmul") if key in row}
        gpus[name] = Gpu(name, row["memory_gib"], row["bandwidth_tb"] * _T, row["tflops"] * _T, **rates)
    return gpus


#: GPUs by name
GPUS = _known_gpus()
#: short names of GPUs that come in several variants -> the most common variant
ALIASES = {"a100": "a100-80gb"}
#: patterns for the results of `torch.cuda.get_device_name` -> GPU; the first that matches counts
_NAMES = (
    (r"RTX A6000", "a6000"),
    (r"L40S", "l40s"),
    (r"A100.*PCIE.*80GB|A100 80GB PCIe", "a100-80gb-pcie"),
    (r"A100.*80GB", "a100-80gb"),
    (r"A100.*40GB", "a100-40gb"),
    (r"H100(?!.*(PCIe|NVL|MIG))", "h100"),  # "NVIDIA H100 80GB HBM3"
    (r"H200(?!.*(NVL|MIG))", "h200"),
    (r"B200", "b200"),
    (r"GB10", "gb10"),
    (r"T4\b", "t4"),
    (r"L4\b", "l4"),
    (r"A10\b", "a10"),
    *((rf"RTX {name[3:]}$", name) for name in GPUS if name[:3] == "rtx"),  # to the end: Ti, SUPER, D and Laptop differ
)


def gpu_of(device_name: str) -> Gpu | None:
    """Look up a GPU by the name that torch reports, such as ``NVIDIA H200``; None if unknown or a MIG slice."""
    for pattern, name in _NAMES:
        if re.search(rf"\b{pattern}", device_name, re.IGNORECASE) and "MIG" not in device_name:
            return GPUS[name]
    return None


def gpu_named(name: str) -> Gpu:
    """Look up a GPU by its name on the command line (``"h200"``) or the name that torch reports (``"NVIDIA H200"``).

    Case does not matter.

    Raises:
        ConfigError: no known GPU has this name.
    """
    gpu = GPUS.get(ALIASES.get(name.lower(), name.lower())) or gpu_of(name)
    if gpu is None:
        near = nearest(name.lower(), GPUS)
        hint = f"did you mean '{near}'? " if near else ""
        raise ConfigError(
            "gpu",
            name,
            "is not a known GPU",
            allowed=GPUS,
            hint=hint + "Describe other GPUs with --bandwidth-TBs 3.35 --tflops 989 --memory-gb 80",
        )
    return gpu


def own_gpu(bandwidth_TBs: float, tflops: float, memory_gb: float, name: str = "own") -> Gpu:
    """Describe a GPU that kvbench does not know, by its read bandwidth, matmul rate and memory.

    The two rates count as measured ones: predictions use them as they are, without the discount applied to data-sheet
    rates. They are in TB/s and in TFLOP/s of a large bf16 matmul; the memory is in GiB despite its name.
    """
    rate, flops = bandwidth_TBs * _T, tflops * _T
    return Gpu(name, memory_gb, rate, flops, measured_read=rate, measured_matmul=flops)
