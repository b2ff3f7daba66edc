"""The cache formats of inference engines: every token is packed by itself, as vLLM, SGLang or llama.cpp store it.

Source: the caches of vllm-project/vllm, sgl-project/sglang and ggml-org/llama.cpp; the files, rules and bytes of each
format are in :mod:`kvbench.quantizers.engine`. By default formats are used as their engines use them: all tokens are
packed, heads are rotated where the engine rotates them, and the token of a decode step is stored before it attends, so
that it reads its own stored form. Prompt tokens attend to each other in full precision, as with the other methods;
engines that read the prompt from the cache do what ``prefill=quantized`` does.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from copy import copy
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from kvbench.errors import ConfigError
from kvbench.methods.base import SIDES, Method, Side
from kvbench.methods.byte_parts import KVBytes, Setting
from kvbench.methods.layer_map import EXACT, parse_layer_map
from kvbench.methods.tokenwise import FormatMethod, StoredFormat
from kvbench.quantizers.engine.formats import EngineFormat, Layout, parse_engine_formats
from kvbench.quantizers.spec import FormatSpec
from kvbench.rotation.spec import RotationSpec
from kvbench.util.schema import bounded

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

    from kvbench.cache import KVCache, Prompts
    from kvbench.cache.layer import KVLayer
    from kvbench.cache.segments.base import Segment
    from kvbench.calibration.scales import Scales
    from kvbench.quantizers.affine import AffineQuantizer
    from kvbench.quantizers.engine.arithmetic import Arithmetic
    from kvbench.rotation import Transform

#: name of the engine among those of formats
LLAMA_CPP = "llama.cpp"
#: model types whose queries and keys llama.cpp's converters interleave (``LlamaModel.permute`` in its ``conversion``)
INTERLEAVED = {
    *("llama", "mistral", "mixtral", "ministral", "granite", "granitemoe", "arcee", "smollm3", "apertus"),
    *("arctic", "chameleon", "deci", "internlm2", "llada", "nanbeige"),
}
#: rotation that stands for the one that the engine applies before a format
OWN = "engine"


@dataclass(frozen=True)
class EngineRotation(RotationSpec):
    """The rotations of keys and of values; by default those of the engine.

    Args:
        key: ``engine``, or a rotation as in :class:`RotationSpec`, such as ``none``.
        value: likewise.
    """

    key: str = OWN
    value: str = OWN

    extra: ClassVar[dict[Side, tuple[str, ...]]] = {"key": (OWN,), "value": (OWN,)}


@dataclass(kw_only=True)
class Engine(FormatMethod):
    """A cache format of an inference engine, in which every token is packed by itself.

    Args:
        format: name of the format (docs/formats.md), or two names, ``KEY/VALUE``.
        rotation: rotations of keys and of values; ``engine``: the ones that the engine applies before the format.
        sinks: number of first tokens that stay in full precision (0 in the engines).
        window: number of newest tokens that stay in full precision (0 in the engines).
        key_scale: the one scale of all keys of a layer, for ``fp8`` and ``nvfp4``. 1 unless it is calibrated.
        value_scale: that of all values.
        attention: how attention over the stored tokens is computed. ``exact``: in the model's precision; ``engine``:
            with the rounding of the engine's kernels (docs/formats.md), for llama.cpp those of its CPU back end;
            ``engine_cuda``: with the rounding of llama.cpp's CUDA back end.
        query_scale: with ``attention=engine``, the one scale of all queries of a layer, for ``fp8``.
        calibration: path of a file made by ``python -m kvbench.calibrate method=engine``, whose scales of queries, keys
            and values take the place of the three options above, for ``fp8``. None: these options.
        rope_dim: number of first channels of a head to which the model applies RoPE, for octave; None: the model's.
    """

    format: str = "int4_per_token_head"
    rotation: EngineRotation = field(default_factory=EngineRotation)
    key_scale: float = bounded(1.0, above=0.0)
    value_scale: float = bounded(1.0, above=0.0)
    attention: Literal["exact", "engine", "engine_cuda"] = "exact"
    query_scale: float = bounded(1.0, above=0.0)
    calibration: str | None = None
    rope_dim: int | None = None
    #: share of a head's channels to which the model applies RoPE, set when the model is known
    rope_share: float = field(default=1.0, init=False, repr=False, compare=False)
    #: True if GGUF files of the model interleave the channels of queries and keys, set when the model is known
    gguf_order: bool = field(default=False, init=False, repr=False, compare=False)

    widths: ClassVar[tuple[str, ...]] = ("format",)

    # -- formats of single layers -----------------------------------------------------------------------------------

    def in_format(self, form: str) -> Method:
        """Return the method for layers with the format `form`: ``fp16``, or a value of `format`."""
        if form == EXACT:
            return super().in_format(form)
        twin = copy(self)
        twin.format, twin.layers = form, None
        parse_engine_formats(form, "method.layers")
        return twin

    def layer_identity(self) -> list[Any]:
        """Return the map of formats (:attr:`layers`) for a run's identity."""
        return [
            [entry.first, entry.last, None if entry.form == EXACT else entry.form]
            for entry in parse_layer_map(self.layers)
        ]

    # -- the format -------------------------------------------------------------------------------------------------

    def side(self, side: Side) -> EngineFormat:
        """Return the format of the keys or of the values."""
        return parse_engine_formats(self.format)[SIDES.index(side)]

    def turned(self, channels: int) -> int:
        """Return the number of first channels, of the `channels` of a head, to which RoPE is applied."""
        return self.rope_dim if self.rope_dim is not None else int(channels * self.rope_share)

    def rotation_of(self, side: Side, channels: int) -> str:
        """Return the name of the rotation of keys or values, for heads of `channels` channels."""
        name = self.rotation.of(side)
        return self.side(side).rotation(side, channels) if name == OWN else name

    def transform(self, layer: KVLayer, side: Side) -> Transform | None:
        """Return the basis in which `layer` stores its keys or its values: by default, the engine's."""
        from kvbench.rotation import transform

        channels = layer.key_dim if side == "key" else layer.value_dim
        name = self.rotation_of(side, channels)
        if side == "key" and self.interleaves and self.rotation.of(side) == OWN:
            from kvbench.rotation.named import interleaved

            return interleaved(name, channels, self.turned(channels), layer.device)
        # compact octave rotates whole heads of keys, as octave otherwise does with values
        whole = self.rotation.of(side) == OWN and self.side(side).compact
        return transform(name, "value" if whole else side, channels, layer.device, layer.index)

    def formats(self) -> tuple[FormatSpec, FormatSpec]:
        """Return the packed formats of keys and of values; for octave, whose bits differ, see :meth:`layouts`."""
        key, value = (
            StoredFormat(bits=form.layout.bits, group_size=form.layout.group or "head_dim", axis="token", side=side)
            for side, form in zip(SIDES, parse_engine_formats(self.format), strict=True)
        )
        return key, value

    def layouts(self, channels: int) -> tuple[Layout, Layout]:
        """Return what is stored per token and head, for keys and for values of `channels` channels."""
        key, value = parse_engine_formats(self.format)
        turned = self.turned(channels)
        return key.layouts(channels, turned)[0], value.layouts(channels, turned)[1]

    def make_quantizer(self, side: Side, channels: int, scale: float | torch.Tensor | None = None) -> AffineQuantizer:
        """Return the quantizer of keys or values, for heads of `channels` channels; `scale` None: the method's own."""
        from kvbench.quantizers.engine.build import build

        own = self.key_scale if side == "key" else self.value_scale
        return build(
            self.side(side),
            side,
            channels,
            self.turned(channels),
            scale=own if scale is None else scale,
            rotated=self.rotation_of(side, channels) != "none",
        )

    def packed_segment(self, layer: KVLayer, side: Side) -> Segment:
        """Return the packed segment of a layer, whose quantizer may have calibrated scales."""
        if self.calibration is None:
            return super().packed_segment(layer, side)
        quantizer = self.make_quantizer(side, layer.key_dim, self.scale(layer, side))
        return self.packed(layer, side, quantizer, capacity=max(layer.expected_length() - self.sinks, 0))

    def scale(self, layer: KVLayer, side: str) -> float | torch.Tensor:
        """Return the scale of a layer's queries, keys or values: the calibrated one, or the method's for all layers."""
        if self.calibration is None:
            return float(getattr(self, f"{side}_scale"))
        rank = layer.progress.rank[0] * layer.heads
        scale: float | torch.Tensor = self.scales().of(side, layer.index, slice(rank, rank + layer.heads))
        return scale

    def scales(self) -> Scales:
        """Return the calibration file's content; an unchanged file is read once."""
        from kvbench.calibration.scales import Scales
        from kvbench.calibration.stored import load_stored

        return load_stored(Path(str(self.calibration)).expanduser(), Scales)

    def identity(self) -> dict[str, Any]:
        """Return the base class's entries and, with a calibration file, ``calibration``: a hash of its content."""
        if self.calibration is None:
            return super().identity()
        digest = hashlib.sha256(Path(self.calibration).expanduser().read_bytes()).hexdigest()[:16]
        return {**super().identity(), "calibration": digest}

    def new_cache(
        self, model: PreTrainedModel, prompts: Prompts | None = None, max_length: int | None = None
    ) -> KVCache:
        """Check that a calibration was made with this model, and return an empty cache (:meth:`Method.new_cache`)."""
        if self.calibration is not None:
            self.scales().check_model(model)
        return super().new_cache(model, prompts, max_length)

    def packed_bytes(self, at: Setting, count: int, form: FormatSpec) -> KVBytes:
        """Return the bytes of `count` packed tokens in the engine, counting only their keys or only their values."""
        assert isinstance(form, StoredFormat)
        layout, rows = self.layouts(at.channels)[SIDES.index(form.side)], at.heads * count
        return KVBytes(codes=-(-rows * layout.codes(at.channels) // 8), scales=rows * layout.scales(at.channels))

    # -- attention --------------------------------------------------------------------------------------------------

    @property
    def interleaves(self) -> bool:
        """True if keys are stored with their channels in the order of llama.cpp, whose attention is computed."""
        return self.attention != "exact" and self.gguf_order and self.side("key").engine == LLAMA_CPP

    def arithmetic(self, layer: KVLayer, count: int) -> Arithmetic | None:
        """Return the rounding of the engine's attention; None with ``attention=exact``."""
        if self.attention == "exact":
            return None
        from kvbench.quantizers.engine.arithmetic import arithmetic_of

        return arithmetic_of(self.side("key"), self.attention, count, self.scale(layer, "query"))

    def hyperparameters(self) -> dict[str, Any]:
        """Return the hyper-parameters by name; newer ones only if they are not their defaults, so that ids hold."""
        named = super().hyperparameters()
        added = {"attention": "exact", "query_scale": 1.0, "calibration": None}
        return {name: value for name, value in named.items() if name not in added or value != added[name]}

    # -- checks -----------------------------------------------------------------------------------------------------

    def check(self, head_dim: int | None = None, max_length: int | None = None) -> None:
        """Raise ConfigError if there is no such format, or if it does not fit heads of `head_dim` channels."""
        parse_engine_formats(self.format)
        for side in SIDES:
            scale = getattr(self, f"{side}_scale")
            if scale != 1 and not self.side(side).scaled:
                raise ConfigError(
                    f"method.{side}_scale",
                    scale,
                    f"has no effect: {self.side(side).name} has no scale of all {side}s",
                    hint=f"method.{side}_scale=1.0",
                )
        self.check_attention()
        if self.rope_dim is not None and not 0 <= self.rope_dim <= (head_dim or self.rope_dim):
            most = f"the head's {head_dim}" if head_dim else "the channels of a head"
            raise ConfigError(
                "method.rope_dim",
                self.rope_dim,
                "is not a number of channels of a head",
                allowed=f"0 to {most}, or null for the model's own",
                hint="method.rope_dim=null",
            )
        if self.rope_dim is not None and not any(self.side(side).octave for side in SIDES):
            raise ConfigError(
                "method.rope_dim",
                self.rope_dim,
                f"has no effect with method.format={self.format}: only octave formats depend on RoPE",
                hint="method.rope_dim=null",
            )
        super().check(head_dim, max_length)
        if head_dim:
            for side in SIDES:
                self.side(side).check(head_dim, self.turned(head_dim))
                RotationSpec(**{side: self.rotation_of(side, head_dim)}).check(head_dim)

    def check_attention(self) -> None:
        """Raise ConfigError if `attention`, the scale of queries or a calibration cannot be had, or has no effect."""
        if self.attention != "exact":
            # llama.cpp's CUDA back end reads keys and values in these formats alone
            sides = SIDES if self.attention == "engine_cuda" else SIDES[:1]
            if reason := next(filter(None, (self.side(side).unknown(self.attention) for side in sides)), None):
                raise ConfigError("method.attention", self.attention, reason, hint="method.attention=exact")
            key, value = (self.side(side) for side in SIDES)
            if key != value and {key.engine, value.engine} != {LLAMA_CPP}:
                raise ConfigError(
                    "method.attention",
                    self.attention,
                    f"is that of one engine, but none reads keys in {key.name} and values in {value.name}",
                    hint=f"method.format={key.name}, or method.attention=exact",
                )
            for name, plain in (("own", "stored"), ("window", 0), ("sinks", 0)):
                if getattr(self, name) != plain:
                    raise ConfigError(
                        "method.attention",
                        self.attention,
                        f"is that of an engine, which keeps no token exact; method.{name} is {getattr(self, name)}",
                        hint=f"method.{name}={plain}, or method.attention=exact",
                    )
        fp8 = all(self.side(side).name == "fp8" for side in SIDES)
        if self.query_scale != 1 and not (fp8 and self.attention == "engine"):
            raise ConfigError(
                "method.query_scale", self.query_scale, "has no effect: queries are not rounded to fp8",
                hint="method.format=fp8 method.attention=engine",
            )  # fmt: skip
        if self.calibration is None:
            return
        if not fp8:
            raise ConfigError(
                "method.calibration", self.calibration, f"holds scales of fp8, but the format is {self.format}",
                hint="method.format=fp8",
            )  # fmt: skip
        if {self.key_scale, self.value_scale, self.query_scale} != {1.0}:
            raise ConfigError(
                "method.calibration", self.calibration, "holds the scales that are also given as options",
                hint="leave out method.key_scale, method.value_scale and method.query_scale",
            )  # fmt: skip
        if any(self.rotation_of(side, 1) != "none" for side in SIDES):
            raise ConfigError(
                "method.calibration", self.calibration, "holds scales of heads that are not rotated",
                hint="method.rotation.key=none method.rotation.value=none",
            )  # fmt: skip
        if not Path(self.calibration).expanduser().is_file():
            raise ConfigError(
                "method.calibration", self.calibration, "does not exist",
                hint=f"python -m kvbench.calibrate method=engine --model MODEL --text FILE --out {self.calibration}",
            )  # fmt: skip

    def suit(self, numbers: Mapping[str, Any]) -> None:
        """Read from a model's ``config.json`` to which share of a head's channels RoPE is applied."""
        self.rope_share = rope_share(numbers)
        self.gguf_order = numbers.get("model_type") in INTERLEAVED


def rope_share(config: Any) -> float:
    """Return the share of a head's channels to which RoPE is applied; 1 if a model's configuration does not say."""
    rope = config.get("rope_parameters") or {}
    share = config.get("partial_rotary_factor") or config.get("rotary_pct") or rope.get("partial_rotary_factor")
    return float(share or 1.0)
