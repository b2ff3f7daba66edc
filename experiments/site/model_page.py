"""The page of the models: presets, their sizes, and what their keys and values take in full precision."""

from __future__ import annotations

import yaml

from experiments.site.method_page import mebibytes
from experiments.site.text import option_table
from kvbench.cli.choice import choice
from kvbench.methods.load import load_method
from kvbench.models.spec import ModelConfig
from kvbench.util.confdir import group_options
from kvbench.util.schema import build

HEAD = """\
# Model presets

A preset names a checkpoint with its context, chat wrapper, dtype and licence. Any other causal language model of the
hub or of a folder runs too: [Models](../models.md) says which ones are served. KiB are those of the keys and values of
one token in 16 bits.

| `model=` | checkpoint | parameters | layers | heads: query, KV | channels | context | KiB |
|---|---|--:|--:|--:|--:|--:|--:|
"""


def write_model_page() -> str:
    """Return the page."""
    lines, licences = [], []
    for name, path in group_options("model").items():
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
        for name, path in group_options("model").items()
        if (note := yaml.safe_load(path.read_text(encoding="utf-8")).get("note"))
    ]
    gated = "## Licences\n\n| `model=` | licence | |\n|---|---|---|\n" + "\n".join(licences) + "\n\n## Notes"
    first = next(name for name in group_options("model") if name != "tiny")
    rows = option_table(choice("model", first).options)
    tail = f"\n## Options of a model\n\nThe defaults are those of `model={first}`.\n\n{rows}"
    return HEAD + "\n".join(lines) + f"\n\n{gated}\n" + "\n".join(notes) + "\n" + tail
