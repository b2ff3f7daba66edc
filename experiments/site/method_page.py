"""The page of a method: source, options, bytes, kernels and limits, all from its code and its YAML file."""

from __future__ import annotations

import inspect
import re
import sys
import textwrap
from typing import Any

from experiments.site.text import class_markdown, docstring_markdown, option_table, sentence
from kvbench.cli.choice import Choice
from kvbench.errors import ConfigError
from kvbench.methods.base import Method
from kvbench.methods.bytes import kv_bytes
from kvbench.methods.load import load_method

#: layers, query heads, KV heads and channels per head
Shape = tuple[int, int, int, int]
#: prompt lengths of the table of bytes
LENGTHS = (4096, 32768, 131072)
#: models in this table
SHAPES: dict[str, Shape] = {"Llama-2-7B": (32, 32, 32, 128), "Llama-3.1-8B": (32, 32, 8, 128)}
#: hyper-parameters without which a method's bytes depend on the text
FIXED: dict[str, dict[str, Any]] = {"cocktail": {"split": (10, 30, 60)}}


def write_method_page(chosen: Choice) -> str:
    """Return the page of a method."""
    assert chosen.target is not None
    cls = chosen.target
    method = load_method(chosen.name)
    module = sys.modules[cls.__module__]
    parts = [f"# {chosen.name}", sentence(chosen.summary), f"    python -m kvbench method={chosen.name}"]
    parts += ["## What it does", class_markdown(cls), _paper_notes(inspect.cleandoc(module.__doc__ or ""))]
    parts += ["## Options", option_table(chosen.options) if chosen.options else "It has no options of its own."]
    parts += ["## Quantizers", _quantizers(chosen)]
    parts += ["## Bytes", _bytes(chosen.name, method)]
    parts += ["## Which code reads the cache", kernels(method)]
    parts += ["## Limits", "\n".join(f"- {line}" for line in limits(method))]
    parts.append(f"The class is `{cls.__module__}.{cls.__qualname__}`, its preset `conf/method/{chosen.name}.yaml`.")
    return "\n\n".join(part for part in parts if part) + "\n"


def _paper_notes(docstring: str) -> str:
    """Return the rest of a module's docstring behind its first line: the paper, and where the code differs from it."""
    rest = docstring.partition("\n")[2].strip()
    return docstring_markdown(rest.replace("Source:", "**Source.**", 1)) if rest else ""


def _quantizers(chosen: Choice) -> str:
    default = next((item.partition("=")[2] for item in chosen.sets if item.startswith("quantizer=")), "none")
    if chosen.takes == ("none",):
        return "The method takes no quantizer (`quantizer=none`)."
    names = ", ".join(f"`{name}`" for name in chosen.takes)
    return f"The default is `{default}`. The method accepts {names}: see [quantizers](../quantizer.md)."


def _bytes(name: str, method: Method) -> str:
    """Return the formula of the bytes as code, and what it gives for two models."""
    if type(method).layer_bytes is Method.layer_bytes:
        return "The method has no formula: only a run tells its bytes."
    method = load_method(name, **FIXED.get(name, {}))
    heads = "".join(f" {length:,} tokens |" for length in LENGTHS)
    lines = [f"| keys and values of one sequence, MiB (share of fp16) |{heads}", "|:--|" + "--:|" * len(LENGTHS)]
    for model, shape in SHAPES.items():
        cells = []
        for length in LENGTHS:
            try:
                size = mebibytes(method, length, shape)
                cells.append(f"{size:,.0f} ({100 * size / mebibytes(load_method('fp16'), length, shape):.0f} %)")
            except ConfigError:
                cells.append("-")
        lines.append(f"| {model} | " + " | ".join(cells) + " |")
    fixed = ", ".join(f"`method.{key}={list(value)}`".replace(" ", "") for key, value in FIXED.get(name, {}).items())
    intro = "The bytes of the prompt's keys and values at the method's defaults" + (f" and {fixed}." if fixed else ".")
    source = textwrap.dedent(inspect.getsource(type(method).layer_bytes))
    source = re.sub(r'\n    """.*?"""(?=\n)', "", source, count=1, flags=re.DOTALL)
    code = textwrap.indent(source.rstrip(), "    ")
    note = (
        '??? note "The formula: `layer_bytes`, the bytes of one sequence in one layer"\n\n'
        f"    ```python\n{code}\n    ```\n\n"
        "    `at` has the tokens, the heads and the channels of the layer; `at.both(n)` are the bytes of n tokens in\n"
        "    full precision, `at.packed(n, format)` those of n packed tokens with their scales. Tests compare the\n"
        "    formula with the buffers of real caches, to the byte.\n"
    )
    return "\n".join([intro, "", *lines, "", note])


def mebibytes(method: Method, length: int, shape: Shape) -> float:
    """Return the bytes of the keys and values of one sequence, in MiB."""
    layers, query_heads, heads, channels = shape
    size = kv_bytes(method, length, layers=layers, query_heads=query_heads, heads=heads, channels=channels)
    return size.total / 2**20


def kernels(method: Method) -> str:
    """Return which code computes the attention of a decode step, as :mod:`kvbench.attention.fused` chooses it."""
    name = type(method).__name__
    if name == "HFQuantized":
        return (
            "The reference path: transformers' own backend dequantizes what it has packed, at every step. "
            "This is what the method is there to show, so its times are no measure of quantized caches."
        )
    if name == "KVQuant":
        return (
            "A Triton kernel of its own on a GPU (`kvbench/attention/codebook/`), which looks codes up in the "
            "calibrated codebooks and applies RoPE to the keys; on a CPU, the reference path."
        )
    if method.observe_steps:
        return (
            "A Triton kernel on a GPU, which also returns the attention that each token receives, as the method needs "
            "at every step; on a CPU, the reference path."
            if method.observe_group is not None
            else "The reference path, because kernels do not return all attention weights."
        )
    if method.quantizer is None and not _packs(method):
        return (
            "Nothing is packed: torch's SDPA reads the cache, as in stock transformers. Captured decode steps on a GPU "
            "use the CUDA kernel, or Triton's."
        )
    text = (
        "On a GPU the CUDA kernel reads the packed codes, or Triton's where the CUDA kernel cannot serve the formats; "
        "the row names the kernel, and the reason if none could. On a CPU the reference path dequantizes tile by tile."
    )
    if method.eager:
        text += " Several new tokens in one step (verification, chunks) take the reference path."
    return text


def _packs(method: Method) -> bool:
    return type(method).__name__ == "Cocktail"


def limits(method: Method) -> list[str]:
    """Return what a method cannot do, or needs, by its properties; at least one line."""
    cls = type(method)
    lines = []
    if method.needs_prompts:
        lines.append("It needs to know the context and the question of each prompt: data sets must name them.")
    if method.prompt_only or (_packs(method) and not method.settles):
        lines.append("It acts on the prompt alone: generated tokens stay in full precision.")
    if method.drops_tokens:
        lines.append("It drops tokens for good: what a later question needs may be gone.")
    if method.observe_prompt:
        what = "all queries of the prompt" if method.observe_prompt < 0 else f"the last {method.observe_prompt} queries"
        lines.append(f"Prefill computes the attention of {what} a second time, because the method chooses by it.")
    if method.observe_steps:
        lines.append("Each decode step must return the attention that tokens receive, which costs time.")
    if cls.demotions is Method.demotions and method.settles:
        lines.append("Perplexity takes its tokens one by one: the method does not say beforehand when each is moved.")
    if method.keys_before_rope:
        lines.append("Keys are stored before RoPE, so every step applies RoPE to all cached keys.")
    if cls.__name__ == "KVQuant":
        lines.append("It needs a calibration of the model: `python -m kvbench.calibrate`; `tiny` brings its own.")
    for package in method.packages():
        lines.append(f"It needs the package `{package.module}` ({package.hint}).")
    if method.speculation is not None:
        lines.append("Perplexity generates no tokens, so it is measured without speculation.")
    return lines or ["None beyond those of kvbench: causal language models with softmax attention."]
