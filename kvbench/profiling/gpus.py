"""GPUs with figures from data sheets and from measurements: the two rates and the memory that a roofline needs."""

from __future__ import annotations

import re
from dataclasses import dataclass

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
#: GPUs by name, with figures from NVIDIA's data sheets: half of rates "with sparsity"; "48 GB" there means GiB.
GPUS = {
    gpu.name: gpu
    for gpu in (
        # NVIDIA RTX A6000 datasheet (PB-09939): 48 GB GDDR6, 768 GB/s, tensor 309.7 TFLOPS with sparsity
        Gpu("a6000", 48, 0.768 * _T, 154.8 * _T),
        # NVIDIA L40S datasheet: 48 GB GDDR6, 864 GB/s, BF16 362.05 TFLOPS (733 with sparsity)
        Gpu("l40s", 48, 0.864 * _T, 362.05 * _T),
        # NVIDIA A100 Tensor Core GPU datasheet: BF16 312 TFLOPS; 40 GB 1,555 GB/s; 80 GB SXM 2,039, PCIe 1,935
        Gpu("a100-40gb", 40, 1.555 * _T, 312 * _T),
        Gpu("a100-80gb", 80, 2.039 * _T, 312 * _T),
        Gpu("a100-80gb-pcie", 80, 1.935 * _T, 312 * _T),
        # NVIDIA H100 Tensor Core GPU datasheet: SXM 80 GB, 3.35 TB/s, BF16 1,979 TFLOPS with sparsity
        Gpu("h100", 80, 3.35 * _T, 989.4 * _T),
        # NVIDIA H200 Tensor Core GPU datasheet: 141 GB, 4.8 TB/s, BF16 1,979 TFLOPS with sparsity. Measured: reading
        # 8 GiB with a Triton kernel 4.69 TB/s, a bf16 matmul of 8192^3 718 TFLOP/s
        Gpu("h200", 141, 4.8 * _T, 989.4 * _T, measured_read=4.69 * _T, measured_matmul=718 * _T),
    )
}
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
)


def gpu_of(device_name: str) -> Gpu | None:
    """Look up a GPU by the name that torch reports; None if the GPU is unknown or is a MIG slice.

    Args:
        device_name: result of ``torch.cuda.get_device_name``, such as ``"NVIDIA H200"``.
    """
    for pattern, name in _NAMES:
        if re.search(rf"\b{pattern}", device_name, re.IGNORECASE) and "MIG" not in device_name:
            return GPUS[name]
    return None


def gpu_named(name: str) -> Gpu:
    """Look up a GPU by its name on the command line (``"h200"``) or the name that torch reports (``"NVIDIA H200"``).

    Args:
        name: the name, in upper or lower case.

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
    rates.

    Args:
        bandwidth_TBs: read bandwidth, TB/s.
        tflops: rate of a large bf16 matmul, TFLOP/s.
        memory_gb: memory, in GiB despite its name.
        name: name of the GPU in tables.
    """
    rate, flops = bandwidth_TBs * _T, tflops * _T
    return Gpu(name, memory_gb, rate, flops, measured_read=rate, measured_matmul=flops)
