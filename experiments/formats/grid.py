"""Settings of the table of formats: each quantizer at its method's own exact tokens, and at two common ones.

A gain counts only at equal bytes and equal exact tokens, the *tail*: what a method keeps in full precision may be worth
more than how it quantizes the rest.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

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


@dataclass(frozen=True)
class Row:
    """One line of the table.

    Args:
        name: label of the quantizer.
        family: colour in the plot.
        tail: tokens in full precision.
        setting: method, quantizer and options (:mod:`kvbench.config.setting`).
    """

    name: str
    family: str
    tail: Tail
    setting: str

    @property
    def key(self) -> str:
        """Name and tail, which tell a line from all others."""
        return f"{self.name} | {self.tail}"


@dataclass(frozen=True)
class Quantizer:
    """A quantizer and the options that give it each tail.

    Args:
        name: label of the quantizer.
        family: colour in the plot.
        setting: method, quantizer and options.
        tails: options of each tail, the authors' own first; a tail that is not listed is not run, as it equals another.
        timed: setting to be timed in steps of a large model, if it is not `setting`; None if there is none: no kernel
            reads the format, or it needs a calibration of that model.
    """

    name: str
    family: str
    setting: str
    tails: tuple[tuple[Tail, str], ...]
    timed: str | None = ""

    @property
    def to_time(self) -> str | None:
        """The setting to be timed in steps of a large model, or None."""
        return self.setting if self.timed == "" else self.timed


def _tokenwise() -> tuple[tuple[Tail, str], ...]:
    """Return the tails of a quantizer that packs token by token, and whose own tail is none."""
    return (("open", "sinks=0:window=0"), ("wide", "sinks=64:window=256"))


def _kivi(group: int) -> tuple[tuple[Tail, str], ...]:
    """Return the tails of KIVI with keys in groups of tokens."""
    return (
        ("own", ""),
        ("open", f"residual={group}"),
        ("wide", f"residual={group}:sinks=64:window=256"),
    )


def _tiles() -> tuple[tuple[Tail, str], ...]:
    """Return the tails of KVarN, whose own has 128 first tokens and the newest ones of an incomplete tile."""
    return (("own", ""), ("open", "sinks=0"), ("wide", "sinks=64:window=256"))


def _turbo() -> tuple[tuple[Tail, str], ...]:
    """Return the tails of TurboQuant, whose own is exact in the first two and the last two layers."""
    return (("own", ""), ("open", "boundary=0"), ("wide", "boundary=0:sinks=64:window=256"))


def _engine(name: str, form: str) -> Quantizer:
    """Return an engine's format that a kernel reads."""
    return Quantizer(name, "engine", f"engine:format={form}", _tokenwise())


def _torch(name: str, form: str) -> Quantizer:
    """Return an engine's format that only the reference path reads."""
    return Quantizer(name, "engine", f"engine:format={form}", _tokenwise(), timed=None)


def _only(name: str, form: str) -> Quantizer:
    """Return an engine's format that only the reference path reads, run with one tail only: none."""
    return Quantizer(name, "engine", f"engine:format={form}", (("open", ""),), timed=None)


QUANTIZERS = (
    # 8 bits
    _engine("int8 per token", "int8_per_token_head"),
    _engine("fp8", "fp8"),
    _engine("fp8 per token", "fp8_per_token_head"),
    _engine("q8_0, rotated", "q8_0"),
    Quantizer("TurboQuant k8v4", "turboquant", "turboquant:format=k8v4", _turbo()),
    # 4 bits
    Quantizer("kivi int4 G32", "kivi", "kivi:int4", _kivi(32)),
    Quantizer("kivi int4 G128", "kivi", "kivi:int4_g128", _kivi(128)),
    Quantizer("int4 per token", "plain", "kivi:int4_token:residual=1", _tokenwise()),
    Quantizer("int4 per token, rotated", "plain", f"kivi:int4_token:residual=1:{_TURN}", _tokenwise()),
    _engine("vLLM int4 per token", "int4_per_token_head"),
    _torch("SAW-INT4", "saw_int4"),
    _engine("q4_0, rotated", "q4_0"),
    Quantizer("q4_0, not rotated", "engine", f"engine:format=q4_0:{_PLAIN}", _tokenwise()),
    _engine("nvfp4", "nvfp4"),
    _engine("nvfp4 4over6", "nvfp4_4over6"),
    _torch("fp4_mx_block16", "fp4_mx_block16"),
    _torch("UltraQuant", "ultraquant_4bit"),
    _only("q5_1, rotated", "q5_1"),
    _only("q4_1, rotated", "q4_1"),
    _only("iq4_nl, rotated", "iq4_nl"),
    _only("Octave k3v4", "octave_k3v4"),
    Quantizer(
        "TurboQuant 4 bits, QJL",
        "turboquant",
        "turboquant:format=4bit_nc:qjl=true:nc_at=none:boundary=0",
        (("open", ""),),
        timed=None,
    ),
    Quantizer("TurboQuant 4 bits", "turboquant", "turboquant:format=4bit_nc", _turbo()),
    Quantizer("KVarN k4v4", "kvarn", "kvarn:int4_g128", _tiles()),
    Quantizer("kvquant 4, 1% outliers", "kvquant", "kvquant", (("own", ""),), timed=None),
    # 2 to 3.5 bits
    Quantizer("TurboQuant k3v4", "turboquant", "turboquant:format=k3v4_nc", _turbo()),
    Quantizer("TurboQuant 3 bits", "turboquant", "turboquant:format=3bit_nc", _turbo()),
    Quantizer("KVarN k4v2", "kvarn", "kvarn", _tiles()),
    Quantizer("KVarN k2v2", "kvarn", "kvarn:int2_g128", _tiles()),
    Quantizer(
        "k2v2, rotated, not balanced", "kvarn", "kvarn:int2_g128:iterations=0", (("open", "sinks=0"),), timed=None
    ),
    Quantizer("kivi int2 G32", "kivi", "kivi:int2", _kivi(32)),
    Quantizer("kivi int2 G128", "kivi", "kivi:int2_g128", _kivi(128)),
    Quantizer("int2 per token", "plain", "kivi:int2_token:residual=1", _tokenwise()),
    Quantizer("int2 per token, rotated", "plain", f"kivi:int2_token:residual=1:{_TURN}", _tokenwise()),
    Quantizer(
        "OSCAR int2",
        "oscar",
        "oscar",
        (("own", ""), ("open", "sinks=0:window=0")),
        # a matrix is a matrix: no calibration of the large model is needed to time it
        timed="oscar:basis=rotation:rotation.key=hadamard:rotation.value=hadamard",
    ),
)


def rows() -> Iterator[Row]:
    """Yield the lines of the table, fp16 first."""
    yield Row("fp16", "fp16", "own", "fp16")
    for quantizer in QUANTIZERS:
        for tail, options in quantizer.tails:
            yield Row(quantizer.name, quantizer.family, tail, ":".join(filter(None, (quantizer.setting, options))))


#: lines by name and tail
ROWS = {row.key: row for row in rows()}


def key(name: str, tail: Tail) -> str:
    """Return the key of a line."""
    return f"{name} | {tail}"


#: claims of papers and engines: what is claimed, and the pairs of lines that test it, the better one first
CLAIMS: tuple[tuple[str, tuple[tuple[str, str], ...]], ...] = (
    (
        "KVarN beats TurboQuant",
        (
            (key("KVarN k4v4", "own"), key("TurboQuant 4 bits", "own")),
            (key("KVarN k4v4", "open"), key("TurboQuant 4 bits", "open")),
            (key("KVarN k4v4", "wide"), key("TurboQuant 4 bits", "wide")),
            (key("KVarN k4v2", "open"), key("TurboQuant 3 bits", "open")),
            (key("KVarN k4v2", "wide"), key("TurboQuant 3 bits", "wide")),
            (key("KVarN k4v2", "open"), key("TurboQuant 4 bits", "open")),
            (key("KVarN k4v2", "wide"), key("TurboQuant 4 bits", "wide")),
            (key("KVarN k2v2", "wide"), key("TurboQuant 3 bits", "wide")),
        ),
    ),
    (
        "KVarN beats plain INT2",
        (
            (key("KVarN k2v2", "open"), key("kivi int2 G128", "open")),
            (key("KVarN k2v2", "wide"), key("kivi int2 G128", "wide")),
            (key("KVarN k2v2", "wide"), key("kivi int2 G32", "wide")),
            (key("KVarN k2v2", "open"), key("int2 per token, rotated", "open")),
            (key("KVarN k2v2", "wide"), key("int2 per token, rotated", "wide")),
            (key("KVarN k2v2", "open"), key("k2v2, rotated, not balanced", "open")),
        ),
    ),
    (
        "OSCAR beats KIVI at 2 bits",
        (
            (key("OSCAR int2", "own"), key("kivi int2 G32", "own")),
            (key("OSCAR int2", "own"), key("kivi int2 G32", "wide")),
            (key("OSCAR int2", "own"), key("kivi int2 G128", "wide")),
            (key("OSCAR int2", "own"), key("int2 per token, rotated", "wide")),
            (key("OSCAR int2", "open"), key("kivi int2 G128", "open")),
        ),
    ),
    (
        "Rotation saves int4 per token",
        (
            (key("int4 per token, rotated", "open"), key("int4 per token", "open")),
            (key("int4 per token, rotated", "wide"), key("int4 per token", "wide")),
            (key("q4_0, rotated", "open"), key("q4_0, not rotated", "open")),
            (key("q4_0, rotated", "wide"), key("q4_0, not rotated", "wide")),
        ),
    ),
    ("fp8 is free", ((key("fp8", "open"), "fp16 | own"), (key("fp8 per token", "open"), "fp16 | own"))),
    (
        "TurboQuant falls at 3 bits",
        (
            (key("TurboQuant 4 bits", "own"), key("TurboQuant 3 bits", "own")),
            (key("TurboQuant 4 bits", "open"), key("TurboQuant 3 bits", "open")),
            (key("TurboQuant 3 bits", "open"), "fp16 | own"),
        ),
    ),
    (
        "4over6 improves nvfp4",
        (
            (key("nvfp4 4over6", "open"), key("nvfp4", "open")),
            (key("nvfp4 4over6", "wide"), key("nvfp4", "wide")),
        ),
    ),
    ("Levels for normal channels beat even ones", ((key("iq4_nl, rotated", "open"), key("q4_0, rotated", "open")),)),
    ("QJL helps TurboQuant", ((key("TurboQuant 4 bits, QJL", "open"), key("TurboQuant 4 bits", "open")),)),
)
