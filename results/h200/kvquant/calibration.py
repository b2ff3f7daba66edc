"""Write a calibration file for keys and values that are normally distributed, to time kvquant on random weights.

python results/h200/kvquant/calibration.py FILE [--layers 32] [--kv-heads 32] [--head-dim 128]

Thresholds are those of 1 % outliers; levels are the 2**bits points of least squared error (Lloyd's algorithm).
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch

from kvbench.calibration import file

#: quantile of the standard normal distribution at 99.5 %
BORDER = 2.5758


def levels(bits: int) -> torch.Tensor:
    """Return the best levels for normally distributed elements between -1 and 1, which are the thresholds."""
    x = torch.special.ndtri(torch.linspace(0.005, 0.995, 100_001, dtype=torch.float64)) / BORDER
    points = torch.linspace(-1, 1, 2**bits, dtype=torch.float64)
    for _ in range(200):
        nearest = torch.bucketize(x, (points[1:] + points[:-1]) / 2)
        points = torch.bincount(nearest, x, len(points)) / torch.bincount(nearest, minlength=len(points))
    return points.float()


def main() -> None:
    """Write the file that the command line asks for."""
    parser = argparse.ArgumentParser()
    parser.add_argument("file", type=Path)
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--kv-heads", type=int, default=32)
    parser.add_argument("--head-dim", type=int, default=128)
    args = parser.parse_args()
    width = args.kv_heads * args.head_dim
    tensors = {}
    for layer in range(args.layers):
        tensors[f"layers.{layer}.key.thresholds"] = torch.tensor([[BORDER], [-BORDER]]).repeat(1, width).half()
        for side in ("key", "value"):
            for bits in (2, 3, 4):
                tensors[f"layers.{layer}.{side}.levels.{bits}"] = (
                    levels(bits) if layer == 0 else tensors[f"layers.0.{side}.levels.{bits}"].clone()
                )
                tensors[f"layers.{layer}.{side}.norm.{bits}"] = torch.tensor([1.0, 0.0])
    info = {
        "format": file.FORMAT,
        "model": "any model with random weights",
        "bits": "2,3,4",
        "outliers": "0.01",
        "layers": str(args.layers),
        "kv_heads": str(args.kv_heads),
        "head_dim": str(args.head_dim),
        "text_sha256": "",
        "tokens": "0",
        "fisher": "false",
        **file.versions(),
    }
    file.save(file.Calibration(info, tensors), args.file)
    print(args.file)


if __name__ == "__main__":
    main()
