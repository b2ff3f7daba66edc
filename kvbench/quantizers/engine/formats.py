"""The engines' formats by name: their bytes, the heads that they fit, and their rotations. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass, field

from kvbench.errors import ConfigError, nearest
from kvbench.quantizers.spec import Side

#: channels per block of octave's keys
OCTAVE_BLOCK = 64
#: rotations of llama.cpp's caches since 2026: of keys, of values, and the number that must divide the head
LLAMA_CPP = ("hadamard", "blocks:64", 64)


@dataclass(frozen=True)
class Layout:
    """The form in which an engine stores the key, or the value, of a token and head.

    Args:
        parameters: bytes of each parameter of a group.
        group: number of channels per group; None for all channels of a head.
        narrow: number of last channels that have only 3 bits (octave).
        padding: number of unused bytes per token and head.
    """

    bits: int
    parameters: tuple[int, ...] = ()
    group: int | None = None
    narrow: int = 0
    padding: int = 0

    def codes(self, head_dim: int) -> int:
        """Return the bits of the codes of a token and head."""
        return (head_dim - self.narrow) * self.bits + self.narrow * 3

    def scales(self, head_dim: int) -> int:
        """Return the bytes of the parameters of a token and head, with padding."""
        return head_dim // (self.group or head_dim) * sum(self.parameters) + self.padding


@dataclass(frozen=True)
class EngineFormat:
    """A cache format of an engine.

    Args:
        layout: what is stored per token, head and side; octave's depends on the head (:meth:`layouts`).
        key: rotation of keys before they are quantized (a name of :class:`kvbench.rotation.spec.RotationSpec`);
            likewise `value`.
        multiple: number that must divide the channels of a head.
        power: True if the number of channels per head must be a power of two.
        rotated_multiple: the engine rotates a head only if this number divides its channels.
    """

    name: str
    engine: str
    layout: Layout
    key: str = "none"
    value: str = "none"
    multiple: int = 2
    power: bool = False
    rotated_multiple: int = field(default=1, kw_only=True)

    @property
    def octave(self) -> bool:
        """True for the octave formats, which store the key and the value of a token in one piece of memory."""
        return self.name.startswith("octave")

    @property
    def scaled(self) -> bool:
        """True if all keys, or all values, of a layer share one scale."""
        return self.name in ("fp8", "nvfp4", "nvfp4_4over6")

    @property
    def compact(self) -> bool:
        """True if keys have 3 bits in all channels and one scale (``octave_k3v3_compact``)."""
        return self.name.endswith("compact")

    def rotation(self, side: Side, head_dim: int) -> str:
        """Return the name of the engine's rotation of keys or values, for heads of `head_dim` channels."""
        if head_dim % self.rotated_multiple:
            return "none"
        return self.key if side == "key" else self.value

    def layouts(self, head_dim: int, rope_dim: int) -> tuple[Layout, Layout]:
        """Return the layouts of keys and of values; `rope_dim` (see :meth:`check`) counts only for octave."""
        if not self.octave:
            return self.layout, self.layout
        bits, wide = self.layout.bits, 0 if self.compact else rope_dim
        block = head_dim if self.compact else OCTAVE_BLOCK
        key = Layout(4, (2,), block, narrow=head_dim - wide) if wide else Layout(3, (2,), block)
        slot = key.codes(head_dim) // 8 + key.scales(head_dim) + head_dim * bits // 8 + 2
        return key, Layout(bits, (2,), padding=-slot % (4 if self.compact else 8))

    def unknown(self, attention: str) -> str:
        """Return why attention cannot be computed as an engine does, or an empty string if it can.

        Args:
            attention: ``engine``, or ``engine_cuda`` for llama.cpp's CUDA back end.
        """
        if attention == "engine_cuda" and self.name not in ON_CUDA:
            return f"is llama.cpp's attention on CUDA, which reads {', '.join(ON_CUDA)}, but not {self.name}"
        if self.name not in ATTENDED:
            return f"is known for keys in {', '.join(ATTENDED)}, but not in {self.name}"
        return ""

    def check(self, head_dim: int, rope_dim: int) -> None:
        """Raise ConfigError if the engine does not have the format for heads of this size.

        Args:
            rope_dim: number of first channels of a head to which the model applies RoPE.
        """
        reason = self.misfit(head_dim, rope_dim)
        if reason:
            fit = [name for name, form in FORMATS.items() if not form.misfit(head_dim, rope_dim)]
            raise ConfigError("method.format", self.name, reason, allowed=fit, hint="method.format=int8_per_token_head")

    def misfit(self, head_dim: int, rope_dim: int) -> str:
        """Return why heads of this size do not fit the format, or an empty string; arguments as for :meth:`check`."""
        if head_dim % self.multiple:
            return f"needs heads of a multiple of {self.multiple} channels; the model's have {head_dim}"
        if self.octave and rope_dim % self.multiple:
            return f"needs RoPE over a multiple of {self.multiple} channels of a head; here it turns {rope_dim}"
        if self.power and head_dim & (head_dim - 1):
            return f"needs heads of a power of two of channels; the model's have {head_dim}"
        return ""


#: formats over whose keys kvbench can compute attention as their engines do, and what of llama.cpp's its CUDA reads
ATTENDED = ("q8_0", "q8_0_cpu", "q5_1", "q5_0", "q4_1", "q4_0", "iq4_nl", "fp8", "ultraquant_4bit")
ON_CUDA = ("q8_0", "q5_1", "q5_0", "q4_1", "q4_0")


def _llama(name: str, bits: int, parameters: int = 1) -> EngineFormat:
    key, value, multiple = LLAMA_CPP
    layout = Layout(bits, (2,) * parameters, 32)
    return EngineFormat(name, "llama.cpp", layout, key, value, multiple=32, rotated_multiple=multiple)


#: every format by its name
FORMATS: dict[str, EngineFormat] = {
    form.name: form
    for form in (
        EngineFormat("int8_per_token_head", "vLLM", Layout(8, (4,))),
        EngineFormat("fp8_per_token_head", "vLLM", Layout(8, (4,))),
        EngineFormat("fp8", "vLLM, SGLang, TensorRT-LLM", Layout(8)),
        EngineFormat("int4_per_token_head", "vLLM", Layout(4, (4,)), "rht_unnormalised", "rht_unnormalised"),
        EngineFormat("int8fork", "a fork of SGLang", Layout(8, (4, 4))),
        EngineFormat("saw_int4", "SAW-INT4 (a fork of SGLang)", Layout(4, (4, 4)), "blocks:16"),
        EngineFormat("fp4_mx_block16", "SGLang", Layout(4, (1,), 16), multiple=16),
        EngineFormat("nvfp4", "vLLM, SGLang, TensorRT-LLM", Layout(4, (1,), 16), multiple=16),
        EngineFormat("nvfp4_4over6", "vLLM, FlashInfer", Layout(4, (1,), 16), multiple=16),
        _llama("q8_0", 8),
        _llama("q8_0_cpu", 8),
        _llama("q5_1", 5, 2),
        _llama("q5_0", 5),
        _llama("q4_1", 4, 2),
        _llama("q4_0", 4),
        _llama("iq4_nl", 4),
        EngineFormat("ultraquant_4bit", "vLLM (AMD)", Layout(4, (1,), 32), "hadamard", multiple=32, power=True),
        EngineFormat("octave_k3v4", "vLLM (AMD)", Layout(4, (2,)), "octave", "octave", multiple=64),
        EngineFormat("octave_k3v3", "vLLM (AMD)", Layout(3, (2,)), "octave", "octave", multiple=64),
        EngineFormat("octave_k3v3_compact", "vLLM (AMD)", Layout(3, (2,)), "octave", "octave", multiple=64, power=True),
    )
}


def parse_engine_formats(text: str, name: str = "method.format") -> tuple[EngineFormat, EngineFormat]:
    """Return the formats of keys and of values that a text names: one for both sides, or ``KEY/VALUE``.

    Raises:
        ConfigError: a name is unknown, or only one of the two is an octave format.
    """
    names = text.split("/")
    unknown = [part for part in names if part not in FORMATS]
    if len(names) > 2 or unknown:
        problem = "is not a format" if unknown else "names more than two formats"
        if unknown and len(names) > 1:
            problem = f"'{unknown[0]}' {problem}"
        near = nearest(unknown[0], FORMATS) if unknown else None
        hint = f"did you mean '{near}'? " if near else ""
        hint += "Name one format for keys and values, or one for each, such as q8_0/q4_0"
        raise ConfigError(name, text, problem, allowed=FORMATS, hint=hint)
    key, value = FORMATS[names[0]], FORMATS[names[-1]]
    if key != value and (key.octave or value.octave):
        raise ConfigError(
            name, text, "mixes an octave format with another: octave stores keys and values in one slot",
            hint="method.format=octave_k3v4",
        )  # fmt: skip
    return key, value
