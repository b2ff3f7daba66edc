"""Pages about methods, models and all other choices of the configuration, made from conf/, classes and docstrings."""

from __future__ import annotations

import inspect
import re
import sys
import textwrap
from collections.abc import Iterable
from typing import Any

import yaml

from kvbench.cli.choice import Choice, Option, as_typed, choice, decoding
from kvbench.errors import ConfigError
from kvbench.methods.base import Method
from kvbench.methods.bytes import kv_bytes
from kvbench.methods.load import load_method
from kvbench.models.by_name import SERVED
from kvbench.models.spec import ModelConfig
from kvbench.util.confdir import group_options
from kvbench.util.schema import build


def option_table(rows: Iterable[Option]) -> str:
    """Return a table of options: key, default, type, what it does, and the comment of the preset."""
    lines = ["| option | default | what it does |", "|---|---|---|"]
    for option in rows:
        text = sentence(escaped_cell(docstring_markdown(as_typed(option.meaning)))) or sentence(
            escaped_cell(option.comment)
        )
        note = f"<br>*In the preset:* {escaped_cell(option.comment)}" if option.meaning and option.comment else ""
        kind = f"*{escaped_cell(option.type)}.* " if option.type else ""
        lines.append(f"| {code(option.key)} | {code(option.default)} | {kind}{text}{note} |")
    return "\n".join(lines) + "\n"


def class_markdown(cls: type) -> str:
    """Return the docstring of a class as Markdown, without its sections (Args, Raises and so on)."""
    text = inspect.cleandoc(cls.__doc__ or "")
    return docstring_markdown(re.split(r"\n+(?:Args|Attributes|Raises|Returns):\n", text)[0])


def docstring_markdown(docstring: str) -> str:
    """Return a text of a docstring as Markdown: references to code become code."""
    return re.sub(r":\w+:`~?(?:[\w.]*\.)?(\w+)`", r"`\1`", docstring).replace("``", "`")


def escaped_cell(text: str) -> str:
    """Return a text that can be in a cell of a table: on one line, markup escaped outside code, bars everywhere."""
    parts = " ".join(text.split()).split("`")
    parts[::2] = [re.sub(r"([*_<>\[\]])", r"\\\1", part) for part in parts[::2]]
    return "`".join(parts).replace("|", "\\|")


def code(text: str) -> str:
    """Return a value as code in a cell."""
    shown = text.replace("|", "\\|")
    return f"`` {shown} ``" if "`" in shown else f"`{shown}`"


def sentence(text: str) -> str:
    """Return a text that begins with a capital letter, unless it begins with code, and ends with a full stop."""
    text = text.strip()
    return text and text[:1].upper() + text[1:] + ("" if text[-1] in ".:!?" else ".")


#: layers, query heads, KV heads and channels per head
Shape = tuple[int, int, int, int]
#: prompt lengths of the table of bytes
LENGTHS = (4096, 32768, 131072)
#: models in this table
SHAPES: dict[str, Shape] = {"Llama-2-7B": (32, 32, 32, 128), "Llama-3.1-8B": (32, 32, 8, 128)}
#: hyper-parameters without which a method's bytes depend on the text
FIXED: dict[str, dict[str, Any]] = {"cocktail": {"split": (10, 30, 60)}}


def method_page(chosen: Choice) -> str:
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


HEAD = """\
# Model presets

A preset names a checkpoint with its context, chat wrapper, dtype and licence. Any other causal language model of the
hub or of a folder runs too: [Models](../models.md) says which ones are served. KiB are those of the keys and values of
one token in 16 bits.

| `model=` | checkpoint | parameters | layers | heads: query, KV | channels | context | KiB |
|---|---|--:|--:|--:|--:|--:|--:|
"""


def model_page() -> str:
    """Return the page of the models: presets, their sizes, and what keys and values take in full precision."""
    lines, licences = [], []
    presets = {name: path for name, path in group_options("model").items() if name != SERVED}
    for name, path in presets.items():
        model: ModelConfig = build(ModelConfig, yaml.safe_load(path.read_text(encoding="utf-8")), "model")
        numbers = model._numbers()
        layers, heads = int(numbers["num_hidden_layers"]), int(numbers["num_attention_heads"])
        kv_heads, channels = int(numbers.get("num_key_value_heads") or heads), model.head_dim()
        assert channels is not None, name
        kib = mebibytes(load_method("fp16"), 1024, (layers, heads, kv_heads, channels))
        count = model.architecture.parameters if model.architecture else None
        where = model.hub_id or "bundled with kvbench"
        size = f"{count / 1e9:.1f} billion" if count else "12 million" if name == "tiny" else "-"
        lines.append(
            f"| `{name}` | {where} | {size} | {layers} | {heads}, {kv_heads} | {channels} | {model.max_length:,} "
            f"| {kib:,.0f} |"
        )
        licences.append(f"| `{name}` | {model.licence} | {'accept it on the hub first' if model.gated else ''} |")
    notes = [
        f"- `{name}`: {note}"
        for name, path in presets.items()
        if (note := yaml.safe_load(path.read_text(encoding="utf-8")).get("note"))
    ]
    gated = "## Licences\n\n| `model=` | licence | |\n|---|---|---|\n" + "\n".join(licences) + "\n\n## Notes"
    first = next(name for name in presets if name != "tiny")
    rows = option_table(choice("model", first).options)
    tail = f"\n## Options of a model\n\nThe defaults are those of `model={first}`.\n\n{rows}"
    return HEAD + "\n".join(lines) + f"\n\n{gated}\n" + "\n".join(notes) + "\n" + tail


#: titles and first sentences of the pages that show all choices of a group
GROUPS = {
    "quantizer": (
        "Quantizers",
        "A quantizer is the packed format of keys and values. Each method has a default, and lists those it accepts.",
    ),
    "dataset": (
        "Data sets",
        "Data sets of one class have the same options; the table shows the defaults of the first of them. "
        "`python -m kvbench --help dataset=NAME` shows those of each.",
    ),
    "runtime": (
        "Runtime",
        "These options say how a run is executed. Only `runtime.seed` is part of the run's id.",
    ),
    "logger": ("Loggers", "A logger receives a row for each finished run; `results/runs` has everything all the same."),
    "launcher": ("Launchers", "A launcher runs the jobs of a sweep."),
    "experiment": ("Presets of runs", "A preset sets several groups at once: `python -m kvbench experiment=NAME`."),
}


def generated_pages() -> dict[str, str]:
    """Return the generated pages by path on the site."""
    texts = {f"reference/method/{name}.md": method_page(choice("method", name)) for name in group_options("method")}
    texts["reference/models.md"] = model_page()
    for group, (title, intro) in GROUPS.items():
        texts[f"reference/{group}.md"] = _group(group, title, intro)
    texts["reference/decoding.md"] = (
        "# Decoding\n\nThese options say how answers are generated. All of them are part of the run's id.\n\n"
        + option_table(decoding().options)
    )
    return texts


def _group(group: str, title: str, intro: str) -> str:
    """Return the page of a group: a section for each class of choices with the same options."""
    families: dict[tuple[object, ...], list[Choice]] = {}
    earlier: Choice | None = None
    for name in sorted(group_options(group), key=lambda name: name != "default"):
        chosen = choice(group, name)
        key = (chosen.target,) if group == "dataset" else (name,)
        families.setdefault(key, []).append(chosen)
    parts = [f"# {title}", intro]
    for family in families.values():
        first = family[0]
        if len(family) > 1 and first.target is not None:
            parts.append(f"## `{first.target.__name__}`")
            about = "\n".join(f"- `{group}={one.name}`: {escaped_cell(one.summary)}" for one in family)
        else:
            parts.append(f"## `{group}={first.name}`")
            about = sentence(escaped_cell(first.summary))
        parts += [class_markdown(first.target), about] if first.target is not None else [about]
        if first.sets:
            parts.append("It sets " + ", ".join(f"`{item}`" for item in first.sets) + ".")
        rows = first.options
        if earlier is not None and group in ("quantizer", "runtime"):
            known = {option.key: option.default for option in earlier.options}
            rows = tuple(option for option in rows if known.get(option.key) != option.default)
        if earlier is not None and len(rows) < len(first.options):
            parts.append(f"Other options have the defaults of `{group}={earlier.name}`.")
        if rows:
            parts.append(option_table(rows))
            earlier = earlier or first
    return "\n\n".join(parts) + "\n"
