"""Time of the attention of one layer to KVQuant's codes, and its error against fp32, on one GPU.

    python results/h200/kvquant/attention.py FILE.json

One row of random tokens, 1 % outliers of keys and of values, keys before RoPE, one new token. Each point is written as
soon as it is measured.
"""

from __future__ import annotations

import argparse
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch

from kvbench.attention.codebook import decode
from kvbench.attention.codebook.decode import codebook_kernel
from kvbench.attention.phases import Work, looked_up
from kvbench.attention.rope.rotation_tables import Rope, rotation_tables
from kvbench.attention.synthetic import relative_error
from kvbench.bench import clock, report
from kvbench.cache.segments.codebook import NuqFormat, NuqSegment

#: KV heads, and query heads of each
SHAPES = {"7b": (32, 1), "8b": (8, 4)}
CHANNELS, SCALING = 128, 128**-0.5
#: standard deviations beyond which 1 % of normally distributed elements lie
BORDER = 2.5758
#: shape, bits, tokens
POINTS = (
    ("7b", 3, 32768),
    ("8b", 3, 32768),
    ("7b", 2, 32768),
    ("7b", 4, 32768),
    ("7b", 3, 4096),
    ("7b", 3, 131072),
    ("8b", 3, 131072),
)


def rotated(keys: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Rotate keys as Llama does, in fp32."""
    half = keys.shape[-1] // 2
    frequency = 10000.0 ** -(torch.arange(half, device=keys.device) / half)
    angle = positions[:, None, :, None].float() * frequency
    first, second = keys.float().chunk(2, -1)
    cos, sin = torch.cos(angle), torch.sin(angle)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)


def layer(heads: int, bits: int, tokens: int, seed: int) -> tuple[Work, NuqSegment, NuqSegment]:
    """Return a layer of random tokens as kernels read it, with its keys and its values."""
    device, dtype = torch.device("cuda"), torch.bfloat16
    generator = torch.Generator(device).manual_seed(seed)
    levels = torch.tanh(torch.linspace(-1.5, 1.5, 2**bits))
    thresholds = torch.tensor([[BORDER], [-BORDER]]).repeat(1, heads * CHANNELS).half()
    segments = []
    for limits, side in ((thresholds, "key"), (None, "value")):
        form = NuqFormat(bits, levels, outliers=0.01, thresholds=limits)
        segment = NuqSegment(1, heads, CHANNELS, dtype, device, form=form, side=side, capacity=tokens)  # type: ignore[arg-type]
        for first in range(0, tokens, 8192):
            count = min(8192, tokens - first)
            x = torch.randn(1, heads, count, CHANNELS, generator=generator, device=device)
            segment.append(slice(0, 1), x.to(dtype))
        segments.append(segment)
    keys, values = segments
    counts = [[(0, 0, tokens)]]
    table = torch.tensor(counts, dtype=torch.int32, device=device)
    work = Work([(looked_up(keys), looked_up(values))], table, counts, heads, CHANNELS, CHANNELS, tokens)
    fine, coarse = rotation_tables(rotated, CHANNELS, device, tokens)
    work.rope = Rope(torch.zeros(1, dtype=torch.int32, device=device), fine, coarse)
    return work, keys, values


def exact(query: torch.Tensor, keys: NuqSegment, values: NuqSegment, group: int) -> torch.Tensor:
    """Return attention of the first KV head's queries in fp32 to its dequantized tokens."""
    count = keys.lengths[0]
    blocks = [(first, min(first + 4096, count)) for first in range(0, count, 4096)]
    k, v = (
        torch.cat([side.read(slice(0, 1), *block, torch.float32)[:, :1] for block in blocks], 2)
        for side in (keys, values)
    )
    k = rotated(k, torch.arange(count, device="cuda")[None])
    return ((query[:, :group].float() @ k.transpose(-1, -2) * SCALING).softmax(-1) @ v).transpose(1, 2)


def measured(shape: str, bits: int, tokens: int) -> dict[str, Any]:
    """Return time and error of one point."""
    heads, group = SHAPES[shape]
    size = heads * tokens * CHANNELS * 2 * bits // 8
    layers = [layer(heads, bits, tokens, seed) for seed in range(min(clock.copies(size), 4))]
    query = torch.randn(1, heads * group, 1, CHANNELS, device="cuda").bfloat16()
    work, keys, values = layers[0]
    out = decode.attend(query, work, SCALING)
    time = clock.replayed([partial(decode.attend, query, work, SCALING) for work, _, _ in layers], 0.1)
    compiled = codebook_kernel(decode.configured(query, work), 0)
    return {
        "shape": shape,
        "bits": bits,
        "tokens": tokens,
        "us": time.us,
        "p10": time.p10,
        "p90": time.p90,
        "error": relative_error(out[:, :, :group], exact(query, keys, values, group)),
        "same_bits_again": bool(torch.equal(out, decode.attend(query, work, SCALING))),
        "registers": compiled.registers,
        "spilled": compiled.spilled,
        **asdict(compiled.build),
    }


def main() -> None:
    """Measure all points."""
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    out = parser.parse_args().out
    content: dict[str, Any] = {"what": __doc__.splitlines()[0], **report.machine(), "rows": []}
    torch.manual_seed(0)
    for point in POINTS:
        content["rows"].append(measured(*point))
        print(content["rows"][-1], flush=True)
        report.write_json(out, content)
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
