"""Roofline model of a decoder: predicts TTFT, TPOT and memory from bytes, FLOPs and the figures of a GPU.

These figures, two rates and the memory, are from data sheets and from measurements.

A step reads every weight and every stored key and value once (of an untied embedding table only one row per sequence,
which is neglected). It takes at least the time to read these bytes at the GPU's read bandwidth, and at least the time
of its FLOPs at the rate of a large matmul (Williams et al., "Roofline", 2009). Linear layers and attention run one
after the other, so their times add up to a lower bound. The expected time of a step that runs as a CUDA graph
(:attr:`Prediction.expected_tpot_s`) adds a fixed time per kernel. Neither the bound nor the expected time includes
launches by the host or synchronisation.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import yaml

from kvbench.errors import ConfigError, nearest
from kvbench.profiling.shape import OTHERS as OTHERS
from kvbench.profiling.shape import Shape
from kvbench.profiling.shape import sliding_windows as sliding_windows

#: share of the data sheet's bandwidth that reads are assumed to reach on GPUs that were not measured. An H200 reaches
#: 0.977 (4.69 of 4.8 TB/s); boards with GDDR6 or older HBM are known to reach somewhat less.
READ_SHARE = 0.92
#: share of the data sheet's dense bf16 rate that a large matmul is assumed to reach; measured on an H200 (718 of 989
#: TFLOP/s)
MATMUL_SHARE = 0.726
#: share of the data sheet's memory that programs are assumed to see where no log of a driver is known
USABLE_SHARE = 0.97


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
        usable_gib: memory in GiB that the driver reports; None if not known.
        capability: CUDA's compute capability; 0 without CUDA, None if not known.
    """

    name: str
    memory_gib: float
    bandwidth: float
    flops: float
    measured_read: float | None = None
    measured_matmul: float | None = None
    kernel_s: float = 2.3e-6
    usable_gib: float | None = None
    capability: float | None = None

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
    def usable(self) -> float:
        """Memory in bytes that programs see: what a driver reported, else 97% of the data sheet's."""
        return 2**30 * (self.usable_gib or USABLE_SHARE * self.memory_gib)

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
        more = {f"measured_{key}": row[key] * _T for key in ("read", "matmul") if key in row}
        more |= {"kernel_s": row["kernel_us"] * 1e-6} if "kernel_us" in row else {}
        rates = row["bandwidth_tb"] * _T, row["tflops"] * _T
        gpus[name] = Gpu(
            name,
            row["memory_gib"],
            *rates,
            usable_gib=row.get("usable_gib"),
            capability=row.get("capability", 0),
            **more,
        )
    return gpus


#: GPUs by name
GPUS = _known_gpus()
#: short names of GPUs that come in several variants -> the most common variant
ALIASES = {"a100": "a100-80gb"}


def _spaced(name: str) -> str:
    """Return a pattern for a name as its maker writes it: ``RTX 4070 ?ti ?super``, ``Apple m2 ?ultra``."""
    maker = "RTX " if name[:3] == "rtx" else "Apple "
    return maker + re.sub("(ti|super|pro|max|ultra)", r" ?\1", name.removeprefix("rtx"))


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
    (r"RTX PRO ?6000", "rtxpro6000"),
    # to the end: Ti, SUPER, D and Laptop differ
    *((f"{_spaced(name)}$", name) for name in GPUS if re.match(r"rtx\d|m\d", name)),
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


Bound = Literal["memory", "compute"]
#: tokens per slice of the feed-forward layer; None: no slices; ``auto``: 8192 in passes of more than 16384 tokens
#: (``runtime.mlp_chunk``)
Slice = int | Literal["auto"] | None
SLICE, LONG = 8192, 16384
#: prompts per forward pass; None: all; ``auto``: as many as make 16384 tokens (``runtime.prefill_rows``)
Rows = int | Literal["auto"] | None
TOGETHER = 16384
#: kernels per decoder layer in a captured step with compiled layers: four matrix products, attention, the append to the
#: cache, and five between them (two norms with the residual, RoPE, the gated activation, the residual after it)
KERNELS = 11


@dataclass(frozen=True)
class Prediction:
    """Time and memory that the roofline model predicts for one model, cache, batch, context and GPU.

    Times are lower bounds unless said otherwise, plus the overhead passed to :func:`predict`, which is 0 by default.

    Args:
        ttft_s: seconds of the prefill of the whole batch.
        tpot_s: seconds of a decode step of the whole batch.
        expected_tpot_s: seconds that a decode step is expected to take if it runs as a CUDA graph: the lower bound plus
            a fixed time per kernel (:data:`KERNELS` kernels per layer, ``Gpu.kernel_s`` each), or plus the overhead
            passed to :func:`predict` if that is more.
        decode_peak_bytes: peak memory of decoding: weights, stored keys and values, and logits.
        prefill_peak_bytes: peak memory of prefill: weights, stored keys and values, and the activations of one layer in
            the largest forward pass.
        bound: ``memory`` or ``compute``: what limits the linear layers or attention in a decode step, whichever of
            these two takes longer.
        prefill_bound: the same for the prefill.
        kv_share: fraction of the time of a decode step (`tpot_s`) that attention takes.
        tokens_per_s: tokens that a decode step produces per second, over the whole batch (batch size / `tpot_s`).
    """

    ttft_s: float
    tpot_s: float
    expected_tpot_s: float
    decode_peak_bytes: int
    prefill_peak_bytes: int
    bound: Bound
    prefill_bound: Bound
    kv_share: float
    tokens_per_s: float

    @property
    def peak_bytes(self) -> int:
        """Peak memory in bytes: the larger of the peaks of prefill and decoding."""
        return max(self.decode_peak_bytes, self.prefill_peak_bytes)

    def throughput(self, batch: int, new_tokens: int) -> float:
        """Return the generated tokens per second of the batch, from the start of the prefill to the last token."""
        return batch * new_tokens / (self.ttft_s + (new_tokens - 1) * self.tpot_s)


def predict(
    shape: Shape,
    kv_bytes_per_step: float,
    weight_bytes: float,
    batch: int,
    context: int,
    gpu: Gpu,
    *,
    kv_stored_bytes: float | None = None,
    attended: float | None = None,
    q_len: int = 1,
    overhead_s_per_layer: float = 0.0,
    prefill_chunk: int | None = None,
    prefill_rows: Rows = "auto",
    mlp_chunk: Slice = "auto",
    width: int = 2,
) -> Prediction:
    """Predict TTFT, TPOT and memory for one model, cache, batch, context and GPU.

    Args:
        kv_bytes_per_step: bytes of keys and values that a step reads, over the whole batch and all layers
            (``cache.bill().used.total``; less if a draft reads only the upper nibbles).
        weight_bytes: bytes of all parameters as loaded, including the embedding table. What a step reads of them is
            computed from this (:meth:`Shape.bytes_read`).
        context: tokens per sequence before the step, which is also the length of the prompts.
        kv_stored_bytes: bytes of keys and values in the cache, for the peak memory; None if a step reads all of them,
            so that it equals `kv_bytes_per_step`.
        attended: number of cached tokens that each query attends to, for a method that drops tokens; None: all
            `context` tokens.
        q_len: new tokens per sequence in a step; more than 1 if the step verifies drafted tokens.
        overhead_s_per_layer: seconds per layer to add to the roofline's time, for launches and small kernels; 0 for the
            pure roofline.
        prefill_chunk: number of prompt tokens of each sequence per forward pass; None for the whole prompt.
        prefill_rows: prompts per forward pass of the prefill (:data:`Rows`). None, as in stock transformers: all.
        mlp_chunk: tokens for which the feed-forward layer is computed at a time during prefill, which saves memory
            (:data:`Slice`). None, as in stock transformers: all.
        width: bytes per element in full precision.
    """
    stored = kv_bytes_per_step if kv_stored_bytes is None else kv_stored_bytes
    overhead = overhead_s_per_layer * shape.layers
    reads = shape.bytes_read(weight_bytes, width)
    per_token = 2 * (shape.linear_elements + shape.head_elements)
    seen = context if attended is None else attended
    score = 4 * shape.layers * shape.query_heads * shape.channels  # FLOPs of a query and a token: scores, sum of values
    linear = _Time.of(reads, per_token * batch * q_len, gpu)
    attention = _Time.of(kv_bytes_per_step, score * batch * q_len * seen, gpu)
    tpot = linear.seconds + attention.seconds

    tokens = batch * context
    flops = 2 * shape.linear_elements * tokens + 2 * shape.head_elements * batch
    moved = reads + tokens * width * shape.layers * linear_activations(shape)
    causal = score * batch * context * (context + 1) / 2
    heads = tokens * width * shape.layers * shape.channels * (2 * shape.query_heads + 2 * shape.heads)
    first = _Time.of(moved, flops, gpu), _Time.of(heads + stored, causal, gpu)

    logits = batch * q_len * shape.vocabulary * (width + 4)  # as computed, and fp32 for sampling
    alive = live_elements(shape, tokens_of_a_pass(batch, context, prefill_chunk, prefill_rows), mlp_chunk) * width
    return Prediction(
        ttft_s=first[0].seconds + first[1].seconds + overhead,
        tpot_s=tpot + overhead,
        expected_tpot_s=tpot + max(overhead, shape.layers * KERNELS * gpu.kernel_s),
        decode_peak_bytes=round(weight_bytes + stored + logits),
        prefill_peak_bytes=round(weight_bytes + stored + alive),
        bound=_bound(linear, attention),
        prefill_bound=_bound(*first),
        kv_share=attention.seconds / (tpot + overhead),
        tokens_per_s=batch / (tpot + overhead),
    )


def max_batch(
    shape: Shape,
    kv_bytes_per_sequence: float,
    weight_bytes: float,
    context: int,
    gpu: Gpu,
    *,
    prefill: bool = True,
    prefill_chunk: int | None = None,
    prefill_rows: Rows = "auto",
    mlp_chunk: Slice = "auto",
    reserve_gib: float = 1.0,
) -> int:
    """Return the largest batch size that fits into the GPU's memory; 0 if not even one sequence fits.

    `kv_bytes_per_sequence` are the bytes that the cache stores. With ``prefill=False`` only decoding must fit.
    `reserve_gib` GiB stay free for the CUDA context, the driver and fragmentation of the allocator. The other arguments
    are those of :func:`predict`.
    """
    room = gpu.memory - reserve_gib * 2**30 - weight_bytes
    tokens = min(context, prefill_chunk or context) if prefill else 0

    def fits(batch: int) -> bool:
        together = tokens_of_a_pass(batch, context, prefill_chunk, prefill_rows) if prefill else 0
        logits, alive = 6 * batch * shape.vocabulary, 2 * live_elements(shape, together, mlp_chunk)
        return batch * kv_bytes_per_sequence + max(logits, alive) <= room

    most = max(0, int(room // kv_bytes_per_sequence))
    # passes of more than LONG tokens are sliced and need less memory: search above and below this border separately
    border = min(most, LONG // tokens) if tokens else 0
    for low, high in ((border, most), (0, border)):
        least = low
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if fits(middle) else (low, middle - 1)
        if low > least:
            return low
    return 0


def tokens_of_a_pass(batch: int, context: int, prefill_chunk: int | None = None, prefill_rows: Rows = "auto") -> int:
    """Return the number of prompt tokens, over the whole batch, in the largest forward pass of a prefill.

    If prompts are longer than `prefill_chunk`, each pass reads one chunk of every prompt, and `prefill_rows` has no
    effect. Both are as for :func:`predict`.
    """
    if prefill_chunk is not None and prefill_chunk < context:
        return batch * prefill_chunk
    rows = max(1, TOGETHER // context) if prefill_rows == "auto" else prefill_rows or batch
    return min(batch, rows) * context


def live_elements(shape: Shape, tokens: int, mlp_chunk: Slice = None) -> int:
    """Return the peak number of activation elements of a forward pass over `tokens` tokens in total.

    The peak lies in the feed-forward layer or in attention of one decoder layer; the larger of the two is returned. The
    feed-forward layer holds the gate, the up projection, their product, and four tensors of the hidden size. Attention
    holds queries, keys and values before and after RoPE, the output, and two tensors of the hidden size. For Llama-2-7B
    with stock transformers, the total memory predicted in this way is 14.9, 31.6, 50.6 and 88.6 GiB at 4k, 32k, 64k and
    128k tokens; measured were 15.0, 31.6, 50.6 and 88.7 GiB.
    """
    size = (SLICE if tokens > LONG else None) if mlp_chunk == "auto" else mlp_chunk
    feed_forward = 3 * shape.intermediate * min(tokens, size or tokens) + 4 * shape.hidden * tokens
    attention = tokens * (2 * shape.hidden + shape.channels * (3 * shape.query_heads + 4 * shape.heads))
    return max(feed_forward, attention)


def linear_activations(shape: Shape) -> int:
    """Return how many activation elements per token the linear layers of one decoder layer read and write.

    The result is the sum of the sizes of their inputs and outputs; an input that several layers share, such as that of
    the projections to queries, keys and values, counts once.
    """
    attention = 2 * shape.hidden + shape.channels * (2 * shape.query_heads + 2 * shape.heads)
    return attention + 2 * shape.hidden + 3 * shape.intermediate


@dataclass(frozen=True)
class _Time:
    """Seconds of some work, and what limits it: memory bandwidth or compute."""

    seconds: float
    bound: Bound

    @classmethod
    def of(cls, moved: float, flops: float, gpu: Gpu) -> _Time:
        memory, compute = moved / gpu.read, flops / gpu.matmul
        return cls(max(memory, compute), "compute" if compute > memory else "memory")


def _bound(*parts: _Time) -> Bound:
    """Return what limits the part that takes the most time."""
    return max(parts, key=lambda part: part.seconds).bound
