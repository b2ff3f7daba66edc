"""``python -m experiments.kernels.prefill``: what a long prompt's time goes to in one layer, by choice, on this GPU.

Causal SDPA by each back end of torch (and by the order that kvbench gives it, and torch's own), with the time of the
first call, in which cuDNN plans; the feed-forward layer whole and in slices; peaks of both beside their inputs. Some
15 s for both models at 32k and 128k tokens. Writes results/<device>/prefill_layer.json.
"""

from __future__ import annotations

import itertools
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import nn
from torch.nn.attention import sdpa_kernel
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaMLP

from experiments.measured import command_line, keep_json
from kvbench.attention import prefill
from kvbench.bench.kernel import BACKENDS
from kvbench.bench.shapes import MODELS, Model, tokens
from kvbench.cache.progress import Backend
from kvbench.decoding import passes

#: torch's back ends that are measured, and its choice with kvbench's order of them and with its own
WAYS = ("auto", "stock", "cudnn", "flash")
#: hidden and intermediate size of the models of :data:`kvbench.bench.shapes.MODELS`
SIZES = {"7b": (4096, 11008), "8b": (4096, 14336), "tiny": (384, 1024)}


class Attention(nn.Module):
    """Stand-in for an attention module, with the attributes that transformers' SDPA reads."""

    is_causal = True

    def __init__(self, model: Model) -> None:
        super().__init__()
        self.num_key_value_groups = model.query_heads // model.heads


def time_and_peak(call: Callable[[], object], device: torch.device, repeats: int) -> dict[str, float]:
    """Return milliseconds of the first call and the best of the others, and peak GiB above the memory before."""
    wait = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    before = torch.cuda.memory_allocated() if device.type == "cuda" else 0
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    times = []
    for _ in range(repeats + 1):
        wait()
        started = time.perf_counter()
        call()
        wait()
        times.append(1e3 * (time.perf_counter() - started))
    peak = torch.cuda.max_memory_allocated() - before if device.type == "cuda" else 0
    return {"first_ms": round(times[0], 3), "ms": round(min(times[1:]), 3), "peak_gib": round(peak / 2**30, 3)}


def measure_attention(
    model: Model, count: int, device: torch.device, dtype: torch.dtype, repeats: int
) -> dict[str, Any]:
    """Measure causal attention of `count` tokens to themselves; None for a back end that refuses."""
    module = Attention(model)
    # as projections leave them: heads beside channels
    q, k, v = (
        torch.randn(1, count, heads, model.channels, device=device, dtype=dtype).transpose(1, 2)
        for heads in (model.query_heads, model.heads, model.heads)
    )
    measured: dict[str, Any] = {}
    work = 2 * count**2 * model.query_heads * model.channels  # of the lower triangle: two products
    for name in WAYS:
        backend: Backend = "auto" if name == "auto" else "stock"
        context = sdpa_kernel([BACKENDS[name]]) if name in BACKENDS else nullcontext()

        def call(backend: Backend = backend) -> object:
            return prefill.attend_prompt(module, q, k, v, None, None, {}, backend)

        try:
            with context:
                with prefill.order(q, k, v, None, backend) as served:
                    measured[name] = time_and_peak(call, device, repeats)
                measured[name] |= {"served": served, "tflops": round(work / measured[name]["ms"] / 1e9, 1)}
        except RuntimeError as error:
            measured[name] = {"refused": str(error).splitlines()[0]}
    return measured


def feed_forward(name: str, count: int, device: torch.device, dtype: torch.dtype, repeats: int) -> dict[str, Any]:
    """Measure the feed-forward layer of one model on `count` tokens: whole, and in slices of several sizes."""
    hidden, inner = SIZES[name]
    block = nn.Module()
    config = LlamaConfig(hidden_size=hidden, intermediate_size=inner)
    with device:
        block.mlp = mlp = LlamaMLP(config).to(dtype)
    x = torch.randn(1, count, hidden, device=device, dtype=dtype)
    measured = {}
    for size in (None, 4096, passes.SLICE, 16384):
        with passes.sliced(block, count, size):  # type: ignore[arg-type]
            measured["whole" if size is None else str(size)] = time_and_peak(lambda: mlp(x), device, repeats)
    return measured


@torch.inference_mode()
def main() -> int:
    """Measure the chosen parts of a prefill on this GPU and print a table."""
    parser = command_line("experiments.kernels.prefill", __doc__, "results/h200/prefill_layer.json")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=["7b", "8b"])
    parser.add_argument("--contexts", nargs="+", type=tokens, default=[tokens("32k"), tokens("128k")])
    parser.add_argument("--repeats", type=int, default=2)
    arguments = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = torch.bfloat16
    rows = []
    for name, count in itertools.product(arguments.models, arguments.contexts):
        parts = {
            "attention": measure_attention(MODELS[name], count, device, dtype, arguments.repeats),
            "mlp": feed_forward(name, count, device, dtype, arguments.repeats),
        }
        rows.append({"model": name, "tokens": count, **parts})
        for part, ways in parts.items():
            for how, figures in ways.items():
                print(f"{name} {count:>7} {part:<10}{how:<7} {figures}", flush=True)
    device_name = torch.cuda.get_device_name() if device.type == "cuda" else "cpu"
    measured = {"device": device_name, "torch": torch.__version__, "dtype": "bfloat16", "rows": rows}
    return keep_json(measured, arguments)


if __name__ == "__main__":
    sys.exit(main())
