"""Settings of the table of formats: each quantizer at its method's own exact tokens, and at two common ones.

A gain counts only at equal bytes and equal exact tokens, the *tail*: what a method keeps in full precision may be worth
more than how it quantizes the rest.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

from experiments.measured import Setting

#: tokens in full precision. ``own``: as the method's authors have them; ``open``: none, or those of the group that is
#: not full yet, where groups run along tokens; ``wide``: the first 64 and the newest 256 (OSCAR's)
Tail = Literal["own", "open", "wide"]
TAILS: dict[Tail, str] = {
    "own": "the authors' own",
    "open": "none, or an open group",
    "wide": "64 first and 256 newest",
}

_TURN = "rotation.key=hadamard:rotation.value=hadamard"
_PLAIN = "rotation.key=none:rotation.value=none"
_WIDE = "sinks=64:window=256"

Tails = Mapping[Tail, str]
#: options of each tail; one that is not listed is not run, as it equals another
#: quantizers that pack token by token, and whose own tail is none
TOKENWISE: Tails = {"open": "sinks=0:window=0", "wide": _WIDE}
ONLY: Tails = {"open": ""}
#: KIVI with keys in groups of tokens
KIVI: dict[int, Tails] = {
    group: {"own": "", "open": f"residual={group}", "wide": f"residual={group}:{_WIDE}"} for group in (32, 128)
}
#: KVarN: its own tail has 128 first tokens and the newest ones of an incomplete tile
TILES: Tails = {"own": "", "open": "sinks=0", "wide": _WIDE}
#: TurboQuant: its own tail is exact in the first two and the last two layers
TURBO: Tails = {"own": "", "open": "boundary=0", "wide": f"boundary=0:{_WIDE}"}


@dataclass(frozen=True)
class Row(Setting):
    """One line of the table: a quantizer with one of its tails."""

    tail: Tail

    @property
    def key(self) -> str:
        """Name and tail, which tell a line from all others."""
        return line_key(self.name, self.tail)


def line_key(name: str, tail: Tail) -> str:
    """Return what tells a line from all others: the quantizer's name and the tail."""
    return f"{name} | {tail}"


@dataclass(frozen=True)
class Quantizer:
    """A quantizer and the options that give it each tail.

    Args:
        name: label of the quantizer.
        family: colour in the plot.
        setting: method, quantizer and options.
        tails: options of each tail, the authors' own first.
        timed: setting to be timed in steps of a large model, if it is not `setting`; None if there is none: no kernel
            reads the format, or it needs a calibration of that model.
    """

    name: str
    family: str
    setting: str
    tails: Tails
    timed: str | None = ""

    @property
    def to_time(self) -> str | None:
        """The setting to be timed in steps of a large model, or None."""
        return self.setting if self.timed == "" else self.timed


def _engine(name: str, form: str, tails: Tails = TOKENWISE, timed: str | None = "") -> Quantizer:
    """Return a format of an engine; not `timed`: only the reference path reads it."""
    return Quantizer(name, "engine", f"engine:format={form}", tails, timed)


QUANTIZERS = (
    # 8 bits
    _engine("int8 per token", "int8_per_token_head"),
    _engine("fp8", "fp8"),
    _engine("fp8 per token", "fp8_per_token_head"),
    _engine("q8_0, rotated", "q8_0"),
    Quantizer("TurboQuant k8v4", "turboquant", "turboquant:format=k8v4", TURBO),
    # 4 bits
    Quantizer("kivi int4 G32", "kivi", "kivi:int4", KIVI[32]),
    Quantizer("kivi int4 G128", "kivi", "kivi:int4_g128", KIVI[128]),
    Quantizer("int4 per token", "plain", "kivi:int4_token:residual=1", TOKENWISE),
    Quantizer("int4 per token, rotated", "plain", f"kivi:int4_token:residual=1:{_TURN}", TOKENWISE),
    _engine("vLLM int4 per token", "int4_per_token_head"),
    _engine("SAW-INT4", "saw_int4", timed=None),
    _engine("q4_0, rotated", "q4_0"),
    Quantizer("q4_0, not rotated", "engine", f"engine:format=q4_0:{_PLAIN}", TOKENWISE),
    _engine("nvfp4", "nvfp4"),
    _engine("nvfp4 4over6", "nvfp4_4over6"),
    _engine("fp4_mx_block16", "fp4_mx_block16", timed=None),
    _engine("UltraQuant", "ultraquant_4bit", timed=None),
    _engine("q5_1, rotated", "q5_1", ONLY, timed=None),
    _engine("q4_1, rotated", "q4_1", ONLY, timed=None),
    _engine("iq4_nl, rotated", "iq4_nl", ONLY),
    _engine("Octave k3v4", "octave_k3v4", ONLY),
    Quantizer(
        "TurboQuant 4 bits, QJL",
        "turboquant",
        "turboquant:format=4bit_nc:qjl=true:nc_at=none:boundary=0",
        ONLY,
        timed=None,
    ),
    Quantizer("TurboQuant 4 bits", "turboquant", "turboquant:format=4bit_nc", TURBO),
    Quantizer("KVarN k4v4", "kvarn", "kvarn:int4_g128", TILES),
    Quantizer("kvquant 4, 1% outliers", "kvquant", "kvquant", {"own": ""}, timed=None),
    # 2 to 3.5 bits
    Quantizer("TurboQuant k3v4", "turboquant", "turboquant:format=k3v4_nc", TURBO),
    Quantizer("TurboQuant 3 bits", "turboquant", "turboquant:format=3bit_nc", TURBO),
    Quantizer("KVarN k4v2", "kvarn", "kvarn", TILES),
    Quantizer("KVarN k2v2", "kvarn", "kvarn:int2_g128", TILES),
    Quantizer("k2v2, rotated, not balanced", "kvarn", "kvarn:int2_g128:iterations=0", {"open": "sinks=0"}, timed=None),
    Quantizer("kivi int2 G32", "kivi", "kivi:int2", KIVI[32]),
    Quantizer("kivi int2 G128", "kivi", "kivi:int2_g128", KIVI[128]),
    Quantizer("int2 per token", "plain", "kivi:int2_token:residual=1", TOKENWISE),
    Quantizer("int2 per token, rotated", "plain", f"kivi:int2_token:residual=1:{_TURN}", TOKENWISE),
    Quantizer(
        "OSCAR int2",
        "oscar",
        "oscar",
        {"own": "", "open": "sinks=0:window=0"},
        # a matrix is a matrix: no calibration of the large model is needed to time it
        timed="oscar:basis=rotation:rotation.key=hadamard:rotation.value=hadamard",
    ),
)


def format_lines() -> Iterator[Row]:
    """Yield the lines of the table, fp16 first."""
    yield Row("fp16", "fp16", "fp16", "own")
    for quantizer in QUANTIZERS:
        for tail, options in quantizer.tails.items():
            setting = ":".join(filter(None, (quantizer.setting, options)))
            yield Row(quantizer.name, quantizer.family, setting, tail)


#: lines by name and tail
ROWS = {row.key: row for row in format_lines()}


#: claims of papers and engines, each with the pairs that test it: the better quantizer, the worse one, and the tails at
#: which they are compared; ``own/wide``: the first with its own, the second with the wide one
_CLAIMS: dict[str, tuple[tuple[str, str, str], ...]] = {
    "KVarN beats TurboQuant": (
        ("KVarN k4v4", "TurboQuant 4 bits", "own open wide"),
        ("KVarN k4v2", "TurboQuant 3 bits", "open wide"),
        ("KVarN k4v2", "TurboQuant 4 bits", "open wide"),
        ("KVarN k2v2", "TurboQuant 3 bits", "wide"),
    ),
    "KVarN beats plain INT2": (
        ("KVarN k2v2", "kivi int2 G128", "open wide"),
        ("KVarN k2v2", "kivi int2 G32", "wide"),
        ("KVarN k2v2", "int2 per token, rotated", "open wide"),
        ("KVarN k2v2", "k2v2, rotated, not balanced", "open"),
    ),
    "OSCAR beats KIVI at 2 bits": (
        ("OSCAR int2", "kivi int2 G32", "own own/wide"),
        ("OSCAR int2", "kivi int2 G128", "own/wide"),
        ("OSCAR int2", "int2 per token, rotated", "own/wide"),
        ("OSCAR int2", "kivi int2 G128", "open"),
    ),
    "Rotation saves int4 per token": (
        ("int4 per token, rotated", "int4 per token", "open wide"),
        ("q4_0, rotated", "q4_0, not rotated", "open wide"),
    ),
    "fp8 is free": (("fp8", "fp16", "open/own"), ("fp8 per token", "fp16", "open/own")),
    "TurboQuant falls at 3 bits": (
        ("TurboQuant 4 bits", "TurboQuant 3 bits", "own open"),
        ("TurboQuant 3 bits", "fp16", "open/own"),
    ),
    "4over6 improves nvfp4": (("nvfp4 4over6", "nvfp4", "open wide"),),
    "Levels for normal channels beat even ones": (("iq4_nl, rotated", "q4_0, rotated", "open"),),
    "QJL helps TurboQuant": (("TurboQuant 4 bits, QJL", "TurboQuant 4 bits", "open"),),
}
#: what is claimed, and the pairs of lines that test it, the better one first
CLAIMS = tuple(
    (
        claim,
        tuple(
            (f"{better} | {tails.partition('/')[0]}", f"{worse} | {tails.rpartition('/')[2]}")
            for better, worse, compared in pairs
            for tails in compared.split()
        ),
    )
    for claim, pairs in _CLAIMS.items()
)
