"""Rows of ``python -m kvbench.bench cpu``: H2O's prefill, and steps over KVQuant's codes."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from kvbench.bench import cpu

#: ms of a step per layer that KVQuant may take
KVQUANT_MS = 3.0


def prefills(args: argparse.Namespace, threads: int) -> Iterator[dict[str, Any]]:
    """Measure the prefill of a long prompt whose attention the method observes."""
    import torch

    for name in cpu.chosen(args, "prefill"):
        _, shape, size, setting = name.split()
        tokens, built = int(size.removesuffix("k")) * 1024, cpu.models(tiny=shape == "tiny")
        ids = torch.randint(3, 4000, (1, tokens), generator=torch.Generator().manual_seed(0))
        contenders: dict[tuple[str, str], Callable[[], object]] = {
            (what, arithmetic): partial(fill, model, what, ids)
            for what in ("fp16", setting)
            for arithmetic, model in built.items()
        }
        error = columns_error()
        times = cpu.least(contenders, 1, threads)
        yield cpu.ratios(name, threads, times, setting, error < 2e-5, f"column sums {error:.1e}")


def fill(model: Any, setting: str, ids: Any) -> None:
    """Run the prefill of a prompt ``[1, T]`` into a new cache of a setting."""
    import torch

    from kvbench.decoding.passes import prefill
    from kvbench.methods import load_method

    method, options = cpu.setting_of(setting)
    with torch.inference_mode():
        prefill(model, load_method(method, **options).new_cache(model, max_length=ids.shape[1] + 8), ids, None)


def columns_error() -> float:
    """Return the relative error of column sums of attention, by the kernel, against a softmax in plain torch."""
    import torch

    from kvbench.attention.cpu import columns
    from kvbench.attention.observe import probabilities
    from kvbench.attention.synthetic import relative_error

    heads, group, channels = cpu.SHAPES["tiny"]
    rng = torch.Generator().manual_seed(0)
    query = torch.randn(1, heads * group, 1024, channels, generator=rng)
    keys = torch.randn(1, heads, 1024, channels, generator=rng)
    scaling, wide = channels**-0.5, keys.repeat_interleave(group, 1)
    kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    _, lse = kernel(query, wide, wide, 0.0, True, scale=scaling)
    sums = torch.zeros(1, heads * group, 1024)
    columns.add_received(sums, query, keys, lse, [0], scaling)
    return relative_error(sums, probabilities(query, keys, None, scaling, 0).sum(2))


def looked_up_steps(args: argparse.Namespace, threads: int) -> Iterator[dict[str, Any]]:
    """Measure steps of the bundled model, which has a calibration, against the limit of ms per layer."""
    import torch
    from transformers import AutoModelForCausalLM

    from kvbench.cache.progress import Options
    from kvbench.measure.random_fill import fill_at_random
    from kvbench.methods import load_method
    from kvbench.models.spec import BUNDLED, local_folder
    from kvbench.util.attachment import Placement, record_placement

    for name in cpu.chosen(args, "limit"):
        _, _, size, setting = name.split()
        tokens, contenders, errors, layers = int(size.removesuffix("k")) * 1024, {}, {}, 0
        for dtype in (torch.bfloat16, torch.float32):
            model = AutoModelForCausalLM.from_pretrained(local_folder(f"{BUNDLED}tiny"), dtype=dtype).eval()
            record_placement(model, Placement(storage=torch.bfloat16))
            cache = load_method(setting).new_cache(model, max_length=tokens + 4 * args.runs)
            fill_at_random(model, cache, 1, tokens)
            twin = cache.clone()
            twin.options = Options(kernels="reference")
            wanted, found = (cpu.decode_logits(model, x, 1).float() for x in (twin, cache))
            errors[dtype], layers = float((found - wanted).norm() / wanted.norm()), len(cache.layers)
            contenders[setting, cpu.dtype_label(dtype)] = partial(cpu.decode_logits, model, cache, 1)
        times: dict[tuple[str, str], float] = cpu.least(contenders, args.runs, threads)
        times["fp16", "limit"] = KVQUANT_MS * layers
        check = f"logits {errors[torch.bfloat16]:.1e}, {errors[torch.float32]:.1e}; {cache.path}"
        yield cpu.ratios(name, threads, times, setting, errors[torch.float32] < 1e-4, check)
