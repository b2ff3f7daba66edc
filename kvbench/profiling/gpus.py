"""GPUs by their data sheets, and what was measured of them: the two rates and the memory that a roofline needs."""

from __future__ import annotations

import re
from dataclasses import dataclass

from kvbench.errors import ConfigError, nearest

#: share of the data sheet's bandwidth that reading reaches where nothing was measured. An H200 reaches 0.977 (4.69 of
#: 4.8 TB/s); boards with GDDR6 and older HBM are known to stay somewhat below.
READ_SHARE = 0.92
#: share of the data sheet's dense bf16 rate that a large matmul reaches, as measured on an H200 (718 of 989 TFLOP/s)
MATMUL_SHARE = 0.726


@dataclass(frozen=True)
class Gpu:
    """One GPU.

    Args:
        name: what it is called on the command line.
        memory_gib: memory of the data sheet; a driver leaves programs 1% to 7% less (ECC on GDDR6 most of all).
        bandwidth: of the data sheet, bytes/s.
        flops: dense bf16 matmul rate of the data sheet (without sparsity), FLOP/s.
        measured_read: largest rate at which a kernel was seen to read, bytes/s; None: not measured.
        measured_matmul: rate of a large bf16 matmul, FLOP/s; None: not measured.
        kernel_s: seconds that a kernel in a row of kernels takes beside its bytes, to fill the memory's pipeline and to
            drain it. On an H200 reads of 17 to 268 MB take 2.2 to 2.6 us more than their bytes at the rate of 4 GB
            (three runs: ``ceiling`` in results/h200/whole); taken for the others too.
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
        """Bytes/s that predictions divide by: measured, or :data:`READ_SHARE` of the data sheet."""
        return self.measured_read or READ_SHARE * self.bandwidth

    @property
    def matmul(self) -> float:
        """FLOP/s that predictions divide by: measured, or :data:`MATMUL_SHARE` of the data sheet."""
        return self.measured_matmul or MATMUL_SHARE * self.flops

    @property
    def memory(self) -> float:
        """Memory in bytes."""
        return self.memory_gib * 2**30

    @property
    def ridge(self) -> float:
        """Ridge point of the data sheet, FLOP/byte (QuantSpec, sec. 3.1.2): work of less intensity is memory-bound."""
        return self.flops / self.bandwidth


_T = 1e12
#: NVIDIA's data sheets; where these print a rate "with sparsity", half of it. "48 GB" of a GPU are GiB.
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
#: short names: the one of several that most systems have
ALIASES = {"a100": "a100-80gb"}
#: what `torch.cuda.get_device_name` says -> GPU; the first that matches
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
    """Return the GPU named by ``torch.cuda.get_device_name()`` (``"NVIDIA H200"``), None for an unknown one."""
    for pattern, name in _NAMES:
        if re.search(rf"\b{pattern}", device_name, re.IGNORECASE) and "MIG" not in device_name:
            return GPUS[name]
    return None


def gpu_named(name: str) -> Gpu:
    """Return a GPU by its short name (``"h200"``) or by its device name.

    Raises:
        ConfigError: it is not known.
    """
    gpu = GPUS.get(ALIASES.get(name.lower(), name.lower())) or gpu_of(name)
    if gpu is None:
        near = nearest(name.lower(), GPUS)
        hint = f"did you mean '{near}'? " if near else ""
        raise ConfigError(
            "gpu",
            name,
            "is not known",
            allowed=GPUS,
            hint=hint + "or give its numbers: --bandwidth-TBs 3.35 --tflops 989 --memory-gb 80",
        )
    return gpu


def own_gpu(bandwidth_TBs: float, tflops: float, memory_gb: float, name: str = "own") -> Gpu:
    """Return a GPU of given numbers, which count as reached (no share of a data sheet); memory in GiB."""
    rate, flops = bandwidth_TBs * _T, tflops * _T
    return Gpu(name, memory_gb, rate, flops, measured_read=rate, measured_matmul=flops)
