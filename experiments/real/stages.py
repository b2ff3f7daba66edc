"""The stages of the measurements on a trained model: settings, and the data of the runs that each of them has.

What a setting costs is measured against a cache in float32 (``model.dtype=float32``), so that the figures are those of
the format alone: full precision in 16 bits would itself be as far off as the finest of them. Bytes, and scores of
retrieval, are those of caches that store 16 bits, as they are shipped.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

from experiments.formats.grid import format_lines
from experiments.measured import Setting

#: the papers' settings and the engines' of README's second table
EIGHT = (
    Setting("fp16", "fp16", "fp16"),
    Setting("quantspec, both nibbles", "quantspec", "quantspec:gamma=0"),
    Setting("kivi int4", "kivi", "kivi:int4"),
    Setting("fp8", "engine", "engine:format=fp8"),
    Setting("nvfp4", "engine", "engine:format=nvfp4"),
    Setting("atom int4", "atom", "atom:int4_token"),
    Setting("logquant int2", "logquant", "logquant"),
    Setting("kivi int2", "kivi", "kivi:int2"),
)
#: name among all formats of those of EIGHT that have another one there; the others are ``NAME | own``
OWN = {
    "kivi int4": "kivi int4 G32 | own",
    "kivi int2": "kivi int2 G32 | own",
    "fp8": "fp8 | open",
    "nvfp4": "nvfp4 | open",
}


def line_name(name: str) -> str:
    """Return the name among all formats of one of :data:`EIGHT`."""
    return OWN.get(name, f"{name} | own")


def is_named(setting: Setting, names: Collection[str]) -> bool:
    """Return True if a setting is among these names, which may be those of :data:`EIGHT` or of all formats."""
    return not {setting.key, line_name(setting.key)}.isdisjoint({*names, *map(line_name, names)})


#: every format at its own exact tokens, at none, and at common ones; and the methods of EIGHT that are no format
LINES = (
    *(Setting(line.key, line.family, line.setting) for line in format_lines()),
    *(
        Setting(line_name(one.name), one.family, one.setting)
        for one in EIGHT
        if one.family in ("quantspec", "logquant")
    ),
    Setting("atom int4 | own", "atom", "atom:int4_token"),
)
#: formats that deal with large channels in different ways: a scale per token, per channel, per group, floats, rotations
_AGAINST = (
    "int8 per token", "fp8", "q8_0, rotated", "kivi int4 G32", "int4 per token", "int4 per token, rotated",
    "q4_0, rotated", "q4_0, not rotated", "nvfp4", "KVarN k4v4", "TurboQuant 4 bits", "kivi int2 G32",
)  # fmt: skip
FACTORED = (
    LINES[0],
    *(line for line in LINES if line.name.partition(" | ")[0] in _AGAINST and line.name.endswith("| open")),
)
#: factors of model.outliers: powers of two, with which the model's logits stay the same to the bit
FACTORS = (1, 4, 16, 64)
#: tasks of RULER that need no text from elsewhere, of which one is above the floor (results/smollm2/floors.md)
RETRIEVAL = "niah_single_1"
#: tokens of a window that are decoded and compared, after all others: many windows say more than many tokens of one
SCORED = 128
EXACT = "model.dtype=float32"
#: 16-bit storage, and arithmetic in float32 on every machine: 16 bits would change most of the dequantized weights
SHIPPED = "runtime.arithmetic=float32"


@dataclass(frozen=True)
class Text:
    """A text that is read.

    Args:
        name: name in the tables.
        choice: of ``conf/dataset`` that cuts it into windows.
        path: the local file; None: from the hub, or from the machine's own Python.
    """

    name: str
    choice: str
    path: str | None = None


PYTHON = Text("Python's texts", "perplexity/mini_text")
Runs = Mapping[str, Sequence[str]]


@dataclass(frozen=True)
class Stage:
    """A part of the measurements that one table is folded from.

    Args:
        name: name on the command line, and of the folder below ``results/smollm2``.
        about: what is measured.
        settings: the rows, fp16 first.
        data: function from the texts and the number of samples to the data of the runs of each setting.
        number: samples of each run by default: windows, or prompts.
    """

    name: str
    about: str
    settings: tuple[Setting, ...]
    data: Callable[[Sequence[Text], int], Runs]
    number: int


def perplexities(texts: Sequence[Text], number: int) -> Runs:
    """Return the perplexity on windows of 2,048 tokens, read through the cache token by token."""
    return {
        text.name: [
            f"dataset={text.choice}", "dataset.window=2048", f"dataset.limit={number}", "dataset.per_document=null",
            *([f"dataset.path={text.path}"] if text.path else []), EXACT,
        ]
        for text in texts
    }  # fmt: skip


def divergences(text: Text, tokens: int, number: int, *more: str) -> list[str]:
    """Return the KL divergence over the last :data:`SCORED` tokens of windows, of which all others are prefilled."""
    options = [f"dataset.options={{path: {text.path}}}"] if text.path else []
    return [
        "dataset=fidelity", f"dataset.over={text.choice}", *options, f"dataset.window={tokens}",
        f"dataset.prefill={tokens - SCORED}", f"dataset.limit={number}", "dataset.per_document=null", EXACT, *more,
    ]  # fmt: skip


def by_context(texts: Sequence[Text], number: int) -> Runs:
    """Return the KL divergence at 1k and 4k tokens of the first text, and at 1k of the others.

    Windows of 4k tokens, which take most of the time, are an eighth as many, and those of other texts half as many.
    """
    first, *others = texts
    runs = {f"{first.name} 1k": divergences(first, 1024, number)}
    runs[f"{first.name} 4k"] = divergences(first, 4096, max(2, number // 8))
    return runs | {f"{text.name} 1k": divergences(text, 1024, max(2, number // 2)) for text in others}


def by_factor(texts: Sequence[Text], number: int) -> Runs:
    """Return the KL divergence with larger key channels in the first and the last layer, by their factor."""
    return {
        f"factor {factor}": divergences(
            texts[0], 768, number, *([f"model.outliers=first_last:factor:{factor}"] if factor > 1 else [])
        )
        for factor in FACTORS
    }


def retrieval(texts: Sequence[Text], number: int) -> Runs:
    """Return RULER's single needle in 2,048 tokens; its caches have the bytes of the table."""
    task = ["dataset=ruler_offline", f"dataset.tasks=[{RETRIEVAL}]", "dataset.lengths=[2048]"]
    return {RETRIEVAL: [*task, f"dataset.limit={number}", SHIPPED]}


STAGES = {
    stage.name: stage
    for stage in (
        Stage("kl", "KL divergence of formats by text and context", LINES, by_context, 8),
        Stage("perplexity", "perplexity of eight settings", EIGHT, perplexities, 4),
        Stage("retrieval", "a needle in 2,048 tokens, and the bytes of the caches", EIGHT, retrieval, 16),
        Stage("outliers", "KL divergence of formats by the factor of outliers", FACTORED, by_factor, 8),
    )
}
