"""Compression and speed-up of a cache at the same work.

The terms are those of the paper "Bytes Are Not Latency" (github.com/fzlzjerry/kvbench, 2026), sec. 2.5 and 3.2. Same
work: equal batch, length, number of new tokens, graph mode and timing boundary. Where fp16 does not fit, there is
no speed-up, only a capacity.
"""

from __future__ import annotations


def nominal_compression(key_bits: float, value_bits: float, full_bits: float = 16.0) -> float:
    """Return r_nom: the full-precision bits of a key and a value divided by those of the formats, without metadata.

    The bits are means per element. Layers or tokens in full precision count with their bits, so that
    ``1 / r_nom = f + (1 - f)(q_K + q_V) / 32`` with a share f of bf16 layers.
    """
    return 2 * full_bits / (key_bits + value_bits)


def allocated_compression(full_bytes: int, peak: int, weights: int) -> float:
    """Return r_alloc: bytes of the keys and values in full precision divided by all that decoding allocates for them.

    That is the peak of memory while decoding minus the weights: codes, metadata, windows, padding, spare room in the
    buffers, and workspaces of kernels and graphs. All are in bytes.
    """
    return full_bytes / (peak - weights)


def same_work_ratio(fp16_s: float, method_s: float) -> float:
    """Return S, the same-work ratio: the time per token of fp16 divided by the method's."""
    return fp16_s / method_s


def cache_bound(fp16_s: float, fp16_bytes: float, rate: float, ideal_bytes: float, peak_rate: float) -> float:
    """Return S_cache: the largest speed-up that a smaller cache can give, all other work being as with fp16.

    ``S_cache = T_bf16 / (T_nc + D_ideal / BW_peak)``, where the time that is not the cache's is
    ``T_nc = T_bf16 - D_bf16 / BW_eff``.

    Args:
        fp16_s: time per token of fp16 in seconds, T_bf16.
        fp16_bytes: bytes of fp16's cache, D_bf16.
        rate: bandwidth in bytes/s at which a step of fp16 effectively reads its cache, BW_eff.
        ideal_bytes: bytes of the method's cache, which an ideal kernel reads once, D_ideal.
        peak_rate: read bandwidth of the device in bytes/s, BW_peak.
    """
    return fp16_s / (fp16_s - fp16_bytes / rate + ideal_bytes / peak_rate)
